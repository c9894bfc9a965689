"""Slots: how a sequence gets blocks for more of its tokens, and how blocks that fill up become cached.

This is one module, so that all calls follow the order that keeps a failing call harmless. First, check whether the pool
can serve the call. Then compute digests, since the caller's hash function may raise. Only then touch, take, copy and
cache blocks. From there on a change is under way, which the manager ends, since it has more to change.

The fast path is that of one group with full attention: a sequence's blocks are those of its primary table. What other
groups need is in the sequence's side tables (`tables`), if it has some, and the states that layers keep are in
`states`. Both are asked at the edges of blocks alone.

Copy on write: a token must not be written to a block that somebody else may read. This concerns only the last, partly
filled block of a sequence that was forked or truncated. The sequence gets a block of its own, and `copies` says what to
copy. After a sequence's `delayed_from` or `lost_from` no call caches anything; `commit` reports how much is written.
docs/design/core/when-cached.md has the rules.

A block that left a window is worth less than one that was freed at a sequence's end, since only a hit that ends just
after it needs it. It is therefore reused before other cached blocks. The exceptions are blocks that a hit will probably
need, at the sequence's likely hit ends: where its own hit ended, where its prefix differs from what was cached, and
where its prompt ends. docs/design/groups.md says why. Marconi does the same for recurrent layers: it keeps the states
at the points where sequences begin to differ.

`fits_below` and `tail_owner` of sequences are written here, and by the sequence itself.
"""

from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_from, cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING, IDLE, Change
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.hooks import Digests, SoftHolds
from kvblocks.core.layout import GroupLayout
from kvblocks.core.loading import Fallback, Loads
from kvblocks.core.longest_hit import HitParts, longest_hit
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.states import RecurrentStates
from kvblocks.core.steps import append_each, keep_for_last, remove_last, shared_indices
from kvblocks.core.tables import EMPTY, GroupTable, SideTables, side_tables_of
from kvblocks.core.tokens import pack_tokens
from kvblocks.hashing.scheme import HashScheme
from kvblocks.stats import Refusal

TableChange = tuple[int, int, int, int]
"""A table entry that a step changed: (index of the sequence in the step, group, index in its table, block id)."""

LostBlocks = dict[KVCacheBlock, int]
"""Blocks whose KV is lost, each with a number of tokens, from a prompt's first one, that are written nevertheless."""

GAP = KVCacheBlock(-1)
"""A placeholder in a new table for a block that is taken right after."""

_NO_BLOCKS: list[KVCacheBlock] = []

Commit = tuple[Sequence, int, int, Digests | None]
"""What `commit` caches: (sequence, how many tokens are reported as written, first block that isn't cached, digests)."""


