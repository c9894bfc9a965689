"""Sequences whose known tokens don't all have slots yet: what somebody is about to compute.

A block is found by others as soon as it has a slot. What a chunked prefill will only get to in a later step isn't, so
this compares prompts directly: a scheduler can then let a sequence wait for what another one will compute anyway.
"""

from kvblocks.core.caching import find_blocks
from kvblocks.core.change import Changeable
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence

_CHUNK_BLOCKS = 64


class InFlight:
    """The allocated sequences that have tokens without slots, oldest first. index: where they will be cached.

    manager: whose sequences they are.
    """

    __slots__ = ("_manager", "_sequences", "index")

    def __init__(self, index: PrefixIndex, manager: Changeable) -> None:
        self.index = index
        self._manager = manager
        self._sequences: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def note(self, sequence: Sequence) -> None:
        """Take note of a sequence that got slots. O(1)."""
        if sequence.num_computed_tokens < sequence.num_tokens:
            self._sequences[sequence] = None
        elif self._sequences:
            self._sequences.pop(sequence, None)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that gives its blocks back. O(1)."""
        if self._sequences:
            self._sequences.pop(sequence, None)

    def find(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return the sequence that will compute most of what follows this one's cached prefix, and how many blocks.

        Sequences from before a reset of the cache don't count. None when nobody will. Changes nothing. Raises
        CorruptStateError. A lookup, O(sequences in flight), and O(tokens) for those that share the next block; O(1)
        when nothing is in flight.
        """
        self._manager.check_whole()
        if not self._sequences:
            return None
        num_blocks = len(find_blocks(self.index, sequence))
        best: tuple[Sequence, int] | None = None
        for other in self._sequences:
            if other is not sequence and other.epoch is self.index.epoch and _caches(other):
                num_more = self._num_common_blocks(sequence, other, num_blocks) - num_blocks
                if num_more > 0 and (best is None or num_more > best[1]):
                    best = other, num_more
        return best

    def _num_common_blocks(self, one: Sequence, other: Sequence, num_least: int) -> int:
        """Return how many first blocks two sequences have in common; 0 when it isn't more than `num_least`."""
        size = self.index.block_size
        num_blocks = min(one.num_tokens, other.num_tokens) // size
        keys, other_keys = one.encoded_keys(size) or {}, other.encoded_keys(size) or {}
        differing = [block for block in {*keys, *other_keys} if keys.get(block) != other_keys.get(block)]
        num_blocks = min([num_blocks, *differing])
        tokens, other_tokens, size = one.packed_tokens(), other.packed_tokens(), 4 * size
        if num_blocks <= num_least or _differ(tokens, other_tokens, num_least * size, (num_least + 1) * size):
            return 0
        for start in range(0, num_blocks, _CHUNK_BLOCKS):
            end = min(start + _CHUNK_BLOCKS, num_blocks)
            if _differ(tokens, other_tokens, start * size, end * size):
                while not _differ(tokens, other_tokens, start * size, (start + 1) * size):
                    start += 1  # noqa: PLW2901  # a block of the chunk differs
                return start
        return num_blocks


def _caches(sequence: Sequence) -> bool:
    """Whether what the sequence will compute is going to be cached."""
    first = sequence.num_cached_blocks
    return not first or sequence.blocks[first - 1].is_cached


def _differ(tokens: memoryview, other: memoryview, start: int, end: int) -> bool:
    return bytes(tokens[start:end]) != bytes(other[start:end])
