"""A sweep: replays a trace with several policies and sizes, on all cores, with each run in its own process."""

import gc
import multiprocessing
import os
import platform
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

import kvblocks
from kvblocks import FullAttention, Group, KVLayer, SlidingWindow, __version__, plan
from kvblocks.arguments import shown
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.replay.attainable import attainable_hits
from kvblocks.replay.bound import max_hits, next_uses_in
from kvblocks.replay.prefixes import prefix_tree
from kvblocks.replay.result import Conditions, FixedOrder, Result, Row, Tokens
from kvblocks.replay.run import Outcome, Setup, make_manager, run
from kvblocks.replay.trace import Numbers, Trace, arrival_times, think_times

DEFAULT_MEAN_S = 60.0
_POLL_S = 0.1

MODELS: dict[str, tuple[int, list[KVLayer]]] = {
    # 34 layers with 4 KV heads of 256; for each with full attention, five with a window of 1,024 tokens
    "gemma3-4b": (1024, [KVLayer(0 if (layer + 1) % 6 == 0 else 1, 4, 256) for layer in range(34)]),
}
"""For each model name, the tokens in the window, and the kind of each layer: 0 (full attention) or 1 (window)."""
_BF16_BYTES = 2
_GIB = 2**30


def model_groups(name: str, block_size: int) -> tuple[Group, ...]:
    """Return a model's groups of layers, where one token stands for a block of `block_size` tokens.

    A hit ends at the end of a block, and the next token sees the window - 1 tokens before it. The window in blocks is
    the number of blocks that contain these tokens. Raises InvalidArgumentError.
    """
    if name not in MODELS:
        raise InvalidArgumentError(f"groups: expected one of {', '.join(MODELS)}, got {shown(name)}")
    window, layers = MODELS[name]
    num_seen = -(-(window - 1) // block_size)
    return plan((FullAttention(1), SlidingWindow(1, num_seen + 1)), layers, _BF16_BYTES, _GIB).groups


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What a sweep runs. sizes: numbers of blocks of the pool. mean_arrival_s: None for arrivals as recorded.

    host_blocks: the blocks of a tier below the device, or None. groups: a model of `MODELS`, or None. optima: whether
    to compute `Row.attainable` and `Row.fixed_order`. tells_ends: as in `run.Setup`.
    """

    policies: tuple[str, ...]
    sizes: tuple[int, ...]
    mean_arrival_s: float | None = None
    seed: int = 1
    is_closed: bool = False
    host_blocks: int | None = None
    groups: str | None = None
    optima: bool = True
    tells_ends: bool = False

    def setup(self, policy: str, num_blocks: int, block_size: int) -> Setup:
        """Return the settings of one run."""
        groups = None if self.groups is None else model_groups(self.groups, block_size)
        return Setup(policy, num_blocks, self.host_blocks, groups, self.is_closed, tells_ends=self.tells_ends)


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A part of a sweep: a run, or without a policy the attainable hits of a size (with and without waiting)."""

    policy: str | None
    num_blocks: int

    @property
    def title(self) -> str:
        """The text of a progress bar."""
        return f"{self.policy or 'known future'}, {self.num_blocks:,} blocks"


class ReplayJob(Protocol):
    """A part of a sweep that one process carries out. Jobs are compared by value."""

    @property
    def title(self) -> str:
        """The text of a progress bar."""


Progress = Callable[[list[tuple[Any, float]]], object]
"""Called from time to time with a `ReplayJob` and the share of it that is done, 0.0 to 1.0."""


class ReplaySource(Protocol):
    """The data that processes need for jobs. Each process makes its own, by the same class from the same values."""

    trace: Trace
    options: Any

    def __init__(self, trace: Trace, options: Any) -> None: ...

    def do(self, job: Any, progress: Callable[[float], object]) -> Any:
        """Carry out a job. progress: called with the share of it that is done."""


class Workload:
    """A trace with its times, and data that several jobs share."""

    def __init__(self, trace: Trace, options: SweepOptions) -> None:
        self.trace, self.options = trace, options
        self.arrivals = arrival_times(trace, options.mean_arrival_s, options.seed)
        self.thinks = think_times(trace)
        self._uses: dict[bytes, Numbers] = {}
        self._bounds: dict[tuple[bytes, int], int] = {}

    def bound(self, order: list[int], num_blocks: int) -> int:
        """Return `max_hits` for an order of requests. The result is cached, since most policies have the same order."""
        name = np.array(order, np.int64).tobytes()
        if (name, num_blocks) not in self._bounds:
            if name not in self._uses:
                self._uses = {name: next_uses_in(self.trace, order)}
            self._bounds[name, num_blocks] = max_hits(self._uses[name], num_blocks)
        return self._bounds[name, num_blocks]

    def do(self, job: SweepJob, progress: Callable[[float], object]) -> Row | tuple[int, int]:
        """Carry out a job."""
        if job.policy is None:
            return self._attainable(job.num_blocks, progress)
        setup = self.options.setup(job.policy, job.num_blocks, self.trace.block_size)
        share = 0.5 if self.options.optima else 0.9
        begin = time.perf_counter()
        outcome = run(self.trace, self.arrivals, self.thinks, setup, self._scaled(progress, 0.0, share))
        wall_s = time.perf_counter() - begin
        fixed = None
        if self.options.optima and setup.is_closed | (outcome.waits.count > 0) | (outcome.waits.refused > 0):
            fixed = self._fixed_order(setup, self._scaled(progress, share, 0.9))
        row = self._row(setup, outcome, fixed, wall_s)
        if self.options.optima and fixed is None:  # nobody waited, so this run was in the fixed order
            row = replace(row, fixed_order=FixedOrder(hit_rate=row.hit_rate, bound=row.bound, attainable=None))
        return row

    def _scaled(self, progress: Callable[[float], object], low: float, high: float) -> Callable[[int], object]:
        total = max(1, self.trace.num_requests)
        return lambda num_done: progress(low + (high - low) * num_done / total)

    def _attainable(self, num_blocks: int, progress: Callable[[float], object]) -> tuple[int, int]:
        thinks = self.thinks if self.options.is_closed else None
        waiting = attainable_hits(self.trace, self.arrivals, num_blocks, never_waits=False, thinks=thinks)
        progress(0.5)
        return waiting, attainable_hits(self.trace, self.arrivals, num_blocks, never_waits=True)

    def _fixed_order(self, setup: Setup, progress: Callable[[int], object]) -> FixedOrder:
        fixed = replace(setup, never_waits=True, is_closed=False)
        outcome = run(self.trace, self.arrivals, self.thinks, fixed, progress)
        total = max(1, len(self.trace.blocks))
        num_hits = int(outcome.hits.sum() + outcome.loaded.sum())
        bound = self.bound(outcome.order, setup.num_blocks + (setup.host_blocks or 0))
        return FixedOrder(hit_rate=num_hits / total, bound=bound / total, attainable=None)

    def _row(self, setup: Setup, outcome: Outcome, fixed: FixedOrder | None, wall_s: float) -> Row:
        trace = self.trace
        total = max(1, len(trace.blocks))
        num_device, num_loaded = int(outcome.hits.sum()), int(outcome.loaded.sum())
        num_tokens = int(trace.tokens.sum()) - int(trace.tokens[outcome.refused].sum())
        num_saved = (num_device + num_loaded) * trace.block_size
        return Row(
            policy=setup.policy,
            num_blocks=setup.num_blocks,
            share=setup.num_blocks / max(1, trace.num_unique_blocks),
            hit_rate=(num_device + num_loaded) / total,
            device_hit_rate=num_device / total,
            bound=self.bound(outcome.order, setup.num_blocks + (setup.host_blocks or 0)) / total,
            attainable=None,
            tokens=Tokens(num_tokens, num_tokens - num_saved, num_saved, num_loaded * trace.block_size),
            waits=outcome.waits,
            misses=outcome.misses,
            moments=outcome.moments,
            fixed_order=fixed,
            num_evicted=outcome.num_evicted,
            num_policy_failures=outcome.num_policy_failures,
            wall_s=wall_s,
        )


def sweep(
    trace: Trace, options: SweepOptions, num_processes: int | None = None, progress: Progress | None = None
) -> Result:
    """Replay a trace with all policies and sizes. num_processes: None: one per core.

    Raises InvalidArgumentError before anything runs. Ctrl-C ends all processes, and raises KeyboardInterrupt.
    """
    if not options.policies or not options.sizes:
        raise InvalidArgumentError(f"expected policies and sizes, got {options.policies} and {options.sizes}")
    for policy in options.policies:
        make_manager(options.setup(policy, options.sizes[0], trace.block_size))
    workload = Workload(trace, options)
    knows_optima = options.optima and options.groups is None and options.host_blocks is None
    policies: tuple[str | None, ...] = (*options.policies, None) if knows_optima else options.policies
    jobs = [SweepJob(policy, size) for size in options.sizes for policy in policies]
    found = do_all(workload, jobs, num_processes, progress)
    rows = [_with_optima(found[job], found.get(SweepJob(None, job.num_blocks)), trace) for job in jobs if job.policy]
    return Result(
        trace=trace.facts(workload.arrivals),
        conditions=Conditions(
            version=__version__,
            compiled=kvblocks.__compiled__,
            python=platform.python_version(),
            arrivals="recorded" if options.mean_arrival_s is None else "poisson",
            mean_arrival_s=options.mean_arrival_s,
            seed=options.seed,
            closed_loop=options.is_closed,
            groups=options.groups,
            host_blocks=options.host_blocks,
        ),
        rows=rows,
        prefixes=prefix_tree(trace),
    )


def _with_optima(row: Row | tuple[int, int], attainable: Row | tuple[int, int] | None, trace: Trace) -> Row:
    assert isinstance(row, Row), "a job with a policy makes a row"
    if not isinstance(attainable, tuple):
        return row
    total = max(1, len(trace.blocks))
    waiting, never_waiting = attainable
    fixed = row.fixed_order
    if fixed is not None:
        fixed = replace(fixed, attainable=never_waiting / total)
    return replace(row, attainable=max(waiting, never_waiting) / total, fixed_order=fixed)


def do_all(
    workload: ReplaySource, jobs: list[Any], num_processes: int | None, progress: Progress | None
) -> dict[Any, Any]:
    """Carry out each `ReplayJob`, in order, in this process if one is enough. Ctrl-C ends all processes.

    num_processes: the most processes at once, with one run in each; None: one for each core.
    """
    num_processes = num_processes or os.cpu_count() or 1
    progress = progress or (lambda _: None)
    if num_processes == 1 or len(jobs) == 1:
        done = dict.fromkeys(jobs, 0.0)
        found = {}
        for job in jobs:

            def note(share: float, job: ReplayJob = job, progress: Progress = progress) -> None:
                done[job] = share
                progress([*done.items()])

            found[job] = _carry_out(workload, job, note)
        return found
    context = multiprocessing.get_context("spawn")  # a fork could copy the caller's locks while they are held
    shares = context.Array("d", len(jobs), lock=False)
    given = type(workload), workload.trace, workload.options, shares
    waiting, results = deque(enumerate(jobs)), dict[int, Any]()
    with _workers(context, min(num_processes, len(jobs)), given) as idle:
        busy = list[Any]()
        while waiting or busy:
            while waiting and idle:
                busy.append(idle.pop())
                with _alive():
                    busy[-1].send(waiting.popleft())
            answered: list[Any] = wait(busy, _POLL_S)
            for worker in answered:
                with _alive():
                    number, found, error = worker.recv()
                if error is not None:
                    raise error
                results[number] = found
                busy.remove(worker)
                idle.append(worker)
            progress([*zip(jobs, shares, strict=True)])
    return {job: results[number] for number, job in enumerate(jobs)}


@contextmanager
def _alive() -> Iterator[None]:
    """Raises KVBlocksError if a process has ended that is sent something, or from which something is to come."""
    try:
        yield
    except (EOFError, OSError):
        message = "sweep: expected processes that run to the end, got one that was killed (no memory?)"
        raise KVBlocksError(message) from None


@contextmanager
def _workers(context: Any, number: int, given: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Connections to so many processes, which end when the block ends, in whatever way.

    They share no lock, which one of them that is killed could keep. They ignore Ctrl-C, which the parent handles.
    """
    resource_tracker.ensure_running()  # otherwise the first process starts the tracker, which unblocks the signal
    connections, processes = list[Any](), list[Any]()
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the processes inherit this
        try:
            for _ in range(number):
                ours, theirs = context.Pipe()
                connections.append(ours)
                process = context.Process(target=_work, args=(theirs, *given), daemon=True)
                with _alive():
                    process.start()
                processes.append(process)
                theirs.close()  # so that its end is heard here
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield [*connections]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


def _work(parent: Any, kind: type[ReplaySource], trace: Trace, options: Any, shares: Any) -> None:
    """Carry out jobs, as the main function of a process, until the parent closes the connection or has died."""
    workload = kind(trace, options)
    with suppress(EOFError, OSError):
        while True:
            number, job = parent.recv()

            def note(share: float, number: int = number) -> None:
                shares[number] = share

            found, error = None, None
            try:
                found = _carry_out(workload, job, note)
            except Exception as raised:  # noqa: BLE001  # the parent raises it
                error = raised
            parent.send((number, found, error))


def _carry_out(workload: ReplaySource, job: Any, note: Callable[[float], object]) -> Any:
    """Do a job without the garbage collector, which took a third of the time.

    A run makes millions of tuples, each of which the collector looks at, and hardly a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found = workload.do(job, note)
    finally:
        if was_enabled:
            gc.enable()
    note(1.0)
    return found
