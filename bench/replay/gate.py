"""The benefit of a session gate: sessions' delays on modelled servers, beside no gate, caps, and an infinite cache.

    python -m bench.replay.gate TRACE [--kind sessions|mooncake] [--pool 1000000] [--host 0] [--servers 8B 70B]
        [--gaps agents recorded] [--loads 1 0.5] [--seeds 1 2 3] [--caps 6 8 ...] [--made-up SEED] [--json FILE]

Each run is a `ServedRun`: the production manager (or arrays that decide the same) and the production gate, on modelled
time. A setting is a server and
a kind of gaps:

    8B, 70B     20,000 and 3,000 prompt tokens a second; steps of 8 ms and 25 ms, and 44 ns and 25 ns for each token of
                context that a decoding request reads; 152,000 and 61,000 tokens a second from the host tier
    agents      pauses as recorded, of at most 60 s, and of 2 s where a human thinks: after any reason but tool_use
    recorded    pauses as recorded

Load 1 is the number of sessions an hour that the server with this pool and without a gate completes at most in a closed
loop: always the same number of users, who begin their next session 5 s after the last one. The bench looks for the best
number of users. Sessions are shuffled, and begin at random (Poisson), by the seed. "tuned cap" is the cap with the
least mean delay: of all caps at the first seed, then of the best one and those beside it.

With `--made-up` the sessions are drawn at random from the trace's distributions: a check on sessions that nothing was
tuned for. With `--kind mooncake` a request that continues another's prompt is of its session, and sessions begin when
the trace says, `--speed` times as fast.

What it doesn't show: a real engine's time, prompts whose computing grows with their length, or users who give up.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.conditions import conditions, keep, print_conditions
from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import num_common
from kvblocks.replay.served.entrances import GATE, INFINITE, NONE
from kvblocks.replay.served.run import Served, ServedRun, ServerModel
from kvblocks.replay.trace import Numbers, Trace, ends_of, number_densely, think_times

BLOCK_SIZE = 512
SERVERS = {
    "8B": ServerModel(prefill_rate=20_000, decode_step_s=0.008, read_s=4.4e-8, load_rate=152_000),
    "70B": ServerModel(prefill_rate=3_000, decode_step_s=0.025, read_s=2.5e-8, load_rate=61_000),
}
GAPS = {"agents": (60.0, 2.0), "recorded": (np.inf, np.inf)}
"""By name: the longest pause, and the longest pause after any reason but a tool call."""
USERS = {"agents": (4, 6, 8, 12, 16, 24), "recorded": (12, 16, 24, 32, 48, 64, 96)}
CAPS = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)
_UNKNOWN_S = 10.0  # a call whose time the trace doesn't have
_LEAST_S = 0.5  # a pause, where the trace has only times
_STAGGER_S, _BETWEEN_S = 20.0, 5.0


class ClosedRun(ServedRun):
    """A run with a fixed number of users. Each begins another session a little after the last one has ended."""

    def __init__(self, num_users: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        firsts = [request for _, request in sorted(self.arrivals)]
        self.arrivals = [(_STAGGER_S * user, request) for user, request in enumerate(firsts[:num_users])]
        self.to_come = firsts[num_users:]
        self.ends: list[float] = []

    def end(self, request: int) -> None:
        """End a request, and begin another session if it was the last of one."""
        super().end(request)
        if request not in self.followers:
            self.ends.append(self.now)
            if self.to_come:
                self.arrivals.append((self.now + _BETWEEN_S, self.to_come.pop(0)))
                self.arrivals.sort()

    def sessions_per_hour(self) -> float:
        """Return how many sessions ended an hour, between the first tenth and the last fifth of them."""
        first, last = len(self.ends) // 10, len(self.ends) * 4 // 5
        return (last - first) / (self.ends[last] - self.ends[first]) * 3600


def pauses(trace: Trace, gaps: str) -> Numbers:
    """Return the pause before each request, in seconds, with the limits of a kind of gaps."""
    known = np.isnan(trace.thinks)
    filled = replace(trace, durations=np.where(np.isnan(trace.durations), _UNKNOWN_S, trace.durations))
    found = think_times(filled)
    found = np.where(known, np.maximum(found, _LEAST_S), found)
    most, most_human = GAPS[gaps]
    last: dict[int, int] = {}
    for request, session in enumerate(trace.sessions.tolist()):
        is_tool = session in last and trace.stops[last[session]] == "tool_use"
        found[request] = min(found[request], most if is_tool else min(most, most_human))
        last[session] = request
    return found


def beginnings(trace: Trace, per_hour: float, seed: int) -> Numbers:
    """Return when each request's session begins: shuffled, and at random so many an hour."""
    random = Random(seed)
    numbers = list(range(len(trace.session_names)))
    random.shuffle(numbers)
    starts, now = np.zeros(len(numbers)), 0.0
    for number in numbers:
        now += random.expovariate(per_hour / 3600)
        starts[number] = now
    found: Numbers = starts[trace.sessions]
    return found


