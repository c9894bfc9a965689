"""Identities without KV: what stands in for the primary group where no group has full attention.

An anchor is a block that has no memory. Sequences hold anchors in their primary tables, and the prefix index keeps them
in its runs, as it does blocks; so what is attached to them is exact for the same reason, whatever the hash. There are
as many as sequences need, and those that nobody holds stay for later hits; but beyond a number of these, the least
recently used is reused before another one is made.

Invariants: ids begin where the pool's end.
"""

from collections.abc import Sequence

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.groups.index import GroupIndex

KEPT_PER_BLOCK = 16
"""Free anchors for each block of the pool, beyond which they are reused. One takes about 150 bytes, with 16 tokens."""


class AnchorBlocks:
    """The anchors of a pool of `num_blocks`, with ids from `first_id` on.

    Once more than `max_free` are held by nobody, those are reused.
    """

    def __init__(self, first_id: int, num_blocks: int, index: GroupIndex) -> None:
        self.first_id = first_id
        self.max_free = KEPT_PER_BLOCK * num_blocks
        self.blocks: list[KVCacheBlock] = []
        self._index = index
        self._queue = FreeBlockQueue([])

    @property
    def num_free(self) -> int:
        """Anchors that nobody holds. O(1)."""
        return self._queue.num_free_blocks

    def take(self, num_anchors: int) -> list[KVCacheBlock]:
        """Return anchors that mean nothing yet, each held once. A reused one loses what is attached. O(anchors)."""
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
        """Hold each of `anchors` once more. O(anchors)."""
        self._queue.touch(anchors)

    def release(self, anchors: Sequence[KVCacheBlock]) -> None:
        """Let go of each of `anchors`, last one first; those that mean nothing are reused next. O(anchors)."""
        self._queue.release_table(anchors)

    def requeue(self, anchors: Sequence[KVCacheBlock]) -> None:
        """Have those of `anchors`, which mean nothing any more, that nobody holds reused next. O(anchors)."""
        self._queue.move_to_front(sorted([anchor for anchor in anchors if not anchor.ref_cnt], key=_block_id))

    def check(self, tables: list[Sequence[KVCacheBlock]]) -> int:
        """Raise AssertionError unless the anchors are held as `tables` say; returns how many are cached. O(anchors)."""
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
