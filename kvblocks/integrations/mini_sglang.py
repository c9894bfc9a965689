"""kvblocks as a prefix cache of mini-sglang, beside its radix tree.

    python -m kvblocks.integrations.mini_sglang --model MODEL      # as `python -m minisgl`, with kvblocks
    register(); LLM(MODEL, cache_type="kvblocks")                  # in Python

docs/integrations/mini-sglang.md says what it gains, what is refused, and how it was tested.

mini-sglang's CacheManager owns a page until it inserts the page; then this cache owns it, until `evict` returns it.
When two requests compute the same tokens at the same time, there are two pages for them. With the radix tree,
mini-sglang itself frees the second one, even if its request goes on and its page table still points to it. The next
request then writes to a page that the first one reads. Here such pages are *spares*: they are kept while the handle of
the request's insertion is locked, and are evicted first after that.
"""

import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from minisgl import kvcache
from minisgl.core import get_global_ctx
from minisgl.kvcache import base

from kvblocks import BlockStateError, InvalidArgumentError, PrefixCache, PrefixMatch
from kvblocks.integrations import probing

TESTED_COMMITS = ("20fcd7f3c6a1898a61139fae1c97cc7a40bd8d66",)
"""Tested commits of sgl-project/mini-sglang 0.1.0. It has no releases, so its parts are checked, not its version."""

NAME = "kvblocks"

_CALLS = frozenset(
    {"lock_handle", "match_prefix", "insert_prefix", "evict", "reset", "size_info", "check_integrity"},
)
_ANSWERS = {
    "InsertResult": ("cached_len", "handle"),
    "MatchResult": ("cuda_handle",),
    "SizeInfo": ("evictable_size", "protected_size"),
}
_MOST_PAGES = 2**48  # no limit of ours: mini-sglang's CacheManager keeps the cache within its memory


@dataclass(frozen=True, eq=False)
class KVBlocksHandle(base.BaseCacheHandle):
    """A prefix of `cached_len` tokens that was found or inserted. match: None if nothing is cached.

    spares: pages that only this insertion's request uses, instead of cached pages with the same tokens.
    """

    cache: "KVBlocksPrefixCache"
    match: PrefixMatch | None
    spares: dict[int, None] = field(default_factory=dict)

    __eq__ = object.__eq__  # the base compares lengths; handles of two requests may have the same length
    __hash__ = object.__hash__

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slots of its tokens, int32, on the cache's device."""
        return self.cache.slots_of(array("q") if self.match is None else self.match.packed_kv_blocks)


