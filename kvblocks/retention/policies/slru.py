"""`SLRU`: blocks that were hit are protected from blocks that never were.

Segmented LRU: R. Karedla, J. S. Love, B. G. Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
Computer 27(3), 1994. There are two LRU lists. Blocks begin in the probationary one, and hits move them to the protected
one, whose overflow goes back. Blocks that are used once pass through the first list alone. Here both lists hold free
blocks only, so the bound of the protected list is a share of those.
"""

from collections import OrderedDict
from typing import Final, final

from kvblocks.closed import Closed
from kvblocks.retention.policies.policy import CacheView, FreeBlock

PROTECTED_SHARE: Final = 0.8


@final
class SLRU(Closed):
    """Evicts the oldest block on probation: it was never hit, or so long ago that it lost its protection."""

    def __init__(self, cache: CacheView) -> None:  # noqa: ARG002
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def free(self, blocks: list[FreeBlock]) -> None:
        """Protect those blocks that were hit. Beyond the bound, those protected longest go back. O(blocks)."""
        probation, protected = self._probation, self._protected
        for block_id, _, _, _, num_hits, _ in blocks:
            if num_hits:
                protected[block_id] = None
            else:
                probation[block_id] = None
        most = PROTECTED_SHARE * (len(self._probation) + len(self._protected))
        while len(self._protected) > most:
            block_id, _ = self._protected.popitem(last=False)
            self._probation[block_id] = None

    def use(self, block_ids: list[int]) -> None:
        """Take the blocks out of their lists. O(blocks)."""
        probation, protected = self._probation, self._protected
        for block_id in block_ids:
            if block_id in protected:
                del protected[block_id]
            else:
                probation.pop(block_id, None)

    def remove(self, block_ids: list[int]) -> None:
        """Take the blocks out of their lists. O(blocks)."""
        self.use(block_ids)

    def victim(self, num_blocks: int) -> int | None:  # noqa: ARG002
        """Return the oldest block on probation; if there is none, the oldest protected one. O(1)."""
        return next(iter(self._probation or self._protected), None)
