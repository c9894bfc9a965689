"""Compares kvblocks with its peers: the same work in one process, interleaved.

    python -m bench.core.compare [--peers vllm,sglang] [--rounds N] [--quick] [--json FILE] [--growth]

Peers that aren't installed are named and left out; bench/install_peers.sh installs them. A ratio is the peer's minimum
over ours: above 1, kvblocks is faster. --growth measures kvblocks alone, over the sizes of pools and prompts.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.conditions import UNJUDGED, conditions, print_conditions
from bench.core.driver import Cases, Driver
from bench.core.growth import run_growth
from bench.core.items import BASELINE, ITEMS, MEMORY_TARGET, TARGETS, Item
from bench.core.memory import measure_memory
from bench.core.ours import Ours, is_compiled
from bench.peers import PEERS, load
from bench.timing import Spread, measure

OURS = Ours.label
QUICK_MAX_SIZE = 32_768


class Row(NamedTuple):
    """One contestant's result for one item, in the item's unit."""

    item: str
    unit: str
    contestant: str
    way: str
    low: float
    median: float
    high: float
    num_samples: int
    ratio: float | None


def load_peers(names: Sequence[str]) -> dict[str, Driver]:
    """Return the drivers of the peers that are installed, and say which are not."""
    drivers = {}
    for name in names:
        try:
            drivers[name] = load(name)
            print(f"# peer {name}: {drivers[name].version}. {drivers[name].note}", flush=True)
        except Exception as error:  # noqa: BLE001  # a peer whose import fails is left out
            print(f"# peer {name}: not available ({type(error).__name__}: {error})", flush=True)
    if not drivers:
        print("# no peer is installed, so there is nothing to compare with; bench/install_peers.sh installs them")
    return drivers


def cases_of(driver: Driver, item: Item) -> Cases:
    """Return the driver's cases of `item`, or none, after printing that a peer has failed."""
    try:
        cases: Cases = getattr(driver, item.kind)(item.size)
        for case in cases.values():
            case.time_once()
    except Exception as error:
        if driver.label == OURS:
            raise
        print(f"# peer {driver.label}: failed at {item.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    return cases


def measure_item(item: Item, drivers: Sequence[Driver], num_rounds: int, num_samples: int) -> list[Row]:
    """Time one item; kvblocks' rows come first."""
    cases = {(driver.label, way): case for driver in drivers for way, case in cases_of(driver, item).items()}
    spreads = measure({"\0".join(key): case for key, case in cases.items()}, num_rounds, num_samples)
    scaled = {key: spreads["\0".join(key)] for key in cases}
    ours = next((spread.low for (label, _), spread in scaled.items() if label == OURS), None)
    return [_row(item, label, way, spread, ours) for (label, way), spread in scaled.items()]


def _row(item: Item, contestant: str, way: str, spread: Spread, ours: float | None) -> Row:
    low, median, high = (round(x / item.ns_per_unit, 2) for x in (spread.low, spread.median, spread.high))
    ratio = None if contestant == OURS or not ours else round(spread.low / ours, 2)
    return Row(item.name, item.unit, contestant, way, low, median, high, len(spread.samples), ratio)


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print an item's rows."""
    print(f"\n{title} ({rows[0].unit}){'':<{max(0, 44 - len(title) - len(rows[0].unit))}}", end="")
    print(f"{'min':>12}{'median':>12}{'max':>12}{'ratio':>10}")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.{1 if row.ratio >= 1 else 2}f}x"
        print(f"  {row.contestant:<12}{row.way:<32}{row.low:>12}{row.median:>12}{row.high:>12}{ratio:>10}", flush=True)


def compare_memory(names: Sequence[str]) -> list[dict[str, object]]:
    """Measure and print the bytes per block of kvblocks and of the peers that have a pool."""
    print(f"\n{'bytes a block':<46}{'empty':>12}{'all cached':>12}{'of vLLM':>10}", flush=True)
    found = {name: measure_memory(name) for name in (OURS, *names)}
    base = found.get(BASELINE)
    rows: list[dict[str, object]] = []
    for name, measured in found.items():
        if isinstance(measured, str):
            print(f"  {name}: {measured}")
            continue
        share = round(measured["cached"] / base["cached"], 3) if isinstance(base, dict) else None
        rows.append({"contestant": name, **{key: round(value, 1) for key, value in measured.items()}, "share": share})
        print(f"  {name:<44}{measured['empty']:>12.1f}{measured['cached']:>12.1f}{share or '':>10}")
    return rows


def compare_targets(rows: Sequence[Row], memory: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Print the targets against vLLM with the results, and return them."""
    reached: list[dict[str, object]] = []
    for target in TARGETS:
        ratio = next((row.ratio for row in rows if row.item == target.name and row.contestant == BASELINE), None)
        wanted = target.compiled if is_compiled() else target.plain
        if ratio is not None:
            reached.append({"item": target.name, "target": wanted, "ratio": ratio, "reached": ratio >= wanted})
    share = next((row["share"] for row in memory if row["contestant"] == OURS), None)
    if isinstance(share, float):
        entry = {"item": "bytes_per_block_cached", "target": MEMORY_TARGET, "ratio": share}
        reached.append(entry | {"reached": share <= MEMORY_TARGET})
    if reached:
        print(
            f"\n{'target against vLLM, ' + ('compiled' if is_compiled() else 'plain'):<46}{'target':>12}{'ratio':>12}"
        )
    for entry in reached:
        print(
            f"  {entry['item']:<44}{entry['target']:>12}{entry['ratio']:>12}{'' if entry['reached'] else '   missed'}"
        )
    return reached


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="bench.core.compare", description="Times kvblocks beside its peers.")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which of {','.join(PEERS)} (default: all)")
    parser.add_argument("--items", help="only items whose name contains this")
    parser.add_argument("--rounds", type=int, help="turns that each contestant gets (default 7; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="two turns, no prompts of 128k tokens: noisy")
    parser.add_argument("--growth", action="store_true", help="kvblocks alone: sizes of pools and prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    warnings.filterwarnings("ignore")  # the peers'
    num_rounds, num_samples = given.rounds or (2 if given.quick else 7), 1 if given.quick else 3
    kept: dict[str, object] = {}
    if given.growth:
        facts = conditions(num_rounds=num_rounds, num_samples=num_samples)
        print_conditions(facts)
        kept = {"conditions": facts, "growth": run_growth(num_rounds, num_samples)}
    else:
        peers = load_peers([name for name in given.peers.split(",") if name])
        versions = {name: driver.version for name, driver in peers.items()}
        facts = conditions(num_rounds=num_rounds, num_samples=num_samples, peers=versions)
        ours = Ours()
        print_conditions(facts | {"note": ours.note})
        rows: list[Row] = []
        for item in ITEMS:
            if (given.quick and item.size > QUICK_MAX_SIZE) or (given.items and given.items not in item.name):
                continue
            rows += (measured := measure_item(item, [ours, *peers.values()], num_rounds, num_samples))
            print_rows(item.title, measured)
        memory = compare_memory(list(peers)) if not given.items else []
        kept = {"conditions": facts, "results": [row._asdict() for row in rows], "memory": memory}
        if given.quick:
            print(f"\n{UNJUDGED}")
        else:
            kept["targets"] = compare_targets(rows, memory)
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # skips the lists of leaks that the peers' bindings print at exit
