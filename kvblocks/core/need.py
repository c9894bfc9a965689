"""Which blocks a call that makes room needs, in all groups, computed before anything is changed.

Tables are numbered as in `GroupTables.tables`. The sequence's primary table, which may have anchors, comes last.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence
from kvblocks.core.steps import leaves
from kvblocks.core.tables import GroupTables


class Need:
    """What slots for a sequence's first `num_slots` tokens need. Tokens from `start` on are to be written.

    tables: the sequence's. passed: by side table, how many of its first live blocks have left the window, because
    neither queries at `start` or later nor queries of tokens that aren't written yet see them. shared: by table, the
    index of the shared block that must not be written to; None if there is none. missing: by table, how many new blocks
    it needs at its end; a table with gaps needs one for its last entry. block_size: that of the primary group.
    O(groups).
    """

    __slots__ = ("missing", "num_slots", "passed", "sequence", "shared", "tables")

    def __init__(self, sequence: Sequence, tables: GroupTables, start: int, num_slots: int, block_size: int) -> None:
        self.sequence = sequence
        self.tables = tables
        self.num_slots = num_slots
        passed_at = start if sequence.delayed_from is None else min(start, sequence.delayed_from)
        self.passed = [table.num_passed(passed_at) for table in tables.tables]
        self.missing: list[int] = []
        for table in tables.tables:
            lacking = -(-num_slots // table.side_group.block_size) - table.num_dead - len(table.blocks)
            self.missing.append(max(0, lacking) if lacking < 2 or not table.side_group.has_gaps else 1)
        lacking = -(-num_slots // block_size) - len(sequence.blocks)
        self.missing.append(max(0, lacking))
        self.shared: list[int | None] = [None] * len(self.missing)
        if sequence.tail_owner is None:
            self._find_shared(start, block_size)

    def keep_for(self, position: int) -> None:
        """Keep the blocks that a query at `position` sees, because a step in flight computes it. O(groups)."""
        for number, table in enumerate(self.tables.tables):
            self.passed[number] = min(self.passed[number], table.num_passed(position))

    def _find_shared(self, start: int, block_size: int) -> None:
        """Find the shared blocks that the token at `start` must not be written to. O(groups)."""
        sizes = [*[table.side_group.block_size for table in self.tables.tables], block_size]
        for number, size in enumerate(sizes):
            if start % size:
                block = self.block(number, start // size)
                if block is not None and block.is_shared:
                    self.shared[number] = start // size

    def block(self, number: int, index: int) -> KVCacheBlock | None:
        """Return the block at an index of table `number`, None for a dead entry. O(1)."""
        tables = self.tables.tables
        return self.sequence.blocks[index] if number == len(tables) else tables[number].live_block(index)

    def num_taken(self, number: int) -> int:
        """Return how many blocks table `number` takes. O(1)."""
        return self.missing[number] + (self.shared[number] is not None)

    def num_blocks(self, num_tables: int) -> int:
        """Return how many blocks the first `num_tables` tables take. O(groups)."""
        return sum(self.missing[:num_tables]) + num_tables - self.shared[:num_tables].count(None)

    def leaving(self) -> list[KVCacheBlock]:
        """Return the blocks that the sequence releases because they left a window; `EMPTY` for each gap. O(blocks)."""
        leaving: list[KVCacheBlock] = []
        for table, num_passed in zip(self.tables.tables, self.passed, strict=False):
            leaving += table.blocks[:num_passed]
        return leaving


def keep_for_last(needs: list[Need]) -> None:
    """If all owners of an uncached shared block would leave it in this step, let the last one keep it.

    O(sequences x groups).
    """
    num_leaving: dict[KVCacheBlock, int] = {}
    for need in needs:
        for number, shared in enumerate(need.shared):
            block = None if shared is None else need.block(number, shared)
            if block is not None and not leaves(block, num_leaving):
                need.shared[number] = None
