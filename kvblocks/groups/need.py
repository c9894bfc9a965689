"""What a call that makes room needs, of all groups: found out before anything is changed.

Tables are counted as in `GroupTables.tables`; the sequence's primary table, which may be one of anchors, is the last.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence


class Need:
    """What slots for a sequence's first `num_slots` tokens take, of which those from `start` on are to be written.

    passed: by further table, how many of its first live blocks no query at `start` or later sees. shared: by table, the
    place whose block must not be written to, None: there is none. missing: by table, how many blocks its end lacks.
    block_size: of the primary group. O(groups).
    """

    __slots__ = ("missing", "passed", "sequence", "shared")

    def __init__(self, sequence: Sequence, start: int, num_slots: int, block_size: int) -> None:
        self.sequence = sequence
        self.passed: list[int] = []
        self.shared: list[int | None] = []
        self.missing: list[int] = []
        assert sequence.side_tables is not None
        for table in sequence.side_tables.tables:
            size = table.side_group.block_size
            self.passed.append(table.num_passed(start))
            self.missing.append(max(0, -(-num_slots // size) - table.num_places))
            self.shared.append(_shared_place(sequence, table.live_block(start // size), start, size))
        last = sequence.blocks[start // block_size] if start % block_size else None
        self.missing.append(max(0, -(-num_slots // block_size) - len(sequence.blocks)))
        self.shared.append(_shared_place(sequence, last, start, block_size))

    def num_taken(self, table: int) -> int:
        """Return how many blocks it takes for a table. O(1)."""
        return self.missing[table] + (self.shared[table] is not None)

    def num_taken_of_pool(self, *, has_anchors: bool) -> int:
        """Return how many blocks of the pool it takes. O(groups)."""
        num_tables = len(self.missing) - has_anchors
        return sum([self.num_taken(table) for table in range(num_tables)])

    def leaving(self) -> list[KVCacheBlock]:
        """Return the blocks that the sequence lets go of. O(blocks)."""
        assert self.sequence.side_tables is not None
        leaving: list[KVCacheBlock] = []
        for table, num_passed in zip(self.sequence.side_tables.tables, self.passed, strict=False):
            leaving += table.blocks[:num_passed]
        return leaving


def keep_for_last(needs: list[Need]) -> None:
    """Let the last of a step's sequences that would leave a shared block keep it. O(sequences x groups)."""
    num_leaving: dict[KVCacheBlock, int] = {}
    for need in needs:
        for i, place in enumerate(need.shared):
            if place is not None:
                block = table_block(need.sequence, i, place)
                if block.is_cached or num_leaving.get(block, 0) < block.ref_cnt - 1:
                    num_leaving[block] = num_leaving.get(block, 0) + 1
                else:
                    need.shared[i] = None


def table_block(sequence: Sequence, i: int, place: int) -> KVCacheBlock:
    """Return the block in a live place of table number `i`. O(1)."""
    assert sequence.side_tables is not None
    tables = sequence.side_tables.tables
    block = sequence.blocks[place] if i == len(tables) else tables[i].live_block(place)
    assert block is not None
    return block


def _shared_place(sequence: Sequence, block: KVCacheBlock | None, position: int, block_size: int) -> int | None:
    """Return the place of `block`, which has `position`, if the token there must not be written to it."""
    if sequence.tail_owner is not None or block is None or not position % block_size:
        return None
    return position // block_size if block.ref_cnt > 1 or block.is_cached else None
