"""A sequence's side tables: one block table for each group beside the primary one.

In a windowed group's table, an entry becomes *dead* when its block leaves the window, and stays dead. An entry's index
never changes, so token i is always in the block at index i // block_size. In a table with gaps, other entries may have
no block either.

A call that gives slots first asks each table to `plan`: how many blocks it needs, and which it can give back before.
The plan is kept in the table until the call carries it out, or plans anew.
"""

from collections.abc import Iterable, Iterator

from kvblocks.arguments import shown
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.layout import GroupLayout, SideGroup
from kvblocks.core.live_states import LiveState
from kvblocks.core.loading import Fallback
from kvblocks.core.sequence import Sequence
from kvblocks.errors import SequenceStateError

DEAD_BLOCK_ID = 0
"""The id of a dead entry. It is a valid id, so that nothing breaks, but its block must not be read."""

EMPTY = KVCacheBlock(DEAD_BLOCK_ID)
"""A placeholder for the block of an entry that has none, in a table with gaps."""


class GroupTable:
    """The block table of one group, for layers whose blocks are addressed by token."""

    __slots__ = ("block_ids", "blocks", "first_token", "missing", "num_dead", "passing", "shared", "side_group")

    def __init__(self, side_group: SideGroup) -> None:
        self.side_group = side_group
        self.num_dead = 0
        """How many entries, from the first, are dead."""
        self.first_token = 0
        """Tokens before it were never computed in this group, though their block may be live. It is above 0 if the
        sequence started with a hit and the group isn't cached.
        """
        self.blocks: list[KVCacheBlock] = []
        """The blocks of the entries that aren't dead."""
        self.block_ids: list[int] = []
        """The ids of all entries."""
        self.missing = 0
        """Planned: how many new blocks it needs at its end."""
        self.passing = 0
        """Planned: how many of its first live blocks have left the window."""
        self.shared: int | None = None
        """Planned: the index of the shared block that must not be written to; None: there is none."""

    # What slots for more tokens need.

    def plan(self, passed_at: int, num_slots: int) -> None:
        """Plan slots for the first `num_slots` tokens. No query before `passed_at` will be computed any more. O(1)."""
        self.plan_end(num_slots)
        self.passing = self.num_passed(passed_at)

    def plan_end(self, num_slots: int) -> None:
        """`plan` of a table that gives nothing back. O(1)."""
        lacking = -(-num_slots // self.side_group.block_size) - self.num_dead - len(self.blocks)
        self.missing = lacking if lacking > 0 else 0  # noqa: FURB136  # max() costs three times as much
        self.passing = 0
        self.shared = None

    def plan_copy(self, start: int) -> None:
        """Add to the plan that the token at `start` can't be written to a block that others may read. O(1)."""
        size = self.side_group.block_size
        if start % size:
            block = self.live_block(start // size)
            if block is not None and block.is_shared:
                self.shared = start // size

    @property
    def num_planned(self) -> int:
        """How many blocks the plan takes. O(1)."""
        return self.missing + (self.shared is not None)

    def num_passed(self, position: int) -> int:
        """Return how many of its first live blocks have left the window for queries from `position` on. O(1)."""
        num_passed = self.side_group.kind.first_needed(position) - self.num_dead
        return 0 if num_passed <= 0 else min(num_passed, len(self.blocks))

    def fill(self, blocks: list[KVCacheBlock], num_slots: int) -> list[int]:  # noqa: ARG002  # gaps need it
        """Put the planned new blocks at the table's end. Returns their indices. O(blocks)."""
        end = self.num_dead + len(self.blocks)
        self.extend(blocks)
        return [*range(end, end + len(blocks))]

    def note_end(self, num_slots: int) -> None:
        """Record that a call gave slots for this many tokens in all. Matters only where states are in place."""

    def may_cache(self, index: int) -> bool:  # noqa: ARG002  # gaps need it
        """Whether a full block at this index may be cached. O(1)."""
        return True

    # Its entries.

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

    def begin_as(self, other: "GroupTable", num_tokens: int) -> None:
        """Begin a fork's table with what `other` has of the first `num_tokens` tokens. O(entries)."""
        num_kept = -(-num_tokens // self.side_group.block_size) - other.num_dead
        self.begin(other.num_dead, other.blocks[: max(0, num_kept)])
        self.first_token = other.first_token

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

    def entries(self) -> list[KVCacheBlock | None]:
        """Return the blocks of all entries, None for those without one. O(entries)."""
        return [*[None] * self.num_dead, *self.blocks]

    def end_of_state(self, num_computed_tokens: int) -> int:  # noqa: ARG002  # gaps need it
        """Return after how many tokens its state is, if it has one that can't go back; 0: it has none. O(1)."""
        return 0


class GapTable(GroupTable):
    """The table of a group whose layers keep a state in place: it has blocks only where calls ended."""

    __slots__ = ("end", "ends")

    def __init__(self, side_group: SideGroup) -> None:
        super().__init__(side_group)
        self.end = 0
        """How many tokens the state of the last call is after."""
        self.ends: set[int] = set()
        """The indices of blocks that hold the state after their last token, because a call ended there. Of the full
        blocks, only these may be cached.
        """

    def plan_end(self, num_slots: int) -> None:
        """As `GroupTable.plan_end`. It needs a block for its last entry alone."""
        super().plan_end(num_slots)
        self.missing = min(self.missing, 1)

    def fill(self, blocks: list[KVCacheBlock], num_slots: int) -> list[int]:
        """As `GroupTable.fill`, with `EMPTY` before the new block."""
        if blocks:
            last = -(-num_slots // self.side_group.block_size) - 1
            self.extend([EMPTY] * (last - self.num_dead - len(self.blocks)))
        return super().fill(blocks, num_slots)

    def note_end(self, num_slots: int) -> None:
        """As `GroupTable.note_end`. The state is after these tokens, or in a later block. O(1)."""
        index, rest = divmod(num_slots, self.side_group.block_size)
        self.end = max(self.end, num_slots)
        if not rest and num_slots == self.end:
            self.ends.add(index - 1)

    def may_cache(self, index: int) -> bool:
        """As `GroupTable.may_cache`."""
        return index in self.ends

    def begin(self, num_dead: int, blocks: list[KVCacheBlock]) -> None:
        """As `GroupTable.begin`."""
        super().begin(num_dead, blocks)
        self.end = 0
        self.ends = {num_dead + len(blocks) - 1} if blocks else set()  # a hit's block has the state behind the hit

    def begin_as(self, other: GroupTable, num_tokens: int) -> None:
        """As `GroupTable.begin_as`."""
        super().begin_as(other, num_tokens)
        if isinstance(other, GapTable):
            self.end, self.ends = other.end, set(other.ends)

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

    def entries(self) -> list[KVCacheBlock | None]:
        """As `GroupTable.entries`."""
        return [*[None] * self.num_dead, *[None if block is EMPTY else block for block in self.blocks]]

    def end_of_state(self, num_computed_tokens: int) -> int:
        """As `GroupTable.end_of_state`."""
        return max(self.end, num_computed_tokens)


class SideTables:
    """What a sequence has besides the primary group's block table."""

    __slots__ = (
        "fallback",
        "is_passing",
        "layout",
        "likely_ends",
        "live_state",
        "missing",
        "new_blocks",
        "num_slots",
        "shared",
        "tables",
    )

    def __init__(self, layout: GroupLayout, ends: Iterable[int]) -> None:
        """ends: numbers of tokens at which hits may end. Rounded down to the alignment, they are the likely ends."""
        self.layout = layout
        self.likely_ends = tuple(sorted({end // layout.alignment * layout.alignment for end in ends} - {0}))
        """Numbers of tokens at which a later sequence's hit will probably end. Blocks that such a hit needs are kept
        longer than other blocks that leave a window.
        """
        self.tables = [GapTable(group) if group.has_gaps else GroupTable(group) for group in layout.side_groups]
        """By `layout.side_groups`."""
        self.new_blocks: list[list[KVCacheBlock]] = [[] for _ in layout.groups]
        """By group, the new blocks of the last call that gave slots."""
        self.fallback: Fallback | None = None
        """Where the sequence goes back to if its loads fail; None: it loads nothing."""
        self.live_state: LiveState | None = None
        """Its recurrent state; None if no group keeps one."""
        self.missing = 0
        """Planned: how many blocks the primary table needs at its end."""
        self.shared: int | None = None
        """Planned: the index of the shared block of the primary table that must not be written to; None: none."""
        self.num_slots = 0
        """Planned: for how many tokens there are slots then."""
        self.is_passing = False
        """Planned for one token: whether blocks leave windows."""

    def plan(self, sequence: Sequence, start: int, num_slots: int, num_in_flight: int) -> None:
        """Plan slots for the sequence's first `num_slots` tokens, in all groups, with writing from `start` on.

        num_in_flight: how many tokens before `start` belong to steps that are still running, whose queries count, too.
        O(groups).
        """
        size = self.layout.block_size
        self.num_slots = num_slots
        passed_at = start if sequence.delayed_from is None else min(start, sequence.delayed_from)
        passed_at = min(passed_at, start - num_in_flight)
        for table in self.tables:
            table.plan(passed_at, num_slots)
        self.missing = max(0, -(-num_slots // size) - len(sequence.blocks))
        self.shared = None
        if sequence.tail_owner is None:
            for table in self.tables:
                table.plan_copy(start)
            if start % size and sequence.blocks[start // size].is_shared:
                self.shared = start // size

    def plan_one(self, sequence: Sequence, start: int) -> int:
        """`plan` for the one token at `start`. Returns how many blocks of the pool it takes. O(groups)."""
        if sequence.tail_owner is None:
            self.plan(sequence, start, start + 1, 0)
            self.is_passing = True
            return self.num_planned()
        self.num_slots = start + 1
        passed_at = start
        if sequence.delayed_from is not None and sequence.delayed_from < start:
            passed_at = sequence.delayed_from
        is_passing, number = False, 0
        for table in self.tables:
            side_group, num_dead, num_live = table.side_group, table.num_dead, len(table.blocks)
            table.shared = None
            table.missing = 0
            if start >= (num_dead + num_live) * side_group.block_size:
                table.missing = 1
                number += 1
            passing = side_group.kind.first_needed(passed_at) - num_dead
            if passing > 0:
                table.passing = passing if passing < num_live else num_live  # noqa: FURB136  # min() is slower
                is_passing = True
            else:
                table.passing = 0
        self.is_passing = is_passing
        self.shared = None
        self.missing = 0
        if start >= len(sequence.blocks) * self.layout.block_size:
            self.missing = 1
            if self.layout.primary is not None:
                number += 1
        return number

    def plan_start(self, num_held: int, num_slots: int) -> None:
        """`plan` for a sequence that starts with `num_held` blocks in its primary table. O(groups)."""
        self.num_slots = num_slots
        for table in self.tables:
            table.plan_end(num_slots)
        self.missing = max(0, -(-num_slots // self.layout.block_size) - num_held)
        self.shared = None

    def note_primary(self, blocks: list[KVCacheBlock]) -> None:
        """Record the new blocks of a call, all of which are the primary group's. O(groups)."""
        self.new_blocks = [[]] * len(self.layout.groups)
        if self.layout.primary is not None:
            self.new_blocks[self.layout.primary] = blocks

    @property
    def num_planned_primary(self) -> int:
        """How many blocks the plan takes for the primary table, perhaps virtual ones. O(1)."""
        return self.missing + (self.shared is not None)

    def num_planned(self) -> int:
        """Return how many blocks of the pool the plan takes. O(groups)."""
        number = 0 if self.layout.primary is None else self.missing + (self.shared is not None)
        for table in self.tables:
            number += table.missing + (table.shared is not None)
        return number

    def leaving(self) -> list[KVCacheBlock]:
        """Return the blocks that the sequence gives back by its plan; `EMPTY` for each gap. O(groups + blocks)."""
        leaving: list[KVCacheBlock] = []
        for table in self.tables:
            if table.passing:
                leaving += table.blocks[: table.passing]
        return leaving

    def note_start(self, position: int) -> None:
        """Record that the sequence starts after a hit, with a query at `position`. O(groups).

        In groups that aren't cached, the engine computes again what this query sees, and nothing before that.
        """
        for table in self.tables:
            if not table.side_group.kind.is_cached:
                table.first_token = table.side_group.kind.first_seen(position)

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

    def held(self) -> list[list[KVCacheBlock]]:
        """Return the blocks that the sequence owns besides those of its primary table. O(groups + live entries)."""
        held = [table.held for table in self.tables]
        if self.fallback is not None:
            held += [blocks for _, blocks in self.fallback.tables]
        return held if self.live_state is None else held + self.live_state.tables()

    def end_loads(self) -> list[list[KVCacheBlock]]:
        """Drop the fallback. Returns the blocks that the sequence owned for it, by table. O(groups)."""
        fallback, self.fallback = self.fallback, None
        return [] if fallback is None else [blocks for _, blocks in fallback.tables]

    def block_ids(self, group: int) -> list[int] | None:
        """Return the block ids of a group's table, as the list itself; None for the primary group. O(1).

        A group without a table gives an empty list, here and in `blocks`.
        """
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
        return None if number == len(self.tables) else self.tables[number].entries()

    def first_live_block(self, group: int) -> int:
        """Return the first index of a group's table that isn't dead. O(1)."""
        number = self.layout.table_numbers.get(group)
        return 0 if number is None or number == len(self.tables) else self.tables[number].num_dead

    def check_back(self, position: int, sequence: Sequence, call: str) -> None:
        """Raise SequenceStateError if a query at `position` would see blocks that have left a window.

        A state in place can only go back to the beginning. Changes nothing. O(groups).
        """
        fallback = self.fallback
        for number, table in enumerate(self.tables):
            side_group = table.side_group
            end = table.end_of_state(sequence.num_computed_tokens)
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

    def is_likely_end(self, table: GroupTable, index: int) -> bool:
        """Whether a hit that ends at a likely end needs the block at this index of the table. O(likely ends)."""
        side_group = table.side_group
        if not self.likely_ends or index * side_group.block_size >= self.likely_ends[-1]:
            return False
        for end in self.likely_ends:
            # The last token of a full hit is computed again, hence - 1.
            if side_group.kind.first_needed(end - 1) <= index < -(-end // side_group.block_size):
                return True
        return False


def side_tables_of(sequence: Sequence) -> SideTables:
    """Return the side tables of a sequence that has some. O(1)."""
    tables = sequence.side_tables
    assert tables is not None, f"{sequence}: has no side tables"
    return tables
