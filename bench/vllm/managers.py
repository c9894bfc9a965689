"""What `bench.vllm` times and prints: steps and admissions of vLLM's scheduler with each of the three managers."""

from collections.abc import Sequence
from typing import Any

from bench.timing import Spread
from bench.vllm.admission import NUM_CACHED, time_admissions
from bench.vllm.contestants import NOTHING, OURS, VLLM
from bench.vllm.steps import share_saved, time_decoding

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


def print_targets(rows: list[dict[str, Any]]) -> bool:
    """Print whether what the project aims for is reached, and return whether it is."""
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
    return all(is_met for is_met, _ in judged)
