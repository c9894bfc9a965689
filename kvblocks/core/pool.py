"""The pool: every block there is, who owns it, and what happens to what it held when it changes hands.

Puts the free queue and the prefix index together. A block is free or owned (the queue's fact), cached or not (the
index's fact), and both at once in all four combinations: a free cached block is what a later request hits, and it
stops being cached at the moment it is taken for something else. The roles are those of vLLM v1's BlockPool.
"""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hooks import Watcher
from kvblocks.core.prefix_index import PrefixIndex


class BlockPool:
    """`num_blocks` blocks with ids from `first_block_id` on, handed out in order when fresh.

    Later what holds nothing goes first, then what is least recently used. index: where their contents may be cached.
    blocks: all of them, by id. end_block_id: behind the last one's. queue: the free ones, in the order of their reuse.
    detached: blocks that stopped being cached while they were owned, and still are; few and seldom. Raises
    InvalidArgumentError. O(num_blocks).

    A part of the manager that is public for those who build one of their own: beyond that it checks no types.
    """

    def __init__(self, num_blocks: SupportsIndex, index: PrefixIndex, first_block_id: SupportsIndex = 0) -> None:
        number, first = check_count("num_blocks", num_blocks, 1), check_count("first_block_id", first_block_id, 0)
        self.first_block_id, self.end_block_id = first, first + number
        self.blocks = [KVCacheBlock(block_id) for block_id in range(first, first + number)]
        self.index = index
        self.num_evicted_blocks = 0
        self.detached: set[KVCacheBlock] = set()
        self.queue = self._make_queue()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns, those with cached contents included. O(1)."""
        return self.queue.num_free_blocks

    @property
    def num_shared_changes(self) -> int:
        """How often a reference was added to or dropped from a block that stayed owned. O(1)."""
        return self.queue.num_shared_changes

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents are cached. O(1)."""
        return self.index.num_cached_blocks

    def free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks, next to be taken first. O(free blocks)."""
        return list(self.queue)

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, next to be taken first. O(free blocks)."""
        return [block.block_id for block in self.queue]

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next free blocks; what they held is cached no more. O(num_blocks).

        Which of the cached ones go first `Accounts` may say: a quota's, or an eviction policy's choice.
        Raises PoolExhaustedError, changing nothing, when there are fewer.
        """
        if self.index.watcher is not None:
            return self._take_watched(num_blocks, self.index.watcher)
        blocks = self.queue.popleft_n(num_blocks)
        for block in blocks:  # half as long as a list of those that are cached
            if block.run is not None:
                self.num_evicted_blocks += self.index.evict(blocks)
                if self.index.detached:
                    self.requeue_detached()
                break
        return blocks

    def take_one(self) -> KVCacheBlock:
        """`take` of one block; there must be one. O(1)."""
        if self.index.watcher is not None:
            return self._take_watched(1, self.index.watcher)[0]
        block = self.queue.popleft()
        if block.run is not None:
            self.num_evicted_blocks += self.index.evict_one(block)
            if self.index.detached:
                self.requeue_detached()
        return block

    def _take_watched(self, num_blocks: int, watcher: Watcher) -> list[KVCacheBlock]:
        """`take`, of a pool that somebody watches."""
        accounts, blocks = self.index.accounts, list[KVCacheBlock]()
        if accounts is not None and accounts.is_choosing and 0 < num_blocks <= self.queue.num_free_blocks:
            while len(blocks) < num_blocks:
                blocks += self._empty(accounts.take_next(self.queue, num_blocks - len(blocks)), watcher)
            return blocks
        return self._empty(self.queue.popleft_n(num_blocks), watcher)

    def _empty(self, blocks: list[KVCacheBlock], watcher: Watcher) -> list[KVCacheBlock]:
        """Forget what blocks hold that were just taken, and return them."""
        watcher.note_taken(blocks)
        self.num_evicted_blocks += self.index.evict(blocks)
        if self.index.detached:
            self.requeue_detached()
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`, free or not; what they hold stays. O(blocks)."""
        self.queue.touch(blocks)
        if self.index.watcher is not None:
            self.index.watcher.note_touched(blocks)

    def uncache(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Stop caching what `blocks` hold, and all that is chained to it; free ones are reused next. O(all those)."""
        for block in blocks:
            self.index.forget(block, "dropped")
        self.requeue_detached()

    def release_table(self, blocks: Sequence[KVCacheBlock], num_cached: int = 0) -> None:
        """Take an owner from each of `blocks`, a table's or a part of one.

        Those without another owner are free: cached ones are reused last, a prefix's end before its beginning; those
        that hold nothing are reused next. `FreeBlockQueue.release_table` says where they go. num_cached: the first so
        many were cached by their owner, and no reset came since. Raises BlockStateError, changing nothing, when one
        has no owner. O(blocks).
        """
        if num_cached == len(blocks) and not self.detached:
            self.queue.release(blocks[::-1])
        else:
            self.queue.release_table(blocks, 0 if self.detached else num_cached)
        if self.detached or self.index.watcher is not None:
            self._note_released(blocks[::-1])

    def requeue_detached(self) -> None:
        """Have blocks that stopped being cached, though nobody took them, reused next if they are free.

        What an abort leaves holding nothing, and what was chained to it. O(their number).
        """
        detached, self.index.detached = self.index.detached, []
        if self.index.accounts is not None:
            self.index.accounts.note_detached(detached)
        free = [block for block in detached if not block.ref_cnt]
        self.detached.update([block for block in detached if block.ref_cnt])
        self.queue.move_to_front(sorted(free, key=_block_id))

    def check(self, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Raise AssertionError unless every block is free or owned as `tables`, the live block tables, say. O(pool)."""
        owners = [0] * len(self.blocks)
        for table in tables:
            for block in table:
                position = block.block_id - self.first_block_id
                assert position >= 0 and self.blocks[position] is block, f"{block}: not of this pool"
                owners[position] += 1
        self.queue.check()
        num_free = num_cached = 0
        for position, block in enumerate(self.blocks):
            assert block.block_id == self.first_block_id + position, f"{block}: listed at {position}"
            assert block.ref_cnt == owners[position], f"{block}: held by {owners[position]} block tables"
            num_free += block.ref_cnt == 0
            num_cached += block.is_cached
        assert num_free == self.num_free_blocks, f"pool: {num_free} without an owner, {self.num_free_blocks} queued"
        self.index.check()
        assert not self.index.detached, "pool: detached blocks that weren't requeued"
        assert all(block.ref_cnt for block in self.detached), "pool: a free block counts as owned and detached"
        # The index reaches as many blocks as think that they are cached, so it reaches just those.
        assert num_cached == self.num_cached_blocks, f"pool: {num_cached} cached, {self.num_cached_blocks} found"

    def _note_released(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.detached:
            self.detached.difference_update([block for block in blocks if not block.ref_cnt])
        if self.index.watcher is not None:
            self.index.watcher.note_released(blocks)

    def _make_queue(self) -> FreeBlockQueue:
        return FreeBlockQueue(self.blocks)


def _block_id(block: KVCacheBlock) -> int:
    return block.block_id
