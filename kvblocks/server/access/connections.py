"""Connections: how many there may be, how long each may take, and how much work its bytes may cause.

uvicorn bounds how long a connection may be idle between two requests. This module adds limits that uvicorn has no
option for. Bodies have a time limit of their own (`bodies`).

The parser is httptools, in C. It takes 0.3 µs per chunk, where h11 takes 8 µs, so a body of tiny chunks can't keep the
event loop busy. httptools has no limits of its own, so they are here. The gate refuses what it lets through although
HTTP forbids it (`check_framing`).
"""

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvblocks.errors import InvalidArgumentError
from kvblocks.server.access.callers import Callers
from kvblocks.server.access.gate import has_precedence
from kvblocks.server.errors import ApiError
from kvblocks.server.wire import encode_json, send_json

logger = logging.getLogger("kvblocks.server")

HEAD_TIMEOUT_S = 10.0
"""Seconds that the head of a request may take, from the connection's beginning or the end of the last answer."""

READ_TIMEOUT_S = 60.0
"""Seconds that a client may take to read what was sent to it."""

RESERVE = 128
"""Connections beyond `max_connections`. When all others are busy, these serve only requests with precedence.

There are more of them than are accepted at once, so that other requests can't take them all before they are refused.
"""

ACCEPTED_AT_ONCE = 32
"""The most connections that the event loop accepts in a row before it does other work."""

BEGUN_AT_ONCE = 32
"""The most requests that begin in a row before the event loop does other work, such as accepting connections."""

MAX_WAITING = 2048
"""The most connections that wait to be accepted. The system drops others, whose clients try again a second later."""

READ_BYTES = 32 * 2**10
"""The most bytes of a connection that are parsed before other connections get their turn."""

MAX_HEAD_BYTES = 64 * 2**10
"""The most bytes of a request's headers and trailers, and of any incomplete part, such as half a header."""

MAX_CHUNKS = 2**14
"""The most chunks of a body. A body of the largest default size may have chunks of 256 bytes on average."""

MAX_PIPELINED = 16
"""The most requests that a client may send before the first one is answered."""

MAX_UNREAD_BYTES = 256 * 2**20
"""The most bytes of answers that wait to be read, of all clients together, not counting 64 KiB of each."""

SPARE_DESCRIPTORS = 64 + RESERVE
"""File descriptors that are kept for other files, of which a server opens some 30, and for the reserve."""

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SELDOM_S = 60.0
_AROUND_HEADER = 4  # bytes


