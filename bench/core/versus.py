"""Times two trees of kvblocks on the same work, in turns, to show whether a change made anything slower.

    python -m bench.core.versus OLD [--new NEW] [--processes N] [--rounds N] [--samples N] [--items a,b] [--json FILE]

OLD, NEW: folders that hold the package kvblocks: a checkout, or what `pip install --target` has filled with a compiled
build; NEW is this checkout unless said. Each tree gets a process of its own. Both run the items of
`bench.core.compare`, `bench.core.prefix_cache` and `bench.core.groups` as this checkout has them, so that only kvblocks
differs. They take turns round by round, and alternate in who begins. In a round both run on the same processor. Every
two rounds they move to the next processor, if the system allows it, since shared processors differ by more than the
change that the bench looks for. A round's number is its minimum sample.

A process's layout in memory has an effect of a few percent, and stays the same as long as the process lives. So each
tree gets several processes, one after the other.

What counts is the last column, the median of all rounds' ratios new / old, since noise that lasts longer than a round
affects both. Even two equal trees may differ by 2 % with the default numbers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvblocks
from bench.conditions import conditions, keep, print_conditions
from bench.core.groups import group_cases
from bench.core.items import ITEMS
from bench.core.ours import Ours, is_compiled
from bench.core.prefix_cache import evict_case, insert_cases, match_cases
from bench.timing import NUM_WARM_UPS, Case, settle

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE_BLOCKS = 16_384
CACHE_ITEMS = "prefix cache"
GROUP_ITEMS = "groups"
_PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
# kvblocks is imported from the tree, then this bench from the checkout.
_BOOTSTRAP = (
    "import sys; tree, checkout = sys.argv[1:]; sys.path.insert(0, tree); import kvblocks;"
    "sys.path.insert(0, checkout); from bench.core.versus import serve; serve()"
)


Rounds = list[tuple[float, float]]
"""Nanoseconds per unit of work, for the old and the new tree."""


class Row(NamedTuple):
    """One way of one item, in nanoseconds per unit of work. ratio: the median of the rounds' new / old."""

    item: str
    way: str
    old_min: float
    old_median: float
    old_max: float
    new_min: float
    new_median: float
    new_max: float
    ratio: float


def item_names() -> list[str]:
    """Return the names of all items: those of `bench.core.compare`, and as one each those of `bench.core.prefix_cache`
    and of `bench.core.groups`.
    """
    return [*[item.name for item in ITEMS], CACHE_ITEMS, GROUP_ITEMS]


class Worker:
    """A process that times cases of the kvblocks in `tree`. Raises RuntimeError if the process ends too early."""

    def __init__(self, tree: Path) -> None:
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(tree.resolve()), str(CHECKOUT)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tree = tree
        self.about = self.ask("about")
        if not Path(self.about["file"]).is_relative_to(tree.resolve()):
            raise RuntimeError(f"{tree}: expected a folder with the package kvblocks, got {self.about['file']}")

    def ask(self, request: str, argument: object = None) -> Any:
        """Return the answer to one of `serve`'s requests."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([request, argument]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self._tree}: the process that measures it has ended; see its last words above")
        return json.loads(line)

    def end(self) -> None:
        """Let the process end. It keeps nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer the requests on stdin, one a line, until it ends. Runs in a worker."""
    ours, cases = Ours(), dict[str, Case]()
    for line in sys.stdin:
        request, argument = json.loads(line)
        answer: object = None
        if request == "about":
            build = "compiled" if is_compiled() else "plain"
            answer = {"file": str(Path(kvblocks.__file__).resolve()), "version": kvblocks.__version__, "build": build}
        elif request == "prepare":
            cases = dict(_cases(ours, argument))
            for case in cases.values():
                for _ in range(NUM_WARM_UPS):
                    case.time_once()
            settle()
            answer = list(cases)
        elif request == "time":
            way, num_samples, round_number = argument
            _move(round_number)
            cases[way].time_once()  # warms the caches that the other process used
            answer = min([cases[way].time_once() for _ in range(num_samples)])
        print(json.dumps(answer), flush=True)


def _move(round_number: int) -> None:
    """Move to the processor of this round."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {_PROCESSORS[round_number // 2 % len(_PROCESSORS)]})


