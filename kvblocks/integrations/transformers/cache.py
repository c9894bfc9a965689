"""`KVBlocksPagedCache`: transformers' PagedAttentionCache, whose bookkeeping is a KVCacheManager.

What transformers does in a step, and what follows for the cache:

1. Its scheduler asks for slots (`can_store_request_tokens`) and takes a request into the batch at once if it gets them.
   Nothing that was taken into a batch leaves it again before it has run: only requests that got no slots are given
   back. So all that is cached early is written, unless the step dies.
2. The step writes K and V of all its tokens, layer by layer. Full attention does so before it reads anything
   (`update`), so a prompt may be cached when it is scheduled (*early*): an equal one in the same step reads what was
   just written.
   Not so where a layer slides, which reads first; nor where a decoding kernel writes and reads for each request by
   itself (tables of at most `max_blocks_per_request`), so tokens that are computed alone are cached *late* there; nor
   with asynchronous batching, where the next step is prepared before this one's tokens are known.
3. When the step has ended, transformers says so for each request of it (`mark_complete_blocks`). Late blocks are cached
   then, and of early ones it is known that they were written. A request that ends otherwise (the step died) takes
   what was never written out of the cache: `abort`.
4. Requests without room are soft reset: given back and queued anew. What they wrote stays cached, and is free.
"""

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvblocks import CacheHit, KVCacheManager, Sequence
from kvblocks.integrations.transformers.allocators import OURS, plan_groups
from kvblocks.integrations.transformers.probe import refuse
from kvblocks.integrations.transformers.records import Record, Records, known_tokens

END = "end"  # what `complete_blocks` of a scheduled request says: where its tokens of this step end
MARGINS = {"fifo": 0.15, "prefill_first": 0.0}  # of transformers' schedulers, where the user says nothing


