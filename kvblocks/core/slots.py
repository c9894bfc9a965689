"""Slots: how a sequence gets blocks for more of its tokens, and how blocks that fill up become cached.

This is one module, so that all calls follow the order that keeps a failing call harmless. First, check whether the pool
can serve the call. Then compute digests, since the caller's hash function may raise. Only then touch, take, copy and
cache blocks. From there on a change is under way, which the manager ends, since it has more to change.

Copy on write: a token must not be written to a block that somebody else may read. This concerns only the last, partly
filled block of a sequence that was forked or truncated. The sequence gets a block of its own, and `copies` says what to
copy. After a sequence's `delayed_from` or `lost_from` no call caches anything; `commit` reports how much is written.
docs/design/core/when-cached.md has the rules.

`fits_below` and `tail_owner` of sequences are written here, in `groups`, and by the sequence itself.
"""

from array import array
from collections.abc import Iterable
from typing import Any

from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_from, cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING, Change
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.hooks import Digests, SoftHolds
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.core.steps import append_each, remove_last, shared_indices
from kvblocks.core.tokens import pack_tokens
from kvblocks.stats import Refusal

TableChange = tuple[int, int, int, int]
"""A table entry that a step changed: (index of the sequence in the step, group, index in its table, block id)."""

LostBlocks = dict[KVCacheBlock, int]
"""Blocks whose KV is lost, each with a number of tokens, from a prompt's first one, that are written nevertheless."""

Commit = tuple[Sequence, int, int, Digests | None]
"""What `commit` caches: (sequence, how many tokens are reported as written, first block that isn't cached, digests)."""