class KVBlocksPrefixCache(base.BasePrefixCache):
    """mini-sglang's prefix cache on `PrefixCache`, with the page size of mini-sglang's context.

    cache: the PrefixCache underneath, for pins, hit rates and payloads; its block ids are page numbers. Slots are
    mini-sglang's indices: page * page_size and the following ones. Like mini-sglang's own cache, it isn't thread-safe.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.page_size = get_global_ctx().page_size
        self.cache = PrefixCache(_MOST_PAGES, self.page_size)
        self._offsets = torch.arange(self.page_size, dtype=torch.int32)
        self._spares: dict[int, KVBlocksHandle] = {}  # all spares, by page
        self._loose: dict[int, None] = {}  # the spares whose handle isn't locked
        self._locks: dict[KVBlocksHandle, int] = {}  # how often each is locked

    def lock_handle(self, handle: Any, unlock: bool = False) -> None:
        """Add a hold on a handle's pages and spares, or with `unlock` remove one.

        Raises BlockStateError, with nothing changed, for a handle that isn't held: its request was released twice.
        """
        if not unlock:
            if handle.match is not None:
                handle.match.__enter__()
            self._locks[handle] = self._locks.get(handle, 0) + 1
            for page in handle.spares:
                self._loose.pop(page, None)
            return
        num_locks = self._locks.get(handle)
        if num_locks is None:
            raise BlockStateError(
                f"lock_handle: expected a handle that is locked, got one of {handle.cached_len} tokens"
            )
        if handle.match is not None:
            handle.match.__exit__(None, None, None)
        if num_locks > 1:
            self._locks[handle] = num_locks - 1
        else:
            del self._locks[handle]
            self._loose.update(handle.spares)

    def match_prefix(self, input_ids: torch.Tensor) -> Any:
        """Return the longest cached prefix, and make it the most recently used."""
        if len(input_ids) < self.page_size:
            return base.MatchResult(KVBlocksHandle(0, self, None))
        match = self.cache.match_prefix(input_ids.numpy())
        length = match.match_length
        return base.MatchResult(KVBlocksHandle(length, self, match if length else None))

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> Any:
        """Cache the full pages of a prefix, and take ownership of all of them.

        The caller must free none of them, so the result's `cached_len` (the tokens to free) is 0.

        Raises BlockStateError for a page that is cached with other tokens: two requests were given the same page. On a
        GPU the ids are copied to the host once.
        """
        num_tokens = len(input_ids) // self.page_size * self.page_size
        if not num_tokens:
            return base.InsertResult(0, KVBlocksHandle(0, self, None))
        # Slices of NumPy arrays: slices of tensors take ten times as long.
        starts = indices.numpy() if indices.is_cpu else indices.cpu().numpy()
        pages = starts[:num_tokens] if self.page_size == 1 else starts[: num_tokens : self.page_size] // self.page_size
        done = self.cache.insert_prefix(input_ids.numpy()[:num_tokens], pages)
        handle = KVBlocksHandle(num_tokens, self, done.match, dict.fromkeys(done.unused_kv_blocks))
        if handle.spares or self._spares:
            self._keep_spares(handle, pages.tolist())
        return base.InsertResult(0, handle)

    def evict(self, size: int) -> torch.Tensor:
        """Evict pages of at least `size` tokens, first spares, then the least recently used pages. Returns their slots.

        Raises InvalidArgumentError, with nothing changed, if fewer tokens are evictable.
        """
        if size > self.size_info.evictable_size:
            raise InvalidArgumentError(f"evict: expected at most {self.size_info.evictable_size} tokens, got {size}")
        num_pages = -(-size // self.page_size)
        pages = [self._loose.popitem()[0] for _ in range(min(num_pages, len(self._loose)))]
        for page in pages:
            del self._spares.pop(page).spares[page]
        pages += self.cache.evict(num_pages - len(pages))
        return self.slots_of(array("q", pages))

    def reset(self) -> None:
        """Forget all pages, which the caller then owns. Raises BlockStateError while a handle is locked."""
        self.cache.clear()
        for handle in self._spares.values():
            handle.spares.clear()
        self._spares.clear()
        self._loose.clear()

    @property
    def size_info(self) -> Any:
        """How many tokens are in evictable pages, and how many in held ones. Spares count. O(1)."""
        evictable = self.cache.evictable_count()
        held = self.cache.cached_block_count() - evictable + len(self._spares) - len(self._loose)
        return base.SizeInfo((evictable + len(self._loose)) * self.page_size, held * self.page_size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the spares agree with their handles. mini-sglang calls it whenever it idles.

        The thorough check, for tests, is `cache.check()`. O(spares).
        """
        handles = {*self._spares.values()}
        assert {page for handle in handles for page in handle.spares} == self._spares.keys(), "spares of no handle"
        loose = {page for page, handle in self._spares.items() if handle not in self._locks}
        assert loose == self._loose.keys(), "spares that are locked and loose, or neither"

    def slots_of(self, pages: "array[int]") -> torch.Tensor:
        """Return the slots of all tokens in `pages`, of typecode "q", as int32 on the cache's device. O(tokens)."""
        if not pages:  # torch makes no view of an empty array
            return torch.empty(0, dtype=torch.int32, device=self.device)
        slots = torch.frombuffer(pages, dtype=torch.int64).to(torch.int32)
        if self.page_size > 1:
            slots = (slots[:, None] * self.page_size + self._offsets).flatten()
        return slots.to(self.device)

    def _keep_spares(self, handle: KVBlocksHandle, pages: list[int]) -> None:
        """Record which handle reads each spare. If a request was inserted again, its spares move to the new handle."""
        for page in handle.spares:
            previous = self._spares.get(page)
            if previous is not None:
                del previous.spares[page]
            self._spares[page] = handle
            self._loose[page] = None  # `handle` isn't locked yet
        taken = [page for page in pages if page in self._spares and page not in handle.spares]
        if taken:
            raise BlockStateError(f"insert_prefix: expected pages that nobody else has, got spares: {taken[:8]}")


def register(name: str = NAME) -> None:
    """Add kvblocks to mini-sglang's cache types. Call it once; `unregister` removes it.

    Each process that mini-sglang spawns has its own cache types, so call this at the top of a script, not below `if
    __name__ == "__main__"`. Raises UnsupportedEngineError, and KeyError if another type has the name.
    """
    check_mini_sglang()
    types = kvcache.SUPPORTED_CACHE_MANAGER
    ours = KVBlocksPrefixCache.__qualname__  # there are two such classes where this module is the program, too
    if name not in types.supported_names() or getattr(types[name], "__qualname__", None) != ours:
        types.register(name)(KVBlocksPrefixCache)


def unregister(name: str = NAME) -> None:
    """Remove kvblocks from mini-sglang's cache types. Does nothing if it isn't there."""
    types = vars(kvcache.SUPPORTED_CACHE_MANAGER)["_registry"]
    if types.get(name) is KVBlocksPrefixCache:
        del types[name]


def check_mini_sglang() -> None:
    """Raise UnsupportedEngineError unless the parts of mini-sglang that are used are as expected. Changes nothing."""
    calls = frozenset(getattr(base.BasePrefixCache, "__abstractmethods__", ()))
    wrong = [f"BasePrefixCache.{name} (unknown)" for name in sorted(calls - _CALLS)]
    wrong += [f"BasePrefixCache.{name}" for name in sorted(_CALLS - calls)]
    for name, fields in _ANSWERS.items():
        if getattr(getattr(base, name, None), "_fields", None) != fields:
            wrong.append(f"expected {name}({', '.join(fields)})")
    if "_registry" not in vars(getattr(kvcache, "SUPPORTED_CACHE_MANAGER", object())):
        wrong.append("SUPPORTED_CACHE_MANAGER._registry")
    probing.check_parts(
        "kvblocks.integrations.mini_sglang",
        f"mini-sglang as of {TESTED_COMMITS[0][:12]}",
        "one in which differ:",
        wrong,
    )


if __name__ in ("__main__", "__mp_main__"):  # the second: in each process that the main one spawns
    register()
if __name__ == "__main__":
    from minisgl.server import launch_server

    if "--cache-type" not in sys.argv:
        sys.argv += ["--cache-type", NAME]
    launch_server()
