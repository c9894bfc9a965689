"""The event loop's side of the server: which requests are open, how many may be, and how long each may take.

Invariants: a request counts until the engine has nothing of it any more, so clients that come and go can't pile up work
beyond `max_requests`; each request ends in exactly one outcome.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvblocks.engine.engine import Engine
from kvblocks.engine.server.engine_thread import EngineThread, Item, Mark
from kvblocks.engine.server.errors import ApiError, stopping_error
from kvblocks.engine.server.replies import Delta
from kvblocks.engine.server.requests import Sampling
from kvblocks.engine.server.service_metrics import Outcome, ServiceMetrics
from kvblocks.engine.server.settings import ServerSettings

T = TypeVar("T")


class Job:
    """One request on the event loop: what came of it and hasn't been taken yet.

    outcome: None while it goes on. Take its items until `has_ended`; then nothing more comes.
    """

    def __init__(self, key: str, num_choices: int) -> None:
        self.key = key
        self.num_choices = num_choices
        self.start_s = time.monotonic()
        self.has_begun = False
        self.outcome: Outcome | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._num_unfinished = num_choices
        self._items: deque[Delta | ApiError] = deque()
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether all that ever comes has been taken."""
        return self.outcome is not None and not self._items

    def put(self, item: Delta | ApiError) -> bool:
        """Add an item, and return whether it was the last one."""
        self._items.append(item)
        self._news.set()
        if isinstance(item, ApiError):
            return True
        self._num_unfinished -= item.completion is not None
        return not self._num_unfinished

    def wake(self) -> None:
        """Let whoever takes look again."""
        self._news.set()

    async def take(self) -> list[Delta]:
        """Wait for items and return all there are; [] only at the end. Raises ApiError if the request failed."""
        while not self._items and self.outcome is None:
            self._news.clear()
            await self._news.wait()
        deltas: list[Delta] = []
        while self._items:
            if isinstance(self._items[0], ApiError):
                if deltas:
                    return deltas  # what came before the error is shown first
                raise self._pop_error()
            deltas.append(self._items.popleft())  # type: ignore[arg-type]
        return deltas

    def _pop_error(self) -> ApiError:
        error = self._items.popleft()
        assert isinstance(error, ApiError), "asked for only when an error is next"
        return error


class Service:
    """Requests of an event loop to one engine, which it owns. Make it, `start` it in the loop, and `stop` it there.

    keep_reasons: see `Arrivals`.
    """

    def __init__(self, engine: Engine, settings: ServerSettings, *, keep_reasons: bool = True) -> None:
        self.engine = engine
        self.settings = settings
        self.thread = EngineThread(engine, self._publish, keep_reasons=keep_reasons)
        self.metrics = ServiceMetrics(engine, lambda: self.num_open)
        self.is_stopping = False
        self.num_open = 0
        self._jobs: dict[str, Job] = {}
        self._open: dict[str, int] = {}
        self._ends: deque[float] = deque(maxlen=16)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests."""
        return self.thread.is_alive and not self.is_stopping

    def start(self) -> None:
        """Start the engine's thread. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self, timeout_s: float) -> bool:
        """Fail what is unfinished, and end the engine's thread; return whether it did in time."""
        self.is_stopping = True
        self.fail_all()
        return await asyncio.to_thread(self.thread.stop, timeout_s)

    def submit(self, key: str, prompts: list[list[int]], sampling: Sampling, salt: str | None) -> Job:
        """Queue a request. Raises ApiError when there is no place for it."""
        num_choices = sampling.n * len(prompts)
        self.check_open(num_choices)
        job = self._jobs[key] = Job(key, num_choices)
        self._open[key] = num_choices
        self.num_open += num_choices
        job.timer = asyncio.get_running_loop().call_later(self.settings.request_timeout_s, self._time_out, job)
        self.thread.submit(key, prompts, sampling, salt)
        return job

    def check_open(self, num_choices: int) -> None:
        """Raise ApiError if so many more answers can't be begun now; for want of places it counts as refused. Cheap."""
        most = self.settings.max_requests
        if not self.is_healthy:
            raise stopping_error()
        if num_choices > most:
            raise ApiError(400, f"n: expected at most {most} answers at once, got {num_choices}", param="n")
        if self.num_open + num_choices > most:
            self.metrics.count(Outcome.REFUSED)
            message = (
                f"expected at most {most} unfinished answers, got {self.num_open} and {num_choices} more: try later"
            )
            headers = {"Retry-After": str(self._retry_after_s())}
            raise ApiError(429, message, code="queue_full", headers=headers)

    def drop(self, job: Job) -> None:
        """Cancel a request that nobody waits for any more. Nothing if it has ended."""
        self._end(job, Outcome.CANCELLED)

    def fail_all(self) -> None:
        """Fail all requests that are unfinished, since the server stops."""
        for job in list(self._jobs.values()):
            job.put(stopping_error())
            self._end(job, Outcome.FAILED)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps. Raises what it does, and ApiError if it can't."""
        if not self.thread.is_alive:
            raise stopping_error()
        seconds = self.settings.request_timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.thread.call(function)), seconds)
        except TimeoutError:
            raise ApiError(504, f"expected the engine to answer within {seconds:g} s, got nothing") from None

    def _publish(self, batch: list[tuple[str, Item]]) -> None:
        """Hand a batch over to the event loop. Called on the engine's thread."""
        assert self._loop is not None, "the thread is started after this"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _deliver(self, batch: list[tuple[str, Item]]) -> None:
        for key, item in batch:
            if isinstance(item, Mark):
                self.num_open -= self._open.pop(key)
                continue
            job = self._jobs.get(key)
            if job is None:
                continue  # it was dropped, or its time was over
            if isinstance(item, Delta):
                self._note(job, item)
            if job.put(item):
                self._end(job, Outcome.FAILED if isinstance(item, ApiError) else Outcome.FINISHED)

    def _note(self, job: Job, delta: Delta) -> None:
        if not job.has_begun:
            job.has_begun = True
            self.metrics.note_first_token(time.monotonic() - job.start_s)
        self.metrics.count_tokens(len(delta.token_ids))

    def _end(self, job: Job, outcome: Outcome) -> None:
        """End a job once; the engine drops what it still has of it."""
        if self._jobs.pop(job.key, None) is None:
            return
        job.outcome = outcome
        if job.timer is not None:
            job.timer.cancel()
        if outcome is not Outcome.FINISHED:
            self.thread.cancel(job.key)
        self.metrics.count(outcome)
        self._ends.append(time.monotonic())
        job.wake()

    def _time_out(self, job: Job) -> None:
        seconds = self.settings.request_timeout_s
        # Clients of OpenAI's retry by themselves, and would spend as much again.
        headers = {"x-should-retry": "false"}
        job.put(ApiError(504, f"expected an answer within {seconds:g} s, got none: the time is over", headers=headers))
        self._end(job, Outcome.TIMED_OUT)

    def _retry_after_s(self) -> int:
        """Seconds until a place should be free, by how often requests ended lately."""
        if len(self._ends) < 2:
            return 1
        return min(60, max(1, math.ceil((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))))
