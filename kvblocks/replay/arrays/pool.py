"""`ArrayPool`: what the production manager does with a trace's prompts under LRU eviction, a whole prompt at a time.

`KVCacheManager` works block by block, which takes a microsecond each. A replay has millions of blocks, and only needs
to know which are cached. So here a block is just its number in the trace, and a call handles all blocks of a prompt at
once.

Two facts make that possible: a request that owns a block owns all blocks before it, and the end of a prefix is evicted
before its beginning. So the cached blocks of a prompt are its first ones, and the cached blocks without owners are the
last of these.

`tests/replay/test_arrays.py` compares every outcome with that of the production manager.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.arrays.released import Blocks, ReleaseOrder


class ArrayPool:
    """A pool for the blocks of a trace, which are numbers below `num_unique`. Arguments aren't checked.

    num_free_blocks, num_cached_blocks, num_evicted_blocks, num_policy_failures: as in a manager.
    """

    def __init__(self, num_blocks: int, num_unique: int) -> None:
        self.num_blocks = self.num_free_blocks = num_blocks
        self.num_cached_blocks = self.num_evicted_blocks = self.num_policy_failures = 0
        self._cached = bytearray(num_unique)
        self._is_cached: NDArray[np.uint8] = np.frombuffer(self._cached, np.uint8)  # the same memory
        self._owners = np.zeros(num_unique, np.int32)
        self._released = ReleaseOrder(num_unique, num_blocks)

    def find(self, path: Blocks) -> int:
        """Return how many leading blocks of a prompt are cached. O(log blocks)."""
        return _num_first(self._cached, path, len(path))

    def num_missing(self, path: Blocks, num_hit: int) -> int:
        """Return how many free blocks a prompt takes, including the free ones of its hit. O(log blocks)."""
        return len(path) - self._num_owned(path, num_hit)

    def take(self, path: Blocks, num_hit: int, session: Hashable, tenant: str | None) -> Blocks | None:
        """Give a request its blocks. num_hit: from `find`. Returns the evicted blocks, in order.

        Returns None, with nothing changed, if too few blocks are free. session, tenant: the request's. O(blocks).
        """
        num_owned = self._num_owned(path, num_hit)
        if len(path) - num_owned > self.num_free_blocks:
            return None
        self._begin(session, tenant)
        idle = path[num_owned:num_hit]
        self._owners[path] += 1
        if len(idle):
            self._use(idle)
        num_new = len(path) - num_hit
        num_evicted = max(0, num_new - (self.num_blocks - self.num_cached_blocks))
        evicted = self._evict(num_evicted) if num_evicted else path[:0]
        self.num_free_blocks -= len(path) - num_owned
        self.num_cached_blocks += num_new - num_evicted
        self.num_evicted_blocks += num_evicted
        if num_new:
            self._cache(path, num_hit)
        if num_hit:
            self._note_hit(path[:num_hit])
        return evicted

    def release(self, path: Blocks, session: Hashable, tenant: str | None) -> None:
        """Take a request's blocks back. O(blocks)."""
        self._owners[path] -= 1
        num_owned = self._num_owned(path, len(path))
        self.num_free_blocks += len(path) - num_owned
        self._note_released(path, num_owned, session, tenant)

    def set_time(self, now: float) -> None:
        """Set the clock that policies see."""

    def pause(self, session: Hashable, tenant: str | None, reason: str) -> None:
        """Note that a session pauses, as `manager.sessions.pause` does."""

    def end(self, session: Hashable, tenant: str | None) -> None:
        """Note that a session has ended, as `manager.sessions.end` does."""

    def _num_owned(self, path: Blocks, end: int) -> int:
        """Return how many of a prompt's first `end` blocks have owners: its first ones."""
        return _num_first(self._owners, path, end)

    # What a pool with a policy does in its own way.

    def _begin(self, session: Hashable, tenant: str | None) -> None:
        """A request begins."""

    def _use(self, blocks: Blocks) -> None:
        """Free blocks have an owner again."""
        self._released.forget(blocks)

    def _evict(self, number: int) -> Blocks:
        """Evict so many free blocks, and return them."""
        evicted = self._released.take(number)
        self._is_cached[evicted] = 0
        return evicted

    def _cache(self, path: Blocks, first: int) -> None:
        """A prompt's blocks from index `first` on are cached now."""
        self._is_cached[path[first:]] = 1

    def _note_hit(self, blocks: Blocks) -> None:
        """A request has hit these blocks."""

    def _note_released(self, path: Blocks, num_owned: int, session: Hashable, tenant: str | None) -> None:  # noqa: ARG002
        """A request gave a prompt back. Its blocks behind the first `num_owned` are free now."""
        self._released.add(path[num_owned:][::-1])


def _num_first(flags: Any, path: Blocks, end: int) -> int:
    """Return how many of a prompt's first `end` blocks have a flag: its first ones, without a gap. O(log blocks)."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if flags[path[middle]]:
            low = middle + 1
        else:
            high = middle
    return low
