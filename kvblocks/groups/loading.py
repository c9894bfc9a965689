"""A hit that ends behind what is cached: what a sequence starts with whose loads bring the blocks that are missing.

Such a sequence's side tables begin with what a query behind the loads sees. What one at the cached hit's end sees is
held beside them until the loads have arrived: where they fail, the sequence goes back there.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.groups.hit import GroupHit, Tables
from kvblocks.groups.index import GroupIndex

Mixed = list[tuple[int, list[KVCacheBlock | None]]]
"""By `layout.side_groups`: the first index of its table that a start needs, and the blocks from there; None: loaded."""


class LoadingHit(GroupHit):
    """A `GroupHit` with what is to be loaded behind it.

    end: the token at which loads end, a multiple of the alignment. more: the primary group's blocks behind the hit that
    are cached, up to there. mixed: the other groups' blocks that a start there needs.
    """

    __slots__ = ("end", "mixed", "more")

    def __init__(self, found: CacheHit, hit: GroupHit | None, index: GroupIndex, held: list[KVCacheBlock]) -> None:
        """found: what the loads were looked up behind. hit: what the sequence is to start with, as long; None: nothing.
        held: the primary group's cached blocks up to the loads' end.
        """
        if hit is None:
            tables: Tables = [(0, []) for _ in index.layout.side_groups]
            super().__init__(found.sequence, [], tables, 0, index, found.source)
        else:
            super().__init__(hit.sequence, hit.blocks, hit.tables, hit.num_matched, index, hit.source)
            self.version = hit.version
        self.more = held[len(self.blocks) :]
        self.mixed: Mixed = []
        self.end = 0


class Fallback:
    """Where a sequence whose loads fail goes back to.

    start: token up to which all is there. end: where its loads end. tables: what its side tables held at `start`; the
    sequence owns it, once more where its tables have it, too.
    """

    __slots__ = ("end", "start", "tables")

    def __init__(self, start: int, end: int, tables: Tables) -> None:
        self.start = start
        self.end = end
        self.tables = tables
