"""How a sequence of several groups gets blocks, and what happens to blocks that leave a window.

A call that makes room for the tokens from `start` on first checks whether the pool can serve it. Then it releases the
blocks that no query at `start` or later sees, so that the step may reuse them. Then it takes the blocks that all groups
need.

A block that left a window is worth less than one that was freed at a sequence's end, since only a hit that ends just
after it needs it. It is therefore reused before other cached blocks. The exceptions are blocks that a hit will probably
need, at the sequence's landmarks: where its own hit ended, where its prefix differs from what was cached, and where its
prompt ends. docs/design/groups.md says why. Marconi does the same for recurrent layers: it keeps the states at the
points where sequences begin to differ.
"""

from array import array
from typing import Any, SupportsIndex

from kvblocks.core.attached import GroupIndex
from kvblocks.core.attaching import attach_anew, attach_full_blocks
from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.caching import cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING, Change
from kvblocks.core.group_pool import GroupPool
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.hooks import Digests
from kvblocks.core.layout import GroupLayout
from kvblocks.core.loading import Fallback, LoadingHit
from kvblocks.core.longest_hit import GroupHit, longest_hit
from kvblocks.core.need import Need, keep_for_last
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit, LostBlocks, SlotAllocator, TableChange
from kvblocks.core.steps import append_each
from kvblocks.core.tables import EMPTY, GapTable, GroupTables, tables_of
from kvblocks.hashing.scheme import HashScheme

GAP = KVCacheBlock(-1)
"""A placeholder in a new table for a block that is taken right after."""


