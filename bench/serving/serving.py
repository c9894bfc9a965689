"""The benefit of prefix caching for a server's clients: the same requests to a server without it and to one with it.

    python -m bench.serving                          # on a GPU, if torch finds one
    python -m bench.serving --model llama-3.2-1b     # random weights in that model's shape

Starts `kvblocks serve` twice, and drives both over HTTP with streaming clients, one after the other. Both are
deterministic, so their greedy answers must be the same, token for token. A CPU can't answer 8 requests per second, with
or without caching. So requests arrive `--cpu-scale` times less often there, at a rate that is printed, except those of
"full rate". A request that finds its prompt cached begins to decode sooner, so with caching more requests decode at
once, and each waits longer for its next token: "requests decoding at once" says how many. `--clients 1` sends one after
another, so that this number is 1 in both. On a GPU all arrive at the full rate, and there are more of them. In the last
runs nothing can be shared, and caching must cost nothing (`bench.serving.overhead`).
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bench.conditions import UNJUDGED, conditions, gpu_state, keep, print_conditions
from bench.random_model import SHAPES, open_model
from bench.serving.client import Outcome, drive
from bench.serving.overhead import CPU_CASES, GPU_CASES, NUM_ROUNDS, QUICK_CASES, Case, measure_overhead, spread_line
from bench.serving.process import served
from bench.serving.rows import COST_ROWS, ROWS, shown_rows
from bench.serving.workloads import GPU, QUICK, Sizes, Workload, make_workloads, slowed
from kvblocks.engine.run.backends import choose_device
from kvblocks.engine.text.tokenizer import Tokenizer

CPU_SCALE = 24.0
GPU_MODEL = "llama-3.2-1b"
MIN_HIT_RATE, MIN_SAVED, MIN_SPEEDUP, MAX_REGRESSION = 0.6, 0.3, 5.0, 1.1


def measure(workload: Workload, urls: Mapping[str, str], num_clients: int | None = None) -> dict[str, Any]:
    """Run a workload on the servers without and with caching, and return both results. num_clients: as in `drive`.

    If no gain is expected, or the clients are limited so that steps can be compared, each server has two turns, in the
    order ABBA, so that a machine that becomes slower or faster favors neither.
    """
    is_once = workload.shares and num_clients is None
    order = ("without", "with") if is_once else ("without", "with", "with", "without")
    runs: dict[str, list[Outcome]] = {"without": [], "with": []}
    for name in order:
        runs[name].append(asyncio.run(drive(urls[name], workload, num_clients)))
    without, cached = (summarize(runs[name]) for name in ("without", "with"))
    same = [[answer.token_ids for run in runs[name] for talk in run.answers for answer in talk] for name in runs]
    return {
        "workload": workload.name,
        "about": workload.about,
        "shares": workload.shares,
        "without": without,
        "with": cached,
        "ratios": {
            key: without[key] / cached[key] if less else cached[key] / without[key]
            for key, _, _, less in ROWS
            if less is not None
        },
        "is_identical": same[0] == same[1],
    }


def summarize(runs: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of one server's runs of a workload. The first request, which finds nothing, is separate.

    Tokens computed are, for each lookup, the tokens that weren't cached, and all but the last of those generated until
    the next lookup. A request that is preempted while its prompt is being computed counts with its whole prompt.
    """
    answers = sorted((answer for run in runs for talk in run.answers for answer in talk), key=lambda one: one.asked_s)
    seconds = sum(run.seconds for run in runs)
    ttft_s = [answer.ttft_s for answer in answers]
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    latencies_s = [answer.end_s - answer.asked_s for answer in answers]
    num_prompt, num_cached = sum(a.num_prompt_tokens for a in answers), sum(a.num_cached_tokens for a in answers)
    num_generated = sum(len(answer.token_ids) for answer in answers)
    num_queried, num_hit = sum(run.num_queried_tokens for run in runs), sum(run.num_hit_tokens for run in runs)
    num_preemptions = sum(run.num_preemptions for run in runs)
    return {
        "num_answers": len(answers),
        "ttft_s": [round(value, 4) for value in ttft_s],
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "first_ttft_s": ttft_s[0],
        "later_ttft_p50_s": percentile(ttft_s[1:], 50),
        "num_decoding": statistics.fmean(run.num_decoding for run in runs),
        "itl_p50_s": percentile(gaps_s, 50),
        "itl_p99_s": percentile(gaps_s, 99),
        "latency_p50_s": percentile(latencies_s, 50),
        "latency_p99_s": percentile(latencies_s, 99),
        "seconds": seconds,
        "tokens_per_s": num_generated / seconds,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": num_cached,
        "num_computed_tokens": num_queried - num_hit + num_generated - len(answers) - num_preemptions,
        "num_preemptions": num_preemptions,
        "hit_rate": num_hit / num_queried,
        "saved": num_cached / num_prompt,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of at least one value, interpolated between its neighbours."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def judge(row: dict[str, Any]) -> dict[str, bool]:
    """Return which targets a workload meets: gaining by sharing, or losing nothing where nothing is shared."""
    met = {"identical answers": row["is_identical"]}
    if not row["shares"]:
        met[f"TTFT p50 at most x{MAX_REGRESSION:g} of it without"] = row["ratios"]["ttft_p50_s"] * MAX_REGRESSION >= 1
    elif row["workload"] in {"shared prefix", "full rate"}:
        met[f"hit rate of at least {MIN_HIT_RATE:.0%}"] = row["with"]["hit_rate"] >= MIN_HIT_RATE
        met[f"at least {MIN_SAVED:.0%} of prefill tokens saved"] = row["with"]["saved"] >= MIN_SAVED
        met[f"TTFT p50 after the first at least x{MIN_SPEEDUP:g} better"] = (
            row["ratios"]["later_ttft_p50_s"] >= MIN_SPEEDUP
        )
    elif row["workload"] == "pool pressure":
        met["preempts without caching"] = row["without"]["num_preemptions"] > 0
        met["computes fewer tokens with caching"] = row["ratios"]["num_computed_tokens"] > 1
    return met


def show(row: dict[str, Any]) -> None:
    """Print a workload's table."""
    print(f"\n{row['workload']}: {row['about']}")
    print(f"{'':<42}{'without':>12}{'with':>12}{'ratio':>9}")
    for key, title, unit, _ in shown_rows(row):
        cells = [_cell(key, row[name][key]) for name in ("without", "with")]
        ratio = f"x{row['ratios'][key]:.2f}" if key in row["ratios"] else ""
        print(f"{title + (f', {unit}' if unit else ''):<42}{cells[0]:>12}{cells[1]:>12}{ratio:>9}".rstrip())
    _show_targets(row)


def show_cost(row: dict[str, Any]) -> None:
    """Print the cost of caching for a run that can't share anything."""
    print(f"\n{row['run']}: {row['about']}")
    print(f"{'':<42}{'without':>12}{'with':>12}")
    for key, title in COST_ROWS:
        print(f"{title:<42}{row['without'][key]:>12,}{row['with'][key]:>12,}")
    print(spread_line(row))
    _show_targets(row)


def _show_targets(row: dict[str, Any]) -> None:
    for name, is_met in row["targets"].items():
        print(f"{'met' if is_met else 'MISSED'}: {name}", flush=True)


def _cell(key: str, value: float) -> str:
    if key in {"hit_rate", "saved"}:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


NOT_SHOWN = """\
Not shown: other rates (a server that can't keep up without caching queues, and its TTFT grows with the length of the
run; one that idles shows what a single request saves), other lengths, several machines. Clients and server share
this machine's cores."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.serving", description="A server without and with prefix caching.")
    parser.add_argument(
        "--model",
        help=f"smollm2 (on a GPU {GPU_MODEL}), a Hugging Face folder, or random weights: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 or auto (the default: cuda if there is one)"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second, before --cpu-scale (default 8)")
    parser.add_argument("--cpu-scale", type=float, help=f"divide --rate by this ({CPU_SCALE:g}; on a GPU 1)")
    parser.add_argument("--max-tokens", type=int, help="tokens generated for each request (16; on a GPU 128)")
    parser.add_argument("--kv-cache-memory", help="each server's KV cache, such as 2GiB (512 MiB; on a GPU 8GiB)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the server (default 1)")
    parser.add_argument("--requests", type=int, help='requests of "full rate" (48)')
    parser.add_argument(
        "--clients",
        type=int,
        help="conversations at once, at most. With 1, as many requests decode at once without caching as with it",
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help=f"independent runs ({NUM_ROUNDS})")
    parser.add_argument("--workloads", default="", help="names, separated by commas; all by default")
    parser.add_argument("--quick", action="store_true", help="a few short requests: only checks that it runs")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--plot", type=Path, help="draw the times to first token (PNG; needs kvblocks[bench])")
    given = parser.parse_args(arguments)
    for name, number in (("clients", given.clients), ("requests", given.requests)):
        if number is not None and number < 1:
            parser.error(f"--{name}: expected at least 1, got {number}")
    given.device = choose_device(given.device)
    on_gpu = given.device.type == "cuda"
    given.model = given.model or (GPU_MODEL if on_gpu else "smollm2")
    if given.cpu_scale is None:
        given.cpu_scale = 1.0 if on_gpu else CPU_SCALE
    if given.kv_cache_memory is None and on_gpu:
        given.kv_cache_memory = "8GiB"
    return given


def choose_sizes(given: argparse.Namespace) -> tuple[Sizes, tuple[Case, ...]]:
    """Return how large the workloads are, and the runs that share nothing, for the options and their device."""
    if given.quick:
        return QUICK, QUICK_CASES
    sizes, cases = (GPU, GPU_CASES) if given.device.type == "cuda" else (Sizes(), CPU_CASES)
    sizes = replace(sizes, rate=given.rate)
    if given.requests is not None:
        sizes = replace(sizes, num_full_rate=given.requests)
    if given.max_tokens is not None:
        sizes = replace(sizes, max_tokens=given.max_tokens)
    return slowed(sizes, given.cpu_scale), cases


def server_flags(folder: Path, given: argparse.Namespace, num_blocks: int | None) -> tuple[str, ...]:
    """Return the arguments of a server with caching, except its port."""
    flags = ["--deterministic", "--threads", str(given.threads), "--device", str(given.device)]
    if num_blocks is not None:
        flags += ["--num-blocks", str(num_blocks)]
    elif given.kv_cache_memory is not None:
        flags += ["--kv-cache-memory", given.kv_cache_memory]
    if given.device.type == "cuda":
        flags.append("--warm-up")
    return (str(folder), *flags)


def measure_all(workloads: Sequence[Workload], folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the workloads, print their tables, and return their rows. Each size of the pool has servers of its own."""
    rows: list[dict[str, Any]] = []
    for num_blocks, group in groupby(workloads, lambda workload: workload.num_blocks):
        flags = server_flags(folder, given, num_blocks)
        with served(*flags, "--no-prefix-caching") as (without, _), served(*flags) as (caching, _):
            for workload in group:
                row = measure(workload, {"without": without, "with": caching}, given.clients)
                row["targets"] = {} if given.quick else judge(row)
                show(row)
                rows.append(row)
    return rows


def facts_of(folder: Path, given: argparse.Namespace, sizes: Sizes) -> dict[str, object]:
    """Return the conditions of a run."""
    return conditions(
        model=folder.name,
        weights="random" if given.model in SHAPES else "the model's",
        device=str(given.device),
        gpu=gpu_state() if given.device.type == "cuda" else None,
        num_blocks=given.kv_cache_memory or "the server's default, 512 MiB",
        block_size=16,
        collector="on; off where nothing can be shared",
        threads=given.threads,
        clients=given.clients or "one for each conversation",
        rate=sizes.rate,
        cpu_scale=None if given.quick else given.cpu_scale,
        max_tokens=sizes.max_tokens,
        mode="deterministic, greedy",
    )


def is_missed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether any target of these rows was missed."""
    return not all(is_met for row in rows for is_met in row["targets"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status: 1 if a target was missed. A quick run judges nothing."""
    given = read_options(arguments)
    sizes, cases = choose_sizes(given)
    wanted = [name.strip() for name in given.workloads.split(",") if name.strip()]
    with open_model(given.model) as folder:
        facts = facts_of(folder, given, sizes)
        print_conditions(facts)
        tokenizer = Tokenizer.from_folder(folder)
        workloads = make_workloads(sizes, lambda text: tokenizer.encode(text, add_special_tokens=False))
        rows = measure_all([one for one in workloads if not wanted or one.name in wanted], folder, given)
        torch.set_num_threads(given.threads)
        cases = tuple(case for case in cases if not wanted or case.name in wanted)
        costs = measure_overhead(folder, given.device, cases, given.rounds)
    if given.quick:
        costs = [row | {"targets": {}} for row in costs]
    for row in costs:
        show_cost(row)
    print(f"\n{NOT_SHOWN}")
    if given.quick:
        print(UNJUDGED)
    keep(given.json, facts, rows, costs=costs)
    if given.plot:
        from bench.serving.plot import plot

        plot({"conditions": facts, "results": rows}, given.plot)
    return int(is_missed([*rows, *costs]))


if __name__ == "__main__":
    sys.exit(main())
