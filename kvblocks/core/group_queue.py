"""The free queue of a pool of several groups, where hundreds of blocks (those of a checkpoint) move at once."""

from collections.abc import Sequence

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue


class GroupQueue(FreeBlockQueue):
    """`FreeBlockQueue` with blocks that leave windows."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().__init__(blocks, has_windows=True)

    def move_to_front(self, blocks: Sequence[KVCacheBlock]) -> None:
        """`FreeBlockQueue.move_to_front` in less time, since nobody owns the blocks in between."""
        for block in blocks:
            previous, following = block.prev_free_block, block.next_free_block
            previous.next_free_block = following
            following.prev_free_block = previous
        last = root = self._root
        following = root.next_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = following
        following.prev_free_block = last