class SeldomWarning:
    """A warning that is logged at most once a minute, with the number of times it occurred."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._num_unsaid = 0
        self._last_s: float | None = None

    def warn(self) -> None:
        """Log the warning, or count it for the next time."""
        self._num_unsaid += 1
        now_s = time.monotonic()
        if self._last_s is None or now_s - self._last_s >= _SELDOM_S:
            logger.warning("%s (%d times lately; logged once a minute)", self._message, self._num_unsaid)
            self._num_unsaid, self._last_s = 0, now_s


class RequestQueue:
    """Requests that are to begin, in turn. Hundreds of connections with requests must not hold up a new one."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def take(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], None]) -> None:
        """Call `begin` soon."""
        self._due.append(begin)
        if len(self._due) == 1:
            loop.call_soon(self._go_on, loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for _ in range(min(BEGUN_AT_ONCE, len(self._due))):
                self._due.popleft()()
        finally:
            if self._due:
                loop.call_soon(self._go_on, loop)


class UnframedCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks. A body of unknown length ends with the connection, as uvicorn's
    connection to such a client always does.
    """

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length += len(message.get("body", b""))
        await super().send(message)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounded` makes a subclass for a server.

    max_connections: how many connections may be served at once. There may be RESERVE more. Beyond that, the one that
    has waited longest for a request is closed, or else the one whose client has read nothing for longest; if there is
    none, the new one is answered 503 and closed. callers: who has precedence in the reserve. waiting: the connections
    that wait for a request, the longest waiting first; in the reserve, a request counts only once its body has come.
    unread: those with more than 64 KiB that their clients don't read. too_many: warns of refused connections.
    """

    max_connections: int
    callers: Callers
    waiting: dict["BoundedProtocol", None]
    unread: dict["BoundedProtocol", None]
    turns: RequestQueue
    too_many: SeldomWarning

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._num_chunks = 0
        self._num_vain_bytes = 0  # since anything was complete
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first is being answered; `cycle` is the last
        self._held: RequestResponseCycle | None = None  # begins when its body has come, in the reserve
        self._takes_over = False  # whether a request takes the place of one that was just answered
        self._goes_on_when_read = False  # to the next request, which was sent before the last answer was read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request's head, if need be in the place of another connection, or refuse."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # as asyncio's own transports have
            transport.max_size = READ_BYTES
        if len(self.connections) > self.max_connections + RESERVE:
            self.too_many.warn()
            longest = next(iter(self.waiting or self.unread), None)
            if longest is None:
                transport.write(_response(_full_error(self.max_connections)))
                transport.close()
                return
            longest.cut_off()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take the bytes that the client sent. Bytes that are no request, or too many, end the connection."""
        self._unset_keepalive_if_required()
        self._num_vain_bytes += len(data)
        try:
            self.parser.feed_data(data)
            if self._num_vain_bytes > MAX_HEAD_BYTES:
                raise _long_head()
        except httptools.HttpParserUpgrade as error:
            self._go_on_without_upgrade(data[error.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a method of this class raised
            self._end_with(cause if isinstance(cause, ApiError) else ApiError(400, f"expected HTTP, got {error}"))
        except ApiError as error:
            self._end_with(error)

    def on_message_begin(self) -> None:
        """A request begins: start counting what it sends."""
        super().on_message_begin()
        self._num_head_bytes = self._num_chunks = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or a trailer."""
        self._num_head_bytes += len(name) + len(value) + _AROUND_HEADER
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _long_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete, so end the wait for it."""
        if self._is_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _too_much("a connection", MAX_PIPELINED, "requests without an answer")
        self._num_vain_bytes = 0
        _cancel(self._head_timer)
        self.waiting.pop(self, None)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = UnframedCycle  # uvicorn makes it; its answer hasn't begun
        self._unanswered.append(self.cycle)
        self.headers = []  # trailers come here, and nobody reads them
        if self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) <= READ_BYTES:
            self.flow.resume_reading()  # uvicorn has paused it, but only who reads learns that the client has gone

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self._is_upgrade():
            super().on_message_complete()
            self._begin_held()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin a request, in its turn."""
        self.turns.take(self.loop, partial(self._begin, cycle, app, takes_over=self._takes_over))

    def _begin(self, cycle: RequestResponseCycle, app: Any, *, takes_over: bool) -> None:
        """Begin a request. Beyond max_connections only those with precedence begin, and when their bodies have come."""
        if cycle.disconnected or self.transport.is_closing():
            return
        if len(self.tasks) - takes_over < self.max_connections:
            super()._start_asgi_task(cycle, app)
            return
        scope: Any = cycle.scope
        is_meant = has_precedence(scope, self.callers)
        if is_meant and cycle.more_body and len(cycle.body) <= READ_BYTES:
            self._held = cycle
            self._wait_for_head()
            return
        chosen: Any = app if is_meant and not cycle.more_body else self._refuse
        super()._start_asgi_task(cycle, chosen)

    def _begin_held(self) -> None:
        """Begin the request that waits for its body, if there is one."""
        cycle, self._held = self._held, None
        if cycle is not None:
            _cancel(self._head_timer)
            self.waiting.pop(self, None)
            self._start_asgi_task(cycle, self.app)

    def _is_upgrade(self) -> bool:
        """Whether the parser would end here, since the client asks for another protocol."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Parse a request that asks for another protocol as if it didn't: its body is HTTP/1.1, and so is the answer.

        Java's client asks for HTTP/2 with each first request.
        """
        if self.parser.get_method() == b"CONNECT":  # it is being answered
            self.cycle.keep_alive = False
            return
        version = self.parser.get_http_version().encode("ascii")
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in {b"upgrade", b"http2-settings"}]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._num_vain_bytes = 0
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def on_chunk_header(self) -> None:
        """A chunk of a body begins."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            raise _too_much("a body", MAX_CHUNKS, "chunks")

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body."""
        self._num_vain_bytes = 0
        super().on_body(body)
        if self._held is not None and len(self._held.body) > READ_BYTES:
            self._begin_held()  # to be refused: the reserve has no room for large bodies

    def on_response_complete(self) -> None:
        """Wait for the next request's head. A pipelined one that is there already begins when the answer is read."""
        self._unanswered.popleft()
        if self.pipeline and self.flow.write_paused:
            self._goes_on_when_read = True
        else:
            self._go_on()

    def _go_on(self) -> None:
        has_next = bool(self.pipeline)
        self._takes_over = True
        super().on_response_complete()
        self._takes_over = False
        if not has_next and not self.transport.is_closing():
            self._wait_for_head()

    def _end_with(self, error: ApiError) -> None:
        """Answer an error, and close. A whole request is answered first. In the middle of an answer: only close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                self.flow.pause_reading()
                return
            cycle.disconnected = True
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_response(error))
        self.transport.close()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application, that there are too many connections."""
        del scope, receive
        self.too_many.warn()
        error = _full_error(self.max_connections)
        await send_json(send, error.to_json(), error.status, error.headers)

    def pause_writing(self) -> None:
        """The client reads more slowly than the server sends: wait up to READ_TIMEOUT_S, within MAX_UNREAD_BYTES."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)
        self.unread[self] = None
        while sum(map(BoundedProtocol._num_unread, self.unread)) > MAX_UNREAD_BYTES:
            max(self.unread, key=BoundedProtocol._num_unread).cut_off()

    def _num_unread(self) -> int:
        return self.transport.get_write_buffer_size()

    def cut_off(self) -> None:
        """Close the connection at once, with what its client hasn't read."""
        self.waiting.pop(self, None)
        self.unread.pop(self, None)
        self.transport.abort()

    def resume_writing(self) -> None:
        """The client has read enough: end the wait."""
        super().resume_writing()
        _cancel(self._read_timer)
        self._read_timer = None
        self.unread.pop(self, None)
        if self._goes_on_when_read:
            self._goes_on_when_read = False
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waits, and all answers: uvicorn ends only the last one, which may wait behind others."""
        _cancel(self._head_timer)
        _cancel(self._read_timer)
        self.waiting.pop(self, None)
        self.unread.pop(self, None)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing when a client asks for another protocol; it is answered in HTTP/1.1.

        uvicorn would advise to install a library for WebSockets, which this server doesn't use.
        """

    def _wait_for_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end)
        self.waiting[self] = None

    def _end(self) -> None:
        """Close the connection. If it has bytes to send, which may go on for ever, abort it after READ_TIMEOUT_S."""
        if self.transport.get_write_buffer_size():
            self._head_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)
        else:
            self.transport.close()


