"""The cost of metrics on a manager's hot path: without metrics, with a sample of one block in 64, and with all blocks.

    python -m bench.core.metrics_cost [--json] [--quick]

All three are timed in turn in one process (see `bench.timing`). "allocate" and "free" are of sequences of 16 blocks
that miss a full cache, so that every block evicts another; "append" is decoding by a call for each token.

Not shown: the cost of the engine around it, compared with which all of this is small.
"""

import argparse
import json

from bench.conditions import conditions, print_conditions
from bench.core.micro import NUM_DECODED, NUM_SEQUENCES, decode_cases, to_row
from bench.core.ours import fill_manager, free_all, start
from bench.core.workload import BLOCK_SIZE, FILLER_BLOCKS, FreshPrompts
from bench.timing import Case, measure
from kvblocks import KVCacheManager, Sequence
from kvblocks.observe.metrics import CacheMetrics

SAMPLES = {"without": 0, "one in 64": 64, "all": 1}  # blocks a sampled one
CALL_BLOCKS = 16


def manager_cases(manager: KVCacheManager) -> dict[str, Case]:
    """Return allocating and freeing, per block, and appending, per token."""
    fresh = FreshPrompts()

    def make() -> list[Sequence]:
        return [Sequence(number, fresh.make(CALL_BLOCKS * BLOCK_SIZE)) for number in range(NUM_SEQUENCES)]

    def allocate(sequences: list[Sequence]) -> list[Sequence]:
        for sequence in sequences:
            manager.allocate_slots(sequence)
        return sequences

    num_blocks = NUM_SEQUENCES * CALL_BLOCKS
    return {
        "allocate": Case(allocate, num_blocks, make, free_all(manager)),
        "free": Case(free_all(manager), num_blocks, lambda: allocate(make())),
        "append": decode_cases(manager)["append, a call a token"],
    }


def metrics_cases(metrics: CacheMetrics, manager: KVCacheManager) -> dict[str, Case]:
    """Return the calls of metrics themselves, per call."""
    fresh = FreshPrompts()

    def request(_: None = None) -> None:
        manager.free(start(manager, fresh.make(BLOCK_SIZE)))

    return {
        "observe, after a request": Case(lambda _: metrics.observe(), 1, prepare=request),
        "snapshot": Case(lambda _: metrics.snapshot(), 1, prepare=request),
    }


def measure_cost(num_blocks: int, num_rounds: int, num_samples: int) -> list[dict[str, object]]:
    """Return a row for each item and each way of watching."""
    managers = {name: KVCacheManager(num_blocks, BLOCK_SIZE) for name in SAMPLES}
    watched = {name: CacheMetrics(managers[name], sample_every=every) for name, every in SAMPLES.items() if every}
    for manager in managers.values():
        fill_manager(manager, FILLER_BLOCKS)
    made = {name: manager_cases(manager) for name, manager in managers.items()}
    rows = []
    for item in made["without"]:
        spreads = measure({name: cases[item] for name, cases in made.items()}, num_rounds, num_samples)
        unit = "ns/token" if item == "append" else "ns/block"
        rows += [to_row(item, spread, unit, 1) | {"sample": name} for name, spread in spreads.items()]
    for name, metrics in watched.items():
        spreads = measure(metrics_cases(metrics, managers[name]), num_rounds, 10 * num_samples)
        rows += [to_row(item, spread, "us/call", 1000) | {"sample": name} for item, spread in spreads.items()]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.core.metrics_cost", description="What watching a manager costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller pool: a few seconds, noisy")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    given = parser.parse_args(arguments)
    num_blocks, num_rounds, num_samples = (10_000, 2, 2) if given.quick else (100_000, 15, 5)
    facts = conditions(num_blocks=num_blocks, num_rounds=num_rounds, num_samples=num_samples, num_decoded=NUM_DECODED)
    print_conditions(facts, quiet=given.json)
    rows = measure_cost(num_blocks, num_rounds, num_samples)
    if given.json:
        print(json.dumps({"conditions": facts, "results": rows}, indent=1))
        return
    print(f"{'item':<26}{'sample':<12}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}")
    for row in rows:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}"
        print(f"{row['item']:<26}{row['sample']:<12}{row['unit']:<10}{numbers}")


if __name__ == "__main__":
    main()
