"""How fast kvblocks is on your machine. Needs no peer.

    python -m bench.core.micro [--quick] [--json] [--blocks N]

Bias: calls run in a tight loop over few sequences, so caches and branch predictors are warmer than in an engine, and
lookups ask for the same prompt again and again. Not shown: the engine around it, threads, pauses of the garbage
collector (which is off while timing), and a machine whose other work takes the memory bandwidth.
"""

import argparse
import json
from array import array
from itertools import chain

from bench.conditions import conditions, print_conditions
from bench.core.ours import Blocks, cache_blocks, decode_one_by_one, fill_manager, free_all, make_pool, start
from bench.core.workload import BLOCK_SIZE, FILLER_BLOCKS, FreshPrompts, calls_for, prompt, random_tokens
from bench.timing import Case, Spread, measure
from kvblocks import BlockPool, KVCacheManager, Sequence
from kvblocks.core.tokens import TokenIds

CALL_BLOCKS = 16
SAMPLE_BLOCKS = 4096
TOUCHED_BLOCKS = 64
NUM_SEQUENCES, NUM_DECODED = 64, 64


def _take(pool: BlockPool) -> list[Blocks]:
    return [pool.take(CALL_BLOCKS) for _ in range(SAMPLE_BLOCKS // CALL_BLOCKS)]


def pool_cases(num_blocks: int, prefix_blocks: int) -> dict[str, Case]:
    """Return a pool's calls, per block. Evictions are from a pool full of prefixes of `prefix_blocks` blocks."""
    empty, full = make_pool(num_blocks), make_pool(num_blocks)
    cache_blocks(full, full.take(num_blocks), 0, prefix_blocks)
    touched = empty.take(TOUCHED_BLOCKS)
    empty.release_table(touched, TOUCHED_BLOCKS)
    num_fillers = num_blocks

    def release(parts: list[Blocks]) -> None:
        for part in reversed(parts):
            empty.release_table(part, len(part))

    def cache_again(parts: list[Blocks]) -> None:
        nonlocal num_fillers
        cache_blocks(full, list(chain.from_iterable(parts)), num_fillers, prefix_blocks)
        num_fillers += SAMPLE_BLOCKS

    def touch(_: None) -> None:
        empty.touch(touched)

    return {
        "allocate": Case(lambda _: _take(empty), SAMPLE_BLOCKS, tidy=release),
        "free": Case(release, SAMPLE_BLOCKS, prepare=lambda: _take(empty)),
        "evict": Case(lambda _: _take(full), SAMPLE_BLOCKS, tidy=cache_again),
        "touch": Case(touch, TOUCHED_BLOCKS, tidy=lambda _: empty.release_table(touched, TOUCHED_BLOCKS)),
    }


def match_case(manager: KVCacheManager, num_tokens: int, *, as_list: bool = False) -> Case:
    """Return the lookup of a completely cached prompt, with a new Sequence each time; per call."""
    manager.free(start(manager, prompt(num_tokens)))
    token_ids: TokenIds = prompt(num_tokens) if as_list else array("I", prompt(num_tokens))
    assert manager.get_computed_blocks(Sequence("probe", token_ids)).num_tokens == num_tokens
    num_calls = calls_for(num_tokens)

    def run(_: None) -> None:
        for _call in range(num_calls):
            manager.get_computed_blocks(Sequence("probe", token_ids))

    return Case(run, num_calls)


def decode_cases(manager: KVCacheManager) -> dict[str, Case]:
    """Return decoding by `append_slots` for each token and by `append_step`; per token."""
    fresh = FreshPrompts()
    step = random_tokens(NUM_SEQUENCES, seed=0)

    def prepare() -> list[Sequence]:
        return [start(manager, fresh.make(BLOCK_SIZE + number % BLOCK_SIZE)) for number in range(NUM_SEQUENCES)]

    def singly(sequences: list[Sequence]) -> list[Sequence]:
        decode_one_by_one(manager, sequences, step)
        return sequences

    def together(sequences: list[Sequence]) -> list[Sequence]:
        for _ in range(NUM_DECODED):
            manager.append_step(sequences, step)
        return sequences

    num_tokens = NUM_SEQUENCES * NUM_DECODED
    return {
        "append, a call a token": Case(singly, num_tokens, prepare, free_all(manager)),
        "append, a call a step": Case(together, num_tokens, prepare, free_all(manager)),
    }


def make_cases(num_blocks: int, prefix_blocks: int = FILLER_BLOCKS) -> dict[str, tuple[Case, str, int]]:
    """Return all cases with their units: the unit's name, and its nanoseconds."""
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    fill_manager(manager, prefix_blocks)
    blocks = {name: (case, "ns/block", 1) for name, case in pool_cases(num_blocks, prefix_blocks).items()}
    matches = {
        "match 1k tokens in a buffer": match_case(manager, 1024),
        "match 1k tokens in a list": match_case(manager, 1024, as_list=True),
        "match 32k tokens in a buffer": match_case(manager, 32_768),
    }
    tokens = {name: (case, "ns/token", 1) for name, case in decode_cases(manager).items()}
    return blocks | {name: (case, "us/call", 1000) for name, case in matches.items()} | tokens


def to_row(name: str, spread: Spread, unit: str, ns_per_unit: int) -> dict[str, object]:
    """Return one result as it is printed and kept."""
    return {
        "item": name,
        "unit": unit,
        "min": round(spread.low / ns_per_unit, 3),
        "median": round(spread.median / ns_per_unit, 3),
        "max": round(spread.high / ns_per_unit, 3),
        "units_per_second": round(1e9 / spread.low),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.core.micro", description="Times kvblocks on this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller pool: a few seconds, noisy")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--blocks", type=int, help="size of the pool (default 100000; 10000 with --quick)")
    given = parser.parse_args(arguments)
    num_blocks = given.blocks or (10_000 if given.quick else 100_000)
    num_rounds, num_samples = (2, 2) if given.quick else (15, 5)
    facts = conditions(num_blocks=num_blocks, num_rounds=num_rounds, num_samples=num_samples)
    print_conditions(facts, quiet=given.json)
    cases = make_cases(num_blocks)
    spreads = measure({name: case for name, (case, _, _) in cases.items()}, num_rounds, num_samples)
    rows = [to_row(name, spreads[name], unit, scale) for name, (_, unit, scale) in cases.items()]
    if given.json:
        print(json.dumps({"conditions": facts, "results": rows}, indent=1))
        return
    print(f"{'item':<32}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}{'units/s':>14}")
    for row in rows:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}{row['units_per_second']:>14,}"
        print(f"{row['item']:<32}{row['unit']:<10}{numbers}")


if __name__ == "__main__":
    main()
