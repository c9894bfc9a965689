"""What a sequence loads from tiers when it starts.

The sequence's side tables begin with the blocks that a query after the loads sees. Until the loads have arrived, the
sequence also holds the blocks that a query at the hit's end sees. If the loads fail, it goes back to the hit's end.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint

Tables = list[tuple[int, list[KVCacheBlock]]]
"""By `layout.side_groups`: the first table index that a hit needs, and the blocks from there to the hit's end."""

Mixed = list[tuple[int, list[KVCacheBlock | None]]]
"""By `layout.side_groups`: the first table index that a start needs, and the blocks from there (None: to be loaded)."""


class Loads:
    """The loads after a hit. Only for managers of several groups."""

    __slots__ = ("arriving", "end", "mixed", "more", "num_state_blocks", "start")

    def __init__(
        self,
        start: int,
        end: int,
        more: list[KVCacheBlock],
        mixed: Mixed,
        arriving: Checkpoint | None,
        num_state_blocks: int,
    ) -> None:
        self.start = start
        """The number of tokens of the hit before the loads."""
        self.end = end
        """The number of tokens up to the end of the loads, a multiple of the alignment."""
        self.more = more
        """The primary group's cached blocks from the hit's end up to there."""
        self.mixed = mixed
        """The side groups' blocks that a start at `end` needs."""
        self.arriving = arriving
        """Where layers keep a state, the device's checkpoint at `end`; None: the load brings one."""
        self.num_state_blocks = num_state_blocks
        """How many blocks the checkpoint takes; 0 if the load brings none."""


class Fallback:
    """Where a sequence goes back to if its loads fail. The sequence owns its blocks, in addition to its tables'."""

    __slots__ = ("end", "start", "tables")

    def __init__(self, start: int, end: int, tables: Tables) -> None:
        self.start = start
        """The number of tokens before the loads."""
        self.end = end
        """The number of tokens up to the end of the loads."""
        self.tables = tables
        """The blocks that its side tables need at `start`."""
