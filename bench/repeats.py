"""The time to first token of a repeated prompt, with and without `remember_next_token`, and of a new one.

    python -m bench.repeats [--model smollm2] [--rounds N] [--threads N] [--json FILE]

Two engines of one process share a model and take turns, a prompt at a time, with nothing else to do. Lengths: one that
fills its blocks of 16, one that doesn't, and a long one. Times are milliseconds from a call that asks for one token to
its end.

Not shown: a GPU, and other requests, for whose step a repeat would have to wait without the option.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.conditions import conditions, keep, print_conditions
from kvblocks.engine.engine import Engine
from kvblocks.engine.model.fetch import KNOWN_MODELS
from kvblocks.engine.run.runner import LoadedModel

LENGTHS = (64, 73, 505)
NUM_BLOCKS = 256


def measure_length(engines: dict[bool, Engine], num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each item: a new prompt and a repeat, without and with the option."""
    vocab_size = engines[True].model.config.vocab_size
    samples: dict[tuple[str, bool], list[tuple[float, int]]] = {}
    for number in range(num_rounds + 1):
        drawn = random.Random(num_tokens * 1000 + number)
        prompt = [drawn.randrange(vocab_size) for _ in range(num_tokens)]
        for item in ("new", "repeat"):
            for remembers in (False, True) if number % 2 else (True, False):
                start_s = perf_counter()
                (completion,) = engines[remembers].generate([prompt], max_tokens=1, ignore_eos=True)
                seconds = perf_counter() - start_s
                if number:  # the first round warms up
                    times = samples.setdefault((item, remembers), [])
                    times.append((1000 * seconds, completion.num_computed_tokens))
    return [
        {
            "tokens": num_tokens,
            "item": item,
            "remember_next_token": remembers,
            "computed_tokens": max(computed for _, computed in times),
            "min_ms": min(ms for ms, _ in times),
            "median_ms": median(ms for ms, _ in times),
            "max_ms": max(ms for ms, _ in times),
        }
        for (item, remembers), times in sorted(samples.items())
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        prog="bench.repeats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help=f"a folder, or one of {', '.join(sorted(KNOWN_MODELS))}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    facts = conditions(torch=torch.__version__, threads=asked.threads, num_rounds=asked.rounds, model=asked.model)
    facts["num_blocks"] = NUM_BLOCKS
    print_conditions(facts)
    model = LoadedModel.load(asked.model)
    engines = {
        remembers: Engine(model, num_blocks=NUM_BLOCKS, remember_next_token=remembers) for remembers in (False, True)
    }
    longest = model.config.max_position_embeddings - 1
    print(f"{'tokens':>6}  {'prompt':<8}{'kept':<6}{'computed':>8}{'min ms':>10}{'median':>10}{'max':>10}")
    rows = []
    for num_tokens in LENGTHS:
        found = measure_length(engines, min(num_tokens, longest), asked.rounds)
        for row in found:
            times = "".join(f"{row[name]:>10.2f}" for name in ("min_ms", "median_ms", "max_ms"))
            kept = "yes" if row["remember_next_token"] else "no"
            print(f"{row['tokens']:>6}  {row['item']:<8}{kept:<6}{row['computed_tokens']:>8}{times}", flush=True)
        rows += found
    keep(asked.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
