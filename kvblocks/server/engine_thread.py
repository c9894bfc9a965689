"""The only thread that touches the engine. Other threads queue commands for it, and it publishes the results.

Commands run between two steps, in order. So the engine needs no locks, and only callers that need a result wait for a
step.

Invariant: for each submitted answer, CLOSED is published exactly once and last, whether its choices finished, it
failed, or it was cancelled.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.engine import Engine
from kvblocks.engine.generation import Generation
from kvblocks.engine.options import OptionValues
from kvblocks.errors import KVBlocksError
from kvblocks.replay.recorder import TraceRecorder
from kvblocks.server.answer import Answer
from kvblocks.server.arrivals import Arrivals
from kvblocks.server.errors import ApiError, as_api_error, step_error, stopping_error
from kvblocks.server.misses.comparison import Comparison
from kvblocks.server.pins.marked_pins import MarkedPins, MarkOutcome
from kvblocks.server.pins.pin_book import PinBook
from kvblocks.server.requests import AnswerRequest
from kvblocks.server.tenant_usage import TenantUsage
from kvblocks.server.tools.reader import name_stop
from kvblocks.wire.hints import HintExecutor, HintLimits

logger = logging.getLogger("kvblocks.server")

T = TypeVar("T")

_USAGE_S = 1.0
"""The least number of seconds between two readings of tenants' usage for metrics."""

_HINTS = HintLimits(may_evict=True, max_tenants=128, max_remembered=64)
"""An operator may evict anybody's blocks. The numbers bound the memory: an answer may take 4 KB."""

_GLANCE_S = 0.1
"""How often, in seconds, `stop` checks whether `close_by` has changed while it waits for the thread's end."""


