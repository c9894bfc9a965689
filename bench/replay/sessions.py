"""The benefit of `eviction="sessions"`: hit rates of a trace with sessions, compared with other policies and optima.

    python -m bench.replay.sessions TRACE [--sessions 200:355] [--block-size 512] [--worlds ...] [--json FILE]

TRACE: what `kvblocks replay` reads. Each world is the trace on another clock:

    order 60    sessions begin 60 s apart on average (Poisson, seed 1). No request waits: one that doesn't fit is
                served outside the pool, so all policies get the same requests in one order.
    order 30, order 120     the same with sessions 30 s and 120 s apart
    waiting 60  a request that doesn't fit waits
    closed 60   the same, and a session's next request comes its think time after its last one ended
    recorded    as "order", but requests come when the trace says: for traces that say when a request came

"lru-drop" is LRU that drops what a session's next request no longer has. "known next" is a policy that knows when each
session's next request comes. It drops the same, and of the rest it evicts what comes back last. "known future" is the
best leaf-first schedule with holds, which `kvblocks replay` computes from the whole trace. Unlike a policy, it also
decides what is cached of a request that doesn't fit. gap: how far "sessions" gets from "lru-drop" to "known next", as a
share. Rows are written to FILE as they come.

What it doesn't show: what a policy costs (`bench.core.policy_cost`), and other traffic than the trace's.
"""

import argparse
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from math import inf
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from kvblocks import CacheView, FreeBlock, KVCacheManager
from kvblocks.replay.attainable import attainable_hits
from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import Setup, run
from kvblocks.replay.trace import Trace, arrival_times, think_times

# By name: mean seconds between sessions (None: as recorded); whether a request that doesn't fit waits; whether the next
# request of a session comes its think time after the last one ended.
WORLDS: dict[str, tuple[float | None, bool, bool]] = {
    "order 60": (60.0, False, False),
    "order 30": (30.0, False, False),
    "order 120": (120.0, False, False),
    "waiting 60": (60.0, True, False),
    "closed 60": (60.0, True, True),
    "recorded": (None, False, False),
}
POLICIES = ("lru", "lru-drop", "sessions", "slru", "s3fifo")
SIZES = "0.5%,1%,2%,3%,5%,10%,20%"
NEXT, KNOWN = "known next", "known future"
EVERY = (*POLICIES, NEXT, KNOWN)


class KnownNext:
    """Evicts what a session's next request lacks, then what comes back last.

    times: when each session's requests come.
    """

    def __init__(self, cache: CacheView, times: dict[Hashable, list[float]]) -> None:
        self.cache, self.times = cache, times
        self.unwanted: OrderedDict[int, None] = OrderedDict()
        # The free blocks of each session, in the order in which they go.
        self.sessions: dict[Hashable, OrderedDict[int, None]] = {}
        self.owner: dict[int, Hashable] = {}
        self.starting: Hashable = None
        self.chosen: tuple[float, Hashable] = (-inf, None)

    def begin(self, session: Hashable, tenant: str | None) -> None:  # noqa: ARG002
        """Note that blocks which this request doesn't use can be evicted."""
        self.settle()
        self.starting = session

    def settle(self) -> None:
        """Give up the blocks that the latest request didn't use."""
        session, self.starting = self.starting, None
        self.unwanted.update(self.sessions.pop(session, {}))

    def free(self, blocks: list[FreeBlock]) -> None:
        """Add them to their session's free blocks."""
        self.settle()
        for block in blocks:
            self.owner[block.block_id] = block.session
            self.sessions.setdefault(block.session, OrderedDict())[block.block_id] = None
        self.chosen = (-inf, None)

    def use(self, block_ids: list[int]) -> None:
        """Take them out."""
        for block_id in block_ids:
            self.unwanted.pop(block_id, None)
            own = self.sessions.get(self.owner.pop(block_id, None))
            if own is not None:
                own.pop(block_id, None)

    remove = use

    def victim(self, num_blocks: int) -> int | None:  # noqa: ARG002
        """Name a block of the session that comes back last."""
        self.settle()
        if self.unwanted:
            return next(iter(self.unwanted))
        now = self.cache.now
        if self.chosen[0] != now or not self.sessions.get(self.chosen[1]):
            found = [(self.next_time(session, now), session) for session, own in self.sessions.items() if own]
            self.chosen = (now, max(found, key=lambda each: each[0])[1] if found else None)
        return next(iter(self.sessions.get(self.chosen[1], ())), None)

    def next_time(self, session: Hashable, now: float) -> float:
        """Return when its next request comes; never: inf."""
        times = self.times[session]
        place = bisect_right(times, now)
        return times[place] if place < len(times) else inf


