"""The facade that engines call: sequences in, block tables out.

For each step, an engine looks up each new sequence (`get_computed_blocks`), makes room for the tokens that the step
will compute (`allocate_slots`, `append_slots`), runs the model over the block tables, and frees the sequences that have
finished. A block is cached as soon as it is allocated full, before its KV is computed, so a later sequence of the same
step can hit it. This is sound for engines that, in each layer, store a step's keys and values before they attend. If a
step dies, call `abort` for its sequences.

Calls are atomic: one that raises, or that returns None because the pool can't serve it, has changed nothing. The
exception is a call that is interrupted in the middle of a change, for example by a KeyboardInterrupt. After that, every
call raises CorruptStateError, and only counters (`stats`, `pins`, `quotas` and so on) can still be read.

A manager takes no lock, so the caller must not call it from several threads at once. If it happens nevertheless, calls
may raise CorruptStateError, and the manager may be corrupt.

Hashing and comparing a sequence id runs the caller's own code, which may raise. A call therefore does both before it
changes anything, and never afterwards.

The calls have the names of vLLM v1's KVCacheManager. Sharing a sequence's blocks among its samples, with copy on write,
comes from vLLM's PagedAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, final

from kvblocks.arguments import (
    Flag,
    Given,
    Text,
    asked_once,
    check_count,
    check_flag,
    check_id,
    check_integer,
    check_name,
    check_number,
    check_share,
    counted,
    listed,
    shown,
)
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.change import CHANGING, DEBUGGING, IDLE, Change
from kvblocks.core.component import LostBlocks
from kvblocks.core.hit import CacheHit, check_hit, check_start, ends_in_block
from kvblocks.core.in_flight import InFlight
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence, as_sequence, not_a_sequence
from kvblocks.core.slots import Commit, make_slots
from kvblocks.core.tokens import MAX_TOKEN_ID, TokenIds, pack_tokens
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.events import CacheEvent, EventOptions, check_event_options
from kvblocks.hashing.by_name import get_hash_scheme
from kvblocks.hashing.scheme import HashFunction, HashScheme
from kvblocks.stats import CacheStats, Refusal, TierPart

if TYPE_CHECKING:  # what only some managers need is imported when it is used
    from kvblocks.core.kinds import Group
    from kvblocks.core.manager_states import ManagerStates
    from kvblocks.observe.block_callbacks import BlockCallback, BlockCallbacks
    from kvblocks.observe.block_sampler import BlockSampler
    from kvblocks.observe.event_log import Recording
    from kvblocks.observe.inspector import Inspector
    from kvblocks.observe.removal_history import RemovalHistory
    from kvblocks.retention.eviction import Eviction
    from kvblocks.retention.holds import BlockHolds
    from kvblocks.retention.manager_pins import ManagerPins
    from kvblocks.retention.manager_quotas import ManagerQuotas
    from kvblocks.retention.pins import Pins
    from kvblocks.retention.policies.policy import PolicyFactory
    from kvblocks.retention.sessions import Sessions
    from kvblocks.tiers.calls import ManagerCalls
    from kvblocks.tiers.hit import TierHit
    from kvblocks.tiers.tier import Tier
    from kvblocks.tiers.tiers import Tiers
    from kvblocks.tiers.transfers import Transfers

_NO_PLAIN_TOKEN = (AttributeError, BufferError, TypeError, OverflowError, ValueError)
"""What the fast path of adding a token may raise. The slow path then either accepts the token or reports what is wrong.
"""

_NONE: Any = 0
"""The default number of lookahead tokens and the like. Compared by identity, so none of the caller's code runs."""

_NO_TIERS: Any = ()
"""The default for tiers, also compared by identity."""

Batch = tuple[list[Sequence], dict[Sequence, int]]
"""The sequences of a step, and each one's index in it."""

Owners = dict[KVCacheBlock, list[Sequence]]
"""The sequences that own each block, and perhaps some that no longer do."""


