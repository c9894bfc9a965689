"""Metrics of a running cache: hit rates, evictions, usage, pins, quotas, and the lives of a sample of blocks.

`CacheMetrics` keeps a window of recent requests, and a sampler. All other values are counters that the manager always
keeps. Only with a sampler does the manager check, for each block that it takes, shares or gets back, whether the
block is in the sample.

The core has no clock, so time is counted in blocks taken from the pool. This is deterministic, and it is the natural
age in an LRU queue: a block is evicted once all blocks before it have been taken. With the caller's clock, time is in
seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, SupportsFloat, SupportsIndex, final

from kvblocks.arguments import Given, check_clock, check_count, is_a, wrong
from kvblocks.closed import Closed
from kvblocks.manager import KVCacheManager
from kvblocks.observe.block_sampler import BlockSampler, check_bounds
from kvblocks.stats import HitCounts, MetricsSnapshot, PinUsage

BLOCK_BOUNDS: tuple[float, ...] = tuple([float(4**power) for power in range(2, 13)])
"""Bounds of histograms in blocks taken: 16 to 16.8 million, each four times the one before."""

SECOND_BOUNDS: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
"""Bounds of histograms in seconds."""


@final
class CacheMetrics(Closed):
    """Watches a manager from now on. Only one object at a time can sample a manager's blocks.

    - sample_every: about one block in this many is sampled. None: no block is sampled, the histograms stay empty, and
      watching costs nothing.
    - clock: returns seconds, such as `time.monotonic`. It must never go back, and never raise. None: time is counted in
      blocks taken.
    - window: how many of the last requests `MetricsSnapshot.window` is about.
    - bounds: those of the histograms, ascending, in the unit of time; None: BLOCK_BOUNDS or SECOND_BOUNDS.

    Raises InvalidArgumentError. O(num_blocks).
    """

    def __init__(
        self,
        manager: Given[KVCacheManager],
        *,
        sample_every: SupportsIndex | None = 64,
        clock: Callable[[], float] | None = None,
        window: SupportsIndex = 1000,
        bounds: Iterable[SupportsFloat] | None = None,
    ) -> None:
        if not is_a(manager, KVCacheManager):
            raise wrong("manager", "a KVCacheManager", manager)
        watched: KVCacheManager = manager  # type: ignore[assignment]
        if clock is not None:
            check_clock("clock", clock)
        max_queries = check_count("window", window, 1)
        every = None if sample_every is None else check_count("sample_every", sample_every, 1)
        limits = (BLOCK_BOUNDS if clock is None else SECOND_BOUNDS) if bounds is None else check_bounds(bounds)
        self.time_unit: Literal["blocks", "seconds"] = "blocks" if clock is None else "seconds"
        self._manager = watched
        # Made here: the thread that takes snapshots and the manager's could otherwise make them twice, and lose one.
        self._pins, self._quotas, self._tiers = watched.pins, watched.quotas, watched.tiers
        self._clock = clock
        self._max_queries = max_queries
        # All counts so far and the window. One tuple, so that another thread reads both of the same moment.
        self._noted = (_hit_counts(watched), HitCounts())
        self._observed: deque[HitCounts] = deque()
        self._sampler = BlockSampler([], self._now, limits)
        if every is not None:
            self._sampler = watched._start_sampling(every, self._now, limits)  # noqa: SLF001  # a hook for this class

    def observe(self) -> None:
        """Count the requests since the last call. Call it once per step. O(1) on average.

        The window consists of whole calls, so it may contain a few more requests than `window`.
        """
        counts = _hit_counts(self._manager)
        noted, window = self._noted
        new = counts.plus(noted, -1)
        if not new.num_queries:
            return
        window = window.plus(new)
        self._observed.append(new)
        while window.num_queries - self._observed[0].num_queries >= self._max_queries:
            window = window.plus(self._observed.popleft(), -1)
        self._noted = (counts, window)

    def snapshot(self) -> MetricsSnapshot:
        """Return the present values. Changes nothing. O(sample + pinned blocks + salts with a quota + tiers).

        Under CPython's global lock, another thread may call this while the manager works. The values may then be of
        slightly different moments.
        """
        manager, sampler = self._manager, self._sampler
        noted, window = self._noted
        oldest = sampler.oldest_release
        now = self._now()
        return MetricsSnapshot(
            time=now,
            time_unit=self.time_unit,
            stats=manager.stats,
            window=window.plus(_hit_counts(manager).plus(noted, -1)),
            pins=self._pin_usage(),
            quotas=tuple(self._quotas),
            num_sampled_blocks=sampler.num_blocks,
            lifetimes=sampler.lifetimes.values(),
            idle_times=sampler.idle_times.values(),
            reuse_gaps=sampler.reuse_gaps.values(),
            last_idle_time=sampler.last_idle_time,
            queue_age=None if oldest is None else now - oldest,
            tiers=tuple(self._tiers),
        )

    def close(self) -> None:
        """Stop sampling blocks, so that other metrics can. Recorded values stay. O(1)."""
        self._manager._stop_sampling(self._sampler)  # noqa: SLF001  # a hook for this class

    def _pin_usage(self) -> PinUsage:
        pins, end = list(self._pins), self._manager.first_block_id + self._manager.num_blocks
        held = [block for pin in pins for block in [*pin.blocks, *pin.attached_blocks] if block.block_id < end]
        return PinUsage(len(pins), sum([pin.num_wanted_blocks for pin in pins]), len(held), len(set(held)))

    def _now(self) -> float:
        if self._clock is not None:
            return self._clock()
        return float(self._manager.stats.num_taken_blocks)


def _hit_counts(manager: KVCacheManager) -> HitCounts:
    stats = manager.stats
    return HitCounts(stats.num_queries, stats.num_hits, stats.num_queried_tokens, stats.num_hit_tokens)