class SlotsOnly:
    """In the place of transformers' pool: cached blocks are free ones, so there is nothing to give back."""

    def try_to_free_sectors(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse(f"a use of PagedAttentionCache.pool.{name}", "kvblocks has no such pool")


class KVBlocksPagedCache(PagedAttentionCache):
    """Stands where transformers' cache stands. manager: the kvblocks one, with all that transformers lacks.

    commit: "early" caches at allocation wherever that is sound, "late" always behind the step. debug: `manager.check()`
    after every change. `install` sets both in a subclass. Raises UnsupportedEngineError.
    """

    commit = "early"
    debug = False

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: Any,
        distributed_helper: Any,
        dtype: Any,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise refuse("tensor parallelism", "it was not tested")
        super().__init__(
            config, continuous_batching_config, device, distributed_helper, dtype, model_supports_logits_to_keep
        )
        groups, geometries, first_block_id = plan_groups(self)
        num_pages = geometries[0].num_pages
        full_blocks = next(iter(self.cache_allocators.values())).num_blocks
        self.manager = KVCacheManager(
            full_blocks // num_pages,
            first_block_id=first_block_id,
            groups=None if len(groups) == 1 and groups[0].window is None else groups,
            block_size=groups[0].block_size if len(groups) == 1 and groups[0].window is None else None,
            enable_caching=self.allow_block_sharing,
            debug=self.debug,
        )
        self.records: Records = {}
        self.use_prefix_sharing = self.allow_block_sharing
        has_window = any(group.window is not None for group in groups)
        is_early = self.commit == "early" and not has_window and not continuous_batching_config.use_async_batching
        self.is_late = self.allow_block_sharing and not is_early
        margin = continuous_batching_config.safety_margin
        if margin is None:
            margin = MARGINS.get(continuous_batching_config.scheduler_type, MARGINS["fifo"])
        self._num_margin_blocks = int(margin * self.manager.num_blocks)
        self._refused: str | None = None  # the request that was looked up last, if it may not start yet
        self._allocators: list[Any] = list(self.cache_allocators.values())
        self.pool = SlotsOnly()
        self._layer_types: list[str] = list(self.cache_allocators)  # 5.18's allocators don't know their own
        for layer_type, allocator, geometry in zip(self._layer_types, self._allocators, geometries, strict=True):
            allocator.__class__ = OURS[layer_type]  # this cache's alone; the tensors are registered already
            allocator.kv_manager, allocator.kv_records, allocator.kv_geometry = self.manager, self.records, geometry
            allocator.kv_is_first = not geometry.group
            allocator.pool = self.pool

    # Slots.

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Make room for a request's next tokens, and say whether there is; as a dry run, only say."""
        total = state.current_len() + request_len
        record = self.records.get(state.request_id)
        if dry_run:
            needed = self._allocators[0].needs_new_blocks(state.request_id, state.current_len(), request_len)
            return bool(needed <= self.manager.num_free_blocks)
        if record is None:
            return self._start(state, total)
        if record.state is None:
            record.state = state
        elif record.state is not state:
            raise refuse(f"two requests with the id {state.request_id!r} at once", "blocks belong to one of them")
        if not request_len:
            return True  # its last token waits for a fork
        return self._grow(record, state, total, request_len)

    def _start(self, state: Any, total: int) -> bool:
        """Make room for a request that has no blocks, and hit none."""
        request_id = state.request_id
        if state.current_len():  # no prompt of a user's, but one that warms kernels up: nobody may find what it leaves
            sequence = Sequence(request_id, [0])
            room = self.manager.allocate_slots(sequence, num_total_tokens=total, delay_cache_blocks=True)
        elif request_id == self._refused:
            return False
        else:
            sequence = Sequence(request_id, state.initial_tokens)
            if not self._may_start(sequence, None):
                return False
            num_tokens = self._num_computed(state, total, total)
            is_delayed = self._is_delayed(num_tokens)
            room = self.manager.allocate_slots(sequence, num_tokens or 1, delay_cache_blocks=is_delayed)
        if room is None:
            return False
        self.records[request_id] = Record(sequence, state, 0)
        return True

    def _grow(self, record: Record, state: Any, total: int, request_len: int) -> bool:
        """Make room for the next tokens of a request that has blocks."""
        sequence = record.sequence
        num_tokens, num_slots = sequence.num_tokens, sequence.num_computed_tokens
        if num_slots < num_tokens:  # of its prompt
            num_new = self._num_computed(state, min(total, num_tokens) - num_slots, request_len)
            if not num_new:
                return True
            is_delayed = self._is_delayed(num_new)
            return self.manager.allocate_slots(sequence, num_new, delay_cache_blocks=is_delayed) is not None
        tokens = known_tokens(state, num_tokens, total)
        if len(tokens) < total - num_tokens:  # the step that samples them still runs; see `mark_complete_blocks`
            return self.manager.reserve_slots(sequence, total - num_tokens) is not None
        return not tokens or self.manager.append_slots(sequence, tokens, self._is_delayed(len(tokens))) is not None

    def _num_computed(self, state: Any, num_new: int, request_len: int) -> int:
        """Return how many of the new tokens the step computes: not a prompt's last one while it has to be forked."""
        waits = state.num_children > 0 and request_len == len(state.remaining_prefill_tokens)
        return num_new - waits

    def _is_delayed(self, num_tokens: int) -> bool:
        """Whether the tokens that a step computes of a request are cached behind it."""
        alone = num_tokens <= 1 and self.max_blocks_per_request > 0
        return self.is_late or (alone and self.allow_block_sharing)

    def _may_start(self, sequence: Sequence, hit: CacheHit | None) -> bool:
        """Whether a request may begin beside others: all of its prompt fits, and there are blocks left to grow into.

        That is the scheduler's safety margin, or a block of each group for each of the others if that is more.
        transformers looks at the margin once a step, and counts cached blocks as taken. Here they are free, so without
        this it would admit more requests than the pool can bear, and soft reset them soon.
        """
        if not self.records:
            return True
        needed = self.manager.get_num_blocks_to_allocate(sequence, sequence.num_tokens, hit=hit)
        kept = max(self._num_margin_blocks, len(self.records) * len(self._allocators))
        return needed + kept <= self.manager.num_free_blocks

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return how many of these requests, in order, there is room for."""
        num_free = self.manager.num_free_blocks
        for number, needed in enumerate(list_blocks_needed):
            num_free -= sum(needed.values())
            if num_free < 0:
                return number
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return the share of free blocks, cached ones among them; or their bytes."""
        num_free = self.manager.num_free_blocks
        if relative:
            return num_free / self.manager.num_blocks
        return int(num_free * (self.num_sectors * self.bytes_per_sector // self.manager.num_blocks))

    # Prefixes.

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Give a request the blocks that hold the longest cached prefix of its prompt, never with its last token.

        Returns the tokens that they hold, 0 also for a request that may not start yet.
        """
        self._refused = None
        if not self.use_prefix_sharing or len(prompt_ids) < 2:
            return 0
        sequence = Sequence(request_id, prompt_ids)
        hit = self.manager.get_computed_blocks(sequence, len(prompt_ids) - 1)
        if not hit.num_tokens:
            return 0
        if not self._may_start(sequence, hit) or self.manager.allocate_slots(sequence, 0, hit=hit) is None:
            self._refused = request_id  # else it would start without its hit
            return 0
        self.records[request_id] = Record(sequence, None, hit.num_tokens)
        return hit.num_tokens

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return what `mark_complete_blocks` is to be told when the step has ended."""
        return {END: state.current_len() + request_len}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Note that a step has written a request's tokens. What is to be cached late is cached now."""
        record = self.records.get(state.request_id)
        if record is None or record.state is not state or not complete_blocks:
            return  # given back while the step ran
        sequence, end = record.sequence, complete_blocks[END]
        if end > sequence.num_tokens:  # sampled by the step before, which had not ended when this one was scheduled
            tokens = known_tokens(state, sequence.num_tokens, end)
            room = self.manager.append_slots(sequence, tokens, self.is_late)
            assert room is not None, f"{state.request_id}: slots for {end} tokens were reserved"
        record.num_written = max(record.num_written, end)
        if sequence.num_written_tokens < end:
            self.manager.cache_blocks(sequence, end)

    def evict_cached_blocks(self) -> bool:
        """Do nothing: cached blocks are free ones, and are evicted one by one, least recently used first."""
        return False

    # Giving back.

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:  # noqa: ARG002  # cached blocks are free
        """Give a request's blocks back. What the steps that ended have written of it stays cached."""
        record = self.records.pop(request_id, None)
        if record is None:
            return
        if record.sequence.num_written_tokens > record.num_written:  # cached early, in a step that has not ended
            self.manager.abort(record.sequence, record.num_written)
        else:
            self.manager.free(record.sequence)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Give all blocks back, and forget all that is cached if told to."""
        for request_id in list(self.records):
            self.free_blocks(request_id)
        if clear_ledgers:
            self.manager.reset_prefix_cache()

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        """Fork a request for as many of `dst_req_ids` as there is room for, in order; returns those.

        Full blocks are shared. Each child gets an unfilled last block of its own at once, and its copy is noted.
        """
        source = self.records.get(src_state.request_id)
        if source is None:
            return []
        forked: list[str] = []
        for request_id in dst_req_ids:
            child = self.manager.fork(source.sequence, request_id)
            if self.manager.reserve_slots(child, 1) is None:
                self.manager.free(child)
                break
            self.records[request_id] = Record(child, None, source.num_written)
            forked.append(request_id)
            for group, old, new in self.manager.take_group_copies():
                allocator = self._allocators[group]
                for noted, ids in zip(
                    copy_src_and_dst[self._layer_types[group]], allocator.pairs_to_copy(old, new), strict=True
                ):
                    noted.extend(ids)
        return forked
