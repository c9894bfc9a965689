"""What happens to a sample of the pool's blocks: how long they live, lie idle, and wait to be used again.

The sample is fixed when it is chosen, so it costs no randomness, and what isn't in it costs one look at a set that is
done for a whole call's blocks at once. Time comes from a function that the caller gives, in its unit.

Invariants: `_released_at` has just those sampled blocks that are free and whose release was seen, oldest first.

What is measured are vLLM's sampled block metrics; the choice by multiples of the golden ratio is Knuth's (TAOCP 6.4).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import SupportsFloat

from kvblocks.arguments import check_number, listed, wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hooks import Watcher
from kvblocks.stats import HistogramValues

_SPREAD, _RANGE = 2_654_435_769, 2**32  # the first is the second over the golden ratio


def choose_sample(blocks: Iterable[KVCacheBlock], every: int) -> list[KVCacheBlock]:
    """Return about one of `every` blocks: always the same of a pool, evenly spread, and block 0 among them. O(blocks).

    Not each `every`-th id: prompts of equal lengths would show it the same part of each.
    """
    below = _RANGE // every
    return [block for block in blocks if block.block_id * _SPREAD % _RANGE < below]


def check_bounds(bounds: Iterable[SupportsFloat]) -> tuple[float, ...]:
    """Return the bounds of a histogram as floats: one or more, ascending and finite; else InvalidArgumentError."""
    expected = "at least one number, ascending and finite"
    numbers = [check_number("bounds", item, expected) for item in listed("bounds", expected, bounds)]
    try:
        limits = [float(number) for number in numbers]
    except OverflowError:
        limits = []
    if not limits or not all(map(isfinite, limits)) or limits != sorted(set(limits)):
        raise wrong("bounds", expected, numbers)
    return tuple(limits)


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

    def record(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def values(self) -> HistogramValues:
        """Return what it holds now. O(bounds)."""
        return HistogramValues(self.bounds, tuple(self.counts), self.total)


class BlockSampler(Watcher):
    """Records the lives of `blocks` from now on. now: returns the time, never less than before. bounds: of histograms.

    lifetimes: from a block's being taken until it is taken again, if it was cached then. idle_times: from its last
    release until then; how long the queue keeps what nobody uses. reuse_gaps: from a release until a hit, or a pin,
    takes the block back. last_idle_time: the newest of the idle times, the age that blocks reach in the queue now.
    What began before the sampler did isn't recorded.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock], now: Callable[[], float], bounds: tuple[float, ...]) -> None:
        self._sampled = frozenset(blocks)
        self._now = now
        self._taken_at: dict[KVCacheBlock, float] = {}
        self._released_at: dict[KVCacheBlock, float] = {}
        self.lifetimes = Histogram(bounds)
        self.idle_times = Histogram(bounds)
        self.reuse_gaps = Histogram(bounds)
        self.last_idle_time: float | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the sample. O(1)."""
        return len(self._sampled)

    @property
    def oldest_release(self) -> float | None:
        """When the sampled block that has been free the longest was released, None if none is. O(sample)."""
        released = list(self._released_at.values())  # whole, so that another thread may ask
        return released[0] if released else None

    def note_taken(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks left the queue to be reused; what they hold is still marked. O(blocks)."""
        if self._sampled.isdisjoint(blocks):
            return
        now = self._now()
        for block in blocks:
            if block not in self._sampled:
                continue
            taken_at, released_at = self._taken_at.get(block), self._released_at.pop(block, None)
            if block.is_cached and released_at is not None:
                self.last_idle_time = now - released_at
                self.idle_times.record(self.last_idle_time)
                if taken_at is not None:
                    self.lifetimes.record(now - taken_at)
            self._taken_at[block] = now

    def note_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks got one more owner. O(blocks)."""
        if self._sampled.isdisjoint(blocks):
            return
        now = self._now()
        for block in blocks:
            released_at = self._released_at.pop(block, None)
            if released_at is not None:
                self.reuse_gaps.record(now - released_at)

    def note_released(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks lost an owner. O(blocks)."""
        if self._sampled.isdisjoint(blocks):
            return
        now = self._now()
        for block in blocks:
            if block.ref_cnt == 0 and block in self._sampled:
                self._released_at[block] = now
