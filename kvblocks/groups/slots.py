"""How a sequence of several groups gets blocks, and what becomes of those that leave a window.

A call that makes room for the tokens from `start` on first lets go of what no query at `start` or later sees, so that
the step may reuse it; then it takes what all groups need. Whether the pool can serve that is known before anything is
changed.

What leaves a window is worth less than what is freed at a sequence's end: only a hit that ends just behind it needs
it. So it is reused before other cached blocks, except what hits will probably need: those that end where this
sequence's own hit did, where its prefix parted from what was cached, and where its prompt ends (its landmarks). Where
a block is kept because another one is not is explained in docs/design.md; keeping the state at the points where
sequences part is what Marconi does for recurrent layers.
"""

from array import array
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING
from kvblocks.core.epoch import Epoch
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.core.steps import StepAllocator
from kvblocks.groups.caching import attach_anew, attach_full_blocks
from kvblocks.groups.hit import GroupHit
from kvblocks.groups.need import Need, keep_for_last, table_block
from kvblocks.groups.pool import GroupPool
from kvblocks.groups.tables import GroupTables
from kvblocks.retention.pins import Pins


class GroupSlots(StepAllocator):
    """`StepAllocator` for several groups.

    copy_groups: of `copies`, one for each. step_changes: of the last step, with their groups. num_limited_tokens: that
    the primary group had cached for sequences which started, and another group had not.
    """

    def __init__(self, pool: GroupPool, pins: Pins) -> None:
        super().__init__(pool, pins)
        self._group_pool = pool
        self._group_index = pool.group_index
        self._layout = pool.group_index.layout
        self.smallest_block_size = self._layout.smallest_block_size
        self.copy_groups: list[int] = []
        self.step_changes: list[tuple[int, int, int, int]] = []
        self.num_limited_tokens = 0

    def start(
        self, sequence: Sequence, epoch: Epoch | None, end: int, num_lookahead_tokens: int, hit: CacheHit | None
    ) -> list[KVCacheBlock] | None:
        """Give a sequence without blocks those of `hit` and what its first `end` tokens need beyond them, as ever."""
        found = hit if isinstance(hit, GroupHit) else None
        ends = [] if found is None else [found.num_readonly_tokens, found.num_matched_tokens]
        tables = GroupTables(self._layout, [*ends, sequence.num_prompt_tokens])
        held: list[KVCacheBlock] = []
        touched: list[KVCacheBlock] = []
        if found is not None:
            held = found.blocks
            for table, (first, blocks) in zip(tables.tables, found.tables, strict=True):
                table.begin(first, blocks)
                touched += blocks
        in_pool = touched if self._group_pool.anchors is not None else held + touched
        sequence.owner = self.manager  # first, so that what is left half done is nobody else's to allocate
        sequence.side_tables = tables
        sequence.blocks += held
        try:
            need = Need(sequence, len(held) * self._block_size, end + num_lookahead_tokens, self._block_size)
            num_taken = need.num_taken_of_pool(has_anchors=self._group_pool.anchors is not None)
            if not self._pool.can_take(num_taken, in_pool) and self._pins.refuses(num_taken, in_pool):
                self._undo_start(sequence)
                return None
            digests = digests_ahead(self._index, sequence, epoch, held, len(held), end)
        except BaseException:
            self._undo_start(sequence)
            raise
        self._pool.touch(held)
        self._pool.touch(touched)
        sequence.epoch = epoch
        sequence.num_cached_blocks = len(held)
        self.num_limited_tokens += 0 if found is None else found.num_matched_tokens - found.num_readonly_tokens
        return self._finish(need, end, digests)

    def grow(self, sequence: Sequence, end: int, num_lookahead_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence with blocks what its first `end` tokens need, and let go of what it needs no more."""
        need = Need(sequence, sequence.num_computed_tokens, end + num_lookahead_tokens, self._block_size)
        if self._lacks_for([need]):
            return None
        digests = self._digests_ahead(sequence, end)
        self.manager.change_state = CHANGING
        self._let_pass(need)
        return self._finish(need, end, digests)

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence slots for `num_tokens` more than are known. Lets go of nothing."""
        if not num_tokens:
            return []
        need = Need(sequence, sequence.num_computed_tokens, sequence.num_tokens + num_tokens, self._block_size)
        need.passed = []
        if self._lacks_for([need]):
            return None
        self.manager.change_state = CHANGING
        blocks = self._fill(need, None)
        self._find_fits_below(sequence)
        return blocks

    def append(self, sequence: Sequence, tokens: "array[int] | memoryview[int]") -> list[KVCacheBlock] | None:
        """Add packed tokens to a sequence all of whose tokens have slots, with slots for them."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        need = Need(sequence, num_before, end, self._block_size)
        if self._lacks_for([need]):
            return None
        digests = self._append_tokens(sequence, tokens)
        self._let_pass(need)
        return self._finish(need, end, digests)

    def append_step(
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        places: dict[Sequence, int],
    ) -> list[tuple[int, int, int]] | None:
        """Add one token to each sequence; the changes are in `step_changes`, with their groups, and returned without.

        Raises as `append`, changing nothing.
        """
        needs = [Need(s, s.num_computed_tokens, s.num_computed_tokens + 1, self._block_size) for s in at_boundary]
        keep_for_last(needs)
        if self._lacks_in_step(self._num_taken_for(needs), tokens):
            return None
        self._append_each(sequences, tokens)
        digests = self._digests_of_step(sequences, at_boundary)
        for need in needs:
            self._let_pass(need)
        self.step_changes = []
        for need in needs:
            self._fill(need, places[need.sequence])
        for sequence in at_boundary:
            self._count(sequence, sequence.num_computed_tokens)
            self._cache(sequence, digests[sequence])
        return [(i, position, block_id) for i, _, position, block_id in self.step_changes]

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of the further tables of a sequence whose primary ones were given back. O(blocks).

        Those that hold nothing are reused first.
        """
        tables, sequence.side_tables = sequence.side_tables, None
        assert tables is not None
        for table in tables.tables:
            self._group_pool.release_table(table.blocks)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Let a twin hold what the further tables hold of the computed tokens. O(blocks)."""
        tables = sequence.side_tables
        assert tables is not None
        twin.side_tables = GroupTables(self._layout, tables.landmarks)
        for table, copied in zip(tables.tables, twin.side_tables.tables, strict=True):
            num_kept = -(-twin.num_computed_tokens // table.side_group.block_size) - table.num_dead
            copied.begin(table.num_dead, table.blocks[: max(0, num_kept)])
            self._pool.touch(copied.blocks)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back what the further tables hold beyond the first `num_tokens`. O(blocks given back)."""
        tables = sequence.side_tables
        assert tables is not None
        for table in tables.tables:
            self._group_pool.release_table(table.truncate(-(-num_tokens // table.side_group.block_size)))

    def cache_anew(self, sequence: Sequence) -> None:
        """Cache what is attached to a sequence's blocks, which were cached anew after a reset. O(blocks)."""
        attach_anew(self._group_index, sequence)
        self._group_pool.requeue_detached()

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return all that a sequence holds, by table. O(groups)."""
        tables = sequence.side_tables
        assert tables is not None
        return [sequence.blocks, *[table.blocks for table in tables.tables]]

    def _undo_start(self, sequence: Sequence) -> None:
        """Take back what `start` does to a sequence to see what it needs."""
        sequence.side_tables, sequence.blocks = None, []
        sequence.owner = None

    def _lacks_for(self, needs: list[Need]) -> bool:
        """Whether the pool can't serve all of them, after their sequences have let go of what they need no more."""
        return self._lacks(self._num_taken_for(needs))

    def _num_taken_for(self, needs: list[Need]) -> int:
        """Return how many blocks they take, beyond those that their sequences let go of before."""
        leaving: dict[KVCacheBlock, int] = {}
        for need in needs:
            for block in need.leaving():
                leaving[block] = leaving.get(block, 0) + 1
        num_taken = sum([need.num_taken_of_pool(has_anchors=self._group_pool.anchors is not None) for need in needs])
        return num_taken - sum([count == block.ref_cnt for block, count in leaving.items()])

    def _let_pass(self, need: Need) -> None:
        """Let go of what has left the windows of a sequence."""
        tables = need.sequence.side_tables
        assert tables is not None
        for table, num_passed in zip(tables.tables, need.passed, strict=True):
            if num_passed:
                first = table.num_dead
                kept: list[KVCacheBlock] = []
                others: list[KVCacheBlock] = []
                for place, block in enumerate(table.drop_first(num_passed), first):
                    (kept if block.is_cached and tables.is_landmark(table, place) else others).append(block)
                self._group_pool.release_passed(others)
                self._pool.release_table(kept)

    def _finish(self, need: Need, end: int, digests: bytearray | None) -> list[KVCacheBlock]:
        """Give a sequence what it needs, and cache what its first `end` tokens fill."""
        blocks = self._fill(need, None)
        self._count(need.sequence, end)
        self._cache(need.sequence, digests)
        return blocks

    def _fill(self, need: Need, step_place: int | None) -> list[KVCacheBlock]:
        """Give a sequence what it needs, group after group; returns the blocks of the pool. O(blocks).

        step_place: the sequence's place in a step whose changes are wanted.
        """
        sequence, tables = need.sequence, need.sequence.side_tables
        assert tables is not None
        has_anchors = self._group_pool.anchors is not None
        blocks = self._take(need.num_taken_of_pool(has_anchors=has_anchors), sequence)
        primary = len(tables.tables)
        if has_anchors:
            self._fill_table(need, primary, self._group_pool.take_anchors(need.num_taken(primary)))
        first, new_blocks, numbers = 0, [], self._layout.table_numbers
        for group, number in enumerate(numbers):
            part = blocks[first : first + need.num_taken(number)]
            first += len(part)
            new_blocks.append(part)
            places = self._fill_table(need, number, part)
            if step_place is not None:
                changes = zip(places, part, strict=True)
                self.step_changes += [(step_place, group, place, block.block_id) for place, block in changes]
        tables.new_blocks = new_blocks
        sequence.tail_owner = sequence.owner
        return blocks

    def _fill_table(self, need: Need, number: int, blocks: list[KVCacheBlock]) -> list[int]:
        """Put blocks in the shared place of a table, if it has one, and at its end; returns the places."""
        sequence, tables = need.sequence, need.sequence.side_tables
        assert tables is not None
        is_primary, shared = number == len(tables.tables), need.shared[number]
        end = len(sequence.blocks) if is_primary else tables.tables[number].num_places
        places = [] if shared is None else [shared]
        places += range(end, end + need.missing[number])
        for place, block in zip(places, blocks, strict=True):
            if place == shared:
                self._let_copy(sequence, number, table_block(sequence, number, place), block)
            if not is_primary:
                tables.tables[number].put(place, block)
            elif place < end:
                sequence.replace_block(place, block)
                sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, place * self._block_size)
            else:
                sequence.blocks.append(block)
        return places

    def _let_copy(self, sequence: Sequence, number: int, source: KVCacheBlock, block: KVCacheBlock) -> None:
        """Let go of a shared block, and have it copied if it has any memory."""
        self._pins.extend(sequence)
        self._pool.release_table([source])
        if not self._group_pool.is_anchor(source):
            self.copies.append((source.block_id, block.block_id))
            self.copy_groups.append(self._layout.table_numbers.index(number))

    def _cache(self, sequence: Sequence, digests: bytearray | None) -> None:
        """Cache what has become full, in all groups."""
        first = sequence.num_cached_blocks
        cache_full_blocks(self._index, sequence, digests)
        if sequence.num_cached_blocks > first:
            attach_full_blocks(self._group_index, sequence, first)
            self._group_pool.requeue_detached()
            self._pins.extend(sequence)  # what a pin lacks may have left the window when the sequence is freed

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies since the last call, and forget them. O(1)."""
        self.copy_groups = []
        return super().take_copies()
