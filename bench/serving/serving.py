"""What prefix caching does for a server's clients: the same requests to a server without it, and to one with it.

    python -m bench.serving

Starts `kvblocks serve` twice, and drives both over HTTP with streaming clients, one after the other. Both are
deterministic, so their greedy answers must be the same, token for token. On a CPU 8 requests a second are more than it
can do either way, so arrivals are `--cpu-scale` times rarer; the rate is printed.
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from bench.serving.client import Outcome, drive
from bench.serving.process import served
from bench.serving.rows import ROWS
from bench.serving.workloads import QUICK, Sizes, Workload, make_workloads, slowed
from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
from kvblocks.engine.text.tokenizer import Tokenizer

CPU_SCALE = 24.0
MIN_HIT_RATE, MIN_SAVED, MIN_SPEEDUP, MAX_REGRESSION = 0.6, 0.3, 5.0, 1.1


def measure(workload: Workload, urls: Mapping[str, str]) -> dict[str, Any]:
    """Run a workload on the servers without and with caching, and return what both gave.

    Where no gain is expected each has two turns, in the order ABBA, so that a machine that gets slower or faster
    meanwhile doesn't decide.
    """
    order = ("without", "with") if workload.shares else ("without", "with", "with", "without")
    runs: dict[str, list[Outcome]] = {"without": [], "with": []}
    for name in order:
        runs[name].append(asyncio.run(drive(urls[name], workload)))
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
    """Return the numbers of one server's runs of a workload. Who is asked first has nobody to share with."""
    answers = sorted((answer for run in runs for talk in run.answers for answer in talk), key=lambda one: one.asked_s)
    seconds = sum(run.seconds for run in runs)
    ttft_s = [answer.ttft_s for answer in answers]
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    latencies_s = [answer.end_s - answer.asked_s for answer in answers]
    num_prompt, num_cached = sum(a.num_prompt_tokens for a in answers), sum(a.num_cached_tokens for a in answers)
    num_generated = sum(len(answer.token_ids) for answer in answers)
    return {
        "num_answers": len(answers),
        "ttft_s": [round(value, 4) for value in ttft_s],
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "first_ttft_s": ttft_s[0],
        "later_ttft_p50_s": percentile(ttft_s[1:], 50),
        "itl_p50_s": percentile(gaps_s, 50),
        "itl_p99_s": percentile(gaps_s, 99),
        "latency_p50_s": percentile(latencies_s, 50),
        "latency_p99_s": percentile(latencies_s, 99),
        "seconds": seconds,
        "tokens_per_s": num_generated / seconds,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": num_cached,
        # Of each answer the last token never goes through the model.
        "num_computed_tokens": num_prompt - num_cached + num_generated - len(answers),
        "hit_rate": sum(run.num_hit_tokens for run in runs) / sum(run.num_queried_tokens for run in runs),
        "saved": num_cached / num_prompt,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of at least one value, interpolated between its neighbours."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def judge(row: dict[str, Any]) -> dict[str, bool]:
    """Return which targets a workload meets: of sharing ones what it gains, of the other that it loses nothing."""
    met = {"identical answers": row["is_identical"]}
    if not row["shares"]:
        met[f"TTFT p50 at most x{MAX_REGRESSION:g} of it without"] = row["ratios"]["ttft_p50_s"] * MAX_REGRESSION >= 1
    elif row["workload"] == "shared prefix":
        met[f"hit rate of at least {MIN_HIT_RATE:.0%}"] = row["with"]["hit_rate"] >= MIN_HIT_RATE
        met[f"at least {MIN_SAVED:.0%} of prefill tokens saved"] = row["with"]["saved"] >= MIN_SAVED
        met[f"TTFT p50 after the first at least x{MIN_SPEEDUP:g} better"] = (
            row["ratios"]["later_ttft_p50_s"] >= MIN_SPEEDUP
        )
    return met


def show(row: dict[str, Any]) -> None:
    """Print a workload's table."""
    print(f"\n{row['workload']}: {row['about']}")
    print(f"{'':<42}{'without':>12}{'with':>12}{'ratio':>9}")
    for key, title, unit, _ in ROWS:
        cells = [_cell(key, row[name][key]) for name in ("without", "with")]
        ratio = f"x{row['ratios'][key]:.2f}" if key in row["ratios"] else ""
        print(f"{title + (f', {unit}' if unit else ''):<42}{cells[0]:>12}{cells[1]:>12}{ratio:>9}".rstrip())
    for name, is_met in row["targets"].items():
        print(f"{'met' if is_met else 'MISSED'}: {name}")


def _cell(key: str, value: float) -> str:
    if key in {"hit_rate", "saved"}:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


NOT_SHOWN = """\
Not shown: other rates (a server that can't keep up without caching queues, and its TTFT grows with the length of the
run; one that idles shows what a single request saves), other lengths, a GPU, several machines. Clients and server share
this machine's cores."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.serving", description="A server without and with prefix caching.")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, before --cpu-scale (default 8)")
    parser.add_argument("--cpu-scale", type=float, default=CPU_SCALE, help=f"arrivals so much rarer ({CPU_SCALE:g})")
    parser.add_argument("--max-tokens", type=int, default=16, help="generated for each request (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the server (default 1)")
    parser.add_argument("--workloads", default="", help="names, separated by commas; all by default")
    parser.add_argument("--quick", action="store_true", help="a few short requests: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--plot", type=Path, help="draw the times to first token (PNG; needs kvblocks[bench])")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = read_options(arguments)
    folder = fetch_model(given.model) if given.model in KNOWN_MODELS else Path(given.model)
    tokenizer = Tokenizer.from_folder(folder)
    sizes = QUICK if given.quick else slowed(Sizes(rate=given.rate, max_tokens=given.max_tokens), given.cpu_scale)
    workloads = make_workloads(sizes, lambda text: tokenizer.encode(text, add_special_tokens=False))
    wanted = [name.strip() for name in given.workloads.split(",") if name.strip()]
    facts = conditions(
        model=folder.name,
        num_blocks="the server's default, 512 MB",
        block_size=16,
        collector="on",
        threads=given.threads,
        rate=sizes.rate,
        cpu_scale=None if given.quick else given.cpu_scale,
        max_tokens=sizes.max_tokens,
        mode="deterministic, greedy",
    )
    print_conditions(facts)
    rows: list[dict[str, Any]] = []
    flags = (str(folder), "--deterministic", "--threads", str(given.threads))
    with served(*flags, "--no-prefix-caching") as (without, _), served(*flags) as (caching, _):
        for workload in workloads:
            if wanted and workload.name not in wanted:
                continue
            row = measure(workload, {"without": without, "with": caching})
            row["targets"] = judge(row)
            show(row)
            rows.append(row)
    print(f"\n{NOT_SHOWN}")
    keep(given.json, facts, rows)
    if given.plot:
        from bench.serving.plot import plot

        plot({"conditions": facts, "results": rows}, given.plot)


if __name__ == "__main__":
    main()
