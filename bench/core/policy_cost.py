"""The cost of an eviction policy when blocks are allocated, freed and hit: no policy, built-in ones, and a user's.

    python -m bench.core.policy_cost [--json] [--quick]

All are timed in turn in one process (see `bench.timing`). "allocate" and "free" are of sequences of 16 blocks that miss
a full cache, so that every block evicts another. "hit" allocates and frees sequences of 16 blocks that are all cached.
"long hit" is the same with 64 blocks. "users" is plain Python in both builds, like a user's policy. In "sessions", each
sequence has one of 64 sessions, and the clock moves with each sample. "sessions, none told" has no sessions.

Not shown: the benefit of a policy, which is a matter of hit rates, and the cost of the engine around it.
"""

import argparse
import json
from collections import OrderedDict
from typing import Any

from bench.conditions import conditions, print_conditions
from bench.core.micro import NUM_SEQUENCES, to_row
from bench.core.ours import fill_manager, free_all, start
from bench.core.workload import BLOCK_SIZE, FILLER_BLOCKS, FreshPrompts, filler
from bench.timing import Case, measure
from kvblocks import CacheView, FreeBlock, KVCacheManager, Sequence
from kvblocks.retention.policies import NAMED

CALL_BLOCKS = 16


class UsersPolicy:
    """Evicts blocks that have been hit last. It stands for a user's policy in plain Python."""

    def __init__(self, cache: CacheView) -> None:  # noqa: ARG002
        self.others: OrderedDict[int, None] = OrderedDict()
        self.hit: OrderedDict[int, None] = OrderedDict()

    def free(self, blocks: list[FreeBlock]) -> None:
        """Put them into their order."""
        for block in blocks:
            (self.hit if block.num_hits else self.others)[block.block_id] = None

    def use(self, block_ids: list[int]) -> None:
        """Take them out."""
        for block_id in block_ids:
            self.others.pop(block_id, None)
            self.hit.pop(block_id, None)

    remove = use

    def victim(self, num_blocks: int) -> int | None:  # noqa: ARG002
        """Name the first."""
        return next(iter(self.others or self.hit), None)


POLICIES: dict[str, Any] = {
    "none": None,
    **{name: name for name in NAMED},
    "sessions, none told": "sessions",
    "users": UsersPolicy,
}
NUM_SESSIONS = 64


def policy_cases(manager: KVCacheManager, *, has_sessions: bool) -> dict[str, Case]:
    """Return allocating, freeing and hitting, per block. has_sessions: whether sequences belong to sessions."""
    fresh = FreshPrompts()

    def make() -> list[Sequence]:
        manager.now += has_sessions
        return [
            Sequence(
                number,
                fresh.make(CALL_BLOCKS * BLOCK_SIZE),
                session=number % NUM_SESSIONS if has_sessions else None,
            )
            for number in range(NUM_SEQUENCES)
        ]

    def allocate(sequences: list[Sequence]) -> list[Sequence]:
        for sequence in sequences:
            manager.allocate_slots(sequence)
        return sequences

    def hit(num_blocks: int) -> Case:
        num_prompts = NUM_SEQUENCES * CALL_BLOCKS // num_blocks  # as many blocks each time
        prompts = [filler(10_000_000 // num_blocks + number, num_blocks) for number in range(num_prompts)]

        def run(_: None) -> None:
            for prompt in prompts:
                manager.free(start(manager, prompt))

        return Case(run, num_prompts * num_blocks, prepare=lambda: run(None))

    num_blocks = NUM_SEQUENCES * CALL_BLOCKS
    return {
        "allocate": Case(allocate, num_blocks, make, free_all(manager)),
        "free": Case(free_all(manager), num_blocks, lambda: allocate(make())),
        "hit": hit(CALL_BLOCKS),
        "long hit": hit(4 * CALL_BLOCKS),
    }


def measure_cost(num_blocks: int, num_rounds: int, num_samples: int) -> list[dict[str, object]]:
    """Return a row for each item and each policy."""
    made = {}
    for name, policy in POLICIES.items():
        manager = KVCacheManager(num_blocks, BLOCK_SIZE, eviction=policy)
        fill_manager(manager, FILLER_BLOCKS)
        made[name] = policy_cases(manager, has_sessions=name == "sessions")
    rows: list[dict[str, object]] = []
    for item in made["none"]:
        spreads = measure({name: cases[item] for name, cases in made.items()}, num_rounds, num_samples)
        rows += [to_row(item, spread, "ns/block", 1) | {"policy": name} for name, spread in spreads.items()]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.core.policy_cost", description="What an eviction policy costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller pool: a few seconds, noisy")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    given = parser.parse_args(arguments)
    num_blocks, num_rounds, num_samples = (16_384, 2, 2) if given.quick else (65_536, 15, 3)
    facts = conditions(num_blocks=num_blocks, num_rounds=num_rounds, num_samples=num_samples)
    print_conditions(facts, quiet=given.json)
    rows = measure_cost(num_blocks, num_rounds, num_samples)
    if given.json:
        print(json.dumps({"conditions": facts, "results": rows}, indent=1))
        return
    print(f"{'item':<12}{'policy':<12}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}")
    for row in rows:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}"
        print(f"{row['item']:<12}{row['policy']:<12}{row['unit']:<10}{numbers}")


if __name__ == "__main__":
    main()