@final
class KVCacheManager(Closed):
    """Manages a pool of `num_blocks` KV-cache blocks with room for `block_size` tokens each.

    - num_blocks: how many blocks the pool has, at least 1.
    - block_size: tokens in a block. None: the block size of `groups`, or 16 without groups.
    - first_block_id: the id of the first block; the others follow it. It is more than 0 for engines that reserve the
      first ids for something else.
    - groups: the groups of the model's layers, such as `SlidingWindow`. None: all layers have full attention.
    - hash_algorithm: the hash of blocks in events, tiers and histories; it never decides a hit. "xxh3_128", "sha256" or
      a callable bytes -> bytes. For vLLM's hashes, "vllm:sha256_cbor" and the like, or a
      `kvblocks.hashing.vllm.VllmHashScheme`.
    - enable_caching: whether prefixes are reused.
    - enable_events: whether changes of the cached set are recorded for `take_events`. Call that regularly, since
      records are kept until then. An `EventOptions` records more than the changes on the device.
    - num_history_blocks: how many removed prefixes `inspect.explain` remembers. 0 costs nothing. Otherwise each block
      is hashed when it is cached, and each remembered prefix takes about 250 bytes.
    - pin_budget: the share of the pool that all pins together may hold, 0.0 to 1.0.
    - tiers: where copies of cached blocks are kept below the device, the fastest tier first, see `kvblocks.tiers`.
    - eviction: which cached block is evicted first: a name from `kvblocks.retention.policies.NAMED`, such as "slru", or
      a callable that makes an `EvictionPolicy`, such as its class. None: the least recently used block, at no cost.
    - debug: whether `check` runs after every change.

    Raises InvalidArgumentError, and whatever the callable for `eviction` raises. O(num_blocks).
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex | None = None,
        *,
        first_block_id: SupportsIndex = 0,
        groups: Iterable[Group] | None = None,
        hash_algorithm: Text | HashFunction | HashScheme = "xxh3_128",
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
        self._change = Change("manager", debug=debugs)
        hash_scheme = get_hash_scheme(hash_algorithm)
        self._groups: tuple[Group, ...] | None = None  # as they were given
        layout = None
        if groups is not None:
            from kvblocks.core.layout import make_layout

            layout = make_layout(size, groups)
            self._groups, size = layout.groups, layout.block_size
            layout = None if layout.is_single else layout
        self._slots = make_slots(num_blocks, size or 16, layout, hash_scheme, self._change, first_block_id)
        self._link = ManagerLink(self._change, self._slots, self.check, self.free, caches=caches)
        self._sequences = self._link.sequences
        self._recurrent = self._slots.states
        self._pool = self._slots.pool
        self._index = self._pool.index
        self.block_size = self._index.block_size
        self.enable_caching = caches
        self._max_pinned_blocks = max_pinned
        self._history = None if not num_remembered else self._make_history(num_remembered)
        self._recording = None if options is None else self._start_recording(options, hash_scheme)
        self._eviction = None if eviction is None else self._make_eviction(eviction)
        self._transfers: Transfers | None = None
        self._tiers: Tiers | None = None
        self._sampler: BlockSampler | None = None
        self._inspector: Inspector | None = None
        self._pins: ManagerPins | None = None
        self._holds: BlockHolds | None = None
        self._quotas: ManagerQuotas | None = None
        self._sessions: Sessions | None = None
        self._states: ManagerStates | None = None
        self._in_flight = InFlight(self._index, self._change)
        self._owners: Owners | None = None  # as of an abort; None once a sequence may share a block that isn't in it
        self._batch_memo: Batch = ([], {})  # the last step's batch, until one of it is freed
        # When debugging, or with digests, a token that begins or fills a block takes the slow path.
        self._fills_quickly = not debugs and not self._index.needs_digests
        if tiers is not _NO_TIERS:
            self._transfers = self._make_transfers(tiers)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool has. O(1)."""
        return len(self._pool.blocks)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The pool's blocks in the order of their ids. This is the pool's own list; don't change it. O(1)."""
        return self._pool.blocks

    @property
    def first_block_id(self) -> int:
        """The id of the first block; the other ids follow it. O(1)."""
        return self._pool.first_block_id

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner (a sequence, pin, hold or transfer), including free blocks that are cached. O(1)."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that have an owner, 0.0 to 1.0; for statistics, as in vLLM. O(1)."""
        return 1.0 - self._pool.num_free_blocks / len(self._pool.blocks)

    @property
    def now(self) -> int | float:
        """The caller's clock, which eviction policies read, in any unit; 0 until it is set. O(1).

        The manager reads no clock of its own, so set this once per step, for example. `pins.expire` sets it too.
        Setting it raises InvalidArgumentError unless the value is a number.
        """
        return self._link.now

    @now.setter
    def now(self, now: SupportsFloat) -> None:
        self._change.check_whole()
        self._link.set_time(check_number("now", now))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers, in the order in which they were given. Without any: one of full attention. O(1)."""
        if self._groups is not None:
            return self._groups
        from kvblocks.core.kinds import FullAttention

        return (FullAttention(self.block_size),)

    @property
    def alignment(self) -> int:
        """Every hit is a multiple of this many tokens: the largest block size of a group that holds tokens. O(1)."""
        return self._slots.alignment

    @property
    def stats(self) -> CacheStats:
        """Counters since the manager was made. O(1)."""
        return CacheStats(
            num_queries=self._link.num_queries,
            num_hits=self._link.num_hits,
            num_queried_tokens=self._link.num_queried_tokens,
            num_hit_tokens=self._link.num_hit_tokens,
            num_taken_blocks=self._slots.num_taken_blocks,
            num_evicted_blocks=self._pool.num_evicted_blocks,
            num_blocks=len(self._pool.blocks),
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_limited_tokens=self._slots.num_limited_tokens,
            num_eviction_failures=0 if self._eviction is None else self._eviction.num_failures,
        )

    def __repr__(self) -> str:
        pool = f"{counted(len(self._pool.blocks), 'block')} of {counted(self.block_size, 'token')}"
        free = f"{self._pool.num_free_blocks} free, {self._pool.num_cached_blocks} cached"
        return f"KVCacheManager({pool}, {free}, {counted(len(self._sequences), 'sequence')})"

    # The calls of a step.

    def get_computed_blocks(self, sequence: Given[Sequence], max_tokens: SupportsIndex | None = None) -> CacheHit:
        """Return the longest cached prefix of a sequence that holds no blocks yet. Changes nothing.

        The lookup covers all known tokens, so a sequence that was freed also hits the blocks of the tokens it
        generated. The hit is empty when caching is off.

        max_tokens: the most tokens that the hit's blocks may hold. Pass `sequence.num_tokens - 1` if the engine can't
        recompute a last token whose KV is cached.

        Raises SequenceStateError when the sequence holds blocks, and InvalidArgumentError. Costs one dict lookup and
        one memcmp for each run of blocks that were cached together: O(blocks) in the worst case, where each block is a
        run of its own.
        """
        if type(sequence) is not Sequence:  # an object that only looks like one would fail later, in a change
            as_sequence("get_computed_blocks", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        if self._change.state or own.owner is not None:
            self._change.check_whole()
            if own.owner is not None:
                raise SequenceStateError(f"get_computed_blocks: expected a sequence without blocks, got {own}")
        if max_tokens is not None or self._index.attached is not None or not self.enable_caching:
            return self._find_hit(own, None if max_tokens is None else check_count("max_tokens", max_tokens, 0))
        tokens = own.tokens  # from here on the same as `_find_hit`, inlined for speed
        num_tokens = len(tokens)
        block_size = self.block_size
        view = tokens if type(tokens) is memoryview else memoryview(tokens)
        keys = None if own.keys is None else own.encoded_keys(block_size)
        blocks = self._index.match(view, keys, num_tokens // block_size)
        return CacheHit(own, blocks, len(blocks) * block_size, num_tokens, self._in_flight)

    def allocate_slots(  # noqa: PLR0912  # calls would cost each chunk and token more
        self,
        sequence: Given[Sequence],
        num_new_tokens: SupportsIndex | None = None,
        hit: Given[CacheHit] | None = None,
        num_external_computed_tokens: SupportsIndex = 0,
        num_total_tokens: SupportsIndex | None = None,
        num_in_flight_tokens: SupportsIndex = 0,
        delay_cache_blocks: Flag = False,  # noqa: FBT002  # meant to be named; see docs/design/core/hot-path.md
    ) -> list[KVCacheBlock] | None:
        """Make room for a sequence's next tokens, and cache the blocks that they fill.

        A sequence without blocks starts with this call. `hit` is then what `get_computed_blocks` found for it (None:
        use nothing from the cache), and the new tokens are those after the hit. For a sequence that has blocks, the
        call makes room for the next chunk, and `hit` must be None.

        - num_new_tokens: how many of the known tokens to make room for. None: all that have no room yet. It may be 0
          with external tokens, and with any hit that has blocks and isn't a full hit.
        - num_total_tokens: makes room for this many tokens in all, whether they are known or not (drafts, for example).
          The known ones among them count as new tokens, or only num_new_tokens of them if that is given too. Blocks of
          unknown tokens aren't cached until `append_slots` says which tokens were accepted. If there is room already,
          nothing happens.
        - num_in_flight_tokens: how many of the last tokens with slots belong to steps that are still running. Windowed
          groups keep the blocks that these tokens see.
        - num_external_computed_tokens: known tokens whose KV comes from elsewhere, such as a transfer. They are
          delayed, and their slots come before those of the new tokens. For tokens in tiers, use `tiers.allocate`
          instead.
        - delay_cache_blocks: cache none of these tokens, nor any after them, until `cache_blocks` says that they are
          written. Call `rewind` if they never will be.

        Returns the new blocks, perhaps none. Returns None, with nothing changed, when the pool can't serve the call.

        Raises SequenceStateError (another manager's sequence, an id in use, or a hit for a sequence that has blocks),
        StaleHitError (blocks of the hit were evicted after the lookup), and InvalidArgumentError (too few tokens left,
        for example). O(hit blocks + new blocks).
        """
        change = self._change
        if change.state:
            change.check_whole()
        if type(sequence) is not Sequence or (hit is not None and type(hit) is not CacheHit):
            check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        if (
            num_new_tokens is None
            and own.tail_owner is change
            and not change.state
            and hit is None
            and num_total_tokens is None
            and num_external_computed_tokens is _NONE
            and num_in_flight_tokens is _NONE
            and delay_cache_blocks is False
            and len(own.tokens) == own.num_computed_tokens + 1
            and not self._in_flight.sequences
        ):
            # Fast path: one token was added, as in a step of decodes. Mostly it fits the last block without filling it.
            if own.num_computed_tokens < -own.fits_below:
                own.fits_below = -own.fits_below
                own.num_computed_tokens += 1
                return []
            if self._fills_quickly:
                change.state = CHANGING
                blocks = self._slots.grow_one(own)
                change.state = IDLE
                return blocks
        found: CacheHit | None = hit  # type: ignore[assignment]
        num_wanted = None if num_new_tokens is None else asked_once(num_new_tokens)
        num_external = num_in_flight = 0
        if num_external_computed_tokens is not _NONE:
            num_external = check_count("num_external_computed_tokens", num_external_computed_tokens, 0)
        total = None if num_total_tokens is None else check_count("num_total_tokens", num_total_tokens, 1)
        if num_in_flight_tokens is not _NONE:
            num_in_flight = check_count("num_in_flight_tokens", num_in_flight_tokens, 0)
        delayed = delay_cache_blocks is not False and check_flag("delay_cache_blocks", delay_cache_blocks)
        is_start = own.owner is None
        if is_start:
            start = 0 if found is None else check_hit(self._index, own, found)
        else:
            start = self._check_continued(own, found)
        end = num_slots = len(own.tokens)
        if num_external or total is not None:
            room = self._find_room(own, found, start, num_external, total, num_wanted)
            if room is None:
                return []
            end, num_slots = room
            delayed = (delayed or num_external > 0) and end > start
        elif start == end:
            raise InvalidArgumentError(f"allocate_slots: expected tokens without slots, got {own} with none left")
        elif num_wanted is not None:
            least = 0 if ends_in_block(found) else 1
            end = num_slots = start + check_count("num_new_tokens", num_wanted, least, end - start)
        if is_start:
            blocks = self._start(own, end, num_slots, found, delayed=delayed)
        else:
            blocks = self._slots.grow(own, end, num_slots, num_in_flight, delayed=delayed)
        if blocks is not None and (self._in_flight.sequences or delayed or end < len(own.tokens)):
            self._in_flight.note(own)
        self._change.state = self._change.rest  # `end`, inlined
        if self._change.state:
            self.check()
        return blocks

    def append_slots(
        self,
        sequence: Given[Sequence],
        token_ids: TokenIds,
        delay_cache_blocks: Flag = False,  # noqa: FBT002  # by position too: a keyword alone costs each token 25 ns
    ) -> list[KVCacheBlock] | None:
        """Add decoded tokens to a sequence, make room for them, and cache the blocks that they fill.

        Reserved slots are used first. token_ids: one or several accepted tokens, in any form that `Sequence` takes.
        delay_cache_blocks: as in `allocate_slots`.

        Returns the new blocks, perhaps none. A block that replaces a shared one (after `fork` or `truncate`) comes
        first. Returns None, with nothing changed and no token added, when the pool can't serve the call.

        Raises SequenceStateError (not this manager's sequence, or it has tokens without slots) and InvalidTokensError.
        O(1) for each token, and O(block_size) for one that fills a block.
        """
        change = self._change
        if change.state or delay_cache_blocks is not False:
            return self._append_otherwise(sequence, token_ids, delay_cache_blocks)
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code checks its type here
            is_ours = own.tail_owner is change
        except (AttributeError, TypeError):
            raise not_a_sequence("append_slots", sequence) from None
        if is_ours and type(token_ids) is list and len(token_ids) == 1:
            token: Any = token_ids[0]
            num_tokens = own.num_computed_tokens
            if num_tokens < own.fits_below and token is not True and token is not False:
                # Fast path, for 14 of 16 decoded tokens: the token fits the last block and doesn't fill it.
                try:
                    own.tokens.append(token)  # type: ignore[union-attr]  # a view has no append
                    own.num_computed_tokens = num_tokens + 1
                except BaseException as error:
                    change.state = CHANGING
                    own.truncate_tokens(own.num_computed_tokens)  # drop a token that isn't counted
                    change.state = IDLE
                    if own.num_computed_tokens > num_tokens or not isinstance(error, _NO_PLAIN_TOKEN):
                        raise
                else:
                    return []
            elif (
                self._fills_quickly
                and num_tokens == len(own.tokens)
                and type(token) is int
                and 0 <= token <= MAX_TOKEN_ID
            ):
                change.state = CHANGING
                own.append_checked(token)
                blocks = self._slots.grow_one(own)
                if blocks is None:
                    own.drop_last()
                change.state = IDLE
                return blocks
        packed = pack_tokens(token_ids)  # first, since it may run code of the caller's
        if own.owner is not change or own.num_computed_tokens != len(own.tokens):
            self._check_appendable(own, "append_slots")
        blocks = self._slots.append(own, packed, delayed=False)
        self._link.end()
        return blocks

    def append_step(
        self, sequences: Items[Sequence], token_ids: TokenIds, *, delay_cache_blocks: Flag = False
    ) -> list[tuple[int, int, int, int]] | None:
        """Add one decoded token to each of `sequences` and make room for it: a whole decode step in one call.

        token_ids: one for each sequence, in the same order. delay_cache_blocks: as in `allocate_slots`.

        Returns (index in `sequences`, group, index in its block table, block id) for each table entry that changed,
        which is all that an engine has to write to the step's block tables. Returns None, with nothing changed for any
        sequence, when the pool can't serve all of them.

        Raises SequenceStateError, InvalidTokensError, and InvalidArgumentError for repeated sequences or when the
        numbers of tokens and sequences differ. O(sequences x groups).
        """
        delayed = delay_cache_blocks is not False and check_flag("delay_cache_blocks", delay_cache_blocks)
        step = self._check_step(sequences, token_ids)
        if step is None:
            return []
        batch, tokens, at_boundary, indices = step
        changes = self._slots.append_step(batch, tokens, at_boundary, indices, delayed=delayed)
        if delayed:
            self._note_in_flight(batch)
        self._link.end()
        return changes

    def cache_blocks(self, sequence: Given[Sequence], num_computed_tokens: SupportsIndex) -> int:
        """Report that what this sequence was to write of its first `num_computed_tokens` tokens is written, and cache
        the blocks that it fills.

        For engines that must write a step's keys and values before others may read them, and for tokens that come from
        elsewhere. The former pass delay_cache_blocks=True whenever they make room.

        num_computed_tokens: counted from the first token, at most `sequence.num_computed_tokens`. A number up to
        `num_written_tokens` changes nothing.

        The report concerns what this sequence computes or loads: all its tokens after its hit. (A fork reports what it
        shares with its parent, too, if that was delayed.) It says nothing of blocks that the sequence hit or was given
        by a fork. If one of these is lost (see `abort` and `evict_blocks`), it stays lost, and nothing after it is
        cached. Then call `rewind` with `num_written_tokens`, and compute the tokens from there on. Lost tokens that the
        sequence was to write itself count as written again, up to the reported number.

        Blocks that are cached already, by sequences that share them, stay as they are. A sequence from before a reset
        caches nothing until `renew`. While a sequence loads from a tier, only the tokens before the loaded ones count.

        Returns how many tokens of the sequence are then cached. Raises SequenceStateError (not this manager's sequence,
        or freed) and InvalidArgumentError. O(blocks that get cached).
        """
        given = asked_once(num_computed_tokens)
        own = self._link.check_owned(sequence, "cache_blocks")
        number = check_count("num_computed_tokens", given, 0, own.num_computed_tokens)
        if self._transfers is not None:
            number = self._transfers.num_writable(own, number)
        self._commit(self._slots.prepare_commit(own, number))
        self._link.end()
        return own.num_cached_blocks * self.block_size if own.epoch is self._index.epoch else 0

    def get_num_blocks_to_allocate(
        self, sequence: Given[Sequence], num_total_tokens: SupportsIndex, *, hit: Given[CacheHit] | None = None
    ) -> int:
        """Return how many free blocks it takes to have room for the first `num_total_tokens` tokens, known or not.

        Free blocks of `hit` count, since `allocate_slots` would take them too. `allocate_slots` succeeds if this many
        blocks are free (`num_free_blocks`, plus what pins would give up), unless windows have to keep more blocks
        (`num_in_flight_tokens`).

        Changes nothing. Raises what `allocate_slots` raises for these arguments. O(hit blocks).
        """
        self._change.check_whole()
        check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        found: CacheHit | None = hit  # type: ignore[assignment]
        number = check_count("num_total_tokens", num_total_tokens, 0)
        if own.owner is not None:
            self._check_continued(own, found)
        elif found is not None:
            check_hit(self._index, own, found)
        return self._slots.count_missing(own, number, found)

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Return the block copies requested since the last call, in order, and forget them.

        Each copy is (group, source block id, destination block id). Only sequences that were forked or truncated need
        copies. The engine copies the blocks' KV in the group's layers, with the same result as if it made one copy
        after another. A block id stands for the same memory in all groups, so copying it in all layers does no harm.

        The copies must be made before the step stores any keys and values, and before a transfer writes to blocks that
        a later call returns. O(1).
        """
        self._change.begin()
        copies, self._slots.copies = self._slots.copies, []
        self._link.end()
        return copies

    def free(self, sequence: Given[Sequence]) -> None:
        """Free a sequence: release its blocks, last first. Cached blocks stay cached until they are reused.

        All tokens with slots must have been computed. If no step has computed the token that was appended last, call
        `abort` with num_tokens - 1 instead, because that token must not stay cached. The sequence keeps its tokens and
        can be allocated again.

        Raises SequenceStateError when the sequence isn't this manager's or holds no blocks (a double free). O(blocks),
        plus a lookup for each pin that has the same first tokens and lacks blocks. The first call after a step also
        costs O(sequences).
        """
        self._give_back(sequence, "free", None)

    def abort(self, sequence: Given[Sequence], num_computed_tokens: SupportsIndex) -> None:
        """Free a sequence of a step that died. Only the KV of its first `num_computed_tokens` tokens is written.

        Blocks that the sequence was to write after these tokens stop being cached, here and in the tiers, together with
        everything chained to them. For any other sequence that owns such a block, all KV from that block on counts as
        lost (see `num_written_tokens`).

        Abort every sequence of the step, in any order: also those that hit such a block, since it is still in their
        tables, and those that waited for a copy (`take_copies`). A sequence that waits for a load or another transfer
        is in no step. It goes on waiting, and what it lost is said when the transfer ends, by `tiers.complete` or
        `cache_blocks`.

        Raises SequenceStateError and InvalidArgumentError. O(blocks + blocks of pins). If others own one of the lost
        blocks, also O(blocks of these), and O(blocks of all sequences) once in a series of aborts.
        """
        self._give_back(sequence, "abort", check_integer("num_computed_tokens", num_computed_tokens))

    # Forks, truncations and resets.

    def fork(self, sequence: Given[Sequence], sequence_id: Hashable) -> Sequence:
        """Return a new sequence with the same tokens and keys that shares all blocks that hold them.

        Use it for several samples of one prompt, or for beam search. More tokens may then be added to both sequences.
        The first of them to add a token to a partly filled block that both hold gets a block of its own, and
        `take_copies` says what to copy there. Reserved slots are not shared.

        The shared tokens must be computed before a token is added to either sequence. If the step that was to compute
        them dies, both must be aborted.

        Raises SequenceStateError (not this manager's sequence, or an id in use) and InvalidArgumentError. O(tokens +
        blocks).
        """
        sequence = self._link.check_owned(sequence, "fork")
        if self._recurrent is not None:
            self._recurrent.check_fork(sequence)
        if sequence.side_tables is not None:
            sequence.side_tables.check_back(sequence.num_computed_tokens, sequence, "fork")
        child = sequence.fork(sequence_id)
        self._claim(child, "fork")
        self._slots.fork(sequence, child)
        self._in_flight.note(child)
        if self._transfers is not None:
            self._transfers.note_fork(sequence, child)
        self._link.end()
        return child

    def truncate(
        self, sequence: Given[Sequence], num_tokens: SupportsIndex, *, num_computed_tokens: SupportsIndex | None = None
    ) -> None:
        """Keep the first `num_tokens` tokens of a sequence, and drop the others, such as rejected drafts, with their
        slots.

        - num_tokens: at least the number of prompt tokens, at most the number of known tokens.
        - num_computed_tokens: how many tokens have their KV written, at least those that are kept. None: all that have
          slots, rejected drafts included. Cached blocks after these tokens stop being cached, as in `abort`.

        Blocks that are no longer needed are released, last first. Those that were written stay cached, and tokens that
        are added later never overwrite them: see `take_copies`.

        With windowed groups, a sequence can always go back to what was computed before the last call that made room for
        tokens. It can go back further only while it still has all blocks that the next token sees.

        Raises SequenceStateError, also when a windowed group can't go back that far, and InvalidArgumentError. O(tokens
        dropped), plus what `free` and `abort` cost.
        """
        num_tokens = asked_once(num_tokens)
        if num_computed_tokens is not None:
            num_computed_tokens = asked_once(num_computed_tokens)
        sequence = self._link.check_owned(sequence, "truncate")
        end = check_count("num_tokens", num_tokens, sequence.num_prompt_tokens, sequence.num_tokens)
        num_left = min(sequence.num_computed_tokens, end)
        most = written = sequence.num_computed_tokens
        if num_computed_tokens is not None:
            written = check_count("num_computed_tokens", num_computed_tokens, num_left, most)
        if sequence.side_tables is not None:
            sequence.side_tables.check_back(num_left, sequence, "truncate")
        if self._recurrent is not None:
            self._recurrent.check_kept(sequence, num_left)
        self._change.begin()
        if num_computed_tokens is not None:
            self._lose_unwritten(sequence, written)
        self._slots.rewind(sequence, end)
        sequence.truncate_tokens(end)
        self._in_flight.note(sequence)
        if self._transfers is not None:
            self._transfers.note_cut(sequence)
        self._link.end()

    def rewind(self, sequence: Given[Sequence], num_tokens: SupportsIndex) -> int:
        """Keep the slots of the first `num_tokens` tokens and release the others. The sequence keeps its tokens.

        Call it when a load failed after these tokens had arrived; `allocate_slots` then makes room to compute the rest.
        The number is rounded down to where a block ends in all groups, so that no block is written twice. Blocks cached
        after that point stop being cached, as in `abort`. Blocks of a hit are released and stay cached (see
        `evict_blocks`).

        Returns how many tokens keep their slots. Raises SequenceStateError (not this manager's sequence, or needed
        blocks have left a window) and InvalidArgumentError. O(blocks released).
        """
        given = asked_once(num_tokens)
        own = self._link.check_owned(sequence, "rewind")
        number = check_count("num_tokens", given, 0, own.num_computed_tokens)
        end = number // self._slots.alignment * self._slots.alignment
        if self._recurrent is not None:
            end = self._recurrent.floor_of(own, end)
        if own.side_tables is not None:
            own.side_tables.check_back(end, own, "rewind")
        self._change.begin()
        self._go_back(own, end)
        if self._transfers is not None:
            self._transfers.note_cut(own)
        self._link.end()
        return own.num_computed_tokens

    def renew(self, sequence: Given[Sequence]) -> None:
        """Report that the KV of a sequence from before a reset of the cache is still valid, and cache it again.

        Use it after a reset that had another reason than new weights, or after computing the KV again. The full blocks
        of the sequence's `num_written_tokens` are cached at once, and later ones when they fill. Raises
        SequenceStateError when the sequence isn't this manager's or isn't from before a reset. O(its full blocks).
        """
        sequence = self._link.check_owned(sequence, "renew")
        if not self.enable_caching or sequence.epoch is self._index.epoch:
            raise SequenceStateError(f"renew: expected a sequence from before a reset of the cache, got {sequence}")
        digests = self._slots.digests_from(sequence, 0, sequence.num_written_tokens)
        self._change.begin()
        self._slots.cache_from(sequence, 0, sequence.num_written_tokens, digests)
        self._link.end()

    def reset_prefix_cache(self) -> None:
        """Stop caching everything, for example after a change of weights. No block cached so far is ever hit again.

        May be called at any time. Sequences keep their blocks, but cache nothing until they are freed and allocated
        again, or until `renew` says that their KV is still valid. Pins stay, and hold their prefixes once these are
        cached again.

        O(1), plus the time to free memory; O(blocks that pins hold); and O(cached blocks) if a removal history has to
        remember them.
        """
        self._change.begin()
        self._index.clear()
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        if self._transfers is not None:
            self._transfers.clear()
        self._link.end()

    def evict_blocks(self, block_ids: Iterable[SupportsIndex]) -> list[Sequence]:
        """Stop caching these blocks, because their KV is bad: a load failed, for example. So is everything that is
        chained to them, and that allocated sequences computed from them.

        The blocks' owners keep them, but everything from there on counts as lost: `num_written_tokens` of the owners
        goes back to the first of these blocks. What these sequences computed after it is bad too, and so is what others
        computed from that. Blocks that aren't cached may be given too. If a duplicate holds the same prefix, it takes
        the block's place. What freed sequences computed from a bad block that has a duplicate, or belongs to a window,
        must be given as well.

        Returns the sequences whose `num_written_tokens` went back, the oldest first. Compute each of them anew from
        that token on: call `rewind` with it, once nothing writes to the sequence's blocks any more, and then
        `allocate_slots`. Until then report none of its tokens, since `cache_blocks` would say that they are good.

        Raises InvalidArgumentError for ids that aren't in this pool. O(blocks + blocks chained to them + blocks of all
        sequences).
        """
        ids = listed("block_ids", "an iterable of ints", block_ids)
        first, end = self._pool.first_block_id, self._pool.end_block_id - 1
        blocks = [
            self._pool.blocks[check_count(f"block_ids: position {i}", block_id, first, end) - first]
            for i, block_id in enumerate(ids)
        ]
        self._change.begin()
        before = [(sequence, sequence.num_written_tokens) for sequence in self._sequences.values()]
        self._lose(self._with_computed_from(blocks), None)
        self._link.end()
        return [sequence for sequence, num_written in before if sequence.num_written_tokens < num_written]

    def forget_salt(self, salt: Text | None) -> int:
        """Stop caching everything with this salt, here and in all tiers. Use it to delete a tenant's data.

        salt: None stands for sequences without a salt. Sequences with this salt keep their blocks, but as after
        `reset_prefix_cache` they cache nothing until they are freed and allocated again, or `renew` says that their KV
        is valid. Stores in progress are dropped, while loads in progress end normally, but only for the sequences that
        wait for them. Pins stay.

        Returns how many blocks, including slots of tiers, stopped being cached. Raises InvalidArgumentError. O(runs +
        sequences + blocks that stopped being cached).
        """
        name = check_name("salt", salt)
        from kvblocks.retention.quotas import ended_epoch, forget_salt

        self._change.begin()
        number, ended = forget_salt(self._pool, name), ended_epoch(self._index.epoch)
        for sequence in self._sequences.values():
            if sequence.salt == name and sequence.epoch is self._index.epoch:
                sequence.epoch = ended
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.drop_uncached()
        if self._transfers is not None:
            number += self._transfers.forget_salt(name)
        self._link.end()
        return number

    # What stays: pins and quotas.

    @property
    def pins(self) -> ManagerPins:
        """Prefixes that stay cached until they expire or sequences need the space, and the calls for them. O(1)."""
        if self._pins is None:
            from kvblocks.retention.manager_pins import ManagerPins as Made

            pins = self._make_pins()
            self._pins = Made(self._link, pins)
        return self._pins

    @property
    def quotas(self) -> ManagerQuotas:
        """How many blocks each tenant (salt) may keep cached while others want the space. O(1)."""
        if self._quotas is None:
            from kvblocks.retention.manager_quotas import ManagerQuotas as Made

            self._quotas = Made(self._link, self._eviction)
        return self._quotas

    @property
    def holds(self) -> BlockHolds:
        """Holds, which own blocks on behalf of something other than a sequence, such as a transfer. O(1)."""
        if self._holds is None:
            from kvblocks.retention.holds import BlockHolds as Holds

            self._holds = Holds(self._link)
        return self._holds

    @property
    def states(self) -> ManagerStates:
        """Recurrent states of sequences, for models with a group whose layers keep one. O(1)."""
        if self._states is None:
            from kvblocks.core.manager_states import ManagerStates as Made

            self._states = Made(self._link, self._recurrent)
        return self._states

    @property
    def sessions(self) -> Sessions:
        """Where the caller reports that a conversation pauses or has ended, for eviction policies. O(1)."""
        if self._sessions is None:
            from kvblocks.retention.sessions import Sessions as Made

            self._sessions = Made(self._link, self._eviction)
        return self._sessions

    @property
    def tiers(self) -> Tiers:
        """The tiers below the device, with the calls for transfers. It is empty if the manager was made without tiers.
        O(1).
        """
        if self._tiers is None:
            from kvblocks.tiers.tiers import Tiers as Made

            transfers = self._make_transfers(()) if self._transfers is None else self._transfers
            self._tiers = Made(self._link, transfers, self._calls())
        return self._tiers

    @property
    def last_refusal(self) -> Refusal | None:
        """Why the most recent call that returned None did so; None if no call has. O(1)."""
        return self._slots.last_refusal

    # Reports for people and engines.

    @property
    def inspect(self) -> Inspector:
        """What the manager holds and why: explanations, pictures, names, leaks. For people, routers and tests. O(1)."""
        if self._inspector is None:
            from kvblocks.observe.inspector import Inspector as Made

            self._inspector = Made(self._link, self._history, self._find_below)
        return self._inspector

    def sequences(self) -> list[Sequence]:
        """Return the allocated sequences, the oldest first, for engines that must end or report all of them after an
        error.

        Changes nothing. O(sequences).
        """
        self._change.check_whole()
        return list(self._sequences.values())

    def sequence(self, sequence_id: Hashable) -> Sequence | None:
        """Return the allocated sequence with this id, or None if there is none.

        For callers that have lost the object and want to free it, for example. Changes nothing. Raises
        InvalidArgumentError, and whatever the id's hash and comparison raise. O(1).
        """
        self._change.check_whole()
        check_id("sequence_id", sequence_id)
        return self._sequences.get(sequence_id)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cached set since the last call, oldest first, and forget them.

        Raises InvalidArgumentError unless the manager was made with enable_events. O(1). With vLLM's hashes, several
        prefixes may share a hash; the events are then about hashes, and the call costs O(blocks in the events).
        """
        if self._recording is None:
            raise InvalidArgumentError("take_events: expected enable_events=True when the manager was made, got False")
        self._change.begin()
        events = self._recording.take()
        self._link.end()
        return events

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold (docs/design/builds-and-invariants.md). O(pool).

        The checks are assertions, so in the plain build `python -O` leaves them out. The compiled build always has
        them.
        """
        self._change.check_whole()
        tables = [table for sequence in self._sequences.values() for table in self._slots.tables(sequence)]
        if self._recurrent is not None:
            self._recurrent.check()
        if self._slots.soft_holds is not None:
            tables += self._slots.soft_holds.tables()
            self._slots.soft_holds.check()
        if self._holds is not None:
            tables += self._holds.owned()
        if self._transfers is not None:
            tables += self._transfers.owned()
            self._transfers.check()
        self._pool.check(tables)
        if self._eviction is not None:
            self._eviction.check(self._pool.queue)
        batch, indices = self._batch_memo
        assert indices == {sequence: i for i, sequence in enumerate(batch)}, "step: indices of another batch"
        self._check_sequences(self.block_size, self._slots.smallest_block_size)

    # Parts of the calls.

    def _find_below(self, sequence: Sequence) -> tuple[TierPart, ...]:
        """Return what the tiers have after the hit of a sequence."""
        below = [] if self._transfers is None else self._transfers.find(self._find_hit(sequence, None))
        return tuple([found.part() for found in below])

    def _watch_blocks(self, taken: BlockCallback, touched: BlockCallback) -> BlockCallbacks:
        """Call `taken` with blocks that are taken from the pool, and `touched` with blocks that get one more owner.

        For replay and the integrations. Both functions get a list of blocks in the middle of a change, so they must
        neither call the manager nor raise. `stop` of the returned object ends the calls. O(watchers).
        """
        self._change.check_whole()
        from kvblocks.observe.block_callbacks import BlockCallbacks as Callbacks

        return Callbacks(self._index, taken, touched)

    def _start_sampling(self, every: int, now: Callable[[], float], bounds: tuple[float, ...]) -> BlockSampler:
        """Record the lives of about one block in `every` from now on, for `CacheMetrics`. O(num_blocks).

        Raises InvalidArgumentError when another sampler is already recording.
        """
        self._change.check_whole()
        from kvblocks.observe.block_sampler import BlockSampler, choose_sample

        if self._sampler is not None:
            raise InvalidArgumentError(
                "expected a manager whose blocks nobody samples, got one that has metrics: close them"
            )
        self._sampler = BlockSampler(choose_sample(self._pool.blocks, every), now, bounds)
        self._index.watch(self._sampler)
        return self._sampler

    def _stop_sampling(self, sampler: BlockSampler) -> None:
        """End the recording of `sampler`. Does nothing if it has ended. O(1)."""
        self._change.check_whole()
        if self._sampler is sampler:
            self._index.unwatch(sampler)
            self._sampler = None

    def _find_hit(self, sequence: Sequence, max_tokens: int | None) -> CacheHit:
        matched = find_blocks(self._index, sequence, max_tokens) if self.enable_caching else []
        return self._slots.find_hit(sequence, matched, self._in_flight)

    def _start(
        self, sequence: Sequence, end: int, num_slots: int, hit: CacheHit | None, *, delayed: bool
    ) -> list[KVCacheBlock] | None:
        epoch = self._index.epoch if self.enable_caching else None
        self._claim(sequence, "allocate_slots")
        try:
            blocks = self._slots.start(sequence, epoch, end, num_slots, hit, delayed=delayed)
        except BaseException:
            if sequence.owner is None:  # nothing was changed yet
                self._unclaim(sequence)
            raise
        if blocks is None:
            self._unclaim(sequence)
            return None
        self._link.num_queries += 1
        self._link.num_queried_tokens += len(sequence.tokens)
        if hit is None or not hit.blocks:
            return blocks
        self._link.num_hits += 1
        self._link.num_hit_tokens += hit.num_tokens
        if self._recording is not None and self._recording.log.options.hits:
            self._recording.log.note_hit(hit)
        if self._eviction is not None:
            self._eviction.note_hit(hit.blocks)
        if self._transfers is not None:
            self._transfers.note_use(hit)
        return blocks

    def _find_room(
        self,
        sequence: Sequence,
        hit: CacheHit | None,
        start: int,
        num_external: int,
        total: int | None,
        num_new_tokens: SupportsIndex | None,
    ) -> tuple[int, int] | None:
        """Return the end of the known tokens that `allocate_slots` makes room for, and the number of slots there are
        then.

        None: there is nothing to do. start: position of the first token. total: num_total_tokens.
        """
        if self._recurrent is not None:
            self._recurrent.check_room(sequence, hit, num_external, total)
        known, first = sequence.num_tokens, start + num_external
        readonly = start if hit is None else hit.num_readonly_tokens
        if num_external > known - readonly:
            check_count("num_external_computed_tokens", num_external, 0, known - readonly)
        end = known if total is None else min(max(total, first), known)
        if num_new_tokens is not None:
            end = first + check_count("num_new_tokens", num_new_tokens, 0, known - first)
        if total is None:
            return end, end
        if sequence.owner is not None and total <= start == end:
            return None
        if sequence.owner is None and end == start and not ends_in_block(hit):
            raise InvalidArgumentError(f"allocate_slots: expected room for at least {start + 1} tokens, got {end}")
        return end, max(end, total)

    def _start_loading(
        self, sequence: Sequence, hit: CacheHit | None, loads: list[TierHit], num_new_tokens: SupportsIndex | None
    ) -> list[KVCacheBlock] | None:
        """Start a sequence with a hit and tokens from tiers. For `tiers.allocate`, which has checked both."""
        transfers = self._transfers
        if transfers is None or not loads:
            return self.allocate_slots(sequence, num_new_tokens, hit)
        found, num_loaded = transfers.with_loads(hit, loads), sum([load.num_tokens for load in loads])
        start = 0 if found is None else check_hit(self._index, sequence, found)
        room = self._find_room(sequence, found, start, num_loaded, None, num_new_tokens)
        assert room is not None, "only a sequence with blocks may have room already"
        blocks = self._start(sequence, room[0], room[1], found, delayed=True)
        if blocks is not None:
            self._in_flight.note(sequence)
            transfers.begin_loads(sequence, loads)
        self._link.end()
        return blocks

    def _append_otherwise(
        self, sequence: Given[Sequence], token_ids: TokenIds, delay_cache_blocks: Flag
    ) -> list[KVCacheBlock] | None:
        """`append_slots` for the rare cases: delayed tokens, debug mode, or a manager that was left half done."""
        self._change.check_whole()
        if check_flag("delay_cache_blocks", delay_cache_blocks):
            return self._append_late(sequence, token_ids)
        self._change.state = IDLE
        try:
            blocks = self.append_slots(sequence, token_ids)
        finally:
            was_short = self._change.state == IDLE
            if was_short:
                self._change.state = DEBUGGING
        if was_short:
            self.check()
        return blocks

    def _append_late(self, sequence: Given[Sequence], token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """`append_slots` with delay_cache_blocks=True."""
        packed = pack_tokens(token_ids)  # first, as in `append_slots`
        own = self._link.check_owned(sequence, "append_slots")
        self._check_appendable(own, "append_slots")
        blocks = self._slots.append(own, packed, delayed=True)
        if blocks is not None:
            self._in_flight.note(own)
        self._link.end()
        return blocks

    def _note_in_flight(self, batch: list[Sequence]) -> None:
        """Note which sequences of a step have tokens in flight. O(sequences)."""
        for sequence in batch:
            self._in_flight.note(sequence)

    def _check_step(
        self, sequences: Items[Sequence], token_ids: TokenIds
    ) -> tuple[list[Sequence], list[Any], list[Sequence], dict[Sequence, int]] | None:
        """Return a step's sequences, their tokens, those at a boundary, and all indices; None if there are no
        sequences.
        """
        if self._change.state:
            self._change.check_whole()
        batch: list[Sequence] = (
            [*sequences]
            if type(sequences) is list
            else listed("sequences", "an iterable of sequences", sequences, in_order=True)
        )
        if not batch:
            check_step([], len(listed("token_ids", "an iterable of ints", token_ids)))
            return None
        change = self._change
        tokens: list[Any] = token_ids if type(token_ids) is list else pack_tokens(token_ids).tolist()
        if len(batch) != len(tokens):
            check_step(batch, len(tokens))
        if type(tokens[0]) is bool:
            pack_tokens(tokens)  # raises the error
        try:
            at_boundary = [s for s in batch if s.num_computed_tokens >= s.fits_below or s.tail_owner is not change]
        except (AttributeError, TypeError):
            check_step(batch, len(tokens))  # raises an error that names what is no sequence
            raise
        for sequence in at_boundary:
            if sequence.owner is not self._change or sequence.num_computed_tokens != len(sequence.tokens):
                self._check_appendable(sequence, "append_step")
        if batch != self._batch_memo[0]:  # mostly it is the last step's
            self._batch_memo = batch, self._index_batch(batch)  # after the checks: it keeps no other manager's sequence
        return batch, tokens, at_boundary, self._batch_memo[1]

    def _index_batch(self, batch: list[Sequence]) -> dict[Sequence, int]:
        """Return the index of each sequence. Raises InvalidArgumentError when one comes twice."""
        indices = dict(zip(batch, range(len(batch)), strict=True))
        if len(indices) != len(batch):
            check_step(batch, len(batch))
        return indices

    def _give_back(self, sequence: Given[Sequence], call: str, num_computed_tokens: SupportsIndex | None) -> None:
        """Free a sequence with num_computed_tokens tokens written (None: all of them). See `free` and `abort`."""
        if self._change.state:
            self._change.check_whole()
        try:  # `check_owned`, inlined
            own: Sequence = sequence  # type: ignore[assignment]
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self._change or self._sequences.get(own.sequence_id) is not own:
            raise self._link.refusal(call, sequence)
        if num_computed_tokens is not None:
            num_computed_tokens = check_count("num_computed_tokens", num_computed_tokens, 0, own.num_computed_tokens)
        self._change.state = CHANGING
        try:
            del self._sequences[own.sequence_id]  # first, since it runs the id's __hash__, which may raise
        except BaseException as error:
            self._keep(own)
            if type(error) is KeyError and error.args and error.args[0] is own.sequence_id:  # it was there just now
                raise self._link.refusal(call, sequence) from None
            raise
        if num_computed_tokens is not None:
            self._lose_unwritten(own, num_computed_tokens)
        if self._batch_memo[0]:
            self._batch_memo = ([], {})
        if self._in_flight.sequences:
            self._in_flight.drop(own)
        if self._transfers is not None:
            self._transfers.note_end(own)
        self._slots.release(own)
        self._change.state = self._change.rest  # `end`, inlined
        if self._change.state:
            self.check()

    def _lose_unwritten(self, sequence: Sequence, num_written: int) -> None:
        """Record that a sequence, which is being cut or freed, wrote only its first `num_written` tokens.

        Tokens that it shares with others through a hit or a fork were not its to write.
        """
        blocks = self._slots.unwritten_blocks(sequence, num_written)
        if blocks:  # last first, so that nothing is chained to a block when it stops being cached
            self._lose(dict.fromkeys(blocks[::-1], max(num_written, sequence.num_given_tokens)), sequence)

    def _lose(self, lost: LostBlocks, writer: Sequence | None) -> None:
        """Record that the KV in these blocks isn't there: it was never written, or it is bad.

        The blocks stop being cached, here and in the tiers, together with what is chained to them. All sequences that
        own one of them lose everything from its first lost token on. writer: the sequence that
        was to write them, and is being cut or freed; None: they are bad. O(blocks + blocks of pins). If a block has an
        owner other than the writer and stores, also what `_other_owners` costs, and O(blocks of loads).
        """
        blocks = [*lost]
        are_shared = self._are_shared(blocks, writer)
        if self._transfers is not None:
            self._transfers.note_lost(blocks, writer, are_shared=are_shared)
        self._pool.uncache(blocks, "dropped" if writer is None else "aborted")
        if self._slots.soft_holds is not None:  # before saves that wait give theirs back: those are reused first
            self._slots.soft_holds.drop_uncached()
        if are_shared:
            losers = self._sequences.values() if writer is None else self._other_owners(blocks, writer)
            self._slots.lose(lost, losers)

    def _other_owners(self, blocks: list[KVCacheBlock], writer: Sequence) -> list[Sequence]:
        """Return all sequences but the writer that own one of these blocks, and perhaps some that no longer do.

        O(blocks + those sequences), and O(blocks of all sequences) unless `_owners` is up to date.
        """
        if self._owners is None:
            self._owners = {}
            for sequence in self._sequences.values():
                for table in self._slots.tables(sequence):
                    for block in table:
                        self._owners.setdefault(block, []).append(sequence)
        found = {owner: None for block in blocks for owner in self._owners.get(block, ())}
        return [owner for owner in found if owner.owner is self._change and owner is not writer]

    def _with_computed_from(self, blocks: list[KVCacheBlock]) -> LostBlocks:
        """Return these blocks, and all that sequences computed from what they hold. O(blocks of all sequences).

        One pass suffices, since who shares a block started after the sequence that wrote it.
        """
        lost = dict.fromkeys(blocks, 0)
        for sequence in self._sequences.values():
            first = self._slots.first_lost_in(sequence, lost)
            if first is not None:
                for block in self._slots.unwritten_blocks(sequence, first):
                    lost.setdefault(block, first)
        return lost

    def _are_shared(self, blocks: list[KVCacheBlock], writer: Sequence | None) -> bool:
        """Whether any of these blocks has an owner other than its writer (if any) and stores. O(blocks)."""
        num_own = 0 if writer is None else 1
        shared = [block for block in blocks if block.ref_cnt > num_own]
        if shared and self._transfers is not None:
            stores = [pool.storing for pool in self._transfers.pools]
            return any(block.ref_cnt > num_own + sum([block in storing for storing in stores]) for block in shared)
        return bool(shared)

    def _go_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Release the slots after the first `num_tokens` tokens, which end a block, and stop caching those blocks."""
        is_behind = num_tokens < sequence.num_computed_tokens
        self._lose_unwritten(sequence, num_tokens)
        self._owners = None  # a state may come from a checkpoint's blocks, which it shares
        self._slots.rewind(sequence, num_tokens)
        if self._recurrent is not None and is_behind:
            self._recurrent.go_back(sequence, num_tokens)
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

    def _start_recording(self, options: EventOptions, hash_scheme: HashScheme) -> Recording:
        """Record events from now on."""
        from kvblocks.observe.event_log import start_recording

        return start_recording(options, self._index, hash_scheme)

    def _make_transfers(self, tiers: Iterable[Tier]) -> Transfers:
        from kvblocks.tiers.tier import check_tiers
        from kvblocks.tiers.transfers import Transfers as Made

        given = check_tiers(tiers, self._groups or (), enable_caching=self.enable_caching)
        transfers = Made(given, self._link, self._calls())
        if self._history is not None:
            from kvblocks.observe.removal_history import watch_tiers

            watch_tiers(self._history, transfers.pools, self._index.epoch.hash_scheme)
        return transfers

    def _calls(self) -> ManagerCalls:
        """Return what tiers need of the manager."""
        from kvblocks.tiers.calls import ManagerCalls as Made

        return Made(self._commit, self._go_back, self._start_loading)

    def _claim(self, sequence: Sequence, call: str) -> None:
        """Begin a change by entering a sequence under its id.

        Hashing and comparing the id may raise, and SequenceStateError is raised when the id is in use. In either case
        nothing has changed, and no change is under way.
        """
        self._change.state = CHANGING  # `begin`, inlined: both callers have called `check_whole`
        try:
            is_free = self._sequences.setdefault(sequence.sequence_id, sequence) is sequence
        except BaseException:
            self._unclaim(sequence)
            raise
        if not is_free:
            self._change.end()
            raise SequenceStateError(
                f"{call}: expected another sequence_id than {shown(sequence.sequence_id)}, which is in use"
            )
        self._owners = None
        self._link.num_started += 1
        sequence.start_number = self._link.num_started

    def _unclaim(self, sequence: Sequence) -> None:
        """Undo what `_claim` did, if anything, and end its change. Hashes no id. O(1)."""
        if self._sequences and next(reversed(self._sequences.values())) is sequence:
            self._sequences.popitem()
        self._change.end()

    def _keep(self, sequence: Sequence) -> None:
        """If a change failed before it removed this sequence, end the change. O(sequences)."""
        if id(sequence) in map(id, self._sequences.values()):  # by identity, which hashes nothing
            self._change.end()

    def _check_continued(self, sequence: Sequence, hit: CacheHit | None) -> int:
        self._link.check_owned(sequence, "allocate_slots")
        if hit is not None:
            raise SequenceStateError(f"allocate_slots: expected no hit, since {sequence} has blocks; got {hit}")
        return sequence.num_computed_tokens

    def _check_appendable(self, sequence: Sequence, call: str) -> None:
        self._link.check_owned(sequence, call)
        if sequence.num_computed_tokens != sequence.num_tokens:
            got = f"{sequence.num_computed_tokens} slots for {sequence}"
            raise SequenceStateError(f"{call}: expected slots for all tokens, got {got}")

    def _check_sequences(self, block_size: int, smallest_block_size: int) -> None:
        """Raise AssertionError unless all sequences are entered under their ids and are consistent."""
        for sequence_id, sequence in self._sequences.items():
            own_id: Any = sequence.sequence_id  # its == may return anything
            assert sequence.owner is self._change and own_id == sequence_id, f"{sequence}: not under its own id"
            sequence.check(block_size, smallest_block_size)
            if sequence.side_tables is not None:
                sequence.side_tables.check(sequence.num_computed_tokens)

    def _make_eviction(self, eviction: Text | PolicyFactory) -> Eviction:
        """Return an `Eviction`, which the pool asks from now on."""
        from kvblocks.retention.eviction import Eviction as Made

        made = Made(eviction, len(self._pool.blocks), self._pool.end_block_id)
        self._index.watch(made)
        self._pool.chooser = made
        return made

    def _make_pins(self) -> Pins:
        from kvblocks.retention.pins import Pins as Made

        return Made(self._pool, self._max_pinned_blocks)


def check_step(sequences: list[Any], num_tokens: int) -> None:
    """Raise InvalidArgumentError unless `sequences` are `num_tokens` different sequences."""
    for sequence in sequences:
        as_sequence("append_step", sequence)
    num_different = len(set(sequences))
    if not num_different == len(sequences) == num_tokens:
        got = f"{len(sequences)} sequences, {num_different} of them different, and {num_tokens} tokens"
        raise InvalidArgumentError(f"append_step: expected different sequences and a token for each, got {got}")
