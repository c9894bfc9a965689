"""How long blocks live, lie idle and wait to be used again, measured on a sample of the pool's blocks.

The sample is chosen once, by block ids, without randomness. A call that concerns no sampled block costs one set
operation. Time comes from a function that the caller gives, in its unit.

Invariant: `_released_at` contains exactly the free sampled blocks whose release was seen, oldest first.

The measures are vLLM's sampled block metrics. The choice by multiples of the golden ratio is Knuth's (TAOCP 6.4).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from math import isfinite
from typing import SupportsFloat

from kvblocks.arguments import check_number, listed, wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hooks import Watcher
from kvblocks.core.sequence import Sequence
from kvblocks.stats import HistogramValues

_SPREAD, _RANGE = 2_654_435_769, 2**32  # the first is the second over the golden ratio


def choose_sample(blocks: Iterable[KVCacheBlock], every: int) -> list[KVCacheBlock]:
    """Return about one of `every` blocks, evenly spread, including block 0. The choice depends only on ids. O(blocks).

    It doesn't take each `every`-th id: with prompts of equal lengths, these would be the same part of each prompt.
    """
    below = _RANGE // every
    return [block for block in blocks if block.block_id * _SPREAD % _RANGE < below]


def check_bounds(bounds: Iterable[SupportsFloat]) -> tuple[float, ...]:
    """Return the bounds of a histogram as floats. Raises InvalidArgumentError unless they are ascending and finite.

    There must be at least one.
    """
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
    """Counts of values by upper bounds, as Prometheus needs them, and the sum of the values.

    bounds: ascending; a value counts for the smallest bound that isn't less than it. counts: one for each bound, and a
    last one for larger values. O(log bounds) for each value.
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
        """Return the present counts. O(bounds)."""
        return HistogramValues(self.bounds, tuple(self.counts), self.total)


class BlockSampler(Watcher):
    """Records the lives of `blocks` from now on.

    now: returns the time, never less than before. bounds: those of the histograms.

    - lifetimes: from when a block is taken until it is taken again, if it is cached then.
    - idle_times: from a block's last release until it is taken again, if it is cached then. This is how long the queue
      keeps unused blocks.
    - reuse_gaps: from a release until a hit or a pin owns the block again.
    - last_idle_time: the latest idle time, which is the age that blocks now reach in the queue.

    A time that began before the sampler was made isn't recorded.
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
        """When the sampled block that has been free longest was released; None if none is free. O(sample)."""
        released = list(self._released_at.values())  # a copy, so that another thread may ask
        return released[0] if released else None

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Blocks were taken for reuse. They are still marked as cached. O(blocks)."""
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

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Blocks got one more owner. O(blocks)."""
        if self._sampled.isdisjoint(blocks):
            return
        now = self._now()
        for block in blocks:
            released_at = self._released_at.pop(block, None)
            if released_at is not None:
                self.reuse_gaps.record(now - released_at)

    def note_renewed(self, blocks: Items[KVCacheBlock]) -> None:
        """Free blocks are about to be released again. Nobody owned them, so no gap ends. O(blocks)."""
        for block in blocks:
            self._released_at.pop(block, None)

    def note_released(self, blocks: Items[KVCacheBlock], giver: Sequence | None = None) -> None:  # noqa: ARG002
        """Blocks lost an owner. O(blocks)."""
        if self._sampled.isdisjoint(blocks):
            return
        now = self._now()
        for block in blocks:
            if block.ref_cnt == 0 and block in self._sampled:
                self._released_at[block] = now
