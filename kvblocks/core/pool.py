"""The pool: all blocks, who owns them, and what happens to their contents when they are reused.

The pool combines the free queue and the prefix index. The queue knows whether a block is free or owned, and the index
whether it is cached or not; all four combinations exist. A free cached block can be hit by a later request until it is
taken for something else, which stops it being cached. The roles are those of vLLM v1's BlockPool.

A block has no group of its own. It serves the group in whose table it is or to which it is attached; once free, it may
serve any group.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from operator import attrgetter
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hooks import Chooser, RemovalCause
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.virtual_blocks import VirtualBlocks
from kvblocks.errors import PoolExhaustedError

_BLOCK_ID = attrgetter("block_id")


class BlockPool(Closed):
    """`num_blocks` blocks with ids from `first_block_id` on.

    At first they are handed out in the order of their ids; later, blocks that hold nothing come first, then the least
    recently used ones. Raises InvalidArgumentError. O(num_blocks).

    This part of the manager is public for those who build a manager of their own; its other calls check no types.
    """

    def __init__(self, num_blocks: SupportsIndex, index: PrefixIndex, first_block_id: SupportsIndex = 0) -> None:
        number, first = check_count("num_blocks", num_blocks, 1), check_count("first_block_id", first_block_id, 0)
        self.first_block_id, self.end_block_id = first, first + number
        self.blocks = [KVCacheBlock(block_id) for block_id in range(first, first + number)]
        """All blocks, by id."""
        self.index = index
        """Where their contents may be cached."""
        self.num_evicted_blocks = 0
        """How many blocks stopped being cached because they were taken."""
        self.detached: set[KVCacheBlock] = set()
        """Blocks that stopped being cached while they were owned, and are still owned. There are rarely any."""
        self.chooser: Chooser | None = None
        """Decides which blocks are taken first; None: the first of the queue."""
        attached = index.attached
        self.queue = FreeBlockQueue(self.blocks, has_windows=attached is not None)
        """The free blocks, in the order of their reuse."""
        self.virtual: VirtualBlocks | None = None
        """Stand-ins for blocks of the primary group, where no group has full attention; None: a group has."""
        if attached is not None and attached.layout.primary is None:
            self.virtual = VirtualBlocks(self.end_block_id, number, index)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns, cached ones included. O(1)."""
        return self.queue.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents are cached. O(1)."""
        attached = self.index.attached
        if self.virtual is not None and attached is not None:
            return attached.num_blocks
        return self.index.num_cached_blocks

    def is_virtual(self, block: KVCacheBlock) -> bool:
        """Whether a block is a virtual one, without memory. O(1)."""
        return block.block_id >= self.end_block_id

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, in the order in which they will be taken. O(free blocks)."""
        return [block.block_id for block in self.queue]

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next free blocks and evict what they hold. O(num_blocks).

        A `Chooser` may say which cached blocks go first, for quotas or an eviction policy. Raises PoolExhaustedError,
        changing nothing, when too few blocks are free.
        """
        if self.index.attached is not None:
            return self._take_in_turn(num_blocks)
        if self.index.watchers:
            return self._take_watched(num_blocks)
        blocks = self.queue.popleft_n(num_blocks)
        for block in blocks:  # twice as fast as making a list of the cached ones
            if block.run is not None:
                self.num_evicted_blocks += self.index.evict(blocks)
                if self.index.detached:
                    self.requeue_detached()
                break
        return blocks

    def take_one(self) -> KVCacheBlock:
        """`take` of one block; there must be one. O(1)."""
        if self.index.watchers:
            return self._take_watched(1)[0]
        block = self.queue.popleft()
        if block.run is not None:
            self.num_evicted_blocks += self.index.evict_one(block)
            if self.index.detached:
                self.requeue_detached()
        return block

    def take_virtual(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take virtual blocks for a primary table. O(num_blocks)."""
        assert self.virtual is not None, "a group has full attention"
        blocks = self.virtual.take(num_blocks)
        self.requeue_detached()
        return blocks

    def _take_in_turn(self, num_blocks: int) -> list[KVCacheBlock]:
        """`take` one block after the other. If evicting a block detaches others, those are taken next."""
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
        """Take the first block, and those that evicting it detaches; or several first blocks, when the result is
        identical.

        Takes at most `most` blocks, and only while nobody watches.
        """
        number = self.index.num_bare(self.queue.first, most)
        if number:
            blocks = [self.queue.popleft() for _ in range(number)]
            self.num_evicted_blocks += self.index.evict_bare(blocks)
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

    def _take_watched(self, num_blocks: int) -> list[KVCacheBlock]:
        """`take` of a pool that somebody watches."""
        chooser, blocks = self.chooser, list[KVCacheBlock]()
        if chooser is not None and chooser.is_choosing and 0 < num_blocks <= self.queue.num_free_blocks:
            while len(blocks) < num_blocks:
                blocks += self._empty(chooser.take_next(self.queue, num_blocks - len(blocks)))
            return blocks
        return self._empty(self.queue.popleft_n(num_blocks))

    def _empty(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Evict what these blocks hold, which were just taken, and return them."""
        for watcher in self.index.watchers:
            watcher.note_taken(blocks)
        self.num_evicted_blocks += self.index.evict(blocks)
        self.requeue_detached()
        return blocks

    def touch(self, blocks: Items[KVCacheBlock]) -> None:
        """Add an owner to each of `blocks`, free or not. They stay cached. O(blocks).

        Either all of them are virtual or none is.
        """
        if self.virtual is not None and blocks and self.is_virtual(blocks[0]):
            self.virtual.touch(blocks)
            return
        self.queue.touch(blocks)
        for watcher in self.index.watchers:
            watcher.note_touched(blocks)

    def uncache(self, blocks: Iterable[KVCacheBlock], cause: RemovalCause = "dropped") -> None:
        """Stop caching `blocks` and what is chained to them; free ones are reused next. O(blocks + those chained)."""
        for block in blocks:
            self.index.forget(block, cause)
        self.requeue_detached()

    def release_table(self, blocks: Items[KVCacheBlock], num_cached: int = 0, giver: Sequence | None = None) -> None:
        """Remove an owner from each block of a table, or of a part of it. Those without another owner become free.

        Of these, cached blocks are reused last, with a prefix's end before its beginning, and blocks that hold nothing
        are reused next: see `FreeBlockQueue.release_table`. A duplicate without another owner is detached. The block
        that hits get inherits its place in the queue, if it is free.

        num_cached: how many blocks at the beginning their owner has cached, with no reset since. giver: as in
        `Watcher.note_released`. Either all blocks are virtual or none is. Raises BlockStateError, changing nothing,
        when a block has no owner. O(blocks).
        """
        if self.virtual is not None and blocks and self.is_virtual(blocks[0]):
            self.virtual.release(blocks)
            if self.index.num_duplicates:
                drop_duplicates(self.index, self.virtual.queue, blocks)
            self.requeue_detached()
            return
        if num_cached == len(blocks) and not self.detached:
            self.queue.release(blocks[::-1])
        else:
            self.queue.release_table(blocks, 0 if self.detached else num_cached)
        if self.index.num_duplicates:
            blocks = drop_duplicates(self.index, self.queue, blocks)
            self.requeue_detached()
        if self.detached or self.index.watchers:
            self._note_released(blocks[::-1], giver)

    def release_passed(self, passed: list[KVCacheBlock], empty: list[KVCacheBlock]) -> None:
        """Remove an owner from blocks that left a window: `passed` are cached, `empty` hold nothing. O(blocks).

        Those without another owner become free. The cached ones are then reused before blocks that were freed at a
        sequence's end, in the order given.
        """
        if empty:
            self.queue.release_empty(empty[::-1])
        if passed:
            self.queue.release_passed(passed)
        if self.detached:
            self._drop_detached(empty + passed)
        for watcher in self.index.watchers:
            watcher.note_released(empty)
            watcher.note_passed(passed)

    def requeue_detached(self) -> None:
        """Move the free ones among the detached blocks to the front of the queue. O(blocks detached).

        An abort detaches the blocks that weren't written and those chained to them.
        """
        if self.index.detached:
            self.queue.move_to_front(self.pop_detached())

    def pop_detached(self) -> list[KVCacheBlock]:
        """Register the blocks that the index detached, and return the free ones by id, for the caller to move or take.

        O(blocks detached).
        """
        detached, self.index.detached = self.index.detached, []
        if self.virtual is not None:
            self.virtual.requeue([block for block in detached if self.is_virtual(block)])
            detached = [block for block in detached if not self.is_virtual(block)]
        if self.chooser is not None:
            self.chooser.note_detached(detached)
        free = [block for block in detached if not block.ref_cnt]
        if len(free) < len(detached):
            self.detached.update([block for block in detached if block.ref_cnt])
        return sorted(free, key=_BLOCK_ID)

    def check(self, tables: Iterable[Items[KVCacheBlock]]) -> None:
        """Raise AssertionError unless each block has the owners that `tables`, all block tables, give it.

        O(pool + virtual blocks).
        """
        owners = [0] * len(self.blocks)
        virtual: list[Items[KVCacheBlock]] = []
        for table in tables:
            if self.virtual is not None and table and self.is_virtual(table[0]):
                virtual.append(table)
                continue
            for block in table:
                position = block.block_id - self.first_block_id
                assert position >= 0 and self.blocks[position] is block, f"{block}: not of this pool"
                owners[position] += 1
        self.queue.check()
        num_free = num_cached = num_virtual = 0
        if self.virtual is not None:
            num_virtual = self.virtual.check(virtual)
        for position, block in enumerate(self.blocks):
            assert block.block_id == self.first_block_id + position, f"{block}: listed at {position}"
            assert block.ref_cnt == owners[position], f"{block}: held by {owners[position]} block tables"
            num_free += block.ref_cnt == 0
            num_cached += block.is_cached
        assert num_free == self.num_free_blocks, f"pool: {num_free} without an owner, {self.num_free_blocks} queued"
        self.index.check()
        assert not self.index.detached, "pool: detached blocks that weren't requeued"
        assert all(block.ref_cnt for block in self.detached), "pool: a free block counts as owned and detached"
        # All blocks that the index finds have `is_cached`. If the numbers are equal, these are all such blocks.
        num_found = self.index.num_cached_blocks - num_virtual
        assert num_cached == num_found == self.num_cached_blocks, f"pool: {num_cached} cached, {num_found} found"

    def _note_released(self, blocks: Items[KVCacheBlock], giver: Sequence | None) -> None:
        if self.detached:
            self._drop_detached(blocks)
        for watcher in self.index.watchers:
            watcher.note_released(blocks, giver)

    def _drop_detached(self, blocks: Items[KVCacheBlock]) -> None:
        self.detached.difference_update([block for block in blocks if not block.ref_cnt])


def drop_duplicates(index: PrefixIndex, queue: FreeBlockQueue, table: Items[KVCacheBlock]) -> list[KVCacheBlock]:
    """Detach the duplicates in a table, or in a part of it, that was just released, unless somebody else owns them.

    A free canonical block, which hits get, inherits the duplicate's place in the queue. Returns the table, with each
    such block after its duplicate. The caller requeues what was detached. O(blocks).
    """
    released, renewed = list[KVCacheBlock](), list[KVCacheBlock]()
    for block in table:
        released.append(block)
        first = None if block.ref_cnt else index.drop_duplicate(block)
        if first is not None and not first.ref_cnt:
            queue.move_before(first, block)
            renewed.append(first)
            released.append(first)
    if renewed:
        for watcher in index.watchers:
            watcher.note_renewed(renewed)
    return released
