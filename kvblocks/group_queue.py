"""The free queue of a pool of several groups: two circles, since some blocks are worth less than others.

The main circle is `FreeBlockQueue`'s, by last use. The *early* one has what is reused before anything in it that is
cached: first blocks that hold nothing, then those that left a window, which only a hit that ends just behind them
could use. Blocks of the main circle's head that hold nothing go before cached early ones.
"""

from collections.abc import Iterator, Sequence

from kvblocks.block import KVCacheBlock
from kvblocks.errors import PoolExhaustedError
from kvblocks.free_queue import FreeBlockQueue


class GroupQueue(FreeBlockQueue):
    """`FreeBlockQueue` with an early circle; `num_free_blocks` counts both."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._early = KVCacheBlock(0)  # never handed out either
        super().__init__(blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Yield the blocks as they would be taken. The queue must not change meanwhile."""
        early, late = self._early.next_free_block, self._root.next_free_block
        while early is not self._early or late is not self._root:
            if self._prefers_early(early, late):
                yield early
                early = early.next_free_block
            else:
                yield late
                late = late.next_free_block

    @property
    def first(self) -> KVCacheBlock | None:
        """The block that is taken next, None if there is none. O(1)."""
        if not self.num_free_blocks:
            return None
        early, late = self._early.next_free_block, self._root.next_free_block
        return early if self._prefers_early(early, late) else late

    def popleft(self) -> KVCacheBlock:
        """Take the block that is next; it then has `ref_cnt` 1. There must be one. O(1)."""
        block = self.first
        assert block is not None, "queue: nothing to take"
        self._unlink(block)
        block.ref_cnt = 1
        self.num_free_blocks -= 1
        return block

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next `num_blocks`. Raises PoolExhaustedError, changing nothing, when there are fewer."""
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.num_free_blocks} blocks to take, got {num_blocks}")
        return [self.popleft() for _ in range(num_blocks)]

    def release_early(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each block; those that lose their last one become early ones. O(blocks).

        Cached ones go behind the other early ones, in order; one that holds nothing is taken next.
        """
        for block in blocks:
            assert block.ref_cnt > 0, f"double free: {block} has no owner"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.num_free_blocks += 1
                self._link(block, self._early if block.is_cached else self._early.next_free_block)
            else:
                self.num_shared_changes += 1

    def put_first(self, block: KVCacheBlock) -> None:
        """Move a free block, which holds nothing any more, to where it is taken next. O(1)."""
        self._unlink(block)
        self._link(block, self._early.next_free_block)

    def check(self) -> None:
        """Raise AssertionError unless both circles are as `FreeBlockQueue.check` wants them. O(queue)."""
        num_seen = self._check_circle(self._root) + self._check_circle(self._early)
        assert num_seen == self.num_free_blocks, f"queue: {num_seen} linked, {self.num_free_blocks} counted"

    def _prefers_early(self, early: KVCacheBlock, late: KVCacheBlock) -> bool:
        if early is self._early:
            return False
        return late is self._root or late.is_cached or not early.is_cached

    def _link(self, block: KVCacheBlock, following: KVCacheBlock) -> None:
        previous = following.prev_free_block
        block.prev_free_block, block.next_free_block = previous, following
        previous.next_free_block = following.prev_free_block = block

    def _unlink(self, block: KVCacheBlock) -> None:
        previous, following = block.prev_free_block, block.next_free_block
        previous.next_free_block, following.prev_free_block = following, previous
        block.prev_free_block = block
