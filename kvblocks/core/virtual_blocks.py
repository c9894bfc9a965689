"""Virtual blocks: they stand in for the primary group's blocks where no group has full attention.

A virtual block has no memory. Sequences hold virtual blocks in their primary tables, and the prefix index keeps them in
its runs, like other blocks. Attached blocks are therefore found as exactly as with a primary group, whatever the hash.
Virtual blocks are made as sequences need them. Free cached ones stay for later hits. Once `max_free` are free, the
least recently used one is reused instead of making another one.

Invariant: their ids begin where those of the pool end.
"""

from collections.abc import Sequence

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.prefix_index import PrefixIndex

KEPT_PER_BLOCK = 16
"""How many free virtual blocks to keep for each block of the pool. One with 16 tokens takes about 150 bytes."""


class VirtualBlocks:
    """The virtual blocks of a pool of `num_blocks` blocks, with ids from `first_id` on.

    max_free: how many free virtual blocks are kept before a cached one is reused.
    """

    def __init__(self, first_id: int, num_blocks: int, index: PrefixIndex) -> None:
        self.first_id = first_id
        self.max_free = KEPT_PER_BLOCK * num_blocks
        self.blocks: list[KVCacheBlock] = []
        self._index = index
        self.queue = FreeBlockQueue([])

    @property
    def num_free(self) -> int:
        """Virtual blocks that nobody owns. O(1)."""
        return self.queue.num_free_blocks

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Return blocks that aren't cached, each with one owner. Reused ones lose attached blocks. O(blocks)."""
        taken: list[KVCacheBlock] = []
        while len(taken) < num_blocks:
            first = self.queue.first
            if first is not None and (not first.is_cached or self.queue.num_free_blocks >= self.max_free):
                block = self.queue.popleft()
                self._index.evict([block])
            else:
                block = KVCacheBlock(self.first_id + len(self.blocks))
                block.ref_cnt = 1
                self.blocks.append(block)
            taken.append(block)
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`. O(blocks)."""
        self.queue.touch(blocks)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove an owner from each of `blocks`, the last one first. Uncached ones are reused next. O(blocks).

        As in `BlockPool.release_table`, the caller then detaches duplicates.
        """
        self.queue.release_table(blocks)

    def requeue(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Move the free ones of `blocks`, which are no longer cached, to the front of the queue. O(blocks)."""
        self.queue.move_to_front(sorted([block for block in blocks if not block.ref_cnt], key=_block_id))

    def check(self, tables: list[Sequence[KVCacheBlock]]) -> int:
        """Return how many blocks are cached. Raises AssertionError unless `tables` give their owners. O(blocks)."""
        owners = [0] * len(self.blocks)
        for table in tables:
            for block in table:
                owners[block.block_id - self.first_id] += 1
        self.queue.check()
        num_cached = num_free = 0
        for index, block in enumerate(self.blocks):
            assert block.block_id == self.first_id + index, f"{block}: listed at {index}"
            assert block.ref_cnt == owners[index], f"{block}: held by {owners[index]} tables"
            num_cached += block.is_cached
            num_free += not block.ref_cnt
        assert num_free == self.num_free, f"virtual blocks: {num_free} without an owner, {self.num_free} queued"
        return num_cached


def _block_id(block: KVCacheBlock) -> int:
    return block.block_id
