"""Starting a sequence that loads blocks after its hit.

The sequence's side tables begin with the blocks that a query after the loads sees. Until the loads have arrived, the
sequence also holds the blocks that a query at the hit's end sees. If the loads fail, it goes back to the hit's end.
"""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.hit import CacheHit
from kvblocks.core.longest_hit import GroupHit, Tables

Mixed = list[tuple[int, list[KVCacheBlock | None]]]
"""By `layout.side_groups`: the first table index that a start needs, and the blocks from there (None: to be loaded)."""


class LoadingHit(GroupHit):
    """A `GroupHit` and the loads after it.

    end: the number of tokens up to the end of the loads, a multiple of the alignment. more: the primary group's cached
    blocks from the hit's end up to there. mixed: the side groups' blocks that a start at `end` needs. arriving: where
    layers keep a state, the device's checkpoint at `end`; None: the load brings one. num_state_blocks: how many blocks
    the checkpoint takes; 0 if the load brings none.
    """

    __slots__ = ("arriving", "end", "mixed", "more", "num_state_blocks")

    def __init__(self, found: CacheHit, hit: GroupHit | None, index: GroupIndex, held: list[KVCacheBlock]) -> None:
        """found: the hit for which loads were looked up. hit: the hit of the same length that the sequence starts with;
        None: no hit. held: the primary group's cached blocks up to the end of the loads.
        """
        if hit is None:
            tables: Tables = [(0, []) for _ in index.layout.side_groups]
            super().__init__(found.sequence, [], tables, 0, index, found.source)
        else:
            super().__init__(hit.sequence, hit.blocks, hit.tables, hit.num_matched, index, hit.source)
            self.version = hit.version
            self.checkpoint = hit.checkpoint
            self.num_tier_tokens = hit.num_tier_tokens
        self.more = held[len(self.blocks) :]
        self.mixed: Mixed = []
        self.end = 0
        self.arriving: Checkpoint | None = None
        self.num_state_blocks = 0


class Fallback:
    """Where a sequence goes back to if its loads fail.

    start: the number of tokens before the loads. end: the number of tokens up to the end of the loads. tables: the
    blocks that its side tables need at `start`. The sequence owns these blocks, in addition to those in its tables.
    """

    __slots__ = ("end", "start", "tables")

    def __init__(self, start: int, end: int, tables: Tables) -> None:
        self.start = start
        self.end = end
        self.tables = tables
