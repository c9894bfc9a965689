"""What `bench.mlx` times: calls of mlx-lm's prompt cache, and of ours."""

import copy
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

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
