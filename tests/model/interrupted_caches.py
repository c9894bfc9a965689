"""The prefix caches that `test_interruption.py` interrupts, and their calls."""

from array import array
from collections.abc import Callable
from typing import Any

from kvblocks import PrefixCache
from model.interruption import Case

LONG = list(range(13))
OTHER = list(range(50, 62))
IDS = array("q", [60, 1, 61])


class CacheWorld:
    """A full cache with pins, a payload, a held match, and a match that was left and isn't released yet."""

    def __init__(self, eviction: str | None = None, max_bytes: int | None = None) -> None:
        self.cache = cache = PrefixCache(
            10,
            4,
            max_bytes=max_bytes,
            eviction=eviction,
            pin_budget=0.6,
            enable_events=eviction is not None,
            num_history_blocks=4,
        )
        cache.insert_prefix(LONG, [0, 1, 2])
        cache.insert_prefix(OTHER, [10, 11, 12], pin=True)
        cache.insert_prefix([*LONG[:8], 90, 91, 92, 93], [0, 1, 20])
        cache.insert_prefix(range(100, 112), [30, 31, 32])
        self.num_bytes = 0 if max_bytes is None else 1
        cache.attach(LONG, "payload", num_bytes=6 * self.num_bytes)
        self.held = cache.match_prefix(range(100, 108))
        self.held.__enter__()
        with cache.match_prefix(LONG):
            pass
        self.other = cache.match_prefix(LONG)
        self.inserted = cache.insert_prefix(LONG, [0, 1, 2]).match

    def look(self) -> Any:
        cache: Any = self.cache
        cache.evictable_count()  # catches up, which is no part of any call
        store = cache._store  # noqa: SLF001
        return {
            "queue": [block.block_id for block in store._queue],  # noqa: SLF001
            "blocks": sorted([(block.block_id, block.ref_cnt) for run in store.index.runs() for block in run.blocks]),
            "ids": sorted(store.ids),
            "holds": len(cache._holds),  # noqa: SLF001
            # One that the match doesn't know could never be left.
            "entered": [len(match._holds) for match in (self.other, self.inserted)],  # noqa: SLF001
            "pins": cache.inspect.list_pinned(),
            "rates": (cache.stats.hit_rate, cache.stats.mean_match_length),
            "runs": [(bytes(run.tokens), [block.block_id for block in run.blocks]) for run in store.index.runs()],
            "known": store._eviction and list(store._eviction._main.blocks),  # noqa: SLF001
            "order": [(entry.num_tokens, entry.payload) for entry in store._payloads._order],  # noqa: SLF001
            "bytes": cache.inspect.num_bytes(),
            "payloads": sorted([block.block_id for block in store._payloads._by_block]),  # noqa: SLF001
            "records": cache._recording and [*cache._recording.log.records],  # noqa: SLF001
            "removals": len(cache._history),  # noqa: SLF001
            "names": store.index.needs_digests and [bytes(run.digests) for run in store.index.runs()],
        }

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return every public call except leaving a match, which only notes it for the next call."""
        cache = self.cache
        return {
            "match_prefix": lambda: cache.match_prefix(LONG),
            "query_match_len": lambda: cache.query_match_len(LONG),
            "insert_prefix": lambda: cache.insert_prefix(LONG, [0, 1, 2]),
            "attach": lambda: cache.attach(LONG, "another", num_bytes=self.num_bytes),
            "evict": lambda: cache.evict(1),
            "pin_prefix": lambda: cache.pin_prefix(LONG),
            "unpin_prefix": lambda: cache.unpin_prefix(LONG),
            "list_pinned": cache.inspect.list_pinned,
            "contains_block": lambda: cache.inspect.contains_block(0),
            "cached_block_count": cache.cached_block_count,
            "evictable_count": cache.evictable_count,
            "stats": lambda: cache.stats,
            "block_hashes": lambda: cache.inspect.block_hashes(LONG),
            "find_block": lambda: cache.inspect.find_block(b"name"),
            "explain": lambda: cache.inspect.explain(LONG),
            "prefix_rows": cache.inspect.prefix_rows,
            "to_dot": cache.inspect.to_dot,
            "clear": cache.clear,
            "check": cache.check,
            "entering a match": self.other.__enter__,
            "entering an insertion's match": self.inserted.__enter__,
        }


CALLS: dict[str, Callable[[CacheWorld], Any]] = {
    "match_prefix": lambda w: w.cache.match_prefix(LONG),
    "insert_prefix": lambda w: w.cache.insert_prefix(range(200, 216), [40, 41, 42, 43]),
    "insert_prefix with a pin": lambda w: w.cache.insert_prefix([*LONG[:4], *range(300, 308)], [5, 51, 52], pin=True),
    "insert_prefix of a wrong id": lambda w: w.cache.insert_prefix(range(300, 308), [0, 99]),
    "attach": lambda w: w.cache.attach(OTHER, "another"),
    "evict": lambda w: w.cache.evict(3),
    "insert_prefix with payloads and bytes": lambda w: w.cache.insert_prefix(
        [*LONG[:8], 7, 7, 7, 7, 7], [44], num_cached_tokens=8, block_bytes=4, payloads=[(6, "a", 3), (13, "b", 5)]
    ),
    "evict bytes": lambda w: w.cache.evict(1, num_bytes=5),
    "pin_prefix": lambda w: w.cache.pin_prefix(LONG, "description"),
    "unpin_prefix": lambda w: w.cache.unpin_prefix(OTHER),
    "clear": lambda w: w.cache.clear(),
    "take_events": lambda w: w.cache.take_events(),
    "insert_prefix of buffers": lambda w: w.cache.insert_prefix(array("I", [*LONG[:8], 7, 7, 7, 7]), IDS),
    "entering a match": lambda w: w.other.__enter__(),
    "entering an insertion's match": lambda w: w.inserted.__enter__(),
    "leaving a match": lambda w: w.held.__exit__(),
}
# `clear` is refused while a match is held.
_FIRST: dict[str, Callable[[CacheWorld], Any]] = {"clear": lambda w: w.held.__exit__()}


def make_cache_case(name: str, eviction: str | None = None) -> Case:
    """Return a call of a cache, which is in the same state each time."""
    world = CacheWorld(None, 10) if "bytes" in name else CacheWorld(eviction)
    if name in _FIRST:
        _FIRST[name](world)
    return Case(lambda: CALLS[name](world), world.look, world.cache.check, world.calls(), lambda: None)
