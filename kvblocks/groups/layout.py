"""What follows from an engine's groups: which is the primary group, and what the side groups' blocks are attached to.

The *primary* group is the first with full attention. The prefix index knows its cached prefixes; the blocks of the side
groups are attached to these. Where no group has full attention, anchors stand in for the primary group (`anchors`).

Invariants: of two block sizes the smaller one divides the larger one. So hits, which every group must be able to serve,
are multiples of the largest block size.
"""

from collections.abc import Iterable
from itertools import pairwise

from kvblocks.arguments import is_a, listed, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow


class SideGroup:
    """A side group, and what its blocks are attached to.

    A block of it is attached to the primary block that contains its last token, in one of the columns first_column to
    first_column + num_columns - 1 of that block's row. It has several columns if its blocks are smaller. window: None:
    full attention. is_cached: whether its blocks are attached at all. keeps_passed: whether blocks that left the window
    are reused in order of last use. Read-only.
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
        """Return the number of its block whose `home` is (position, column). O(1)."""
        if self.num_columns == 1:
            return (position + 1) * self.primary_size // self.block_size - 1
        return position * self.primary_size // self.block_size + column - self.first_column

    def first_needed(self, position: int) -> int:
        """Return the number of its first block with a token that a query at `position` sees. O(1).

        Only this function knows which tokens layers see. The result must never decrease with the position: lookups skip
        the blocks before a missing one (`hit`), and tables release blocks that no later query sees (`tables`).
        """
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.block_size


class GroupLayout:
    """What follows from the groups. Read-only.

    primary: the number of the primary group, None where no group has full attention. block_size: tokens in a primary
    block. alignment: the largest block size of a group; every hit is a multiple of it. smallest_block_size: the
    smallest block size of a group. side_groups: all groups but the primary one. row_size: columns of a row.
    table_numbers: by group, the number of its table: its index in side_groups, or len(side_groups) for the primary
    group.
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
    """Return the layout of an engine's groups. Raises InvalidArgumentError."""
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
    """Return the layout of a manager's `groups`. size: the manager's `block_size` argument.

    Raises InvalidArgumentError, also when `size` isn't None and differs from the primary group's block size.
    """
    layout = check_groups(groups)
    if size is not None and size != layout.block_size:
        raise InvalidArgumentError(
            f"block_size: expected None, or {layout.block_size} as the groups have it, got {size}"
        )
    return layout
