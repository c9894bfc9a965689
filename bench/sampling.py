"""The time to turn logits into tokens: steps with rows of all kinds, by vocabulary and batch.

    python -m bench.sampling [--rounds N] [--threads N] [--scale X] [--json FILE]

A row's logits fall with the logarithm of their rank, roughly as a model's do. Noise is added, and their order is
random. The cases take turns. Times are milliseconds of processor time for a step with all its rows. By default there is
one thread, so a step takes that long on an otherwise idle machine. "sorted" is the share of draws that had to sort the
whole vocabulary, since the most likely tokens weren't enough. --scale X: use this share of each vocabulary.

What it does not show: a GPU; a model's own logits, on which "sorted" depends; caches that a model has just emptied.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time_ns
from typing import Any

import torch

import kvblocks
from bench.conditions import UNJUDGED, conditions, keep, print_conditions
from bench.timing import Case, measure
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.random_numbers import uniforms
from kvblocks.engine.sampling.sampler import Draw, Sampler

SHAPES = ((64, 131072), (8, 49152), (1, 49152))
STEEPNESS, NOISE = 1.2, 0.3
NUM_SEEN = 1000  # tokens that a sequence has before the first draw: penalties read them

NUCLEUS = {"temperature": 0.8, "top_p": 0.9}
ITEMS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "temperature": [{"temperature": 0.8}],
    "temperature, top_p": [NUCLEUS],
    "temperature, top_k": [{"temperature": 0.8, "top_k": 50}],
    "temperature, min_p": [{"temperature": 0.8, "min_p": 0.05}],
    "every other row greedy, else top_p": [{}, NUCLEUS],
    "top_p, with penalties": [{**NUCLEUS, "repetition_penalty": 1.1, "frequency_penalty": 0.1}],
    "top_p, with 5 logarithms": [{**NUCLEUS, "logprobs": 5}],
    "top_p of a flat distribution": [{"temperature": 2.0, "top_p": 0.95}],
}
TARGETS_MS = {("temperature, top_p", 64): 60.0, ("temperature, top_p", 8): 3.0}


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return float32 [num_rows, vocab_size], the same each time."""
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    ranked = -STEEPNESS * torch.arange(1, vocab_size + 1).float().log()
    rows = [ranked[torch.randperm(vocab_size, generator=generator)] for _ in range(num_rows)]
    return torch.stack(rows) + NOISE * torch.randn(num_rows, vocab_size, generator=generator)


Step = tuple[list[list[Draw]], list[float]]
"""The draws of each row, and their random numbers."""


def make_steps(asked: list[dict[str, Any]], num_rows: int, vocab_size: int) -> list[Step]:
    """Return the draws of some steps, with a sampler for each row. Each row begins with NUM_SEEN tokens."""
    samplers = [Sampler(SamplingParams(**asked[row % len(asked)]), row) for row in range(num_rows)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (num_rows, NUM_SEEN), generator=generator).tolist()
    sequences = [kvblocks.Sequence(row, tokens[row]) for row in range(num_rows)]
    steps = []
    for step in range(4):
        for sequence in sequences:
            sequence.append_tokens([step])
        draws = [[sampler.next_draw(one, step + 1)] for sampler, one in zip(samplers, sequences, strict=True)]
        numbers = uniforms([sampler.random_seed for sampler in samplers], [step + 1] * num_rows)
        steps.append((draws, numbers.tolist()))
    return steps


def make_case(logits: torch.Tensor, sampler: BatchSampler, steps: list[Step]) -> Case:
    """Return a case of a few steps with different random numbers."""

    def run(_: object) -> None:
        for draws, numbers in steps:
            sampler.sample(logits, draws, numbers)

    return Case(run, num_units=len(steps), clock=process_time_ns)


def measure_shape(num_rows: int, vocab_size: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each item."""
    logits = make_logits(num_rows, vocab_size)
    samplers = {item: BatchSampler() for item in ITEMS}
    cases = {
        item: make_case(logits, samplers[item], make_steps(asked, num_rows, vocab_size))
        for item, asked in ITEMS.items()
    }
    rows = []
    for item, spread in measure(cases, num_rounds, 1).items():
        counts = samplers[item].counts
        rows.append(
            {
                "item": item,
                "rows": num_rows,
                "vocabulary": vocab_size,
                "min_ms": spread.low / 1e6,
                "median_ms": spread.median / 1e6,
                "max_ms": spread.high / 1e6,
                "sorted": counts.num_sorted / counts.num_draws,
                "target_ms": TARGETS_MS.get((item, num_rows)),
            }
        )
    return rows


def is_missed(row: dict[str, Any]) -> bool:
    """Whether a row has a target and misses it."""
    return row["target_ms"] is not None and row["min_ms"] > row["target_ms"]


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    times = "".join(f"{row[name]:>10.2f}" for name in ("min_ms", "median_ms", "max_ms"))
    target = "" if row["target_ms"] is None else f"   target {row['target_ms']:g}{' missed' * is_missed(row)}"
    print(
        f"{row['rows']:>4} x {row['vocabulary']:<8,}{row['item']:<36}{times}{row['sorted']:>9.0%}{target}", flush=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep. Returns 1 if a target is missed. Sizes that are scaled have no targets."""
    parser = argparse.ArgumentParser(
        prog="bench.sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    facts = conditions(
        torch=torch.__version__,
        threads=asked.threads,
        clock="processor time",
        num_rounds=asked.rounds,
        logits=f"-{STEEPNESS} log(rank) + {NOISE} x noise",
        seen_tokens=NUM_SEEN,
    )
    del facts["num_blocks"], facts["block_size"]
    print_conditions(facts)
    print(f"{'rows x vocabulary':<19}{'a step of':<32}{'min ms':>10}{'median':>10}{'max':>10}{'sorted':>9}")
    rows = []
    for num_rows, vocab_size in SHAPES:
        found = measure_shape(num_rows, max(1, int(vocab_size * asked.scale)), asked.rounds)
        for row in found:
            if asked.scale != 1.0:
                row["target_ms"] = None
            print_row(row)
        rows += found
    keep(asked.json, facts, rows)
    if asked.scale != 1.0:
        print(UNJUDGED)
    return int(any(map(is_missed, rows)))


if __name__ == "__main__":
    sys.exit(main())
