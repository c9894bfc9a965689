"""A prefix cache for engines that keep their own KV and choose their own block ids.

`KVCacheManager` owns a pool and hands out its blocks. Here the engine owns the memory, and the cache only knows which
blocks hold which prefix. The engine inserts what it has computed, looks up what it is about to compute, and asks which
ids it may reuse. Lookups use the same exact map as the manager, so a hit is never wrong, and no hash decides.

An id is the engine's until `insert_prefix` takes it. Then it is the cache's until `evict`, `clear` or an insertion that
evicts returns it. The result of an insertion names the ids that it didn't take.

Every public call takes one lock and may come from any thread, but not from a finalizer or a signal handler. Those may
run in the middle of another call of the same thread, and if that call is making a change, a call from them raises
CorruptStateError. Only leaving a match is safe there; it never waits.

Calls are atomic: one that raises has changed nothing. The exception is a call that is interrupted in the middle of a
change, for example by a KeyboardInterrupt. After that all calls raise CorruptStateError.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, SupportsFloat, SupportsIndex, final

from kvblocks.arguments import (
    Flag,
    Text,
    check_count,
    check_flag,
    check_name,
    check_number,
    check_share,
    counted,
    wrong,
)
from kvblocks.closed import Closed
from kvblocks.core.caching import digests_ahead
from kvblocks.core.change import CHANGING, IDLE, Change
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import TokenIds
from kvblocks.errors import BlockStateError, InvalidArgumentError, StaleHitError
from kvblocks.events import CacheEvent, EventOptions
from kvblocks.hashing.by_name import get_hash_scheme
from kvblocks.hashing.extra_keys import PositionKeys
from kvblocks.hashing.scheme import HashFunction, HashScheme
from kvblocks.observe.event_log import Recording, Records
from kvblocks.observe.removal_history import RemovalHistory
from kvblocks.prefix_cache.block_ids import BlockIds, check_block_ids
from kvblocks.prefix_cache.evicted import EvictedBlocks
from kvblocks.prefix_cache.inspector import CacheInspector
from kvblocks.prefix_cache.match import Hold, PrefixInsert, PrefixMatch, ids_of
from kvblocks.prefix_cache.payloads import NewPayload, check_payloads
from kvblocks.prefix_cache.pins import PrefixPins
from kvblocks.prefix_cache.prompts import make_prompt
from kvblocks.prefix_cache.store import Budget, PrefixStore
from kvblocks.retention.eviction import Eviction
from kvblocks.retention.policies.policy import PolicyFactory
from kvblocks.stats import HitCounts

_MAX_ID = 2**63 - 1
_SHARE = "a share of the cache from 0.0 to 1.0"

_NO_PAYLOADS: Any = ()
"""The default for payloads. Compared by identity, so none of the caller's code runs."""

_NONE: Any = 0
"""The default for numbers of tokens and bytes, also compared by identity."""


