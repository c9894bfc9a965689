"""Identities without KV: what stands in the primary group's place where no group has full attention.

A ghost is a block that has no memory. Sequences hold ghosts in their primary tables, and the prefix index keeps them in
its runs, as it does blocks; so what hangs from them is exact for the same reason, whatever the hash. There are as many
as sequences need, and those that nobody holds stay for later hits; but beyond a number of these, the least recently
used is reused before another one is made.

Invariants: ids begin where the pool's end.
"""

from collections.abc import Sequence

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.groups.index import GroupIndex

KEPT_PER_BLOCK = 16
"""Free ghosts for each block of the pool, beyond which they are reused. One takes about 150 bytes, with 16 tokens."""


class GhostBlocks:
    """The ghosts of a pool of `num_blocks`; once more than `max_free` are held by nobody, those are reused."""

    def __init__(self, num_blocks: int, index: GroupIndex) -> None:
        self.first_id = num_blocks
        self.max_free = KEPT_PER_BLOCK * num_blocks
        self.blocks: list[KVCacheBlock] = []
        self._index = index
        self._queue = FreeBlockQueue([])

    @property
    def num_free(self) -> int:
        """Ghosts that nobody holds. O(1)."""
        return self._queue.num_free_blocks

    def take(self, num_ghosts: int) -> list[KVCacheBlock]:
        """Return ghosts that mean nothing yet, each held once. What hangs from a reused one is detached. O(ghosts)."""
        taken: list[KVCacheBlock] = []
        while len(taken) < num_ghosts:
            first = self._queue.first
            if first is not None and (not first.is_cached or self._queue.num_free_blocks >= self.max_free):
                ghost = self._queue.popleft()
                self._index.evict_one(ghost)
            else:
                ghost = KVCacheBlock(self.first_id + len(self.blocks))
                ghost.ref_cnt = 1
                self.blocks.append(ghost)
            taken.append(ghost)
        return taken

    def touch(self, ghosts: Sequence[KVCacheBlock]) -> None:
        """Hold each of `ghosts` once more. O(ghosts)."""
        self._queue.touch(ghosts)

    def release(self, ghosts: Sequence[KVCacheBlock]) -> None:
        """Let go of each of `ghosts`, last one first; those that mean nothing are reused next. O(ghosts)."""
        self._queue.release_table(ghosts)

    def requeue(self, ghosts: Sequence[KVCacheBlock]) -> None:
        """Have those of `ghosts`, which mean nothing any more, that nobody holds reused next. O(ghosts)."""
        self._queue.move_to_front(sorted([ghost for ghost in ghosts if not ghost.ref_cnt], key=_block_id))

    def check(self, tables: list[Sequence[KVCacheBlock]]) -> int:
        """Raise AssertionError unless the ghosts are held as `tables` say; returns how many are cached. O(ghosts)."""
        owners = [0] * len(self.blocks)
        for table in tables:
            for ghost in table:
                owners[ghost.block_id - self.first_id] += 1
        self._queue.check()
        num_cached = num_free = 0
        for place, ghost in enumerate(self.blocks):
            assert ghost.block_id == self.first_id + place, f"{ghost}: stands at {place}"
            assert ghost.ref_cnt == owners[place], f"{ghost}: held by {owners[place]} tables"
            num_cached += ghost.is_cached
            num_free += not ghost.ref_cnt
        assert num_free == self.num_free, f"ghosts: {num_free} without an owner, {self.num_free} queued"
        return num_cached


def _block_id(ghost: KVCacheBlock) -> int:
    return ghost.block_id