class Mark(Enum):
    """Marks the end of an answer. CLOSED: the engine holds nothing of it any more."""

    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prompt was computed, and nothing is generated for it."""

    prompt_index: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Compared:
    """A prompt was compared with the one that its request named; None if that one is unknown."""

    found: Comparison | None


@dataclass(frozen=True, slots=True)
class Marked:
    """What became of the marks of a request."""

    outcomes: tuple[MarkOutcome, ...]


Item = Piece | Warmed | Compared | Marked | ApiError | Mark
Publish = Callable[[list[tuple[Answer, Item]]], None]


class EngineThread:
    """Owns an engine from `start` to `stop`, which closes the engine.

    publish: called on this thread with batches of (answer, item); it must neither block nor raise. on_death: called on
    this thread when it ends because of an error, which is a bug; all answers have been closed by then. tenants: see
    `TenantUsage`. arrivals, pins,
    hints: only for functions given to `call`, except that any thread may read `arrivals.num_lookups_and_seconds` and
    `hint_stats`, both as of the last step. close_by: until when, by `time.monotonic`, the end waits for the tiers to
    store blocks; any thread may change it. usage: the tenants' usage; publishes_usage: whether it is read about once a
    second for metrics, to be set before the start. recorder: is told of each begun prompt when its first sample ends.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Publish,
        *,
        tenants: Collection[str] = (),
        keep_reasons: bool = True,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.engine = engine
        self._recorder = recorder
        keeps = keep_reasons and engine.manager.enable_caching
        self.arrivals = Arrivals(engine.scheduler.lookups, engine.model.tokenizer, keep_reasons=keeps)
        self.usage = TenantUsage(engine.manager, tenants)
        self.publishes_usage = False
        self._published_s = 0.0
        self.pins = PinBook(engine.manager)
        # Each salt may pin a quarter of what all pins may have.
        budget = engine.manager.pins.max_blocks // 4
        self.hints = HintExecutor(engine.manager, max_pinned_blocks=budget, limits=_HINTS)
        self.marks = MarkedPins(engine.manager, budget)
        self.hint_stats = self.hints.stats  # never changed, only replaced
        self.on_death: Callable[[], None] = lambda: None
        self.close_by = 0.0
        self._publish = publish
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished: dict[Answer, dict[Generation, None]] = {}  # of each open answer, in order
        self._answers: dict[Generation, Answer] = {}  # the inverse of _unfinished
        self._outbox: list[tuple[Answer, Item]] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvblocks-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Close all answers after the current step, close the engine, and end. Return whether that happened in time.

        timeout_s: how many seconds to wait beyond `close_by`; None: as long as it takes.
        """
        self._commands.put(self._stop)
        start_s = time.monotonic()
        while self._thread.is_alive():
            left = None if timeout_s is None else max(start_s, self.close_by) + timeout_s - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._thread.join(_GLANCE_S if left is None else min(left, _GLANCE_S))
        return True

    def submit(self, answer: Answer, prompts: list[list[int]]) -> None:
        """Queue an answer's prompts. Errors in them are published, not raised."""
        self._commands.put(lambda: self._submit(answer, prompts))

    def cancel(self, answer: Answer) -> None:
        """Cancel an answer. Its blocks are freed before the next step. Does nothing if the answer has ended."""
        self._commands.put(lambda: self._cancel(answer))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on this thread, between two steps. Returns a future of its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  # the caller's to handle
                future.set_exception(error)

        self._commands.put(run)
        return future

    def _run(self) -> None:
        has_died = False
        try:
            while not self._is_stopping:
                self._run_commands()
                self._step()
                self._flush()
        except BaseException:
            logger.exception("the engine's thread has died")
            has_died = True
            self.on_death()
        self._is_stopping = True
        self._abandon()
        self._close_engine(waits=not has_died)

    def _run_commands(self) -> None:
        """Run the queued commands. If there is nothing to compute, wait for a command, or until time changes that."""
        may_wait = not self.engine.has_work
        while True:
            try:
                command = self._commands.get(may_wait, self._seconds_left() if may_wait else None)
            except queue.Empty:
                return
            may_wait = False
            command()

    def _seconds_left(self) -> float | None:
        """Return the seconds until a pin or a hint ends, or the gate may let a request in, at most an hour.

        None if nothing of that will happen.
        """
        now, times = time.monotonic(), (self.hints.next_time, self.engine.wake_at)
        ends = [left for left in (self.pins.seconds_left(), self.marks.seconds_left()) if left is not None]
        return min([*ends, *[min(3600.0, max(0.0, at - now)) for at in times if at is not None]], default=None)

    def _step(self) -> None:
        self.pins.expire()
        self.marks.expire()
        self.arrivals.times.note(time.time(), self.engine.manager.stats.num_taken_blocks)
        for generation in self.engine.step():
            answer = self._answers.get(generation)
            if answer is not None:
                self._take(answer, generation)
        self.hints.step(time.monotonic())  # clients ask again for the outcome of deferred hints
        self.hint_stats = self.hints.stats
        if self.publishes_usage and time.monotonic() >= self._published_s + _USAGE_S:
            self._published_s = time.monotonic()
            self.usage.read()

    def _take(self, answer: Answer, generation: Generation) -> None:
        """Publish what a generation has for its answer."""
        while generation.pieces:
            self._put(answer, generation.pieces.popleft())
        reason = generation.finish_reason
        if reason is None:
            return
        del self._unfinished[answer][generation], self._answers[generation]
        self._record(generation, reason)
        if generation.completion is None:
            error = generation.error or RuntimeError(f"the generation ended with {reason!r}")
            shown = step_error(error)
            if shown.status >= 500:  # else it is the client's mistake: a client must not fill the log with tracebacks
                logger.error("request %s failed", answer.answer_id, exc_info=error)
            self._fail(answer, shown)
            return
        if not generation.completion.token_ids:
            self._put(answer, Warmed(generation.prompt_index, generation.completion))
        if not generation.sample_index:
            self.arrivals.finish(answer.answer_id, generation.prompt_index, generation.completion)
            self.usage.note(answer.asked.caller.tenant, generation.completion)
        if not self._unfinished[answer]:
            self._close(answer)

    def _record(self, generation: Generation, reason: str) -> None:
        """Record a prompt that has ended. A prompt that never ran isn't recorded: it took nothing from the cache."""
        if self._recorder is None or generation.sample_index or not generation.request.was_admitted:
            return
        seconds = time.perf_counter() - generation.start_s
        sequence = generation.request.sequence
        stop = generation.request.pause_reason or reason
        self._recorder.record(sequence, arrived_s=time.time() - seconds, seconds=seconds, stop=stop)

    def _submit(self, answer: Answer, prompts: list[list[int]]) -> None:
        unfinished = self._unfinished[answer] = {}
        if self._is_stopping:
            self._fail(answer, stopping_error())
            return
        try:
            for index, prompt in enumerate(prompts):
                options = answer.asked.options_of(index, partial(self._room_after, prompt))
                options = OptionValues(**{**options, "name_stop": self._stop_namer(answer.asked)})
                for generation in self.engine.submit(prompt, prompt_index=index, **options):
                    unfinished[generation] = None
                    self._answers[generation] = answer
            first_samples = [generation.request for generation in unfinished if not generation.sample_index]
            # None of the answer's own blocks is cached before the next step.
            self.arrivals.note(answer.answer_id, answer.asked, first_samples)
            if answer.asked.marks:
                self._put(answer, Marked(self._mark(answer, prompts[0])))
            if answer.asked.compares_with is not None:
                (arrival, *_) = self.arrivals.find(answer.answer_id, answer.asked.caller) or (None,)
                found = None if arrival is None else self.arrivals.compare(arrival, answer.asked.compares_with)
                self._put(answer, Compared(found))
        except Exception as error:
            if not isinstance(error, KVBlocksError):
                logger.exception("request %s could not be begun", answer.answer_id)
            self._fail(answer, as_api_error(error))

    def _mark(self, answer: Answer, prompt: list[int]) -> tuple[MarkOutcome, ...]:
        """Pin the prefixes that a request marks, shortest first; the longer ones take their places."""
        asked = answer.asked
        marks = sorted(zip(asked.marked_tokens, asked.marks, strict=True), key=lambda pair: pair[0])
        salt = asked.options.get("salt")
        return tuple([self.marks.mark(prompt[:count], salt=salt, ttl_s=mark.ttl_s) for count, mark in marks])

    def _stop_namer(self, asked: AnswerRequest) -> Callable[[list[int]], str] | None:
        """Return what tells sessions and the gate that an answer called a tool; None: it calls none."""
        tokenizer = self.engine.model.tokenizer
        if asked.tools is None or not asked.tools.is_read or tokenizer is None:
            return None
        skips, stops = asked.options.get("skip_special_tokens", True), tuple(asked.options.get("stop") or ())
        decode = partial(tokenizer.decode, skip_special_tokens=skips)
        return lambda token_ids: name_stop(asked.tool_format, decode(token_ids), stops)

    def _room_after(self, prompt: list[int]) -> int:
        return self.engine.scheduler.max_request_tokens - len(prompt)

    def _cancel(self, answer: Answer) -> None:
        if answer in self._unfinished:
            self._close(answer)

    def _fail(self, answer: Answer, error: ApiError) -> None:
        """Publish an error for an answer, and cancel what is unfinished of it."""
        self._put(answer, error)
        self._close(answer)

    def _close(self, answer: Answer) -> None:
        """Cancel what is unfinished of an answer, and publish CLOSED."""
        # Cancel the other samples before the first one, which computes the prompt for them.
        for generation in reversed(self._unfinished.pop(answer)):
            del self._answers[generation]
            self._record(generation, "cancelled")
            self.engine.cancel(generation)
        self._put(answer, Mark.CLOSED)

    def _abandon(self) -> None:
        """Close all answers, also those that were submitted too late. Called at the end, perhaps after an error."""
        answers = list(self._unfinished)
        for answer in answers:
            self._put(answer, stopping_error())
        try:
            for answer in answers:
                self._close(answer)
            while not self._commands.empty():
                self._commands.get()()
        except Exception:
            logger.exception("requests could not be dropped")
        for answer in self._unfinished:
            self._put(answer, Mark.CLOSED)
        self._flush()

    def _close_engine(self, *, waits: bool) -> None:
        """Close the engine. waits: let the tiers first store the blocks that wait for that."""
        try:
            while waits and self.engine.has_work and time.monotonic() < self.close_by:
                self.engine.step()
        except Exception:
            logger.exception("the engine's last stores have failed")
        try:
            self.engine.close(0.0)
        except Exception:
            logger.exception("the engine could not be closed")

    def _put(self, answer: Answer, item: Item) -> None:
        self._outbox.append((answer, item))

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._publish(batch)

    def _stop(self) -> None:
        self._is_stopping = True
