"""Timing: what one measurement is, and how those of several contestants are interleaved.

The machines that benches run on are noisy. So contestants take turns in short rounds, which gives all of them the same
noise, and the minimum of the rounds counts. Median and maximum include interference from other work.
"""

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

NUM_WARM_UPS = 2


def _nothing(_: Any = None) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time. `run(prepare())` does `num_units` units of work. `tidy` gets its result and undoes it.

    Only `run` is timed, by `clock`, in nanoseconds.
    """

    run: Callable[[Any], Any]
    num_units: float
    prepare: Callable[[], Any] = _nothing
    tidy: Callable[[Any], None] = _nothing
    clock: Callable[[], int] = perf_counter_ns

    def time_once(self) -> float:
        """Return the nanoseconds that one unit took."""
        state = self.prepare()
        start = self.clock()
        result = self.run(state)
        elapsed = self.clock() - start
        self.tidy(result)
        return elapsed / self.num_units


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of some samples, in nanoseconds per unit of work."""

    samples: list[float] = field(repr=False)

    @property
    def low(self) -> float:
        """The minimum: the cost of the work without interference."""
        return min(self.samples)

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def high(self) -> float:
        """The maximum."""
        return max(self.samples)


def settle() -> None:
    """Collect garbage, freeze the remaining objects, and switch the collector off."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.disable()


def measure(cases: Mapping[str, Case], num_rounds: int, num_samples: int) -> dict[str, Spread]:
    """Time the cases in turn, `num_rounds` times `num_samples` each, every other round in reverse order.

    Each turn begins with one run that isn't timed, to warm the caches that other cases used.
    """
    for case in cases.values():
        for _ in range(NUM_WARM_UPS):
            case.time_once()
    settle()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(num_rounds):
        names = list(cases) if round_number % 2 == 0 else list(cases)[::-1]
        for name in names:
            cases[name].time_once()
            samples[name] += [cases[name].time_once() for _ in range(num_samples)]
    gc.enable()
    return {name: Spread(values) for name, values in samples.items()}
