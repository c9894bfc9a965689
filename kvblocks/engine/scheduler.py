"""Decides what each step computes: continuous batching with chunked prefill over one block manager.

Sans-IO: no tensors, no clock, no model. `schedule` says what to compute, the caller computes it, and then calls
`complete` with the sampled tokens, or `abort` if the step died. One step at a time.

Invariants:
- A sequence that is scheduled in a step keeps its blocks until the step has ended. The manager caches a block as soon
  as it is allocated full, so others may already have hit what this step has yet to write. Hence the order of
  `schedule`: running requests first, oldest first; a victim is always the youngest, which the step hasn't reached.
- Waiting requests come last, and only into a step that took blocks from nobody; otherwise a victim would get its
  blocks back at once, and lose them again in the next step.
- The oldest running request is never preempted: alone it fits, or `add` would have refused it. So there is progress
  in every step.
- Waiting requests are admitted in order of arrival; preempted ones wait in front.

The order of work, and recomputing as the only kind of preemption, are those of vLLM v1's scheduler.
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvblocks.arguments import check_count
from kvblocks.engine.request import Request
from kvblocks.errors import InvalidArgumentError
from kvblocks.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much one step computes at most: tokens of all sequences together, and sequences. Raises InvalidArgumentError.

    Every running sequence needs room for one token, so there are at least as many tokens as sequences.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        check_count("max_num_seqs", self.max_num_seqs, 1)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` tokens of a request, from position `start`. `samples`: the last one's logits are wanted."""

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute. O(num_tokens)."""
        return self.request.sequence.token_ids(self.start, self.start + self.num_tokens)


class Scheduler:
    """Schedules requests on `manager`, whose sequences are all its own.

    max_model_len: tokens that the model can have in context. limits: may be replaced between steps.
    waiting, running: unfinished requests, oldest first. Read them, but let the scheduler change them.
    """

    def __init__(self, manager: KVCacheManager, max_model_len: int, limits: StepLimits | None = None) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.limits = limits or StepLimits()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. O(1)."""
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Raise InvalidArgumentError if the request could never finish, even alone. Changes nothing. O(1)."""
        num_prompt_tokens = request.sequence.num_prompt_tokens
        num_tokens = num_prompt_tokens + request.max_tokens
        asked = f"{num_tokens} (a prompt of {num_prompt_tokens} and max_tokens {request.max_tokens})"
        if num_tokens > self.max_model_len:
            raise InvalidArgumentError(
                f"expected at most {self.max_model_len} tokens, the model's context, got {asked}"
            )
        num_slots = self.manager.num_blocks * self.manager.block_size
        if num_tokens - 1 > num_slots:  # the last token generated needs no slot
            raise InvalidArgumentError(
                f"expected at most {num_slots + 1} tokens, what the pool's {self.manager.num_blocks} blocks of"
                f" {self.manager.block_size} can serve, got {asked}"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidArgumentError, changing nothing, if it could never finish. O(1)."""
        self.check_fits(request)
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """Return what the next step computes, with slots for all of it; empty only if there is no work.

        Allocates, and preempts the youngest requests when the pool runs dry. O(requests of the step + new blocks).
        """
        chunks: list[ScheduledChunk] = []
        budget = self.limits.max_num_batched_tokens
        num_running = len(self.running)
        while len(chunks) < len(self.running) and budget:
            chunk = self._continue(self.running[len(chunks)], budget)
            if chunk is None:
                self._preempt_youngest()
            else:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        if len(self.running) < num_running:
            return chunks
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            chunk = self._start(self.waiting[0], budget)
            if chunk is None:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def complete(self, chunks: Items[ScheduledChunk], token_ids: Items[int]) -> None:
        """Record a step that was computed. Requests that are finished give their blocks back, cached as they are.

        token_ids: one sampled token for each of `chunks` that samples, in their order. O(requests of the step).
        """
        sampled = iter(token_ids)
        for chunk in chunks:
            request = chunk.request
            request.num_computed_tokens += chunk.num_tokens
            if not chunk.samples:
                continue
            token_id = next(sampled)
            request.sequence.append_tokens([token_id])
            if token_id in request.stop_token_ids:
                request.finish_reason = "stop"
            elif request.num_output_tokens == request.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                self.running.remove(request)
                self.manager.free(request.sequence)

    def abort(self, chunks: Items[ScheduledChunk]) -> None:
        """Undo a step that died: nothing that it should have written stays cached; its requests wait again, in front.

        They keep all their tokens, and hit what earlier steps wrote. O(blocks of the step's sequences).
        """
        for chunk in reversed(chunks):
            self.manager.abort(chunk.request.sequence, chunk.start)
            self.running.remove(chunk.request)
            self.waiting.appendleft(chunk.request)

    def cancel(self, request: Request) -> None:
        """Drop an unfinished request, between two steps; what is cached of it stays. O(requests)."""
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request.sequence)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _continue(self, request: Request, budget: int) -> ScheduledChunk | None:
        """Make room for a running request's next tokens: the rest of its prompt, or the token sampled last."""
        sequence = request.sequence
        start = sequence.num_computed_tokens
        num_tokens = min(budget, sequence.num_tokens - start)
        if self.manager.allocate_slots(sequence, num_tokens) is None:
            return None
        return ScheduledChunk(request, start, num_tokens, start + num_tokens == sequence.num_tokens)

    def _start(self, request: Request, budget: int) -> ScheduledChunk | None:
        """Look a waiting request up in the cache, and make room for the first tokens that aren't there."""
        sequence = request.sequence
        hit = self.manager.get_computed_blocks(sequence)
        num_tokens = min(budget, sequence.num_tokens - hit.num_tokens)
        if self.manager.allocate_slots(sequence, num_tokens, hit=hit) is None:
            return None
        if not request.num_computed_tokens:
            request.num_cached_tokens = hit.num_tokens
        return ScheduledChunk(request, hit.num_tokens, num_tokens, hit.num_tokens + num_tokens == sequence.num_tokens)

    def _preempt_youngest(self) -> None:
        """Take the youngest request's blocks, to be recomputed later; what stays cached of them it will hit again."""
        victim = self.running.pop()
        self.manager.free(victim.sequence)
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
