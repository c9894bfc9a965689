"""The bookkeeping of transformers' cache by a KVCacheManager, for all supported versions of transformers.

What transformers does in a step, and what that means for the cache:

1. Its scheduler asks for slots (`can_store_request_tokens`; up to 5.17 through `grouped_cache`). A request that gets
   them is in the batch at once, and leaves it only after it has run. Only requests that got no slots are given back.
   So everything that is cached early gets written, unless the step fails.
2. The step writes K and V of all its tokens, layer by layer. Full attention writes before it reads anything (`update`).
   So a prompt may be cached when it is scheduled (*early*): an equal one in the same step reads what was just written.
   In three cases tokens are cached after the step (*late*):
   - A layer has a window: such a layer reads before it writes.
   - A request computes one token with a decoding kernel (tables of at most `max_blocks_per_request`), which writes
     and reads request by request.
   - Batching is asynchronous: the next step is prepared before this one's tokens are known.
3. When the step has ended, transformers says so for each of its requests (`mark_complete_blocks`). Late blocks are then
   cached, and early ones are known to be written. If a request ends otherwise (the step failed), `abort` removes what
   was never written from the cache.
4. Requests without room are soft reset: their blocks are given back, and they are queued again. What they wrote stays
   cached in free blocks.
"""

from typing import Any

from kvblocks import CacheHit, Group, KVCacheManager, Sequence
from kvblocks.integrations.transformers.probe import refuse
from kvblocks.integrations.transformers.records import Record, Records, count_needed_blocks, known_tokens
from kvblocks.integrations.transformers.state_slots import ModelStates

END = "end"  # key of what `count_new_complete_blocks` returns: where a request's tokens of this step end
MARGINS = {"fifo": 0.15, "prefill_first": 0.0}  # of transformers' schedulers, unless the user sets one


