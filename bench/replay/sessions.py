"""What `eviction="sessions"` is worth: hit rates of a trace with sessions, beside other policies and the known future.

    python -m bench.replay.sessions TRACE [--sessions 200:355] [--block-size 512] [--worlds ...] [--json FILE]

TRACE: what `kvblocks replay` reads. Each world is the trace on another clock:

    order 60    sessions begin 60 s apart on average (Poisson, seed 1); nobody waits: one that doesn't fit is served
                outside the pool, so that all policies meet the same requests in one order
    order 30, order 120     the same, of other arrival rates
    waiting 60  what doesn't fit waits
    closed 60   and a session's next request comes its think time after the last one ended
    recorded    as the trace says, in one order: for traces that say when a request came

"lru-drop" is LRU that drops what a session's next request no longer has; "known future" the best leaf-first schedule
with holds that `kvblocks replay` computes with the future known. gap: the share of the way between those two that
"sessions" goes. Rows are written to FILE as they come.

What it doesn't show: what a policy costs (`bench.core.policy_cost`), and other traffic than the trace's.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from kvblocks.replay.attainable import attainable_hits
from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import Setup, run
from kvblocks.replay.trace import Trace, arrival_times, think_times

# By name: the mean time between sessions (None: as recorded), whether what doesn't fit waits, and whether the loop is
# closed.
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
KNOWN = "known future"


def hit_rate(trace: Trace, world: str, policy: str, num_blocks: int) -> float:
    """Return which share of the references hits. policy: one of POLICIES, or KNOWN."""
    mean_s, waits, is_closed = WORLDS[world]
    arrivals, thinks = arrival_times(trace, mean_s, 1), think_times(trace)
    if policy == KNOWN:
        known = thinks if is_closed else None
        return attainable_hits(trace, arrivals, num_blocks, never_waits=not waits, thinks=known) / len(trace.blocks)
    setup = Setup(policy, num_blocks, is_closed=is_closed, never_waits=not waits)
    return float(run(trace, arrivals, thinks, setup).hits.sum()) / len(trace.blocks)


def gap_of(rates: dict[str, float]) -> float | None:
    """Return which share of the way from "lru-drop" to the known future "sessions" goes; None: it isn't known."""
    if not {"lru-drop", "sessions", KNOWN} <= rates.keys() or rates[KNOWN] <= rates["lru-drop"]:
        return None
    return (rates["sessions"] - rates["lru-drop"]) / (rates[KNOWN] - rates["lru-drop"])


def measure(
    trace: Trace,
    worlds: Iterable[str],
    sizes: list[tuple[str, int]],
    policies: Iterable[str],
    path: Path | None,
    sessions: str = "all",
) -> list[dict[str, Any]]:
    """Return a row for each world and size, with the hit rates by policy.

    sizes: as asked for, and in blocks. sessions: which ones of the file the trace has.
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
        for size, num_blocks in sizes:
            rates = {policy: hit_rate(trace, world, policy, num_blocks) for policy in policies}
            gap = gap_of(rates)
            rows.append({"world": world, "size": size, "num_blocks": num_blocks, "hit_rates": rates, "gap": gap})
            cells = [f"{rate:13.4f}" for rate in rates.values()] + [f"{'' if gap is None else f'{gap:.0%}':>13s}"]
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
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, KNOWN), default=[*POLICIES, KNOWN])
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
