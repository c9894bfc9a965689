"""What follows from an engine's groups alone: which is the primary one, and what the others' blocks are attached to.

The *primary* group is the first with full attention. Its cached prefixes are what the prefix index knows; the blocks of
the others are attached to them (`side_groups`). Where no group has full attention, identities without KV stand in for
it (`anchors`).

Invariants: of two block sizes the smaller one divides the larger one, so hits, which every group must be able to
serve, are multiples of the largest.
"""

from collections.abc import Iterable
from itertools import pairwise

from kvblocks.arguments import is_a, listed, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow


class SideGroup:
    """A group beside the primary one: what its blocks are attached to.

    Its block that ends with token e is attached to the primary block that has token e - 1, in one of the columns
    first_column to first_column + num_columns - 1 of that block's row: several when its blocks are smaller. window:
    None: all of the past. is_cached: whether its blocks are attached at all. keeps_passed: whether those that left the
    window are reused by last use. Read-only.
    """

    __slots__ = (
        *("block_size", "first_column", "group", "is_cached", "keeps_passed", "num_columns", "primary_size", "window"),
    )

    def __init__(self, group: int, spec: Group, primary_size: int, first_column: int) -> None:
        self.group = group
        self.block_size = spec.block_size
        self.window = spec.window
        self.primary_size = primary_size
        self.first_column = first_column
        self.is_cached = spec.is_cached
        self.keeps_passed = spec.keeps_passed
        self.num_columns = max(1, primary_size // spec.block_size) if self.is_cached else 0

    def home(self, number: int) -> tuple[int, int]:
        """Return the primary block that this group's block `number` is attached to, and its column in the row. O(1)."""
        end = (number + 1) * self.block_size
        position = (end - 1) // self.primary_size
        if self.num_columns == 1:
            return position, self.first_column
        return position, self.first_column + (end - position * self.primary_size) // self.block_size - 1

    def number_at(self, position: int, column: int) -> int:
        """Return which of its blocks has this home. O(1)."""
        if self.num_columns == 1:
            return (position + 1) * self.primary_size // self.block_size - 1
        return position * self.primary_size // self.block_size + column - self.first_column

    def first_needed(self, position: int) -> int:
        """Return the first of its blocks that has a token which a query at `position` sees. O(1).

        The one place that knows what layers see. It never decreases with the position: lookups skip what lies before
        a missing block (`hit`), and tables let go for good of what no query sees any more (`tables`).
        """
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.block_size


class GroupLayout:
    """What follows from the groups alone. Read-only.

    primary: the number of the group whose cached prefixes the index knows, None where no group has full
    attention. block_size: tokens of a primary block. alignment: hits are multiples of it. smallest_block_size: of any
    group. side_groups: the other groups. row_size: columns of a row. table_numbers: by
    group, the number of its table: its index in side_groups, or one behind them for the primary group.
    """

    __slots__ = (
        "alignment",
        "block_size",
        "groups",
        "primary",
        "row_size",
        "side_groups",
        "smallest_block_size",
        "table_numbers",
    )

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        sizes = [group.block_size for group in groups]
        self.alignment, self.smallest_block_size = max(sizes), min(sizes)
        self.primary: int | None = None
        for number, group in enumerate(groups):
            if group.window is None and self.primary is None:
                self.primary = number
        self.block_size = self.alignment if self.primary is None else sizes[self.primary]
        self.side_groups: list[SideGroup] = []
        self.row_size = 0
        for number, group in enumerate(groups):
            if number != self.primary:
                side_group = SideGroup(number, group, self.block_size, self.row_size)
                self.side_groups.append(side_group)
                self.row_size += side_group.num_columns
        numbers = {side_group.group: number for number, side_group in enumerate(self.side_groups)}
        self.table_numbers = [numbers.get(group, len(self.side_groups)) for group in range(len(groups))]

    @property
    def is_single(self) -> bool:
        """Whether there is one group of full attention and nothing else. O(1)."""
        return not self.side_groups


def check_groups(groups: Iterable[Group]) -> GroupLayout:
    """Return the layout of what an engine gives as its groups. Raises InvalidArgumentError."""
    items = listed("groups", "FullAttention and SlidingWindow items", groups)
    if not items or not all(is_a(item, FullAttention) or is_a(item, SlidingWindow) for item in items):
        raise wrong("groups", "FullAttention and SlidingWindow items", items)
    sizes = sorted({item.block_size for item in items})
    for smaller, larger in pairwise(sizes):
        if larger % smaller:
            raise InvalidArgumentError(
                f"groups: expected block sizes of which each divides the next larger one, got {smaller} and {larger}"
            )
    return GroupLayout(tuple(items))


def make_layout(size: int | None, groups: Iterable[Group]) -> GroupLayout:
    """Return the layout of a manager's `groups`. size: the block size that was given beside them, if one was.

    Raises InvalidArgumentError, also when both are given and don't agree.
    """
    layout = check_groups(groups)
    if size is not None and size != layout.block_size:
        raise InvalidArgumentError(
            f"block_size: expected the groups' alone, which is {layout.block_size} for the primary one, got {size} too"
        )
    return layout
