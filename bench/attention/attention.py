"""Attention kernels on a GPU, beside peers on identical pages: `python -m bench.attention [--json FILE]`.

Each workload is checked against an exact result before it is timed, and a contestant that fails the check is not timed.
The bench times replays of a CUDA graph of many calls. The calls rotate over pools that together have at least 4 times
the size of the L2 cache. Times are the median, minimum and maximum of 9 replays. Bandwidth is the bytes that the
workload must move, divided by the time. It is also given as a share of the bandwidth that a copy reaches in the same
run. `cascade_decode` must move shared pages once, the others once per request.

`--rehearse` needs no GPU: every workload, shrunk, runs once in Triton's interpreter and is checked; nothing is timed.

Not shown: a model around the kernels, more than one GPU, and clocks that drop in long runs.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.attention.kernel_keys import fix_keys
from bench.conditions import cpu_model, gpu_state, keep, source

if TYPE_CHECKING:
    from bench.attention.cases import Batch, Workload

NO_GPU = """bench.attention: expected a GPU that torch can use, got none.
`--rehearse` runs every workload once on the CPU, small, in Triton's interpreter, to check that all of it works."""
Row = dict[str, Any]
Attempt = tuple[str, Any, bool]
"""A contestant's name, its calls (one for each pool), and whether it reads shared pages once."""


def conditions(device: torch.device) -> dict[str, object]:
    """Return the conditions of the measurement."""
    import triton

    import kvblocks

    facts: dict[str, object] = {
        "kvblocks": kvblocks.__version__,
        "source": source(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu": cpu_model(),
    }
    if device.type == "cuda":
        from bench.attention import timing as attention_timing

        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "driver, clocks and power": gpu_state(),
            "sms": properties.multi_processor_count,
            "l2_bytes": attention_timing.l2_bytes(device),
            "cuda": torch.version.cuda,
            "samples": attention_timing.NUM_SAMPLES,
            "copy_bytes_per_second": round(attention_timing.copy_bandwidth(device)),
        }
    return facts


def contestants(batches: "Sequence[Batch]", *, has_peers: bool) -> Iterator[Attempt]:
    """Yield a workload's contestants: ours, then the peers that work here. Prints why a peer is left out."""
    from bench.attention import cases as attention_cases
    from bench.attention import peers as attention_peers

    workload = batches[0].workload
    for name, way, reads_once in attention_cases.our_contestants(workload):
        yield name, [lambda way=way, batch=batch: way(batch) for batch in batches], reads_once
    for name, plan in attention_peers.peers(workload) if has_peers else ():
        try:
            calls = [plan(batch) for batch in batches]
            calls[0]()
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and is left out then
            reason = (str(error).splitlines() or [""])[0]
            print(f"# peer {name}: left out ({type(error).__name__}: {reason[:120]})", file=sys.stderr, flush=True)
            continue
        yield name, calls, name.endswith("cascade")


def run_workload(
    workload: "Workload", device: torch.device, facts: dict[str, object], *, has_peers: bool = True
) -> Iterator[Row]:
    """Check and, on a GPU, time all contestants."""
    from bench.attention import cases as attention_cases
    from bench.attention import timing as attention_timing

    is_timed = device.type == "cuda"
    cache_bytes = workload.cache_bytes(shared_once=True)
    num_copies = attention_timing.count_copies(cache_bytes, device) if is_timed else 1
    batches = [attention_cases.build(workload, device, seed) for seed in range(num_copies)]
    checker = attention_cases.Checker(batches[0])
    for name, calls, reads_once in contestants(batches, has_peers=has_peers):
        error = checker.error(calls[0]())
        row: Row = {"workload": workload.name, "contestant": name, "error": error, "pools": num_copies}
        row["is_right"] = error <= attention_cases.LARGEST_ERROR
        if is_timed and row["is_right"]:
            timing = attention_timing.time_calls(calls)
            moved = workload.moved_bytes(shared_once=reads_once)
            per_second = moved / (timing.median * 1e-6)
            row |= {"median_us": timing.median, "min_us": timing.low, "max_us": timing.high, "graph": timing.is_graph}
            row |= {"bytes": moved, "bytes_per_second": per_second}
            row["share_of_copy"] = per_second / float(str(facts["copy_bytes_per_second"]))
            row["flops_per_second"] = workload.num_flops() / (timing.median * 1e-6)
        yield row


def show(row: Row, first: float | None) -> str:
    """Return one line; `first` is the time of the workload's first contestant."""
    line = f"  {row['contestant']:<42}error {row['error']:.1e}"
    if "median_us" not in row:
        return line + ("" if row["is_right"] else "  WRONG, not timed")
    ratio = f"x{row['median_us'] / first:.2f}" if first else ""
    spread = f"[{row['min_us']:.1f}, {row['max_us']:.1f}]"
    speed = f"{row['bytes_per_second'] / 1e12:6.2f} TB/s {row['share_of_copy']:6.1%} of copy"
    flops = f"{row['flops_per_second'] / 1e12:6.0f} TFLOP/s"
    return f"{line} {row['median_us']:10.1f} us {spread:<20}{ratio:>7} {speed} {flops}" + (
        "" if row["graph"] else "  (not in a graph)"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit status: 2 without a GPU, 1 if a result of ours is wrong."""
    parser = argparse.ArgumentParser(prog="bench.attention", description="Times the attention kernels on a GPU.")
    parser.add_argument("--json", type=Path, help="also write conditions and results to this file")
    parser.add_argument("--rehearse", action="store_true", help="run everything once, with small shapes, without a GPU")
    parser.add_argument("--only", default="", help="only workloads whose name contains this")
    parser.add_argument("--no-peers", action="store_true", help="our kernels alone, which takes less than a minute")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if given.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    fix_keys()
    from bench.attention import cases as attention_cases

    device = torch.device("cpu" if given.rehearse else "cuda")
    facts = conditions(device)
    for name, value in facts.items():
        print(f"# {name}: {value}", flush=True)
    results: list[Row] = []
    for workload in attention_cases.workloads():
        if given.only in workload.name:
            print(workload.name + (", shrunk" if given.rehearse else ""), flush=True)
            shape = attention_cases.shrink(workload) if given.rehearse else workload
            first = None
            for row in run_workload(shape, device, facts, has_peers=not given.no_peers):
                print(show(row, first), flush=True)
                first = first or row.get("median_us")
                results.append(row)
                keep(given.json, facts, results)  # whatever comes later, this is kept
    wrong = [row for row in results if not row["is_right"] and row["contestant"].startswith("kvblocks")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