def hit_rate(trace: Trace, world: str, policy: str, num_blocks: int) -> float:
    """Return the share of references that hit. policy: one of POLICIES, NEXT (in one order only) or KNOWN."""
    mean_s, waits, is_closed = WORLDS[world]
    arrivals, thinks = arrival_times(trace, mean_s, 1), think_times(trace)
    if policy == KNOWN:
        known = thinks if is_closed else None
        return attainable_hits(trace, arrivals, num_blocks, never_waits=not waits, thinks=known) / len(trace.blocks)
    manager = None
    if policy == NEXT:
        times: dict[Hashable, list[float]] = {}
        for session, time in sorted(zip(trace.sessions.tolist(), arrivals.tolist(), strict=True)):
            times.setdefault(session, []).append(time)
        manager = KVCacheManager(num_blocks, 1, eviction=lambda cache: KnownNext(cache, times))
    setup = Setup("lru" if policy == NEXT else policy, num_blocks, is_closed=is_closed, never_waits=not waits)
    outcome = run(trace, arrivals, thinks, setup, manager=manager)
    assert outcome.num_policy_failures == 0, f"{policy} failed {outcome.num_policy_failures} times"
    return float(outcome.hits.sum()) / len(trace.blocks)


def gap_of(rates: dict[str, float]) -> float | None:
    """Return how far "sessions" gets from "lru-drop" to "known next", as a share; None if unknown."""
    if not {"lru-drop", "sessions", NEXT} <= rates.keys() or rates[NEXT] <= rates["lru-drop"]:
        return None
    return (rates["sessions"] - rates["lru-drop"]) / (rates[NEXT] - rates["lru-drop"])


def measure(
    trace: Trace,
    worlds: Iterable[str],
    sizes: list[tuple[str, int]],
    policies: Iterable[str],
    path: Path | None,
    sessions: str = "all",
) -> list[dict[str, Any]]:
    """Return a row for each world and size, with the hit rates by policy.

    sizes: each as it was asked for, and in blocks. sessions: which of the file's sessions the trace has.
    """
    rows: list[dict[str, Any]] = []
    facts = conditions(
        trace=trace.name,
        sessions_of_the_trace=sessions,
        num_sessions=len(set(trace.sessions.tolist())),
        num_requests=trace.num_requests,
        num_references=len(trace.blocks),
        num_blocks=trace.num_unique_blocks,
        block_size=trace.block_size,
    )
    del facts["collector"]  # nothing is timed
    print_conditions(facts)
    for world in worlds:
        print(f"\n{world}\n{'':10s}" + "".join(f"{policy:>13s}" for policy in (*policies, "gap")))
        known = [policy for policy in policies if policy != NEXT or not WORLDS[world][1]]
        for size, num_blocks in sizes:
            rates = {policy: hit_rate(trace, world, policy, num_blocks) for policy in known}
            gap = gap_of(rates)
            rows.append({"world": world, "size": size, "num_blocks": num_blocks, "hit_rates": rates, "gap": gap})
            cells = [f"{rates[policy]:13.4f}" if policy in rates else f"{'':13s}" for policy in policies]
            cells.append(f"{'' if gap is None else f'{gap:.0%}':>13s}")
            print(f"{size:10s}" + "".join(cells), flush=True)
            keep(path, facts, rows)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.replay.sessions", description="Hit rates of retention by sessions.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", help="FROM:TO: only these, counted from 0")
    parser.add_argument("--block-size", type=int, help="tokens in a block: a multiple of the trace's")
    parser.add_argument("--sizes", default=SIZES, help="blocks, or a share of the trace's unique ones; with commas")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=["order 60"])
    parser.add_argument("--policies", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args(arguments)
    trace = read_trace(given.trace, given.block_size).with_durations(0.0)
    if given.sessions is not None:
        first, last = given.sessions.split(":")
        trace = trace.take_sessions(int(first), int(last))
    total = trace.num_unique_blocks
    sizes = [
        (text, max(1, int(total * float(text[:-1]) / 100)) if text.endswith("%") else int(text))
        for text in given.sizes.split(",")
    ]
    measure(trace, given.worlds, sizes, given.policies, given.json, given.sessions or "all")


if __name__ == "__main__":
    main()
