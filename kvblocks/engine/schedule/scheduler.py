"""Decides what each step computes: continuous batching with chunked prefill over one block manager.

Sans-IO: no tensors, no clock, no model. `schedule` says what to compute. The caller computes it, and then calls
`complete` with the sampled tokens, or `abort` if the step died. One step at a time.

Invariants:
- A sequence that is scheduled in a step keeps its blocks until the step has ended. The manager caches a block as soon
  as it is allocated full, so other requests may already have hit blocks that this step will write. Hence the order of
  `schedule`: running requests first, the oldest first. The request to preempt is always the youngest, which the step
  hasn't reached.
- Waiting requests come last, and only into a step that preempted nobody. Otherwise a preempted request would get its
  blocks back at once, and lose them again in the next step.
- The oldest running request advances in every step. Alone it fits, or `add` would have refused it. Pins may have grown
  since; if they leave too little for it, the step raises, before it has changed anything.
- Waiting requests are admitted in the order of `order`, preempted ones first. If a running request computes, in chunks,
  a prefix that a waiting request begins with, the waiting request waits for that, and others may be admitted before it.
  These don't begin with the same prefix, so they don't prolong the wait. Only running requests are waited for, so
  requests never wait for each other. When the pool or the watermark refuses a request, nobody behind it is admitted in
  that step.
- A request whose prefix comes from a tier (`manager.tiers`) has blocks and counts as running, but is in no step until
  its loads have ended (`note_loaded`). It may be preempted as any other. A block under a transfer is free only after
  the transfer. So a step may be empty while transfers are under way; that is no error.
- Samples of one prompt are forked between two steps, after the prompt's last chunk was computed. So all blocks that
  they share are written. Until then no later request is admitted in their stead. Samples without room wait, in front.
- Blocks that `remembered` keeps take nothing from requests: all of them are given up before a request is refused a
  block. They were written by a step that is complete.

The order of work, and recomputing as the only kind of preemption, are those of vLLM v1's scheduler.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from itertools import islice
from math import inf

from kvblocks.core.hit import CacheHit
from kvblocks.engine.schedule.capacity import check_fits, check_oldest, count_blocks, max_request_tokens, stalled
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import FirstCome, Order
from kvblocks.engine.schedule.remembered import RememberedPrompts, make_room
from kvblocks.engine.schedule.request import FinishReason, Request
from kvblocks.engine.schedule.step import ScheduledChunk, StepLimits
from kvblocks.engine.schedule.watermark import Watermark
from kvblocks.errors import CorruptStateError, InvalidArgumentError, StaleHitError
from kvblocks.manager import KVCacheManager
from kvblocks.tiers.transfer import Loaded


class Scheduler:
    """Schedules requests on `manager`, whose sequences are all its own.

    max_model_len: tokens that the model can have in context. limits: may be replaced between steps. order: None is
    first come, first served. remembered: prompts whose first tokens are known, of the same manager; None: none.
    waiting, running: unfinished requests, oldest first; until a prompt is computed, its further samples are among the
    `siblings` of its first one. Only read these lists. lookups: of the waiting requests.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_model_len: int,
        limits: StepLimits | None = None,
        *,
        order: Order | None = None,
        remembered: RememberedPrompts | None = None,
    ) -> None:
        self.manager = manager
        self.remembered = remembered
        self.max_model_len = max_model_len
        self.limits = limits or StepLimits()
        self.order: Order = order or FirstCome()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.lookups = Lookups(manager)
        self._groups = manager.groups
        self._tiers = manager.tiers if len(manager.tiers) else None
        self._next_deadline = inf  # at or before the earliest deadline of all requests

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. O(1)."""
        return bool(self.waiting or self.running)

    @property
    def _num_step_tokens(self) -> int:
        """The most tokens that a step computes of one request."""
        return self.limits.chunk_tokens(self.limits.max_num_batched_tokens)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and generated, of a request that shares nothing with blocks that pins keep.

        O(groups * log(tokens)), and O(tokens pinned) with pins.
        """
        return max_request_tokens(self.manager, self.max_model_len, self._num_step_tokens)

    def check_fits(self, request: Request) -> None:
        """Raise if the request could not finish, even alone. Changes nothing.

        InvalidArgumentError: it never could; PoolExhaustedError: not until a pin ends. The number of its samples
        doesn't matter, since they can run one after another. O(1), and O(tokens pinned + prompt) with pins.
        """
        check_fits(self.manager, request, self.max_model_len, self._num_step_tokens)

    def add(self, request: Request) -> None:
        """Queue a request with its siblings. Raises and costs as `check_fits`. Changes nothing if it raises."""
        self.check_fits(request)
        self.add_checked(request)

    def add_checked(self, request: Request) -> None:
        """Queue a request that passed `check_fits`, with its siblings. O(samples)."""
        deadlines = [sample.deadline for sample in (request, *request.siblings) if sample.deadline is not None]
        self._next_deadline = min([self._next_deadline, *deadlines])
        self.waiting.append(request)

    def answer(self) -> Iterator[tuple[Request, int]]:
        """Give waiting requests their remembered first tokens, between two steps. Yields each request with its token.

        Nothing is computed, and no block is taken. A request that this finishes leaves the queue; any other still waits
        for its turn. A request gets its token when the iterator reaches it. O(waiting requests + remembered prompts),
        and O(prompt) an answer.
        """
        remembered = self.remembered
        if remembered is None:
            return
        remembered.drop_stale()
        for request in tuple(self.waiting) if len(remembered) else ():
            token_id = remembered.take_token(request)
            if token_id is None:
                continue
            if not request.num_computed_tokens:
                request.num_cached_tokens = request.sequence.num_prompt_tokens
            self.lookups.forget()
            _take_token(request, token_id)
            if request.finish_reason is not None:
                self._remove(request)
            yield request, token_id

    def schedule(self) -> list[ScheduledChunk]:
        """Return what the next step computes, with slots allocated. It is empty only if there is no work, or if all
        work waits for transfers or for a store's answer (`Request.is_sought`).

        Preempts the youngest requests if the pool has too few blocks. Raises StalledError, a PoolExhaustedError, and
        changes nothing, if pins keep so many blocks that not even its `request`, the oldest or the next in line, can
        go on. Then unpin something or cancel that request, and call again. O(running requests + new blocks + tokens of
        waiting requests that are looked up). Those are the admitted ones, at most max_num_seqs that wait for a prefix,
        one refused, and those that `order` looks up.
        """
        chunks: list[ScheduledChunk] = []
        budget = self.limits.max_num_batched_tokens
        num_running, index = len(self.running), 0
        while index < len(self.running) and budget:
            request = self.running[index]
            if self._is_loading(request):
                index += 1
                continue
            chunk = self._continue(request, budget, is_oldest=not index)
            if chunk is None:
                self._preempt_youngest()
            else:
                chunks.append(chunk)
                budget -= chunk.num_tokens
                index += 1
        if chunks:
            self.lookups.forget()
        if len(self.running) == num_running or not chunks:  # without chunks, the oldest request itself starts again
            refused = self._admit(chunks, budget)
            if refused is not None and not chunks and not self.is_moving:
                raise stalled(self.manager, refused)
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
        """Note the result of a request's loads. The request continues with the next step. O(running requests)."""
        self.lookups.forget()
        for request in self.running:
            if request.sequence is loaded.sequence and not request.num_computed_tokens:
                num_left = loaded.num_tokens - (request.num_cached_tokens - sum(request.num_loaded_tokens.values()))
                for tier, num_tokens in request.num_loaded_tokens.items():  # nearest first
                    request.num_loaded_tokens[tier] = num_here = max(0, min(num_tokens, num_left))
                    request.num_cached_tokens -= num_tokens - num_here
                    num_left -= num_tokens
                request.num_cached_tokens = min(request.num_cached_tokens, loaded.num_tokens)  # the hit may be lost too

    def note_step(self, chunks: Items[ScheduledChunk], seconds: float) -> None:
        """Note how long a step took. The tiers decide by this whether loading is faster than computing. O(chunks)."""
        if self._tiers is not None:
            num_tokens = sum([chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1])
            if num_tokens >= self.manager.block_size:
                self._tiers.note_computed(num_tokens, seconds)

    def complete(self, chunks: Items[ScheduledChunk], token_ids: Items[int | None]) -> None:
        """Record a step that was computed. Finished requests free their blocks, which stay cached.

        token_ids: one sampled token for each of `chunk.sampled_requests`, chunk by chunk, in order. None, for no token,
        ends the request with finish_reason "error". Raises InvalidArgumentError, and changes nothing, for more or fewer
        tokens. O(requests of the step), and O(prompt) for each sample that is forked.
        """
        num_sampled = sum(len(chunk.sampled_requests) for chunk in chunks)
        if len(token_ids) != num_sampled:
            raise InvalidArgumentError(f"complete: expected {num_sampled} sampled tokens, got {len(token_ids)}")
        self.lookups.forget()
        sampled = iter(token_ids)
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
            samples = chunk.sampled_requests
            if len(samples) > 1:
                self._fork(chunk.request)
            for request in samples:
                token_id = next(sampled)
                if self.remembered is not None and token_id is not None:
                    self.remembered.note(request, token_id)
                _take_token(request, token_id)
            if chunk.is_all:
                chunk.request.finish_reason = "length"
            for request in samples or [chunk.request]:
                if request.finish_reason is not None:
                    self._remove(request)

    def abort(self, chunks: Items[ScheduledChunk]) -> None:
        """Undo a step that died. Nothing that it should have written stays cached. Its requests wait again, in front.

        They keep all their tokens, and hit blocks that earlier steps wrote. O(blocks of the step's sequences).
        """
        self.lookups.forget()
        for chunk in reversed(chunks):
            self.manager.abort(chunk.request.sequence, chunk.start)
            self.running.remove(chunk.request)
            self.waiting.appendleft(chunk.request)

    def written_tokens(self) -> dict[Request, int]:
        """Return how many tokens of each running request are written, or being loaded, between two steps.

        For `undo`. O(running requests).
        """
        return {request: request.sequence.num_computed_tokens for request in self.running}

    def undo(self, written: Mapping[Request, int]) -> None:
        """Undo a step that was interrupted at any point, even in scheduling. All requests wait again, in front.

        written: what `written_tokens` returned before the step; nothing beyond that stays cached. A manager that was
        interrupted within a call refuses all further calls, so nothing of its cache is hit any more. O(blocks held).
        """
        self.lookups.forget()
        held = [request for request in (*self.running, *self.waiting) if request.sequence.is_allocated]
        for request in self.waiting:  # a fork of a remembered prompt that the request had not got yet
            with suppress(CorruptStateError):
                twin = self.manager.sequence(request.sequence.sequence_id)
                if twin is not None and twin is not request.sequence:
                    self.manager.abort(twin, 0)
        if self.remembered is not None:
            with suppress(CorruptStateError):
                self.remembered.recover()
        for request in reversed(held):
            with suppress(CorruptStateError):
                self.manager.abort(request.sequence, written.get(request, 0))
            if request in self.running:
                self.running.remove(request)
                self.waiting.appendleft(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End an unfinished request, between two steps. Its cached blocks stay cached, and its siblings stay queued.

        Its blocks are free at once. reason: its finish_reason from now on. A request that has a finish_reason already
        is left as it is. O(requests), and O(prompt) if the next sample takes its place.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.lookups.forget()
        if request.siblings and request in self.waiting:
            self.waiting[self.waiting.index(request)] = _hand_over(request)
            return
        if request.siblings and request in self.running:
            heir = _hand_over(request)
            heir.sequence = self.manager.fork(request.sequence, heir.sequence.sequence_id)
            self.running.insert(self.running.index(request), heir)
        self._remove(request)

    def expire(self, now: float) -> list[Request]:
        """Cancel the requests whose `deadline` is not after `now`, between two steps, and return them.

        Their finish_reason is "timeout". Nothing expires by itself: call it before each step. O(1) before the next
        deadline, then O(requests).
        """
        if now < self._next_deadline:
            return []
        unfinished = [sample for r in (*self.running, *self.waiting) for sample in (r, *r.siblings)]
        timed = [(request.deadline, request) for request in unfinished if request.deadline is not None]
        expired = [request for deadline, request in timed if deadline <= now]
        self._next_deadline = min([deadline for deadline, _ in timed if deadline > now], default=inf)
        for request in reversed(expired):  # a prompt's other samples before the first one, which computes it for them
            self.cancel(request, "timeout")
        return expired

    def _continue(self, request: Request, budget: int, *, is_oldest: bool) -> ScheduledChunk | None:
        """Allocate slots for a running request's next tokens: the rest of its prompt, or the token sampled last."""
        sequence = request.sequence
        start, most = sequence.num_computed_tokens, self.limits.chunk_tokens(budget)
        num_tokens = self._fitting_tokens(request, min(most, sequence.num_tokens - start))
        if not make_room(self.manager, self.remembered, sequence, num_tokens):
            if is_oldest:
                check_oldest(self.manager, request, start + num_tokens, most)
            return None
        return self._chunk(request, start)

    def _admit(self, chunks: list[ScheduledChunk], budget: int) -> Request | None:
        """Add the first chunks of waiting requests to the step. Return the request that was refused, or None.

        A refusal ends the admissions. Requests whose prefix another request is computing are passed over.
        """
        if not self.waiting:
            return None
        most, num_passed = self.limits.max_num_seqs, 0  # at most as many are passed over as could run
        num_seqs = sum(1 + len(request.siblings) for request in self.running)
        watermark = Watermark(self.manager, self.running, self.limits.watermark, self._num_step_tokens)
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
            if is_pending and not self.order.is_overdue(request):
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
        self.order.note_admitted(request)

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
        tiers = self._tiers if request.max_hit_tokens is None else None
        loads = [] if tiers is None else tiers.worth_loading(tiers.find(hit))
        num_left = request.sequence.num_tokens - hit.num_tokens
        num_tokens = self._fitting_tokens(request, min(self.limits.chunk_tokens(budget), num_left))
        try:
            num_new = 0 if loads else num_tokens
            if not make_room(self.manager, self.remembered, request.sequence, num_new, hit, loads):
                return None
        except StaleHitError:  # a reset or a quota has evicted blocks of the hit since
            self.lookups.forget()
            return self._start(request, watermark, budget)
        self.lookups.forget()
        if not request.num_computed_tokens:
            request.num_loaded_tokens = {load.tier: load.num_tokens for load in loads}
            request.num_cached_tokens = hit.num_tokens + sum(request.num_loaded_tokens.values())
        return None if loads else self._chunk(request, hit.num_tokens)

    def _start_remembered(self, request: Request, hit: CacheHit, budget: int) -> ScheduledChunk | None:
        """Continue a waiting request from its remembered prompt, if that has more tokens than its hit; else None."""
        twin = None if self.remembered is None else self.remembered.fork(request, hit.num_tokens)
        if twin is None:
            return None
        start = twin.num_computed_tokens
        num_tokens = self._fitting_tokens(request, min(self.limits.chunk_tokens(budget), twin.num_tokens - start))
        if not make_room(self.manager, self.remembered, twin, num_tokens):
            self.manager.free(twin)
            return None
        self.lookups.forget()
        request.sequence = twin
        if not request.num_computed_tokens:
            request.num_cached_tokens = start
        return self._chunk(request, start)

    def _is_loading(self, request: Request) -> bool:
        return self._tiers is not None and self._tiers.is_loading(request.sequence)

    def _fitting_tokens(self, request: Request, num_tokens: int) -> int:
        """`num_tokens`, or fewer if a step of so many tokens would need more blocks than the pool has.

        That happens if the limits were replaced after the request was checked for smaller steps. O(groups), mostly.
        """
        num_known = request.sequence.num_tokens
        while num_tokens > 1 and count_blocks(self._groups, num_known, num_tokens) > self.manager.num_blocks:
            num_tokens //= 2
        return num_tokens

    def _chunk(self, request: Request, start: int) -> ScheduledChunk:
        """The chunk from `start` to where the request has just been given slots."""
        end = request.sequence.num_computed_tokens
        copies = tuple(self.manager.take_copies())
        samples = end == request.sequence.num_tokens and request.max_tokens > 0
        return ScheduledChunk(request, start, end - start, samples, copies)

    def _fork(self, request: Request) -> None:
        """Make the samples of a computed prompt requests of their own. Those beyond the limits wait, in front."""
        siblings, request.siblings = request.siblings, []
        num_forks = max(0, self.limits.max_num_seqs - len(self.running))
        forks, others = siblings[:num_forks], siblings[num_forks:]
        for sample in siblings:
            sample.num_cached_tokens, sample.was_admitted = request.sequence.num_prompt_tokens, True
        for sample in forks:
            sample.sequence = self.manager.fork(request.sequence, sample.sequence.sequence_id)
        index = self.running.index(request) + 1
        self.running[index:index] = forks
        self.waiting.extendleft(reversed(others))

    def _remove(self, request: Request) -> None:
        """Remove a request from the queue or the running ones, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request.sequence)
            self._pause_session(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.was_admitted or request.num_output_tokens:  # preempted, or answered by `remembered`
                request.was_admitted = True
                self._pause_session(request)
        else:
            for other in (*self.running, *self.waiting):
                if request in other.siblings:
                    other.siblings.remove(request)

    def _pause_session(self, request: Request) -> None:
        """Tell the manager that a session's request has ended."""
        sequence, reason = request.sequence, request.finish_reason
        if sequence.session is not None and reason is not None:
            self.manager.sessions.pause(sequence.session, reason, sequence.salt)

    def _preempt_youngest(self) -> None:
        """Free the youngest request's blocks. It is computed again later, except what is still cached then."""
        victim = self.running.pop()
        self.lookups.forget()
        self.manager.free(victim.sequence)
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)


def _take_token(request: Request, token_id: int | None) -> None:
    """Add a sampled token, which may finish the request. None, for no token, ends it with an error."""
    if token_id is None:
        request.finish_reason = "error"
        return
    request.sequence.append_tokens([token_id])
    if token_id in request.stop_token_ids:
        request.finish_reason = "stop"
    elif request.num_output_tokens == request.max_tokens:
        request.finish_reason = "length"


def _hand_over(request: Request) -> Request:
    """Make the next sample the one that is scheduled for all, and return it.

    The prompt's costs so far count for that sample now. O(samples).
    """
    heir, *others = request.siblings
    request.siblings, heir.siblings = [], others
    heir.num_cached_tokens, heir.num_computed_tokens = request.num_cached_tokens, request.num_computed_tokens
    heir.num_loaded_tokens = dict(request.num_loaded_tokens)
    heir.num_preemptions, heir.num_overtakes = request.num_preemptions, request.num_overtakes
    heir.was_admitted, heir.max_hit_tokens = request.was_admitted, request.max_hit_tokens
    return heir
