"""The pool of a manager of several groups: which block is reused next, and what stands for the primary group.

A block's group is where it is held or hangs, not a property of it: any free block may serve any group next.
"""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.pool import BlockPool
from kvblocks.errors import PoolExhaustedError
from kvblocks.groups.anchors import GhostBlocks
from kvblocks.groups.index import GroupIndex


class GroupPool(BlockPool):
    """`BlockPool` for a `GroupIndex`. ghosts: None where the primary group has blocks of its own."""

    def __init__(self, num_blocks: SupportsIndex, index: GroupIndex) -> None:
        super().__init__(num_blocks, index)
        self.group_index = index
        self.ghosts = GhostBlocks(len(self.blocks), index) if index.layout.primary is None else None

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents are cached. O(1)."""
        return self.group_index.num_companions if self.ghosts is not None else self.index.num_cached_blocks

    def is_ghost(self, block: KVCacheBlock) -> bool:
        """Whether a block has no memory. O(1)."""
        return block.block_id >= len(self.blocks)

    def recount_quotas(self) -> None:
        """Count anew what tenants have cached, companions included. O(pool)."""
        super().recount_quotas()
        for run, num_companions in self.group_index.count_companions():
            if run.tenant is not None:
                run.tenant.add(num_companions)

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next free blocks, one after the other. Raises PoolExhaustedError. O(num_blocks).

        What can be hit no more because of one is the next.
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.num_free_blocks} blocks to take, got {num_blocks}")
        return [self.take_one() for _ in range(num_blocks)]

    def take_ghosts(self, num_ghosts: int) -> list[KVCacheBlock]:
        """Take ghosts for a primary table. O(num_ghosts)."""
        assert self.ghosts is not None
        ghosts = self.ghosts.take(num_ghosts)
        self.requeue_detached()
        return ghosts

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`, which are all ghosts or none. O(blocks)."""
        if self.ghosts is not None and blocks and self.is_ghost(blocks[0]):
            self.ghosts.touch(blocks)
        else:
            super().touch(blocks)

    def release_table(self, blocks: Sequence[KVCacheBlock], num_cached: int = 0) -> None:
        """Take an owner from each of `blocks`, all ghosts or none, as `BlockPool.release_table`. O(blocks)."""
        if self.ghosts is not None and blocks and self.is_ghost(blocks[0]):
            self.ghosts.release(blocks)
        else:
            super().release_table(blocks, num_cached)

    def release_passed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take an owner from each of `blocks`, which left a window. O(blocks).

        Of those without another, the cached ones are reused before what was freed at a sequence's end, in order.
        """
        self._queue.release_empty([block for block in blocks if not block.is_cached][::-1])
        self._queue.release_passed([block for block in blocks if block.is_cached])
        self._note_released(blocks)

    def requeue_detached(self) -> None:
        """`BlockPool.requeue_detached`, of ghosts too. O(their number)."""
        if self.ghosts is not None:
            self.ghosts.requeue([block for block in self.index.detached if self.is_ghost(block)])
            self.index.detached = [block for block in self.index.detached if not self.is_ghost(block)]
        super().requeue_detached()

    def check(self, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """`BlockPool.check`, of ghosts too. O(pool + ghosts)."""
        real: list[Sequence[KVCacheBlock]] = []
        ghostly: list[Sequence[KVCacheBlock]] = []
        for table in tables:
            (ghostly if table and self.is_ghost(table[0]) else real).append(table)
        super().check(real)
        if self.ghosts is not None:
            num_cached = self.ghosts.check(ghostly)
            expected = self.index.num_cached_blocks - self.group_index.num_companions
            assert num_cached == expected, f"ghosts: {num_cached} cached, {expected} found"

    def _make_queue(self) -> FreeBlockQueue:
        return FreeBlockQueue(self.blocks, has_windows=True)