class SlotAllocator:
    """Gives the blocks of `pool` to the sequences of a manager."""

    def __init__(self, pool: BlockPool, change: Change) -> None:
        self.pool = pool
        self._change = change
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
        self.states = None if layout is None or layout.state is None else RecurrentStates(self)
        """The states that layers keep; None where no group has any."""

    @property
    def is_debugging(self) -> bool:
        """Whether each change is followed by a check. O(1)."""
        return self._change.rest != IDLE

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
        if self.layout is not None:
            return self._start_with_groups(self.layout, sequence, epoch, end, num_slots, hit, delayed=delayed)
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
        blocks = self.take(num_missing, sequence) if num_missing else []
        sequence.blocks += blocks
        self._count(sequence, end)
        if delayed and num_held * self._block_size < end:
            sequence.delayed_from = num_held * self._block_size
        elif end // self._block_size > num_held:
            cache_full_blocks(self._index, sequence, digests)
        return blocks

    def _start_with_groups(
        self,
        layout: GroupLayout,
        sequence: Sequence,
        epoch: Epoch | None,
        end: int,
        num_slots: int,
        hit: CacheHit | None,
        *,
        delayed: bool,
    ) -> list[KVCacheBlock] | None:
        """`start` where there are groups beside the primary one."""
        states = self.states
        if states is not None and not states.live.free_slots:
            num_free = self.pool.queue.num_free_blocks
            self.last_refusal = Refusal(self.count_missing(sequence, num_slots, hit), num_free, 0, 0, "slots")
            return None
        side, held, touched, num_gaps = _begin(layout, sequence, hit)
        num_hit = 0 if hit is None else len(hit.blocks)
        side.plan_start(len(held), num_slots)
        num_taken = side.num_planned() + num_gaps
        if num_taken + len(held) + len(touched) > self.pool.queue.num_free_blocks:
            in_pool = dict.fromkeys(touched if self.pool.virtual is not None else held + touched)
            if self._note_refusal(num_taken, [*in_pool]):
                return None
        digests = None
        if self._index.needs_digests and not delayed:
            digests = digests_ahead(self._index, sequence, epoch, held, len(held), end)
        sequence.owner = sequence.tail_owner = self._change  # first, so that no other manager can take it
        sequence.side_tables = side
        if sequence.session is not None and self.pool.chooser is not None:
            self.pool.chooser.note_starting(sequence)
        sequence.blocks += held
        if hit is not None:
            self.pool.touch(held)
            self.pool.touch(touched)
            num_held_tokens = len(held) * self._block_size
            sequence.num_readonly_tokens = sequence.num_given_tokens = sequence.first_own_token = num_held_tokens
            if hit.parts is not None:
                self.num_limited_tokens += hit.parts.num_matched * self._block_size - hit.num_readonly_tokens
        sequence.epoch = epoch
        sequence.num_cached_blocks = num_hit
        if delayed and num_hit * self._block_size < end:
            sequence.delayed_from = num_hit * self._block_size
        blocks = self._finish(sequence, side, end, digests)
        if num_gaps:
            blocks = self._fill_gaps(sequence, side) + blocks
        if states is not None:
            states.start(sequence, side, hit, epoch)
        return blocks

    def grow(
        self, sequence: Sequence, end: int, num_slots: int, num_in_flight: int = 0, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Give a sequence that has blocks new ones for `num_slots` slots, and give back those that left a window.

        See `start`. O(new blocks + groups).

        num_in_flight: how many of its last tokens with slots belong to steps that are still running.
        """
        side = sequence.side_tables
        if side is not None:
            side.plan(sequence, sequence.num_computed_tokens, num_slots, num_in_flight)
            if self._is_refused([side]):
                return None
            digests = None if delayed else self._digests_ahead(sequence, end)
            self._change.state = CHANGING
            if delayed:
                self._delay(sequence, sequence.num_computed_tokens)
            self._let_pass(side)
            return self._finish(sequence, side, end, digests)
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
        side = sequence.side_tables
        if side is not None:
            side.plan(sequence, num_before, end, 0)
            if self._is_refused([side]):
                return None
            digests = self._append_tokens(sequence, tokens, delayed=delayed)
            self._let_pass(side)
            return self._finish(sequence, side, end, digests)
        shared = self._shared_index(sequence, num_before)
        num_missing = self._num_missing_blocks(sequence, end)
        num_wanted = num_missing + (shared is not None)
        if num_wanted > self.pool.queue.num_free_blocks and self._note_refusal(num_wanted, []):
            return None
        digests = self._append_tokens(sequence, tokens, delayed=delayed)
        return self._grow(sequence, end, num_missing, shared, digests)

    def grow_one(self, sequence: Sequence) -> list[KVCacheBlock] | None:
        """`grow` by one token, the only one that has no slot. Only while no digest is needed, and with a `tail_owner`.

        O(groups), and O(block_size) when the token fills a block.
        """
        num_tokens, block_size, side = sequence.num_computed_tokens + 1, self._block_size, sequence.side_tables
        if side is not None and side.tables:
            if not self._plan_one(sequence, side, num_tokens):
                return None
            return self._grow_by_planned(sequence, side, num_tokens)
        blocks: list[KVCacheBlock] = []
        if num_tokens > len(sequence.blocks) * block_size:
            if self.pool.queue.num_free_blocks:
                self.num_taken_blocks += 1
                blocks = [self.pool.take_one()]
            elif self._note_refusal(1, []):
                return None
            else:
                blocks = self.take(1, sequence)
            sequence.blocks += blocks
        sequence.num_computed_tokens = num_tokens
        offset = num_tokens % block_size
        if offset:
            sequence.fits_below = num_tokens - offset + block_size - 1  # `_count`, inlined
        else:
            cache_filled_blocks(self._index, [sequence])
        if side is not None:
            side.note_primary(blocks)
            self._note_one(sequence, side)
        return blocks

    def _plan_one(self, sequence: Sequence, side: SideTables, num_tokens: int) -> bool:
        """Plan the slot of token number `num_tokens`. Returns whether the pool can serve that; if not, it notes why."""
        num_wanted = side.plan_one(sequence, num_tokens - 1)
        return num_wanted <= self.pool.queue.num_free_blocks or not self._is_refused([side])

    def _grow_by_planned(self, sequence: Sequence, side: SideTables, num_tokens: int) -> list[KVCacheBlock]:
        """Give a sequence the slot of token number `num_tokens`, as planned."""
        if side.is_passing:
            self._let_pass(side)
        num_wanted = side.num_planned()
        taken = self.take(num_wanted, sequence) if num_wanted else _NO_BLOCKS
        self._fill(sequence, side, taken, 0, None)
        self._end_one(sequence, side, num_tokens)
        return taken if num_wanted else []

    def _end_one(self, sequence: Sequence, side: SideTables, num_tokens: int) -> None:
        """`_end_slots` for one token. No digest may be needed."""
        sequence.num_computed_tokens = num_tokens
        size = self.smallest_block_size
        offset = num_tokens % size
        if offset:
            sequence.fits_below = num_tokens - offset + size - 1  # `_count`, inlined
        if side.layout.has_gaps:
            for table in side.tables:
                table.note_end(num_tokens)
        if not num_tokens % self._block_size:
            first = sequence.num_cached_blocks
            cache_filled_blocks(self._index, [sequence])
            if sequence.num_cached_blocks > first:
                self._note_cached(sequence, side, first)
        if self.states is not None:
            self.states.note_slots(sequence, side)

    def _note_one(self, sequence: Sequence, side: SideTables) -> None:
        """Record a decoded token of a sequence without a table but the primary one."""
        if self.states is not None:
            self.states.note_slots(sequence, side)
        is_cached = sequence.num_cached_blocks * self._block_size == sequence.num_computed_tokens
        if self.soft_holds is not None and is_cached:
            self.soft_holds.extend(sequence)  # now, since a pin may lack the block that the token has filled

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
        if not self.has_one_table:
            return self._append_step_with_groups(sequences, tokens, at_boundary, indices, delayed=delayed)
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
        if self.layout is not None:
            self._note_step(sequences, at_boundary, changes)
        return changes

    def _note_step(self, sequences: list[Sequence], at_boundary: list[Sequence], changes: list[TableChange]) -> None:
        """Record what a step did to sequences without a table but the primary one."""
        for index, _, position, _ in changes:
            sequence = sequences[index]
            side_tables_of(sequence).note_primary([sequence.blocks[position]])
        for sequence in at_boundary:
            self._note_one(sequence, side_tables_of(sequence))

    def _append_step_with_groups(
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        indices: dict[Sequence, int],
        *,
        delayed: bool,
    ) -> list[TableChange] | None:
        """`append_step` where sequences have side tables."""
        sides: list[SideTables] = []
        numbers: list[int] = []
        num_wanted, is_unsure = 0, False
        for sequence in at_boundary:
            side = side_tables_of(sequence)
            sides.append(side)
            is_unsure = is_unsure or sequence.tail_owner is None
            number = side.plan_one(sequence, sequence.num_computed_tokens)
            numbers.append(number)
            num_wanted += number
        if is_unsure:
            keep_for_last(at_boundary)
            numbers = [side.num_planned() for side in sides]
        if is_unsure or num_wanted > self.pool.queue.num_free_blocks:
            num_wanted = self._num_taken_for(sides)
            if num_wanted > self.pool.queue.num_free_blocks and self._note_step_refusal(num_wanted, tokens):
                return None
        append_each(self._change, sequences, tokens)
        if delayed:
            for sequence in sequences:
                self._delay(sequence, sequence.num_computed_tokens - 1)
        digests = self._digests_of_step(sequences, at_boundary) if self._index.needs_digests else {}
        for side in sides:
            if side.is_passing:
                self._let_pass(side)
        changes: list[TableChange] = []
        # All are taken before a fill gives back what it copies from.
        taken = [self.take(n, s) if n else _NO_BLOCKS for s, n in zip(at_boundary, numbers, strict=True)]
        for sequence, side, blocks in zip(at_boundary, sides, taken, strict=True):
            self._fill(sequence, side, blocks, indices[sequence], changes)
        for sequence, side in zip(at_boundary, sides, strict=True):
            if digests:
                self._count(sequence, sequence.num_computed_tokens)
                self._end_slots(sequence, side, digests[sequence])
            else:
                self._end_one(sequence, side, sequence.num_computed_tokens)
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
        child.owner = self._change
        if self._parts_in_block(num_tokens):
            sequence.tail_owner = None
            sequence.fits_below = 0
        else:
            child.tail_owner = self._change
        if sequence.side_tables is not None:
            self._fork_side_tables(sequence.side_tables, sequence, child)

    def _fork_side_tables(self, side: SideTables, sequence: Sequence, child: Sequence) -> None:
        copied = child.side_tables = SideTables(side.layout, side.likely_ends)
        for table, child_table in zip(side.tables, copied.tables, strict=True):
            child_table.begin_as(table, child.num_computed_tokens)
            self.pool.touch(child_table.held)
        if side.fallback is not None:
            copied.fallback = side.fallback
            for _, blocks in side.fallback.tables:
                self.pool.touch(blocks)
        if self.states is not None:
            self.states.fork(sequence, child, copied)

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the blocks that the first `num_tokens` tokens don't need. All tokens stay. O(blocks released).

        If `num_tokens` lies inside the tokens that the sequence loads, the sequence goes back to where these begin.
        """
        side = sequence.side_tables
        if self.states is not None:
            self.states.note_rewinding(sequence)
        if side is not None and side.fallback is not None and num_tokens < side.fallback.end:
            num_tokens = min(num_tokens, side.fallback.start)
            dropped_tables = [table.blocks for table in side.tables]
            for table, (first, blocks) in zip(side.tables, side.fallback.tables, strict=True):
                table.begin(first, blocks)
            side.fallback = None
            for blocks in dropped_tables:
                self.pool.release_table(blocks, 0, sequence)
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
        if side is not None:
            for table in side.tables:
                gone = table.held
                if num_tokens:
                    gone = table.truncate(-(-num_tokens // table.side_group.block_size))
                else:
                    table.begin(0, [])
                self.pool.release_table(gone, 0, sequence)
        if self.states is not None:
            self.states.note_rewound(sequence)

    def end_loads(self, sequence: Sequence) -> None:
        """Record that a sequence's loads have arrived: release what it held in case they fail. O(blocks)."""
        if sequence.side_tables is not None:
            for blocks in sequence.side_tables.end_loads():
                self.pool.release_table(blocks)
        if self.states is not None:
            self.states.end_loads(sequence)

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
        if sequence.side_tables is not None:
            for table in sequence.side_tables.tables:
                unwritten = sequence.unwritten(table.blocks, table.num_dead, table.side_group.block_size, num_tokens)
                lost += [block for block in unwritten if block is not EMPTY]
        return lost

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> int | None:
        """Return the first token of a sequence that is lost with these blocks; None if it owns none. O(its blocks)."""
        starts: list[int] = []
        if not lost.keys().isdisjoint(sequence.blocks):
            size = self._block_size
            starts = [max(i * size, lost[block]) for i, block in enumerate(sequence.blocks) if block in lost]
        if sequence.side_tables is not None:
            for side_group, index, block in sequence.side_tables.owned():
                if block in lost:
                    starts.append(max(index * side_group.block_size, lost[block]))
            if self.states is not None:
                starts += self.states.first_lost_in(sequence, lost)
        return min(starts, default=None)

    def lose(self, lost: LostBlocks, sequences: Iterable[Sequence]) -> None:
        """For sequences that own lost blocks, mark everything from the first lost token on as lost.

        O(blocks of the sequences).
        """
        for sequence in sequences:
            first = self.first_lost_in(sequence, lost)
            if first is not None:
                sequence.lose(first, self._block_size)
            if self.states is not None:
                self.states.lose(sequence, lost)

    def digests_from(self, sequence: Sequence, first: int, num_tokens: int) -> Digests | None:
        """Return the digests that `cache_from` will record for full blocks from `first` on. Changes nothing."""
        return digests_ahead(self._index, sequence, self._index.epoch, sequence.blocks, first, num_tokens)

    def cache_from(self, sequence: Sequence, first: int, num_tokens: int, digests: Digests | None) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill, from block `first` on. O(blocks)."""
        cache_from(self._index, sequence, first, num_tokens // self._block_size, digests)
        if sequence.side_tables is not None:
            self._attach_anew(sequence, sequence.side_tables, first)
            self.pool.requeue_detached()
            if self.states is not None:
                self.states.cache_waiting(sequence)

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
        if self.layout is not None:
            return self._count_missing_with_groups(self.layout, sequence, num_slots, hit)
        if sequence.owner is not None:
            shared = self._shared_index(sequence, sequence.num_computed_tokens)
            grows = num_slots > sequence.num_computed_tokens and shared is not None
            return self._num_missing_blocks(sequence, num_slots) + grows
        held = [] if hit is None else hit.blocks
        num_missing = max(0, -(-num_slots // self._block_size) - len(held))
        return num_missing + sum([block.ref_cnt == 0 for block in held])

    # Parts of the above.

    def _count_missing_with_groups(
        self, layout: GroupLayout, sequence: Sequence, num_slots: int, hit: CacheHit | None
    ) -> int:
        side = sequence.side_tables
        if side is not None:
            if num_slots <= sequence.num_computed_tokens:
                return 0
            side.plan(sequence, sequence.num_computed_tokens, num_slots, 0)
            return max(0, self._num_taken_for([side]))
        held = [] if hit is None else hit.blocks
        parts = None if hit is None else hit.parts
        num_missing = 0
        for number, side_group in enumerate(layout.side_groups):
            first, blocks = (0, held[:0]) if parts is None else parts.tables[number]
            lacking = max(0, -(-num_slots // side_group.block_size) - first - len(blocks))
            num_missing += min(1, lacking) if side_group.has_gaps else lacking
            num_missing += sum([block.ref_cnt == 0 for block in blocks])
        if parts is not None and parts.checkpoint is not None:
            num_missing += sum([block.ref_cnt == 0 for block in parts.checkpoint.blocks])
        if self.pool.virtual is not None:
            return num_missing
        num_missing += max(0, -(-num_slots // self._block_size) - len(held))
        return num_missing + sum([block.ref_cnt == 0 for block in held])

    def _is_refused(self, sides: list[SideTables]) -> bool:
        """Whether the pool can't serve the plans of side tables. If so, note why. O(groups)."""
        num_taken = self._num_taken_for(sides)
        return num_taken > self.pool.queue.num_free_blocks and self._note_refusal(num_taken, [])

    def _num_taken_for(self, sides: list[SideTables]) -> int:
        """Return how many free blocks the plans take, minus those that their sequences give back first."""
        num_taken = 0
        leaving: dict[KVCacheBlock, int] = {}
        for side in sides:
            num_taken += side.num_planned()
            for block in side.leaving():
                leaving[block] = leaving.get(block, 0) + 1
        return num_taken - sum([count == block.ref_cnt for block, count in leaving.items()]) if leaving else num_taken

    def _let_pass(self, side: SideTables) -> None:
        """Release the blocks that have left the windows of a sequence, as planned."""
        for table in side.tables:
            if table.passing:
                self._let_pass_of(side, table)

    def _let_pass_of(self, side: SideTables, table: GroupTable) -> None:
        first = table.num_dead
        if table.passing == 1:
            block = table.drop_first(1)[0]
            if block is EMPTY:
                return
            if not block.is_cached:
                self.pool.release_passed(_NO_BLOCKS, [block])
            elif table.side_group.kind.keeps_passed or side.is_likely_end(table, first):
                self.pool.release_table([block])
            else:
                self.pool.release_passed([block], _NO_BLOCKS)
            return
        kept: list[KVCacheBlock] = []
        passed: list[KVCacheBlock] = []
        empty: list[KVCacheBlock] = []
        for index, block in enumerate(table.drop_first(table.passing), first):
            if block is EMPTY:
                continue
            if not block.is_cached:
                empty.append(block)
            elif table.side_group.kind.keeps_passed or side.is_likely_end(table, index):
                kept.append(block)
            else:
                passed.append(block)
        self.pool.release_passed(passed, empty)
        if kept:
            self.pool.release_table(kept)

    def _finish(self, sequence: Sequence, side: SideTables, end: int, digests: Digests | None) -> list[KVCacheBlock]:
        """Give a sequence the blocks that were planned, and cache those that its first `end` tokens fill."""
        num_planned = side.num_planned()
        blocks = self.take(num_planned, sequence) if num_planned else []
        self._fill(sequence, side, blocks, 0, None)
        self._count(sequence, end)
        self._end_slots(sequence, side, digests)
        return blocks

    def _end_slots(self, sequence: Sequence, side: SideTables, digests: Digests | None) -> None:
        """Record in all groups that a sequence has the slots that were planned, and cache full blocks."""
        if side.layout.has_gaps:
            for table in side.tables:
                table.note_end(side.num_slots)
        first = sequence.num_cached_blocks
        if sequence.num_computed_tokens // self._block_size > first:
            cache_full_blocks(self._index, sequence, digests)
            if sequence.num_cached_blocks > first:
                self._note_cached(sequence, side, first)
        if self.states is not None:
            self.states.note_slots(sequence, side)

    def _note_cached(self, sequence: Sequence, side: SideTables, first: int) -> None:
        """Cache in other groups what ends in a sequence's primary blocks from `first` on, which were just cached."""
        self._attach(sequence, side, first)
        if self._index.detached:
            self.pool.requeue_detached()
        if self.soft_holds is not None:
            # Now, since blocks that a pin lacks may have left the window before the sequence is freed.
            self.soft_holds.extend(sequence)

    def _fill(
        self,
        sequence: Sequence,
        side: SideTables,
        blocks: list[KVCacheBlock],
        step_index: int,
        changes: list[TableChange] | None,
    ) -> None:
        """Give a sequence the blocks that were planned, group after group: taken blocks, and virtual ones. O(blocks).

        step_index: the sequence's index in a step. Appends the table entries that change to `changes`.
        """
        layout, num_tables = side.layout, len(side.tables)
        is_plain = sequence.tail_owner is not None and not layout.has_gaps  # nothing is shared, and no gap is left
        if self.pool.virtual is not None:
            self._fill_primary(sequence, side, self.pool.take_virtual(side.num_planned_primary))
        sequence.tail_owner = sequence.owner
        if not blocks:
            side.new_blocks = layout.no_blocks
            return
        first = 0
        new_blocks = side.new_blocks = [*layout.no_blocks]
        for group, number in layout.tables_in_order:
            table = None if number == num_tables else side.tables[number]
            if is_plain:
                count = side.missing if table is None else table.missing
            else:
                count = side.num_planned_primary if table is None else table.num_planned
            if not count:
                continue
            part = new_blocks[group] = blocks[first : first + count]
            first += count
            if is_plain:
                index = _extend(sequence, table, part)
                if changes is not None:
                    changes += [(step_index, group, index + i, block.block_id) for i, block in enumerate(part)]
                continue
            indices = self._fill_shared(sequence, side, table, part)
            if changes is not None:
                changes += [(step_index, group, i, block.block_id) for i, block in zip(indices, part, strict=True)]

    def _fill_shared(
        self, sequence: Sequence, side: SideTables, table: GroupTable | None, blocks: list[KVCacheBlock]
    ) -> list[int]:
        """Put blocks into a table, where they may replace a shared block or leave gaps. table: None: the primary one.

        Returns the indices of the changed entries.
        """
        return (
            self._fill_primary(sequence, side, blocks)
            if table is None
            else self._fill_side(sequence, side, table, blocks)
        )

    def _fill_primary(self, sequence: Sequence, side: SideTables, blocks: list[KVCacheBlock]) -> list[int]:
        """Put blocks into the primary table: the first replaces the shared block, if any, the rest go to its end.

        Returns the indices of the changed entries.
        """
        shared, end = side.shared, len(sequence.blocks)
        if shared is None:
            sequence.blocks += blocks
            return [*range(end, end + len(blocks))]
        self._replace(sequence, shared, blocks[0])
        sequence.blocks += blocks[1:]
        return [shared, *range(end, end + len(blocks) - 1)]

    def _fill_side(
        self, sequence: Sequence, side: SideTables, table: GroupTable, blocks: list[KVCacheBlock]
    ) -> list[int]:
        """As `_fill_primary`, for a side table."""
        shared = table.shared
        if shared is None:
            return table.fill(blocks, side.num_slots)
        source = table.live_block(shared)
        assert source is not None, f"{sequence}: shares a dead block"
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)
        self.pool.release_table([source])
        self.copies.append((table.side_group.group, source.block_id, blocks[0].block_id))
        table.replace(shared, blocks[0])
        return [shared, *table.fill(blocks[1:], side.num_slots)]

    def _fill_gaps(self, sequence: Sequence, side: SideTables) -> list[KVCacheBlock]:
        """Replace the placeholders in a sequence's side tables with new blocks, for loads. Returns them by group."""
        filled: list[KVCacheBlock] = []
        for table in side.tables:
            gaps = [index for index, block in enumerate(table.blocks, table.num_dead) if block is GAP]
            blocks = self.take(len(gaps), sequence)
            for index, block in zip(gaps, blocks, strict=True):
                table.replace(index, block)
            group = table.side_group.group
            side.new_blocks[group] = blocks + side.new_blocks[group]
            filled += blocks
        return filled

    def _attach(self, sequence: Sequence, side: SideTables, first: int) -> None:
        """Cache the side tables' blocks that end in a sequence's cached primary blocks from `first` on. O(blocks).

        Skips blocks that no hit can need: hits end only at multiples of the alignment.
        """
        attached = self._attached
        assert attached is not None, "no groups"
        primary_size, alignment = self._block_size, self.alignment
        end = sequence.num_cached_blocks * primary_size
        for table in side.tables:
            side_group, num_dead = table.side_group, table.num_dead
            size, kind = side_group.block_size, side_group.kind
            if not kind.is_cached:
                continue
            for number in range(max(num_dead, first * primary_size // size), end // size):
                block = table.blocks[number - num_dead]
                if block.run is not None or not table.may_cache(number):
                    continue
                next_end = -(-(number + 1) * size // alignment) * alignment
                if kind.first_needed(next_end - 1) > number:
                    continue
                position, column = side_group.home(number)
                if attached.attach(sequence.blocks[position], column, block) and self._index.events is not None:
                    tokens = bytes(sequence.packed_tokens()[number * 4 * size : (number + 1) * 4 * size])
                    attached.note_attached(side_group, sequence.blocks, number, tokens, sequence.sequence_id)

    def _attach_anew(self, sequence: Sequence, side: SideTables, first: int) -> None:
        """`_attach` for primary blocks that were cached late or after a reset. O(blocks)."""
        for table in side.tables:
            for block in table.blocks:
                if block.run is not None and not block.run.epoch.is_current:
                    block.run = None
        self._attach(sequence, side, first)

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
        side = sequence.side_tables
        if side is not None:
            if side.fallback is not None:
                for blocks in side.end_loads():
                    self.pool.release_table(blocks, 0, sequence)
            for table in side.tables:
                self.pool.release_table(table.held, 0, sequence)
        if self.states is not None:
            self.states.release(sequence)

    def _parts_in_block(self, num_tokens: int) -> bool:
        """Whether sequences that fork after `num_tokens` share a block that both would write to."""
        if self.layout is not None and self.layout.has_scratch:
            return True
        return num_tokens % self.alignment != 0

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
            blocks = self.take(num_missing, sequence)
            sequence.blocks += blocks
            return blocks
        blocks = self.take(num_missing + 1, sequence)
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
            return self.take(len(sequences), sequences[0])
        return [block for sequence in sequences for block in self.take(1, sequence)]


def _extend(sequence: Sequence, table: GroupTable | None, blocks: list[KVCacheBlock]) -> int:
    """Put blocks at the end of a table, and return the index of the first. table: None: the primary one. O(blocks)."""
    if table is None:
        index = len(sequence.blocks)
        sequence.blocks += blocks
        return index
    index = table.num_dead + len(table.blocks)
    table.extend(blocks)
    return index


def _begin(
    layout: GroupLayout, sequence: Sequence, hit: CacheHit | None
) -> tuple[SideTables, list[KVCacheBlock], list[KVCacheBlock], int]:
    """Return the side tables of a sequence that starts with a hit, and what it is to own of the hit. O(blocks).

    That is: the blocks of its primary table; those of its side tables and states, each as often as it is to own them;
    and how many new blocks loads bring in addition to those of the primary group.
    """
    parts = None if hit is None else hit.parts
    if hit is None or parts is None:
        return SideTables(layout, [sequence.num_prompt_tokens]), [], [], 0
    ends = [hit.num_readonly_tokens, parts.num_matched * layout.block_size, sequence.num_prompt_tokens]
    if parts.loads is not None:
        side = SideTables(layout, [*ends, parts.loads.end])
        return side, *_begin_loading(side, hit, parts, parts.loads)
    side = SideTables(layout, ends)
    touched: list[KVCacheBlock] = []
    for table, (first, blocks) in zip(side.tables, parts.tables, strict=True):
        table.begin(first, blocks)
        touched += blocks
    if parts.checkpoint is not None:
        touched += parts.checkpoint.blocks
    if hit.num_tokens:
        side.note_start(hit.num_tokens)
    return side, hit.blocks, touched, 0


def _begin_loading(
    side: SideTables, hit: CacheHit, parts: HitParts, loads: Loads
) -> tuple[list[KVCacheBlock], list[KVCacheBlock], int]:
    """Begin the side tables of a sequence that loads, with placeholders for loaded blocks, and set its fallback.

    Returns the blocks of its primary table; the cached blocks of side groups and checkpoints, each as often as the
    sequence is to own it; and how many blocks the loads bring in addition to those of the primary group. O(blocks).
    """
    touched: list[KVCacheBlock] = []
    num_gaps = 0
    for table, (first, blocks) in zip(side.tables, loads.mixed, strict=True):
        held = [block for block in blocks if block is not None]
        table.begin(first, [GAP if block is None else block for block in blocks])
        touched += held
        num_gaps += len(blocks) - len(held)
    side.fallback = Fallback(len(hit.blocks) * side.layout.block_size, loads.end, parts.tables)
    for _, held in parts.tables:
        touched += held
    for checkpoint in (parts.checkpoint, loads.arriving):
        touched += [] if checkpoint is None else checkpoint.blocks
    return hit.blocks + loads.more, touched, num_gaps + loads.num_state_blocks


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
