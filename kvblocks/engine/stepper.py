"""Runs steps of all unfinished generations (schedule, run the model, sample, record), and handles failures.

There are two kinds of callers. For a caller that streams, the step is undone and raises the failure; its requests wait
again, and the next step goes on. A caller that submits prompts, as a server does, finds the failure in the generation
(finish_reason "error", and the exception). A failing step only fails its own generations, or only one of them if that
is known to be the cause.

Where steps overlap, the device computes a step while the host schedules and launches the next one (`PendingStep`).

In both cases nothing unwritten stays cached. If a request's logits are NaN, KV that it wrote or read is broken, and it
is unknown since when. So the whole cache is reset, which only costs time.
"""

import time
from collections.abc import Sequence
from traceback import clear_frames

from torch import Tensor

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
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.engine.undoing import undo, written_tokens
from kvblocks.groups.states.copies import StateCopy

Outcomes = list[tuple[Generation, Outcome]]


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
        self._only_answered = False  # in the last step

    def add(self, generations: Sequence[Generation], *, timeout_s: float | None = None) -> None:
        """Queue generations that `Intake` made. The samples of a prompt must be adjacent, the first one first.

        timeout_s: seconds from now. O(generations).
        """
        now_s = time.perf_counter()
        for generation in generations:
            generation.start_s = now_s
            generation.request.deadline = None if timeout_s is None else now_s + timeout_s
        for generation in generations:
            if generation.sample_index == 0:
                self.scheduler.add_checked(generation.request)
            self._generations[generation.request] = generation

    def cancel(self, generation: Generation) -> None:
        """End a generation and free its blocks at once. Does nothing if it has ended. O(requests)."""
        self.scheduler.cancel(generation.request)
        self._generations.pop(generation.request, None)

    def step(self, runner: ModelRunner) -> list[Generation]:
        """Compute one step with `runner`. Return the generations that got a piece or ended, expired ones included.

        If steps overlap, a step that another can follow is only launched. The next call launches the step after it, and
        then reads and returns its tokens.

        Remembered tokens are given before anything is computed. A step that gives some computes nothing, unless the
        previous step already computed nothing for this reason.

        Raises the failure of a generation that wasn't submitted, and whatever isn't an Exception, after undoing the
        step. A step that was launched earlier is read first if possible, and otherwise undone, too.
        """
        told = [self._generations.pop(request) for request in self.scheduler.expire(time.perf_counter())]
        answered = self._answer()
        told += answered
        self._only_answered = bool(answered) and not self._only_answered
        if self._only_answered:
            return told
        pending = self._pending
        if pending is not None and not pending.is_wanted:
            pending = None
        written = written_tokens(self.scheduler) | ({} if pending is None else pending.starts)
        chunks: list[ScheduledChunk] | None = None
        try:
            self._pending = None  # only here, where an interruption is heard
            scheduled, after = self._schedule(pending, runner)
            chunks = scheduled
            return list(dict.fromkeys([*told, *self._run(pending, chunks, runner, after)]))
        except StalledError as error:
            return list(dict.fromkeys([*told, *self._fail([error.request], error)]))
        except BaseException as error:
            if chunks is None or not isinstance(error, Exception):  # `_run` has undone the steps after others
                undo(self.scheduler, written)
                self._pending = None
            raise

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
    ) -> list[Generation]:
        """Launch a scheduled step, and read the one before it, which is pending, or else itself if nothing may overlap.

        Returns the generations that got a piece or ended.
        """
        if not chunks:
            return [] if pending is None else self._finish(pending)
        try:
            step = self._launch(chunks, runner, after, None if pending is None else pending.draws.tokens)
        except Exception as error:  # noqa: BLE001  # `_undo` raises it, or gives it to its generations
            try:
                told = [] if pending is None else self._finish(pending, chunks, is_launched=False)
            except Exception:
                self.scheduler.abort(chunks)
                raise
            return [*told, *self._undo(chunks, error)]
        if pending is not None:
            self._pending = step  # first, since the next line raises if the text of a stream can't be told
            told = self._finish(pending, chunks)
            step.start_s = time.perf_counter()
            return told
        if self.overlaps and step.may_be_followed and may_plan(self.scheduler.manager, self.scheduler.remembered):
            self._pending = step
            return []
        return self._finish(step)

    def _answer(self) -> list[Generation]:
        """Give waiting generations their remembered first tokens, and return these generations."""
        answered = []
        for request, token_id in self.scheduler.answer():
            generation = self._generations[request]
            self._record(generation, Drawn(token_id), time.perf_counter())
            answered.append(generation)
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
        return PendingStep(chunks, generations, self.sampler.begin(logits, draws, rows, numbers), scorer, start_s)

    def _finish(
        self, step: PendingStep, planned: Sequence[ScheduledChunk] = (), *, is_launched: bool = True
    ) -> list[Generation]:
        """Read a launched step's tokens, and record them. Returns the generations that got a piece or ended.

        planned: the step behind it, if it is scheduled. It is undone, too, if this step has died. is_launched: whether
        that step was launched. Otherwise nobody writes the new tokens' KV, and they get no slots: an answer may end
        here, by a stop string, and its full blocks stay cached.
        """
        try:
            outcomes = self._read(step)
            self.scheduler.note_step(step.chunks, time.perf_counter() - step.start_s)
        except Exception as error:  # noqa: BLE001  # `_undo` raises it, or gives it to its generations
            return self._undo(_both(step, planned), error)
        drawn = zip(step.generations, outcomes, strict=True)
        results = [(one, outcome) for one, outcome in drawn if one.request.finish_reason is None]
        tokens = [None if isinstance(outcome, Exception) else outcome.token_id for outcome in outcomes]
        if None in tokens:
            if any(isinstance(outcome, BrokenLogitsError) for _, outcome in results):
                self.scheduler.manager.reset_prefix_cache()
            self._raise_if_streamed(results, _both(step, planned))
        self.scheduler.complete(step.chunks, tokens, planned if is_launched else ())
        self.num_steps += 1
        if step.scorer is not None:
            self._note_scores(step.scorer, step.chunks)
        now_s = time.perf_counter()
        self._record_all(results, now_s)
        ended = [self._generations.pop(chunk.request) for chunk in step.chunks if not chunk.samples and chunk.is_all]
        for generation in ended:
            generation.end(now_s)
        return [*(generation for generation, _ in results), *ended]

    def _read(self, step: PendingStep) -> list[Outcome]:
        """Wait for a step's tokens."""
        start_s = time.perf_counter()
        try:
            step.draws.wait()
        finally:
            self.waited_s += time.perf_counter() - start_s
        return step.draws.read()

    def _undo(self, chunks: Sequence[ScheduledChunk], error: Exception) -> list[Generation]:
        """Undo steps that died, and fail their generations, which are returned, or raise the error."""
        self._pending = None
        self.scheduler.abort(chunks)
        if isinstance(error, BrokenLogitsError):
            self.scheduler.manager.reset_prefix_cache()
        requests = [request for chunk in chunks for request in (chunk.request, *chunk.request.siblings)]
        return self._fail([request for request in requests if request.finish_reason is None], error)

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

    def _record_all(self, results: Outcomes, now_s: float) -> None:
        """Record the outcomes of a step. If some can't be told to streams, raise the first error, at the end."""
        errors = []
        for generation, outcome in results:
            try:
                self._record(generation, outcome, now_s)
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _record(self, generation: Generation, outcome: Outcome, now_s: float) -> None:
        """Record the step's outcome for a generation."""
        if isinstance(outcome, Exception):
            generation.error = outcome
        else:
            try:
                generation.record(outcome, now_s)
            except Exception as error:
                if not generation.is_submitted:
                    raise
                generation.error = error
        reason = generation.finish_reason
        if reason is not None:
            # It may have ended before its request: by a stop string, or because its text can't be decoded.
            self.scheduler.cancel(generation.request, reason)
            del self._generations[generation.request]

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[Generation]:
        """End the submitted ones of the waiting `requests`, and return them. Raise `error` if there are others."""
        generations = [self._generations[request] for request in requests]
        failed = [generation for generation in generations if generation.is_submitted]
        for generation in reversed(failed):  # a prompt's other samples before the first one, which computes it for them
            generation.error = error
            self.scheduler.cancel(generation.request, "error")
            del self._generations[generation.request]
        if len(failed) < len(generations):
            raise error
        # The traceback is kept only for reading. Its frames would keep the model's tensors alive.
        clear_frames(error.__traceback__)
        return failed


def _both(step: PendingStep, planned: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
    """The chunks of a step and of the one that was planned behind it, where a request that is in both comes once."""
    return [*step.chunks, *(chunk for chunk in planned if chunk.source is None)]
