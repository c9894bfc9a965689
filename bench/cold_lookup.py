"""The cost of a lookup in a loop, and after a model's forward pass, as in a server.

    python -m bench.cold_lookup                 # --quick; --json FILE

A bench of the manager alone calls it again and again, so its code, its blocks and the branch predictions are in the
processor's caches. In a server, a forward pass has read all weights since the last lookup and has evicted them. Here a
pass is 16 products with 64 MB of weights. Prompts have 1,024 shared tokens, which are cached, and 80 of their own.
Bias: the pass is small and on one thread; the weights of a real model evict more. In the last row another Python thread
works at the same time, since it may hold the interpreter's lock.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.core.workload import BLOCK_SIZE, random_tokens
from bench.timing import Case, measure
from kvblocks import KVCacheManager
from kvblocks import Sequence as Prompt

NUM_BLOCKS = 3000
NUM_SHARED, NUM_OWN, NUM_PREFIXES = 1024, 80, 24
NUM_PRODUCTS, WIDTH = 16, 1024


def make_cases(salt: str | None) -> dict[str, Case]:
    """Return the lookups, each of a prompt that was never looked up before."""
    manager, numbers = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), count()
    shared = random_tokens(NUM_SHARED, 0)
    weights, state = torch.randn(NUM_PRODUCTS, WIDTH, WIDTH), torch.randn(1, WIDTH)

    def fresh() -> Prompt:
        number = next(numbers)
        return Prompt(number, [*shared, *random_tokens(NUM_OWN, number + 1)], salt=salt)

    for _ in range(NUM_PREFIXES):
        prompt = fresh()
        manager.allocate_slots(prompt, hit=manager.get_computed_blocks(prompt))
        manager.free(prompt)
    blocks = manager.get_computed_blocks(fresh()).blocks

    def compute() -> Prompt:
        prompt, result = fresh(), state
        for matrix in weights:
            result = torch.tanh(result @ matrix)
        return prompt

    def compute_and(then: Callable[[], object]) -> Callable[[], Prompt]:
        def both() -> Prompt:
            prompt = compute()
            then()
            return prompt

        return both

    other = Prompt("other", random_tokens(NUM_OWN, 0), salt=salt)
    of = "" if salt is None else ", with a salt"
    prepared = {
        "in a loop": fresh,
        "after a pass": compute,
        "after a pass and another lookup": compute_and(lambda: manager.get_computed_blocks(other)),
        "after a pass and a look at the blocks": compute_and(lambda: [block.ref_cnt for block in blocks]),
    }
    return {name + of: Case(manager.get_computed_blocks, 1, prepare) for name, prepare in prepared.items()}


def run(num_rounds: int, num_samples: int) -> list[dict[str, object]]:
    """Measure everything, and return a row for each case."""
    torch.set_num_threads(1)
    cases = make_cases(None) | make_cases("tenant")
    spreads = measure(cases, num_rounds, num_samples)
    with _Busy():
        name = "after a pass, another thread beside"
        spreads |= measure({name: cases["after a pass"]}, num_rounds, num_samples)
    return [
        {"item": name, "unit": "us/lookup", **{key: round(value / 1000, 1) for key, value in numbers.items()}}
        for name, numbers in (
            (name, {"min": spread.low, "median": spread.median, "max": spread.high}) for name, spread in spreads.items()
        )
    ]


class _Busy:
    """A context in which another thread runs Python code, and rests in between."""

    def __enter__(self) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ends.wait(0.0002):
            [str(number) for number in range(200)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        prog="bench.cold_lookup", description="Lookups in a loop, and after a model's forward pass."
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: only checks that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    facts = conditions(num_blocks=NUM_BLOCKS, num_tokens=NUM_SHARED + NUM_OWN, num_prefixes=NUM_PREFIXES)
    print_conditions(facts)
    rows = run(1, 2) if given.quick else run(12, 10)
    print(f"{'item':<52}{'min':>10}{'median':>10}{'max':>10}  us a lookup")
    for row in rows:
        print(f"{row['item']:<52}{row['min']:>10}{row['median']:>10}{row['max']:>10}")
    keep(given.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