def bounded(max_connections: int, callers: Callers) -> type[BoundedProtocol]:
    """Return the connection class of a server with at most `max_connections` connections."""
    warning = (
        f"expected at most {max_connections} connections (--max-connections), got more: idle ones closed, or refused"
    )
    shared = {"waiting": {}, "unread": {}, "turns": RequestQueue(), "too_many": SeldomWarning(warning)}
    return type("Connection", (BoundedProtocol,), {"max_connections": max_connections, "callers": callers, **shared})


def count_connections(max_connections: int) -> int:
    """Return how many connections there may be: fewer than asked for if this process may open too few files.

    Raises InvalidArgumentError if it may open too few for even one.
    """
    try:
        import resource
    except ImportError:  # not POSIX
        return max_connections
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most <= SPARE_DESCRIPTORS:
        message = f"ulimit -n: expected a process that may open at least {SPARE_DESCRIPTORS + 1} files, got {most}"
        raise InvalidArgumentError(message)
    return max_connections if most < 0 else min(max_connections, most - SPARE_DESCRIPTORS)


def log_shortage_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Make an event loop log a shortage of file descriptors at most once a minute, in one line.

    asyncio would log a traceback for each failed accept, thousands a second. It tries again a second later anyway.
    """
    shortage = SeldomWarning("expected a free file descriptor for a connection, got none: see ulimit -n")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES and "socket" in context:
            shortage.warn()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _too_much(what: str, most: int, unit: str) -> ApiError:
    return ApiError(400, f"expected {what} of at most {most} {unit}, got more", code="too_much")


def _long_head() -> ApiError:
    return _too_much("a head, or a line of a body,", MAX_HEAD_BYTES, "bytes")


def _full_error(max_connections: int) -> ApiError:
    message = f"expected at most {max_connections} connections, got more: try later"
    return ApiError(503, message, code="connections", headers={"Connection": "close", "Retry-After": "1"})


def _response(error: ApiError) -> bytes:
    """A whole answer, for connections without a request."""
    body = encode_json(error.to_json())
    headers = {"Content-Type": "application/json", "Content-Length": len(body), **error.headers, "Connection": "close"}
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *[f"{name}: {value}" for name, value in headers.items()],
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