def chain(trace: Trace) -> Trace:
    """Add sessions to a trace without any: a request continues the last one whose blocks begin its own."""
    ends: dict[tuple[int, int], int] = {}
    sessions = np.zeros(trace.num_requests, np.int64)
    num_sessions = 0
    for request in range(trace.num_requests):
        blocks = trace.blocks_of(request)[: int(trace.tokens[request]) // trace.block_size].tolist()
        lengths = range(len(blocks), 1, -1)
        found = next((ends.pop((n, blocks[n - 1])) for n in lengths if (n, blocks[n - 1]) in ends), None)
        if found is None:
            found, num_sessions = num_sessions, num_sessions + 1
        sessions[request] = found
        if len(blocks) > 1:
            ends[len(blocks), blocks[-1]] = found
    names: list[str | None] = [str(number) for number in range(num_sessions)]
    durations = trace.outputs * 0.02
    return replace(
        trace,
        sessions=sessions,
        session_names=names,
        tenants=[None] * num_sessions,
        durations=durations,
        thinks=trace.thinks,
    )


def made_up(trace: Trace, seed: int) -> Trace:
    """Return equally many synthetic sessions of the same distributions, to check on a trace that nothing was tuned for.

    Drawn independently from the trace: how many requests a session has; its first request; and for each further one, a
    request of the trace that isn't a first one: which share of the prompt before it begins its own, how many blocks and
    tokens it adds, its answer, its pause, its duration and its stop reason. No two sessions have a block in common.
    """
    random = Random(seed)
    lengths = np.diff(trace.ends).tolist()
    by_session: dict[int, list[int]] = {}
    for request, session in enumerate(trace.sessions.tolist()):
        by_session.setdefault(session, []).append(request)
    firsts = [requests[0] for requests in by_session.values()]
    steps = [pair for requests in by_session.values() for pair in pairwise(requests)]
    shared = {after: num_common(trace.blocks_of(before), trace.blocks_of(after)) for before, after in steps}
    most = max(lengths)
    prompts: list[Numbers] = []
    sources: list[int] = []
    sessions: list[int] = []
    num_blocks = 0
    for session in range(len(by_session)):
        path = np.empty(0, np.int64)
        for turn in range(len(by_session[random.choice([*by_session])])):
            before, source = random.choice(steps) if turn else (-1, random.choice(firsts))
            kept = len(path) * shared[source] // max(1, lengths[before]) if turn else 0
            number = max(0, min(lengths[source] - shared.get(source, 0), most - kept))
            path = np.concatenate([path[:kept], np.arange(num_blocks, num_blocks + number)])
            num_blocks += number
            prompts.append(path)
            sources.append(source)
            sessions.append(session)
    sizes = np.array([len(prompt) for prompt in prompts])
    rest = (trace.tokens - np.diff(trace.ends) * trace.block_size)[sources]  # of the prompt's last, partial block
    thinks, durations = trace.thinks[sources], np.nan_to_num(trace.durations[sources], nan=_UNKNOWN_S)
    return replace(
        trace,
        name=f"made up of {trace.name}, seed {seed}",
        blocks=number_densely(np.concatenate(prompts)),
        ends=ends_of(sizes),
        sessions=np.array(sessions),
        times=np.arange(len(sources), dtype=np.float64),
        durations=durations,
        thinks=np.where(np.isnan(thinks), think_times(trace)[sources], thinks),
        tokens=np.maximum(1, sizes * trace.block_size + rest),
        outputs=trace.outputs[sources],
        stops=[trace.stops[source] for source in sources],
        session_names=[str(session) for session in range(len(by_session))],
        tenants=[None] * len(by_session),
    )


class Bench:
    """All runs of one server and one kind of gaps."""

    def __init__(self, trace: Trace, server: str, gaps: str, pool: int, host: int) -> None:
        self.trace, self.server, self.gaps = trace, server, gaps
        self.num_blocks, self.host_blocks = pool // trace.block_size, host // trace.block_size or None
        self.thinks = pauses(trace, gaps)

    def run(self, starts: Numbers, entrance: str) -> Served:
        """Return the results of a run."""
        model = SERVERS[self.server]
        return ServedRun(self.trace, (starts, self.thinks), self.num_blocks, entrance, model, self.host_blocks).run()

    def capacity(self) -> tuple[float, int]:
        """Return the most sessions an hour in a closed loop without a gate, and with how many users."""
        found = []
        for users in USERS[self.gaps]:
            starts = beginnings(self.trace, 1.0, 1)
            model = SERVERS[self.server]
            times = starts, self.thinks
            run = ClosedRun(users, self.trace, times, self.num_blocks, NONE, model, self.host_blocks)
            run.run()
            found.append((run.sessions_per_hour(), users))
            if found[-1][0] < 0.6 * max(found)[0]:
                break
        return max(found)


def compare(
    bench: Bench, starts: Callable[[int], Numbers], seeds: list[int], caps: list[int], note: Callable[..., None]
) -> None:
    """Run every entrance at every seed. note: called with seed, entrance's name, cap and result."""
    best: int | None = None
    for seed in seeds:
        at = starts(seed)
        for entrance in (NONE, GATE, INFINITE):
            note(seed, entrance, None, bench.run(at, entrance))
        near = caps
        if best is not None:
            place = caps.index(best)
            near = caps[max(0, place - 1) : place + 2]
        found: list[tuple[float, int, Served]] = []
        for cap in near:
            served = bench.run(at, f"cap {cap}")
            found.append((served.delay_mean_s, cap, served))
            if served.delay_mean_s > 2.5 * min(found)[0]:
                break
        if found:
            _, best, served = min(found)
            note(seed, "tuned cap", best, served)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.replay.gate", description="Delays with and without a session gate.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--kind", choices=("sessions", "mooncake"), default="sessions")
    parser.add_argument("--sessions", help="FROM:TO: only these, counted from 0")
    parser.add_argument(
        "--made-up", type=int, help="a seed: replay made-up sessions of the trace's distributions instead"
    )
    parser.add_argument("--pool", type=int, default=1_000_000, help="tokens of the pool")
    parser.add_argument("--host", type=int, default=0, help="tokens of a host tier")
    parser.add_argument("--speed", type=float, default=1.0, help="speed-up of Mooncake's clock")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[*SERVERS])
    parser.add_argument("--gaps", nargs="+", choices=GAPS, default=[*GAPS])
    parser.add_argument("--loads", nargs="+", type=float, default=[1.0, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--caps", nargs="*", type=int, default=[*CAPS])
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args(arguments)
    trace = read_trace(given.trace, BLOCK_SIZE)
    if given.sessions is not None:
        first, last = given.sessions.split(":")
        trace = trace.take_sessions(int(first), int(last))
    if given.kind == "mooncake":
        trace = chain(trace)
    if given.made_up is not None:
        trace = made_up(trace, given.made_up)
    facts = conditions(
        trace=trace.name,
        num_sessions=len(trace.session_names),
        num_requests=trace.num_requests,
        num_references=len(trace.blocks),
        num_blocks=ceil(given.pool / BLOCK_SIZE),
        host_tokens=given.host,
        block_size=BLOCK_SIZE,
        speed=given.speed,
        servers={name: asdict(SERVERS[name]) for name in given.servers},
    )
    for name in ("collector", "load_average", "cpu", "num_cpus"):  # nothing is timed
        del facts[name]
    print_conditions(facts)
    rows: list[dict[str, Any]] = []
    for server in given.servers:
        for gaps in given.gaps:
            bench = Bench(trace, server, gaps, given.pool, given.host)
            per_hour, users = (0.0, 0) if given.kind == "mooncake" else bench.capacity()
            print(f"\n{server}, {gaps}: {per_hour:.1f} sessions an hour with {users} users", flush=True)
            for load in given.loads:
                _measure(bench, load, per_hour, given, rows, facts)


def _measure(
    bench: Bench, load: float, per_hour: float, given: argparse.Namespace, rows: list[Any], facts: dict[str, object]
) -> None:
    def starts(seed: int) -> Numbers:
        if given.kind == "mooncake":
            times: Numbers = bench.trace.times / given.speed / load
            return times
        return beginnings(bench.trace, per_hour * load, seed)

    def note(seed: int, entrance: str, cap: int | None, served: Served) -> None:
        row = {"server": bench.server, "gaps": bench.gaps, "sessions_per_hour": per_hour * load, "seed": seed}
        rows.append({**row, **served.to_row(), "load": load, "entrance": entrance, "cap": cap})
        print(
            f"load {load:4} seed {seed} {entrance + (f' {cap}' if cap else ''):12s}"
            f" delay mean {served.delay_mean_s:8,.0f} p50 {served.delay_p50_s:8,.0f} p99 {served.delay_p99_s:9,.0f} s"
            f"  ttft p50 {served.ttft_p50_s:8.2f}"
            f" p99 {served.ttft_p99_s:9.1f} s  computed {served.computed_share:.3f}"
            f" again {served.recomputed_share:.3f}  longest wait {served.longest_wait_s:8,.0f} s",
            flush=True,
        )
        keep(given.json, facts, rows)

    compare(bench, starts, given.seeds, given.caps if load == max(given.loads) else [], note)


if __name__ == "__main__":
    main()
