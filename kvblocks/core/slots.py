"""Slots: how a sequence gets blocks for more of its tokens, and how blocks that fill up become cached.

This is one module, so that all calls follow the order that keeps a failing call harmless. First, check whether the pool
can serve the call. Then compute digests, since the caller's hash function may raise. Only then touch, take, copy and
cache blocks. From there on a change is under way, which the manager ends, since it has more to change.

This is the path of one group with full attention: a sequence's blocks are those of its primary table. What else a model
needs are components (`component`), in a tuple that is empty here, and asked at the edges of blocks alone.

Copy on write: a token must not be written to a block that somebody else may read. This concerns only the last, partly
filled block of a sequence that was forked or truncated. The sequence gets a block of its own, and `copies` says what to
copy. After a sequence's `delayed_from` or `lost_from` no call caches anything; `commit` reports how much is written.
docs/design/core/when-cached.md has the rules.

`fits_below` and `tail_owner` of sequences are written here, in `side_slots`, and by the sequence itself.
"""

from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_from, cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING, IDLE, Change
from kvblocks.core.component import Component, LostBlocks
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.hooks import Digests, SoftHolds
from kvblocks.core.layout import GroupLayout
from kvblocks.core.longest_hit import longest_hit
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.side_slots import SideSlots
from kvblocks.core.states import RecurrentStates
from kvblocks.core.steps import TableChange, append_each, remove_last, shared_indices
from kvblocks.core.tokens import pack_tokens
from kvblocks.hashing.scheme import HashScheme
from kvblocks.stats import Refusal

Commit = tuple[Sequence, int, int, Digests | None]
"""What `commit` caches: (sequence, how many tokens are reported as written, first block that isn't cached, digests)."""


