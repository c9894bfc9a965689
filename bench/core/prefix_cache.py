"""How fast `PrefixCache` is on your machine, compared with its targets. Only "page 1" can have a peer.

    python -m bench.core.prefix_cache [--quick] [--json FILE]

Prompts have 1,060 tokens: 66 blocks of 16, and 4 tokens more. Those of "page 1" have 800 blocks of one token:
`bench.core.page_one` describes them and their peer. Bias: calls run in a tight loop on one thread, so caches and branch
predictors are warmer than in an engine. This matters most for one prompt that is matched again and again, so 64 prompts
in turn are timed, too. Not shown: threads that wait for the lock, prompts that share only parts, pauses of the garbage
collector (which is off while timing), and a machine whose other work takes the memory bandwidth.
Memory is what Python allocates for 1,000 blocks without payloads.
"""

import argparse
import gc
import sys
import tracemalloc
from array import array
from collections import deque
from collections.abc import Sequence as Items
from pathlib import Path

from bench.conditions import UNJUDGED, conditions, keep, print_conditions
from bench.core.page_one import page_cases, ratios
from bench.core.workload import BLOCK_SIZE, FILLER_BLOCKS, FreshPrompts, filler, random_tokens
from bench.timing import Case, Spread, measure
from kvblocks import PrefixCache
from kvblocks.core.tokens import TokenIds

PROMPT_TOKENS = 1060
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
NUM_PROMPTS = 64
CALLS = 64
INSERTIONS = 16
EVICTED_BLOCKS = 10
MEMORY_BLOCKS = 1000
Row = dict[str, object]
Kept = list[tuple[TokenIds, list[int]]]


