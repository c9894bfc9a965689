"""A sequence's side tables: one block table for each side group.

In a windowed group's table, an entry becomes *dead* when its block leaves the window, and stays dead. An entry's index
never changes, so token i is always in the block at index i // block_size. In a table with gaps, other entries may have
no block either.
"""

from collections.abc import Iterable, Iterator

from kvblocks.arguments import shown
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.layout import GroupLayout, SideGroup
from kvblocks.core.live_states import LiveState
from kvblocks.core.loading import Fallback
from kvblocks.core.sequence import Sequence, SideTables
from kvblocks.errors import SequenceStateError

DEAD_BLOCK_ID = 0
"""The id of a dead entry. It is a valid id, so that nothing breaks, but its block must not be read."""

EMPTY = KVCacheBlock(DEAD_BLOCK_ID)
"""A placeholder for the block of an entry that has none, in a table with gaps."""


class GroupTable:
    """The block table of one group. Its first num_dead entries are dead; blocks: those of the other entries.

    first_token: tokens before it were never computed in this group, though their block may be live. It is above 0 if
    the sequence started with a hit and the group isn't cached.
    """

    __slots__ = ("block_ids", "blocks", "first_token", "num_dead", "side_group")

    def __init__(self, side_group: SideGroup) -> None:
        self.side_group = side_group
        self.num_dead = self.first_token = 0
        self.blocks: list[KVCacheBlock] = []
        self.block_ids: list[int] = []

    def extend(self, blocks: list[KVCacheBlock]) -> None:
        """Add blocks at the end. O(blocks)."""
        self.blocks += blocks
        self.block_ids += [block.block_id for block in blocks]

    def replace(self, index: int, block: KVCacheBlock) -> None:
        """Put another block at the index of a live entry. O(1)."""
        self.blocks[index - self.num_dead] = block
        self.block_ids[index] = block.block_id

    def begin(self, num_dead: int, blocks: list[KVCacheBlock]) -> None:
        """Replace the whole table with `num_dead` dead entries and a hit's blocks. O(entries)."""
        self.num_dead = num_dead
        self.first_token = 0
        self.blocks = list(blocks)
        self.block_ids[:] = [DEAD_BLOCK_ID] * num_dead + [block.block_id for block in blocks]

    def num_passed(self, position: int) -> int:
        """Return how many of its first live blocks have left the window for queries from `position` on. O(1)."""
        num_passed = self.side_group.kind.first_needed(position) - self.num_dead
        return 0 if num_passed <= 0 else min(num_passed, len(self.blocks))

    def drop_first(self, num_blocks: int) -> list[KVCacheBlock]:
        """Make the first `num_blocks` live entries dead. Returns their blocks. O(live entries)."""
        dropped = self.blocks[:num_blocks]
        del self.blocks[:num_blocks]
        end = self.num_dead + num_blocks
        self.block_ids[self.num_dead : end] = [DEAD_BLOCK_ID] * num_blocks
        self.num_dead = end
        return dropped

    def truncate(self, num_entries: int) -> list[KVCacheBlock]:
        """Cut the table to its first `num_entries` entries, at least the dead ones. Returns the other blocks."""
        keep = num_entries - self.num_dead
        dropped = self.blocks[keep:]
        del self.blocks[keep:], self.block_ids[num_entries:]
        return dropped

    def live_block(self, index: int) -> KVCacheBlock | None:
        """Return the block at an index; None if the entry is dead or doesn't exist. O(1)."""
        index -= self.num_dead
        return self.blocks[index] if 0 <= index < len(self.blocks) else None

    @property
    def held(self) -> list[KVCacheBlock]:
        """The blocks that the sequence owns for this table. Don't change the list. O(live entries)."""
        return self.blocks


class GapTable(GroupTable):
    """The table of a group whose layers keep a state in place: it has blocks only where calls ended.

    ends: the indices of blocks that hold the state after their last token, because a call ended there. Of the full
    blocks, only these may be cached. end: how many tokens the state of the last call is after.
    """

    __slots__ = ("end", "ends")

    def __init__(self, side_group: SideGroup) -> None:
        super().__init__(side_group)
        self.end = 0
        self.ends: set[int] = set()

    def begin(self, num_dead: int, blocks: list[KVCacheBlock]) -> None:
        """As `GroupTable.begin`."""
        super().begin(num_dead, blocks)
        self.end = 0
        self.ends = {num_dead + len(blocks) - 1} if blocks else set()  # a hit's block has the state behind the hit

    def drop_first(self, num_blocks: int) -> list[KVCacheBlock]:
        """As `GroupTable.drop_first`, with `EMPTY` for entries without a block."""
        self.ends = {index for index in self.ends if index >= self.num_dead + num_blocks}
        return super().drop_first(num_blocks)

    def truncate(self, num_entries: int) -> list[KVCacheBlock]:
        """As `GroupTable.truncate`."""
        return [block for block in super().truncate(num_entries) if block is not EMPTY]

    @property
    def held(self) -> list[KVCacheBlock]:
        """As `GroupTable.held`."""
        return [block for block in self.blocks if block is not EMPTY]

    def note_end(self, num_slots: int) -> None:
        """Record that a call made room for this many tokens. The state is after them, or in a later block. O(1)."""
        index, rest = divmod(num_slots, self.side_group.block_size)
        self.end = max(self.end, num_slots)
        if not rest and num_slots == self.end:
            self.ends.add(index - 1)


