"""The pool of a manager of several groups: which block is reused next, and what stands for the primary group.

A block's group is where it is held or hangs, not a property of it: any free block may serve any group next.
"""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kvblocks.block import KVCacheBlock
from kvblocks.companions import GroupIndex
from kvblocks.errors import PoolExhaustedError
from kvblocks.free_queue import FreeBlockQueue
from kvblocks.ghosts import GhostBlocks
from kvblocks.group_queue import GroupQueue
from kvblocks.pool import BlockPool


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
        """Take the next free blocks, one after the other. Raises PoolExhaustedError. O(num_blocks)."""
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.num_free_blocks} blocks to take, got {num_blocks}")
        return [self.take_one() for _ in range(num_blocks)]

    def take_one(self) -> KVCacheBlock:
        """`take` of one block; there must be one. What can be hit no more because of it is reused next. O(1)."""
        block = super().take_one()
        self.settle()
        return block

    def take_ghosts(self, num_ghosts: int) -> list[KVCacheBlock]:
        """Take ghosts for a primary table. O(num_ghosts)."""
        assert self.ghosts is not None
        ghosts = self.ghosts.take(num_ghosts)
        self.settle()
        return ghosts

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`, which are all ghosts or none. O(blocks)."""
        if self.ghosts is not None and blocks and self.is_ghost(blocks[0]):
            self.ghosts.touch(blocks)
        else:
            super().touch(blocks)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take an owner from each of `blocks`, all ghosts or none, last one first. O(blocks)."""
        if self.ghosts is not None and blocks and self.is_ghost(blocks[0]):
            self.ghosts.release(blocks)
        else:
            super().release(blocks)
        self.settle()

    def release_early(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take an owner from each of `blocks`, in order; those without another are reused before other cached ones."""
        self._tiers.release_early(blocks)
        if self.index.quotas is not None:
            self.index.quotas.note_released(blocks)
        if self.sampler is not None:
            self.sampler.note_released(blocks)

    def give_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        """`release` of blocks of a further table's end; those that hold nothing are reused next. O(blocks)."""
        self.release_early([block for block in blocks if not block.is_cached])
        self.release([block for block in blocks if block.is_cached])

    def settle(self) -> None:
        """Have free blocks that can be hit no more reused next. O(their number)."""
        orphans = self.group_index.orphans
        if orphans:
            self.group_index.orphans = []
            for block in sorted(orphans, key=_block_id, reverse=True):
                if not block.ref_cnt and block.run is None:
                    self._tiers.put_first(block)

    def check(self, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """`BlockPool.check`, of ghosts too. O(pool + ghosts)."""
        real: list[Sequence[KVCacheBlock]] = []
        ghostly: list[Sequence[KVCacheBlock]] = []
        for table in tables:
            (ghostly if table and self.is_ghost(table[0]) else real).append(table)
        super().check(real)
        assert not self.group_index.orphans, "pool: orphans that weren't settled"
        if self.ghosts is not None:
            num_cached = self.ghosts.check(ghostly)
            expected = self.index.num_cached_blocks - self.group_index.num_companions
            assert num_cached == expected, f"ghosts: {num_cached} cached, {expected} found"

    def _make_queue(self) -> FreeBlockQueue:
        self._tiers = GroupQueue(self.blocks)
        return self._tiers


def _block_id(block: KVCacheBlock) -> int:
    return block.block_id
