"""Slots where there are groups beside the primary one: the calls of `slots`, for all block tables of a sequence.

Each call has a sequence's side tables plan first what it takes and gives back. Then come the checks, digests and
changes, in the order that `slots` explains.

A block that left a window is worth less than one that was freed at a sequence's end, since only a hit that ends just
after it needs it. It is therefore reused before other cached blocks. The exceptions are blocks that a hit will probably
need, at the sequence's likely hit ends: where its own hit ended, where its prefix differs from what was cached, and
where its prompt ends. docs/design/groups.md says why. Marconi does the same for recurrent layers: it keeps the states
at the points where sequences begin to differ.
"""

from array import array
from typing import TYPE_CHECKING, Any

from kvblocks.core.attached import AttachedBlocks
from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING
from kvblocks.core.component import Component, LostBlocks
from kvblocks.core.hit import CacheHit
from kvblocks.core.hooks import Digests
from kvblocks.core.layout import GroupLayout
from kvblocks.core.loading import Fallback, Loads
from kvblocks.core.longest_hit import HitParts
from kvblocks.core.sequence import Sequence
from kvblocks.core.steps import TableChange, append_each, keep_for_last
from kvblocks.core.tables import EMPTY, GroupTable, SideTables, side_tables_of
from kvblocks.stats import Refusal

if TYPE_CHECKING:
    from kvblocks.core.slots import SlotAllocator

GAP = KVCacheBlock(-1)
"""A placeholder in a new table for a block that is taken right after."""

_NO_BLOCKS: list[KVCacheBlock] = []