class SlotAllocator:
    """Gives the blocks of `pool` to the sequences of a manager, for one group of layers.

    `groups.slots` overrides what differs with several groups.

    soft_holds: owners that may give blocks up for sequences; None: there are none. num_taken_blocks: blocks taken so
    far. copies: (group, source, destination) of blocks to copy, in order, since last taken. smallest_block_size: the
    smallest block size of a group. groups: the groups that the engine described, in its order; None: it described none.
    num_groups: how many groups there are. has_side_groups: whether there are groups besides a primary one. alignment:
    the largest block size of a group; every hit is a multiple of it. primary_group: the number of the group whose table
    is `Sequence.blocks`; None: there is none. last_refusal: why the last call that returned None did so.
    num_limited_tokens: tokens that the primary group had cached for starting sequences, but another group had not.
    num_started: how many calls have begun a sequence. num_queries and so on: as in `CacheStats`; the manager counts.
    """

    def __init__(self, pool: BlockPool, change: Change) -> None:
        self.pool = pool
        self._change = change
        self._index = pool.index
        self._block_size = self.smallest_block_size = pool.index.block_size
        self.soft_holds: SoftHolds | None = None
        self.groups: tuple[Any, ...] | None = None
        self.num_groups = 1
        self.has_side_groups = False
        self.alignment = self._block_size
        self.primary_group: int | None = 0
        self.last_refusal: Refusal | None = None
        self.num_taken_blocks = self.num_limited_tokens = self.num_started = 0
        self.num_queries = self.num_hits = self.num_queried_tokens = self.num_hit_tokens = 0
        self.copies: list[tuple[int, int, int]] = []

    def find_hit(self, sequence: Sequence, matched: list[KVCacheBlock], source: HitSource) -> CacheHit:
        """Return the longest hit in `matched`, the primary group's cached blocks. Changes nothing."""
        return CacheHit(sequence, matched, len(matched) * self._block_size, sequence.num_tokens, source)

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(1) for one group."""
        return [self._index.num_cached_blocks]

    # Room for tokens.

    def start(
        self, sequence: Sequence, epoch: Epoch | None, end: int, num_slots: int, hit: CacheHit | None, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Give a sequence without blocks the blocks of `hit`, and new blocks for the rest of `num_slots` slots.

        epoch: the sequence's epoch from now on; None: cache nothing of it. end: how many tokens will be computed; slots
        from `end` on may be for tokens that aren't known. delayed: whether the tokens are delayed.

        Returns the new blocks; None, with nothing changed, when the pool can't serve the call. O(blocks).
        """
        held = [] if hit is None else hit.blocks
        num_held = len(held)
        num_missing = -(-num_slots // self._block_size) - num_held
        if num_missing < 0:  # noqa: PLR1730  # max() costs three times as much
            num_missing = 0
        if num_missing + num_held > self.pool.queue.num_free_blocks and self._note_refusal(num_missing, held):
            return None
        digests = None
        if self._index.needs_digests and not delayed:
            digests = digests_ahead(self._index, sequence, epoch, held, num_held, end)
        sequence.owner = sequence.tail_owner = self._change  # first, so that no other manager can take it
        if sequence.session is not None and self.pool.chooser is not None:
            self.pool.chooser.note_starting(sequence)
        if held:
            self.pool.touch(held)
            sequence.blocks += held
            num_hit = num_held * self._block_size
            sequence.num_readonly_tokens = sequence.num_given_tokens = sequence.first_own_token = num_hit
        sequence.epoch = epoch
        sequence.num_cached_blocks = num_held
        blocks = self._take(num_missing, sequence) if num_missing else []
        sequence.blocks += blocks
        self._count(sequence, end)
        if delayed and num_held * self._block_size < end:
            sequence.delayed_from = num_held * self._block_size
        elif end // self._block_size > num_held:
            cache_full_blocks(self._index, sequence, digests)
        return blocks

    def grow(
        self,
        sequence: Sequence,
        end: int,
        num_slots: int,
        num_in_flight: int = 0,  # noqa: ARG002  # windows need it
        *,
        delayed: bool,
    ) -> list[KVCacheBlock] | None:
        """Give a sequence that has blocks new ones for `num_slots` slots. See `start`. O(new blocks).

        num_in_flight: how many of its last tokens with slots belong to steps that are still running.
        """
        shared = self._shared_index(sequence, sequence.num_computed_tokens)
        num_missing = self._num_missing_blocks(sequence, num_slots)
        num_wanted = num_missing + (shared is not None)
        if num_wanted > self.pool.queue.num_free_blocks and self._note_refusal(num_wanted, []):
            return None
        digests = None if delayed else self._digests_ahead(sequence, end)
        self._change.state = CHANGING
        if delayed:
            self._delay(sequence, sequence.num_computed_tokens)
        return self._grow(sequence, end, num_missing, shared, digests)

    def append(
        self, sequence: Sequence, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Add packed tokens, with slots for them, to a sequence that has slots for all its tokens. See `start`."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        shared = self._shared_index(sequence, num_before)
        num_missing = self._num_missing_blocks(sequence, end)
        num_wanted = num_missing + (shared is not None)
        if num_wanted > self.pool.queue.num_free_blocks and self._note_refusal(num_wanted, []):
            return None
        digests = self._append_tokens(sequence, tokens, delayed=delayed)
        return self._grow(sequence, end, num_missing, shared, digests)

    def append_one(self, sequence: Sequence, token: int) -> list[KVCacheBlock] | None:
        """`append` of one token. Only while no digest is needed, and if the sequence has a `tail_owner`.

        O(1), and O(block_size) when the token fills a block.
        """
        block_size = self._block_size
        num_tokens = len(sequence.tokens) + 1
        blocks: list[KVCacheBlock] = []
        if num_tokens > len(sequence.blocks) * block_size:
            if not self.pool.queue.num_free_blocks and self._note_refusal(1, []):
                return None
            sequence.append_checked(token)
            if self.pool.queue.num_free_blocks:
                self.num_taken_blocks += 1
                blocks = [self.pool.take_one()]
            else:
                blocks = self._take(1, sequence)
            sequence.blocks += blocks
        else:
            sequence.append_checked(token)
        sequence.num_computed_tokens = num_tokens
        offset = num_tokens % block_size
        if offset:
            sequence.fits_below = num_tokens - offset + block_size - 1  # `_count`, inlined
        else:
            cache_filled_blocks(self._index, [sequence])
        return blocks

    # A whole decode step.

    def append_step(  # noqa: PLR0912  # one pass over the step; calls would cost each token more
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        indices: dict[Sequence, int],
        *,
        delayed: bool,
    ) -> list[TableChange] | None:
        """Add one token to each sequence, as `append` does. Returns the changes of block tables.

        at_boundary: the sequences at a boundary. indices: each sequence's index in `sequences`.
        """
        block_size = self._block_size
        growing: list[Sequence] = []
        filling: list[Sequence] = []
        others: list[Sequence] = []
        unsure: list[Sequence] = []
        for sequence in at_boundary:
            num_tokens = sequence.num_computed_tokens
            if sequence.tail_owner is None:
                unsure.append(sequence)
            if num_tokens % block_size == block_size - 1:
                filling.append(sequence)
            elif num_tokens < len(sequence.blocks) * block_size:
                others.append(sequence)
            if num_tokens >= len(sequence.blocks) * block_size:
                growing.append(sequence)
        shared = shared_indices(unsure, self._shared_index) if unsure else {}
        if shared:
            growing = sorted({*growing, *shared}, key=indices.__getitem__)
        if len(growing) > self.pool.queue.num_free_blocks and self._note_step_refusal(len(growing), tokens):
            return None
        append_each(self._change, sequences, tokens)
        if delayed:
            for sequence in sequences:
                self._delay(sequence, sequence.num_computed_tokens - 1)
        digests = self._digests_of_step(sequences, at_boundary) if self._index.needs_digests else {}
        changes = self._grow_by_one(growing, shared, indices)
        for sequence in others:
            if sequence.tail_owner is not None:  # None: others leave its block in this step; the next step asks again
                self._count(sequence, sequence.num_computed_tokens)
        if digests:
            for sequence in filling:
                cache_full_blocks(self._index, sequence, digests[sequence])
        else:
            cache_filled_blocks(self._index, filling)
        return changes

    # Sequences that part, go back and end.

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Make `twin` an owner of all blocks that hold the sequence's computed tokens. O(blocks)."""
        num_tokens, block_size = sequence.num_computed_tokens, self._block_size
        twin.blocks += sequence.blocks[: -(-num_tokens // block_size)]
        self.pool.touch(twin.blocks)
        twin.epoch = sequence.epoch
        twin.num_computed_tokens = num_tokens
        twin.num_cached_blocks = sequence.num_cached_blocks
        twin.delayed_from, twin.lost_from = sequence.delayed_from, sequence.lost_from
        twin.num_readonly_tokens = max(sequence.num_readonly_tokens, num_tokens // block_size * block_size)
        twin.num_given_tokens = twin.first_own_token = num_tokens
        twin.owner = self._change
        if self._parts_in_block(num_tokens):
            sequence.tail_owner = None
            sequence.fits_below = 0
        else:
            twin.tail_owner = self._change

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the blocks that the first `num_tokens` tokens don't need. All tokens stay. O(blocks released)."""
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)
        block_size = self._block_size
        dropped = sequence.truncate_blocks(-(-num_tokens // block_size))
        num_left = min(sequence.num_computed_tokens, num_tokens)
        sequence.num_computed_tokens = num_left
        sequence.settle()
        sequence.num_cached_blocks = min(sequence.num_cached_blocks, num_left // block_size)
        # Rounded down to a whole block: the last, partly filled one may be written once nobody else reads it.
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, num_left // block_size * block_size)
        sequence.num_given_tokens = min(sequence.num_given_tokens, num_left)
        sequence.first_own_token = min(sequence.first_own_token, num_left)
        sequence.tail_owner = None  # its last block may be cached or shared
        sequence.fits_below = 0
        self.pool.release_table(dropped, 0, sequence)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence. O(blocks)."""
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)
        self._release_tables(sequence)
        sequence.reset_blocks()

    def unwritten_blocks(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks that are lost if a sequence wrote only its first `num_tokens` tokens. O(their number).

        These are its own blocks, whoever cached them. Blocks that came with a hit or a fork aren't among them, nor are
        blocks with delayed tokens, which only `cache_blocks` reports as written.
        """
        return sequence.unwritten(sequence.blocks, 0, self._block_size, num_tokens)

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> int | None:
        """Return the first token of a sequence that is lost with these blocks; None if it owns none. O(its blocks)."""
        if lost.keys().isdisjoint(sequence.blocks):
            return None
        size = self._block_size
        return min([max(i * size, lost[block]) for i, block in enumerate(sequence.blocks) if block in lost])

    def lose(self, lost: LostBlocks, sequences: Iterable[Sequence]) -> None:
        """For sequences that own lost blocks, mark everything from the first lost token on as lost.

        O(blocks of the sequences).
        """
        for sequence in sequences:
            first = self.first_lost_in(sequence, lost)
            if first is not None:
                sequence.lose(first, self._block_size)

    def digests_from(self, sequence: Sequence, first: int, num_tokens: int) -> Digests | None:
        """Return the digests that `cache_from` will record for full blocks from `first` on. Changes nothing."""
        return digests_ahead(self._index, sequence, self._index.epoch, sequence.blocks, first, num_tokens)

    def cache_from(self, sequence: Sequence, first: int, num_tokens: int, digests: Digests | None) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill, from block `first` on. O(blocks)."""
        cache_from(self._index, sequence, first, num_tokens // self._block_size, digests)

    def prepare_commit(self, sequence: Sequence, num_tokens: int) -> Commit:
        """Return what `commit` has to do when a sequence reports its first `num_tokens` tokens as written. Changes
        nothing.

        A sequence from before a reset caches nothing. If the hash function raises, it raises here. O(blocks to cache).
        """
        num_written = sequence.num_written_after(num_tokens)
        if sequence.epoch is not self._index.epoch:
            return sequence, num_tokens, num_written // self._block_size, None
        first = sequence.num_cached_blocks
        return sequence, num_tokens, first, self.digests_from(sequence, first, num_written)

    def commit(self, prepared: Commit) -> None:
        """Begin a change by caching the blocks that a sequence's written tokens fill. O(blocks to cache)."""
        sequence, num_reported, first, digests = prepared
        self._change.state = CHANGING
        num_written = sequence.num_written_after(num_reported)
        sequence.settle(num_reported)
        if first < num_written // self._block_size:
            self.cache_from(sequence, first, num_written, digests)

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return a sequence's block tables. O(1)."""
        return [sequence.blocks]

    def count_missing(self, sequence: Sequence, num_slots: int, hit: CacheHit | None) -> int:
        """Return how many free blocks `num_slots` slots need, counting the hit's free blocks. Changes nothing."""
        if sequence.owner is not None:
            shared = self._shared_index(sequence, sequence.num_computed_tokens)
            grows = num_slots > sequence.num_computed_tokens and shared is not None
            return self._num_missing_blocks(sequence, num_slots) + grows
        held = [] if hit is None else hit.blocks
        num_missing = max(0, -(-num_slots // self._block_size) - len(held))
        return num_missing + sum([block.ref_cnt == 0 for block in held])

    # Parts of the above.

    def _note_refusal(self, num_blocks: int, touched: list[KVCacheBlock]) -> bool:
        """Return whether a call that owns `touched` and needs `num_blocks` more is refused. If so, note why."""
        num_free = self.pool.queue.num_free_blocks - sum([block.ref_cnt == 0 for block in touched])
        if num_blocks <= num_free:
            return False
        refusal: Refusal | None = Refusal(num_blocks, num_free, 0, 0)
        if self.soft_holds is not None:
            refusal = self.soft_holds.find_refusal(num_blocks, touched)
        if refusal is not None:
            self.last_refusal = refusal
        return refusal is not None

    def _note_step_refusal(self, num_blocks: int, tokens: list[Any]) -> bool:
        """`_note_refusal` for a step. An invalid token raises InvalidTokensError instead, and no refusal is noted."""
        pack_tokens(tokens)
        return self._note_refusal(num_blocks, [])

    def _release_tables(self, sequence: Sequence) -> None:
        num_cached = sequence.num_cached_blocks if sequence.epoch is self._index.epoch else 0
        self.pool.release_table(sequence.blocks, num_cached, sequence)

    def _parts_in_block(self, num_tokens: int) -> bool:
        """Whether sequences that fork after `num_tokens` share a block that both would write to."""
        return num_tokens % self._block_size != 0

    def _append_tokens(
        self, sequence: Sequence, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> Digests | None:
        """Begin a change by adding packed tokens. Returns the digests of the blocks that they fill, if needed.

        If the hash function raises, the tokens are removed and no change is under way.
        """
        num_before, fits_below = sequence.num_tokens, sequence.fits_below
        self._change.state = CHANGING
        sequence.append_packed(tokens)
        if delayed:
            self._delay(sequence, num_before)
        try:
            return self._digests_ahead(sequence, sequence.num_tokens)
        except BaseException:
            sequence.truncate_tokens(num_before)
            sequence.fits_below = fits_below
            sequence.settle()
            self._change.end()
            raise

    def _grow(
        self, sequence: Sequence, end: int, num_missing: int, shared: int | None, digests: Digests | None
    ) -> list[KVCacheBlock]:
        """Add blocks to a sequence, count its first `end` tokens as computed, and cache the blocks that they fill."""
        blocks = self._add_blocks(sequence, num_missing, shared)
        self._count(sequence, end)
        cache_full_blocks(self._index, sequence, digests)
        return blocks

    def _count(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Set how many tokens are computed, for a sequence with slots for them, and set `fits_below`."""
        sequence.num_computed_tokens = num_computed_tokens
        size = self.smallest_block_size
        offset = num_computed_tokens % size
        if offset and num_computed_tokens == len(sequence.tokens):
            sequence.fits_below = num_computed_tokens - offset + size - 1

    def _delay(self, sequence: Sequence, num_tokens: int) -> None:
        """Delay the tokens after the first `num_tokens`, if no earlier one is delayed."""
        if sequence.delayed_from is None:
            sequence.delayed_from = num_tokens

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(sequence.blocks))

    def _shared_index(self, sequence: Sequence, position: int) -> int | None:
        """Return the table index of the block for the token at `position` if that block is shared, else None.

        A shared block must not be written to. After None, the block isn't looked at again until the sequence is forked
        or truncated.
        """
        if sequence.tail_owner is not None:
            return None
        if position % self._block_size and sequence.blocks[position // self._block_size].is_shared:
            return position // self._block_size
        sequence.tail_owner = sequence.owner
        return None

    def _add_blocks(self, sequence: Sequence, num_missing: int, shared: int | None) -> list[KVCacheBlock]:
        """Take `num_missing` new blocks for the end of a sequence, and one to replace the shared block, if any."""
        if shared is None:
            blocks = self._take(num_missing, sequence)
            sequence.blocks += blocks
            return blocks
        blocks = self._take(num_missing + 1, sequence)
        self._replace(sequence, shared, blocks[0])
        sequence.blocks += blocks[1:]
        return blocks

    def _replace(self, sequence: Sequence, shared: int, block: KVCacheBlock) -> None:
        source = sequence.blocks[shared]
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)
        sequence.replace_block(shared, block)
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, shared * self._block_size)
        sequence.num_given_tokens = min(sequence.num_given_tokens, shared * self._block_size)
        sequence.tail_owner = sequence.owner
        self.pool.release_table([source])
        self.copies.append((0, source.block_id, block.block_id))

    def _take(self, num_blocks: int, sequence: Sequence) -> list[KVCacheBlock]:
        """Take new blocks from the pool. This many must be free, or given up by soft holds. O(num_blocks)."""
        if not num_blocks:
            return []
        pool = self.pool
        self.num_taken_blocks += num_blocks
        if self._index.needs_takers:
            for watcher in self._index.watchers:
                watcher.note_taking(num_blocks, sequence.sequence_id)
        if num_blocks > pool.queue.num_free_blocks and self.soft_holds is not None:
            self.soft_holds.give_up(num_blocks - pool.queue.num_free_blocks)
        return pool.take(num_blocks)

    def _digests_ahead(self, sequence: Sequence, end: int) -> Digests | None:
        if not self._index.needs_digests or sequence.delayed_from is not None or sequence.lost_from is not None:
            return None
        return digests_ahead(self._index, sequence, sequence.epoch, sequence.blocks, sequence.num_cached_blocks, end)

    def _digests_of_step(
        self, sequences: list[Sequence], at_boundary: list[Sequence]
    ) -> dict[Sequence, Digests | None]:
        """Return the digests of the blocks that the last tokens of sequences at a boundary fill.

        If the hash function raises, the last token of each of `sequences` is removed.
        """
        try:
            return {sequence: self._digests_ahead(sequence, sequence.num_tokens) for sequence in at_boundary}
        except BaseException:
            remove_last(self._change, sequences)
            raise

    def _grow_by_one(
        self, growing: list[Sequence], shared: dict[Sequence, int], indices: dict[Sequence, int]
    ) -> list[TableChange]:
        changes: list[TableChange] = []
        if not growing:
            return changes
        block_size = self._block_size
        for sequence, block in zip(growing, self._take_for(growing)):  # noqa: B905  # as many
            position = len(sequence.blocks)
            if shared and sequence in shared:
                position = shared[sequence]
                self._replace(sequence, position, block)
            else:
                sequence.blocks.append(block)
                sequence.fits_below = (position + 1) * block_size - 1
            changes.append((indices[sequence], 0, position, block.block_id))
        return changes

    def _take_for(self, sequences: list[Sequence]) -> list[KVCacheBlock]:
        """Take a block for each sequence; one by one if a watcher needs to know for whom. O(sequences)."""
        if not self._index.needs_takers:
            return self._take(len(sequences), sequences[0])
        return [block for sequence in sequences for block in self._take(1, sequence)]
