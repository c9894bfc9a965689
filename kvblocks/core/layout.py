"""What follows from an engine's groups: which is the primary group, and what the side groups' blocks are attached to.

The *primary* group is the first one with full attention. The prefix index knows its cached prefixes, and the blocks of
the side groups are attached to these. Where no group has full attention, virtual blocks stand in for the primary group
(`virtual blocks`).

Invariant: of any two block sizes the smaller one divides the larger one. So hits, which every group must be able to
serve, are multiples of the largest block size. Groups whose blocks hold no tokens have no part in this.
"""

from collections.abc import Iterable
from itertools import pairwise

from kvblocks.arguments import is_a, listed, wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.kinds import Group, RecurrentState
from kvblocks.errors import InvalidArgumentError


class SideGroup:
    """A side group, and what its blocks are attached to. Read-only.

    group: its number. kind: the group as the engine described it. has_gaps: as in the kind. A block of the group is
    attached to the primary block that contains its last token, in one of the columns first_column to first_column +
    num_columns - 1 of that block's row. There are several columns if the group's blocks are smaller than the primary
    ones, and none if the kind isn't cached.
    """

    __slots__ = ("block_size", "first_column", "group", "has_gaps", "kind", "num_columns", "primary_size")

    def __init__(self, group: int, kind: Group, primary_size: int, first_column: int) -> None:
        self.group = group
        self.kind = kind
        self.block_size = kind.block_size
        self.has_gaps = kind.has_gaps
        self.primary_size = primary_size
        self.first_column = first_column
        self.num_columns = max(1, primary_size // kind.block_size) if kind.is_cached else 0

    def home(self, number: int) -> tuple[int, int]:
        """Return the primary block that this group's block `number` is attached to, and its column in the row. O(1)."""
        end = (number + 1) * self.block_size
        position = (end - 1) // self.primary_size
        if self.num_columns == 1:
            return position, self.first_column
        return position, self.first_column + (end - position * self.primary_size) // self.block_size - 1

    def number_at(self, position: int, column: int) -> int:
        """Return the number of the block whose `home` is (position, column). O(1)."""
        if self.num_columns == 1:
            return (position + 1) * self.primary_size // self.block_size - 1
        return position * self.primary_size // self.block_size + column - self.first_column


class GroupLayout:
    """What follows from the groups. Read-only.

    - primary: the number of the primary group; None where no group has full attention.
    - block_size: tokens in a primary block.
    - alignment: the largest block size of a group that holds tokens. Every hit is a multiple of it.
    - smallest_block_size: the smallest block size of a group that has a table.
    - has_gaps: whether a group's tables have gaps. has_scratch: whether a group's blocks hold no tokens.
    - state: the number of the group whose layers keep a state outside of its table; None where there is none.
    - side_groups: the groups that have a table, other than the primary one.
    - row_size: columns of a row.
    - table_numbers: for each group that has a table, the number of that table: its index in side_groups, or
      len(side_groups) for the primary group. table_groups: for each table, its group.
    """

    __slots__ = (
        "alignment",
        "block_size",
        "groups",
        "has_gaps",
        "has_scratch",
        "no_blocks",
        "primary",
        "row_size",
        "side_groups",
        "smallest_block_size",
        "state",
        "table_groups",
        "table_numbers",
        "tables_in_order",
    )

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        sizes = [group.block_size for group in groups]
        self.alignment = max([group.block_size for group in groups if group.has_tokens])
        self.has_gaps = any(group.has_gaps for group in groups)
        self.has_scratch = not all(group.has_tokens for group in groups)
        self.smallest_block_size = min([group.block_size for group in groups if group.has_table], default=min(sizes))
        self.no_blocks: list[list[KVCacheBlock]] = [[]] * len(groups)
        """By group, no new blocks: one constant for all calls that give none."""
        self.primary: int | None = None
        self.state: int | None = None
        for number, group in enumerate(groups):
            if group.sees_all and self.primary is None:
                self.primary = number
            if is_a(group, RecurrentState):
                self.state = number
        self.block_size = self.alignment if self.primary is None else sizes[self.primary]
        self.side_groups: list[SideGroup] = []
        self.row_size = 0
        for number, group in enumerate(groups):
            if group.has_table and number != self.primary:
                side_group = SideGroup(number, group, self.block_size, self.row_size)
                self.side_groups.append(side_group)
                self.row_size += side_group.num_columns
        self.table_groups = [side_group.group for side_group in self.side_groups]
        self.table_groups += [] if self.primary is None else [self.primary]
        self.table_numbers = {group: self.table_groups.index(group) for group in sorted(self.table_groups)}
        self.tables_in_order = tuple(self.table_numbers.items())
        """(group, number of its table), by group: the order in which new blocks are handed out."""

    @property
    def state_kind(self) -> RecurrentState | None:
        """The group whose layers keep a state, as the engine described it; None where there is none. O(1)."""
        kind = None if self.state is None else self.groups[self.state]
        return kind if isinstance(kind, RecurrentState) else None

    def num_needed_beside(self, end: int) -> int:
        """Return how many blocks a hit of `end` tokens needs beside the primary group's. O(groups)."""
        number = 0
        for side_group in self.side_groups:
            first, last = side_group.kind.needed_blocks(end, end)
            number += last - first
        kind = self.state_kind
        return number if kind is None or not end else number + kind.checkpoint_blocks

    @property
    def is_single(self) -> bool:
        """Whether there is one group of full attention and nothing else. O(1)."""
        return len(self.groups) == 1 and self.primary is not None


def check_groups(groups: Iterable[Group]) -> GroupLayout:
    """Return the layout of an engine's groups. Raises InvalidArgumentError."""
    items = listed("groups", "Group items", groups, in_order=True)
    if not items or not all(is_a(item, Group) for item in items):
        raise wrong("groups", "Group items", items)
    sizes = sorted({item.block_size for item in items if item.has_tokens})
    if not sizes:
        raise wrong("groups", "at least one group whose blocks hold tokens", items)
    for smaller, larger in pairwise(sizes):
        if larger % smaller:
            raise InvalidArgumentError(
                f"groups: expected block sizes of which each divides the next larger one, got {smaller} and {larger}"
            )
    layout = GroupLayout(tuple(items))
    _check_state(layout)
    return layout


def _check_state(layout: GroupLayout) -> None:
    """Raise InvalidArgumentError unless at most one group has a state, and then one has full attention."""
    kind = layout.state_kind
    if kind is None:
        return
    if sum([is_a(group, RecurrentState) for group in layout.groups]) > 1:
        raise wrong("groups", "at most one RecurrentState, for all layers that keep a state", layout.groups)
    if layout.primary is None:
        raise wrong("groups", "a group of full attention beside a RecurrentState", layout.groups)
    if kind.every is not None and kind.every % layout.alignment:
        raise InvalidArgumentError(
            f"groups: expected `every` of a RecurrentState to be a multiple of the largest block size, which is"
            f" {layout.alignment}, got {kind.every}"
        )


def make_layout(size: int | None, groups: Iterable[Group]) -> GroupLayout:
    """Return the layout of a manager's `groups`. size: the manager's `block_size` argument.

    Raises InvalidArgumentError, also when `size` is given and differs from the primary group's block size.
    """
    layout = check_groups(groups)
    if size is not None and size != layout.block_size:
        raise InvalidArgumentError(
            f"block_size: expected None, or {layout.block_size} as the groups have it, got {size}"
        )
    return layout