class GroupSlots(SlotAllocator):
    """`SlotAllocator` for several groups."""

    def __init__(self, pool: GroupPool, change: Change) -> None:
        super().__init__(pool, change)
        self._group_pool = pool
        self._group_index = pool.group_index
        self._layout = pool.group_index.layout
        self.smallest_block_size = self._layout.smallest_block_size
        self.num_groups = len(self._layout.groups)
        self._num_tables = len(self._layout.table_groups)
        self.has_side_groups = True
        self.alignment = self._layout.alignment
        self.primary_group = self._layout.primary

    def find_hit(self, sequence: Sequence, matched: list[KVCacheBlock], source: HitSource) -> CacheHit:
        """Return the longest hit in `matched` that every group can serve. Changes nothing."""
        return longest_hit(self._group_index, sequence, matched, sequence.num_tokens, source)

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(rows)."""
        return self._group_index.num_cached_by_group()

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
        """Give a sequence without blocks the blocks of `hit`, and new blocks for the rest of `num_slots` slots."""
        found = hit if isinstance(hit, GroupHit) else None
        loading = hit if isinstance(hit, LoadingHit) else None
        ends = [] if found is None else [found.num_readonly_tokens, found.num_matched_tokens]
        ends += [] if loading is None else [loading.end]
        tables = GroupTables(self._layout, [*ends, sequence.num_prompt_tokens])
        held: list[KVCacheBlock] = []
        touched: list[KVCacheBlock] = []
        num_gaps = 0
        if loading is not None:
            held, touched, num_gaps = _begin_loading(tables, loading)
        elif found is not None:
            held = found.blocks
            for table, (first, blocks) in zip(tables.tables, found.tables, strict=True):
                table.begin(first, blocks)
                touched += blocks
            if found.checkpoint is not None:
                touched += found.checkpoint.blocks
            if found.num_tokens:
                tables.note_start(found.num_tokens)
        num_hit = 0 if found is None else len(found.blocks)
        in_pool = held + touched if self._group_pool.anchors is None else touched
        in_pool = in_pool if loading is None else [*dict.fromkeys(in_pool)]
        sequence.owner = sequence.tail_owner = self._change  # first, so that no other manager can take it
        sequence.side_tables = tables
        sequence.blocks += held
        try:
            need = Need(sequence, tables, num_hit * self._block_size, num_slots, self._block_size)
            num_taken = need.num_blocks(self._num_tables) + num_gaps  # a table of anchors comes last and isn't counted
            if num_taken + len(in_pool) > self.pool.queue.num_free_blocks and self._note_refusal(num_taken, in_pool):
                sequence.reset_blocks()
                return None
            digests = None
            if self._index.needs_digests and not delayed:
                digests = digests_ahead(self._index, sequence, epoch, held, len(held), end)
        except BaseException:
            sequence.reset_blocks()
            raise
        if sequence.session is not None and self.pool.chooser is not None:
            self.pool.chooser.note_starting(sequence)
        if found is not None:
            self.pool.touch(held)
            self.pool.touch(touched)
            num_hit_tokens = len(held) * self._block_size
            sequence.num_readonly_tokens = sequence.num_given_tokens = sequence.first_own_token = num_hit_tokens
            self.num_limited_tokens += found.num_matched_tokens - found.num_readonly_tokens
        sequence.epoch = epoch
        sequence.num_cached_blocks = num_hit
        if delayed and num_hit * self._block_size < end:
            sequence.delayed_from = num_hit * self._block_size
        blocks = self._finish(need, end, digests)
        return self._fill_gaps(sequence, tables) + blocks if num_gaps else blocks

    def grow(
        self, sequence: Sequence, end: int, num_slots: int, num_in_flight: int = 0, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Give a sequence that has blocks new ones for `num_slots` slots, and release those that left a window."""
        need = self._need(sequence, sequence.num_computed_tokens, num_slots, num_in_flight)
        num_taken = self._num_taken_for([need])
        if num_taken > self.pool.queue.num_free_blocks and self._note_refusal(num_taken, []):
            return None
        digests = None if delayed else self._digests_ahead(sequence, end)
        self._change.state = CHANGING
        if delayed:
            self._delay(sequence, sequence.num_computed_tokens)
        self._let_pass(need)
        return self._finish(need, end, digests)

    def append(
        self, sequence: Sequence, tokens: "array[int] | memoryview[int]", *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        """Add packed tokens, and slots for them, to a sequence that has slots for all its tokens."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        need = self._need(sequence, num_before, end)
        num_taken = self._num_taken_for([need])
        if num_taken > self.pool.queue.num_free_blocks and self._note_refusal(num_taken, []):
            return None
        digests = self._append_tokens(sequence, tokens, delayed=delayed)
        self._let_pass(need)
        return self._finish(need, end, digests)

    def append_step(
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        indices: dict[Sequence, int],
        *,
        delayed: bool,
    ) -> list[TableChange] | None:
        """Add one token to each sequence. Returns the changes of block tables.

        Raises what `append` raises, changing nothing.
        """
        needs = [self._need(s, s.num_computed_tokens, s.num_computed_tokens + 1) for s in at_boundary]
        keep_for_last(needs)
        num_taken = self._num_taken_for(needs)
        if num_taken > self.pool.queue.num_free_blocks and self._note_step_refusal(num_taken, tokens):
            return None
        append_each(self._change, sequences, tokens)
        if delayed:
            for sequence in sequences:
                self._delay(sequence, sequence.num_computed_tokens - 1)
        digests = self._digests_of_step(sequences, at_boundary)
        for need in needs:
            self._let_pass(need)
        changes: list[TableChange] = []
        # All are taken before a fill gives back what it copies from.
        taken = [self._take(need.num_blocks(self._num_tables), need.sequence) for need in needs]
        for need, blocks in zip(needs, taken, strict=True):
            self._fill(need, blocks, indices[need.sequence], changes)
        for sequence in at_boundary:
            self._count(sequence, sequence.num_computed_tokens)
            if self._layout.has_gaps:
                tables_of(sequence).note_end(sequence.num_computed_tokens)
            self._cache(sequence, digests[sequence])
        return changes

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Make `twin` an owner of all blocks that hold the sequence's computed tokens. O(blocks)."""
        super().fork(sequence, twin)
        tables = tables_of(sequence)
        copies = GroupTables(self._layout, tables.landmarks)
        twin.side_tables = copies
        for table, copied in zip(tables.tables, copies.tables, strict=True):
            num_kept = -(-twin.num_computed_tokens // table.side_group.block_size) - table.num_dead
            copied.begin(table.num_dead, table.blocks[: max(0, num_kept)])
            copied.first_token = table.first_token
            if isinstance(copied, GapTable) and isinstance(table, GapTable):
                copied.end, copied.ends = table.end, set(table.ends)
            self.pool.touch(copied.held)
        if tables.fallback is not None:
            copies.fallback = tables.fallback
            for _, blocks in tables.fallback.tables:
                self.pool.touch(blocks)

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the blocks that the first `num_tokens` tokens don't need. All tokens stay. O(blocks released).

        If `num_tokens` lies inside the tokens that the sequence loads, the sequence goes back to where these begin.
        """
        tables = tables_of(sequence)
        fallback = tables.fallback
        if fallback is not None and num_tokens < fallback.end:
            num_tokens = min(num_tokens, fallback.start)
            dropped = [table.blocks for table in tables.tables]
            for table, (first, blocks) in zip(tables.tables, fallback.tables, strict=True):
                table.begin(first, blocks)
            tables.fallback = None
            for blocks in dropped:
                self.pool.release_table(blocks, 0, sequence)
        super().rewind(sequence, num_tokens)
        for table in tables.tables:
            gone = table.held
            if num_tokens:
                gone = table.truncate(-(-num_tokens // table.side_group.block_size))
            else:
                table.begin(0, [])
            self.pool.release_table(gone, 0, sequence)

    def end_loads(self, sequence: Sequence) -> None:
        """Release the blocks that a sequence holds in case its loads fail. O(blocks)."""
        for blocks in tables_of(sequence).end_loads():
            self.pool.release_table(blocks)

    def count_missing(self, sequence: Sequence, num_slots: int, hit: CacheHit | None) -> int:
        """Return how many free blocks `num_slots` slots take, minus those that leave windows first."""
        if sequence.owner is not None:
            if num_slots <= sequence.num_computed_tokens:
                return 0
            return max(0, self._num_taken_for([self._need(sequence, sequence.num_computed_tokens, num_slots)]))
        held: list[KVCacheBlock] = [] if hit is None else hit.blocks
        tables = hit.tables if isinstance(hit, GroupHit) else [(0, held[:0])] * len(self._layout.side_groups)
        num_missing = 0
        for side_group, (first, blocks) in zip(self._layout.side_groups, tables, strict=True):
            lacking = max(0, -(-num_slots // side_group.block_size) - first - len(blocks))
            num_missing += min(1, lacking) if side_group.has_gaps else lacking
            num_missing += sum([block.ref_cnt == 0 for block in blocks])
        if self._group_pool.anchors is not None:
            return num_missing
        return num_missing + super().count_missing(sequence, num_slots, hit)

    def unwritten_blocks(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of all groups that are lost if only this many tokens were written. O(their number)."""
        lost = super().unwritten_blocks(sequence, num_tokens)
        for table in tables_of(sequence).tables:
            unwritten = sequence.unwritten(table.blocks, table.num_dead, table.side_group.block_size, num_tokens)
            lost += [block for block in unwritten if block is not EMPTY]
        return lost

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> int | None:
        """As `SlotAllocator.first_lost_in`, for the blocks of all groups."""
        first = super().first_lost_in(sequence, lost)
        starts = [] if first is None else [first]
        for side_group, index, block in tables_of(sequence).owned():
            if block in lost:
                starts.append(max(index * side_group.block_size, lost[block]))
        return min(starts, default=None)

    def cache_from(self, sequence: Sequence, first: int, num_tokens: int, digests: Digests | None) -> None:
        """Cache the blocks of all groups that the first `num_tokens` tokens fill, from block `first` on. O(blocks)."""
        super().cache_from(sequence, first, num_tokens, digests)
        attach_anew(self._group_index, sequence, first)
        self.pool.requeue_detached()

    def commit(self, prepared: Commit) -> None:
        """Begin a change by caching the blocks of all groups that a sequence's written tokens fill. O(blocks)."""
        super().commit(prepared)
        sequence = prepared[0]
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)  # now, since blocks that a pin lacks may leave the window before `free`

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return the blocks that a sequence holds, by table. O(groups)."""
        tables = tables_of(sequence)
        held = [sequence.blocks, *[table.held for table in tables.tables]]
        return held if tables.fallback is None else held + [blocks for _, blocks in tables.fallback.tables]

    def _release_tables(self, sequence: Sequence) -> None:
        super()._release_tables(sequence)
        tables = tables_of(sequence)
        if tables.fallback is not None:
            for blocks in tables.end_loads():
                self.pool.release_table(blocks, 0, sequence)
        for table in tables.tables:
            self.pool.release_table(table.held if self._layout.has_gaps else table.blocks, 0, sequence)

    def _parts_in_block(self, num_tokens: int) -> bool:
        return num_tokens % self.alignment != 0 or self._layout.has_scratch

    def _need(self, sequence: Sequence, start: int, num_slots: int, num_in_flight: int = 0) -> Need:
        """Return what `num_slots` slots need, with writing from `start` on."""
        need = Need(sequence, tables_of(sequence), start, num_slots, self._block_size)
        if num_in_flight:
            need.keep_for(start - num_in_flight)
        return need

    def _num_taken_for(self, needs: list[Need]) -> int:
        """Return how many free blocks these needs take, minus those that their sequences release first."""
        num_taken = 0
        leaving: dict[KVCacheBlock, int] = {}
        for need in needs:
            num_taken += need.num_blocks(self._num_tables)
            if any(need.passed):
                for block in need.leaving():
                    leaving[block] = leaving.get(block, 0) + 1
        return num_taken - sum([count == block.ref_cnt for block, count in leaving.items()])

    def _let_pass(self, need: Need) -> None:
        """Release the blocks that have left the windows of a sequence."""
        for table, num_passed in zip(need.tables.tables, need.passed, strict=True):
            if num_passed:
                first = table.num_dead
                kept: list[KVCacheBlock] = []
                passed: list[KVCacheBlock] = []
                empty: list[KVCacheBlock] = []
                for index, block in enumerate(table.drop_first(num_passed), first):
                    if block is EMPTY:
                        continue
                    if not block.is_cached:
                        empty.append(block)
                    elif table.side_group.kind.keeps_passed or need.tables.is_landmark(table, index):
                        kept.append(block)
                    else:
                        passed.append(block)
                self._group_pool.release_passed(passed, empty)
                if kept:
                    self.pool.release_table(kept)

    def _finish(self, need: Need, end: int, digests: Digests | None) -> list[KVCacheBlock]:
        """Give a sequence the blocks that it needs, and cache those that its first `end` tokens fill."""
        blocks = self._take(need.num_blocks(self._num_tables), need.sequence)
        self._fill(need, blocks, 0, [])
        self._count(need.sequence, end)
        if self._layout.has_gaps:
            need.tables.note_end(need.num_slots)
        self._cache(need.sequence, digests)
        return blocks

    def _fill(self, need: Need, blocks: list[KVCacheBlock], step_index: int, changes: list[TableChange]) -> None:
        """Give a sequence the blocks that it needs, group after group: taken blocks, and anchors. O(blocks).

        step_index: the sequence's index in a step. Appends the table entries that change to `changes`.
        """
        sequence, side_tables, numbers = need.sequence, need.tables.tables, self._layout.table_numbers
        primary = len(side_tables)
        if self._group_pool.anchors is not None:
            self._fill_table(need, primary, self._group_pool.take_anchors(need.num_taken(primary)))
        first = 0
        new_blocks: list[list[KVCacheBlock]] = [[]] * len(self._layout.groups)
        for group, number in numbers.items():
            part = blocks[first : first + need.num_taken(number)]
            first += len(part)
            new_blocks[group] = part
            if part:
                filled = zip(self._fill_table(need, number, part), part, strict=True)
                changes += [(step_index, group, index, block.block_id) for index, block in filled]
        need.tables.new_blocks = new_blocks
        sequence.tail_owner = sequence.owner

    def _fill_gaps(self, sequence: Sequence, tables: GroupTables) -> list[KVCacheBlock]:
        """Replace the placeholders in a sequence's side tables with new blocks, for loads. Returns them by group."""
        filled: list[KVCacheBlock] = []
        for table in tables.tables:
            gaps = [index for index, block in enumerate(table.blocks, table.num_dead) if block is GAP]
            blocks = self._take(len(gaps), sequence)
            for index, block in zip(gaps, blocks, strict=True):
                table.replace(index, block)
            group = table.side_group.group
            tables.new_blocks[group] = blocks + tables.new_blocks[group]
            filled += blocks
        return filled

    def _fill_table(self, need: Need, number: int, blocks: list[KVCacheBlock]) -> list[int]:
        """Put blocks into a table: the first replaces the shared block, if any, the rest go to its end.

        Returns the indices of the changed entries.
        """
        sequence, side_tables, shared = need.sequence, need.tables.tables, need.shared[number]
        table = None if number == len(side_tables) else side_tables[number]
        end = len(sequence.blocks) if table is None else table.num_dead + len(table.blocks)
        indices: list[int] = []
        if shared is not None:
            self._let_copy(need, number, shared, blocks[0])
            if table is not None:
                table.replace(shared, blocks[0])
            else:
                sequence.replace_block(shared, blocks[0])
                sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, shared * self._block_size)
                sequence.num_given_tokens = min(sequence.num_given_tokens, shared * self._block_size)
            indices.append(shared)
            blocks = blocks[1:]
        if table is not None and blocks:
            if table.side_group.has_gaps:
                last = -(-need.num_slots // table.side_group.block_size) - 1
                table.extend([EMPTY] * (last - end))
                end = last
            table.extend(blocks)
        elif table is None:
            sequence.blocks += blocks
        return [*indices, *range(end, end + len(blocks))]

    def _let_copy(self, need: Need, number: int, shared: int, block: KVCacheBlock) -> None:
        """Release a shared block. Unless it is an anchor, note that it has to be copied to `block`."""
        source = need.block(number, shared)
        assert source is not None, f"{need.sequence}: shares a dead block"
        if self.soft_holds is not None:
            self.soft_holds.extend(need.sequence)
        self.pool.release_table([source])
        if not self._group_pool.is_anchor(source):
            self.copies.append((self._layout.table_groups[number], source.block_id, block.block_id))

    def _cache(self, sequence: Sequence, digests: Digests | None) -> None:
        """Cache the blocks that have become full, in all groups."""
        first = sequence.num_cached_blocks
        if sequence.num_computed_tokens // self._block_size > first:
            cache_full_blocks(self._index, sequence, digests)
            if sequence.num_cached_blocks > first:
                attach_full_blocks(self._group_index, sequence, first)
                if self._index.detached:
                    self.pool.requeue_detached()
                if self.soft_holds is not None:
                    # Now, since blocks that a pin lacks may have left the window before the sequence is freed.
                    self.soft_holds.extend(sequence)


def _begin_loading(tables: GroupTables, hit: LoadingHit) -> tuple[list[KVCacheBlock], list[KVCacheBlock], int]:
    """Begin the side tables of a sequence that loads, with placeholders for loaded blocks, and set its fallback.

    Returns the blocks of its primary table; the cached blocks of side groups and checkpoints, each as often as the
    sequence is to own it; and how many blocks the loads bring in addition to those of the primary group. O(blocks).
    """
    touched: list[KVCacheBlock] = []
    num_gaps = 0
    for table, (first, blocks) in zip(tables.tables, hit.mixed, strict=True):
        held = [block for block in blocks if block is not None]
        table.begin(first, [GAP if block is None else block for block in blocks])
        touched += held
        num_gaps += len(blocks) - len(held)
    tables.fallback = Fallback(len(hit.blocks) * tables.layout.block_size, hit.end, hit.tables)
    for _, held in hit.tables:
        touched += held
    for checkpoint in (hit.checkpoint, hit.arriving):
        touched += [] if checkpoint is None else checkpoint.blocks
    return hit.blocks + hit.more, touched, num_gaps + hit.num_state_blocks


def make_slots(
    num_blocks: SupportsIndex,
    layout: GroupLayout,
    hash_scheme: HashScheme,
    change: Change,
    first_block_id: SupportsIndex,
) -> SlotAllocator:
    """Return the slot allocator of a manager with these groups, with its pool and index.

    Raises InvalidArgumentError. O(num_blocks).
    """
    slots: SlotAllocator
    if layout.is_single:
        index = PrefixIndex(layout.block_size, hash_scheme)
        slots = SlotAllocator(BlockPool(num_blocks, index, first_block_id), change)
    else:
        group_index = GroupIndex(layout, hash_scheme)
        slots = GroupSlots(GroupPool(num_blocks, group_index, first_block_id), change)
    slots.groups = layout.groups
    return slots
