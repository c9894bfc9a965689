"""Tokens that transformers' continuous batching computes with its own cache and with kvblocks, early and late.

    python -m bench.transformers [--rounds N] [--seeds N] [--quick] [--json FILE]

The three answer the same 120 requests over 10 prefixes, in pools from large to small, and take turns. Tokens and steps
are the same in each round. The seconds are the minimum of the rounds; median and maximum are kept too.

What it does not show: a real model, whose time grows with the tokens; a GPU, CUDA graphs and asynchronous batching,
which caches late; layers with windows; requests that come one by one. The model is so small that most of the seconds
are Python's work.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.conditions import conditions, keep, print_conditions
from bench.timing import Spread
from bench.transformers.workload import (
    CONTESTANTS,
    EARLY,
    MAX_BATCH_TOKENS,
    NEW_TOKENS,
    NUM_PREFIXES,
    NUM_REQUESTS,
    OWN,
    OWN_TOKENS,
    PAGE_SIZE,
    PREFIX_TOKENS,
    make_model,
    make_prompts,
    run,
)

POOLS = (2000, 400, 200, 100, 60)
WIDTH = 22


def measure_pool(model: Any, seed: int, num_requests: int, num_blocks: int, num_rounds: int) -> dict[str, Any]:
    """Return a row: what each contestant computes in a pool of so many blocks."""
    prompts = make_prompts(seed, num_requests)
    outcomes = {name: [] for name in CONTESTANTS}
    for number in range(num_rounds):
        for name in CONTESTANTS if number % 2 == 0 else CONTESTANTS[::-1]:
            outcomes[name].append(run(model, prompts, num_blocks, name))
    row: dict[str, Any] = {"seed": seed, "num_blocks": num_blocks}
    answers = outcomes[OWN][0].answers
    for name, runs in outcomes.items():
        spread = Spread([outcome.seconds for outcome in runs])
        row[name] = {
            "tokens": max(outcome.num_tokens for outcome in runs),
            "fewest_tokens": min(outcome.num_tokens for outcome in runs),
            "steps": runs[0].num_steps,
            "answered": min(len(outcome.answers) for outcome in runs),
            "same_answers": min(sum(outcome.answers[key] == answers[key] for key in answers) for outcome in runs),
            "seconds": {"min": spread.low, "median": spread.median, "max": spread.high},
        }
    return row


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    cells = "".join(
        f"{row[name]['tokens']:>{WIDTH - 12},}{row[name]['steps']:>6}{row[name]['seconds']['min']:>6.2f}"
        for name in CONTESTANTS
    )
    print(f"{row['seed']:>4}{row['num_blocks']:>8,}{cells}", flush=True)


def print_targets(rows: list[dict[str, Any]]) -> bool:
    """Print whether what the project aims for is reached, and return whether it is."""
    saved = [1 - row[EARLY]["tokens"] / row[OWN]["fewest_tokens"] for row in rows]
    complete = all(row[name]["answered"] == row[OWN]["answered"] for row in rows for name in CONTESTANTS)
    different = sum(row[name]["answered"] - row[name]["same_answers"] for row in rows for name in CONTESTANTS)
    targets = {
        f"early commit never computes more than transformers' own: it saves {min(saved):.1%} to {max(saved):.1%}": min(
            saved
        )
        >= 0,
        "all requests are answered": complete,
        f"the answers are the same: {different} of all differ": not different,
    }
    for text, is_met in targets.items():
        print(f"{'met' if is_met else 'MISSED'}: {text}", flush=True)
    return all(targets.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.transformers", description="transformers with two caches.")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each contestant gets (default 3)")
    parser.add_argument("--seeds", type=int, default=1, help="workloads of the same shape (default 1)")
    parser.add_argument("--quick", action="store_true", help="a sixth of the requests, two pools")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_requests, pools = (NUM_REQUESTS // 6, (400, 60)) if given.quick else (NUM_REQUESTS, POOLS)
    facts = conditions(
        transformers=transformers.__version__,
        torch=torch.__version__,
        num_blocks=", ".join(map(str, pools)),
        block_size=PAGE_SIZE,
        collector="as ever",
        num_rounds=given.rounds,
        workload=f"{num_requests} requests, {NUM_PREFIXES} prefixes of {PREFIX_TOKENS} tokens, {OWN_TOKENS[0]} to"
        f" {OWN_TOKENS[1]} tokens of their own, {NEW_TOKENS} generated, {MAX_BATCH_TOKENS} in a step at most",
        model="a random Llama of 2 layers, on the CPU, with one thread",
    )
    print_conditions(facts)
    heads = "".join(f"{name:>{WIDTH}}" for name in CONTESTANTS)
    print(
        f"{'seed':>4}{'blocks':>8}{heads}\n{'':12}" + f"{'tokens':>{WIDTH - 12}}{'steps':>6}{'s':>6}" * len(CONTESTANTS)
    )
    model = make_model()
    rows = []
    for seed in range(given.seeds):
        for num_blocks in pools:
            rows.append(measure_pool(model, seed, num_requests, num_blocks, given.rounds))
            print_row(rows[-1])
    keep(given.json, facts, rows)
    return int(not print_targets(rows))


if __name__ == "__main__":
    sys.exit(main())
