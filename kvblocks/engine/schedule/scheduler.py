"""Decides what each step computes: continuous batching with chunked prefill over one block manager.

Sans-IO: no tensors, no clock, no model. `schedule` says what to compute. The caller computes it, and then calls
`complete` with the sampled tokens, or `abort` if the step failed. There is one step at a time.

Invariants:
- A sequence that is scheduled in a step keeps its blocks until the step has ended. The manager caches a block as soon
  as it is allocated full, so other requests may already have hit blocks that this step will write. That is why
  `schedule` takes running requests first, the oldest first. The request to preempt is always the youngest, which the
  step hasn't reached. A step may compute some running long prompts after others, or not at all (`LongPrompts`), but
  only if the pool has blocks for all.
- Waiting requests come last, and only into a step that preempted nobody. Otherwise a preempted request would get its
  blocks back at once, and lose them again in the next step.
- The oldest running request advances in every step without a slice, or on its turn if it is a long prompt. Alone it
  fits, or `add` would have refused it. If pins have grown since and leave too little for it, the step raises an error
  before anything changes.
- Waiting requests are admitted in the order of `order`, preempted ones first. Their queue has the order of arrival, in
  which salts take turns (`Turns`). If a running request computes, in chunks, a prefix that a waiting request begins
  with, the waiting request waits for that, and others may be admitted before it. These don't begin with the same
  prefix, so they don't prolong the wait. Others also pass a long prompt that waits for a place. Only running requests
  are waited for. When the pool or the watermark refuses a request, none behind it is admitted in that step.
- A long prompt may have an open chunk, which steps compute in slices of layers (`LongPrompts`). A step with a slice
  contains nothing else. The request is in no other step until the chunk is complete, and may be preempted.
- A request whose prefix comes from a tier (`manager.tiers`) has blocks and counts as running, but is in no step until
  its loads have ended (`note_loaded`). It may be preempted like any other. A block in a transfer is free only after the
  transfer, so a step may be empty while transfers are under way; that is no error.
- Samples of one prompt are forked between two steps, after the prompt's last chunk was computed, so all blocks that
  they share are written. Until then no later request is admitted in their place. Those without room wait at the front.
- With a session gate, requests wait in front of the queue until it lets them in (`Entrance`). Nothing here counts them.
- Blocks that `remembered` keeps never cost a request anything: all are given up before a request is refused a block.
  They were written by a step that is complete.

The order of work, and recomputing as the only kind of preemption, are those of vLLM v1's scheduler.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import islice
from math import inf

from kvblocks import CacheHit, KVCacheManager, Loaded, TierHit
from kvblocks.engine.schedule import ahead, capacity
from kvblocks.engine.schedule.entrance import Entrance
from kvblocks.engine.schedule.long_prompts import LongPrompts
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import FirstCome, Order
from kvblocks.engine.schedule.remembered import RememberedPrompts, make_room
from kvblocks.engine.schedule.request import FinishReason, Request
from kvblocks.engine.schedule.samples import fork_samples, hand_over
from kvblocks.engine.schedule.step import ScheduledChunk, StepLimits, chunk_of
from kvblocks.engine.schedule.turns import Turns
from kvblocks.engine.schedule.watermark import Watermark
from kvblocks.errors import InvalidArgumentError, StaleHitError


class Scheduler:
    """Schedules requests on `manager`, whose sequences must all belong to it.

    max_model_len: the most tokens in the model's context. limits: may be replaced between steps. order: None is first
    come, first served. remembered: prompts of the same manager whose first tokens are known, or None. num_layers: the
    layers of the model if the runner can compute chunks by layers, else 1.
    waiting, running: the unfinished requests, in the order of queueing and of admission; read only. Until a prompt is
    computed, its further samples are among the `siblings` of its first one. lookups: those of waiting requests.
    entrance: by default lets all requests into the queue at once. For a session gate, assign another `Entrance` before
    any request comes, and set `manager.now` before each step.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_model_len: int,
        limits: StepLimits | None = None,
        *,
        order: Order | None = None,
        remembered: RememberedPrompts | None = None,
        num_layers: int = 1,
    ) -> None:
        self.manager = manager
        self.remembered = remembered
        self.max_model_len = max_model_len
        self.limits = limits or StepLimits()
        self.order: Order = order or FirstCome()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.lookups = Lookups(manager)
        self._tiers = manager.tiers if len(manager.tiers) else None
        self.long_prompts = LongPrompts(manager, remembered, num_layers)
        self._turns = Turns()
        self.entrance = Entrance(None, manager, self.lookups)
        self.next_deadline = inf  # at or before the earliest deadline of all requests

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, not counting those that wait for the gate (`Entrance.wake_at`). O(1)."""
        return bool(self.waiting or self.running)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer, of a request that shares no blocks that pins of priority 100 keep.

        O(groups * log(tokens)), and O(tokens pinned) with pins.
        """
        return capacity.max_request_tokens(self.manager, self.max_model_len, self.limits.num_step_tokens)

    def check_fits(self, request: Request) -> None:
        """Raise an error if the request could not finish, even alone. Changes nothing.

        Raises RequestTooLongError if it never could, PoolExhaustedError if not until a pin ends. Samples can run one
        after another, so their number doesn't matter. O(groups), and O(tokens pinned + prompt) with pins.
        """
        capacity.check_fits(self.manager, request, self.max_model_len, self.limits.num_step_tokens)

    def add(self, request: Request) -> None:
        """Queue a request with its siblings. Errors and cost are those of `check_fits`; an error changes nothing."""
        self.check_fits(request)
        self.add_checked(request)

    def add_checked(self, request: Request) -> None:
        """Queue a request that passed `check_fits`, with its siblings. O(samples) plus the cost of `Turns.place`."""
        deadlines = [sample.deadline for sample in (request, *request.siblings) if sample.deadline is not None]
        self.next_deadline = min([self.next_deadline, *deadlines])
        if not self.entrance.add(request):
            self._turns.place(request, self.waiting)

    def answer(self) -> Iterator[tuple[Request, int]]:
        """Give waiting requests their remembered first tokens, between two steps. Yields each request with its token.

        This takes no block. A request that is then finished leaves the queue; others keep their turn. A request gets
        its token when the iterator reaches it. O(waiting requests + remembered prompts), and O(prompt) for each answer.
        """
        for request, token_id in () if self.remembered is None else self.remembered.answer(self.waiting):
            self.lookups.forget()
            request.take_token(token_id)
            if request.finish_reason is not None:
                self._remove(request)
            yield request, token_id

    def schedule(self) -> list[ScheduledChunk]:
        """Return what the next step computes, with slots allocated. It is empty only if there is no work, or if all
        work waits for transfers, for a store's answer (`Request.is_sought`) or for the gate.

        Preempts the youngest requests if the pool has too few blocks. Raises StalledError (a PoolExhaustedError), with
        nothing changed, if pins keep so many blocks that not even the oldest request, or the next in line, can go on.
        The error's `request` is that request: unpin something or cancel it, and call again. O(running requests + new
        blocks + tokens of waiting requests that are looked up). Those are the admitted ones, at most max_num_seqs that
        wait for a prefix, one refused, and those that `order` looks up.
        """
        chunks: list[ScheduledChunk] = []
        self._let_in()
        turns = self.long_prompts
        if turns.next_by_layers(self._computable(), self.limits) is not None:
            if turns.may_give_way:
                self._add_others(chunks)
            chunk = None if chunks else turns.take_slice(self._computable(), self.limits)
            if chunk is not None:
                self.lookups.forget()
                chunks.append(chunk)
            if chunks:
                return chunks
        num_running, computable = len(self.running), self._computable()
        first = turns.begin_step(computable, self.limits, others_wait=bool(self.waiting))
        self._advance(first, chunks)
        may_admit = len(self.running) == num_running  # nobody was preempted
        if turns.postponed:
            self._admit(chunks)
            may_admit = not turns.give_way(to_new=bool(chunks) and len(self.running) > num_running)
            if may_admit:
                self._advance(turns.postponed, chunks)
        if not chunks:
            self._advance(computable, chunks)
        if may_admit or not chunks:  # without chunks, the oldest request itself starts again
            refused = self._admit(chunks)
            if refused is not None and not chunks and not self.is_moving:
                raise capacity.stalled(self.manager, refused)
        return chunks

    def schedule_ahead(self, step: Items[ScheduledChunk]) -> list[ScheduledChunk]:
        """Return what the next step computes before the tokens of `step` are known; empty if they must be known first.

        step: the last step, in which each chunk samples for its own request. Running requests decode, others are
        admitted, nobody is preempted. Pass both steps to `complete`. Requires `ahead.may_plan`. Otherwise as
        `schedule`.
        """
        self._let_in()
        waiting = self.waiting if len(self.running) < self.limits.max_num_seqs else ()
        chunks = ahead.plan(self.manager, self._computable(), waiting, step, self.limits.max_num_batched_tokens)
        if chunks:
            self.lookups.forget()
            self._admit(chunks)
        return chunks

    @property
    def is_moving(self) -> bool:
        """Whether transfers between the device and tiers hold blocks. O(tiers)."""
        return self._tiers is not None and self._tiers.is_busy

    @property
    def is_waiting_for_loads(self) -> bool:
        """Whether all running requests wait for loads, so that no step can compute them. O(running requests)."""
        return self.is_moving and all(self._is_loading(request) for request in self.running)

    def note_loaded(self, loaded: Loaded) -> None:
        """Note the result of a request's loads. The request goes on in the next step. O(running requests)."""
        self.lookups.forget()
        for request in self.running:
            if request.sequence is loaded.sequence and not request.num_computed_tokens:
                request.note_loaded(loaded.num_tokens)

    def note_step(self, chunks: Items[ScheduledChunk], seconds: float) -> None:
        """Note how long a step took: tiers decide by it whether to load, and the gate how long to wait. O(chunks)."""
        num_tokens = sum([chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1])
        for part in [chunk.part for chunk in chunks if chunk.part is not None]:
            part.seconds = seconds = part.seconds + seconds
            num_tokens = num_tokens if part.layers.stop == part.num_layers else 0
        if num_tokens >= self.manager.block_size:
            self.entrance.note_computed(num_tokens, seconds)
            if self._tiers is not None:
                self._tiers.note_computed(num_tokens, seconds)

    def complete(
        self, chunks: Items[ScheduledChunk], token_ids: Items[int | None], planned: Items[ScheduledChunk] = ()
    ) -> None:
        """Record a computed step. Finished requests free their blocks, which stay cached.

        token_ids: one sampled token for each of `chunk.sampled_requests`, chunk by chunk, in order. None (no token)
        ends the request with finish_reason "error". Requests that have ended meanwhile are left alone. planned: the
        step that `schedule_ahead` planned after this one. Raises InvalidArgumentError, with nothing changed, for more
        or fewer tokens. O(requests of the step), and O(prompt) for each sample that is forked.
        """
        num_sampled = sum([1 + len(chunk.request.siblings) for chunk in chunks if chunk.samples])
        if len(token_ids) != num_sampled:
            raise InvalidArgumentError(f"complete: expected {num_sampled} sampled tokens, got {len(token_ids)}")
        self.lookups.forget()
        going_on = ahead.take_tokens(self.manager, chunks, token_ids, planned)
        sampled = iter(token_ids)
        for chunk in chunks:
            if chunk.part is not None and not self.long_prompts.end_slice(chunk.part):
                continue
            if chunk.request.finish_reason is not None or chunk.request in going_on:
                _ = next(sampled) if chunk.samples else None
                continue
            chunk.request.num_computed_tokens += chunk.num_tokens
            if len(samples := chunk.sampled_requests) > 1:
                fork_samples(self.manager, chunk.request, self.running, self.waiting, self.limits.max_num_seqs)
            for request in samples:
                token_id = next(sampled)
                if self.remembered is not None and token_id is not None:
                    self.remembered.note(request, token_id)
                request.take_token(token_id)
            if chunk.is_all:
                chunk.request.finish_reason = "length"
            for request in samples or [chunk.request]:
                if request.finish_reason is not None:
                    self._remove(request)

    def abort(self, chunks: Items[ScheduledChunk]) -> None:
        """Undo a failed step. Nothing that it should have written stays cached. Its requests wait again, at the front.

        They keep all their tokens, and hit blocks that earlier steps wrote. Those without blocks, since they have ended
        or wait already, are left as they are. O(blocks of the step's sequences).
        """
        self.lookups.forget()
        for chunk in reversed([chunk for chunk in chunks if chunk.request.sequence.is_allocated]):
            self.long_prompts.drop(chunk.request)
            self.manager.abort(chunk.request.sequence, chunk.start)
            self.running.remove(chunk.request)
            self.waiting.appendleft(chunk.request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End an unfinished request, between two steps. Its cached blocks stay cached, and its siblings stay queued.

        Its blocks are freed at once. reason: becomes its finish_reason. A request that already has one is left alone.
        O(requests), and O(prompt) if the next sample takes its place.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.lookups.forget()
        if request.siblings and self.entrance.hand_over(request):
            return
        if request.siblings and request in self.waiting:
            self.waiting[self.waiting.index(request)] = request.hand_over()
            self.entrance.note_end(request)
            return
        if request.siblings and request in self.running:
            part = self.long_prompts.open
            is_open = part is not None and part.request is request
            hand_over(self.manager, request, self.running, self.waiting, is_open=is_open)
        self._remove(request)

    def expire(self, now: float) -> list[Request]:
        """Cancel the requests whose `deadline` has come by `now`, between two steps, and return them.

        Their finish_reason is "timeout". Nothing expires by itself, so call this before each step. O(1) before the next
        deadline, then O(requests).
        """
        if now < self.next_deadline:
            return []
        unfinished = [s for r in (*self.running, *self.waiting, *self.entrance.held) for s in (r, *r.siblings)]
        timed = [(request.deadline, request) for request in unfinished if request.deadline is not None]
        expired = [request for deadline, request in timed if deadline <= now]
        self.next_deadline = min([deadline for deadline, _ in timed if deadline > now], default=inf)
        for request in reversed(expired):  # a prompt's other samples before the first one, which computes it for them
            self.cancel(request, "timeout")
        return expired

    def _let_in(self) -> None:
        """Queue the requests that the gate lets in now."""
        for request in self.entrance.let_in(len(self.running) + len(self.waiting)):
            self._turns.place(request, self.waiting)

    def _advance(self, requests: Items[Request], chunks: list[ScheduledChunk]) -> None:
        """Add the next chunks of running requests, oldest first, to a step. Preempts the youngest ones for room."""
        budget, num_chunks = self._num_left_tokens(chunks), len(chunks)
        for request in requests:
            while budget and request.sequence.is_allocated:
                chunk = self._continue(request, budget, is_oldest=request is self.running[0])
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.num_tokens
                    break
                self._preempt_youngest()
        if len(chunks) > num_chunks:
            self.lookups.forget()

    def _add_others(self, chunks: list[ScheduledChunk]) -> None:
        """Add what comes before the next slice of a long prompt: running requests if it is time, and new ones."""
        num_running, beside = len(self.running), self.long_prompts.beside(self._computable(), self.limits)
        self._advance(beside, chunks)
        if len(self.running) == num_running:
            self._admit(chunks)
        if chunks:
            self.long_prompts.note_others(advanced=bool(beside))

    def _computable(self) -> list[Request]:
        """The running requests that don't load. O(running requests)."""
        return [request for request in self.running if not self._is_loading(request)]

    def _num_left_tokens(self, chunks: Items[ScheduledChunk]) -> int:
        """How many more tokens a step may compute. O(chunks)."""
        return self.limits.max_num_batched_tokens - sum([chunk.num_tokens for chunk in chunks])

    def _continue(self, request: Request, budget: int, *, is_oldest: bool) -> ScheduledChunk | None:
        """Allocate slots for a running request's next tokens: the rest of its prompt, or the token sampled last."""
        sequence = request.sequence
        start, most = sequence.num_computed_tokens, self.limits.chunk_tokens(budget)
        num_tokens = capacity.fitting_tokens(self.manager, request, min(most, request.num_left_tokens))
        if not make_room(self.manager, self.remembered, sequence, num_tokens):
            if is_oldest:
                capacity.check_oldest(self.manager, request, start + num_tokens, most)
            return None
        return chunk_of(self.manager, request, start)

    def _admit(self, chunks: list[ScheduledChunk]) -> Request | None:
        """Add the first chunks of waiting requests to the step. Return the request that was refused, or None.

        A refusal ends the admissions. Requests whose prefix another request is computing are passed over, and so are
        long prompts without a place.
        """
        if not self.waiting:
            return None
        budget = self._num_left_tokens(chunks)
        most, num_passed = self.limits.max_num_seqs, 0  # at most as many are passed over as could run
        num_seqs = sum(1 + len(request.siblings) for request in self.running)
        watermark = Watermark(self.manager, self.running, self.limits.watermark, self.limits.num_step_tokens)
        candidates = self.order.candidates(self.waiting, self.lookups)
        while budget and num_seqs < most and num_passed < most and self.waiting:
            request = next(candidates, None)
            if request is None:
                return None
            if request.is_sought:
                num_passed += 1
                continue
            may_wait = self.limits.wait_for_prefixes and request.max_hit_tokens is None
            is_pending = may_wait and self.lookups.find(request).pending_tokens
            if (is_pending or not self._has_place(request)) and not self.order.is_overdue(request):
                num_passed += 1
                continue
            chunk = self._start(request, watermark, budget)
            if chunk is None and not request.sequence.is_allocated:
                return request
            self._take_turn(request)
            watermark.note(request)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens
            num_seqs += 1 + len(request.siblings)
        return None

    def _take_turn(self, request: Request) -> None:
        """Move a waiting request, which has slots now, to the running ones. O(requests in front of it)."""
        index = self.waiting.index(request)
        for older in islice(self.waiting, index):
            older.num_overtakes += 1
        request.was_admitted = True
        del self.waiting[index]
        self.running.append(request)
        self._turns.note_admitted(request)
        self.order.note_admitted(request)

    def _has_place(self, request: Request) -> bool:
        """Whether a waiting request isn't long, or may run beside the long prompts that run. O(running requests)."""
        if self.long_prompts.has_place(request, self.running, self.limits):
            return True
        hit = self.lookups.find(request)
        num_loaded = sum([load.num_tokens for load in self._find_loads(request, hit)])
        return request.sequence.num_tokens - hit.num_tokens - num_loaded <= self.limits.num_step_tokens

    def _find_loads(self, request: Request, hit: CacheHit) -> list[TierHit]:
        """What is worth loading from tiers behind a hit, nearest tier first. O(tokens behind the hit)."""
        if self._tiers is None or request.max_hit_tokens is not None:
            return []
        return self._tiers.worth_loading(self._tiers.find(hit))

    def _start(self, request: Request, watermark: Watermark, budget: int) -> ScheduledChunk | None:
        """Allocate slots for a waiting request's first tokens that aren't cached, if the watermark admits the request.

        If some tokens are to be loaded, only these get slots, and the result is None: there is no chunk until they have
        arrived. A refused request gives None, too.
        """
        hit = self.lookups.find(request)
        while not watermark.admits(request, hit):
            if self.remembered is None or not self.remembered.give_up():
                return None
        chunk = self._start_remembered(request, hit, budget)
        if chunk is not None:
            return chunk
        loads = self._find_loads(request, hit)
        num_left = request.sequence.num_tokens - hit.num_tokens
        num_tokens = capacity.fitting_tokens(
            self.manager, request, min(self.limits.chunk_tokens(budget), num_left), hit
        )
        try:
            num_new = 0 if loads else num_tokens
            if not make_room(self.manager, self.remembered, request.sequence, num_new, hit, loads):
                return None
        except StaleHitError:  # a reset or a quota has evicted blocks of the hit since
            self.lookups.forget()
            return self._start(request, watermark, budget)
        self.lookups.forget()
        request.is_long = request.num_left_tokens + num_new > self.limits.num_step_tokens
        if not request.num_computed_tokens:
            request.num_loaded_tokens = {load.tier: load.num_tokens for load in loads}
            request.num_cached_tokens = hit.num_tokens + sum(request.num_loaded_tokens.values())
        return None if loads else chunk_of(self.manager, request, hit.num_tokens)

    def _start_remembered(self, request: Request, hit: CacheHit, budget: int) -> ScheduledChunk | None:
        """Continue a waiting request from its remembered prompt, if that has more tokens than its hit; else None."""
        child = None if self.remembered is None else self.remembered.fork(request, hit.num_tokens)
        if child is None:
            return None
        start = child.num_computed_tokens
        num_tokens = capacity.fitting_tokens(
            self.manager, request, min(self.limits.chunk_tokens(budget), child.num_tokens - start)
        )
        if not make_room(self.manager, self.remembered, child, num_tokens):
            self.manager.free(child)
            return None
        self.lookups.forget()
        request.sequence, request.is_long = child, child.num_tokens - start > self.limits.num_step_tokens
        if not request.num_computed_tokens:
            request.num_cached_tokens = start
        return chunk_of(self.manager, request, start)

    def _is_loading(self, request: Request) -> bool:
        return self._tiers is not None and self._tiers.is_loading(request.sequence)

    def _remove(self, request: Request) -> None:
        """Remove a request from the queue or the running ones, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.long_prompts.free(request)
            self.pause_session(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.was_admitted or request.num_output_tokens:  # preempted, or answered by `remembered`
                request.was_admitted = True
                self.pause_session(request)
        else:
            for other in (*self.running, *self.waiting, *self.entrance.held):
                if request in other.siblings:
                    other.siblings.remove(request)
        self.entrance.note_end(request)

    def pause_session(self, request: Request) -> None:
        """Tell the manager that a session's request has ended."""
        sequence, reason = request.sequence, None if request.sequence.session is None else request.pause_reason
        if reason is not None:
            self.manager.sessions.pause(sequence.session, reason, sequence.salt)

    def _preempt_youngest(self) -> None:
        """Free the youngest request's blocks. It is computed again later, except what is still cached then."""
        victim = self.running.pop()
        self.lookups.forget()
        self.long_prompts.free(victim)
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
