"""Sequences with tokens that are about to be computed, and that a lookup doesn't find yet.

A lookup finds a block as soon as it is full, unless it is delayed. It finds neither tokens that a chunked prefill will
compute in a later step, nor blocks that are cached late. This module therefore compares prompts directly, so that a
scheduler can let a sequence wait for tokens that another one will compute anyway.
"""

from kvblocks.core.caching import find_blocks
from kvblocks.core.change import Change
from kvblocks.core.hit import HitSource
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import num_equal


class InFlight(HitSource):
    """The allocated sequences that have tokens without slots, or delayed tokens, oldest first.

    index: where the tokens will be cached. sequences: a dict used as an ordered set. change: the manager's.
    """

    __slots__ = ("_change", "sequences")

    def __init__(self, index: PrefixIndex, change: Change) -> None:
        super().__init__(index)
        self._change = change
        self.sequences: dict[Sequence, None] = {}

    def note(self, sequence: Sequence) -> None:
        """Add a sequence that got slots if it has tokens in flight; otherwise remove it. O(1)."""
        if sequence.num_written_tokens < sequence.num_tokens:
            self.sequences[sequence] = None
        elif self.sequences:
            self.sequences.pop(sequence, None)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that releases its blocks. O(1)."""
        if self.sequences:
            self.sequences.pop(sequence, None)

    def find_pending(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return who will compute the most blocks after `sequence`'s cached prefix, and how many; None if nobody will.

        Sequences from before a reset of the cache don't count, nor do those that lost KV. Changes nothing. Raises
        CorruptStateError. One lookup, O(sequences in flight), and O(tokens) for each sequence that shares the next
        block; O(1) when nothing is in flight.
        """
        self._change.check_whole()
        if not self.sequences:
            return None
        num_blocks = len(find_blocks(self.index, sequence))
        best: tuple[Sequence, int] | None = None
        for other in self.sequences:
            if other is not sequence and other.epoch is self.index.epoch and other.lost_from is None:
                num_more = self._num_common_blocks(sequence, other, num_blocks) - num_blocks
                if num_more > 0 and (best is None or num_more > best[1]):
                    best = other, num_more
        return best

    def _num_common_blocks(self, one: Sequence, other: Sequence, num_least: int) -> int:
        """Return how many leading blocks two sequences have in common; 0 unless that is more than `num_least`."""
        size = self.index.block_size
        num_blocks = min(one.num_tokens, other.num_tokens) // size
        keys, other_keys = one.encoded_keys(size) or {}, other.encoded_keys(size) or {}
        differing = [block for block in {*keys, *other_keys} if keys.get(block) != other_keys.get(block)]
        num_blocks = min([num_blocks, *differing])
        if num_blocks <= num_least:
            return 0
        start, end = 4 * size * num_least, 4 * size * num_blocks
        tokens, other_tokens = one.packed_tokens(), other.packed_tokens()
        if bytes(tokens[start : start + 4 * size]) != bytes(other_tokens[start : start + 4 * size]):
            return 0  # the next block differs, so the long common beginning needs no comparison
        return num_equal(tokens[:end], other_tokens[:end]) // (4 * size)
