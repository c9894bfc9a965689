"""Runs steps of all unfinished generations (schedule, run the model, sample, record), and handles failures.

There are two kinds of callers. For a caller that streams, the step is undone and raises the failure; its requests wait
again, and the next step goes on. A caller that submits prompts, as a server does, finds the failure in the generation
(finish_reason "error", and the exception). A failing step only fails its own generations, or only one of them if that
is known to be the cause.

Where steps overlap, the device computes a step while the host schedules and launches the next one (`PendingStep`).

A call may also be interrupted at any point. So each call marks its beginning and its end, as the manager's changes do,
and what was left half done is repaired at once, or else by the next call. The repair trusts only what an interrupt
can't leave half changed: the generations, each request's tokens, and what was written before the call.

In all cases nothing unwritten stays cached. If a request's logits are NaN, KV that it wrote or read is broken, and it
is unknown since when. So the whole cache is reset, which only costs time.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import GEN_CLOSED, getgeneratorstate
from traceback import clear_frames
from weakref import ref

from torch import Tensor

from kvblocks import StateCopy
from kvblocks.engine.completion import Piece
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.generation import Generation
from kvblocks.engine.pending_step import PendingStep
from kvblocks.engine.run.runner import ModelRunner
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.drawn import Drawn, Outcome
from kvblocks.engine.sampling.prompt_scores import ScoredRows, Scorer
from kvblocks.engine.sampling.random_numbers import uniforms
from kvblocks.engine.schedule.ahead import may_plan
from kvblocks.engine.schedule.capacity import StalledError, keeps_states
from kvblocks.engine.schedule.request import FinishReason, Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.engine.undoing import Written, undo, written_tokens
from kvblocks.errors import CorruptStateError

Outcomes = list[tuple[Generation, Outcome]]
Stream = Generator[Piece]


class Stepper:
    """Runs the steps of one scheduler. It holds a generation exactly as long as its request is unfinished.

    overlaps: whether a step may be launched before the tokens of the previous one are read (see `step`); assign it at
    any time. Attributes: num_steps, the steps that went through the model; waited_s, the seconds that steps waited for
    tokens.
    """

    def __init__(self, scheduler: Scheduler, sampler: BatchSampler, *, overlaps: bool = False) -> None:
        self.scheduler = scheduler
        self.sampler = sampler
        self.num_steps = 0
        self.waited_s = 0.0
        self.overlaps = overlaps
        self._pending: PendingStep | None = None  # launched, but not read
        self._generations: dict[Request, Generation] = {}
        self._streams: list[tuple[ref[Stream], Sequence[Generation]]] = []  # with their generations
        self._told: dict[Generation, None] = {}  # those that got a piece or ended since the last `take_told`
        self._only_answered = False  # in the last step
        # For a call that is interrupted, so that the next one can repair what it has left.
        self._is_whole = True  # False during a call
        self._adding: Sequence[Generation] = ()  # what `add` is adding
        self._written: Written = {}  # before the call
        self._results: Outcomes = []  # the last outcomes

    @property
    def is_settled(self) -> bool:
        """Whether an interrupt has left nothing to repair for the next step, and nothing to tell. O(1)."""
        return self._is_whole and not self._told

    def add(self, generations: Sequence[Generation], *, timeout_s: float | None = None) -> None:
        """Queue generations that `Intake` made. The samples of a prompt must be adjacent, the first one first.

        timeout_s: seconds from now. If the call is interrupted, none of them is queued. O(generations + running
        requests).
        """
        now_s = time.perf_counter()
        for generation in generations:
            generation.start_s = now_s
            generation.request.deadline = None if timeout_s is None else now_s + timeout_s
        with self._change():
            self._adding = generations
            for generation in generations:
                self._generations[generation.request] = generation
            for generation in generations:
                if generation.sample_index == 0:
                    self.scheduler.add_checked(generation.request)

    def cancel(self, generation: Generation) -> None:
        """End a generation and free its blocks at once. Does nothing if it has ended. O(requests)."""
        with self._change():
            self._drop(generation)

    def watch(self, stream: Stream, generations: Sequence[Generation]) -> None:
        """Drop these generations when the stream that adds them has ended: by `end`, or else in the next step. O(1)."""
        self._streams.append((ref(stream), generations))

    def end(self, generations: Sequence[Generation]) -> None:
        """Cancel all generations of a stream. O(requests) for each unfinished one.

        The garbage collector may end a stream in the middle of another call. The next step then cancels them.
        """
        if self._is_whole:
            with self._change():
                self._end(generations)

    def recover(self) -> None:
        """Repair what an interrupted call has left. O(1) if that is nothing; else as `undo`."""
        if not self._is_whole:
            self._repair()

    def step(self, runner: ModelRunner) -> None:
        """Compute one step with `runner`. `take_told` then returns the generations that got a piece or ended.

        If steps overlap, a step that another can follow is only launched. The next call launches the step after it, and
        then reads its tokens.

        Remembered tokens are given before anything is computed. A step that gives some computes nothing, unless the
        previous step already computed nothing for this reason.

        Raises the failure of a generation that wasn't submitted, after undoing the step. A step that was launched
        earlier is read first if possible, and otherwise undone, too. An interrupt may come at any point; the requests
        then wait again, and lose nothing.
        """
        with self._change():
            try:
                self._step(runner)
            except Exception:
                self._is_whole = True  # it has undone what has failed
                raise

    def take_told(self) -> list[Generation]:
        """Return the generations that got a piece or ended since the last call, expired ones included. O(these)."""
        told, self._told = list(self._told), {}
        return told

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Mark a change, so that one that is left half done is repaired: now, or if that is interrupted, too, later."""
        self.recover()
        self._adding = ()
        self._written = written_tokens(self.scheduler) | ({} if self._pending is None else self._pending.starts)
        self._is_whole = False
        try:
            yield
        except BaseException:
            if not self._is_whole:
                self._repair()
            raise
        self._is_whole = True
        self._adding = ()

    def _repair(self) -> None:
        """Bring all in order after a call that ended at any point. May itself be interrupted, and repeated.

        Requests wait again. Tokens that they have got, and that nobody was told of, become pieces.
        """
        for generation in self._adding:
            generation.request.finish_reason = "cancelled"
        self._pending = None
        undo(self.scheduler, self._written, self._generations)
        outcomes = dict(self._results)
        for generation in list(self._generations.values()):
            self._settle(generation, outcomes.get(generation))
        self._is_whole = True
        self._adding, self._results = (), []

    def _settle(self, generation: Generation, outcome: Outcome | None) -> None:
        """Bring a generation in line with its request, which waits now. outcome: of the last step that was read."""
        try:
            generation.recover()
        except Exception as error:  # noqa: BLE001  # as in `_record`
            generation.error = error
        request, now_s = generation.request, time.perf_counter()
        if generation.error is None and request.num_output_tokens > generation.num_told:
            drawn = outcome if isinstance(outcome, Drawn) else Drawn(request.output_token_ids[-1])
            self._record(generation, drawn, now_s)
            return
        if request.finish_reason == "error" and isinstance(outcome, Exception):
            generation.error = generation.error or outcome
        if generation.finish_reason is not None:
            self._note_end(generation, now_s)

    def _step(self, runner: ModelRunner) -> None:
        """As `step`."""
        if self._pending is not None:
            self._pending.ended_unseen = self._pending.draws.is_done
        for generations in [generations for stream, generations in self._streams if _has_ended(stream())]:
            self._end(generations)
        now_s = time.perf_counter()
        for request in self.scheduler.expire(now_s):
            self._note_end(self._generations[request], now_s)
        answered = self._answer()
        self._only_answered = answered and not self._only_answered
        if self._only_answered:
            return
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_wanted:
            pending = None
        try:
            chunks, after = self._schedule(pending, runner)
        except StalledError as error:
            self._pending = pending  # nothing has changed
            self._fail([error.request], error)
            return
        except Exception:
            self._repair()
            raise
        self._run(pending, chunks, runner, after)

    def _schedule(
        self, pending: PendingStep | None, runner: ModelRunner
    ) -> tuple[list[ScheduledChunk], Sequence[StateCopy]]:
        """Schedule the next step. Return its chunks, and the copies of states to make when it is computed.

        It is empty if the tokens of the pending step have to be read first.
        """
        if pending is not None:
            follows = self.overlaps and pending.may_be_followed
            return self.scheduler.schedule_ahead(pending.chunks) if follows else [], ()
        chunks = self.scheduler.schedule()
        return chunks, self._bring_states(runner) if chunks else ()

    def _run(
        self,
        pending: PendingStep | None,
        chunks: list[ScheduledChunk],
        runner: ModelRunner,
        after: Sequence[StateCopy],
    ) -> None:
        """Launch a scheduled step. Read the one before it, which is pending, or else itself if nothing may overlap."""
        if not chunks:
            if pending is not None:
                self._finish(pending)
            return
        try:
            step = self._launch(chunks, runner, after, None if pending is None else pending.draws.tokens)
        except Exception as error:  # noqa: BLE001  # `_undo` raises it, or gives it to its generations
            try:
                if pending is not None:
                    self._finish(pending, chunks, is_launched=False)
            except Exception:
                self.scheduler.abort(chunks)
                raise
            self._undo(chunks, error)
            return
        if pending is not None:
            self._pending = step  # first, since the next line may undo it
            self._finish(pending, chunks)
            step.start_s = time.perf_counter()
        elif self.overlaps and step.may_be_followed and may_plan(self.scheduler.manager, self.scheduler.remembered):
            self._pending = step
        else:
            self._finish(step)

    def _answer(self) -> bool:
        """Give waiting generations their remembered first tokens. Returns whether there were any."""
        answered = False
        for request, token_id in self.scheduler.answer():
            self._record(self._generations[request], Drawn(token_id), time.perf_counter())
            answered = True
        return answered

    def _bring_states(self, runner: ModelRunner) -> list[StateCopy]:
        """Bring the states of a scheduled step into their slots. Return the copies to make when it is computed."""
        manager = self.scheduler.manager
        if not keeps_states(manager):
            return []
        before, after = manager.states.take_copies()
        runner.copy_states(before)
        return after

    def _launch(
        self,
        chunks: list[ScheduledChunk],
        runner: ModelRunner,
        after: Sequence[StateCopy],
        drawn: Tensor | None = None,
    ) -> PendingStep:
        """Have the device compute a step, and draw its tokens.

        after: the copies of states to make behind it. drawn: the tokens of the step before, if they aren't known.
        """
        sampling = [chunk for chunk in chunks if chunk.samples]
        requests = [(row, request) for row, chunk in enumerate(sampling) for request in chunk.sampled_requests]
        rows = [row for row, _ in requests]
        generations = [self._generations[request] for _, request in requests]
        ends = [chunk.start + chunk.num_tokens for chunk in sampling]
        positions = [ends[row] - request.sequence.num_prompt_tokens for row, request in requests]
        scorer = self._make_scorer(chunks)
        start_s = time.perf_counter()
        if drawn is not None:
            logits = runner.run(chunks, scorer, drawn)
        else:
            logits = runner.run(chunks) if scorer is None else runner.run(chunks, scorer)
        if after:
            runner.copy_states(after)
        draws = [one.next_draw(position) for one, position in zip(generations, positions, strict=True)]
        numbers = uniforms([one.sampler.random_seed for one in generations], positions)
        step = PendingStep(chunks, generations, self.sampler.begin(logits, draws, rows, numbers), scorer, start_s)
        if step.draws.is_done:
            step.took_s = time.perf_counter() - start_s
        return step

    def _finish(self, step: PendingStep, planned: Sequence[ScheduledChunk] = (), *, is_launched: bool = True) -> None:
        """Read a launched step's tokens, and record them.

        planned: the step behind it, if it is scheduled. It is undone, too, if this step has died. is_launched: whether
        that step was launched. Otherwise nobody writes the new tokens' KV, and they get no slots: an answer may end
        here, by a stop string, and its full blocks stay cached.
        """
        try:
            outcomes = self._read(step)
            self._note_time(step)
        except Exception as error:  # noqa: BLE001  # `_undo` raises it, or gives it to its generations
            self._undo(_both(step, planned), error)
            return
        drawn = zip(step.generations, outcomes, strict=True)
        results = [(one, outcome) for one, outcome in drawn if one.request.finish_reason is None]
        tokens = [None if isinstance(outcome, Exception) else outcome.token_id for outcome in outcomes]
        if None in tokens:
            if any(isinstance(outcome, BrokenLogitsError) for _, outcome in results):
                self.scheduler.manager.reset_prefix_cache()
            self._raise_if_streamed(results, _both(step, planned))
        if step.scorer is not None:
            self._note_scores(step.scorer, step.chunks)
        self._results = results  # from here on, an interrupt finds requests that have got their tokens
        self.scheduler.complete(step.chunks, tokens, planned if is_launched else ())
        self.num_steps += 1
        now_s = time.perf_counter()
        for generation, outcome in results:
            self._record(generation, outcome, now_s)
        for chunk in step.chunks:
            if not chunk.samples and chunk.is_all:
                self._note_end(self._generations[chunk.request], now_s)
        self._results = []

    def _note_time(self, step: PendingStep) -> None:
        """Note how long a step took that has just been read, if that is known: the caller's pauses don't count."""
        if step.took_s is not None:
            self.scheduler.note_step(step.chunks, step.took_s)
        elif not step.ended_unseen:
            self.scheduler.note_step(step.chunks, time.perf_counter() - step.start_s)

    def _read(self, step: PendingStep) -> list[Outcome]:
        """Wait for a step's tokens."""
        start_s = time.perf_counter()
        try:
            step.draws.wait()
        finally:
            self.waited_s += time.perf_counter() - start_s
        return step.draws.read()

    def _undo(self, chunks: Sequence[ScheduledChunk], error: Exception) -> None:
        """Undo steps that died, and fail their generations, or raise the error."""
        self._pending = None
        self.scheduler.abort(chunks)
        if isinstance(error, BrokenLogitsError):
            self.scheduler.manager.reset_prefix_cache()
        requests = [request for chunk in chunks for request in (chunk.request, *chunk.request.siblings)]
        self._fail([request for request in requests if request.finish_reason is None], error)

    def _make_scorer(self, chunks: Sequence[ScheduledChunk]) -> Scorer | None:
        """The scorer of prompts whose tokens' log probabilities are wanted; None if there are no such prompts."""
        wanted, first_row = [], 0
        for chunk in chunks:
            scores = self._generations[chunk.request].scores
            if scores is not None:
                rows = scores.rows(chunk.start, chunk.start + chunk.num_tokens)
                if rows:
                    targets = chunk.request.sequence.token_ids(rows.start + 1, rows.stop + 1)
                    wanted.append(ScoredRows(scores, first_row + rows.start - chunk.start, targets))
            first_row += chunk.num_tokens
        return Scorer(wanted) if wanted else None

    def _note_scores(self, scorer: Scorer, chunks: Sequence[ScheduledChunk]) -> None:
        """Keep the new scores, and let the requests hit the scored tokens in the cache."""
        scorer.commit()
        for chunk in chunks:
            scores = self._generations[chunk.request].scores
            if scores is not None:
                chunk.request.max_hit_tokens = None if scores.is_whole else scores.num_scored

    def _raise_if_streamed(self, results: Outcomes, chunks: list[ScheduledChunk]) -> None:
        """Undo the steps with these chunks and raise if a generation that wasn't submitted got no token."""
        for generation, outcome in results:
            if isinstance(outcome, Exception) and not generation.is_submitted:
                self._pending = None
                self.scheduler.abort(chunks)
                raise outcome

    def _record(self, generation: Generation, outcome: Outcome, now_s: float) -> None:
        """Record the step's outcome for a generation. One whose text can't be decoded ends, and its stream raises."""
        self._told[generation] = None
        if isinstance(outcome, Exception):
            generation.error = outcome
        else:
            try:
                generation.record(outcome, now_s)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is this generation's
                generation.error = error
        if generation.finish_reason is not None:
            self._note_end(generation, now_s)

    def _note_end(self, generation: Generation, now_s: float) -> None:
        """End the request of a generation that has ended, or the generation of a request that has."""
        if generation.finish_reason == "length" and generation.completion is None:
            generation.end(now_s)
        if generation.finish_reason != "cancelled":
            self._told[generation] = None
        # A generation may have ended before its request: by a stop string, or because its text can't be decoded.
        self._cancel(generation.request, generation.finish_reason or "cancelled")

    def _drop(self, generation: Generation) -> None:
        """As `cancel`."""
        self._cancel(generation.request)
        self._told.pop(generation, None)

    def _cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request, if it hasn't ended, and forget its generation. It is no error if the manager refuses calls."""
        with suppress(CorruptStateError):
            self.scheduler.cancel(request, reason)
        self._generations.pop(request, None)

    def _end(self, generations: Sequence[Generation]) -> None:
        """As `end`."""
        for generation in reversed(generations):  # a prompt's other samples before the first, which computes it
            self._drop(generation)
        self._streams = [one for one in self._streams if one[1] is not generations]

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End the submitted ones of the waiting `requests`. Raise `error` if there are others."""
        generations = [self._generations[request] for request in requests]
        failed = [generation for generation in generations if generation.is_submitted]
        self._told |= dict.fromkeys(failed)
        for generation in reversed(failed):  # a prompt's other samples before the first one, which computes it for them
            generation.error = error
            self._note_end(generation, time.perf_counter())
        if len(failed) < len(generations):
            raise error
        # The traceback is kept only for reading. Its frames would keep the model's tensors alive.
        clear_frames(error.__traceback__)


def _has_ended(stream: Stream | None) -> bool:
    return stream is None or getgeneratorstate(stream) == GEN_CLOSED


def _both(step: PendingStep, planned: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
    """The chunks of a step and of the one that was planned behind it, where a request that is in both comes once."""
    return [*step.chunks, *(chunk for chunk in planned if chunk.source is None)]
