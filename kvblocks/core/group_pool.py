"""The pool of a manager of several groups: which block is reused next, and the anchors.

A block has no group of its own. It serves the group in whose table it is or to which it is attached; once free, it may
serve any group.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import SupportsIndex

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.group_queue import GroupQueue
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.core.virtual_blocks import AnchorBlocks
from kvblocks.errors import PoolExhaustedError


class GroupPool(BlockPool):
    """`BlockPool` for a `GroupIndex`. anchors: None if there is a primary group."""

    def __init__(self, num_blocks: SupportsIndex, index: GroupIndex, first_block_id: SupportsIndex = 0) -> None:
        super().__init__(num_blocks, index, first_block_id)
        self.group_index = index
        is_anchored = index.layout.primary is None
        self.anchors = AnchorBlocks(self.end_block_id, len(self.blocks), index) if is_anchored else None

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents are cached. O(1)."""
        return self.group_index.num_attached_blocks if self.anchors is not None else self.index.num_cached_blocks

    def is_anchor(self, block: KVCacheBlock) -> bool:
        """Whether a block is an anchor, without memory. O(1)."""
        return block.block_id >= self.end_block_id

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next free blocks, one after the other. Raises PoolExhaustedError. O(num_blocks).

        If evicting a block detaches others, those are taken next.
        """
        if not 0 <= num_blocks <= self.queue.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.queue.num_free_blocks} blocks to take, got {num_blocks}")
        taken: list[KVCacheBlock] = []
        while len(taken) < num_blocks:
            if self.index.watchers:
                taken.append(self.take_one())
                continue
            taken += self.queue.popleft_empty(num_blocks - len(taken))
            if len(taken) < num_blocks:
                taken += self._take_cached(num_blocks - len(taken))
        return taken

    def _take_cached(self, most: int) -> list[KVCacheBlock]:
        """Take the first block, and those that evicting it detaches; or several first blocks, if that comes to the
        same.

        Takes at most `most` blocks, and only while nobody watches.
        """
        number = self.group_index.num_bare(self.queue.first, most)
        if number:
            blocks = [self.queue.popleft() for _ in range(number)]
            self.num_evicted_blocks += self.group_index.evict_bare(blocks)
            return blocks
        blocks = [self.queue.popleft()]
        self.num_evicted_blocks += self.index.evict_one(blocks[0])
        if self.index.detached:
            detached = self.pop_detached()
            self.queue.move_to_front(detached[most - 1 :])
            del detached[most - 1 :]
            self.queue.touch(detached)
            blocks += detached
        return blocks

    def take_anchors(self, num_anchors: int) -> list[KVCacheBlock]:
        """Take anchors for a primary table. O(num_anchors)."""
        assert self.anchors is not None
        anchors = self.anchors.take(num_anchors)
        self.requeue_detached()
        return anchors

    def touch(self, blocks: Items[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`. Either all of them are anchors or none is. O(blocks)."""
        if self.anchors is not None and blocks and self.is_anchor(blocks[0]):
            self.anchors.touch(blocks)
        else:
            super().touch(blocks)

    def release_table(self, blocks: Items[KVCacheBlock], num_cached: int = 0, giver: Sequence | None = None) -> None:
        """`BlockPool.release_table`. Either all of `blocks` are anchors or none is. O(blocks)."""
        if self.anchors is not None and blocks and self.is_anchor(blocks[0]):
            self.anchors.release(blocks)
            self.requeue_detached()
        else:
            super().release_table(blocks, num_cached, giver)

    def release_passed(self, passed: list[KVCacheBlock], empty: list[KVCacheBlock]) -> None:
        """Remove an owner from blocks that left a window: `passed` are cached, `empty` hold nothing. O(blocks).

        Those without another owner become free. The cached ones are then reused before blocks that were freed at a
        sequence's end, in the order given.
        """
        if empty:
            self.queue.release_empty(empty[::-1])
        self.queue.release_passed(passed)
        if self.detached:
            self._drop_detached(empty + passed)
        for watcher in self.index.watchers:
            watcher.note_released(empty)
            watcher.note_passed(passed)

    def pop_detached(self) -> list[KVCacheBlock]:
        """`BlockPool.pop_detached`, which also moves anchors to the front of their own queue. O(blocks detached)."""
        if self.anchors is not None:
            self.anchors.requeue([block for block in self.index.detached if self.is_anchor(block)])
            self.index.detached = [block for block in self.index.detached if not self.is_anchor(block)]
        return super().pop_detached()

    def check(self, tables: Iterable[Items[KVCacheBlock]]) -> None:
        """`BlockPool.check`, which here also checks anchors. O(pool + anchors)."""
        real: list[Items[KVCacheBlock]] = []
        anchored: list[Items[KVCacheBlock]] = []
        for table in tables:
            (anchored if table and self.is_anchor(table[0]) else real).append(table)
        super().check(real)
        if self.anchors is not None:
            num_cached = self.anchors.check(anchored)
            expected = self.index.num_cached_blocks - self.group_index.num_attached_blocks
            assert num_cached == expected, f"anchors: {num_cached} cached, {expected} found"

    def _make_queue(self) -> FreeBlockQueue:
        return GroupQueue(self.blocks)