@final
class PrefixCache(Closed):
    """Knows which of the engine's blocks hold which prefixes: at most `max_blocks` blocks of `block_size` tokens.

    In all calls, salt, lora and extra_keys say what else the KV of tokens depends on, as in `Sequence`; prefixes that
    differ in them are different prefixes. Tokens may have any form that `tokens.pack_tokens` takes. What a call returns
    or keeps has a copy of them, so the caller may change a buffer after the call. A lookup of no tokens finds nothing.
    Only full blocks are cached. max_blocks: 0 turns the cache off, so that nothing is found and no id is taken. Raises
    InvalidArgumentError. Blocks that were never inserted take no memory. When a match is left, the next call releases
    its blocks, which costs O(1) for each such match and for each block that nothing else holds.
    """

    def __init__(
        self,
        max_blocks: SupportsIndex,
        block_size: SupportsIndex = 16,
        *,
        max_bytes: SupportsIndex | None = None,
        eviction: Text | PolicyFactory | None = None,
        pin_budget: SupportsFloat = 0.5,
        hash_algorithm: Text | HashFunction | HashScheme = "xxh3_128",
        enable_events: Flag = False,
        num_history_blocks: SupportsIndex = 0,
    ) -> None:
        """max_bytes: the most bytes of all blocks and payloads together, as reported by insertions; None: no bound.

        With max_bytes, whatever was used least recently is evicted first, block or payload, and `eviction` must be
        None.

        eviction: which blocks are evicted first, as in `KVCacheManager`; a policy is called under the cache's lock.
        pin_budget: share of `max_blocks` that all pins together may hold. hash_algorithm: as in `KVCacheManager`; it
        names blocks for events and `inspect`, and decides no hit. enable_events: whether changes are recorded for
        `take_events`. num_history_blocks: how many removed prefixes `inspect.explain` remembers.
        """
        self._change = Change("cache")
        self.max_blocks = check_count("max_blocks", max_blocks, 0)
        self.block_size = check_count("block_size", block_size, 1)
        share, records = check_share("pin_budget", pin_budget, _SHARE), check_flag("enable_events", enable_events)
        num_remembered = check_count("num_history_blocks", num_history_blocks, 0)
        hash_scheme = get_hash_scheme(hash_algorithm)
        self._lock: Any = RLock()  # Any: the type of RLock differs between versions of Python
        self._budget = None if max_bytes is None else Budget(check_count("max_bytes", max_bytes, 0))
        if self._budget is not None and eviction is not None:
            raise wrong("eviction", "None, since max_bytes goes by the order of use", eviction)
        self._eviction = None if eviction is None else Eviction(eviction, max(self.max_blocks, 1), _MAX_ID + 1)
        self._now: int | float = 0.0
        self._store = PrefixStore(self.max_blocks, self.block_size, hash_scheme, self._eviction, self._budget)
        self._history = RemovalHistory(num_remembered) if num_remembered else None
        if self._history is not None:
            self._store.index.watch(self._history)
        self._recording = Recording(Records(EventOptions()), self._store.index, hash_scheme) if records else None
        self._pins = PrefixPins(self.block_size, int(share * self.max_blocks + 1e-6))  # 0.29 of 100 is 29
        self._inspector: CacheInspector | None = None
        self._holds: dict[Hold, None] = {}
        self._left: deque[Hold] = deque()  # of matches that were left; the next call releases them
        self._num_queries = self._num_hits = self._num_queried_tokens = self._num_hit_tokens = 0

    def match_prefix(
        self, token_ids: TokenIds, *, salt: Text | None = None, lora: Text | None = None, extra_keys: PositionKeys = ()
    ) -> PrefixMatch:
        """Return the longest cached prefix, and count the lookup in `stats`. The prefix becomes the most recently used.

        So does its `last_payload`. Enter the match (`with`) to keep its blocks; see `PrefixMatch`. If it covers all
        tokens and its payload doesn't have the logits, compute the last token again for its logits. Raises
        InvalidTokensError and InvalidArgumentError. One dict lookup and one memcmp for each run of blocks that were
        inserted together, plus O(blocks found).
        """
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=True)
        with self._lock:
            return self._match(sequence)

    def query_match_len(
        self, token_ids: TokenIds, *, salt: Text | None = None, lora: Text | None = None, extra_keys: PositionKeys = ()
    ) -> int:
        """Return how many tokens `match_prefix` would find. Changes nothing, neither recency nor counters."""
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        with self._lock:
            self._change.check_whole()
            return len(self._store.find(sequence)) * self.block_size

    def insert_prefix(
        self,
        token_ids: TokenIds,
        kv_block_ids: BlockIds,
        *,
        num_cached_tokens: SupportsIndex = 0,
        block_bytes: SupportsIndex = 0,
        payloads: Iterable[tuple[SupportsIndex, Any, SupportsIndex]] = _NO_PAYLOADS,
        pin: Flag = False,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: PositionKeys = (),
    ) -> PrefixInsert:
        """Cache these tokens in these blocks, whose KV is computed. The prefix becomes the most recently used.

        kv_block_ids: one for each full block, as ints or a buffer of them (see `block_ids.check_block_ids`). Further
        ids, such as that of a partial block, are ignored: they stay the caller's and are returned in
        `unused_kv_blocks`. Where a prefix is cached already, its block stays and the given id is not taken. When the
        cache is full, blocks that nothing holds are evicted, as by `evict`. If that isn't enough, the longest prefix
        that fits is cached. num_cached_tokens: how many of the first tokens, in whole blocks, are cached already, so
        that their ids are not given. pin: pin the cached blocks, as `pin_prefix` does; the budget must have room for
        all full blocks of the tokens.

        block_bytes: the bytes of each new block. payloads: (number of tokens, payload, bytes) for each payload to
        attach to that many first tokens, as `attach` does. With `max_bytes`, older blocks and payloads make room for
        both, and each payload needs at least 1 byte. Without it, all bytes must be 0.

        The result's `match` is what `match_prefix` of these tokens would find now, without another lookup; `stats`
        doesn't count it. It holds nothing until it is entered. If other threads may evict, insert and enter inside
        `exclusive`.

        Raises InvalidTokensError, InvalidArgumentError, BlockStateError for an id that holds another prefix,
        PinBudgetError, and StaleHitError if fewer than num_cached_tokens are cached. O(tokens + payloads).
        """
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=True)
        size = self.block_size
        skipped = 0
        if num_cached_tokens is not _NONE:
            skipped = check_count("num_cached_tokens", num_cached_tokens, 0, sequence.num_tokens)
        if skipped % size:
            raise wrong("num_cached_tokens", f"whole blocks of {size} tokens", skipped)
        num_given = (sequence.num_tokens - skipped) // size
        given = check_block_ids(kv_block_ids, num_given, size)
        tail = given[num_given:] if len(given) > num_given else []
        if tail:
            del given[num_given:]
        num_bytes = 0 if block_bytes is _NONE else self._check_bytes("block_bytes", block_bytes, 0)
        new_payloads: list[NewPayload] = []
        if payloads is not _NO_PAYLOADS:
            new_payloads = check_payloads(payloads, sequence.num_tokens, self._check_bytes)
        pins = check_flag("pin", pin)
        with self._lock:
            done = self._insert(sequence, skipped // size, given, num_bytes, new_payloads, pins=pins)
            return done._replace(unused_kv_blocks=done.unused_kv_blocks + tail) if tail else done

    def _insert(
        self,
        sequence: Sequence,
        num_skipped: int,
        given: list[int],
        block_bytes: int,
        payloads: list[NewPayload],
        *,
        pins: bool,
    ) -> PrefixInsert:
        """`insert_prefix` with checked arguments. num_skipped: how many blocks' ids are not given."""
        self._catch_up()
        store, match = self._store, PrefixMatch(self, sequence)
        found = store.find(sequence)
        num_found, path_ids = len(found), ids_of(found)
        if num_found < num_skipped:
            expected = f"expected num_cached_tokens={num_skipped * self.block_size} to be cached"
            raise StaleHitError(f"{expected}, got {num_found * self.block_size} tokens: match again")
        ids = path_ids[:num_skipped] + given if num_skipped else given
        unused = store.check_insertable(ids, path_ids)
        if pins:
            self._pins.check_room(len(ids))
        digests = None
        if store.index.needs_digests:
            num_tokens = len(ids) * self.block_size
            digests = digests_ahead(store.index, sequence, store.index.epoch, found, num_found, num_tokens)
        self._change.begin()
        path, evicted = store.cache(sequence, ids, found, digests, block_bytes, is_held=pins)
        unused_payloads = store.attach_all(sequence, payloads, path, evicted) if payloads else []
        path_ids += ids[num_found : len(path)]
        if pins and path:
            self._pins.add(sequence, path, None)
        match.show(path, path_ids, self.block_size, store.index.version, store.payloads(sequence, path))
        unused += ids[len(path) :]
        done = PrefixInsert(len(path), len(path) - num_found, unused, evicted, match, unused_payloads)
        self._change.end()
        store.drop_payloads()
        return done

    def _check_bytes(self, name: str, value: SupportsIndex, least: int) -> int:
        """Return a number of bytes, at least `least`. Without `max_bytes` it must be 0."""
        if self._budget is not None:
            return check_count(name, value, least)
        number = check_count(name, value, 0)
        if number:
            raise wrong(name, "0, as the cache was made without max_bytes", number)
        return number

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context manager inside which calls from other threads wait, as they do during a call.

        For calls that belong together: inside `with cache.exclusive():` no other thread can evict what `insert_prefix`
        cached before its match is entered. Leaving a match never waits, even then. Inside, don't wait for another
        thread; entering again is fine. Changes nothing. O(1).
        """
        lock: AbstractContextManager[object] = self._lock
        return lock

    def attach(
        self,
        token_ids: TokenIds,
        payload: Any,
        *,
        num_bytes: SupportsIndex = 0,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: PositionKeys = (),
    ) -> bool:
        """Attach `payload` to exactly these tokens, including a partial last block, for later matches. None removes it.

        An earlier payload of these tokens is replaced. The payload is kept with the last full block until that is
        evicted; a block keeps the latest 16. For prompts shorter than a block, the latest `max_blocks` payloads are
        kept until `clear`. Returns False when a full block isn't cached or the cache is off, otherwise True. Changes
        neither recency nor counters.

        With `max_bytes`, num_bytes is what the payload takes, at least 1. Only bytes then limit how many payloads are
        kept, and the prefix becomes the most recently used. The call evicts nothing: when there is no room it returns
        False, and the earlier payload is gone. To make room, give the payload to `insert_prefix`. Without `max_bytes`,
        num_bytes must be 0.

        The caller must not change a payload while it is attached, since a match in any thread may have it. So copy the
        data when you attach it, and again before you modify it. Raises InvalidTokensError, InvalidArgumentError.
        O(tokens).
        """
        number = self._check_bytes("num_bytes", num_bytes, int(payload is not None))
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        with self._lock:
            self._catch_up()
            self._change.begin()
            attached = self._store.attach(sequence, payload, number)
            self._change.end()
            self._store.drop_payloads()
            return attached

    def evict(self, num_blocks: SupportsIndex = 0, *, num_bytes: SupportsIndex = 0) -> EvictedBlocks:
        """Evict `num_blocks` blocks that nothing holds, and return their ids; fewer if fewer can be evicted.

        The eviction policy names them. Without a policy they are the least recently used ones, with the end of a prefix
        before its beginning. num_bytes: in a cache with `max_bytes`, first evict blocks and payloads in the order of
        use until this many bytes are freed; blocks evicted for that count towards `num_blocks`. The result's `payloads`
        are the evicted payloads. Raises InvalidArgumentError. O(num_blocks), plus what the policy takes.
        """
        num_wanted = check_count("num_blocks", num_blocks, 0)
        num_freed = 0 if num_bytes is _NONE else self._check_bytes("num_bytes", num_bytes, 0)
        with self._lock:
            self._catch_up()
            self._change.begin()
            evicted = self._store.evict(num_wanted, num_freed)
            self._change.end()
            self._store.drop_payloads()
            return evicted

    def pin_prefix(
        self,
        token_ids: TokenIds,
        description: Text | None = None,
        *,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: PositionKeys = (),
    ) -> int:
        """Keep the longest cached prefix from being evicted. Each `unpin_prefix` of these tokens ends one pin.

        Returns how many tokens are pinned; 0: nothing was cached, so there is no pin. Blocks that are inserted later
        aren't part of the pin. description: shown by `inspect.list_pinned`. Raises InvalidTokensError,
        InvalidArgumentError and PinBudgetError. O(tokens).
        """
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        name = check_name("description", description)
        with self._lock:
            self._catch_up()
            path = self._store.find(sequence)
            if path:
                self._pins.check_room(len(path))
                self._change.begin()
                self._store.hold(path)
                self._pins.add(sequence, path, name)
                self._change.end()
            return len(path) * self.block_size

    def unpin_prefix(
        self, token_ids: TokenIds, *, salt: Text | None = None, lora: Text | None = None, extra_keys: PositionKeys = ()
    ) -> int:
        """Remove the latest pin of these tokens. Its blocks become the most recently used.

        token_ids: as given to `pin_prefix`; a partial last block makes no difference. Returns how many tokens were
        pinned; 0: there was no such pin. Raises InvalidTokensError, InvalidArgumentError. O(tokens).
        """
        sequence = make_prompt(token_ids, salt, lora, extra_keys, copy=False)
        with self._lock:
            self._catch_up()
            self._change.begin()
            path = self._pins.remove(sequence)
            self._store.let_go(path)
            self._change.end()
            return len(path) * self.block_size

    def cached_block_count(self) -> int:
        """Return how many blocks are cached. O(1)."""
        with self._lock:
            self._change.check_whole()
            return len(self._store.ids)

    def evictable_count(self) -> int:
        """Return how many blocks are neither pinned nor held by a match. O(1 + matches that were left)."""
        with self._lock:
            self._catch_up()
            return self._store.num_evictable_blocks

    @property
    def stats(self) -> HitCounts:
        """What lookups found since the cache was made: hits and tokens, and the rates of both. O(1).

        `request_hit_rate` is hits per lookup, `mean_hit_length` matched tokens per hit.
        """
        with self._lock:
            self._change.check_whole()
            return HitCounts(self._num_queries, self._num_hits, self._num_queried_tokens, self._num_hit_tokens)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cached set since the last call, and forget them. See
        `KVCacheManager.take_events`.
        """
        with self._lock:
            if self._recording is None:
                raise InvalidArgumentError(
                    "take_events: expected enable_events=True when the cache was made, got False"
                )
            self._change.begin()
            events = self._recording.take()
            self._change.end()
            return events

    @property
    def inspect(self) -> CacheInspector:
        """What the cache holds and why: explanations, pictures, names, pins. For people and tests. O(1)."""
        with self._lock:
            if self._inspector is None:
                self._inspector = CacheInspector(
                    self._lock, self._catch_up, self._store, self._pins, self._history, self._eviction
                )
            return self._inspector

    @property
    def now(self) -> int | float:
        """The caller's clock, which eviction policies read, in any unit; 0 until it is set. O(1).

        The cache reads no clock of its own, so set this regularly. Raises InvalidArgumentError unless the value is a
        number.
        """
        return self._now

    @now.setter
    def now(self, now: SupportsFloat) -> None:
        time = check_number("now", now)
        with self._lock:
            self._change.check_whole()
            self._now = time
            if self._eviction is not None:
                self._eviction.set_time(time)

    def clear(self) -> EvictedBlocks:
        """Unpin and evict everything, for example after a change of weights. Returns the ids, which are the caller's
        again.

        The result's `payloads` are all payloads; `stats` isn't reset. Raises BlockStateError while a match is held,
        since its blocks are being read. O(cached blocks + payloads).
        """
        with self._lock:
            self._catch_up()
            if self._holds:
                raise BlockStateError(f"clear: expected no match to be held, got {len(self._holds)}")
            self._change.begin()
            for path in self._pins.paths():
                self._store.let_go(path)
            self._pins.clear()
            evicted = self._store.clear()
            self._change.end()
            self._store.drop_payloads()
            return evicted

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold; as `KVCacheManager.check`. O(cached blocks + holds)."""
        with self._lock:
            self._catch_up()
            paths = self._pins.paths()
            assert all(paths), "cache: a pin of nothing"
            self._store.check([*paths, *[hold.blocks for hold in self._holds]])

    def __repr__(self) -> str:
        kinds = f"at most {counted(self.max_blocks, 'block')} of {counted(self.block_size, 'token')}"
        return f"PrefixCache({kinds}, {len(self._store.ids)} cached)"

    def _hold(self, match: PrefixMatch, hold: Hold) -> None:
        """Bring `match` up to date and hold its blocks with `hold`. For `PrefixMatch.__enter__`; see there."""
        with self._lock:
            if self._left or self._change.state:
                self._catch_up()
            version, blocks = self._store.index.version, match.blocks
            if match.version != version:
                found = self._store.find(match.sequence)
                blocks = found[: len(match.blocks)] if match.is_read else found
                if match.is_read and not match.is_still(blocks):
                    raise StaleHitError(f"expected {match} to be cached still; it isn't: match again")
            hold.blocks = blocks
            self._change.state = CHANGING
            self._store.hold(blocks)
            self._holds[hold] = None
            self._change.state = IDLE
            if match.is_read:
                match.renew(blocks, version)
            else:
                payloads = self._store.payloads(match.sequence, blocks)
                match.show(blocks, ids_of(blocks), self.block_size, version, payloads)

    def _let_go(self, hold: Hold) -> None:
        """Have the next call release the blocks of `hold`. Takes no lock. For `PrefixMatch`, also in finalizers."""
        self._left.append(hold)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        if self._left or self._change.state:
            self._catch_up()
        store = self._store
        match = PrefixMatch(self, sequence)
        blocks = store.find(sequence)
        payloads = store.payloads(sequence, blocks)
        match.show(blocks, ids_of(blocks), self.block_size, store.index.version, payloads)
        self._change.state = CHANGING
        if self._eviction is not None:
            self._eviction.note_hit(blocks)
        store.renew(blocks)
        if payloads:
            store.renew_payload(payloads[-1])
        self._num_queries += 1
        if blocks:
            self._num_hits += 1
        self._num_queried_tokens += sequence.num_tokens
        self._num_hit_tokens += len(blocks) * self.block_size
        self._change.state = IDLE
        return match

    def _catch_up(self) -> None:
        """Release the matches that were left since the last call. Raises CorruptStateError."""
        self._change.check_whole()
        while self._left:
            self._change.state = CHANGING
            hold = self._left.popleft()
            if hold in self._holds:
                del self._holds[hold]
                self._store.let_go(hold.blocks)
            self._change.state = IDLE
