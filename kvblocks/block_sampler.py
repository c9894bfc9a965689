"""What happens to a sample of the pool's blocks: how long they live, lie idle, and wait to be used again.

Watches every `every`-th block id, so that the sample is the same blocks for the pool's life and costs no randomness.
Time comes from a function that the caller gives, in its unit. What is measured are vLLM's sampled block metrics.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from kvblocks.block import KVCacheBlock


class Histogram:
    """Counts of values by upper bounds, as Prometheus wants them, and their sum.

    bounds: ascending; a value counts for the first bound that isn't below it. counts: one more than bounds, the last
    for values above them all. O(log bounds) a value.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def num_values(self) -> int:
        """Values recorded. O(bounds)."""
        return sum(self.counts)

    def record(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class BlockSampler:
    """Records the lives of the blocks whose id is a multiple of `every`. now: the time. bounds: of the histograms.

    lifetimes: from a block's being taken until it is taken again, if it was cached then. idle_times: from its last
    release until then; how long the queue keeps what nobody uses. reuse_gaps: from a release until a hit takes the
    block back. last_idle_time: the newest of the idle times, the age that blocks reach in the queue now.
    """

    __slots__ = (
        "_every",
        "_now",
        "_released_at",
        "_taken_at",
        "idle_times",
        "last_idle_time",
        "lifetimes",
        "reuse_gaps",
    )

    def __init__(self, every: int, now: Callable[[], float], bounds: tuple[float, ...]) -> None:
        self._every = every
        self._now = now
        self._taken_at: dict[int, float] = {}
        self._released_at: dict[int, float] = {}
        self.lifetimes = Histogram(bounds)
        self.idle_times = Histogram(bounds)
        self.reuse_gaps = Histogram(bounds)
        self.last_idle_time: float | None = None

    def note_taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks left the queue to be reused; what they hold is still marked. O(blocks)."""
        sampled = [block for block in blocks if block.block_id % self._every == 0]
        if not sampled:
            return
        now = self._now()
        for block in sampled:
            taken_at, released_at = self._taken_at.get(block.block_id), self._released_at.pop(block.block_id, None)
            if block.is_cached and taken_at is not None and released_at is not None:
                self.lifetimes.record(now - taken_at)
                self.idle_times.record(now - released_at)
                self.last_idle_time = now - released_at
            self._taken_at[block.block_id] = now

    def note_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks got one more owner. O(blocks)."""
        sampled = [block for block in blocks if block.block_id % self._every == 0 and block.ref_cnt == 1]
        for block in sampled:
            released_at = self._released_at.pop(block.block_id, None)
            if released_at is not None:
                self.reuse_gaps.record(self._now() - released_at)

    def note_released(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks lost an owner. O(blocks)."""
        sampled = [block for block in blocks if block.block_id % self._every == 0 and block.ref_cnt == 0]
        for block in sampled:
            self._released_at[block.block_id] = self._now()
