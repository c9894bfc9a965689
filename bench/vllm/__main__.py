"""vLLM's scheduler with three KV cache managers: its own, kvblocks, and one that does nothing.

    python -m bench.vllm [--rounds N] [--quick] [--sequences N [N ...]] [--json FILE]

Needs the environment that `make test-vllm` makes: .venv-vllm/bin/python. The three take turns in one process, every
other round in reverse. Times are processor time of the thread, so other work on the machine matters less. The minimum
of the rounds is what counts; median and maximum are printed too. "saved" is what kvblocks saves, as a share of what the
manager that does nothing saves, which is the most that any manager can save. With --sequences only steps of these
numbers of sequences are measured, over the short prefix.

What it does not show: a model, a GPU, and what overlaps with them; with async scheduling a step's time is hidden as
long as it is shorter than the model's. Requests that come and go, evictions and preemptions: all sequences decode.
Hashing that other processes do for vLLM's router. Memory.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm

from bench.conditions import conditions, keep, print_conditions
from bench.timing import Spread
from bench.vllm.admission import NUM_CACHED, time_admissions
from bench.vllm.contestants import BLOCK_SIZE, NOTHING, OURS, VLLM
from bench.vllm.schedulers import ADAPTER, HASH
from bench.vllm.steps import ROUND_STEPS, share_saved, time_decoding

SEQUENCES = (1, 64, 256, 512)
PREFIXES = (1024, 32_768)
EVENTS = "KV events"
MIN_SAVED, MIN_ADMISSION = 0.85, 5.0
WIDTH = 44


def make_row(item: str, spreads: dict[str, Spread]) -> dict[str, Any]:
    """Return a row of the results, in microseconds."""
    row: dict[str, Any] = {"item": item, "unit": "us", "saved": None}
    for name, spread in spreads.items():
        row[name] = {"min": spread.low / 1e3, "median": spread.median / 1e3, "max": spread.high / 1e3}
    row["ratio"] = spreads[VLLM].low / spreads[OURS].low
    if NOTHING in spreads:
        saved = share_saved(spreads, VLLM, OURS)
        row["saved"] = saved.median
        row["saved_rounds"] = {"min": saved.low, "median": saved.median, "max": saved.high}
    return row


def print_head() -> None:
    """Print the table's head."""
    names = "".join(f"{name + ' min':>14}{'median':>10}{'max':>10}" for name in (VLLM, OURS, NOTHING))
    print(f"{'microseconds of processor time':<{WIDTH}}{names}{'ratio':>8}{'saved':>8}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    cells = ""
    for name in (VLLM, OURS, NOTHING):
        found = row.get(name)
        cells += f"{found['min']:>14.1f}{found['median']:>10.1f}{found['max']:>10.1f}" if found else " " * 34
    saved = "" if row["saved"] is None else f"{row['saved']:.1%}"
    print(f"{row['item']:<{WIDTH}}{cells}{row['ratio']:>8.2f}{saved:>8}", flush=True)


def measure_steps(num_rounds: int, prefixes: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Measure steps of so many sequences over such prefixes, print them line by line, and return the rows."""
    rows = []
    print_head()
    for is_async in (False, True):
        for num_shared in prefixes:
            for num_sequences in numbers:
                kind = "async" if is_async else "sync"
                item = f"step, {num_sequences:,} sequences, {num_shared:,} shared, {kind}"
                spreads = time_decoding(num_sequences, num_shared, num_rounds, is_async=is_async)
                rows.append(make_row(item, spreads))
                print_row(rows[-1])
    return rows


def measure(num_rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Measure everything, print it line by line, and return the rows."""
    rows = measure_steps(num_rounds, PREFIXES[:1] if quick else PREFIXES, (1, 64) if quick else SEQUENCES)
    for is_async in (False, True):
        item = f"step, 64 sequences, {PREFIXES[0]:,} shared, {'async' if is_async else 'sync'}, {EVENTS}"
        spreads = time_decoding(64, PREFIXES[0], num_rounds, is_async=is_async, has_events=True)
        rows.append(make_row(item, spreads))
        print_row(rows[-1])
    admitted, made = time_admissions(num_rounds)
    rows.append(make_row(f"admission, {NUM_CACHED:,} tokens cached", admitted))
    rows.append(make_row("Request(), hashed for vllm alone", made))
    for row in rows[-2:]:
        print_row(row)
    return rows


def print_targets(rows: list[dict[str, Any]]) -> None:
    """Print whether what the project aims for is reached."""
    steps = [row for row in rows if row["item"].startswith("step") and EVENTS not in row["item"]]
    worst = min(steps, key=lambda row: row["saved"])
    slowest = min(rows, key=lambda row: row["ratio"])
    judged = [
        (worst["saved"] >= MIN_SAVED, f"at least {MIN_SAVED:.0%} saved: least {worst['saved']:.1%}, {worst['item']}"),
        (slowest["ratio"] >= 1, f"never slower than vLLM's: {slowest['ratio']:.2f} times as fast, {slowest['item']}"),
    ]
    for row in rows:
        if row["item"].startswith("admission"):
            is_met = row["ratio"] >= MIN_ADMISSION
            judged.append((is_met, f"admission {MIN_ADMISSION:g} times as fast: {row['ratio']:.1f}"))
    for is_met, text in judged:
        print(f"{'met' if is_met else 'MISSED'}: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.vllm", description="vLLM's scheduler with three KV cache managers.")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each manager gets (default 15)")
    parser.add_argument("--quick", action="store_true", help="few sequences, short prefixes")
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N", help="time only steps of N sequences")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    facts = conditions(
        vllm=vllm.__version__,
        adapter=ADAPTER,
        hash=f"{HASH}, for vLLM's manager alone",
        num_blocks="as many as all sequences need",
        block_size=BLOCK_SIZE,
        num_rounds=given.rounds,
        steps_a_round=ROUND_STEPS,
        model="none: its answers are mocked",
    )
    print_conditions(facts)
    if given.sequences:
        rows = measure_steps(given.rounds, PREFIXES[:1], given.sequences)
    else:
        rows = measure(given.rounds, quick=given.quick)
    gc.unfreeze()  # undoes what `settle` froze; otherwise vLLM's extensions report leaks at exit
    print_targets(rows)
    keep(given.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