def match_cases(*, in_list: bool) -> dict[str, Case]:
    """Return lookups of completely cached prompts; per call."""
    kind = "list" if in_list else "buffer"
    cache = PrefixCache(NUM_PROMPTS * PROMPT_BLOCKS, BLOCK_SIZE)
    prompts: list[TokenIds] = [random_tokens(PROMPT_TOKENS, seed) for seed in range(NUM_PROMPTS)]
    if not in_list:
        prompts = [array("I", prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        cache.insert_prefix(prompt, range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))
    again = prompts[:1] * NUM_PROMPTS
    assert cache.match_prefix(again[0]).match_length == PROMPT_BLOCKS * BLOCK_SIZE

    def match(chosen: Items[TokenIds]) -> None:
        for prompt in chosen:
            cache.match_prefix(prompt)

    def hold(chosen: Items[TokenIds]) -> None:
        for prompt in chosen:
            with cache.match_prefix(prompt):
                pass

    return {
        f"match a {kind}": Case(match, NUM_PROMPTS, prepare=lambda: again),
        f"match a {kind}, 64 in turn": Case(match, NUM_PROMPTS, prepare=lambda: prompts),
        f"match a {kind} and hold it": Case(hold, NUM_PROMPTS, prepare=lambda: prompts),
    }


def insert_cases(num_blocks: int) -> dict[str, Case]:
    """Return insertions of new prompts, 66 new blocks each; per call."""
    fresh = FreshPrompts()
    roomy, full = PrefixCache(num_blocks, BLOCK_SIZE), PrefixCache(num_blocks, BLOCK_SIZE)
    free = deque(fill(full, num_blocks, 0))
    free.extend(range(num_blocks, num_blocks + INSERTIONS * PROMPT_BLOCKS))

    def prompts() -> list[list[int]]:
        return [fresh.make(PROMPT_TOKENS) for _ in range(INSERTIONS)]

    def with_ids(made: Items[TokenIds]) -> Kept:
        return [(prompt, [free.popleft() for _ in range(PROMPT_BLOCKS)]) for prompt in made]

    def insert_into(cache: PrefixCache, kept: Kept) -> None:
        for prompt, ids in kept:
            free.extend(cache.insert_prefix(prompt, ids).evicted_kv_blocks)

    def empty(_: object) -> None:
        free.extend(roomy.clear())

    def into_new(kept: Kept) -> PrefixCache:
        new = PrefixCache(num_blocks, BLOCK_SIZE)
        insert_into(new, kept)
        return new

    def insert_buffers() -> Kept:
        return with_ids([array("I", prompt) for prompt in prompts()])

    return {
        "insert a list": Case(lambda kept: insert_into(roomy, kept), INSERTIONS, lambda: with_ids(prompts()), empty),
        "insert a buffer": Case(lambda kept: insert_into(roomy, kept), INSERTIONS, insert_buffers, empty),
        "insert a list, evicting as much": Case(
            lambda kept: insert_into(full, kept), INSERTIONS, lambda: with_ids(prompts())
        ),
        "insert a list into a new cache": Case(
            into_new, INSERTIONS, lambda: with_ids(prompts()), lambda new: free.extend(new.clear())
        ),
    }


def fill(cache: PrefixCache, num_blocks: int, first: int) -> list[int]:
    """Insert fillers from `first` on, as many as fit into `num_blocks` ids. Returns the remaining ids."""
    num_fillers = num_blocks // FILLER_BLOCKS
    for number in range(num_fillers):
        ids = range(number * FILLER_BLOCKS, (number + 1) * FILLER_BLOCKS)
        cache.insert_prefix(filler(first + number), ids)
    return list(range(num_fillers * FILLER_BLOCKS, num_blocks))


def evict_case(num_blocks: int) -> Case:
    """Return the eviction of 10 blocks from a cache full of prompts of 64 blocks; per call."""
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    fill(cache, num_blocks, 0)
    num_made = num_blocks
    evict_blocks = getattr(cache, "evict" if hasattr(cache, "evict") else "evict_lru")  # as 0.2.0 calls it, for versus

    def evict(_: object) -> list[list[int]]:
        return [evict_blocks(EVICTED_BLOCKS) for _ in range(CALLS)]

    def insert_again(evicted: list[list[int]]) -> None:
        nonlocal num_made
        ids = [kv_block_id for part in evicted for kv_block_id in part]
        for start in range(0, len(ids), FILLER_BLOCKS):
            num_made += 1
            cache.insert_prefix(filler(num_made), ids[start : start + FILLER_BLOCKS])

    return Case(evict, CALLS, tidy=insert_again)


def measure_memory() -> float:
    """Return the bytes that a cache of 1,000 blocks takes, of prompts of 64 blocks."""
    gc.collect()
    tracemalloc.start()
    cache = PrefixCache(MEMORY_BLOCKS, BLOCK_SIZE)
    for first in range(0, MEMORY_BLOCKS, FILLER_BLOCKS):
        ids = list(range(first, min(first + FILLER_BLOCKS, MEMORY_BLOCKS)))
        cache.insert_prefix(filler(first, len(ids)), ids)
        del ids
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.cached_block_count() == MEMORY_BLOCKS
    return float(num_bytes)


def to_row(name: str, spread: Spread, unit: str, units: float, target: float | None) -> Row:
    """Return one result as it is printed and kept. The median decides whether a target is met."""
    numbers = {"min": spread.low / units, "median": spread.median / units, "max": spread.high / units}
    rounded: Row = {"item": name, "unit": unit, **{key: round(value, 3) for key, value in numbers.items()}}
    return rounded | {"target": target, "is_met": None if target is None else numbers["median"] < target}


def run(num_blocks: int, num_rounds: int, num_samples: int) -> list[Row]:
    """Measure everything."""
    cases: dict[str, tuple[Case, float | None]] = {}
    for in_list in (False, True):
        for name, case in match_cases(in_list=in_list).items():
            cases[name] = case, None if "hold" in name else 10.0
    for name, case in insert_cases(num_blocks).items():
        cases[name] = case, 50.0
    cases[f"evict {EVICTED_BLOCKS} blocks"] = evict_case(num_blocks), 100.0
    cases |= {name: (case, None) for name, case in page_cases().items()}
    spreads = measure({name: case for name, (case, _) in cases.items()}, num_rounds, num_samples)
    rows = [to_row(name, spreads[name], "us/call", 1000, target) for name, (_, target) in cases.items()]
    memory = Spread([measure_memory() for _ in range(3)])
    return [*rows, to_row(f"memory of {MEMORY_BLOCKS} blocks", memory, "MB", 1e6, 2.0)]


def unjudged(rows: list[Row]) -> list[Row]:
    """Return the rows of a quick run, without targets, since its sizes and rounds say nothing about them."""
    return [row | {"target": None, "is_met": None} for row in rows]


def print_rows(rows: list[Row]) -> None:
    """Print the table, and what it doesn't show."""
    print(f"{'item':<48}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}{'target':>10}")
    for row in rows:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}"
        target = (
            "" if row["target"] is None else f"{'< ' + str(row['target']):>10}{'' if row['is_met'] else '   missed'}"
        )
        print(f"{row['item']:<48}{row['unit']:<10}{numbers}{target}")
    for what, ratio in ratios({str(row["item"]): float(str(row["min"])) for row in rows}).items():
        print(f"page 1, {what}: kvblocks takes {ratio:.1f} times as long as mini-sglang's tree")
    print(
        "\nTargets are for the median, ratios of minima. Not shown: threads that wait for the lock, prompts that share"
    )
    print(
        "only parts, the collector's pauses, and other work on the machine. A list of tokens is packed in every call, a"
    )
    print("buffer isn't.")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return the exit status: 1 if a target was missed. A quick run judges nothing."""
    parser = argparse.ArgumentParser(prog="bench.core.prefix_cache", description="Times PrefixCache on this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller cache: a few seconds, noisy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    num_blocks = 2048 if given.quick else 16_384
    num_rounds, num_samples = (2, 2) if given.quick else (15, 5)
    facts = conditions(num_blocks=num_blocks, num_tokens=PROMPT_TOKENS, num_rounds=num_rounds, num_samples=num_samples)
    print_conditions(facts)
    rows = run(num_blocks, num_rounds, num_samples)
    rows = unjudged(rows) if given.quick else rows
    print_rows(rows)
    if given.quick:
        print(UNJUDGED)
    keep(given.json, facts, rows)
    return int(any(row["is_met"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
