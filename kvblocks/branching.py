"""Sequences that part and go back: forks that share blocks, rejected tokens, and KV that outlives a reset of the cache.

A block that several sequences read is never written: whoever adds a token to a shared unfilled block gets another
block in its place, and the engine is told what to copy (`slots` does it, `take_copies` tells). Sharing a sequence's
blocks among its samples, with copy on write, is vLLM's PagedAttention.
"""

from collections.abc import Hashable
from typing import SupportsIndex

from kvblocks.arguments import Given, asked_once, check_count
from kvblocks.errors import SequenceStateError
from kvblocks.registration import digests_anew, register_anew
from kvblocks.sequence import Sequence
from kvblocks.sequence_manager import SequenceManager


class BranchingManager(SequenceManager):
    """`SequenceManager` with forks and truncation. A part of `KVCacheManager`; not made by itself."""

    def fork(self, sequence: Given[Sequence], sequence_id: Hashable) -> Sequence:
        """Return a new sequence with the same tokens and keys that shares all blocks which hold them.

        For several samples of one prompt, or beam search. Both go on from there; the first that adds a token to an
        unfilled block which the other still holds gets a block of its own, and `take_copies` says what to copy there.
        Reserved slots are not shared. What is shared must be computed before a token is added to either, and if the
        step that was to compute it dies, both must be aborted.

        Raises SequenceStateError (not this manager's, or an id in use) and InvalidArgumentError. O(tokens + blocks).
        """
        sequence = self._check_owned(sequence, "fork")
        twin = sequence.fork(sequence_id)
        self._claim(twin, "fork")
        num_tokens, block_size = sequence.num_computed_tokens, self.block_size
        twin.blocks += sequence.blocks[: -(-num_tokens // block_size)]
        self._pool.touch(twin.blocks)
        twin.epoch = sequence.epoch
        twin.num_computed_tokens = num_tokens
        twin.num_registered_blocks = sequence.num_registered_blocks
        twin.num_readonly_tokens = max(sequence.num_readonly_tokens, num_tokens // block_size * block_size)
        twin.owner = twin.appender = self
        if self._group_slots is not None:
            self._group_slots.fork(sequence, twin)
        if num_tokens % self._largest_size:
            sequence.appender = twin.appender = None
            sequence.next_edge = 0
        self._in_flight.note(twin)
        self._end()
        return twin

    def truncate(
        self, sequence: Given[Sequence], num_tokens: SupportsIndex, *, num_computed_tokens: SupportsIndex | None = None
    ) -> None:
        """Drop all but the first `num_tokens` tokens of a sequence, such as rejected drafts, and its room beyond them.

        num_tokens: from the prompt's to all known ones. num_computed_tokens: how many have their KV written, at least
        those that are kept; None: all that were given slots, such as drafts that were verified. What is cached beyond
        them leaves the cache, as in `abort`.

        Blocks that aren't needed any more are given back, last first; what was written of them stays cached, and a
        token added later never overwrites it: see `take_copies`. Raises SequenceStateError and InvalidArgumentError.
        With windowed groups it goes back at least to what was computed before the last call that made room for tokens;
        further back only while all that the next token sees is held, else SequenceStateError. O(tokens dropped), and as
        `free` and `abort`.
        """
        num_tokens = asked_once(num_tokens)
        if num_computed_tokens is not None:
            num_computed_tokens = asked_once(num_computed_tokens)
        sequence = self._check_owned(sequence, "truncate")
        end = check_count("num_tokens", num_tokens, sequence.num_prompt_tokens, sequence.num_tokens)
        num_left = min(sequence.num_computed_tokens, end)
        most = written = sequence.num_computed_tokens
        if num_computed_tokens is not None:
            written = check_count("num_computed_tokens", num_computed_tokens, num_left, most)
        if sequence.window_tables is not None:
            sequence.window_tables.check_truncate(num_left, sequence.sequence_id)
        self.begin_change()
        if num_computed_tokens is not None:
            self._forget_unwritten(sequence, written)
        self._retention.extend(sequence)
        dropped = sequence.truncate_blocks(-(-end // self.block_size))
        sequence.truncate_tokens(end)
        sequence.num_computed_tokens = num_left
        sequence.num_registered_blocks = min(sequence.num_registered_blocks, num_left // self.block_size)
        # Down to a whole block: the one that it ends in may be written in place, once nobody else reads it.
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, num_left // self.block_size * self.block_size)
        sequence.appender = None  # the block that it ends in may be cached, or somebody else's too
        sequence.next_edge = 0
        self._pool.release_table(dropped)
        if self._group_slots is not None:
            self._group_slots.truncate(sequence, end)
        self._in_flight.note(sequence)
        self._end()

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) ids of blocks to copy, in order, since the last call, and forget them.

        Only sequences that were forked or truncated need any. The engine copies the blocks' KV in all layers, one pair
        after the other or as if so, before it stores any of the step's keys and values. O(1).
        """
        self.begin_change()
        copies = self._slots.take_copies()
        self._end()
        return copies

    def renew(self, sequence: Given[Sequence]) -> None:
        """Say that the KV of a sequence from before a reset of the cache is valid after it, so that it is cached again.

        For resets that had another reason than new weights, or after computing its KV anew. Its full blocks are
        cached at once, and what it fills later too. Raises SequenceStateError when it isn't this manager's or not from
        before a reset. O(its full blocks).
        """
        sequence = self._check_owned(sequence, "renew")
        if not self.enable_caching or sequence.epoch is self._index.epoch:
            raise SequenceStateError(f"renew: expected a sequence from before a reset of the cache, got {sequence}")
        digests = digests_anew(self._index, sequence)
        self.begin_change()
        register_anew(self._index, sequence, digests)
        if self._group_slots is not None:
            self._group_slots.register_anew(sequence)
        self._end()
