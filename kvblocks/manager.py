"""The facade that engines call: sequences in, block tables out.

A step of an engine looks up each new sequence (`get_computed_blocks`), makes room for what it will compute
(`allocate_slots`, `append_slots`), runs the model over the block tables, and frees what has finished. A block is
cached as soon as it is allocated full, before its KV is computed, so that a later sequence of the same step hits it.
This is sound for engines that, in each layer, store a step's keys and values before they attend. `abort` is for a step
that died.

A call that raises, or returns None because the pool can't serve it, has changed nothing. The exception is a call that
is interrupted in the middle of a change, by a KeyboardInterrupt for example. After that all calls raise
CorruptStateError; only counters (`stats`, `pins`, `quotas` and so on) may still be read.

A manager takes no lock. The caller must not make calls from several threads at once.

Hashing and comparing a caller's id runs the caller's own code, which may raise. So a call does this before it changes
anything, and not again after that.

The calls have the names of vLLM v1's KVCacheManager. Sharing a sequence's blocks among its samples, with copy on write,
comes from vLLM's PagedAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from kvblocks.arguments import (
    Flag,
    Given,
    Text,
    asked_once,
    check_clock,
    check_count,
    check_flag,
    check_id,
    check_integer,
    check_name,
    check_number,
    check_share,
    is_a,
    listed,
    shown,
    wrong,
)
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks, forget_unwritten
from kvblocks.core.change import CHANGING, DEBUGGING, IDLE, Changeable
from kvblocks.core.hashing import HashFunction, Names, PositionKey
from kvblocks.core.hit import CacheHit, check_hit, check_start, ends_in_block
from kvblocks.core.in_flight import InFlight
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence, as_sequence, not_a_sequence
from kvblocks.core.slots import Commit, SlotAllocator
from kvblocks.core.tokens import MAX_TOKEN_ID, TokenIds, pack_tokens
from kvblocks.errors import InvalidArgumentError, KVBlocksError, SequenceStateError
from kvblocks.events import CacheEvent, EventOptions, check_event_options
from kvblocks.hashing import get_names
from kvblocks.stats import CacheStats, GroupUsage, QuotaUsage, Refusal

if TYPE_CHECKING:  # what only some managers need is imported when it is used
    from kvblocks.groups.kinds import Group
    from kvblocks.observe.block_callbacks import BlockCallback, BlockCallbacks
    from kvblocks.observe.block_sampler import BlockSampler
    from kvblocks.observe.explanation import Explanation
    from kvblocks.observe.picture import PrefixRow
    from kvblocks.observe.recording import Recording
    from kvblocks.observe.removal_history import RemovalHistory
    from kvblocks.observe.shared_prefixes import SharedPrefix
    from kvblocks.retention.eviction import Eviction
    from kvblocks.retention.holds import BlockHolds
    from kvblocks.retention.pins import Pin, Pins, Priority
    from kvblocks.retention.policies.policy import PolicyFactory
    from kvblocks.retention.quotas import TenantQuotas
    from kvblocks.retention.sessions import Sessions
    from kvblocks.tiers.calls import ManagerCalls
    from kvblocks.tiers.tier import Tier
    from kvblocks.tiers.tiers import Tiers
    from kvblocks.tiers.traffic import Traffic
    from kvblocks.tiers.transfer import TierHit

_NO_PLAIN_TOKEN = (AttributeError, BufferError, TypeError, OverflowError, ValueError)
"""What the fast path of adding a token may raise. The slow path then either takes the token, or says what is wrong."""

_NONE: Any = 0
"""The default number of lookahead tokens and the like. Compared by identity, which runs no code of the caller's."""

_NO_TIERS: Any = ()
"""The default for tiers and for loads. Compared by identity, too."""

Step = tuple[list[Sequence], dict[Sequence, int]]
"""The sequences of a step, and their indices in it."""


