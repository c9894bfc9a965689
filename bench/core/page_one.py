"""Blocks of one token, as in engines with a radix tree: `PrefixCache`, and mini-sglang's tree if available.

Prompts have 800 tokens, and 64 prompts are cached. Ids are in random order, as an allocator's are after a while. Tokens
and ids are buffers for both: arrays for kvblocks, tensors for the tree. For the tree, set MINISGL_SRC (see
`bench.peers.mini_sglang`). The two differ: the tree keeps a node for each stretch of tokens, while kvblocks keeps a
block for each token, reports an id that is inserted again while it is in use, and is thread-safe.
"""

import os
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.core.workload import VOCABULARY
from bench.timing import Case
from kvblocks import PrefixCache

PAGE_TOKENS = 800
CACHED_TOKENS = 700
HALF_TOKENS = 400
PAGE_PROMPTS = 64
PAGE_CALLS = 8
TREE = "mini-sglang"
INSIDE = "kvblocks in mini-sglang"
Prompt = tuple[Any, Any]


@dataclass(frozen=True)
class Contestant:
    """A cache of pages of one token. `pack` turns a list into its buffer. Lookups read the ids; holds end at once."""

    pack: Callable[[list[int]], Any]
    insert: Callable[..., object]
    insert_and_hold: Callable[[Any, Any], object]
    match: Callable[[Any], object]
    match_and_hold: Callable[[Any], object]
    evict: Callable[[int], list[int]]


def ours() -> Contestant:
    """Return a new `PrefixCache`."""
    cache = PrefixCache(2**20, 1)

    def insert_and_hold(tokens: Any, ids: Any) -> None:
        with cache.insert_prefix(tokens, ids).match:
            pass

    def match_and_hold(tokens: Any) -> object:
        with cache.match_prefix(tokens) as match:
            return match.packed_kv_blocks

    def pack(numbers: list[int]) -> Any:
        return array("I", numbers)

    def match(tokens: Any) -> object:
        return cache.match_prefix(tokens).packed_kv_blocks

    return Contestant(pack, cache.insert_prefix, insert_and_hold, match, match_and_hold, cache.evict)


def contestants() -> dict[str, Callable[[], Contestant]]:
    """Return the contestants that are available: by name, a function that makes an empty cache."""
    found: dict[str, Callable[[], Contestant]] = {}
    if "MINISGL_SRC" in os.environ:
        from bench.peers.mini_sglang import make_ours, make_tree

        found |= {TREE: make_tree, INSIDE: make_ours}
    return found | {"kvblocks": ours}


class Pages:
    """One contestant, full of prompts, and the free ids. All contestants get the same work."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self._random = Random(8)
        ids = list(range(2 * PAGE_PROMPTS * PAGE_TOKENS))
        self._random.shuffle(ids)
        self._free = deque(ids)
        self.kept = self.fresh(PAGE_PROMPTS)
        self.insert(self.kept)

    def fresh(self, num_prompts: int = PAGE_CALLS) -> list[Prompt]:
        """Return new prompts, and ids for them."""
        made = [self._numbers() for _ in range(num_prompts)]
        return [(self.contestant.pack(tokens), self.contestant.pack(ids)) for tokens, ids in made]

    def half_cached(self) -> list[Prompt]:
        """Return prompts whose first 400 tokens are cached."""
        return self.extended(HALF_TOKENS)

    def extended(self, num_cached: int = CACHED_TOKENS) -> list[Prompt]:
        """Return prompts whose first `num_cached` tokens are cached."""
        made = []
        for _ in range(PAGE_CALLS):
            tokens, ids = self._numbers()
            pack = self.contestant.pack
            self.contestant.insert(pack(tokens[:num_cached]), pack(ids[:num_cached]))
            made.append((pack(tokens), pack(ids)))
        return made

    def insert(self, prompts: list[Prompt]) -> None:
        """Cache them."""
        for tokens, ids in prompts:
            self.contestant.insert(tokens, ids)

    def insert_and_hold(self, prompts: list[Prompt]) -> None:
        """Cache them; each is held and released as soon as it is cached."""
        for tokens, ids in prompts:
            self.contestant.insert_and_hold(tokens, ids)

    def match(self, prompts: list[Prompt]) -> None:
        """Look them up, and read their ids."""
        for tokens, _ in prompts:
            self.contestant.match(tokens)

    def match_and_hold(self, prompts: list[Prompt]) -> None:
        """Look them up, and read their ids while they are held."""
        for tokens, _ in prompts:
            self.contestant.match_and_hold(tokens)

    def evict(self, _: object) -> list[Any]:
        """Evict as many tokens as some prompts have. Returns their ids, by call."""
        return [self.contestant.evict(PAGE_TOKENS) for _ in range(PAGE_CALLS)]

    def make_room(self, _: object) -> None:
        """Evict as much as a sample of insertions has cached."""
        for evicted in self.evict(None):
            self._free.extend(map(int, evicted))  # a tensor's items are tensors

    def fill_again(self, parts: list[Any]) -> None:
        """Cache new prompts in place of those that were evicted."""
        for evicted in parts:
            self._free.extend(map(int, evicted))  # a tensor's items are tensors
        self.insert(self.fresh())

    def _numbers(self) -> tuple[list[int], list[int]]:
        tokens = self._random.choices(range(VOCABULARY), k=PAGE_TOKENS)
        return tokens, [self._free.popleft() for _ in range(PAGE_TOKENS)]


def page_cases() -> dict[str, Case]:
    """Return the cases of all contestants, per call. The part of a name before the colon says whose case it is."""
    cases: dict[str, Case] = {}
    for name, make in contestants().items():
        new, more, held, half, read, evicting = (Pages(make()) for _ in range(6))
        label = f"page 1, {name}:"
        cases |= {
            f"{label} insert 800 new": Case(new.insert, PAGE_CALLS, new.fresh, new.make_room),
            f"{label} insert 800, 700 cached": Case(more.insert, PAGE_CALLS, more.extended, more.make_room),
            f"{label} insert 800 new and hold": Case(held.insert_and_hold, PAGE_CALLS, held.fresh, held.make_room),
            f"{label} insert 800, 400 cached, and hold": Case(
                half.insert_and_hold, PAGE_CALLS, half.half_cached, half.make_room
            ),
            f"{label} match 800": Case(read.match, PAGE_PROMPTS, lambda pages=read: pages.kept),
            f"{label} match 800 and hold": Case(read.match_and_hold, PAGE_PROMPTS, lambda pages=read: pages.kept),
            f"{label} evict 800": Case(evicting.evict, PAGE_CALLS, tidy=evicting.fill_again),
        }
    return cases


def ratios(minima: dict[str, float]) -> dict[str, float]:
    """Return, for each item, kvblocks' time divided by the tree's; empty without the tree.

    Ratios are of minima, since other work on the machine can only make a sample longer.
    """
    found = {}
    for item, least in minima.items():
        label, _, what = item.partition(": ")
        tree = minima.get(f"page 1, {TREE}: {what}")
        if label in ("page 1, kvblocks", f"page 1, {INSIDE}") and tree is not None:
            found[what if label == "page 1, kvblocks" else f"{what}, inside"] = least / tree
    return found
