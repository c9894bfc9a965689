"""`KVBlocksCacheManager`: kvblocks behind the calls that vLLM's schedulers make on their KVCacheManager.

A `Sequence` has a request's tokens. A token is added when a step gives it a slot, or when it arrives as output, so a
sequence never has more computed tokens than vLLM knows of. As in vLLM, blocks are cached when they are allocated,
except those that a connector loads later. vLLM's block 0 is its null block, so kvblocks' ids begin with 1.

With vLLM's lookahead hashes a block also depends on the token after it. Then a sequence has the request's tokens from
the second one on (`sequences.make_sequence`), while slots are counted as usual.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from kvblocks import BlockHold, CacheHit, InvalidArgumentError, KVCacheBlock, Sequence
from kvblocks.integrations.vllm.admission import Admission, RoomNeeded
from kvblocks.integrations.vllm.events import EventMaker, NamedBlocks
from kvblocks.integrations.vllm.groups import admission_caps, event_kinds, find_groups, make_manager, zeroed_groups
from kvblocks.integrations.vllm.loads import FailedLoads, uncache
from kvblocks.integrations.vllm.probe import check_calls, check_options, refuse
from kvblocks.integrations.vllm.residency import BlockLives
from kvblocks.integrations.vllm.sequences import (
    LORA_VERSIONS,
    image_keys,
    look_ahead,
    make_sequence,
    num_cached_tokens,
    num_common_blocks,
    num_known,
)
from kvblocks.integrations.vllm.states import Before, CachedStates
from kvblocks.integrations.vllm.views import (
    GivenBlocks,
    HitBlocks,
    NoBlocks,
    PoolView,
    TableBlocks,
    UnusedCalls,
    given_hit,
    make_coordinator,
)

RUNNING = RequestStatus.RUNNING


class KVBlocksCacheManager(UnusedCalls):
    """Replaces vLLM's KVCacheManager. manager: the KVCacheManager of kvblocks, with all calls that vLLM lacks.

    The parameters are vLLM's, except for three. debug: as in kvblocks. hash_algorithm: vLLM's
    `prefix_caching_hash_algo`, for the names of blocks in events and for questions by hash. is_asked_for_hashes:
    whether such questions come. Raises UnsupportedEngineError.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,  # noqa: ARG002  # not for hits at blocks' ends
        num_hash_lookahead_tokens: int = 0,
        debug: bool = False,
        hash_algorithm: str = "sha256",
        is_asked_for_hashes: bool = False,
    ) -> None:
        check_calls(KVBlocksCacheManager)
        match_unit = hash_block_size if enable_caching else None
        groups = find_groups(kv_cache_config, dcp_world_size * pcp_world_size, match_unit)
        check_options(len(groups), use_eagle, num_prefill_lookahead, num_hash_lookahead_tokens, enable_kv_cache_events)
        self.kv_cache_config, self.max_model_len = kv_cache_config, max_model_len
        self.enable_caching, self.enable_kv_cache_events = enable_caching, enable_kv_cache_events
        self.use_eagle, self._num_ahead = use_eagle, num_hash_lookahead_tokens
        self.log_stats, self.metrics_collector = log_stats, metrics_collector
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.num_kv_cache_groups = len(groups)
        self.empty_kv_cache_blocks = NoBlocks(len(groups))
        self.kv_cache_event_metadata = event_kinds(kv_cache_config)
        named = hash_algorithm if self.enable_kv_cache_events or is_asked_for_hashes else None
        self.manager = make_manager(kv_cache_config, groups, enable_caching, named, debug)
        self._append_slots = self.manager.append_slots  # looked up once, since it is called for each token
        self._named = NamedBlocks(self.manager, is_asked=is_asked_for_hashes, is_read=enable_kv_cache_events)
        self.block_pool = PoolView(self.manager, kv_cache_config.num_blocks, hash_block_size, self._named)
        self._groups, self._block_size = groups, self.manager.block_size
        self._states = CachedStates(groups)
        self._has_one_group = len(groups) == 1 and groups[0].sees_all
        caps = admission_caps(kv_cache_config, max_in_flight_tokens or max_model_len, max_model_len)
        self._sequences: dict[str, Sequence] = {}  # also of preempted requests, and of those only looked up
        self._admission = Admission(self.manager, self._sequences, caps, self.watermark_blocks)
        self.most_pool_tokens = self._admission.most_pool_tokens(max_model_len)
        self._failed_loads = FailedLoads(self.manager)
        self._events = EventMaker(self.kv_cache_event_metadata)
        self._zeroed, self._new_block_ids = zeroed_groups(kv_cache_config), list[int]()
        self._lives = None if metrics_collector is None else BlockLives(self.manager, metrics_collector, enable_caching)
        self.coordinator = make_coordinator(
            kv_cache_config,
            groups,
            self._sequences,
            block_pool=self.block_pool,
            scheduler_block_size=scheduler_block_size,
            eagle_group_ids={0} if use_eagle else set(),
            get_num_blocks_to_allocate=self._admission.get_num_blocks_to_allocate,
        )

    # Lookups.

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether a request may use cached blocks: not if it wants the logits of its whole prompt."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[GivenBlocks, int, int]:
        """Return the blocks of a request's longest cached prefix, its number of tokens, and a boundary.

        The boundary is where the request's tokens begin to differ from those of earlier requests, if recurrent layers
        have no state there yet; otherwise 0.

        The prefix has at most max_cache_hit_length tokens, and never the last one, whose logits are needed. With EAGLE
        it is one block shorter, since the draft model needs the hidden state before the first computed token.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        hit = self._find(request, most)
        boundary = self._states.boundary(hit, most) if self._states.groups else 0
        num_hit = hit.num_readonly_tokens  # perhaps all tokens of the sequence, if the request has one more
        if not num_hit:
            return self.empty_kv_cache_blocks, 0, boundary
        if self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", None) == "full":
            self._events.collect(self._named.take(), None)
            self._events.collect_hit(hit, request, [group.block_size for group in self.manager.groups])
        return HitBlocks(hit, self.num_kv_cache_groups), num_hit, boundary

    def num_cached(self, request: Any) -> int:
        """Return how many tokens `get_computed_blocks` would find, without an event for the lookup."""
        is_on = self.prefix_cache_lookup_enabled(request)
        return self._find(request, request.num_tokens - 1).num_readonly_tokens if is_on else 0

    def _find(self, request: Any, most_tokens: int) -> CacheHit:
        hit = self.manager.get_computed_blocks(self._sequence(request), most_tokens)
        return hit.cut(hit.num_tokens - self._block_size) if self.use_eagle and hit.blocks else hit

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[GivenBlocks, int, int, bool]:
        """As `get_computed_blocks`, followed by False, since no group's own hit is shorter than this one."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(self, blocks: GivenBlocks, num_computed_tokens: int) -> GivenBlocks:
        """Return what `get_computed_blocks` found, cut to `num_computed_tokens` tokens."""
        if not isinstance(blocks, HitBlocks):
            return blocks
        hit = blocks.hit.cut(num_computed_tokens)
        return HitBlocks(hit, self.num_kv_cache_groups) if hit.num_tokens else self.empty_kv_cache_blocks

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count a lookup that led to an admission."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            preempted = request.num_preemptions > 0
            self.prefix_cache_stats.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=preempted)

    def make_prefix_cache_stats(self) -> Any:
        """Return statistics since the last call; None if they are off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    # Slots.

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: GivenBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> GivenBlocks | None:
        """Make room for what a request computes next. Returns the new blocks; None if there is no room."""
        sequence = self._sequences.get(request.request_id)
        if sequence is not None and sequence.owner is not None:
            tokens, num_computed = request._all_token_ids, sequence.num_computed_tokens  # noqa: SLF001
            ahead, end = self._num_ahead, request.num_computed_tokens + num_new_tokens
            known = num_known(request, ahead) if ahead else len(tokens)
            num_slots = end + num_lookahead_tokens
            is_running = request.status is RUNNING and not reserved_blocks
            if is_running and end >= known == num_computed + 1 == len(sequence.tokens) + 1 and self._has_one_group:
                token = [tokens[num_computed + ahead]]  # a decode: one known token without a slot; this is the hot path
                if num_slots == known or num_slots <= len(sequence.blocks) * self._block_size:
                    blocks = self._append_slots(sequence, token)
                else:
                    blocks = self._append_and_reserve(sequence, token, min(num_slots, self.max_model_len))
                if self.enable_kv_cache_events and (blocks or not known % self._block_size):
                    self._tell(request)
                return None if blocks is None else self._given_one(blocks) if blocks else self.empty_kv_cache_blocks
            num_slots = min(num_slots, self.max_model_len)
            room = self._room(request, num_slots, full_sequence_must_fit, reserved_blocks, has_scheduled_reqs)
            if not is_running and self._admission.is_held_back(request, sequence, None, room):
                return None
            return self._grow(request, sequence, min(end, known), num_slots)
        if num_encoder_tokens:
            raise refuse("encoder tokens", "there is no KV cache group of cross attention")
        if not (num_new_tokens or num_external_computed_tokens or num_new_computed_tokens):
            raise InvalidArgumentError(
                "num_new_tokens must be greater than 0 when there are no computed tokens to adopt"
            )
        hit = given_hit(new_computed_blocks, num_new_computed_tokens)
        sequence = self._sequence(request) if hit is None else hit.sequence  # the hit was found in this step
        start = min(num_new_computed_tokens + num_external_computed_tokens, self.max_model_len)
        num_slots = min(start + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        room = self._room(request, num_slots, full_sequence_must_fit, reserved_blocks, has_scheduled_reqs)
        if self._states.is_of_step(hit) or self._admission.is_held_back(request, sequence, hit, room):
            return None
        num_loaded = num_external_computed_tokens if delay_cache_blocks else 0  # otherwise loaded within the step
        new = self.manager.allocate_slots(
            sequence,
            min(start + num_new_tokens, sequence.num_tokens) - (0 if hit is None else hit.num_tokens) - num_loaded,
            hit=hit,
            num_external_computed_tokens=num_loaded,
            num_total_tokens=num_slots,
            delay_cache_blocks=delay_cache_blocks,
        )
        return None if new is None else self._given(request, sequence, new, skip_zeroing_group_ids)

    def _room(self, request: Any, num_slots: int, must_fit: bool, num_reserved: int, has_others: bool) -> RoomNeeded:
        return RoomNeeded(num_slots, min(request.num_tokens, self.max_model_len) * must_fit, num_reserved, has_others)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Cache what has been written: tokens whose output has arrived, or that a connector has loaded."""
        sequence = self._sequences.get(request.request_id)
        if sequence is not None and (
            num_computed_tokens > sequence.num_computed_tokens or sequence.delayed_from is not None
        ):  # otherwise they were cached when they got their slots, as usual
            self._cache(request, sequence, num_computed_tokens)

    def _cache(self, request: Any, sequence: Sequence, num_computed_tokens: int) -> None:
        if sequence.owner is None:
            return
        num_computed = sequence.num_computed_tokens
        end = min(num_computed_tokens, num_known(request, self._num_ahead))
        if end == num_computed + 1 == sequence.num_tokens + 1 and self._has_one_group:
            self._append_slots(sequence, self._tokens(request, num_computed, end))
            self._tell(request)
        elif end > num_computed:
            self._grow(request, sequence, end, end)
        if sequence.delayed_from is not None:
            self.manager.cache_blocks(sequence, min(num_computed_tokens, sequence.num_computed_tokens))
            self._tell(request)

    def _grow(self, request: Any, sequence: Sequence, end: int, num_slots: int) -> GivenBlocks | None:
        """Have a sequence's first `end` tokens computed, with `num_slots` slots in all."""
        num_computed = sequence.num_computed_tokens
        num_new = max(0, end - num_computed)
        if sequence.delayed_from is not None or sequence in self._failed_loads:
            self._failed_loads.cache_again(sequence, end)
        if not num_new and self._has_one_group and num_slots <= len(sequence.blocks) * self._block_size:
            return self.empty_kv_cache_blocks
        if request.resumable and self.enable_caching:
            self._learn_images(request, sequence)
        if sequence.num_tokens < end:
            sequence.append_tokens(self._tokens(request, sequence.num_tokens, end))
        num_in_flight = 0
        if not self._has_one_group:
            num_in_flight = self._settle(request, sequence)
            num_new = max(0, end - sequence.num_computed_tokens)
        before = self._states.before(sequence) if self._states.groups else None
        new = self.manager.allocate_slots(
            sequence, num_new, num_total_tokens=max(num_slots, 1), num_in_flight_tokens=num_in_flight
        )
        return None if new is None else self._given(request, sequence, new, (), before)

    def note_failed_load(self, request: Any) -> None:
        """Note that a running request's tokens from `num_computed_tokens` on are computed again, in place.

        Until then nobody else hits these blocks. vLLM has no such call; `KVBlocksScheduler` makes it.
        """
        sequence = self._sequences.get(request.request_id)
        if sequence is not None and sequence.owner is not None:
            self._failed_loads.note(sequence, request.num_computed_tokens)

    def _learn_images(self, request: Any, sequence: Sequence) -> None:
        """Take note of images, and of all tokens, that came with a later turn of a session."""
        features = request.mm_features[sum(isinstance(key, str) for *_, key in sequence.extra_keys) :]
        if features:
            tokens = self._tokens(request, sequence.num_tokens, num_known(request, self._num_ahead))
            sequence.append_tokens(tokens, extra_keys=image_keys(features, self._num_ahead))

    def _settle(self, request: Any, sequence: Sequence) -> int:
        """Count the tokens of ended steps as computed. Returns how many computed tokens belong to running steps.

        Windows slide by the tokens of ended steps only. So they keep what running steps, or rejected drafts, need.
        """
        settled: int = max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, sequence.num_tokens))
        if settled > sequence.num_computed_tokens:  # accepted drafts, which have slots
            self.manager.allocate_slots(
                sequence, settled - sequence.num_computed_tokens, num_total_tokens=settled, num_in_flight_tokens=settled
            )
            self._tell(request)
        return max(0, sequence.num_computed_tokens - settled)

    def _append_and_reserve(self, sequence: Sequence, token: list[int], num_slots: int) -> list[KVCacheBlock] | None:
        """Add a token, with `num_slots` slots in all. Returns None, changing nothing, if there is no room."""
        blocks = self.manager.allocate_slots(sequence, 0, num_total_tokens=num_slots)
        if blocks is not None:
            self._append_slots(sequence, token)
        return blocks

    def _tell(self, request: Any) -> None:
        """Make vLLM's events for what a request's call changed in the cache. Events name that request."""
        if self.enable_kv_cache_events:
            self._events.collect(self._named.take(), request)

    def _given_one(self, blocks: list[KVCacheBlock]) -> GivenBlocks:
        if self._zeroed:
            self._new_block_ids += [block.block_id for block in blocks]
        return GivenBlocks((blocks,))

    def _given(
        self,
        request: Any,
        sequence: Sequence,
        blocks: list[KVCacheBlock],
        skipped: tuple[int, ...],
        before: Before | None = None,
    ) -> GivenBlocks:
        """Return new blocks by group, and note those that are to be zeroed: none of the `skipped` groups.

        before: what the sequence had before; None: it starts, or has no states.
        """
        self._tell(request)
        if self._states.groups:
            self._states.note_step(sequence, before)
        if not blocks:
            return self.empty_kv_cache_blocks
        if sequence.side_tables is None:
            return GivenBlocks((blocks,)) if skipped else self._given_one(blocks)
        tables: tuple[Items[KVCacheBlock | None], ...] = tuple(sequence.new_group_blocks)
        for group in self._zeroed.difference(skipped):
            self._new_block_ids += [block.block_id for block in tables[group] if block is not None]
        return GivenBlocks(self._states.with_gaps(sequence, tables, before) if before else tables)

    def _sequence(self, request: Any) -> Sequence:
        """Return a request's sequence with all known tokens. Makes a new one if the request's tokens have changed."""
        known = num_known(request, self._num_ahead)
        sequence = self._sequences.get(request.request_id)
        if sequence is not None and not sequence.is_allocated:
            is_cut = sequence.num_tokens > known
            if is_cut or request.resumable or sequence.lora != LORA_VERSIONS.key(request.lora_request):
                sequence = None
        if sequence is None:
            sequence = self._sequences[request.request_id] = make_sequence(
                request, self._block_size, self._num_ahead, is_cached=self.enable_caching
            )
        elif sequence.num_tokens < known:
            sequence.append_tokens(self._tokens(request, sequence.num_tokens, known))
        return sequence

    def _tokens(self, request: Any, start: int, end: int) -> list[int]:
        """Return what a request's sequence has from position `start` to `end`."""
        ahead = self._num_ahead
        tokens: list[int] = request._all_token_ids[start + ahead : end + ahead]  # noqa: SLF001
        return tokens

    def as_prefix(self, token_ids: Items[int]) -> tuple[Items[int], list[tuple[int, int, bytes]]]:
        """Return the tokens and extra keys that stand for a prompt in calls of `manager`, such as `pins.pin`."""
        return look_ahead(token_ids) if self._num_ahead else (token_ids, [])

    # Giving back.

    def free(self, request: Any) -> None:
        """Give a request's blocks back. Tokens that got slots but won't be computed leave the cache."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            return
        if sequence.is_allocated:
            self._failed_loads.forget(sequence)
            num_computed = request.num_computed_tokens
            if sequence.num_computed_tokens > num_computed:
                self.manager.abort(sequence, num_computed)
            else:
                self.manager.free(sequence)
        if request.is_finished():
            del self._sequences[request.request_id]

    def pop_blocks_for_free(self, request: Any) -> list[BlockHold]:
        """Free a request whose blocks a step in flight may still write.

        Returns an argument for `block_pool.free_blocks`. As in `free`, tokens that won't be computed leave the cache.
        """
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None or not sequence.is_allocated:
            return []
        self._failed_loads.forget(sequence)
        uncache(self.manager, sequence, max(request.num_computed_tokens, sequence.num_readonly_tokens))
        return [self.manager.holds.detach(sequence)]

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Stop caching what these blocks hold, because loading them failed."""
        ids = [block_id for block_id in block_ids if block_id]
        self.manager.evict_blocks(ids)
        if self._lives is not None:
            self._lives.note_evicted([self.manager.blocks[block_id - 1] for block_id in ids])

    def reset_prefix_cache(self) -> bool:
        """Stop caching everything, unless requests have blocks. Returns whether it did. Pins stay, but become empty."""
        if len(self.manager.holds) or any(sequence.is_allocated for sequence in self._sequences.values()):
            return False
        self.manager.reset_prefix_cache()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        if self._lives is not None:
            self.metrics_collector.reset()
        return True

    # Queries.

    @property
    def usage(self) -> float:
        """The share of blocks that have owners, 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> GivenBlocks:
        """Return all blocks of a request."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.is_allocated:
            return self.empty_kv_cache_blocks
        return TableBlocks(sequence, self.num_kv_cache_groups)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request, by group."""
        return self.get_blocks(request_id).get_block_ids() or ()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Return the ids of the blocks that hold a request's first `num_computed_tokens` tokens, by group."""
        ids = self.get_block_ids(request_id)
        sizes = [group.block_size for group in self._groups]
        return tuple(table[: -(-num_computed_tokens // size)] for table, size in zip(ids, sizes, strict=True))

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return how many of a request's tokens are cached."""
        sequence = self._sequences.get(request.request_id)
        return 0 if sequence is None else num_cached_tokens(sequence, self._groups)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return, for each group, how many leading blocks of this request all other requests with blocks share."""
        sequence = self._sequences.get(running_request_id)
        if sequence is None or not sequence.is_allocated:
            return [0] * self.num_kv_cache_groups
        others = [other for other in self._sequences.values() if other.is_allocated and other is not sequence]
        return [num_common_blocks(sequence, others, group) for group in range(self.num_kv_cache_groups)]

    def create_kv_cache_blocks(self, blocks: Any) -> GivenBlocks:
        """Wrap blocks by group in vLLM's class."""
        return GivenBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def take_events(self) -> list[Any]:
        """Return what changed in the cache since the last call, as vLLM's events."""
        if not self.enable_kv_cache_events:
            return []
        return self._events.take(self._named.take())

    def take_new_block_ids(self) -> list[int]:
        """Return the ids of blocks that the worker has to zero before the step."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Note that a request's blocks must be zeroed from a token on, since a failed load left them unwritten."""
        tables = self.get_block_ids(request_id)
        for group in self._zeroed:
            self._new_block_ids += tables[group][start_token // self._groups[group].block_size :]

    def new_step_starts(self) -> None:
        """Note that a step begins, after which the states of the previous step can be used."""
        self._states.new_step_starts()
        self._named.update()
