"""`S3FIFO`: a small queue for new blocks, a main queue, and digests (ghosts) of blocks evicted from the small one.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. A block
goes to the main queue if it is hit more than once, or if its prefix is cached again soon after it was evicted. In the
main queue each hit, up to three, gives it another round. Unlike in the paper, a block that is hit has an owner and
can't be evicted until it is free again, when it goes to the end of a queue. Hits therefore change the order, and the
small queue is limited to a share of the free blocks.
"""

from collections import OrderedDict
from typing import Final, final

from kvblocks.closed import Closed
from kvblocks.retention.policies.policy import CacheView, FreeBlock

SMALL_SHARE: Final = 0.1
MAX_ROUNDS: Final = 3


@final
class S3FIFO(Closed):
    """Evicts new blocks that aren't hit again before all others."""

    def __init__(self, cache: CacheView) -> None:
        self._cache = cache
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()  # by block id: rounds left
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def free(self, blocks: list[FreeBlock]) -> None:
        """Put the blocks at the end of their queues. O(blocks), and a hash per new block while there are ghosts."""
        small, main, ghosts = self._small, self._main, self._ghosts
        for block_id, _, _, _, num_hits, _ in blocks:
            if num_hits > 1:
                main[block_id] = num_hits if num_hits < MAX_ROUNDS else MAX_ROUNDS  # noqa: FURB136  # faster
            elif not num_hits and ghosts and self._was_evicted(block_id):
                main[block_id] = 0
            else:
                small[block_id] = None

    def use(self, block_ids: list[int]) -> None:
        """Take the blocks out of their queues. O(blocks)."""
        small, main = self._small, self._main
        for block_id in block_ids:
            if block_id in main:
                del main[block_id]
            else:
                small.pop(block_id, None)

    def remove(self, block_ids: list[int]) -> None:
        """Take the blocks out of their queues. Those in the small queue become ghosts.

        At most 0.9 * num_blocks ghosts are kept, the latest ones. O(blocks).
        """
        small, ghosts = self._small, self._ghosts
        for block_id in block_ids:
            if block_id in small:
                digest = self._cache.digest(block_id)
                if digest is not None:
                    ghosts[digest] = None
                del small[block_id]
            else:
                self._main.pop(block_id, None)
        most = (1 - SMALL_SHARE) * self._cache.num_blocks
        while len(ghosts) > most:
            ghosts.popitem(last=False)

    def victim(self, num_blocks: int) -> int | None:  # noqa: ARG002
        """Return the small queue's first block if that queue is too long, else the main queue's first one without
        rounds left.

        O(1) on average.
        """
        small, main = self._small, self._main
        num_small = len(small)
        if num_small > SMALL_SHARE * (num_small + len(main)):
            return next(iter(small))
        while main:
            block_id, num_left = main.popitem(last=False)
            if not num_left:
                main[block_id] = 0
                main.move_to_end(block_id, last=False)
                return block_id
            main[block_id] = num_left - 1
        return None

    def _was_evicted(self, block_id: int) -> bool:
        """Whether the block's prefix is among the ghosts. Removes it from them."""
        digest = self._cache.digest(block_id)
        if digest is None or digest not in self._ghosts:
            return False
        del self._ghosts[digest]
        return True