class GroupTables(SideTables):
    """A sequence's side tables.

    tables: by `layout.side_groups`. landmarks: numbers of tokens at which a later sequence's hit will probably end.
    Blocks that such a hit needs are kept longer than other blocks that leave a window. fallback: where the sequence
    goes back to if its loads fail; None: it loads nothing. live_state: None if no group keeps a state.
    """

    __slots__ = ("fallback", "landmarks", "layout", "live_state", "tables")

    def __init__(self, layout: GroupLayout, ends: Iterable[int]) -> None:
        """ends: numbers of tokens at which hits may end. Rounded down to the alignment, they are the landmarks."""
        self.layout = layout
        self.num_groups = len(layout.groups)
        self.has_primary = layout.primary is not None
        self.landmarks = tuple(sorted({end // layout.alignment * layout.alignment for end in ends} - {0}))
        self.tables = [GapTable(group) if group.has_gaps else GroupTable(group) for group in layout.side_groups]
        self.new_blocks = [[] for _ in layout.groups]
        self.fallback: Fallback | None = None
        self.live_state: LiveState | None = None
        self.state_slot = None

    def note_start(self, position: int) -> None:
        """Record that the sequence starts after a hit, with a query at `position`. O(groups).

        In groups that aren't cached, the engine computes again what this query sees, and nothing before that.
        """
        for table in self.tables:
            if not table.side_group.kind.is_cached:
                table.first_token = table.side_group.kind.first_seen(position)

    def note_end(self, num_slots: int) -> None:
        """Record that a call made room for this many tokens in all. Matters where a table has gaps. O(groups)."""
        for table in self.tables:
            if isinstance(table, GapTable):
                table.note_end(num_slots)

    def owned(self) -> Iterator[tuple[SideGroup, int, KVCacheBlock]]:
        """Yield each block that the sequence owns for a side group, with its group and its index in the table."""
        for table in self.tables:
            for index, block in enumerate(table.blocks, table.num_dead):
                if block is not EMPTY:
                    yield table.side_group, index, block
        if self.fallback is not None:
            for side_group, (first, blocks) in zip(self.layout.side_groups, self.fallback.tables, strict=True):
                for index, block in enumerate(blocks, first):
                    yield side_group, index, block

    def end_loads(self) -> list[list[KVCacheBlock]]:
        """Drop the fallback. Returns the blocks that the sequence owned for it, by table. O(groups)."""
        fallback, self.fallback = self.fallback, None
        return [] if fallback is None else [blocks for _, blocks in fallback.tables]

    def block_ids(self, group: int) -> list[int] | None:
        """Return the block ids of a group's table, as the list itself; None for the primary group. O(1)."""
        number = self.layout.table_numbers.get(group)
        if number is None:
            return []
        return self.tables[number].block_ids if number < len(self.tables) else None

    def blocks(self, group: int) -> list[KVCacheBlock | None] | None:
        """Return the blocks of a group's table, None for dead entries; or None for the primary group. O(blocks).

        For a group that keeps a state, these are checkpoints' blocks that copies or loads in progress read or write.
        """
        number = self.layout.table_numbers.get(group)
        if number is None:
            state = self.live_state if group == self.layout.state else None
            return [] if state is None else [block for blocks in state.tables() for block in blocks]
        if number == len(self.tables):
            return None
        table = self.tables[number]
        if table.side_group.has_gaps:
            return [*[None] * table.num_dead, *[None if block is EMPTY else block for block in table.blocks]]
        return [*[None] * table.num_dead, *table.blocks]

    def first_live_block(self, group: int) -> int:
        """Return the first index of a group's table that isn't dead. O(1)."""
        number = self.layout.table_numbers.get(group)
        return 0 if number is None or number == len(self.tables) else self.tables[number].num_dead

    def check_back(self, position: int, sequence: Sequence, call: str) -> None:
        """As `SideTables.check_back`. A state in place can only go back to the beginning."""
        fallback = self.fallback
        for number, table in enumerate(self.tables):
            side_group = table.side_group
            end = max(table.end, sequence.num_computed_tokens) if isinstance(table, GapTable) else position
            if 0 < position < end:
                raise SequenceStateError(
                    f"{call}: expected to keep all {end} tokens with slots, since the state of group {side_group.group}"
                    f" is that after them; got {position} of {shown(sequence.sequence_id)}"
                )
            first = max(table.first_token, table.num_dead * side_group.block_size)
            if fallback is not None and position < fallback.end:
                first = fallback.tables[number][0] * side_group.block_size
            if side_group.kind.first_seen(position) < first:
                raise SequenceStateError(
                    f"{call}: expected to keep enough tokens that the next one sees no token before {first}, where the"
                    f" KV of group {side_group.group} ({side_group.kind.label}) begins now;"
                    f" got {position} of {shown(sequence.sequence_id)}"
                )

    def check(self, num_slots: int) -> None:
        """Raise AssertionError unless all tables have slots for `num_slots` tokens and the right ids. O(blocks)."""
        for table in self.tables:
            size, group = table.side_group.block_size, table.side_group.group
            assert (table.num_dead + len(table.blocks)) * size >= num_slots, f"group {group}: too short"
            expected = [DEAD_BLOCK_ID] * table.num_dead + [block.block_id for block in table.blocks]
            assert table.block_ids == expected, f"group {group}: its ids"

    def is_landmark(self, table: GroupTable, index: int) -> bool:
        """Whether a hit that ends at a landmark needs the block at this index of the table. O(landmarks)."""
        side_group = table.side_group
        for landmark in self.landmarks:
            # The last token of a full hit is computed again, hence - 1.
            if side_group.kind.first_needed(landmark - 1) <= index < -(-landmark // side_group.block_size):
                return True
        return False


def tables_of(sequence: Sequence) -> GroupTables:
    """Return the side tables of a sequence that has some. O(1)."""
    tables = sequence.side_tables
    assert isinstance(tables, GroupTables), f"{sequence}: has no side tables"
    return tables
