"""`LRU`: the least recently used block is evicted first, as without a policy."""

from collections import OrderedDict
from typing import final

from kvblocks.closed import Closed
from kvblocks.retention.policies.policy import CacheView, FreeBlock


@final
class LRU(Closed):
    """Evicts the block that became free longest ago. The simplest policy: it keeps an order and names its first."""

    def __init__(self, cache: CacheView) -> None:  # noqa: ARG002  # all policies take it
        self._order: OrderedDict[int, None] = OrderedDict()

    def free(self, blocks: list[FreeBlock]) -> None:
        """Put the blocks at the end of the order. O(blocks)."""
        for block in blocks:
            self._order[block.block_id] = None

    def use(self, block_ids: list[int]) -> None:
        """Take the blocks out of the order. O(blocks)."""
        for block_id in block_ids:
            self._order.pop(block_id, None)

    def remove(self, block_ids: list[int]) -> None:
        """Take the blocks out of the order. O(blocks)."""
        self.use(block_ids)

    def victim(self, num_blocks: int) -> int | None:  # noqa: ARG002
        """Return the first block in the order. O(1)."""
        return next(iter(self._order), None)