class Nothing:
    """Stands in for the pool that transformers' cache took its blocks from. name: the pool's name in transformers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse(f"a use of PagedAttentionCache.{self._name}.{name}", "kvblocks keeps the blocks itself")


class Bookkeeping:
    """A mixin that comes before transformers' PagedAttentionCache in the method order. manager: the KVCacheManager.

    commit: "early" caches at allocation wherever that is correct; "late" always caches after the step. debug: runs
    `manager.check()` after every change. num_state_slots: for how many requests at once there are states; None: as many
    as are useful. `install` sets these in a subclass. state_slots: the states of running requests, or None in models
    without layers that keep states.
    """

    commit = "early"
    debug = False
    num_state_slots: int | None = None
    state_slots: ModelStates | None = None
    allow_block_sharing: bool  # this and the next one are transformers'
    max_blocks_per_request: int

    def keep_books(self, config: Any, groups: list[Group], num_blocks: int, first_block_id: int) -> None:
        """Make the manager, with the settings of transformers' ContinuousBatchingConfig."""
        is_plain = len(groups) == 1 and groups[0].sees_all
        self.manager = KVCacheManager(
            num_blocks,
            first_block_id=first_block_id,
            groups=None if is_plain else groups,
            block_size=groups[0].block_size if is_plain else None,
            enable_caching=self.allow_block_sharing,
            debug=self.debug,
        )
        self.records: Records = {}
        self.use_prefix_sharing = self.allow_block_sharing
        has_window = not all(group.sees_all for group in groups if group.has_table)
        is_early = self.commit == "early" and not has_window and not config.use_async_batching
        self.is_late = self.allow_block_sharing and not is_early
        margin = config.safety_margin
        if margin is None:
            margin = MARGINS.get(config.scheduler_type, MARGINS["fifo"])
        self._num_margin_blocks = int(margin * self.manager.num_blocks)
        self._refused: str | None = None  # the request of the last lookup, if it may not start yet
        self._missed: tuple[Sequence, CacheHit] | None = None  # the last lookup, if no token of it can be used

    # Slots.

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Make room for a request's next tokens, and return whether there is room. With dry_run, only return that."""
        total = state.current_len() + request_len
        record = self.records.get(state.request_id)
        if dry_run:
            return self.count_needed_blocks(state.request_id, total) <= self.manager.num_free_blocks
        if record is None:
            return self._start(state, total)
        if record.state is None:
            record.state = state
        elif record.state is not state:
            raise refuse(f"two requests with the id {state.request_id!r} at once", "blocks belong to one of them")
        if not request_len:
            return True  # nothing is computed: the prompt's last token waits until the request is forked
        return self._grow(record, state, total, request_len)

    def count_needed_blocks(self, request_id: str, total: int) -> int:
        """Return how many free blocks a request's first `total` tokens take."""
        return count_needed_blocks(self.manager, self.records, request_id, total)

    def _start(self, state: Any, total: int) -> bool:
        """Make room for a request that has no blocks and had no hit."""
        request_id = state.request_id
        if state.current_len():  # not a user's prompt, but one that warms up kernels: nobody may hit what it leaves
            return self.allocate_unfound(request_id, state, total)
        sequence, hit = Sequence(request_id, state.initial_tokens), None
        if self._missed is not None and self._missed[0].sequence_id == request_id:
            sequence, hit = self._missed  # a state is saved where its keys and values part from cached ones
        if request_id == self._refused or not self._may_start(sequence, None):
            return False
        num_tokens = self._cut(sequence, self._num_computed(state, total, total) or 1, hit)
        is_delayed = self._is_delayed(num_tokens)
        if self.manager.allocate_slots(sequence, num_tokens, hit, delay_cache_blocks=is_delayed) is None:
            return False
        self.records[request_id] = Record(sequence, state, 0)
        return True

    def allocate_unfound(self, request_id: str, state: Any, total: int) -> bool:
        """Make room for `total` tokens, none of which are cached, and return whether there is."""
        sequence = Sequence(request_id, [0])
        if self.manager.allocate_slots(sequence, num_total_tokens=total, delay_cache_blocks=True) is None:
            return False
        self.records[request_id] = Record(sequence, state, 0)
        return True

    def _grow(self, record: Record, state: Any, total: int, request_len: int) -> bool:
        """Make room for the next tokens of a request that has blocks."""
        sequence = record.sequence
        num_tokens, num_slots = sequence.num_tokens, sequence.num_computed_tokens
        if num_slots < num_tokens:  # tokens of its prompt
            num_new = self._num_computed(state, min(total, num_tokens) - num_slots, request_len)
            if not num_new:
                return True
            num_new = self._cut(sequence, num_slots + num_new, None) - num_slots
            is_delayed = self._is_delayed(num_new)
            return self.manager.allocate_slots(sequence, num_new, delay_cache_blocks=is_delayed) is not None
        tokens = known_tokens(state, num_tokens, total)
        if len(tokens) < total - num_tokens:  # the step that samples the rest still runs; see `mark_complete_blocks`
            return self.manager.allocate_slots(sequence, 0, num_total_tokens=total) is not None
        return not tokens or self.manager.append_slots(sequence, tokens, self._is_delayed(len(tokens))) is not None

    def _num_computed(self, state: Any, num_new: int, request_len: int) -> int:
        """Return how many of the new tokens the step computes. A prompt's last token waits until its forks are made."""
        waits = state.num_children > 0 and request_len == len(state.remaining_prefill_tokens)
        return num_new - waits

    def _cut(self, sequence: Sequence, end: int, hit: CacheHit | None) -> int:
        """Return where a step that would compute a prompt up to `end` should stop: where a state is to be saved."""
        return end if self.state_slots is None else self.manager.states.next_cut(sequence, end, hit)

    def count_slots_ahead(self, state: Any) -> int | None:
        """Return how many tokens of a request have slots but no step computed them; None if states don't limit them."""
        if self.state_slots is None:
            return None
        return max(0, self.records[state.request_id].sequence.num_computed_tokens - int(state.current_len()))

    def plan_states(self, requests: list[Any]) -> None:
        """Take the copies of states for a step of these requests.

        requests: FutureRequestStates, in the order of their rows.
        """
        if self.state_slots is None:
            return
        rows = []
        for future in requests:
            slot = self.records[future.state.request_id].sequence.state_slot
            if future.query_length and slot is not None:
                rows.append((slot, future.query_length))
        self.state_slots.plan_step(rows, *self.manager.states.take_copies())

    def _is_delayed(self, num_tokens: int) -> bool:
        """Whether the tokens that a step computes of a request are cached after the step."""
        alone = num_tokens <= 1 and self.max_blocks_per_request > 0
        return self.is_late or (alone and self.allow_block_sharing)

    def _may_start(self, sequence: Sequence, hit: CacheHit | None) -> bool:
        """Whether a request may begin beside others: all of its prompt fits, and blocks are left for growth.

        The blocks left are the scheduler's safety margin, or a block of each group for each other request if that is
        more. transformers checks its margin once a step, and counts cached blocks as taken. Here they are free. So
        without this rule it would admit more requests than fit, and soon soft reset them.
        """
        if not self.records:
            return True
        needed = self.manager.get_num_blocks_to_allocate(sequence, sequence.num_tokens, hit=hit)
        kept = max(self._num_margin_blocks, len(self.records) * len(self.manager.groups))
        return needed + kept <= self.manager.num_free_blocks

    # Prefixes.

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Give a request the blocks of the longest cached prefix of its prompt, without the last token.

        Returns the number of their tokens, and also 0 if the request may not start yet.
        """
        self._refused = self._missed = None
        if not self.use_prefix_sharing or len(prompt_ids) < 2:
            return 0
        sequence = Sequence(request_id, prompt_ids)
        hit = self.manager.get_computed_blocks(sequence, len(prompt_ids) - 1)
        if not hit.num_tokens:
            self._missed = None if self.state_slots is None else (sequence, hit)
            return 0
        if not self._may_start(sequence, hit) or self.manager.allocate_slots(sequence, 0, hit=hit) is None:
            self._refused = request_id  # otherwise it would start without its hit
            return 0
        self.records[request_id] = Record(sequence, None, hit.num_tokens)
        return hit.num_tokens

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return what to pass to `mark_complete_blocks` when the step has ended."""
        return {END: state.current_len() + request_len}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Note that a step has written a request's tokens. Late blocks are cached now."""
        record = self.records.get(state.request_id)
        if record is None or record.state is not state or not complete_blocks:
            return  # given back while the step ran
        sequence, end = record.sequence, complete_blocks[END]
        if end > sequence.num_tokens:  # tokens that weren't known when this step was scheduled
            tokens = known_tokens(state, sequence.num_tokens, end)
            room = self.manager.append_slots(sequence, tokens, self.is_late)
            assert room is not None, f"{state.request_id}: slots for {end} tokens were reserved"
        record.num_written = max(record.num_written, end)
        if sequence.num_written_tokens < end:
            self.manager.cache_blocks(sequence, end)

    # Giving back.

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:  # noqa: ARG002  # cached blocks are free
        """Give a request's blocks back. What completed steps have written stays cached."""
        record = self.records.pop(request_id, None)
        if record is None:
            return
        if record.sequence.num_computed_tokens > record.num_written:  # by a step that has not ended
            self.manager.abort(record.sequence, record.num_written)
        else:
            self.manager.free(record.sequence)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Give all blocks back. With clear_ledgers, also forget everything that is cached."""
        for request_id in list(self.records):
            self.free_blocks(request_id)
        if clear_ledgers:
            self.manager.reset_prefix_cache()

    def fork_records(self, source_id: str, request_ids: list[str]) -> tuple[list[str], list[tuple[int, int, int]]]:
        """Fork a request for as many of `request_ids` as there is room for, in order.

        Full blocks are shared. Each child immediately gets its own copy of a partly filled last block. Returns the ids
        that were forked, and the copies to make: (group, source, destination).
        """
        source = self.records.get(source_id)
        forked: list[str] = []
        copies: list[tuple[int, int, int]] = []
        if source is None:
            return forked, copies
        for request_id in request_ids:
            if self.state_slots is not None and not self.manager.states.num_free_slots:
                break
            child = self.manager.fork(source.sequence, request_id)
            # A state can't go back behind a token that isn't known, so there are no slots for such.
            num_total = child.num_tokens + (self.state_slots is None)
            if self.manager.allocate_slots(child, 0, num_total_tokens=num_total) is None:
                self.manager.free(child)
                break
            self.records[request_id] = Record(child, None, source.num_written)
            forked.append(request_id)
            copies += self.manager.take_copies()
        return forked, copies
