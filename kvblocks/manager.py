"""The facade that engines call: sequences in, block tables out.

A step of an engine looks up each new sequence (`get_computed_blocks`), makes room for what it will compute
(`allocate_slots`, `append_slots`), runs the model over the block tables, and frees what has finished. A block is
cached as soon as it is allocated full, before its KV is computed, so that a later sequence of the same step hits it;
that is sound for engines that store a step's keys and values, layer by layer, before they attend. `abort` is for the
step that died.

Every call that raises, or returns None because the pool can't serve it, has changed nothing. But one that is
interrupted in the middle of a change, by a KeyboardInterrupt say, leaves a manager all of whose calls raise
CorruptStateError; only what counts (`stats`, `pins`, `quotas` and so on) may still be read.

A manager has one owner at a time: it takes no lock, and calls from several threads at once are an error of the
caller's. The calls' names are those of vLLM v1's KVCacheManager.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, SupportsFloat, SupportsIndex

from kvblocks.arguments import (
    Flag,
    Given,
    Text,
    check_clock,
    check_count,
    check_flag,
    check_name,
    check_number,
    check_share,
    is_a,
    listed,
    wrong,
)
from kvblocks.block_sampler import BlockSampler, check_bounds, choose_sample
from kvblocks.companions import GroupIndex
from kvblocks.errors import InvalidArgumentError
from kvblocks.events import CacheEvent
from kvblocks.eviction_history import EvictionHistory
from kvblocks.explanation import Explanation, explain_miss
from kvblocks.group_explanation import explain_group_miss
from kvblocks.group_layout import make_layout
from kvblocks.group_manager import GroupManager
from kvblocks.group_pool import GroupPool
from kvblocks.group_retention import GroupRetention
from kvblocks.group_slots import GroupSlots
from kvblocks.groups import Group
from kvblocks.hashing import HashFunction, PositionKey, get_hash_function
from kvblocks.ownership import as_sequence
from kvblocks.picture import PrefixRow, prefix_rows, to_dot
from kvblocks.pool import BlockPool
from kvblocks.prefix_index import PrefixIndex
from kvblocks.quotas import TenantQuotas
from kvblocks.retention import Pin, Priority, Refusal, Retention
from kvblocks.sequence import Sequence
from kvblocks.shared_prefixes import SharedPrefix, find_shared_prefixes
from kvblocks.stats import CacheStats, QuotaUsage
from kvblocks.steps import StepAllocator
from kvblocks.tokens import TokenIds, pack_tokens


class KVCacheManager(GroupManager):
    """Manages a pool of `num_blocks` blocks of `block_size` tokens (None: 16, or what the groups say).

    groups: the groups of the model's layers, see `groups`; None: all layers attend to everything before a token.
    hash_algorithm: "xxh3_128", "sha256" or a callable bytes -> bytes; names blocks to the outside, never decides a
    hit. enable_caching: whether prefixes are reused. enable_events: whether changes of the cached set are recorded
    for `take_events`; then take them regularly, since they are kept until taken. num_history_blocks: how many
    prefixes that are cached no more `explain` remembers; 0 costs nothing, otherwise each block is hashed when it is
    cached, and each remembered one takes about 250 bytes. pin_budget: share of the pool that pins may hold together,
    0.0 to 1.0. debug: run `check()` after every change. Raises InvalidArgumentError. O(num_blocks).
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex | None = None,
        *,
        groups: Iterable[Group] | None = None,
        hash_algorithm: Text | HashFunction = "xxh3_128",
        enable_caching: Flag = True,
        enable_events: Flag = False,
        num_history_blocks: SupportsIndex = 0,
        pin_budget: SupportsFloat = 0.5,
        debug: Flag = False,
    ) -> None:
        caches, named = check_flag("enable_caching", enable_caching), check_flag("enable_events", enable_events)
        debugs = check_flag("debug", debug)
        layout = make_layout(block_size, groups)
        hash_function = get_hash_function(hash_algorithm)
        group_index = None if layout.is_single else GroupIndex(layout, hash_function, enable_events=named)
        index = group_index or PrefixIndex(layout.block_size, hash_function, enable_events=named)
        num_remembered = check_count("num_history_blocks", num_history_blocks, 0)
        if num_remembered:
            index.keep_history(EvictionHistory(num_remembered))
        share = check_share("pin_budget", pin_budget, "a share of the pool from 0.0 to 1.0")
        max_pinned = int(share * check_count("num_blocks", num_blocks, 1) + 1e-6)  # 0.29 of 100 is 29
        if group_index is None:
            pool = BlockPool(num_blocks, index)
            retention = Retention(pool, max_pinned)
            slots = StepAllocator(pool, retention)
        else:
            pool = group_pool = GroupPool(num_blocks, group_index)
            retention = GroupRetention(group_pool, max_pinned)
            slots = GroupSlots(group_pool, retention)
        super().__init__(pool, retention, slots, enable_caching=caches, debug=debugs)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool. O(1)."""
        return len(self._pool.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence or pin holds, those with cached prefixes included. O(1)."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool that sequences and pins hold, 0.0 to 1.0. O(1)."""
        return 1.0 - self._pool.num_free_blocks / len(self._pool.blocks)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks handed out since the manager was made: the one clock that a cache has by itself. O(1)."""
        return self._slots.num_taken_blocks

    @property
    def stats(self) -> CacheStats:
        """Counters since the manager was made. O(1)."""
        return CacheStats(
            num_queries=self._num_queries,
            num_hits=self._num_hits,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_taken_blocks=self._slots.num_taken_blocks,
            num_evicted_blocks=self._pool.num_evicted_blocks,
            num_blocks=len(self._pool.blocks),
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_limited_tokens=0 if self._group_slots is None else self._group_slots.num_limited_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Stop caching everything, at any time: no block cached before is hit again. After a change of weights, say.

        Sequences go on with their blocks; nothing of theirs, which is of before the reset, is cached until they are
        freed and allocated again, unless `renew` says that it is valid still. Pins stand, and hold their prefixes when
        those are cached anew. O(1) but for giving memory back; O(blocks that pins hold); and O(cached blocks) with a
        history, which remembers them.
        """
        self.begin_change()
        self._index.clear()
        if self._retention.pins:
            self._retention.drop_uncached()
        self._end()

    def shared_prefixes(
        self,
        sequences: Items[Sequence],
        *,
        min_blocks: SupportsIndex = 1,
        num_visible_tokens: Items[SupportsIndex] | None = None,
    ) -> list[SharedPrefix]:
        """Return the groups of `sequences`, a batch, that share blocks, for cascade attention; parents before children.

        See `find_shared_prefixes`. With several groups they are those of the primary one. Raises SequenceStateError
        (not this manager's) and InvalidArgumentError. Changes nothing. Near-linear in the batch's blocks.
        """
        self.check_whole()
        batch = listed("sequences", "an iterable of sequences", sequences)
        self._check_has_primary("shared_prefixes")
        for sequence in batch:
            self._check_owned(sequence, "shared_prefixes")
        return find_shared_prefixes(batch, self.block_size, min_blocks, num_visible_tokens)

    def prefix_rows(self) -> list[PrefixRow]:
        """Return what is cached as the rows of a table, for people. Changes nothing. O(cached blocks)."""
        self.check_whole()
        self._check_has_primary("prefix_rows")
        return prefix_rows(self._index)

    def to_dot(self, *, max_nodes: SupportsIndex | None = 200) -> str:
        """Return what is cached as a Graphviz document, of at most `max_nodes` nodes. As `prefix_rows`."""
        return to_dot(self.prefix_rows(), max_nodes)

    @property
    def pins(self) -> list[Pin]:
        """The pins that haven't ended, oldest first. O(pins)."""
        return list(self._retention.pins)

    @property
    def last_refusal(self) -> Refusal | None:
        """Why the last call that returned None did so; None before the first. O(1)."""
        return self._retention.last_refusal

    def pin(
        self,
        token_ids: TokenIds,
        *,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: Iterable[PositionKey] = (),
        priority: Priority = 50,
        expires_at: SupportsFloat | None = None,
    ) -> Pin:
        """Keep the full blocks of a prefix cached, from now or from when they are computed, until `unpin` or expiry.

        token_ids, salt, lora, extra_keys: as of a `Sequence`. priority: 0 to 100, or (start, end, priority) for
        ranges of tokens, where a block gets at least the priority of those behind it, and those behind the last range
        aren't pinned. When a call needs blocks and only pinned ones are left, those of lowest priority are given up,
        and those of 100 never. expires_at: on the caller's clock, see `expire_pins`; None: never.

        Raises PinBudgetError when all pins together would be for more than `pin_budget` allows (a block in two pins
        counts twice), InvalidArgumentError and InvalidTokensError. O(tokens + pins); and while it lacks blocks, a
        lookup whenever a sequence that begins like it is freed. While there are pins, a call that finds too few free
        blocks costs O(pins) more, and O(pinned blocks) if any block was shared or left by a sharer since the last one.
        """
        self.check_whole()
        if not self.enable_caching:
            raise InvalidArgumentError("pin: expected enable_caching=True when the manager was made, got False")
        end = None if expires_at is None else check_number("expires_at", expires_at, "a number or None")
        copied = bytes(memoryview(pack_tokens(token_ids)).cast("B"))  # a pin may outlive the caller's buffer
        prefix = Sequence("pin", copied, salt=salt, lora=lora, extra_keys=extra_keys)
        pin = self._retention.make(prefix, priority, end)
        self.begin_change()
        self._retention.add(pin)
        self._end()
        return pin

    def unpin(self, pin: Given[Pin]) -> None:
        """End a pin; its blocks stay cached as any others do. Raises InvalidArgumentError. O(its blocks)."""
        self.check_whole()
        given: Any = pin
        if not is_a(given, Pin):
            raise wrong("unpin", "a Pin", given)
        if given not in self._retention.pins:
            raise InvalidArgumentError(f"unpin: expected a pin of this manager that hasn't ended, got {given}")
        self.begin_change()
        self._retention.remove(given)
        self._end()

    def expire_pins(self, now: SupportsFloat) -> list[Pin]:
        """End and return the pins whose `expires_at` is not after `now`, on the clock that `expires_at` was told by.

        Their blocks are free then, and reused before any that is still pinned. Nothing expires by itself: call it now
        and then. Raises InvalidArgumentError. O(pins + blocks freed).
        """
        self.check_whole()
        expired = self._retention.expired(check_number("now", now))
        self.begin_change()
        for pin in expired:
            self._retention.remove(pin)
        self._end()
        return expired

    def set_quota(self, salt: Text | None, max_blocks: SupportsIndex | None) -> None:
        """Bound what the sequences of one salt (None: without any) keep cached while others want the space.

        max_blocks: None takes the bound away. Beyond it they may cache what is free, but their least recently used
        blocks then go before anybody else's cached ones. Blocks in use count, and are never taken. Raises
        InvalidArgumentError. O(pool).
        """
        self._check_has_primary("set_quota")
        name = check_name("salt", salt)
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        self.begin_change()
        quotas = TenantQuotas() if self._index.quotas is None else self._index.quotas
        quotas.set_quota(name, number)
        self._use_quotas(quotas)

    def set_default_quota(self, max_blocks: SupportsIndex | None) -> None:
        """`set_quota` for each salt, other than None, that has none of its own. O(pool)."""
        self._check_has_primary("set_default_quota")
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        self.begin_change()
        quotas = TenantQuotas() if self._index.quotas is None else self._index.quotas
        quotas.set_default(number)
        self._use_quotas(quotas)

    def quotas(self) -> list[QuotaUsage]:
        """Return the quotas of salts that were given one or have anything cached, and what is used. O(salts)."""
        tenants = [] if self._index.quotas is None else self._index.quotas.tenants()
        return [QuotaUsage(t.salt, t.max_cached_blocks, t.num_cached_blocks) for t in tenants]

    def explain(self, sequence: Given[Sequence]) -> Explanation:
        """Say why the longest cached prefix of a sequence ends where it does. Changes nothing.

        Needs num_history_blocks to know of evictions, aborts and resets. With several groups it names the one that
        ended the hit. Raises InvalidArgumentError. For people: O(runs in the cache + tokens + blocks cached for them
        under any keys).
        """
        self.check_whole()
        own = as_sequence("explain", sequence)
        if self._group_index is not None:
            return explain_group_miss(self._group_index, own, self._slots.num_taken_blocks)
        return explain_miss(self._index, own, self._slots.num_taken_blocks)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cached set since the last call, oldest first, and forget them. O(1).

        Raises InvalidArgumentError unless the manager was made with enable_events=True.
        """
        self._index.check_events()
        self.begin_change()
        events = self._index.take_events()
        self._end()
        return events

    def start_sampling(self, every: SupportsIndex, now: Callable[[], float], bounds: Iterable[float]) -> BlockSampler:
        """Record the lives of about one block in `every` from now on; `metrics.CacheMetrics` is what shows them.

        now, bounds: see `BlockSampler`. Raises InvalidArgumentError, also when they are being recorded. O(num_blocks).
        """
        self.check_whole()
        number, limits = check_count("every", every, 1), check_bounds(bounds)
        check_clock("now", now)
        if self._pool.sampler is not None:
            raise InvalidArgumentError(
                "expected a manager whose blocks nobody samples, got one that has metrics: close them"
            )
        self._pool.sampler = BlockSampler(choose_sample(self._pool.blocks, number), now, limits)
        return self._pool.sampler

    def stop_sampling(self, sampler: Given[BlockSampler]) -> None:
        """Tell `sampler` nothing more. Does nothing when it isn't told anything. Raises InvalidArgumentError. O(1)."""
        self.check_whole()
        if not is_a(sampler, BlockSampler):
            raise wrong("sampler", "what start_sampling returned", sampler)
        if self._pool.sampler is sampler:
            self._pool.sampler = None

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, next to be taken first. O(free blocks)."""
        self.check_whole()
        return self._pool.free_block_ids()

    def _use_quotas(self, quotas: TenantQuotas) -> None:
        """Put quotas into force, counting anew, which ends the change; without any, nothing asks for them."""
        self._index.quotas = quotas
        self._pool.recount_quotas()
        if quotas.is_empty:
            self._index.quotas = None
        self._end()
