"""The benefit of a host tier: hit rates of a trace by the sizes of the device's pool and of the host's memory.

    python -m bench.replay.host_sizes TRACE [--sessions FROM:TO] [--block-size N] [--device 1% 2% …] [--host 0 5% …]
        [--policy lru] [--arrivals recorded|SECONDS] [--json FILE] [--picture FILE.png]

The trace is replayed as `kvblocks replay --host-size` does it, one run for each pair of sizes. Sizes are blocks, or
shares of the trace's unique blocks; 0 means no tier. The bench prints which share of the prompts' blocks was found on
the device, and which on the device or the host. The picture needs matplotlib (the extra `bench`).

What it does not show: time. A load takes none here, and every load is taken.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.conditions import conditions, keep, print_conditions
from kvblocks.replay.options import parse_arrivals, parse_range, parse_size
from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import Setup, run
from kvblocks.replay.trace import Trace, arrival_times, think_times


@dataclass(frozen=True)
class Outcome:
    """The results for a pair of sizes. Shares are of the trace's unique blocks, rates of all prompts' blocks."""

    num_blocks: int
    share: float
    host_blocks: int
    host_share: float
    device_hit_rate: float
    hit_rate: float
    mean_wait_s: float
    num_refused: int


def measure(trace: Trace, sizes: tuple[int, int], policy: str, mean_s: float | None) -> Outcome:
    """Replay a trace with these sizes of the device and the host."""
    device, host = sizes
    setup = Setup(policy, device, host or None)
    outcome = run(trace, arrival_times(trace, mean_s, 1), think_times(trace), setup)
    total, unique = len(trace.blocks), trace.num_unique_blocks
    num_hits, num_loaded = int(outcome.hits.sum()), int(outcome.loaded.sum())
    rates = num_hits / total, (num_hits + num_loaded) / total
    return Outcome(device, device / unique, host, host / unique, *rates, outcome.waits.mean_s, len(outcome.refused))


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Draw the hit rate over the host's size, a line for each size of the device's pool."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for share in sorted({outcome.share for outcome in outcomes}):
        line = sorted((one.host_share, one.hit_rate) for one in outcomes if one.share == share)
        axes.plot(*zip(*line, strict=True), marker="o", label=f"{share:.1%}")
    axes.set_xlabel("host memory, share of the trace's unique blocks")
    axes.set_ylabel("blocks of prompts found, device or host")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(title="device's pool")
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    """Measure, print, keep and draw."""
    parser = argparse.ArgumentParser(
        prog="bench.replay.host_sizes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--device", nargs="+", default=["1%", "2%", "5%", "10%"])
    parser.add_argument("--host", nargs="+", default=["0", "2%", "5%", "10%", "20%", "40%"])
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--arrivals")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    trace = read_trace(given.trace, given.block_size)
    if given.sessions is not None:
        trace = trace.take_sessions(*parse_range(given.sessions))
    mean_s, unique = parse_arrivals(given.arrivals, trace), trace.num_unique_blocks
    facts = conditions(
        trace=trace.name,
        sessions=given.sessions,
        policy=given.policy,
        mean_arrival_s=mean_s,
        num_requests=trace.num_requests,
        num_unique_blocks=unique,
        block_size=trace.block_size,
    )
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "collector", "load_average")}
    print_conditions(facts)
    print(f"\n{'device':>9}{'host':>9}{'on device':>11}{'found':>9}{'mean wait s':>13}{'refused':>9}")
    outcomes = []
    for device in given.device:
        for host in given.host:
            sizes = parse_size("--device", device, unique), 0 if host == "0" else parse_size("--host", host, unique)
            one = measure(trace, sizes, given.policy, mean_s)
            outcomes.append(one)
            print(
                f"{one.num_blocks:9,}{one.host_blocks:9,}{one.device_hit_rate:11.3f}{one.hit_rate:9.3f}"
                f"{one.mean_wait_s:13.1f}{one.num_refused:9,}",
                flush=True,
            )
    keep(given.json, facts, [vars(one) for one in outcomes])
    if given.picture is not None:
        draw(outcomes, given.picture)


if __name__ == "__main__":
    main()
