"""`CacheInspector`, which is `cache.inspect`: for people and tests. No engine needs it."""

from collections.abc import Callable
from typing import Any, SupportsIndex, final

from kvblocks.arguments import Given, Text, check_count
from kvblocks.closed import Closed
from kvblocks.core.tokens import TokenIds
from kvblocks.hashing.extra_keys import PositionKeys
from kvblocks.observe.digests import block_digests, find_by_digest
from kvblocks.observe.explanation import Explanation, explain_miss
from kvblocks.observe.picture import PrefixRow, prefix_rows, to_dot
from kvblocks.observe.removal_history import RemovalHistory
from kvblocks.prefix_cache.pins import PinnedPrefix, PrefixPins
from kvblocks.prefix_cache.prompts import make_prompt
from kvblocks.prefix_cache.store import PrefixStore
from kvblocks.retention.eviction import Eviction


@final
class CacheInspector(Closed):
    """What a `PrefixCache` holds and why: `cache.inspect`. Made by a cache. Its calls change nothing.

    Like the cache's calls, they take its lock and may come from any thread.
    """

    def __init__(
        self,
        lock: Any,
        catch_up: Callable[[], None],
        store: PrefixStore,
        pins: PrefixPins,
        history: RemovalHistory | None,
        eviction: Eviction | None,
    ) -> None:
        """lock: the cache's. catch_up: releases the matches that were left, and raises CorruptStateError."""
        self._lock = lock
        self._catch_up = catch_up
        self._store = store
        self._pins = pins
        self._history = history
        self._eviction = eviction

    def list_pinned(self) -> list[PinnedPrefix]:
        """Return a record for each pin. O(pinned tokens)."""
        with self._lock:
            self._catch_up()
            return self._pins.records()

    def contains_block(self, kv_block_id: SupportsIndex) -> bool:
        """Whether the block with this id holds a cached prefix. For tests of an allocator.

        Raises InvalidArgumentError. O(1).
        """
        number = check_count("kv_block_id", kv_block_id, 0)
        with self._lock:
            self._catch_up()
            return number in self._store.ids

    def num_bytes(self) -> int:
        """Return the bytes of all blocks and payloads; 0 in a cache without `max_bytes`. O(1)."""
        with self._lock:
            self._catch_up()
            return self._store.num_bytes

    def eviction_failure_count(self) -> int:
        """Return how often an eviction policy raised, or named a block that it had not been told of. O(1)."""
        with self._lock:
            return 0 if self._eviction is None else self._eviction.num_failures

    def block_hashes(
        self, token_ids: TokenIds, *, salt: Text | None = None, lora: Text | None = None, extra_keys: PositionKeys = ()
    ) -> list[bytes]:
        """Return the digests of the tokens' full blocks, cached or not, as events name them. O(tokens)."""
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        with self._lock:
            self._catch_up()
            return block_digests(self._store.index, sequence)

    def find_block(self, digest: Given[bytes]) -> int | None:
        """Return the id of the cached block with this digest; None if there is none. See `Inspector.find_block`."""
        with self._lock:
            self._catch_up()
            block = find_by_digest(self._store.index, digest)
            return None if block is None else block.block_id

    def explain(
        self, token_ids: TokenIds, *, salt: Text | None = None, lora: Text | None = None, extra_keys: PositionKeys = ()
    ) -> Explanation:
        """Explain why the longest cached prefix of the tokens ends where it does. See `Inspector.explain`."""
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        with self._lock:
            self._catch_up()
            return explain_miss(self._store.index, self._history, sequence)

    def prefix_rows(self) -> list[PrefixRow]:
        """Return the cached prefixes as rows of a table, for people. O(cached blocks)."""
        with self._lock:
            self._catch_up()
            pinned = {block for path in self._pins.paths() for block in path}
            return prefix_rows(self._store.index, self._store.free_blocks(), pinned)

    def to_dot(self, *, max_nodes: SupportsIndex | None = 200) -> str:
        """Return the cached prefixes as a Graphviz document with at most `max_nodes` rows. See `Inspector.to_dot`."""
        return to_dot(self.prefix_rows(), max_nodes)
