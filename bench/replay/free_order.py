"""Compares orders of reuse: empty blocks first or all blocks by last use, and one copy of a prefix or all copies.

    python -m bench.replay.free_order [--blocks 320] [--families 24] [--requests N] [--at-once 8] [--seeds N …]
                                      [--json FILE]

Requests come one after another. Those of a family share a prompt of 8 to 24 blocks, and each adds a tail of less than a
block, which is computed, freed and never cached. Two managers of the same size get the same requests. One is kvblocks
as it is: like vLLM, it first takes blocks that hold nothing. The pool of the other one queues all freed blocks by last
use, so every tail evicts a cached block. The hit rate is the share of prompt tokens that needed no computing.

Then each request comes several times at once, and all are looked up before any begins. So what isn't cached is computed
as often as that. One manager is kvblocks as it is: of equal blocks at most one is free. The other one keeps all copies
until they are evicted, as vLLM does.

What it does not show: time, different requests side by side, prompts that fill their blocks (the first two orders are
alike there), and a pool that holds all families (then there is nothing to evict).
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
COPIES = ("one copy", "all copies")


@dataclass(frozen=True)
class Outcome:
    """The results of all requests. computed_tokens: tokens of prompts that were not hit."""

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
    pool.release_table = lambda blocks, *_: pool.queue.release(blocks[::-1])


def keep_copies(manager: KVCacheManager) -> None:
    """Make a manager keep duplicates cached, in their order, when they are released. Works in the plain build only."""
    index: Any = manager._pool.index  # noqa: SLF001
    index.drop_duplicate = lambda _: None


def run(seed: int, order: str, num_blocks: int, requests: list[list[int]], at_once: int = 1) -> Outcome:
    """Serve the requests, one after another, each `at_once` times. seed: the one that they were made from."""
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    if order == ORDERS[1]:
        queue_by_use(manager)
    elif order == COPIES[1]:
        keep_copies(manager)
    for number, tokens in enumerate(requests):
        sequences = [Sequence((number, copy), tokens) for copy in range(at_once)]
        hits = [manager.get_computed_blocks(sequence) for sequence in sequences]
        for sequence, hit in zip(sequences, hits, strict=True):
            manager.allocate_slots(sequence, hit=hit)
        for sequence in sequences:
            manager.free(sequence)
    stats = manager.stats
    num_tokens = stats.num_queried_tokens
    computed = num_tokens - stats.num_hit_tokens
    return Outcome(seed, order, stats.num_hit_tokens / num_tokens, num_tokens, computed, stats.num_evicted_blocks)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.replay.free_order", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=320)
    parser.add_argument("--families", type=int, default=24)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=8, help="how often each request comes in the second comparison")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    facts = conditions(num_blocks=given.blocks, families=given.families, requests=given.requests, at_once=given.at_once)
    del facts["collector"]
    print_conditions(facts)
    print(f"\n{'seed':>6}  {'order':18}{'hit rate':>10}{'computed tokens':>17}{'evicted blocks':>16}")
    outcomes: list[Outcome] = []
    for orders, at_once in ((ORDERS, 1), (COPIES, given.at_once)):
        ratios: list[float] = []
        for seed in given.seeds:
            requests = make_requests(given.families, given.requests, seed)
            pair = [run(seed, order, given.blocks, requests, at_once) for order in orders]
            for outcome in pair:
                print(
                    f"{seed:6}  {outcome.order:18}{outcome.hit_rate:10.3f}{outcome.computed_tokens:17,}"
                    f"{outcome.evicted_blocks:16,}"
                )
            ratios.append(pair[1].computed_tokens / pair[0].computed_tokens)
            outcomes += pair
        print(
            f"{orders[1]} computes {min(ratios):.2f} / {median(ratios):.2f} / {max(ratios):.2f} times as many tokens"
            " (least, median, most of the seeds)"
        )
    keep(given.json, facts, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
