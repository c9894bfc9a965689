"""The queue of blocks that nobody owns, least recently used first.

A circular doubly-linked list through the blocks themselves, so that a block in the middle leaves in O(1) when a
prefix hit takes it back. Being queued and having no owner are one fact, so one place keeps both: whatever leaves the
queue leaves it with `ref_cnt` 1, whatever enters has 0. One root block that is never handed out closes the circle,
which makes every operation free of special cases at the ends.

After vLLM v1's FreeKVCacheBlockQueue; the circle with self-linked outsiders is the Linux kernel's list_head.
"""

from collections.abc import Iterator, Sequence

from kvblocks.block import KVCacheBlock
from kvblocks.errors import BlockStateError, PoolExhaustedError


class FreeBlockQueue:
    """An intrusive LRU queue over `blocks`, all of them free at first and in the given order. O(blocks) to make.

    Raises BlockStateError, changing nothing, when a block is linked or owned already. A part of the manager that is
    public for those who build one of their own: beyond that it checks no types.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._root = KVCacheBlock(0)  # never handed out, so its id is never seen
        self.num_free_blocks = 0
        self.extend(blocks)

    def __len__(self) -> int:
        return self.num_free_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Yield the blocks, least recently used first. The queue must not change meanwhile."""
        block = self._root.next_free_block
        while block is not self._root:
            yield block
            block = block.next_free_block

    @property
    def first(self) -> KVCacheBlock | None:
        """The least recently used block, None if there is none. O(1)."""
        block = self._root.next_free_block
        return None if block is self._root else block

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the `num_blocks` least recently used blocks, oldest first; each then has `ref_cnt` 1.

        Raises PoolExhaustedError, changing nothing, when there are fewer. O(num_blocks).
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise PoolExhaustedError(f"expected 0 to {self.num_free_blocks} blocks to take, got {num_blocks}")
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

    def popleft(self) -> KVCacheBlock:
        """Take the least recently used block; it then has `ref_cnt` 1. There must be one. O(1)."""
        root = self._root
        block = root.next_free_block
        following = block.next_free_block
        root.next_free_block = following
        following.prev_free_block = root
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
                self._unlink_last(last, num_linked)
                state = f"owned {block.ref_cnt} times" if block.ref_cnt else "queued already"
                raise BlockStateError(f"expected a block that is neither queued nor owned, got {block} {state}")
            block.prev_free_block = last
            last.next_free_block = block
            # The next link goes to the root at once: a block given twice is then seen to be linked.
            block.next_free_block = root
            last = block
            num_linked += 1
        root.prev_free_block = last
        self.num_free_blocks += num_linked

    def _unlink_last(self, last: KVCacheBlock, num_blocks: int) -> None:
        """Take back what a failing call has linked behind the queue's end: the `num_blocks` blocks up to `last`."""
        for _ in range(num_blocks):
            previous = last.prev_free_block
            last.prev_free_block = last
            last = previous
        last.next_free_block = self._root

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each block; those that lose their last one are appended, in the order given.

        Raises BlockStateError, changing nothing, when a block has no reference left to give up. O(blocks).
        """
        root = self._root
        last = root.prev_free_block
        num_kept = 0  # those that aren't linked are counted, since they are few
        rest = iter(blocks)
        for block in rest:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                block.prev_free_block = last
                last.next_free_block = block
                last = block
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
                num_kept += 1
            else:
                num_done = len(blocks) - 1 - len(list(rest))
                self._unlink_last(last, num_done - num_kept)
                for released in blocks[:num_done]:
                    released.ref_cnt += 1
                raise BlockStateError(f"double free: expected a block with an owner, got {block}")
        last.next_free_block = root
        root.prev_free_block = last
        self.num_free_blocks += len(blocks) - num_kept

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

    def check(self) -> None:
        """Raise AssertionError unless the links agree, the length is right and no queued block is owned. O(queue)."""
        num_seen = self._check_circle(self._root)
        assert num_seen == self.num_free_blocks, f"queue: {num_seen} linked, {self.num_free_blocks} counted"

    def _check_circle(self, root: KVCacheBlock) -> int:
        """Check the circle through `root`; returns how many blocks are in it."""
        num_seen, previous, block = 0, root, root.next_free_block
        while block is not root:
            assert block.prev_free_block is previous, f"{block}: back link leads to {block.prev_free_block}"
            assert block.ref_cnt == 0, f"{block} is queued and owned"
            num_seen, previous, block = num_seen + 1, block, block.next_free_block
            assert num_seen <= self.num_free_blocks, f"queue: more than {self.num_free_blocks} blocks are linked"
        assert root.prev_free_block is previous, "queue: the end doesn't lead to the last block"
        return num_seen
