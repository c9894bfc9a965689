"""The queue of free blocks, in the order in which they are taken.

The queue has three stretches: first blocks that hold nothing, then blocks that left a window, then all others, least
recently used first. Where a block goes is decided when it is released. Cached blocks go to the end and blocks that hold
nothing to the front, so no cached block is evicted while an empty one is free.

The queue is a circular doubly-linked list through the blocks themselves, so that a hit can take a block out of the
middle in O(1). A block is queued exactly when it has no owner, so the queue also writes `ref_cnt`: 1 for a block that
leaves the queue, 0 for one that enters it. One root block, which is never handed out, closes the circle, so that no
operation has special cases at the ends.

The queue follows vLLM v1's FreeKVCacheBlockQueue, including what is `prepend` there. The circle, with unlinked blocks
that point at themselves, is the Linux kernel's list_head. The middle stretch is this project's.
"""

from collections.abc import Iterator, Sequence

from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.errors import BlockStateError, PoolExhaustedError


class FreeBlockQueue(Closed):
    """A queue of `blocks`, all of them free at first and in the given order. O(blocks) to make.

    has_windows: whether blocks may leave a window (`release_passed`). num_shared_changes: how often a block that stayed
    owned got or lost a reference. Raises BlockStateError, changing nothing, when a block is queued or owned already.
    This part of the manager is public for those who build a manager of their own; it checks no types.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], *, has_windows: bool = False) -> None:
        self._root = KVCacheBlock(0)  # never handed out, so its id is never seen
        self._mark = KVCacheBlock(0)  # never handed out either; stands behind the blocks that left a window
        self._has_windows = has_windows
        self.num_free_blocks = 0
        self.num_shared_changes = 0
        self.extend(blocks)
        if has_windows:
            self._link(self._mark, self._root)

    def __len__(self) -> int:
        return self.num_free_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Yield the blocks in the order in which they are taken. The queue must not change during the iteration."""
        block = self._root.next_free_block
        while block is not self._root:
            if block is not self._mark:
                yield block
            block = block.next_free_block

    @property
    def first(self) -> KVCacheBlock | None:
        """The block that is taken next, None if there is none. O(1)."""
        block = self._root.next_free_block
        if block is self._mark:
            block = block.next_free_block
        return None if block is self._root else block

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the first `num_blocks` blocks, in order, and set the `ref_cnt` of each to 1.

        Raises PoolExhaustedError, changing nothing, when there are fewer. O(num_blocks).
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.num_free_blocks} blocks to take, got {num_blocks}")
        if self._has_windows:
            return self._pop_each(num_blocks)
        root = self._root
        block = root.next_free_block
        taken = []
        for _ in range(num_blocks):
            taken.append(block)
            block.ref_cnt = 1
            block.prev_free_block = block
            block = block.next_free_block
        root.next_free_block = block
        block.prev_free_block = root
        self.num_free_blocks -= num_blocks
        return taken

    def popleft_empty(self, max_blocks: int) -> list[KVCacheBlock]:
        """Take up to `max_blocks` of the first blocks, stopping at the first one that is in a run. O(blocks taken).

        The `ref_cnt` of each is then 1.
        """
        root = self._root
        block = root.next_free_block
        taken: list[KVCacheBlock] = []
        while len(taken) < max_blocks and block.run is None and block is not root and block is not self._mark:
            taken.append(block)
            block.ref_cnt = 1
            block.prev_free_block = block
            block = block.next_free_block
        root.next_free_block = block
        block.prev_free_block = root
        self.num_free_blocks -= len(taken)
        return taken

    def popleft(self) -> KVCacheBlock:
        """Take the first block, which must exist, and set its `ref_cnt` to 1. O(1)."""
        previous = self._root
        block = previous.next_free_block
        if block is self._mark:
            previous, block = block, block.next_free_block
        following = block.next_free_block
        previous.next_free_block = following
        following.prev_free_block = previous
        block.prev_free_block = block
        block.ref_cnt = 1
        self.num_free_blocks -= 1
        return block

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append blocks that are neither queued nor owned, in order. O(blocks).

        Raises BlockStateError, changing nothing, when one is linked or owned already.
        """
        root = self._root
        last = root.prev_free_block
        num_linked = 0
        for block in blocks:
            if block.ref_cnt or block.prev_free_block is not block:
                self._unlink_last(last)
                state = f"owned {block.ref_cnt} times" if block.ref_cnt else "queued already"
                raise BlockStateError(f"expected a block that is neither queued nor owned, got {block} {state}")
            block.prev_free_block = last
            last.next_free_block = block
            # The next link leads to the root at once, so that a block that is given twice is seen to be queued.
            block.next_free_block = root
            last = block
            num_linked += 1
        root.prev_free_block = last
        self.num_free_blocks += num_linked

    def _unlink_last(self, last: KVCacheBlock) -> int:
        """Unlink the blocks up to `last`, which a failing call has linked after the queue's end. Returns how many."""
        num_unlinked, end = 0, self._root.prev_free_block
        while last is not end:
            last.prev_free_block, last = last, last.prev_free_block
            num_unlinked += 1
        last.next_free_block = self._root
        return num_unlinked

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each block. Blocks that lose their last reference are appended, in the order given.

        Raises BlockStateError, changing nothing, when a block has no reference left to give up. O(blocks).
        """
        root = self._root
        last = root.prev_free_block
        num_kept = 0  # blocks that stay owned; mostly they are few, so counting them costs little
        for block in blocks:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                block.prev_free_block = last
                last.next_free_block = block
                last = block
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
                num_kept += 1
            else:
                num_done = self._unlink_last(last) + num_kept
                for released in blocks[:num_done]:
                    released.ref_cnt += 1
                raise BlockStateError(f"double free: expected a block with an owner, got {block}")
        last.next_free_block = root
        root.prev_free_block = last
        self.num_free_blocks += len(blocks) - num_kept
        if num_kept:
            self.num_shared_changes += num_kept

    def release_table(self, blocks: Sequence[KVCacheBlock], num_cached: int = 0) -> None:
        """Give up one reference to each block of a table, or of a part of it. Blocks that lose their last one are
        queued.

        Cached blocks go to the end of the queue, and blocks that hold nothing to the front. In both cases the table's
        last block comes first, so that a prefix's end is taken before its beginning. num_cached: how many blocks at the
        beginning of the table are known to be cached. Raises BlockStateError, changing nothing. O(blocks).
        """
        cached: list[KVCacheBlock] = []
        empty: list[KVCacheBlock] = []
        for block in blocks[: num_cached - 1 if num_cached else None : -1]:
            run = block.run
            if run is not None and run.epoch.is_current:  # `is_cached`, inlined
                cached.append(block)
            else:
                empty.append(block)
        self.release_empty(empty)
        try:
            self.release(cached + [*blocks[:num_cached]][::-1])
        except BlockStateError:
            self.touch(empty)
            raise

    def release_empty(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each block. None may be cached. Raises BlockStateError, changing nothing. O(blocks).

        Blocks that lose their last reference go to the front of the queue, in the order given.
        """
        root = self._root
        following = root.next_free_block
        last, num_linked = root, 0
        for number, block in enumerate(blocks):
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                block.prev_free_block = last
                last.next_free_block = block
                last = block
                num_linked += 1
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
            else:
                for released in blocks[:number]:
                    if not released.ref_cnt:
                        released.prev_free_block = released
                    released.ref_cnt += 1
                root.next_free_block = following
                raise BlockStateError(f"double free: expected a block with an owner, got {block}")
        last.next_free_block = following
        following.prev_free_block = last
        self.num_free_blocks += num_linked
        self.num_shared_changes += len(blocks) - num_linked

    def release_passed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each of these cached blocks, which left a window. Only for a queue with windows.

        Blocks that lose their last reference go to the end of the middle stretch, in the order given. Each block may be
        given only once. Raises BlockStateError, changing nothing. O(blocks).
        """
        for block in blocks:
            if block.ref_cnt < 1:
                raise BlockStateError(f"double free: expected a block with an owner, got {block}")
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt:
                self.num_shared_changes += 1
            else:
                self._link(block, self._mark)
                self.num_free_blocks += 1

    def move_to_front(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Move queued blocks that no longer hold anything to the front of the queue, in the order given. O(blocks)."""
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

    def move_before(self, block: KVCacheBlock, other: KVCacheBlock) -> None:
        """Move a queued block in front of `other`, which was queued later. O(1)."""
        self._unlink(block)
        self._link(block, other)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block; those that were free leave the queue. O(blocks)."""
        num_owned = 0
        for block in blocks:
            if block.ref_cnt == 0:
                previous, following = block.prev_free_block, block.next_free_block
                previous.next_free_block = following
                following.prev_free_block = previous
                block.prev_free_block = block
                block.ref_cnt = 1
            else:
                block.ref_cnt += 1
                num_owned += 1
        self.num_free_blocks -= len(blocks) - num_owned
        if num_owned:
            self.num_shared_changes += num_owned

    def check(self) -> None:
        """Raise AssertionError unless the links and the length are right and no queued block is owned. O(queue)."""
        root, num_linked = self._root, self.num_free_blocks + self._has_windows
        num_seen, previous, block = 0, root, root.next_free_block
        while block is not root:
            assert block.prev_free_block is previous, f"{block}: back link leads to {block.prev_free_block}"
            assert block.ref_cnt == 0, f"{block} is queued and owned"
            num_seen, previous, block = num_seen + 1, block, block.next_free_block
            assert num_seen <= num_linked, f"queue: more than {num_linked} blocks are linked"
        assert root.prev_free_block is previous, "queue: the end doesn't lead to the last block"
        assert num_seen == num_linked, f"queue: {num_seen} linked, {num_linked} counted"

    def _pop_each(self, num_blocks: int) -> list[KVCacheBlock]:
        """`popleft_n` of a queue with windows. A separate function, since a comprehension slows its whole function."""
        return [self.popleft() for _ in range(num_blocks)]

    def _link(self, block: KVCacheBlock, following: KVCacheBlock) -> None:
        previous = following.prev_free_block
        block.prev_free_block, block.next_free_block = previous, following
        previous.next_free_block = following.prev_free_block = block

    def _unlink(self, block: KVCacheBlock) -> None:
        previous, following = block.prev_free_block, block.next_free_block
        previous.next_free_block, following.prev_free_block = following, previous
        block.prev_free_block = block
