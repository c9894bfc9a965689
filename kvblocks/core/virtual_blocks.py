"""Anchors: they stand in for the primary group's blocks where no group has full attention.

An anchor is a block without memory. Sequences hold anchors in their primary tables, and the prefix index keeps them in
its runs, like blocks. Attached blocks are therefore found as exactly as with a primary group, whatever the hash.
Anchors are made as sequences need them. Free cached anchors stay for later hits. Once `max_free` anchors are free, the
least recently used one is reused instead of making another one.

Invariant: the ids of anchors begin where those of the pool end.
"""

from collections.abc import Sequence

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.pool import drop_duplicates

KEPT_PER_BLOCK = 16
"""How many free anchors to keep for each block of the pool. An anchor and 16 tokens take about 150 bytes."""


class AnchorBlocks:
    """The anchors of a pool of `num_blocks` blocks, with ids from `first_id` on.

    max_free: how many free anchors are kept before a cached one is reused.
    """

    def __init__(self, first_id: int, num_blocks: int, index: GroupIndex) -> None:
        self.first_id = first_id
        self.max_free = KEPT_PER_BLOCK * num_blocks
        self.blocks: list[KVCacheBlock] = []
        self._index = index
        self._queue = FreeBlockQueue([])

    @property
    def num_free(self) -> int:
        """Anchors that nobody owns. O(1)."""
        return self._queue.num_free_blocks

    def take(self, num_anchors: int) -> list[KVCacheBlock]:
        """Return anchors that aren't cached, each with one owner. Reused ones lose attached blocks. O(anchors)."""
        taken: list[KVCacheBlock] = []
        while len(taken) < num_anchors:
            first = self._queue.first
            if first is not None and (not first.is_cached or self._queue.num_free_blocks >= self.max_free):
                anchor = self._queue.popleft()
                self._index.evict([anchor])
            else:
                anchor = KVCacheBlock(self.first_id + len(self.blocks))
                anchor.ref_cnt = 1
                self.blocks.append(anchor)
            taken.append(anchor)
        return taken

    def touch(self, anchors: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each of `anchors`. O(anchors)."""
        self._queue.touch(anchors)

    def release(self, anchors: Sequence[KVCacheBlock]) -> None:
        """Remove an owner from each of `anchors`, the last one first. Uncached ones are reused next. O(anchors).

        Duplicates are detached, as in `BlockPool.release_table`.
        """
        self._queue.release_table(anchors)
        if self._index.num_duplicates:
            drop_duplicates(self._index, self._queue, anchors)

    def requeue(self, anchors: Sequence[KVCacheBlock]) -> None:
        """Move the free ones of `anchors`, which are no longer cached, to the front of the queue. O(anchors)."""
        self._queue.move_to_front(sorted([anchor for anchor in anchors if not anchor.ref_cnt], key=_block_id))

    def check(self, tables: list[Sequence[KVCacheBlock]]) -> int:
        """Return how many anchors are cached. Raises AssertionError unless `tables` give their owners. O(anchors)."""
        owners = [0] * len(self.blocks)
        for table in tables:
            for anchor in table:
                owners[anchor.block_id - self.first_id] += 1
        self._queue.check()
        num_cached = num_free = 0
        for index, anchor in enumerate(self.blocks):
            assert anchor.block_id == self.first_id + index, f"{anchor}: listed at {index}"
            assert anchor.ref_cnt == owners[index], f"{anchor}: held by {owners[index]} tables"
            num_cached += anchor.is_cached
            num_free += not anchor.ref_cnt
        assert num_free == self.num_free, f"anchors: {num_free} without an owner, {self.num_free} queued"
        return num_cached


def _block_id(anchor: KVCacheBlock) -> int:
    return anchor.block_id