class SideSlots(Component):
    """The side tables of the sequences of `slots`: what a hit, a call and a release need of them."""

    def __init__(self, slots: "SlotAllocator", attached: AttachedBlocks) -> None:
        self._slots = slots
        self._pool = slots.pool
        self._index = slots.pool.index
        self._attached = attached
        self._layout = attached.layout
        self._block_size = attached.layout.block_size

    def start(
        self,
        sequence: Sequence,
        epoch: Epoch | None,
        end: int,
        num_slots: int,
        hit: CacheHit | None,
        *,
        delayed: bool,
    ) -> list[KVCacheBlock] | None:
        """As `SlotAllocator.start`. It also returns None if no slot for a state is free."""
        states = self._slots.states
        if states is not None and not states.live.free_slots:
            num_free = self._pool.queue.num_free_blocks
            self._slots.last_refusal = Refusal(self.count_missing(sequence, num_slots, hit), num_free, 0, 0, "slots")
            return None
        side, held, touched, num_gaps = _begin(self._layout, sequence, hit)
        num_hit = 0 if hit is None else len(hit.blocks)
        side.plan_start(len(held), num_slots)
        num_taken = side.num_planned() + num_gaps
        if num_taken + len(held) + len(touched) > self._pool.queue.num_free_blocks:
            in_pool = dict.fromkeys(touched if self._pool.virtual is not None else held + touched)
            if self._slots.note_refusal(num_taken, [*in_pool]):
                return None
        digests = None
        if self._index.needs_digests and not delayed:
            digests = digests_ahead(self._index, sequence, epoch, held, len(held), end)
        sequence.owner = sequence.tail_owner = self._slots.change  # first, so that no other manager can take it
        sequence.side_tables = side
        if sequence.session is not None and self._pool.chooser is not None:
            self._pool.chooser.note_starting(sequence)
        sequence.blocks += held
        if hit is not None:
            self._pool.touch(held)
            self._pool.touch(touched)
            num_held_tokens = len(held) * self._block_size
            sequence.num_readonly_tokens = sequence.num_given_tokens = sequence.first_own_token = num_held_tokens
            if hit.parts is not None:
                self._slots.num_limited_tokens += hit.parts.num_matched * self._block_size - hit.num_readonly_tokens
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
        self, sequence: Sequence, side: SideTables, end: int, num_slots: int, num_in_flight: int, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """As `SlotAllocator.grow`. It gives back the blocks that left a window, before it takes new ones."""
        slots, start = self._slots, sequence.num_computed_tokens
        side.plan(sequence, start, num_slots, num_in_flight)
        if self._is_refused([side]):
            return None
        digests = None if delayed else slots.digests_ahead(sequence, end)
        slots.change.state = CHANGING
        if delayed:
            slots.delay(sequence, start)
        self._let_pass(side)
        return self._finish(sequence, side, end, digests)

    def append(
        self, sequence: Sequence, side: SideTables, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """As `SlotAllocator.append`, likewise."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        side.plan(sequence, num_before, end, 0)
        if self._is_refused([side]):
            return None
        digests = self._slots.append_packed(sequence, tokens, delayed=delayed)
        self._let_pass(side)
        return self._finish(sequence, side, end, digests)

    def grow_one(self, sequence: Sequence, side: SideTables, num_tokens: int) -> list[KVCacheBlock] | None:
        """As `SlotAllocator.grow_one`, for token number `num_tokens`. O(groups)."""
        num_wanted = side.plan_one(sequence, num_tokens - 1)
        if num_wanted > self._pool.queue.num_free_blocks and self._is_refused([side]):
            return None
        if side.is_passing:
            self._let_pass(side)
        taken = self._slots.take(num_wanted, sequence) if num_wanted else _NO_BLOCKS
        self._fill(sequence, side, taken, 0, None)
        self._end_one(sequence, side, num_tokens)
        return taken if num_wanted else []

    def _end_one(self, sequence: Sequence, side: SideTables, num_tokens: int) -> None:
        """`_end_slots` for one token. No digest may be needed."""
        sequence.num_computed_tokens = num_tokens
        size = self._slots.smallest_block_size
        offset = num_tokens % size
        if offset:
            sequence.fits_below = num_tokens - offset + size - 1  # `SlotAllocator.count`, inlined
        if side.layout.has_gaps:
            for table in side.tables:
                table.note_end(num_tokens)
        if not num_tokens % self._block_size:
            first = sequence.num_cached_blocks
            cache_filled_blocks(self._index, [sequence])
            if sequence.num_cached_blocks > first:
                self._note_cached(sequence, side, first)
        if self._slots.states is not None:
            self._slots.states.note_slots(sequence, side)

    def note_step(self, sequences: list[Sequence], at_boundary: list[Sequence], changes: list[TableChange]) -> None:
        """Record what a step did to sequences without a table but the primary one."""
        for index, _, position, _ in changes:
            sequence = sequences[index]
            side_tables_of(sequence).note_primary([sequence.blocks[position]])
        for sequence in at_boundary:
            self.note_one(sequence, side_tables_of(sequence))

    def append_step(
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        indices: dict[Sequence, int],
        *,
        delayed: bool,
    ) -> list[TableChange] | None:
        """As `SlotAllocator.append_step`."""
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
        if is_unsure or num_wanted > self._pool.queue.num_free_blocks:
            num_wanted = self._num_taken_for(sides)
            if num_wanted > self._pool.queue.num_free_blocks and self._slots.note_step_refusal(num_wanted, tokens):
                return None
        append_each(self._slots.change, sequences, tokens)
        if delayed:
            for sequence in sequences:
                self._slots.delay(sequence, sequence.num_computed_tokens - 1)
        digests = self._slots.digests_of_step(sequences, at_boundary) if self._index.needs_digests else {}
        for side in sides:
            if side.is_passing:
                self._let_pass(side)
        changes: list[TableChange] = []
        # All are taken before a fill gives back what it copies from.
        taken = [self._slots.take(n, s) if n else _NO_BLOCKS for s, n in zip(at_boundary, numbers, strict=True)]
        for sequence, side, blocks in zip(at_boundary, sides, taken, strict=True):
            self._fill(sequence, side, blocks, indices[sequence], changes)
        for sequence, side in zip(at_boundary, sides, strict=True):
            if digests:
                self._slots.count(sequence, sequence.num_computed_tokens)
                self._end_slots(sequence, side, digests[sequence])
            else:
                self._end_one(sequence, side, sequence.num_computed_tokens)
        return changes

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """As `Component.fork`."""
        side = side_tables_of(sequence)
        copied = child.side_tables = SideTables(side.layout, side.likely_ends)
        for table, child_table in zip(side.tables, copied.tables, strict=True):
            child_table.begin_as(table, child.num_computed_tokens)
            self._pool.touch(child_table.held)
        if side.fallback is not None:
            copied.fallback = side.fallback
            for _, blocks in side.fallback.tables:
                self._pool.touch(blocks)

    def count_missing(self, sequence: Sequence, num_slots: int, hit: CacheHit | None) -> int:
        """As `SlotAllocator.count_missing`."""
        side = sequence.side_tables
        if side is not None:
            if num_slots <= sequence.num_computed_tokens:
                return 0
            side.plan(sequence, sequence.num_computed_tokens, num_slots, 0)
            return max(0, self._num_taken_for([side]))
        held = [] if hit is None else hit.blocks
        parts = None if hit is None else hit.parts
        num_missing = 0
        for number, side_group in enumerate(self._layout.side_groups):
            first, blocks = (0, held[:0]) if parts is None else parts.tables[number]
            lacking = max(0, -(-num_slots // side_group.block_size) - first - len(blocks))
            num_missing += min(1, lacking) if side_group.has_gaps else lacking
            num_missing += sum([block.ref_cnt == 0 for block in blocks])
        if parts is not None and parts.checkpoint is not None:
            num_missing += sum([block.ref_cnt == 0 for block in parts.checkpoint.blocks])
        if self._pool.virtual is not None:
            return num_missing
        num_missing += max(0, -(-num_slots // self._block_size) - len(held))
        return num_missing + sum([block.ref_cnt == 0 for block in held])

    def _is_refused(self, sides: list[SideTables]) -> bool:
        """Whether the pool can't serve the plans of side tables. If so, note why. O(groups)."""
        num_taken = self._num_taken_for(sides)
        return num_taken > self._pool.queue.num_free_blocks and self._slots.note_refusal(num_taken, [])

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
                self._pool.release_passed(_NO_BLOCKS, [block])
            elif table.side_group.kind.keeps_passed or side.is_likely_end(table, first):
                self._pool.release_table([block])
            else:
                self._pool.release_passed([block], _NO_BLOCKS)
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
        self._pool.release_passed(passed, empty)
        if kept:
            self._pool.release_table(kept)

    def _finish(self, sequence: Sequence, side: SideTables, end: int, digests: Digests | None) -> list[KVCacheBlock]:
        """Give a sequence the blocks that were planned, and cache those that its first `end` tokens fill."""
        num_planned = side.num_planned()
        blocks = self._slots.take(num_planned, sequence) if num_planned else []
        self._fill(sequence, side, blocks, 0, None)
        self._slots.count(sequence, end)
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
        if self._slots.states is not None:
            self._slots.states.note_slots(sequence, side)

    def _note_cached(self, sequence: Sequence, side: SideTables, first: int) -> None:
        """Cache in other groups what ends in a sequence's primary blocks from `first` on, which were just cached."""
        self._attach(sequence, side, first)
        if self._index.detached:
            self._pool.requeue_detached()
        if self._slots.soft_holds is not None:
            # Now, since blocks that a pin lacks may have left the window before the sequence is freed.
            self._slots.soft_holds.extend(sequence)

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
        if self._pool.virtual is not None:
            self._fill_primary(sequence, side, self._pool.take_virtual(side.num_planned_primary))
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
        self._slots.replace_shared(sequence, shared, blocks[0])
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
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.extend(sequence)
        self._pool.release_table([source])
        self._slots.copies.append((table.side_group.group, source.block_id, blocks[0].block_id))
        table.replace(shared, blocks[0])
        return [shared, *table.fill(blocks[1:], side.num_slots)]

    def _fill_gaps(self, sequence: Sequence, side: SideTables) -> list[KVCacheBlock]:
        """Replace the placeholders in a sequence's side tables with new blocks, for loads. Returns them by group."""
        filled: list[KVCacheBlock] = []
        for table in side.tables:
            gaps = [index for index, block in enumerate(table.blocks, table.num_dead) if block is GAP]
            blocks = self._slots.take(len(gaps), sequence)
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
        primary_size, alignment = self._block_size, self._layout.alignment
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

    def note_full(self, sequence: Sequence, first: int) -> None:
        """As `Component.note_full`."""
        side = side_tables_of(sequence)
        for table in side.tables:
            for block in table.blocks:
                if block.run is not None and not block.run.epoch.is_current:
                    block.run = None
        self._attach(sequence, side, first)
        self._pool.requeue_detached()

    def note_one(self, sequence: Sequence, side: SideTables) -> None:
        """Record a decoded token of a sequence without a table but the primary one."""
        if self._slots.states is not None:
            self._slots.states.note_slots(sequence, side)
        is_cached = sequence.num_cached_blocks * self._block_size == sequence.num_computed_tokens
        if self._slots.soft_holds is not None and is_cached:
            self._slots.soft_holds.extend(sequence)  # now, since a pin may lack the block that the token has filled

    def note_rewinding(self, sequence: Sequence, num_tokens: int) -> int:
        """As `Component.note_rewinding`. Inside the tokens that it loads, a sequence goes back to where these begin."""
        side = side_tables_of(sequence)
        fallback = side.fallback
        if fallback is None or num_tokens >= fallback.end:
            return num_tokens
        dropped = [table.blocks for table in side.tables]
        for table, (first, blocks) in zip(side.tables, fallback.tables, strict=True):
            table.begin(first, blocks)
        side.fallback = None
        for blocks in dropped:
            self._pool.release_table(blocks, 0, sequence)
        return min(num_tokens, fallback.start)

    def note_rewound(self, sequence: Sequence, num_tokens: int) -> None:
        """As `Component.note_rewound`."""
        for table in side_tables_of(sequence).tables:
            gone = table.held
            if num_tokens:
                gone = table.truncate(-(-num_tokens // table.side_group.block_size))
            else:
                table.begin(0, [])
            self._pool.release_table(gone, 0, sequence)

    def end_loads(self, sequence: Sequence) -> None:
        """As `Component.end_loads`."""
        for blocks in side_tables_of(sequence).end_loads():
            self._pool.release_table(blocks)

    def release(self, sequence: Sequence) -> None:
        """As `Component.release`."""
        side = side_tables_of(sequence)
        for blocks in side.end_loads():
            self._pool.release_table(blocks, 0, sequence)
        for table in side.tables:
            self._pool.release_table(table.held, 0, sequence)

    def unwritten_blocks(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock]:
        """As `Component.unwritten_blocks`."""
        lost: list[KVCacheBlock] = []
        for table in side_tables_of(sequence).tables:
            unwritten = sequence.unwritten(table.blocks, table.num_dead, table.side_group.block_size, num_tokens)
            lost += [block for block in unwritten if block is not EMPTY]
        return lost

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> list[int]:
        """As `Component.first_lost_in`."""
        owned = side_tables_of(sequence).owned()
        return [max(index * group.block_size, lost[block]) for group, index, block in owned if block in lost]


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
