"""Delay by load: a trace on a model of a server that takes time, at several loads, with and without a gate."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvblocks import __version__
from kvblocks.arguments import check_count, check_number, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.result import TraceFacts
from kvblocks.replay.served.entrances import CAP, GATE, INFINITE, NONE
from kvblocks.replay.served.run import Served, ServedRun, ServerModel
from kvblocks.replay.sweep import Progress, do_all
from kvblocks.replay.trace import Trace, arrival_times, think_times


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to run. sizes: blocks of the pool. loads: divisors of the times between sessions; 1.0: as given.

    mean_arrival_s, seed: as in `arrival_times`. caps: numbers of sessions to let in at once; None: those of `caps_of`.
    Raises InvalidArgumentError.
    """

    sizes: tuple[int, ...]
    server: ServerModel
    loads: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.5)
    mean_arrival_s: float | None = None
    seed: int = 1
    host_blocks: int | None = None
    caps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for load in self.loads:
            if not 0 < check_number("load", load, "a number above 0") < float("inf"):
                raise wrong("load", "a number above 0", load)
        for cap in self.caps or ():
            check_count("cap", cap, 1)
        if not self.loads or not self.sizes:
            raise InvalidArgumentError(f"expected loads and sizes, got {self.loads} and {self.sizes}")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One row for each size, load and entrance, in this order. Of the caps, only the one with the least mean delay."""

    trace: TraceFacts
    options: LoadOptions
    rows: list[Served]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row: the row's fields, then `trace` and `conditions`."""
        options = asdict(self.options)
        options["version"] = __version__
        trace = asdict(self.trace)
        return [row.to_row() | {"trace": trace, "conditions": options} for row in self.rows]


@dataclass(frozen=True, slots=True)
class ServedJob:
    """One run of the trace: a `ReplayJob`. entrance: as in `make_entrance`."""

    num_blocks: int
    load: float
    entrance: str

    @property
    def title(self) -> str:
        """The text of a progress bar."""
        return f"{self.entrance}, load {self.load:g}, {self.num_blocks:,} blocks"


class ServedWorkload:
    """A trace and the options of its runs: a `ReplaySource`."""

    def __init__(self, trace: Trace, options: LoadOptions) -> None:
        self.trace, self.options = trace, options
        self._arrivals = arrival_times(trace, options.mean_arrival_s, options.seed)
        self._thinks = think_times(trace)

    def do(self, job: ServedJob, progress: Callable[[float], object]) -> Served:  # noqa: ARG002  # a run tells nothing
        """Carry out a job."""
        times, options = (self._arrivals / job.load, self._thinks), self.options
        run = ServedRun(self.trace, times, job.num_blocks, job.entrance, options.server, options.host_blocks)
        return replace(run.run(), load=job.load)

    def facts(self) -> TraceFacts:
        """Return what a report says about the trace."""
        return self.trace.facts(self._arrivals)


def caps_of(trace: Trace, num_blocks: int) -> tuple[int, ...]:
    """Return caps to try: half to four times as many sessions as fit, by the mean of their longest prompts."""
    largest = np.zeros(len(trace.session_names), np.int64)
    np.maximum.at(largest, trace.sessions, trace.tokens)
    fitting = num_blocks * trace.block_size / max(1.0, float(largest.mean()))
    return tuple(sorted({max(1, round(fitting * share)) for share in (0.5, 1, 2, 4)}))


def delays(
    trace: Trace, options: LoadOptions, num_processes: int | None = None, progress: Progress | None = None
) -> LoadResult:
    """Run a trace at all loads. num_processes, progress: as in `do_all`."""
    jobs: list[ServedJob] = []
    for num_blocks in options.sizes:
        caps = caps_of(trace, num_blocks) if options.caps is None else options.caps
        entrances = (NONE, *[f"{CAP} {cap}" for cap in caps], GATE, INFINITE)
        jobs += [ServedJob(num_blocks, load, entrance) for load in options.loads for entrance in entrances]
    workload = ServedWorkload(trace, options)
    found = do_all(workload, jobs, num_processes, progress)
    return LoadResult(workload.facts(), options, _with_best_cap([found[job] for job in jobs]))


def _with_best_cap(rows: list[Served]) -> list[Served]:
    """Leave out all caps but the best one of each size and load."""
    best: dict[tuple[int, float], Served] = {}
    for row in rows:
        if row.entrance.startswith(CAP):
            known = best.setdefault((row.num_blocks, row.load), row)
            if row.delay_mean_s < known.delay_mean_s:
                best[row.num_blocks, row.load] = row
    return [row for row in rows if not row.entrance.startswith(CAP) or best[row.num_blocks, row.load] is row]
