"""Connections: how many there may be, and how long each may take for a request's head and for reading its answer.

uvicorn bounds how long a connection may be idle between two requests, and how large a head may be. This module adds
limits that uvicorn has no option for. Bodies have a time limit of their own (`bodies`).
"""

import asyncio
import errno
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvblocks.engine.server.errors import ApiError
from kvblocks.engine.server.wire import encode_json

logger = logging.getLogger("kvblocks.server")

HEAD_TIMEOUT_S = 10.0
"""Time limit for the head of a request, from the connection's beginning or the end of the last answer."""

READ_TIMEOUT_S = 60.0
"""How long a client may take to read what has been sent to it."""

SPARE_DESCRIPTORS = 128
"""File descriptors that are kept for files other than connections."""

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SELDOM_S = 60.0


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


class BoundedProtocol(H11Protocol):
    """One connection. `bounded` makes a subclass for a server.

    max_connections: of the server; a connection beyond them is answered 503 and closed. too_many: warns of those.
    """

    max_connections: int
    too_many: SeldomWarning

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request's head, or refuse the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.too_many.warn()
            transport.write(_refusal(self.max_connections))
            transport.close()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take the bytes that the client sent. A whole head ends the wait for it."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        """Wait for the next request's head, unless it is there already: clients may pipeline requests."""
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:
            self._wait_for_head()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server sends: wait up to READ_TIMEOUT_S."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough: end the wait."""
        super().resume_writing()
        _cancel(self._read_timer)
        self._read_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waits."""
        _cancel(self._head_timer)
        _cancel(self._read_timer)
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing when a client asks for another protocol; it is answered in HTTP/1.1.

        uvicorn would advise to install a library for WebSockets, which this server doesn't use.
        """

    def _wait_for_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end)

    def _end(self) -> None:
        """Close the connection. If it has bytes to send, which may go on for ever, abort it after READ_TIMEOUT_S."""
        if self.transport.get_write_buffer_size():
            self._head_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)
        else:
            self.transport.close()


def bounded(max_connections: int) -> type[BoundedProtocol]:
    """Return the connection class of a server with at most `max_connections` connections."""
    too_many = SeldomWarning(f"expected at most {max_connections} connections (--max-connections), got more: refused")
    return type("Connection", (BoundedProtocol,), {"max_connections": max_connections, "too_many": too_many})


def count_connections(max_connections: int) -> int:
    """Return how many connections there may be. It is less than asked if this process may open too few files."""
    try:
        import resource
    except ImportError:  # not POSIX
        return max_connections
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if most < 0 else max(1, min(max_connections, most - SPARE_DESCRIPTORS))


def log_shortage_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Make an event loop log a shortage of file descriptors for connections seldom, and in one line.

    asyncio would log a traceback for each failed accept, thousands a second. It retries a second later anyway.
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


def _refusal(max_connections: int) -> bytes:
    error = ApiError(503, f"expected at most {max_connections} connections, got more: try later", code="connections")
    body = encode_json(error.to_json())
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