class KVCacheManager(Changeable):
    """Manages a pool of `num_blocks` blocks of `block_size` tokens (None: 16, or what the groups say).

    first_block_id: the blocks' ids are first_block_id to first_block_id + num_blocks - 1; more than 0 for engines that
    keep the first ones for something else. groups: the groups of the model's layers, see `groups`; None: all layers
    have full attention. hash_algorithm: how blocks are named to the outside; it never decides a hit. "xxh3_128",
    "sha256" or a callable bytes -> bytes; or for vLLM's names "vllm:sha256_cbor" and the like, or a `VllmNames`, see
    `wire.names`. enable_caching: whether prefixes are reused. enable_events: whether changes of the cached set are
    recorded for `take_events`; `EventOptions` to record more than the device's. Take them regularly, since they are
    kept until taken. num_history_blocks: how many removed prefixes `explain` remembers. 0 costs nothing; otherwise each
    block is hashed when it is cached, and each remembered prefix takes about 250 bytes. pin_budget: share of the pool
    that all pins together may hold, 0.0 to 1.0. tiers: where copies of cached blocks are kept below the device, the
    fastest first, see `tiers`. eviction: which cached block is evicted first: a name ("lru", "slru", "s3fifo" or
    "sessions"), or what makes an `EvictionPolicy`, such as its class; None: the least recently used, at no cost. debug:
    run `check()` after every change. Raises InvalidArgumentError, and what making a policy raises. O(num_blocks).
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex | None = None,
        *,
        first_block_id: SupportsIndex = 0,
        groups: Iterable[Group] | None = None,
        hash_algorithm: Text | HashFunction | Names = "xxh3_128",
        enable_caching: Flag = True,
        enable_events: Flag | EventOptions = False,
        num_history_blocks: SupportsIndex = 0,
        pin_budget: SupportsFloat = 0.5,
        tiers: Iterable[Tier] = _NO_TIERS,
        eviction: Text | PolicyFactory | None = None,
        debug: Flag = False,
    ) -> None:
        caches, options = check_flag("enable_caching", enable_caching), check_event_options(enable_events)
        debugs = check_flag("debug", debug)
        size = None if block_size is None else check_count("block_size", block_size, 1)
        num_remembered = check_count("num_history_blocks", num_history_blocks, 0)
        share = check_share("pin_budget", pin_budget, "a share of the pool from 0.0 to 1.0")
        max_pinned = int(share * check_count("num_blocks", num_blocks, 1) + 1e-6)  # 0.29 of 100 is 29
        super().__init__("manager", debug=debugs)
        names = get_names(hash_algorithm)
        if groups is None:
            index = PrefixIndex(size or 16, names)
            self._slots = SlotAllocator(BlockPool(num_blocks, index, first_block_id), self)
        else:
            from kvblocks.groups.layout import make_layout
            from kvblocks.groups.slots import make_slots

            layout = make_layout(size, groups)
            self._slots = make_slots(num_blocks, layout, names, self, first_block_id)
        self._pool = self._slots.pool
        self._index = self._pool.index
        self.block_size = self._index.block_size
        self.enable_caching = caches
        self._max_pinned_blocks = max_pinned
        self._history = None if not num_remembered else self._make_history(num_remembered)
        self._recording = None if options is None else self._start_recording(options, names)
        self._now: int | float = 0.0
        self._eviction = None if eviction is None else self._make_eviction(eviction)
        self._traffic: Traffic | None = None
        self._tiers: Tiers | None = None
        self._sampler: BlockSampler | None = None
        self._pins: Pins | None = None
        self._holds: BlockHolds | None = None
        self._quotas: TenantQuotas | None = None
        self._sessions: Sessions | None = None
        self._groups: tuple[Group, ...] | None = self._slots.groups  # None: one of full attention
        self._in_flight = InFlight(self._index, self)
        self._sequences: dict[Hashable, Sequence] = {}
        self._last_step: Step = ([], {})  # kept until one of its sequences is freed: the next batch is mostly the same
        # When debugging, with side groups or digests, a token that begins or fills a block takes the slow path.
        self._fills_quickly = not debugs and not self._index.needs_digests and not self._slots.has_side_groups
        self._num_queries = self._num_hits = self._num_queried_tokens = self._num_hit_tokens = 0
        if tiers is not _NO_TIERS:
            self._traffic = self._make_traffic(tiers)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool. O(1)."""
        return len(self._pool.blocks)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The pool's blocks, in the order of their ids. The list is the pool's own; don't change it. O(1)."""
        return self._pool.blocks

    @property
    def first_block_id(self) -> int:
        """The id of the first block; the other ids follow it. O(1)."""
        return self._pool.first_block_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence, pin or hold owns, cached ones included. O(1)."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool that sequences, pins and holds own, 0.0 to 1.0. O(1)."""
        return 1.0 - self._pool.num_free_blocks / len(self._pool.blocks)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks handed out since the manager was made. Useful as a clock that needs no time. O(1)."""
        return self._slots.num_taken_blocks

    @property
    def now(self) -> int | float:
        """The caller's clock, for eviction policies, in any unit. Set it once a step, for example. At first 0. O(1).

        The manager reads no clock of its own. `expire_pins` sets `now`, too. Setting it raises InvalidArgumentError
        unless it is a number.
        """
        return self._now

    @now.setter
    def now(self, now: SupportsFloat) -> None:
        self.check_whole()
        self._tell_time(check_number("now", now))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers, in order; one of full attention unless others were given. O(1)."""
        if self._groups is None:
            from kvblocks.groups.kinds import FullAttention

            self._groups = (FullAttention(self.block_size),)
        return self._groups

    @property
    def alignment(self) -> int:
        """The largest block size of a group, in tokens. Every hit is a multiple of it. O(1)."""
        return self._slots.alignment

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
            num_limited_tokens=self._slots.num_limited_tokens,
            num_eviction_failures=0 if self._eviction is None else self._eviction.num_failures,
        )

    # The calls of a step.

    def get_computed_blocks(self, sequence: Given[Sequence], max_tokens: SupportsIndex | None = None) -> CacheHit:
        """Return the longest cached prefix of a sequence that isn't allocated. Changes nothing.

        Looks at all known tokens, so a sequence that was freed hits the blocks of its generated tokens too. max_tokens:
        the most tokens in the hit's blocks; pass `sequence.num_tokens - 1` if the engine can't recompute a last token
        whose KV is cached. The hit is empty when caching is off. Raises SequenceStateError when the sequence holds
        blocks, InvalidArgumentError. One dict lookup and one memcmp for each run of blocks that were cached together;
        at worst, if each block is a run of its own, O(blocks).
        """
        if type(sequence) is not Sequence:  # an object that only looks like one would fail later, in a change
            as_sequence("get_computed_blocks", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        if self.change_state or own.owner is not None:
            self.check_whole()
            if own.owner is not None:
                raise SequenceStateError(f"get_computed_blocks: expected a sequence without blocks, got {own}")
        if max_tokens is not None or self._slots.has_side_groups or not self.enable_caching:
            return self._find_hit(own, None if max_tokens is None else check_count("max_tokens", max_tokens, 0))
        tokens = own.tokens  # from here on the same as `_find_hit`, inlined for speed
        num_tokens = len(tokens)
        block_size = self.block_size
        view = tokens if type(tokens) is memoryview else memoryview(tokens)
        keys = None if own.keys is None else own.encoded_keys(block_size)
        blocks = self._index.match(view, keys, num_tokens // block_size)
        return CacheHit(own, blocks, len(blocks) * block_size, num_tokens, self._in_flight)

    def allocate_slots(
        self,
        sequence: Given[Sequence],
        num_new_tokens: SupportsIndex | None = None,
        hit: Given[CacheHit] | None = None,
        num_lookahead_tokens: SupportsIndex = 0,
        num_external_computed_tokens: SupportsIndex = 0,
        num_total_tokens: SupportsIndex | None = None,
        num_in_flight_tokens: SupportsIndex = 0,
        delay_cache_blocks: Flag = False,  # noqa: FBT002  # meant to be named; see docs/design/core/hot-path.md
        loads: Iterable[TierHit] = _NO_TIERS,
    ) -> list[KVCacheBlock] | None:
        """Make room for the next `num_new_tokens` known tokens (None: all the rest) and cache the blocks that get full.

        A sequence without blocks starts with this call. `hit` is what `get_computed_blocks` found for it (None: use
        nothing from the cache), and the new tokens are those behind the hit. For a sequence that has blocks this is the
        next chunk, and `hit` is None.

        num_lookahead_tokens: slots to add behind the new tokens for tokens that aren't known yet, such as drafts.
        Nothing in them is cached before `append_slots` says which tokens were accepted.

        num_total_tokens: replaces num_lookahead_tokens. The sequence gets room for its first num_total_tokens tokens,
        known or not. The known ones among them are new tokens, or only the next num_new_tokens if that is given. If
        there is room already, nothing happens.

        num_in_flight_tokens: how many of the last tokens with slots belong to steps that still run; windows keep what
        these tokens see.

        num_external_computed_tokens: known tokens whose KV comes from elsewhere, such as a transfer. They are delayed,
        and their slots come before those of the new tokens. num_new_tokens may be 0 with external tokens, and with
        any hit but a full one.

        loads: external tokens that tiers have: what `tiers.find` returned, or the first items of it. The transfers
        begin with the next `tiers.take_transfers`. Put the sequence in no step until `tiers.complete` says that it is
        loaded.

        delay_cache_blocks: cache nothing of these tokens, nor of any behind them, before `cache_blocks` says that they
        are written; call `rewind` if they never are.

        Returns the new blocks, perhaps none; or None, with nothing changed, when the pool can't serve the call.

        Raises SequenceStateError (another manager's sequence, an id in use, a hit for a sequence that has blocks),
        StaleHitError (the hit's blocks were evicted after the lookup), InvalidArgumentError (too few tokens left).
        O(hit blocks + new blocks).
        """
        if self.change_state:
            self.check_whole()
        if type(sequence) is not Sequence or (hit is not None and type(hit) is not CacheHit):
            check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        found: CacheHit | None = hit  # type: ignore[assignment]
        num_wanted = None if num_new_tokens is None else asked_once(num_new_tokens)
        num_lookahead = num_external = num_in_flight = 0
        if num_lookahead_tokens is not _NONE:
            num_lookahead = check_count("num_lookahead_tokens", num_lookahead_tokens, 0)
        if num_external_computed_tokens is not _NONE:
            num_external = check_count("num_external_computed_tokens", num_external_computed_tokens, 0)
        total = None if num_total_tokens is None else check_count("num_total_tokens", num_total_tokens, 1)
        if num_in_flight_tokens is not _NONE:
            num_in_flight = check_count("num_in_flight_tokens", num_in_flight_tokens, 0)
        delayed = delay_cache_blocks is not False and check_flag("delay_cache_blocks", delay_cache_blocks)
        found_below: list[TierHit] | None = None
        if loads is not _NO_TIERS:
            found, found_below, num_external = self._check_loads(own, found, loads, num_external)
        is_start = own.owner is None
        if is_start:
            start = 0 if found is None else check_hit(self._index, own, found)
        else:
            start = self._check_continued(own, found)
        end = len(own.tokens)
        if num_external or total is not None:
            room = self._find_room(own, found, (start, num_external, total), num_wanted, num_lookahead)
            if room is None:
                return []
            end, num_lookahead = room
            delayed = (delayed or num_external > 0) and end > start
        elif start == end:
            raise InvalidArgumentError(f"allocate_slots: expected tokens without slots, got {own} with none left")
        elif num_wanted is not None:
            end = start + check_count("num_new_tokens", num_wanted, 0 if ends_in_block(found) else 1, end - start)
        if is_start:
            blocks = self._start(own, end, end + num_lookahead, found, delayed=delayed)
        else:
            blocks = self._slots.grow(own, end, end + num_lookahead, num_in_flight, delayed=delayed)
        if blocks is not None and (self._in_flight.sequences or delayed or end < len(own.tokens)):
            self._in_flight.note(own)
        if found_below and blocks is not None and self._traffic is not None:
            self._traffic.begin_loads(own, found_below)
        self.change_state = self._rest_state  # `_end`, inlined
        if self.change_state:
            self.check()
        return blocks

    def append_slots(
        self,
        sequence: Given[Sequence],
        token_ids: TokenIds,
        delay_cache_blocks: Flag = False,  # noqa: FBT002  # by position too: a keyword alone costs each token 25 ns
    ) -> list[KVCacheBlock] | None:
        """Add decoded tokens and make room for them, in reserved slots first. Blocks that get full are cached.

        token_ids: one or several accepted tokens, in any form that `Sequence` takes. delay_cache_blocks: as in
        `allocate_slots`. Returns the new blocks, perhaps none; a block that replaces a shared one (`fork`, `truncate`)
        comes first. Returns None, with nothing changed and the tokens not added, when the pool can't serve the call.

        Raises SequenceStateError (not this manager's, or it has tokens without slots) and InvalidTokensError. O(1) for
        each token, and O(block_size) for one that fills a block.
        """
        if self.change_state or delay_cache_blocks is not False:
            return self._append_otherwise(sequence, token_ids, delay_cache_blocks)
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code checks its type here
            is_ours = own.tail_owner is self
        except (AttributeError, TypeError):
            raise not_a_sequence("append_slots", sequence) from None
        if is_ours and type(token_ids) is list and len(token_ids) == 1:
            num_tokens = own.num_computed_tokens
            if num_tokens < own.fits_below:
                # Fast path, for 14 of 16 decoded tokens: the token fits the last block and doesn't fill it.
                try:
                    own.tokens.append(token_ids[0])  # type: ignore[union-attr]  # a view has no append
                    own.num_computed_tokens = num_tokens + 1
                except BaseException as error:
                    self.change_state = CHANGING
                    own.truncate_tokens(own.num_computed_tokens)  # drop a token that isn't counted
                    self.change_state = IDLE
                    if own.num_computed_tokens > num_tokens or not isinstance(error, _NO_PLAIN_TOKEN):
                        raise
                else:
                    return []
            elif (
                self._fills_quickly
                and num_tokens == len(own.tokens)
                and type(token_ids[0]) is int
                and 0 <= token_ids[0] <= MAX_TOKEN_ID
            ):
                self.change_state = CHANGING
                blocks = self._slots.append_one(own, token_ids[0])
                self.change_state = IDLE
                return blocks
        packed = pack_tokens(token_ids)  # first, since it may run code of the caller's
        if own.owner is not self or own.num_computed_tokens != len(own.tokens):
            self._check_appendable(own, "append_slots")
        blocks = self._slots.append(own, packed, delayed=False)
        self._end()
        return blocks

    def append_step(
        self, sequences: Items[Sequence], token_ids: TokenIds, *, delay_cache_blocks: Flag = False
    ) -> list[tuple[int, int, int]] | None:
        """Add one decoded token to each of `sequences` and make room for it: a whole decode step in one call.

        token_ids: one for each sequence. Returns (index in `sequences`, index in its block table, block id) for each
        sequence whose table changed: all that an engine has to write to the step's block tables. Returns None, with
        nothing changed for any sequence, when the pool can't serve all of them.

        Raises SequenceStateError, InvalidTokensError, and InvalidArgumentError for repeated sequences or another number
        of tokens than of sequences. O(sequences).
        """
        if self._slots.num_groups > 1:
            got = self._slots.num_groups
            raise InvalidArgumentError(
                f"append_step: expected a manager of one group, got {got}: use append_group_step"
            )
        delayed = delay_cache_blocks is not False and check_flag("delay_cache_blocks", delay_cache_blocks)
        step = self._check_step(sequences, token_ids)
        if step is None:
            return []
        batch, tokens, at_boundary = step
        changes = self._slots.append_step(batch, tokens, at_boundary, self._last_step[1], delayed=delayed)
        if delayed:
            self._note_in_flight(batch)
        self._end()
        return changes

    def append_group_step(
        self, sequences: Items[Sequence], token_ids: TokenIds, *, delay_cache_blocks: Flag = False
    ) -> list[tuple[int, int, int, int]] | None:
        """Add one decoded token to each of `sequences`, as `append_step`, whatever the groups are.

        Returns (index in `sequences`, group, index in its block table, block id) for each table entry that changed,
        except for entries that became dead. Returns None, with nothing changed, when the pool can't serve all of them.
        Raises what `append_step` raises. O(sequences x groups).
        """
        delayed = delay_cache_blocks is not False and check_flag("delay_cache_blocks", delay_cache_blocks)
        step = self._check_step(sequences, token_ids)
        if step is None:
            return []
        batch, tokens, at_boundary = step
        changes = self._slots.append_group_step(batch, tokens, at_boundary, self._last_step[1], delayed=delayed)
        if delayed:
            self._note_in_flight(batch)
        self._end()
        return changes

    def cache_blocks(self, sequence: Given[Sequence], num_computed_tokens: SupportsIndex) -> int:
        """Say that the KV of the first `num_computed_tokens` tokens is written, and cache the blocks that they fill.

        For engines that must write a step's keys and values before others may read them. These pass
        delay_cache_blocks=True whenever they make room. num_computed_tokens: counted from the first token, at most
        `sequence.num_computed_tokens`; a smaller number than before changes nothing. Blocks that are cached already, by
        sequences that share them, stay as they are. Blocks that stopped being cached, by an abort for example, are
        cached again. Returns how many tokens of the sequence are then cached.

        A sequence from before a reset caches nothing until `renew`. While a sequence loads from a tier, only tokens
        before the loaded ones count. Raises SequenceStateError (not this manager's, or freed) and
        InvalidArgumentError. O(blocks that get cached).
        """
        given = asked_once(num_computed_tokens)
        own = self._check_owned(sequence, "cache_blocks")
        number = check_count("num_computed_tokens", given, 0, own.num_computed_tokens)
        if self._traffic is not None:
            number = self._traffic.num_writable(own, number)
        self._commit(self._slots.prepare_commit(own, number))
        self._end()
        return own.num_cached_blocks * self.block_size if own.epoch is self._index.epoch else 0

    def get_num_blocks_to_allocate(
        self, sequence: Given[Sequence], num_total_tokens: SupportsIndex, *, hit: Given[CacheHit] | None = None
    ) -> int:
        """Return how many free blocks are needed to have room for the first `num_total_tokens` tokens, known or not.

        The free blocks of `hit` count, since `allocate_slots` would take them, too. `allocate_slots` succeeds if there
        are so many free blocks (`num_free_blocks`, and what pins would give up), unless windows have to keep more
        blocks (`num_in_flight_tokens`). Changes nothing. Raises what `allocate_slots` raises for these arguments.
        O(hit blocks).
        """
        self.check_whole()
        check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        found: CacheHit | None = hit  # type: ignore[assignment]
        number = check_count("num_total_tokens", num_total_tokens, 0)
        if own.owner is not None:
            self._check_continued(own, found)
        elif found is not None:
            check_hit(self._index, own, found)
        return self._slots.count_missing(own, number, found)

    def reserve_slots(self, sequence: Given[Sequence], num_tokens: SupportsIndex) -> list[KVCacheBlock] | None:
        """Make room for `num_tokens` more tokens than are known, such as drafts. Nothing of them is cached.

        `append_slots` fills the room. Returns the new blocks, perhaps none; or None, with nothing changed, when the
        pool can't serve the call. Raises SequenceStateError and InvalidArgumentError. O(new blocks).
        """
        number = check_count("num_tokens", num_tokens, 0)
        blocks = self._slots.reserve(self._check_owned(sequence, "reserve_slots"), number)
        self._end()
        return blocks

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) ids of blocks to copy, in order, since the last call, and forget them.

        Only sequences that were forked or truncated need copies. The engine copies the blocks' KV in all layers, with
        the same result as copying one pair after the other. It copies before it stores any of the step's keys and
        values, and before a transfer writes to blocks that a later call returns. O(1).
        """
        self.begin_change()
        copies = self._slots.take_copies()
        self._end()
        return copies

    def take_group_copies(self) -> list[tuple[int, int, int]]:
        """Return the copies since the last call, as `take_copies`, with their group: (group, source, destination).

        Only the group's layers need the copy. A block id stands for the same memory in each group, so copying all of
        the block does no harm.
        """
        self.check_whole()
        groups = self._slots.copy_groups()
        return [(group, *pair) for group, pair in zip(groups, self.take_copies(), strict=True)]

    def free(self, sequence: Given[Sequence]) -> None:
        """Give the sequence's blocks back, last first. Its cached blocks stay cached until they are reused.

        All tokens with slots must have been computed. If no step has computed the token that was appended last, call
        `abort` with num_tokens - 1 instead, since that token must not stay cached. The sequence keeps its tokens and
        can be allocated again. Raises SequenceStateError when it isn't this manager's or holds no blocks (a double
        free). O(blocks), and a lookup for each pin that has the same first tokens and lacks blocks. The first call
        after a step also costs O(sequences).
        """
        self._give_back(sequence, "free", None)

    def abort(self, sequence: Given[Sequence], num_computed_tokens: SupportsIndex) -> None:
        """Free a sequence of a step that died. The KV of its first `num_computed_tokens` tokens is written.

        Blocks that it cached beyond these tokens stop being cached, and so does everything below them. Abort every
        sequence of the step. This includes sequences that may have hit such a block, since it is still in their
        tables, and sequences that waited for a copy (`take_copies`). Raises SequenceStateError,
        InvalidArgumentError. O(blocks + blocks of pins).
        """
        self._give_back(sequence, "abort", check_integer("num_computed_tokens", num_computed_tokens))

    # Forks, truncations and resets.

    def fork(self, sequence: Given[Sequence], sequence_id: Hashable) -> Sequence:
        """Return a new sequence with the same tokens and keys that shares all blocks that hold them.

        For several samples of one prompt, or beam search. Both sequences may then get more tokens. The first to add a
        token to an unfilled block that both hold gets a block of its own, and `take_copies` says what to copy there.
        Reserved slots are not shared. The shared tokens must be computed before a token is added to either sequence. If
        the step that was to compute them dies, both must be aborted.

        Raises SequenceStateError (not this manager's, or an id in use) and InvalidArgumentError. O(tokens + blocks).
        """
        sequence = self._check_owned(sequence, "fork")
        twin = sequence.fork(sequence_id)
        self._claim(twin, "fork")
        self._slots.fork(sequence, twin)
        self._in_flight.note(twin)
        if self._traffic is not None:
            self._traffic.note_fork(sequence, twin)
        self._end()
        return twin

    def truncate(
        self, sequence: Given[Sequence], num_tokens: SupportsIndex, *, num_computed_tokens: SupportsIndex | None = None
    ) -> None:
        """Keep the first `num_tokens` tokens of a sequence; drop the others, such as rejected drafts, and their slots.

        num_tokens: at least the prompt's, at most all known ones. num_computed_tokens: how many tokens have their KV
        written, at least those that are kept; None: all that have slots, rejected drafts included. Blocks that are
        cached beyond these tokens stop being cached, as in `abort`.

        Blocks that aren't needed any more are given back, last first. Those that were written stay cached, and a token
        that is added later never overwrites them: see `take_copies`. Raises SequenceStateError and
        InvalidArgumentError. O(tokens dropped), and what `free` and `abort` cost.

        With windowed groups a sequence can always go back to what was computed before the last call that made room for
        tokens. It can go back further only while it has all blocks that the next token sees. Otherwise the call raises
        SequenceStateError.
        """
        num_tokens = asked_once(num_tokens)
        if num_computed_tokens is not None:
            num_computed_tokens = asked_once(num_computed_tokens)
        sequence = self._check_owned(sequence, "truncate")
        end = check_count("num_tokens", num_tokens, sequence.num_prompt_tokens, sequence.num_tokens)
        num_left = min(sequence.num_computed_tokens, end)
        most = written = sequence.num_computed_tokens
        if num_computed_tokens is not None:
            written = check_count("num_computed_tokens", num_computed_tokens, num_left, most)
        if sequence.side_tables is not None:
            sequence.side_tables.check_back(num_left, sequence.sequence_id, "truncate")
        self.begin_change()
        if self._eviction is not None:
            self._eviction.giver = sequence
        if num_computed_tokens is not None:
            self._forget_unwritten(sequence, written)
        self._slots.truncate(sequence, end)
        if self._eviction is not None:
            self._eviction.giver = None
        self._in_flight.note(sequence)
        if self._traffic is not None:
            self._traffic.note_cut(sequence)
        self._end()

    def rewind(self, sequence: Given[Sequence], num_tokens: SupportsIndex) -> int:
        """Keep the slots of the first `num_tokens` tokens and give the others back. The tokens stay.

        For a load that failed after these tokens had arrived: `allocate_slots` then makes room to compute the rest. The
        number is rounded down to where a block ends in all groups, so that no block is written twice. Returns how many
        tokens keep their slots. Blocks that are cached behind them stop being cached, as in `abort`. Blocks of a hit
        are given back and stay cached (see `evict_blocks`). Raises SequenceStateError (not this manager's, or blocks
        that would be needed have left a window) and InvalidArgumentError. O(blocks given back).
        """
        given = asked_once(num_tokens)
        own = self._check_owned(sequence, "rewind")
        number = check_count("num_tokens", given, 0, own.num_computed_tokens)
        end = number // self._slots.alignment * self._slots.alignment
        if own.side_tables is not None:
            own.side_tables.check_back(end, own.sequence_id, "rewind")
        self.begin_change()
        self._go_back(own, end)
        if self._traffic is not None:
            self._traffic.note_cut(own)
        self._end()
        return own.num_computed_tokens

    def renew(self, sequence: Given[Sequence]) -> None:
        """Say that the KV of a sequence from before a reset of the cache is still valid, so that it is cached again.

        For a reset that had another reason than new weights, or after the KV was computed again. The sequence's full
        blocks are cached at once, and later ones when they fill. Raises SequenceStateError when it isn't this manager's
        or isn't from before a reset. O(its full blocks).
        """
        sequence = self._check_owned(sequence, "renew")
        if not self.enable_caching or sequence.epoch is self._index.epoch:
            raise SequenceStateError(f"renew: expected a sequence from before a reset of the cache, got {sequence}")
        digests = self._slots.digests_from(sequence, 0, sequence.num_written_tokens)
        self.begin_change()
        self._slots.cache_from(sequence, 0, sequence.num_written_tokens, digests)
        self._end()

    def reset_prefix_cache(self) -> None:
        """Stop caching everything, for example after a change of weights: no block cached before is hit again.

        May be called at any time. Sequences keep their blocks, and cache nothing until they are freed and allocated
        again, unless `renew` says that their KV is still valid. Pins stay, and hold their prefixes when these are
        cached again. O(1) but for giving memory back; O(blocks that pins hold); and O(cached blocks) with a removal
        history, which remembers them.
        """
        self.begin_change()
        self._index.clear()
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        if self._traffic is not None:
            self._traffic.clear()
        self._end()

    def evict_blocks(self, block_ids: Iterable[SupportsIndex]) -> int:
        """Stop caching these blocks, and everything below them. Their owners keep them.

        For KV that turns out to be bad, such as a load with errors. Where a duplicate holds the same prefix, it takes
        over, and what is below it stays cached. So pass the blocks that were computed from bad ones, too. Returns how
        many blocks stopped being cached. Raises InvalidArgumentError for ids that aren't this pool's. O(blocks + blocks
        below them).
        """
        ids = listed("block_ids", "an iterable of ints", block_ids)
        first, end = self._pool.first_block_id, self._pool.end_block_id - 1
        blocks = [
            self._pool.blocks[check_count(f"block_ids: position {i}", block_id, first, end) - first]
            for i, block_id in enumerate(ids)
        ]
        self.begin_change()
        num_before = self._pool.num_cached_blocks
        if self._traffic is not None:
            self._traffic.note_bad(blocks)
        self._pool.uncache(blocks)
        if self._traffic is not None:
            self._traffic.note_forgotten()
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        self._end()
        return num_before - self._pool.num_cached_blocks

    def forget_salt(self, salt: Text | None) -> int:
        """Stop caching everything with this salt (None: without a salt), here and in all tiers: delete a tenant's data.

        Sequences with this salt keep their blocks, as after `reset_prefix_cache`: they cache nothing until they are
        freed and allocated again, or `renew` says that their KV is valid. Stores under way are dropped. Loads under way
        end normally, but only for the sequences that wait for them. Pins stay. Returns how many blocks, slots of tiers
        included, stopped being cached. Raises InvalidArgumentError. O(runs + sequences + blocks that
        stopped being cached).
        """
        name = check_name("salt", salt)
        from kvblocks.retention.salts import ended_epoch, forget_salt

        self.begin_change()
        number, ended = forget_salt(self._pool, name), ended_epoch(self._index.epoch)
        for sequence in self._sequences.values():
            if sequence.salt == name and sequence.epoch is self._index.epoch:
                sequence.epoch = ended
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        if self._traffic is not None:
            number += self._traffic.forget_salt(name)
        self._end()
        return number

    # What stays: pins and quotas.

    @property
    def pins(self) -> list[Pin]:
        """The pins that haven't ended, oldest first. O(pins)."""
        return [] if self._pins is None else list(self._pins.pins)

    @property
    def max_pinned_blocks(self) -> int:
        """How many blocks the prefixes of all pins together may have: `pin_budget` of the pool. O(1)."""
        return self._max_pinned_blocks

    @property
    def holds(self) -> BlockHolds:
        """Holds of blocks for others than sequences, such as transfers, and the calls for them. O(1)."""
        if self._holds is None:
            from kvblocks.retention.holds import BlockHolds as Holds

            self._holds = Holds(self, self._slots, self._check_owned, self.free, self._end)
        return self._holds

    @property
    def sessions(self) -> Sessions:
        """Tell eviction policies here that a conversation pauses or has ended. O(1)."""
        if self._sessions is None:
            from kvblocks.retention.sessions import Sessions as Made

            self._sessions = Made(self, self._eviction, self._end)
        return self._sessions

    @property
    def tiers(self) -> Tiers:
        """The tiers below the device, and the calls for transfers. Empty unless tiers were given. O(1)."""
        if self._tiers is None:
            from kvblocks.tiers.tiers import Tiers as Made

            traffic = self._make_traffic(()) if self._traffic is None else self._traffic
            self._tiers = Made(self, traffic, self._calls())
        return self._tiers

    @property
    def last_refusal(self) -> Refusal | None:
        """Why the last call that returned None did so; None before the first such call. O(1)."""
        return self._slots.last_refusal

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

        token_ids, salt, lora, extra_keys: as for a `Sequence`. priority: 0 to 100; or (start, end, priority) for ranges
        of tokens. With ranges, a block gets at least the priority of the blocks behind it, and blocks behind the last
        range aren't pinned. When a call needs blocks and only pinned ones are left, those of lowest priority are given
        up; those of priority 100 never are. expires_at: on the caller's clock, see `expire_pins`; None: never.

        Raises PinBudgetError when the prefixes of all pins together would have more blocks than `pin_budget` allows (a
        block in two pins counts twice), InvalidArgumentError and InvalidTokensError. O(tokens + pins). While the pin
        lacks blocks, freeing a sequence that has the same first tokens costs one more lookup. While there are pins, a
        call that finds too few free blocks costs O(pins) more, and O(pinned blocks) if a shared block got or lost an
        owner since the last such call.
        """
        self.check_whole()
        if not self.enable_caching:
            raise InvalidArgumentError("pin: expected enable_caching=True when the manager was made, got False")
        end = None if expires_at is None else check_number("expires_at", expires_at, "a number or None")
        copied = bytes(memoryview(pack_tokens(token_ids)).cast("B"))  # a pin may outlive the caller's buffer
        prefix = Sequence("pin", copied, salt=salt, lora=lora, extra_keys=extra_keys)
        pins = self._get_pins()
        pin = pins.make(prefix, priority, end)
        self.begin_change()
        self._slots.soft_holds = pins
        pins.add(pin)
        self._end()
        return pin

    def unpin(self, pin: Given[Pin]) -> None:
        """End a pin. Its blocks stay cached until they are reused. Raises InvalidArgumentError. O(its blocks)."""
        self.check_whole()
        from kvblocks.retention.pins import Pin

        given: Any = pin
        if not is_a(given, Pin):
            raise wrong("unpin", "a Pin", given)
        if self._pins is None or given not in self._pins.pins:
            raise InvalidArgumentError(f"unpin: expected a pin of this manager that hasn't ended, got {given}")
        self.begin_change()
        self._unpin(self._pins, [given])

    def expire_pins(self, now: SupportsFloat) -> list[Pin]:
        """End and return the pins whose `expires_at` is at or before `now`, on the clock of the property `now`.

        Also sets that property. The pins' blocks become free, and are reused before any that is still pinned. No pin
        expires by itself: call this now and then. Raises InvalidArgumentError. O(pins + blocks freed).
        """
        self.check_whole()
        time = check_number("now", now)
        self._tell_time(time)
        if self._pins is None:
            return []
        expired = self._pins.expired(time)
        self.begin_change()
        self._unpin(self._pins, expired)
        return expired

    def set_quota(self, salt: Text | None, max_blocks: SupportsIndex | None) -> None:
        """Limit how many blocks sequences of one salt (None: no salt) may keep cached while others want the space.

        max_blocks: None removes the limit. Beyond the limit, sequences of this salt may still use free space for their
        cached blocks, but their least recently used cached blocks are then evicted before those of others. Owned blocks
        count, and are never evicted. Raises InvalidArgumentError. O(pool).
        """
        self._check_has_primary("set_quota")
        name = check_name("salt", salt)
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = self._get_quotas()
        self.begin_change()
        quotas.set_quota(name, number)
        self._use_quotas(quotas)

    def set_default_quota(self, max_blocks: SupportsIndex | None) -> None:
        """Set the quota of each salt, except None, that has no quota of its own. As `set_quota`. O(pool)."""
        self._check_has_primary("set_default_quota")
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = self._get_quotas()
        self.begin_change()
        quotas.set_default(number)
        self._use_quotas(quotas)

    def quotas(self) -> list[QuotaUsage]:
        """Return quota and usage of each salt that has a quota of its own or anything cached. O(salts)."""
        return [] if self._quotas is None else self._quotas.usage()

    def quota_of(self, salt: Text | None) -> int | None:
        """Return the quota of a salt, its own or the default; None: it has none. Raises InvalidArgumentError. O(1)."""
        name = check_name("salt", salt)
        return None if self._quotas is None else self._quotas.limit_of(name)

    # Reports for people and engines.

    def shared_prefixes(
        self,
        sequences: Items[Sequence],
        *,
        min_blocks: SupportsIndex = 1,
        num_visible_tokens: Items[SupportsIndex] | None = None,
    ) -> list[SharedPrefix]:
        """Return which of `sequences`, a batch, share blocks, for cascade attention; parents before children.

        See `find_shared_prefixes`. With several groups of layers it looks at the primary group's blocks. Raises
        SequenceStateError (not this manager's) and InvalidArgumentError. Changes nothing. Near-linear in the batch's
        blocks.
        """
        self.check_whole()
        batch = listed("sequences", "an iterable of sequences", sequences)
        self._check_has_primary("shared_prefixes")
        for sequence in batch:
            self._check_owned(sequence, "shared_prefixes")
        from kvblocks.observe.shared_prefixes import find_shared_prefixes

        return find_shared_prefixes(batch, self.block_size, min_blocks, num_visible_tokens)

    def prefix_rows(self) -> list[PrefixRow]:
        """Return the cached prefixes as rows of a table, for people. Changes nothing. O(cached blocks)."""
        self.check_whole()
        self._check_has_primary("prefix_rows")
        from kvblocks.observe.picture import prefix_rows

        return prefix_rows(self._index)

    def to_dot(self, *, max_nodes: SupportsIndex | None = 200) -> str:
        """Return the cached prefixes as a Graphviz document of at most `max_nodes` nodes. As `prefix_rows`."""
        from kvblocks.observe.picture import to_dot

        return to_dot(self.prefix_rows(), max_nodes)

    def explain(self, sequence: Given[Sequence]) -> Explanation:
        """Say why the longest cached prefix of a sequence ends where it does. Changes nothing.

        Knows of evictions, aborts and resets only with num_history_blocks. With several groups it names the one that
        ended the hit. With tiers it says what they have behind the hit. Raises InvalidArgumentError. For people, since
        it costs O(runs in the cache + tokens + blocks cached for them under any keys), and O(slots) for tiers that have
        some of the tokens.
        """
        self.check_whole()
        own = as_sequence("explain", sequence)
        from kvblocks.observe.explanation import explain

        below = [] if self._traffic is None else self._traffic.find(self._find_hit(own, None))
        parts = tuple([found.part() for found in below])
        return explain(self._index, self._slots, self._history, own, parts)

    def sequence(self, sequence_id: Hashable) -> Sequence | None:
        """Return the allocated sequence of this id, None if there is none.

        For callers that have lost the object and want to free it, for example. Raises InvalidArgumentError, and what
        the id's hash and comparison raise. Changes nothing. O(1).
        """
        self.check_whole()
        check_id("sequence_id", sequence_id)
        return self._sequences.get(sequence_id)

    def block_hashes(self, sequence: Given[Sequence]) -> list[bytes]:
        """Return the digests of a sequence's full blocks of known tokens, allocated or not, cached or not.

        They are the names that `block.block_hash` and events use, for a router or a store. Raises InvalidArgumentError,
        and what the hash function raises. Changes nothing. O(tokens).
        """
        self.check_whole()
        own = as_sequence("block_hashes", sequence)
        from kvblocks.observe.digests import block_digests

        return block_digests(self._index, own)

    def find_block(self, digest: Given[bytes]) -> KVCacheBlock | None:
        """Return the cached block with this digest, as `block_hashes` and events give it; None if there is none.

        With duplicates it is the one that hits get. Raises InvalidArgumentError. Changes nothing. For people and tools:
        digests decide no hit, so there is no map of them. So this costs O(cached blocks), and the first time O(cached
        tokens).
        """
        self.check_whole()
        from kvblocks.observe.digests import find_by_digest

        return find_by_digest(self._index, digest)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cached set since the last call, oldest first, and forget them. O(1).

        With vLLM's names, several prefixes may share a name. The events are then about names, and the call costs
        O(blocks in the events). Raises InvalidArgumentError unless the manager was made with enable_events.
        """
        if self._recording is None:
            raise InvalidArgumentError("take_events: expected enable_events=True when the manager was made, got False")
        self.begin_change()
        events = self._recording.take()
        self._end()
        return events

    def group_usage(self) -> list[GroupUsage]:
        """Return how much of the pool each group uses, by group. For people and metrics: O(pool)."""
        self.check_whole()
        num_cached = self._slots.num_cached_by_group()
        held: list[set[int]] = [set() for _ in self.groups]
        for sequence in self._sequences.values():
            for group, blocks in enumerate(held):
                blocks |= {block.block_id for block in sequence.group_blocks(group) if block is not None}
        return [
            GroupUsage(group, len(blocks), number)
            for group, (blocks, number) in enumerate(zip(held, num_cached, strict=True))
        ]

    def watch_blocks(self, taken: BlockCallback, touched: BlockCallback) -> BlockCallbacks:
        """Call `taken` with blocks that are taken from the pool, and `touched` with blocks that get one more owner.

        Both get a list of blocks, in the middle of a change: they must not call the manager nor raise. `stop` of the
        returned object ends the calls. For metrics of the caller's own; ours are `CacheMetrics`. Raises
        InvalidArgumentError. O(watchers).
        """
        self.check_whole()
        from kvblocks.observe.block_callbacks import BlockCallbacks as Callbacks

        for name, function in (("taken", taken), ("touched", touched)):
            if not callable(function):
                raise wrong(name, "a callable", function)
        return Callbacks(self._index, taken, touched)

    def start_sampling(self, every: SupportsIndex, now: Callable[[], float], bounds: Iterable[float]) -> BlockSampler:
        """Record the lives of about one block in `every` from now on. `metrics.CacheMetrics` shows them.

        now, bounds: see `BlockSampler`. Raises InvalidArgumentError, also when a sampler is recording already.
        O(num_blocks).
        """
        self.check_whole()
        from kvblocks.observe.block_sampler import BlockSampler, check_bounds, choose_sample

        number, limits = check_count("every", every, 1), check_bounds(bounds)
        check_clock("now", now)
        if self._sampler is not None:
            raise InvalidArgumentError(
                "expected a manager whose blocks nobody samples, got one that has metrics: close them"
            )
        self._sampler = BlockSampler(choose_sample(self._pool.blocks, number), now, limits)
        self._index.watch(self._sampler)
        return self._sampler

    def stop_sampling(self, sampler: Given[BlockSampler]) -> None:
        """End the recording of `sampler`. Does nothing if it has ended. Raises InvalidArgumentError. O(1)."""
        self.check_whole()
        from kvblocks.observe.block_sampler import BlockSampler

        if not is_a(sampler, BlockSampler):
            raise wrong("sampler", "what start_sampling returned", sampler)
        if self._sampler is sampler and self._sampler is not None:
            self._index.unwatch(self._sampler)
            self._sampler = None

    def count_empty_blocks(self, max_blocks: SupportsIndex) -> int:
        """Return how many of the next `max_blocks` blocks to be taken hold nothing, so that taking them evicts nothing.

        Raises InvalidArgumentError. Changes nothing. O(max_blocks).
        """
        self.check_whole()
        most, number = check_count("max_blocks", max_blocks, 0), 0
        for block in self._pool.queue:
            if number == most or block.is_cached:
                break
            number += 1
        return number

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, next to be taken first. O(free blocks).

        With an eviction policy only the blocks that hold nothing are sure to be taken in this order. The others are in
        the order in which they became free.
        """
        self.check_whole()
        return self._pool.free_block_ids()

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold (docs/design/builds-and-invariants.md). O(pool).

        Under python -O it does nothing.
        """
        self.check_whole()
        tables = [table for sequence in self._sequences.values() for table in self._slots.tables(sequence)]
        if self._slots.soft_holds is not None:
            tables += self._slots.soft_holds.tables()
            self._slots.soft_holds.check()
        if self._holds is not None:
            tables += self._holds.owned()
        if self._traffic is not None:
            tables += self._traffic.owned()
            self._traffic.check()
        self._pool.check(tables)
        if self._eviction is not None:
            self._eviction.check(self._pool.queue)
        batch, indices = self._last_step
        assert indices == {sequence: i for i, sequence in enumerate(batch)}, "step: indices of another batch"
        self._check_sequences(self.block_size, self._slots.smallest_block_size)

    # Parts of the calls.

    def _find_hit(self, sequence: Sequence, max_tokens: int | None) -> CacheHit:
        matched = find_blocks(self._index, sequence, max_tokens) if self.enable_caching else []
        return self._slots.find_hit(sequence, matched, self._in_flight)

    def _start(
        self, sequence: Sequence, end: int, num_slots: int, hit: CacheHit | None, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        epoch = self._index.epoch if self.enable_caching else None
        self._claim(sequence, "allocate_slots")
        if self._eviction is not None:
            self._eviction.note_start(sequence)
        try:
            blocks = self._slots.start(sequence, epoch, end, num_slots, hit, delayed=delayed)
        except BaseException:
            if self._eviction is not None:
                self._eviction.note_start(None)
            if sequence.owner is None:  # nothing was changed yet
                self._unclaim(sequence)
            raise
        if self._eviction is not None:
            self._eviction.note_start(None)
        if blocks is None:
            self._unclaim(sequence)
            return None
        self._num_queries += 1
        self._num_queried_tokens += len(sequence.tokens)
        if hit is not None and hit.blocks:
            self._num_hits += 1
            self._num_hit_tokens += hit.num_tokens
            if self._recording is not None and self._recording.log.options.hits:
                self._recording.log.note_hit(hit)
            if self._eviction is not None:
                self._eviction.note_hit(hit.blocks)
            if self._traffic is not None:
                self._traffic.note_use(hit)
        return blocks

    def _find_room(
        self,
        sequence: Sequence,
        hit: CacheHit | None,
        wanted: tuple[int, int, int | None],
        num_new_tokens: SupportsIndex | None,
        num_lookahead_tokens: int,
    ) -> tuple[int, int] | None:
        """Return what `allocate_slots` makes room for: where the known tokens end, and how many unknown ones follow.

        None: nothing. wanted: position of the first token, number of external tokens, total number of tokens or None.
        """
        start, num_external, total = wanted
        known, first = sequence.num_tokens, start + num_external
        readonly = start if hit is None else hit.num_readonly_tokens
        if num_external > known - readonly:
            check_count("num_external_computed_tokens", num_external, 0, known - readonly)
        end = known if total is None else min(max(total, first), known)
        if num_new_tokens is not None:
            end = first + check_count("num_new_tokens", num_new_tokens, 0, known - first)
        if total is None:
            return end, num_lookahead_tokens
        if num_lookahead_tokens:
            raise InvalidArgumentError("allocate_slots: expected num_total_tokens or num_lookahead_tokens, got both")
        if sequence.owner is not None and total <= start == end:
            return None
        if sequence.owner is None and end == start and not ends_in_block(hit):
            raise InvalidArgumentError(f"allocate_slots: expected room for at least {start + 1} tokens, got {end}")
        return end, max(0, total - end)

    def _append_otherwise(
        self, sequence: Given[Sequence], token_ids: TokenIds, delay_cache_blocks: Flag
    ) -> list[KVCacheBlock] | None:
        """`append_slots` for the rare cases: delayed, or the manager is in debug mode or was left half done."""
        self.check_whole()
        if check_flag("delay_cache_blocks", delay_cache_blocks):
            return self._append_late(sequence, token_ids)
        self.change_state = IDLE
        try:
            blocks = self.append_slots(sequence, token_ids)
        finally:
            was_short = self.change_state == IDLE
            if was_short:
                self.change_state = DEBUGGING
        if was_short:
            self.check()
        return blocks

    def _append_late(self, sequence: Given[Sequence], token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """`append_slots` with delay_cache_blocks=True."""
        packed = pack_tokens(token_ids)  # first, as in `append_slots`
        own = self._check_owned(sequence, "append_slots")
        self._check_appendable(own, "append_slots")
        blocks = self._slots.append(own, packed, delayed=True)
        if blocks is not None:
            self._in_flight.note(own)
        self._end()
        return blocks

    def _note_in_flight(self, batch: list[Sequence]) -> None:
        """Note which sequences of a step have tokens in flight. O(sequences)."""
        for sequence in batch:
            self._in_flight.note(sequence)

    def _check_step(
        self, sequences: Items[Sequence], token_ids: TokenIds
    ) -> tuple[list[Sequence], list[Any], list[Sequence]] | None:
        """Return a step's sequences, their tokens, and the sequences at a boundary; None if it has no sequences."""
        if self.change_state:
            self.check_whole()
        batch: list[Sequence] = (
            [*sequences] if type(sequences) is list else listed("sequences", "an iterable of sequences", sequences)
        )
        if not batch:
            check_no_step(token_ids)
            return None
        tokens: list[Any] = token_ids if type(token_ids) is list else pack_tokens(token_ids).tolist()
        if len(batch) != len(tokens):
            check_step(batch, len(tokens))
        try:
            at_boundary = [s for s in batch if s.num_computed_tokens >= s.fits_below or s.tail_owner is not self]
        except (AttributeError, TypeError):
            check_step(batch, len(tokens))  # raises an error that names what is no sequence
            raise
        for sequence in at_boundary:
            if sequence.owner is not self or sequence.num_computed_tokens != len(sequence.tokens):
                self._check_appendable(sequence, "append_step")
        if batch != self._last_step[0]:
            self._note_batch(batch)  # after the checks, so that no other manager's sequence is kept
        return batch, tokens, at_boundary

    def _note_batch(self, batch: list[Sequence]) -> None:
        """Keep a step's sequences and their indices. Raises InvalidArgumentError when one comes twice."""
        indices = dict(zip(batch, range(len(batch)), strict=True))
        if len(indices) != len(batch):
            check_step(batch, len(batch))
        self._last_step = batch, indices

    def _give_back(self, sequence: Given[Sequence], call: str, num_computed_tokens: SupportsIndex | None) -> None:
        """Free a sequence of which num_computed_tokens tokens are written (None: all). As `free` and `abort`."""
        if self.change_state:
            self.check_whole()
        try:  # `_check_owned`, inlined
            own: Sequence = sequence  # type: ignore[assignment]
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self or self._sequences.get(own.sequence_id) is not own:
            raise self._refusal(call, sequence)
        if num_computed_tokens is not None:
            num_computed_tokens = check_count("num_computed_tokens", num_computed_tokens, 0, own.num_computed_tokens)
        self.change_state = CHANGING
        try:
            del self._sequences[own.sequence_id]  # first, since it runs the id's __hash__, which may raise
        except BaseException:
            self._keep(own)
            raise
        if self._eviction is not None:
            self._eviction.giver = own
        if num_computed_tokens is not None:
            self._forget_unwritten(own, num_computed_tokens)
        if self._last_step[0]:
            self._last_step = ([], {})
        if self._in_flight.sequences:
            self._in_flight.drop(own)
        if self._traffic is not None:
            self._traffic.note_end(own)
        self._slots.release(own)
        if self._eviction is not None:
            self._eviction.giver = None
        self.change_state = self._rest_state  # `_end`, inlined
        if self.change_state:
            self.check()

    def _forget_unwritten(self, sequence: Sequence, num_computed_tokens: int) -> None:
        version = self._index.version
        forget_unwritten(self._index, sequence, num_computed_tokens)
        if self._index.detached:
            self._pool.requeue_detached()
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        if self._traffic is not None and self._index.version != version:
            self._traffic.note_forgotten()

    def _go_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the slots behind the first `num_tokens` tokens, which end a block, and stop caching them."""
        if self._eviction is not None:
            self._eviction.giver = sequence
        self._forget_unwritten(sequence, num_tokens)
        self._slots.rewind(sequence, num_tokens)
        if self._eviction is not None:
            self._eviction.giver = None
        self._in_flight.note(sequence)

    def _commit(self, prepared: Commit) -> None:
        """Cache the blocks that a sequence's written tokens fill. Begins a change, which the caller ends."""
        self._slots.commit(prepared)
        self._in_flight.note(prepared[0])

    def _make_history(self, num_blocks: int) -> RemovalHistory:
        """Return a removal history of `num_blocks` blocks, which watches from now on."""
        from kvblocks.observe.removal_history import RemovalHistory as Made

        made = Made(num_blocks)
        self._index.watch(made)
        return made

    def _start_recording(self, options: EventOptions, names: Names) -> Recording:
        """Record events from now on."""
        from kvblocks.observe.recording import start_recording

        return start_recording(options, self._index, names, has_side_groups=self._slots.has_side_groups)

    def _make_traffic(self, tiers: Iterable[Tier]) -> Traffic:
        from kvblocks.tiers.tier import check_tiers
        from kvblocks.tiers.traffic import Traffic as Made

        given = check_tiers(tiers, self._slots.groups or (), enable_caching=self.enable_caching)
        if given and self._slots.has_side_groups:
            from kvblocks.tiers.grouped.traffic import GroupTraffic

            return GroupTraffic(given, self, self._slots, self._sequences, self._calls())
        return Made(given, self, self._slots, self._sequences, self._calls())

    def _calls(self) -> ManagerCalls:
        """Return what tiers need of the manager."""
        from kvblocks.tiers.calls import ManagerCalls as Made

        return Made(self._check_owned, self._commit, self._go_back, self._end)

    def _check_loads(
        self, sequence: Sequence, hit: CacheHit | None, loads: Iterable[TierHit], num_external: int
    ) -> tuple[CacheHit | None, list[TierHit], int]:
        """Return the hit that a sequence starts with, loads as a list, and the number of external tokens."""
        traffic = self._make_traffic(()) if self._traffic is None else self._traffic
        given, num_loaded = traffic.check_loads(sequence, hit, loads)
        if given and num_external:
            raise InvalidArgumentError("allocate_slots: expected loads or num_external_computed_tokens, got both")
        return traffic.with_loads(sequence, hit, given), given, num_loaded or num_external

    def _claim(self, sequence: Sequence, call: str) -> None:
        """Begin a change by entering a sequence under its id.

        Hashing and comparing the id may raise. Also raises SequenceStateError when the id is in use. In both cases
        nothing has changed, and no change is under way.
        """
        self.change_state = CHANGING  # `begin_change`, inlined: both callers have called `check_whole`
        try:
            is_free = self._sequences.setdefault(sequence.sequence_id, sequence) is sequence
        except BaseException:
            self._unclaim(sequence)
            raise
        if not is_free:
            self.end_change()
            raise SequenceStateError(
                f"{call}: expected another sequence_id than {shown(sequence.sequence_id)}, which is in use"
            )

    def _unclaim(self, sequence: Sequence) -> None:
        """Undo what `_claim` did, if anything, and end its change. Hashes no id. O(1)."""
        if self._sequences and next(reversed(self._sequences.values())) is sequence:
            self._sequences.popitem()
        self.end_change()

    def _keep(self, sequence: Sequence) -> None:
        """End a change that was to begin with taking a sequence out, if it is still here. O(sequences)."""
        if id(sequence) in map(id, self._sequences.values()):  # by identity, which hashes nothing
            self.end_change()

    def _check_owned(self, sequence: Given[Sequence], call: str) -> Sequence:
        """Return `sequence` if it is one of ours, else raise SequenceStateError or InvalidArgumentError. O(1)."""
        if self.change_state:
            self.check_whole()
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code checks its type here
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self or self._sequences.get(own.sequence_id) is not own:
            raise self._refusal(call, sequence)
        return own

    def _check_continued(self, sequence: Sequence, hit: CacheHit | None) -> int:
        self._check_owned(sequence, "allocate_slots")
        if hit is not None:
            raise SequenceStateError(f"allocate_slots: expected no hit, since {sequence} has blocks; got {hit}")
        return sequence.num_computed_tokens

    def _check_appendable(self, sequence: Sequence, call: str) -> None:
        self._check_owned(sequence, call)
        if sequence.num_computed_tokens != sequence.num_tokens:
            got = f"{sequence.num_computed_tokens} slots for {sequence}"
            raise SequenceStateError(f"{call}: expected slots for all tokens, got {got}")

    def _check_has_primary(self, call: str) -> None:
        if self._slots.primary_group is None:
            raise InvalidArgumentError(f"{call}: expected a manager with a group of full attention, got {self.groups}")

    def _refusal(self, call: str, sequence: object) -> KVBlocksError:
        try:
            got = as_sequence(call, sequence).describe_for(self)
        except InvalidArgumentError as error:
            return error
        return SequenceStateError(f"{call}: expected a sequence allocated here, got {got}")

    def _check_sequences(self, block_size: int, smallest_block_size: int) -> None:
        """Raise AssertionError unless all sequences are entered under their ids and are consistent."""
        for sequence_id, sequence in self._sequences.items():
            own_id: Any = sequence.sequence_id  # its == may return anything
            assert sequence.owner is self and own_id == sequence_id, f"{sequence}: not under its own id"
            sequence.check(block_size, smallest_block_size)
            if sequence.side_tables is not None:
                sequence.side_tables.check(sequence.num_computed_tokens)

    def _make_eviction(self, eviction: Text | PolicyFactory) -> Eviction:
        """Return an `Eviction`, which the pool asks from now on."""
        from kvblocks.retention.eviction import Eviction as Made

        made = Made(eviction, len(self._pool.blocks), self._pool.end_block_id)
        self._index.charge(made)
        return made

    def _tell_time(self, now: Any) -> None:
        """Set the caller's clock."""
        self._now = now
        if self._eviction is not None:
            self._eviction.set_time(now)

    def _get_pins(self) -> Pins:
        """Return the pins, newly made if there are none yet."""
        if self._pins is not None:
            return self._pins
        if self._slots.has_side_groups:
            from kvblocks.groups.pins import GroupPins

            self._pins = GroupPins(self._pool, self._max_pinned_blocks)
        else:
            from kvblocks.retention.pins import Pins

            self._pins = Pins(self._pool, self._max_pinned_blocks)
        return self._pins

    def _unpin(self, pins: Pins, ended: list[Pin]) -> None:
        """Remove pins and end the change. If no pins are left, the slots don't ask for pins any more."""
        for pin in ended:
            pins.remove(pin)
        if not pins.pins:
            self._slots.soft_holds = None
        self._end()

    def _get_quotas(self) -> TenantQuotas:
        from kvblocks.retention.quotas import TenantQuotas

        return TenantQuotas() if self._quotas is None else self._quotas

    def _use_quotas(self, quotas: TenantQuotas) -> None:
        """Apply quotas, count the cached blocks again, and end the change. Without any quota nothing is counted."""
        from kvblocks.retention.charging import charge

        self._quotas = charge(self._pool, quotas)
        self._end()

    def _end(self) -> None:
        """End a change; in debug mode, check that all is consistent."""
        rest = self._rest_state
        self.change_state = rest
        if rest:
            self.check()


def check_step(sequences: list[Any], num_tokens: int) -> None:
    """Raise InvalidArgumentError unless `sequences` are `num_tokens` different sequences."""
    for sequence in sequences:
        as_sequence("append_step", sequence)
    num_different = len(set(sequences))
    if not num_different == len(sequences) == num_tokens:
        got = f"{len(sequences)} sequences, {num_different} of them different, and {num_tokens} tokens"
        raise InvalidArgumentError(f"append_step: expected different sequences and a token for each, got {got}")


def check_no_step(token_ids: Any) -> None:
    """Raise InvalidArgumentError unless `token_ids` is empty, for a step without sequences."""
    if not (is_a(token_ids, bytes) and not token_ids):
        check_step([], len(listed("token_ids", "an iterable of ints", token_ids)))
