"""The event loop's side of the server: which answers are open, how many there may be, and how long each may take.

Invariants. An answer counts until the engine holds nothing of it any more, so clients that disconnect and come back
can't pile up work beyond `max_requests`. A text that is being encoded counts until its thread is done. Each answer that
was given to the engine has exactly one outcome.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvblocks.arguments import counted
from kvblocks.engine.completion import Piece
from kvblocks.engine.engine import Engine
from kvblocks.engine.grammar.grammar import Grammar, GrammarCompiler
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import KVBlocksError
from kvblocks.replay.recorder import TraceRecorder
from kvblocks.server.access.bodies import Bodies, BodyLoad
from kvblocks.server.access.callers import AnswerSlots, Caller, set_quotas
from kvblocks.server.access.compiling import Compilers
from kvblocks.server.access.encoding import Encoders
from kvblocks.server.answer import Answer
from kvblocks.server.body.response_format import Form
from kvblocks.server.engine_thread import Compared, EngineThread, Item, Mark, Marked, Warmed
from kvblocks.server.errors import ApiError, as_api_error, busy_error, late_error, length_error, stopping_error
from kvblocks.server.service_metrics import RequestOutcome, ServiceMetrics
from kvblocks.server.settings import ServerSettings
from kvblocks.server.tools.choice import CallsForm
from kvblocks.server.tools.formats import format_of

if TYPE_CHECKING:
    from kvblocks.wire import EventPublisher

T = TypeVar("T")


class Service:
    """The answers of one engine, which the service owns. `start` it in the event loop, and `stop` it there.

    num_open: the choices of all open answers. keep_reasons: see `Arrivals`. publisher: publishes the engine's events.
    recorder: records requests. tool_format: how the model writes tool calls; has_special_marks: whether with special
    tokens. Raises InvalidArgumentError for quotas of tiers that the engine doesn't have.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        *,
        keep_reasons: bool = True,
        publisher: "EventPublisher | None" = None,
        recorder: TraceRecorder | None = None,
    ) -> None:
        set_quotas(engine.manager, settings.keys)
        self.publisher = publisher
        self.engine = engine
        self.settings = settings
        tenants = [key.caller.tenant for key in settings.keys if key.caller.tenant is not None]
        self.thread = EngineThread(engine, self._publish, tenants=tenants, keep_reasons=keep_reasons, recorder=recorder)
        self.bodies = Bodies(settings.max_body_bytes)
        self._encoders = Encoders()
        self._compilers = Compilers()
        tokenizer = engine.model.tokenizer
        self.tool_format = format_of(tokenizer, settings.tool_parser)
        self.has_special_marks = tokenizer is not None and bool(self.tool_format.special_marks(tokenizer))
        self._grammar_compiler: GrammarCompiler | None = None
        self._making_compiler: asyncio.Task[GrammarCompiler] | None = None
        most = engine.scheduler.max_request_tokens  # before there are pins
        # The last generated token needs room in the context, but none in the pool.
        self._max_prompt_tokens = most if most == engine.model.config.max_position_embeddings else most - 1
        self.metrics = ServiceMetrics(engine, lambda: self.num_open, publisher, recorder)
        if settings.metrics_by_tenant:
            self.thread.publishes_usage = True
            self.metrics.show_tenants(self.thread.usage)
        self.is_stopping = False
        self.num_open = 0
        self._open_by: Counter[Caller] = Counter()
        self._unfinished: dict[Answer, None] = {}  # answers that the engine was given, in that order
        self._ends: deque[float] = deque(maxlen=16)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether the service takes requests."""
        return self.thread.is_alive and not self.is_stopping

    def prepare_forms(self) -> None:
        """Make the compiler for forms, if there can be one, before there are requests.

        That takes a second, during most of which no other thread runs.
        """
        with contextlib.suppress(KVBlocksError):  # requests with a form are told
            self._grammar_compiler = self._new_compiler()

    def start(self) -> None:
        """Start the engine's thread. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def begin_stop(self, grace_s: float) -> None:
        """Take no more requests. Running requests, and then the tiers' stores, get `grace_s` seconds from now.

        Any thread may call this, and may call it again with fewer seconds. After that time the caller fails what is
        unfinished.
        """
        self.is_stopping = True
        self.thread.close_by = time.monotonic() + grace_s

    async def stop(self, timeout_s: float) -> bool:
        """Fail unfinished answers, close the engine, and end its thread. Return whether the thread ended in time.

        timeout_s: seconds to wait in addition to the rest of the grace period.
        """
        self.is_stopping = True
        self.fail_all()
        self.bodies.stop()
        self._encoders.stop()
        self._compilers.stop()
        return await asyncio.to_thread(self.thread.stop, timeout_s)

    def open(self, slots: AnswerSlots) -> None:
        """Take slots; `submit` passes them on, and `close` gives them back. O(1).

        Raises ApiError, with none taken, if there are no such slots now. If too few are free, the request counts as
        refused.
        """
        self._check_healthy()
        limits = [(self.settings.max_requests, self.num_open, "")]
        if slots.caller.max_requests is not None:
            limits.append((slots.caller.max_requests, self._open_by[slots.caller], " of this key"))
        for most, num_open, whose in limits:
            if slots.number > most:
                message = f"n: expected at most {counted(most, 'answer')}{whose} at once, got {slots.number}"
                raise ApiError(400, message, param="n")
            if num_open + slots.number > most:
                self.metrics.count(RequestOutcome.REFUSED)
                got = f"got {num_open} and {slots.number} more: try later"
                message = f"expected at most {most} unfinished answers{whose}, {got}"
                raise busy_error(message, "queue_full", self._retry_after_s())
        self.num_open += slots.number
        self._open_by[slots.caller] += slots.number

    def _check_healthy(self) -> None:
        if not self.is_healthy:
            raise stopping_error()

    def close(self, slots: AnswerSlots) -> None:
        """Give back slots that no answer has any more. O(1)."""
        self.num_open -= slots.number
        self._open_by[slots.caller] -= slots.number

    async def encode(
        self,
        encode: Callable[[Tokenizer | None], list[list[int]]],
        num_chars: Collection[int],
        slots: AnswerSlots,
        load: BodyLoad,
    ) -> list[list[int]]:
        """Call `encode` on another thread, and return the prompts as tokens.

        num_chars: the length of each text, 0 for token ids. This takes slots as `open` does, which stay taken, and
        releases `load`. If it raises or is cancelled, both are given back, but only once the encoding has ended. Raises
        what `encode` and `open` raise, and ApiError for prompts that are longer than the context. If the number of
        characters already shows that, nothing is encoded.
        """
        tokenizer = self.engine.model.tokenizer
        give_back = partial(self._give_back, slots, load)
        try:
            self._check_num_chars(max(num_chars), tokenizer)
            self.open(slots)
        except ApiError:
            load.release()
            raise
        if any(num_chars):
            prompts = await self._encoders.run(partial(encode, tokenizer), sum(num_chars), give_back)
        else:
            try:
                prompts = encode(tokenizer)
            except BaseException:
                give_back()
                raise
        longest = max(map(len, prompts))
        if longest > self._max_prompt_tokens:
            give_back()
            raise length_error(f"{self._expected_length()}, got {longest}", None)
        load.release()
        return prompts

    async def compile(self, form: Form | CallsForm, slots: AnswerSlots) -> Grammar:
        """Return the grammar of a form of answers.

        Raises ApiError. The slots that were taken for it are then given back once the compilation has ended. If no
        thread is free, the request counts as refused.
        """
        give_back = partial(self.close, slots)
        try:
            compiler = await self._make_compiler()
            self._check_healthy()  # the service, and its threads, may have stopped meanwhile
        except BaseException as error:
            give_back()
            if isinstance(error, KVBlocksError):
                raise as_api_error(error, param=form.name) from error
            raise
        try:
            return await self._compilers.run(partial(form.compile, compiler, self.engine.model.tokenizer), give_back)
        except ApiError as error:
            if error.status == 429:
                self.metrics.count(RequestOutcome.REFUSED)
            raise

    async def _make_compiler(self) -> GrammarCompiler:
        """The compiler of grammars for the model. The first call makes it, unless it was made before."""
        if self._grammar_compiler is None:
            if self._making_compiler is None:
                self._making_compiler = asyncio.create_task(asyncio.to_thread(self._new_compiler))
            self._grammar_compiler = await asyncio.shield(self._making_compiler)  # other requests may wait for it too
        return self._grammar_compiler

    def _new_compiler(self) -> GrammarCompiler:
        model = self.engine.model
        return GrammarCompiler(model.tokenizer, model.config.vocab_size, sorted(model.stop_token_ids))

    def _check_num_chars(self, num_chars: int, tokenizer: Tokenizer | None) -> None:
        most = self._max_prompt_tokens * (1 if tokenizer is None else tokenizer.longest_token)
        if num_chars > most:
            got = f"and so of at most {most} characters, got {num_chars}"
            raise length_error(f"{self._expected_length()}, {got}", None)

    def _expected_length(self) -> str:
        most = self._max_prompt_tokens
        return f"prompt: expected at most {most} tokens, as many as the model's context and the pool have room for"

    def _give_back(self, slots: AnswerSlots, load: BodyLoad) -> None:
        self.close(slots)
        load.release()

    def submit(self, answer: Answer, prompts: list[list[int]]) -> None:
        """Queue the prompts of an answer. Its slots are given back when the engine holds nothing of it any more.

        Raises ApiError if the service has stopped. Then nothing is queued, and its slots are given back.
        """
        if not self.is_healthy:
            self.close(answer.asked.slots)
            raise stopping_error()
        self._unfinished[answer] = None
        answer.prompts = prompts
        left_s = answer.start_s + self.settings.request_timeout_s - time.monotonic()
        answer.timer = asyncio.get_running_loop().call_later(left_s, self._time_out, answer)
        self.thread.submit(answer, prompts)

    def drop(self, answer: Answer) -> None:
        """Cancel an answer that nobody waits for any more. Does nothing if it has ended or never began."""
        if answer in self._unfinished:
            self._end(answer, RequestOutcome.CANCELLED)

    def fail_all(self) -> None:
        """Fail all unfinished answers, since the server stops."""
        for answer in list(self._unfinished):
            self._end(answer, RequestOutcome.FAILED, stopping_error())

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps. Raises its errors, and ApiError if it can't run."""
        if not self.thread.is_alive:
            raise stopping_error()
        seconds = self.settings.request_timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.thread.call(function)), seconds)
        except TimeoutError:
            raise ApiError(504, f"expected the engine to answer within {seconds:g} s, got nothing") from None

    def _publish(self, batch: list[tuple[Answer, Item]]) -> None:
        """Hand a batch over to the event loop. Called on the engine's thread."""
        assert self._loop is not None, "the thread is started after this"
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits any more
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _deliver(self, batch: list[tuple[Answer, Item]]) -> None:
        for answer, item in batch:
            if isinstance(item, Mark):
                self.close(answer.asked.slots)
            elif answer.outcome is not None:
                pass  # it was dropped, or its time was over
            elif isinstance(item, Piece):
                self._put(answer, item)
            elif isinstance(item, Compared):
                answer.compared = item.found
            elif isinstance(item, Marked):
                answer.marked = item.outcomes
            elif isinstance(item, Warmed):
                answer.put_warmed(item.prompt_index, item.completion)
                if answer.is_whole:
                    self._end(answer, RequestOutcome.FINISHED)
            else:
                self._end(answer, outcome_of(item), item)

    def _put(self, answer: Answer, piece: Piece) -> None:
        if not answer.has_begun:
            self.metrics.note_first_token(time.monotonic() - answer.start_s)
        self.metrics.count_token()
        answer.put(piece)
        if answer.is_whole:
            self._end(answer, RequestOutcome.FINISHED)

    def _end(self, answer: Answer, outcome: RequestOutcome, error: ApiError | None = None) -> None:
        """End an answer, once. The engine drops what it still holds of it."""
        if answer.outcome is not None:
            return
        del self._unfinished[answer]
        answer.end(outcome, error)
        if outcome is not RequestOutcome.FINISHED:
            self.thread.cancel(answer)
        self.metrics.count(outcome)
        self._ends.append(time.monotonic())

    def _time_out(self, answer: Answer) -> None:
        self._end(answer, RequestOutcome.TIMED_OUT, late_error(self.settings.request_timeout_s))

    def _retry_after_s(self) -> int:
        """An estimate of the seconds until a slot is free, from how often answers ended lately."""
        if len(self._ends) < 2:
            return 1
        return min(60, max(1, math.ceil((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))))


def outcome_of(error: ApiError) -> RequestOutcome:
    """Return the outcome of a request that gets this error. O(1)."""
    return RequestOutcome.REJECTED if error.status < 500 else RequestOutcome.FAILED