def _cases(ours: Ours, item: str) -> Iterator[tuple[str, Case]]:
    if item == CACHE_ITEMS:
        yield from (match_cases(in_list=False) | match_cases(in_list=True) | insert_cases(CACHE_BLOCKS)).items()
        yield "evict", evict_case(CACHE_BLOCKS)
        return
    if item == GROUP_ITEMS:
        yield from group_cases().items()
        return
    for found in ITEMS:
        if found.name == item:
            yield from getattr(ours, found.kind)(found.size).items()


def time_item(item: str, old: Worker, new: Worker, num_rounds: int, num_samples: int) -> dict[str, Rounds]:
    """Time one item in both processes, in turns. Returns what the rounds took, by way."""
    ways = old.ask("prepare", item)
    new.ask("prepare", item)
    timed: dict[str, Rounds] = {way: [] for way in ways}
    for way, rounds in timed.items():
        for number in range(num_rounds):
            turns = (old, new) if number % 2 == 0 else (new, old)
            took = {worker: worker.ask("time", [way, num_samples, number]) for worker in turns}
            rounds.append((took[old], took[new]))
    return timed


def make_row(item: str, way: str, rounds: Rounds) -> Row:
    """Summarize all rounds of a way."""
    numbers = [round(f(column), 2) for column in zip(*rounds, strict=True) for f in (min, statistics.median, max)]
    return Row(item, way, *numbers, round(statistics.median([new / old for old, new in rounds]), 4))


def print_row(row: Row) -> None:
    """Print a line of the table."""
    numbers = "".join(f"{number:>13.1f}" for number in row[2:8])
    print(f"{f'{row.item}: {row.way}':<48}{numbers}{row.ratio:>9.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.core.versus", description="Times two trees of kvblocks in turns.")
    parser.add_argument("old", type=Path, help="a folder with the package kvblocks, as it was before")
    parser.add_argument("--new", type=Path, default=CHECKOUT, help="the same, with the change (default: this checkout)")
    parser.add_argument("--processes", type=int, default=5, help="processes that each tree gets (default 5)")
    parser.add_argument("--rounds", type=int, default=4, help="turns that each process gets (default 4)")
    parser.add_argument("--samples", type=int, default=3, help="samples in each turn; the smallest counts (default 3)")
    parser.add_argument("--items", help="only items whose name contains one of these, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    wanted = given.items.split(",") if given.items else [""]
    items = [item for item in item_names() if any(part in item for part in wanted)]
    timed: dict[tuple[str, str], Rounds] = {}
    for number in range(given.processes):
        old, new = Worker(given.old), Worker(given.new)
        if not number:
            facts = _facts(old, new, given)
            print_conditions(facts)
        for item in items:
            for way, rounds in time_item(item, old, new, given.rounds, given.samples).items():
                timed[item, way] = timed.get((item, way), []) + rounds
        old.end()
        new.end()
    print(f"{'nanoseconds a unit of work':<48}{'old min':>13}{'median':>13}{'max':>13}{'new min':>13}", end="")
    print(f"{'median':>13}{'max':>13}{'new/old':>9}")
    rows = [make_row(item, way, rounds) for (item, way), rounds in timed.items()]
    for row in rows:
        print_row(row)
    keep(given.json, facts, [row._asdict() for row in rows])


def _facts(old: Worker, new: Worker, given: argparse.Namespace) -> dict[str, Any]:
    return conditions(
        kvblocks=f"{old.about['version']} (old), {new.about['version']} (new)",
        build=f"{old.about['build']} (old), {new.about['build']} (new)",
        source="two trees",
        num_processes=given.processes,
        num_rounds=given.rounds,
        num_samples=given.samples,
    )


if __name__ == "__main__":
    main()
