"""Compares two orders of reuse: empty blocks first, or all blocks by last use. Shows hit rates of one workload.

    python -m bench.replay.free_order [--blocks 320] [--families 24] [--requests N] [--seeds N …] [--json FILE]

Requests come one after another. Those of a family share a prompt of 8 to 24 blocks, and each adds a tail of less than a
block, which is computed, freed and never cached. Two managers of the same size get the same requests. One is kvblocks
as it is: like vLLM, it first takes blocks that hold nothing. The pool of the other one queues all freed blocks by last
use, so every tail evicts a cached block. The hit rate is the share of prompt tokens that needed no computing.

What it does not show: time, requests side by side, prompts that fill their blocks (both orders are alike there), and a
pool that holds all families (then there is nothing to evict).
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from kvblocks import KVCacheManager, Sequence

BLOCK_SIZE = 16
MIN_SHARED_BLOCKS, MAX_SHARED_BLOCKS = 8, 24
ORDERS = ("empty first", "all by last use")


@dataclass(frozen=True)
class Outcome:
    """What came of the requests. computed_tokens: tokens of prompts that were not hit."""

    seed: int
    order: str
    hit_rate: float
    prompt_tokens: int
    computed_tokens: int
    evicted_blocks: int


def make_requests(num_families: int, num_requests: int, seed: int) -> list[list[int]]:
    """Return prompts: a family's tokens and a tail of 1 to BLOCK_SIZE - 1 of its own."""
    random = Random(seed)
    families = [
        random.choices(range(1, 2**31), k=BLOCK_SIZE * random.randint(MIN_SHARED_BLOCKS, MAX_SHARED_BLOCKS))
        for _ in range(num_families)
    ]
    return [
        random.choice(families) + random.choices(range(1, 2**31), k=random.randint(1, BLOCK_SIZE - 1))
        for _ in range(num_requests)
    ]


def queue_by_use(manager: KVCacheManager) -> None:
    """Make a manager's pool queue all freed blocks by last use. Works in the plain build only."""
    pool: Any = manager._pool  # noqa: SLF001
    pool.release_table = lambda blocks, _=0: pool.queue.release(blocks[::-1])


def run(seed: int, order: str, num_blocks: int, requests: list[list[int]]) -> Outcome:
    """Serve the requests, one after another. seed: the one that they were made from."""
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    if order != ORDERS[0]:
        queue_by_use(manager)
    for number, tokens in enumerate(requests):
        sequence = Sequence(number, tokens)
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        manager.free(sequence)
    stats = manager.stats
    num_tokens = stats.num_queried_tokens
    computed = num_tokens - stats.num_hit_tokens
    return Outcome(seed, order, stats.num_hit_tokens / num_tokens, num_tokens, computed, stats.num_evicted_blocks)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=320)
    parser.add_argument("--families", type=int, default=24)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    facts = conditions(num_blocks=given.blocks, families=given.families, requests=given.requests)
    del facts["collector"]
    print_conditions(facts)
    print(f"\n{'seed':>6}  {'order':18}{'hit rate':>10}{'computed tokens':>17}{'evicted blocks':>16}")
    outcomes: list[Outcome] = []
    ratios: list[float] = []
    for seed in given.seeds:
        requests = make_requests(given.families, given.requests, seed)
        pair = [run(seed, order, given.blocks, requests) for order in ORDERS]
        for outcome in pair:
            print(
                f"{seed:6}  {outcome.order:18}{outcome.hit_rate:10.3f}{outcome.computed_tokens:17,}"
                f"{outcome.evicted_blocks:16,}"
            )
        ratios.append(pair[1].computed_tokens / pair[0].computed_tokens)
        outcomes += pair
    print(
        f"by last use computes {min(ratios):.2f} / {median(ratios):.2f} / {max(ratios):.2f} times as many tokens"
        " (least, median, most of the seeds)"
    )
    keep(given.json, facts, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
