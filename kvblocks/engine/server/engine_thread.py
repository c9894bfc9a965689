"""The one thread that touches the engine. Others give it commands through a queue, and it publishes what comes of them.

Commands run between two steps, in order. So nothing in the engine needs a lock, and nobody waits for a step but those
who want something of it.

Invariant: for each request that was submitted, the last thing published is CLOSED, once, whatever happens: its answers
are finished, it failed, or it was cancelled.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from kvblocks.engine.engine import Engine
from kvblocks.engine.generation import Generation
from kvblocks.engine.server.arrivals import Arrivals
from kvblocks.engine.server.errors import ApiError, as_api_error, step_error, stopping_error
from kvblocks.engine.server.pin_book import PinBook
from kvblocks.engine.server.replies import Delta
from kvblocks.engine.server.requests import Sampling
from kvblocks.errors import KVBlocksError

logger = logging.getLogger("kvblocks.server")

T = TypeVar("T")


class Mark(Enum):
    """CLOSED: the engine has nothing of this request any more."""

    CLOSED = "closed"


Item = Delta | ApiError | Mark
Publish = Callable[[list[tuple[str, Item]]], None]


@dataclass
class _Work:
    """The generations of a request that haven't ended, each with the number of its choice."""

    num_samples: int
    unfinished: dict[Generation, int] = field(default_factory=dict)


class EngineThread:
    """Owns an engine from `start` to `stop`.

    publish: gets batches of (request's key, item), on this thread; it must neither block nor raise. on_death: called
    on this thread when it ends by an error, which is a bug; all requests have been closed by then. arrivals, pins: for
    functions given to `call`; `arrivals.lookups` may be read from anywhere.
    """

    def __init__(self, engine: Engine, publish: Publish, *, keep_reasons: bool = True) -> None:
        self.engine = engine
        self.arrivals = Arrivals(engine.manager, keep_reasons=keep_reasons and engine.manager.enable_caching)
        self.pins = PinBook(engine.manager)
        self.on_death: Callable[[], None] = lambda: None
        self._publish = publish
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._works: dict[str, _Work] = {}
        self._owners: dict[Generation, str] = {}
        self._outbox: list[tuple[str, Item]] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvblocks-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Close all requests after the present step, and end. Return whether it has ended in time."""
        self._commands.put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, key: str, prompts: list[list[int]], sampling: Sampling, salt: str | None) -> None:
        """Queue a request's prompts. Whatever is wrong with them is published."""
        self._commands.put(lambda: self._submit(key, prompts, sampling, salt))

    def cancel(self, key: str) -> None:
        """Drop what is unfinished of a request; its blocks are free before the next step. Nothing if it has ended."""
        self._commands.put(lambda: self._cancel(key))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on this thread, between two steps, and return its result or exception in a future."""
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
        try:
            while not self._is_stopping:
                self._run_commands()
                self._step()
                self._flush()
        except BaseException:
            logger.exception("the engine's thread has died")
            self.on_death()
        self._is_stopping = True
        self._abandon()

    def _run_commands(self) -> None:
        """Run the commands that wait; without anything to compute, wait for one, or for a pin to end."""
        may_wait = not self.engine.has_work
        while True:
            try:
                command = self._commands.get(may_wait, self.pins.seconds_left() if may_wait else None)
            except queue.Empty:
                return
            may_wait = False
            command()

    def _step(self) -> None:
        self.pins.expire()
        for generation in self.engine.step():
            key = self._owners.get(generation)
            if key is not None:
                self._take(key, generation)

    def _take(self, key: str, generation: Generation) -> None:
        """Publish what a generation has for its request."""
        work = self._works[key]
        choice = work.unfinished[generation]
        prompt, sample = divmod(choice, work.num_samples)
        while generation.pieces:
            piece = generation.pieces.popleft()
            self._put(key, Delta(choice, piece.text, (piece.token_id,), piece.completion, is_first_sample=not sample))
        reason = generation.finish_reason
        if reason is None:
            return
        del work.unfinished[generation], self._owners[generation]
        if generation.completion is None:
            error = generation.error or RuntimeError(f"the generation ended with {reason!r}")
            logger.error("request %s failed", key, exc_info=error)
            self._fail(key, step_error(error))
            return
        if not sample:
            self.arrivals.finish(key, prompt, generation.completion)
        if not work.unfinished:
            self._close(key)

    def _submit(self, key: str, prompts: list[list[int]], sampling: Sampling, salt: str | None) -> None:
        work = self._works[key] = _Work(sampling.n)
        if self._is_stopping:
            self._fail(key, stopping_error())
            return
        try:
            for prompt in prompts:
                room = self._room(prompt) if sampling.max_tokens is None else sampling.max_tokens
                for generation in self.engine.submit(
                    prompt,
                    n=sampling.n,
                    max_tokens=room,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=sampling.seed,
                    stop=sampling.stop,
                    ignore_eos=sampling.ignore_eos,
                    salt=salt,
                ):
                    work.unfinished[generation] = len(work.unfinished)
                    self._owners[generation] = key
            self.arrivals.note(key, prompts, salt)  # nothing of it is cached before the next step
        except Exception as error:
            if not isinstance(error, KVBlocksError):
                logger.exception("request %s could not be begun", key)
            self._fail(key, as_api_error(error))

    def _room(self, prompt: list[int]) -> int:
        """How many tokens a prompt's answer may have at most; 1 if it doesn't fit at all, which `submit` refuses.

        What pins never give up is left out; a prompt that begins with such a pin would have a little more room.
        """
        return max(1, self.engine.scheduler.max_request_tokens - len(prompt))

    def _cancel(self, key: str) -> None:
        if key in self._works:
            self._close(key)

    def _fail(self, key: str, error: ApiError) -> None:
        """Publish an error for a request and drop the rest of it."""
        self._put(key, error)
        self._close(key)

    def _close(self, key: str) -> None:
        """Cancel what is unfinished of a request, and say that it is closed."""
        work = self._works.pop(key)
        for generation in reversed(work.unfinished):  # samples before the one that computes the prompt for them
            del self._owners[generation]
            self.engine.cancel(generation)
        self._put(key, Mark.CLOSED)

    def _abandon(self) -> None:
        """Close all requests, those that came too late too: at the end, when nothing may be relied on."""
        keys = list(self._works)
        for key in keys:
            self._put(key, stopping_error())
        try:
            for key in keys:
                self._close(key)
            while not self._commands.empty():
                self._commands.get()()
        except Exception:
            logger.exception("requests could not be dropped")
        for key in self._works:
            self._put(key, Mark.CLOSED)
        self._flush()

    def _put(self, key: str, item: Item) -> None:
        self._outbox.append((key, item))

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._publish(batch)

    def _stop(self) -> None:
        self._is_stopping = True
