"""The block tables that a sequence has beside its primary one: one for each further group.

A windowed group's table forgets its beginning: a place whose block has left the window is *dead*, and stays so. Where
places stand never changes, so token i is always in place i // block_size.
"""

from collections.abc import Hashable, Iterable

from kvblocks.arguments import shown
from kvblocks.core.block import KVCacheBlock
from kvblocks.errors import SequenceStateError
from kvblocks.groups.layout import GroupLayout, SideGroup

DEAD_BLOCK_ID = 0
"""What stands in the dead places of a list of ids: an id in range, so that nothing breaks; never to be read."""


class GroupTable:
    """The block table of one group. blocks: of its places num_dead, num_dead + 1, …; those before are dead."""

    __slots__ = ("block_ids", "blocks", "num_dead", "side_group")

    def __init__(self, side_group: SideGroup) -> None:
        self.side_group = side_group
        self.num_dead = 0
        self.blocks: list[KVCacheBlock] = []
        self.block_ids: list[int] = []

    @property
    def num_places(self) -> int:
        """Places, dead ones included. O(1)."""
        return self.num_dead + len(self.blocks)

    def put(self, place: int, block: KVCacheBlock) -> KVCacheBlock | None:
        """Put a block at `place`, a live one or the next; returns the one that stood there. O(1)."""
        if place == self.num_dead + len(self.blocks):
            self.blocks.append(block)
            self.block_ids.append(block.block_id)
            return None
        replaced = self.blocks[place - self.num_dead]
        self.blocks[place - self.num_dead] = block
        self.block_ids[place] = block.block_id
        return replaced

    def begin(self, num_dead: int, blocks: list[KVCacheBlock]) -> None:
        """Begin an empty table with dead places and a hit's blocks. O(places)."""
        self.num_dead = num_dead
        self.blocks = list(blocks)
        self.block_ids = [DEAD_BLOCK_ID] * num_dead + [block.block_id for block in blocks]

    def num_passed(self, position: int) -> int:
        """Return how many of its first live blocks no query at `position` or later sees. O(1)."""
        return min(max(0, self.side_group.first_needed(position) - self.num_dead), len(self.blocks))

    def drop_first(self, num_blocks: int) -> list[KVCacheBlock]:
        """Make the first `num_blocks` live places dead; returns their blocks. O(live places)."""
        dropped = self.blocks[:num_blocks]
        del self.blocks[:num_blocks]
        end = self.num_dead + num_blocks
        self.block_ids[self.num_dead : end] = [DEAD_BLOCK_ID] * num_blocks
        self.num_dead = end
        return dropped

    def truncate(self, num_places: int) -> list[KVCacheBlock]:
        """Cut the table to its first `num_places`, no fewer than are dead; returns the blocks of the rest. O(rest)."""
        keep = num_places - self.num_dead
        dropped = self.blocks[keep:]
        del self.blocks[keep:], self.block_ids[num_places:]
        return dropped

    def live_block(self, place: int) -> KVCacheBlock | None:
        """Return the block at a place, None if that is dead or doesn't exist. O(1)."""
        index = place - self.num_dead
        return self.blocks[index] if 0 <= index < len(self.blocks) else None

    def check(self, num_slots: int) -> None:
        """Raise AssertionError unless it has slots for just `num_slots` tokens at least, and ids that agree."""
        assert self.num_places * self.side_group.block_size >= num_slots, f"group {self.side_group.group}: too short"
        expected = [DEAD_BLOCK_ID] * self.num_dead + [block.block_id for block in self.blocks]
        assert self.block_ids == expected, f"group {self.side_group.group}: its ids"


class GroupTables:
    """All tables of a sequence but the primary one.

    tables: by `layout.side_groups`. landmarks: numbers of tokens at which a later sequence's hit probably ends; what a
    hit there needs is kept longer than other blocks that leave a window. new_blocks: by group, those that the last
    call which made room gave.
    """

    __slots__ = ("landmarks", "layout", "new_blocks", "tables")

    def __init__(self, layout: GroupLayout, ends: Iterable[int]) -> None:
        """ends: where hits may end; the landmarks are the last multiples of alignment before them."""
        self.layout = layout
        self.landmarks = tuple(sorted({end // layout.alignment * layout.alignment for end in ends} - {0}))
        self.tables = [GroupTable(side_group) for side_group in layout.side_groups]
        self.new_blocks: list[list[KVCacheBlock]] = [[] for _ in layout.groups]

    def table(self, group: int) -> GroupTable | None:
        """Return the table of a group, None for the primary one. O(groups)."""
        for table in self.tables:
            if table.side_group.group == group:
                return table
        return None

    def check_truncate(self, position: int, sequence_id: Hashable) -> None:
        """Raise SequenceStateError if a query at `position` sees what has left a window. Changes nothing. O(groups)."""
        for table in self.tables:
            side_group = table.side_group
            if side_group.first_needed(position) < table.num_dead:
                first = table.num_dead * side_group.block_size
                raise SequenceStateError(
                    f"truncate: expected to keep so much that the next token sees nothing before {first}, where group"
                    f" {side_group.group}, with a window of {side_group.window}, begins to be held;"
                    f" got {position} of {shown(sequence_id)}"
                )

    def is_landmark(self, table: GroupTable, place: int) -> bool:
        """Whether a hit that ends at one of the landmarks needs the block at a place of a table. O(landmarks)."""
        side_group = table.side_group
        for landmark in self.landmarks:
            # Of a hit that is the whole prompt the last token is computed once more, hence - 1.
            if side_group.first_needed(landmark - 1) <= place < -(-landmark // side_group.block_size):
                return True
        return False
