"""Compares search, insertion and hit of mlx-lm's prompt cache and ours.

    .venv-mlx/bin/python -m bench.mlx [--tokens 1000 10000 100000] [--rounds N] [--json FILE]

A cache holds one prompt of N tokens of random KV: 4 layers, 2 KV heads of 64, float16, 2 KB a token.

- search: an unknown prompt of N tokens, and one that was edited at 90 %. mlx-lm's search for the edited one looks at
  every token after the edit. A hit's copy doesn't count here, since its arrays are not computed.
- hit: the prompt and one more token, whose KV is written, which is when mlx-lm's copy is made.
- insert: 512 tokens after the prompt, as added by a turn of a chat.

The contestants take turns; the minimum, median and maximum of the rounds are printed. What it doesn't show: a GPU, a
model, and a large model's KV.
"""

import argparse
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

from bench.conditions import conditions, keep, print_conditions
from bench.timing import Case, Spread
from kvblocks.integrations.mlx_lm import BlockPromptCache

LAYERS, HEADS, SIZE, TURN = 4, 2, 64, 512
MAKERS: dict[str, Callable[[], Any]] = {"mlx-lm": LRUPromptCache, "kvblocks": BlockPromptCache}


def make_kv(number: int) -> list[Any]:
    """Return a prompt cache of random KV."""
    caches = [KVCache() for _ in range(LAYERS)]
    for cache in caches:
        cache.update_and_fetch(*[mx.random.normal((1, HEADS, number, SIZE)).astype(mx.float16) for _ in range(2)])
    mx.eval([cache.state for cache in caches])
    return caches


def go_on(found: tuple[Any, list[int]]) -> None:
    """Write the KV of one token after what was found."""
    row = mx.zeros((1, HEADS, 1, SIZE), mx.float16)
    mx.eval([cache.update_and_fetch(row, row) for cache in found[0]])


def cases(maker: Callable[[], Any], tokens: list[int], kv: list[Any], longer: list[Any]) -> dict[str, Case]:
    """Return what is timed, by name; each of them leaves the cache as it was."""
    filled = maker()
    filled.insert_cache("model", tokens, copy.deepcopy(kv))
    edited = [*tokens[: len(tokens) * 9 // 10], 1, *tokens[len(tokens) * 9 // 10 + 1 :]]
    unknown = [2, *tokens[1:]]
    turn = [*tokens, *range(3, 3 + TURN)]

    def prepare() -> Any:
        cache = maker()
        cache.insert_cache("model", tokens, copy.deepcopy(kv))
        return cache, copy.deepcopy(longer)

    def insert(prepared: Any) -> None:
        prepared[0].insert_cache("model", list(turn), prepared[1])

    return {
        "search, unknown": Case(lambda _: filled.fetch_nearest_cache("model", unknown), 1),
        "search, edited": Case(lambda _: filled.fetch_nearest_cache("model", edited), 1),
        "hit": Case(lambda _: go_on(filled.fetch_nearest_cache("model", [*tokens, 3])), 1),
        "insert 512": Case(insert, 1, prepare),
    }


def measure(number: int, rounds: int) -> dict[str, dict[str, Spread]]:
    """Return the nanoseconds of each case, by contestant."""
    source = random.Random(0)
    tokens = [source.randrange(10, 2**17) for _ in range(number)]
    kv, longer = make_kv(number), make_kv(number + TURN)
    both = {name: cases(maker, tokens, kv, longer) for name, maker in MAKERS.items()}
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, named in both.items():
            for case, one in named.items():
                samples.setdefault(case, {}).setdefault(name, []).append(one.time_once())
    return {case: {name: Spread(found) for name, found in of.items()} for case, of in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.mlx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    facts = conditions(mlx=mx.__version__, rounds=given.rounds, kv_bytes_a_token=LAYERS * HEADS * SIZE * 2 * 2)
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "block_size", "collector")}
    print_conditions(facts)
    print(f"{'tokens':>8} {'ms':<16} {'mlx-lm: min median max':>28} {'kvblocks':>28} {'ratio':>7}")
    rows = []
    for number in given.tokens:
        for case, found in measure(number, given.rounds).items():
            spreads = {
                name: [round(value / 1e6, 3) for value in (one.low, one.median, one.high)]
                for name, one in found.items()
            }
            ratio = found["mlx-lm"].low / found["kvblocks"].low
            shown = ["{:9.2f} {:9.2f} {:9.2f}".format(*spreads[name]) for name in MAKERS]
            print(f"{number:>8} {case:<16} {shown[0]:>28} {shown[1]:>28} {ratio:7.2f}", flush=True)
            rows.append({"tokens": number, "case": case, "ms": spreads, "ratio": round(ratio, 3)})
    if given.json is not None:
        keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