class SlotAllocator:
    """Gives the blocks of `pool` to the sequences of a manager."""

    def __init__(self, pool: BlockPool, change: Change) -> None:
        self.pool = pool
        self.change = change
        self._index = pool.index
        self._block_size = pool.index.block_size
        self._attached = pool.index.attached
        layout = None if self._attached is None else self._attached.layout
        self.layout = layout
        """What follows from the groups; None: there is one, with full attention."""
        self.smallest_block_size = self._block_size if layout is None else layout.smallest_block_size
        """The smallest block size of a group that has a table."""
        self.alignment = self._block_size if layout is None else layout.alignment
        """The largest block size of a group; every hit is a multiple of it."""
        self.num_groups = 1 if layout is None else len(layout.groups)
        self.primary_group: int | None = 0 if layout is None else layout.primary
        """The number of the group whose table is `Sequence.blocks`; None: there is none."""
        self.has_one_table = layout is None or not layout.side_groups
        """Whether a sequence has no block table but the primary one."""
        self.soft_holds: SoftHolds | None = None
        """Owners that may give blocks up for sequences; None: there are none."""
        self.last_refusal: Refusal | None = None
        """Why the last call that returned None did so."""
        self.num_taken_blocks = 0
        """How many blocks were taken so far."""
        self.num_limited_tokens = 0
        """Tokens that the primary group had cached for starting sequences, but another group had not."""
        self.copies: list[tuple[int, int, int]] = []
        """(group, source, destination) of blocks to copy, in order, since last taken."""
        self.side = None if self._attached is None else SideSlots(self, self._attached)
        """The component of groups beside the primary one; None: there are none."""
        self.states = None if layout is None or layout.state is None else RecurrentStates(self)
        """The component of layers that keep a state; None where no group has any."""
        self.components: tuple[Component, ...] = tuple([it for it in (self.side, self.states) if it is not None])

    @property
    def is_debugging(self) -> bool:
        """Whether each change is followed by a check. O(1)."""
        return self.change.rest != IDLE

    def find_hit(self, sequence: Sequence, matched: list[KVCacheBlock], source: HitSource) -> CacheHit:
        """Return the longest hit in `matched`, the primary group's cached blocks. Changes nothing."""
        if self._attached is not None:
            return longest_hit(self._attached, sequence, matched, sequence.num_tokens, source)
        return CacheHit(sequence, matched, len(matched) * self._block_size, sequence.num_tokens, source)

    # Slots for tokens.

    def start(
        self, sequence: Sequence, epoch: Epoch | None, end: int, num_slots: int, hit: CacheHit | None, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Give a sequence without blocks the blocks of `hit`, and new blocks for the rest of `num_slots` slots.

        epoch: the sequence's epoch from now on; None: cache nothing of it. end: how many tokens will be computed; slots
        from `end` on may be for tokens that aren't known. delayed: whether the tokens are delayed.

        Returns the new blocks; None, with nothing changed, when the pool can't serve the call. O(blocks).
        """
        if self.side is not None:
            return self.side.start(sequence, epoch, end, num_slots, hit, delayed=delayed)
        held = [] if hit is None else hit.blocks
        num_held = len(held)
        num_missing = -(-num_slots // self._block_size) - num_held
        if num_missing < 0:  # noqa: PLR1730  # max() costs three times as much
            num_missing = 0
        if num_missing + num_held > self.pool.queue.num_free_blocks and self.note_refusal(num_missing, held):
            return None
        digests = None
        if self._index.needs_digests and not delayed:
            digests = digests_ahead(self._index, sequence, epoch, held, num_held, end)
        sequence.owner = sequence.tail_owner = self.change  # first, so that no other manager can take it
        if sequence.session is not None and self.pool.chooser is not None:
            self.pool.chooser.note_starting(sequence)
        if held:
            self.pool.touch(held)
            sequence.blocks += held
            num_hit = num_held * self._block_size
            sequence.num_readonly_tokens = sequence.num_given_tokens = sequence.first_own_token = num_hit
        sequence.epoch = epoch
        sequence.num_cached_blocks = num_held
        blocks = self.take(num_missing, sequence) if num_missing else []
        sequence.blocks += blocks
        self.count(sequence, end)
        if delayed and num_held * self._block_size < end:
            sequence.delayed_from = num_held * self._block_size
        elif end // self._block_size > num_held:
            cache_full_blocks(self._index, sequence, digests)
        return blocks

    def grow(
        self, sequence: Sequence, end: int, num_slots: int, num_in_flight: int = 0, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Give a sequence that has blocks new ones for `num_slots` slots, and give back those that left a window.

        See `start`. O(new blocks + groups).

        num_in_flight: how many of its last tokens with slots belong to steps that are still running.
        """
        side = sequence.side_tables
        if self.side is not None and side is not None:
            return self.side.grow(sequence, side, end, num_slots, num_in_flight, delayed=delayed)
        shared = self._shared_index(sequence, sequence.num_computed_tokens)
        num_missing = self._num_missing_blocks(sequence, num_slots)
        num_wanted = num_missing + (shared is not None)
        if num_wanted > self.pool.queue.num_free_blocks and self.note_refusal(num_wanted, []):
            return None
        digests = None if delayed else self.digests_ahead(sequence, end)
        self.change.state = CHANGING
        if delayed:
            self.delay(sequence, sequence.num_computed_tokens)
        return self._grow(sequence, end, num_missing, shared, digests)

    def append(
        self, sequence: Sequence, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Add packed tokens, with slots for them, to a sequence that has slots for all its tokens. See `start`."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        side = sequence.side_tables
        if self.side is not None and side is not None:
            return self.side.append(sequence, side, tokens, delayed=delayed)
        shared = self._shared_index(sequence, num_before)
        num_missing = self._num_missing_blocks(sequence, end)
        num_wanted = num_missing + (shared is not None)
        if num_wanted > self.pool.queue.num_free_blocks and self.note_refusal(num_wanted, []):
            return None
        digests = self.append_packed(sequence, tokens, delayed=delayed)
        return self._grow(sequence, end, num_missing, shared, digests)

    def grow_one(self, sequence: Sequence) -> list[KVCacheBlock] | None:
        """`grow` by one token, the only one that has no slot. Only while no digest is needed, and with a `tail_owner`.

        O(groups), and O(block_size) when the token fills a block.
        """
        num_tokens, block_size, side = sequence.num_computed_tokens + 1, self._block_size, sequence.side_tables
        if self.side is not None and side is not None and side.tables:
            return self.side.grow_one(sequence, side, num_tokens)
        blocks: list[KVCacheBlock] = []
        if num_tokens > len(sequence.blocks) * block_size:
            if self.pool.queue.num_free_blocks:
                self.num_taken_blocks += 1
                blocks = [self.pool.take_one()]
            elif self.note_refusal(1, []):
                return None
            else:
                blocks = self.take(1, sequence)
            sequence.blocks += blocks
        sequence.num_computed_tokens = num_tokens
        offset = num_tokens % block_size
        if offset:
            sequence.fits_below = num_tokens - offset + block_size - 1  # `count`, inlined
        else:
            cache_filled_blocks(self._index, [sequence])
        if self.side is not None and side is not None:
            side.note_primary(blocks)
            self.side.note_one(sequence, side)
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
        if self.side is not None and not self.has_one_table:
            return self.side.append_step(sequences, tokens, at_boundary, indices, delayed=delayed)
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
        if len(growing) > self.pool.queue.num_free_blocks and self.note_step_refusal(len(growing), tokens):
            return None
        append_each(self.change, sequences, tokens)
        if delayed:
            for sequence in sequences:
                self.delay(sequence, sequence.num_computed_tokens - 1)
        digests = self.digests_of_step(sequences, at_boundary) if self._index.needs_digests else {}
        changes = self._grow_by_one(growing, shared, indices)
        for sequence in others:
            if sequence.tail_owner is not None:  # None: others leave its block in this step; the next step asks again
                self.count(sequence, sequence.num_computed_tokens)
        if digests:
            for sequence in filling:
                cache_full_blocks(self._index, sequence, digests[sequence])
        else:
            cache_filled_blocks(self._index, filling)
        if self.side is not None:
            self.side.note_step(sequences, at_boundary, changes)
        return changes

    # Sequences that part, go back and end.

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Make `child` an owner of all blocks that hold the sequence's computed tokens. O(blocks)."""
        num_tokens, block_size = sequence.num_computed_tokens, self._block_size
        child.blocks += sequence.blocks[: -(-num_tokens // block_size)]
        self.pool.touch(child.blocks)
        child.epoch = sequence.epoch
        child.num_computed_tokens = num_tokens
        child.num_cached_blocks = sequence.num_cached_blocks
        child.delayed_from, child.lost_from = sequence.delayed_from, sequence.lost_from
        child.num_readonly_tokens = max(sequence.num_readonly_tokens, num_tokens // block_size * block_size)
        child.num_given_tokens = child.first_own_token = num_tokens
        child.owner = self.change
        if self._parts_in_block(num_tokens):
            sequence.tail_owner = None
            sequence.fits_below = 0
        else:
            child.tail_owner = self.change
        for component in self.components:
            component.fork(sequence, child)

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the blocks that the first `num_tokens` tokens don't need. All tokens stay. O(blocks released).

        If `num_tokens` lies inside the tokens that the sequence loads, the sequence goes back to where these begin.
        """
        for component in self.components:
            num_tokens = component.note_rewinding(sequence, num_tokens)
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
        for component in self.components:
            component.note_rewound(sequence, num_tokens)

    def end_loads(self, sequence: Sequence) -> None:
        """Record that a sequence's loads have arrived: release what it held in case they fail. O(blocks)."""
        for component in self.components:
            component.end_loads(sequence)

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
        lost = sequence.unwritten(sequence.blocks, 0, self._block_size, num_tokens)
        for component in self.components:
            lost += component.unwritten_blocks(sequence, num_tokens)
        return lost

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> int | None:
        """Return the first token of a sequence that is lost with these blocks; None if it owns none. O(its blocks)."""
        starts: list[int] = []
        if not lost.keys().isdisjoint(sequence.blocks):
            size = self._block_size
            starts = [max(i * size, lost[block]) for i, block in enumerate(sequence.blocks) if block in lost]
        for component in self.components:
            starts += component.first_lost_in(sequence, lost)
        return min(starts, default=None)

    def lose(self, lost: LostBlocks, sequences: Iterable[Sequence]) -> None:
        """For sequences that own lost blocks, mark everything from the first lost token on as lost.

        O(blocks of the sequences).
        """
        for sequence in sequences:
            first = self.first_lost_in(sequence, lost)
            if first is not None:
                sequence.lose(first, self._block_size)
            for component in self.components:
                component.lose(sequence, lost)

    def digests_from(self, sequence: Sequence, first: int, num_tokens: int) -> Digests | None:
        """Return the digests that `cache_from` will record for full blocks from `first` on. Changes nothing."""
        return digests_ahead(self._index, sequence, self._index.epoch, sequence.blocks, first, num_tokens)

    def cache_from(self, sequence: Sequence, first: int, num_tokens: int, digests: Digests | None) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill, from block `first` on. O(blocks)."""
        cache_from(self._index, sequence, first, num_tokens // self._block_size, digests)
        for component in self.components:
            component.note_full(sequence, first)

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
        self.change.state = CHANGING
        num_written = sequence.num_written_after(num_reported)
        sequence.settle(num_reported)
        if first < num_written // self._block_size:
            self.cache_from(sequence, first, num_written, digests)
        if self.soft_holds is not None and self.layout is not None:
            self.soft_holds.extend(sequence)  # now, since blocks that a pin lacks may leave the window before `free`

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return a sequence's block tables. O(1)."""
        side = sequence.side_tables
        return [sequence.blocks] if side is None else [sequence.blocks, *side.held()]

    def count_missing(self, sequence: Sequence, num_slots: int, hit: CacheHit | None) -> int:
        """Return how many free blocks `num_slots` slots need, minus those that leave windows first.

        The hit's free blocks count. Changes nothing.
        """
        if self.side is not None:
            return self.side.count_missing(sequence, num_slots, hit)
        if sequence.owner is not None:
            shared = self._shared_index(sequence, sequence.num_computed_tokens)
            grows = num_slots > sequence.num_computed_tokens and shared is not None
            return self._num_missing_blocks(sequence, num_slots) + grows
        held = [] if hit is None else hit.blocks
        num_missing = max(0, -(-num_slots // self._block_size) - len(held))
        return num_missing + sum([block.ref_cnt == 0 for block in held])

    # Parts of the above.

    def note_refusal(self, num_blocks: int, touched: list[KVCacheBlock]) -> bool:
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

    def note_step_refusal(self, num_blocks: int, tokens: list[Any]) -> bool:
        """`_note_refusal` for a step. An invalid token raises InvalidTokensError instead, and no refusal is noted."""
        pack_tokens(tokens)
        return self.note_refusal(num_blocks, [])

    def _release_tables(self, sequence: Sequence) -> None:
        num_cached = sequence.num_cached_blocks if sequence.epoch is self._index.epoch else 0
        self.pool.release_table(sequence.blocks, num_cached, sequence)
        for component in self.components:
            component.release(sequence)

    def _parts_in_block(self, num_tokens: int) -> bool:
        """Whether sequences that fork after `num_tokens` share a block that both would write to."""
        if self.layout is not None and self.layout.has_scratch:
            return True
        return num_tokens % self.alignment != 0

    def append_packed(
        self, sequence: Sequence, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> Digests | None:
        """Begin a change by adding packed tokens. Returns the digests of the blocks that they fill, if needed.

        If the hash function raises, the tokens are removed and no change is under way.
        """
        num_before, fits_below = sequence.num_tokens, sequence.fits_below
        self.change.state = CHANGING
        sequence.append_packed(tokens)
        if delayed:
            self.delay(sequence, num_before)
        try:
            return self.digests_ahead(sequence, sequence.num_tokens)
        except BaseException:
            sequence.truncate_tokens(num_before)
            sequence.fits_below = fits_below
            sequence.settle()
            self.change.end()
            raise

    def _grow(
        self, sequence: Sequence, end: int, num_missing: int, shared: int | None, digests: Digests | None
    ) -> list[KVCacheBlock]:
        """Add blocks to a sequence, count its first `end` tokens as computed, and cache the blocks that they fill."""
        blocks = self._add_blocks(sequence, num_missing, shared)
        self.count(sequence, end)
        cache_full_blocks(self._index, sequence, digests)
        return blocks

    def count(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Set how many tokens are computed, for a sequence with slots for them, and set `fits_below`."""
        sequence.num_computed_tokens = num_computed_tokens
        size = self.smallest_block_size
        offset = num_computed_tokens % size
        if offset and num_computed_tokens == len(sequence.tokens):
            sequence.fits_below = num_computed_tokens - offset + size - 1

    def delay(self, sequence: Sequence, num_tokens: int) -> None:
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
            blocks = self.take(num_missing, sequence)
            sequence.blocks += blocks
            return blocks
        blocks = self.take(num_missing + 1, sequence)
        self.replace_shared(sequence, shared, blocks[0])
        sequence.blocks += blocks[1:]
        return blocks

    def replace_shared(self, sequence: Sequence, shared: int, block: KVCacheBlock) -> None:
        """Put a new block in the place of a shared one of the primary table, and note what to copy there. O(1)."""
        source = sequence.blocks[shared]
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)
        sequence.replace_block(shared, block)
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, shared * self._block_size)
        sequence.num_given_tokens = min(sequence.num_given_tokens, shared * self._block_size)
        sequence.tail_owner = sequence.owner
        self.pool.release_table([source])
        if self.primary_group is not None:  # a virtual block holds nothing that could be copied
            self.copies.append((self.primary_group, source.block_id, block.block_id))

    def take(self, num_blocks: int, sequence: Sequence) -> list[KVCacheBlock]:
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

    def digests_ahead(self, sequence: Sequence, end: int) -> Digests | None:
        """Return the digests that caching a sequence's first `end` tokens will record; None if nothing records them."""
        if not self._index.needs_digests or sequence.delayed_from is not None or sequence.lost_from is not None:
            return None
        return digests_ahead(self._index, sequence, sequence.epoch, sequence.blocks, sequence.num_cached_blocks, end)

    def digests_of_step(self, sequences: list[Sequence], at_boundary: list[Sequence]) -> dict[Sequence, Digests | None]:
        """Return the digests of the blocks that the last tokens of sequences at a boundary fill.

        If the hash function raises, the last token of each of `sequences` is removed.
        """
        try:
            return {sequence: self.digests_ahead(sequence, sequence.num_tokens) for sequence in at_boundary}
        except BaseException:
            remove_last(self.change, sequences)
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
                self.replace_shared(sequence, position, block)
            else:
                sequence.blocks.append(block)
                sequence.fits_below = (position + 1) * block_size - 1
            changes.append((indices[sequence], 0, position, block.block_id))
        return changes

    def _take_for(self, sequences: list[Sequence]) -> list[KVCacheBlock]:
        """Take a block for each sequence; one by one if a watcher needs to know for whom. O(sequences)."""
        if not self._index.needs_takers:
            return self.take(len(sequences), sequences[0])
        return [block for sequence in sequences for block in self.take(1, sequence)]


def make_slots(
    num_blocks: SupportsIndex,
    block_size: int,
    layout: GroupLayout | None,
    hash_scheme: HashScheme,
    change: Change,
    first_block_id: SupportsIndex,
) -> SlotAllocator:
    """Return a manager's slot allocator, with its pool and index. layout: None: one group, with full attention.

    Raises InvalidArgumentError. O(num_blocks).
    """
    index = PrefixIndex(block_size, hash_scheme, layout)
    return SlotAllocator(BlockPool(num_blocks, index, first_block_id), change)
