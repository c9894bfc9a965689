"""Request bodies: bounded in size, read in bounded time, and parsed so that other requests don't wait long.

The event loop parses and checks only what takes milliseconds. Two threads do it for other bodies: one for those that
may hold the interpreter's lock for a tenth of a second, and one for those in between. After each large body, other work
gets several times as long before the next one is parsed.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from kvblocks.engine.collector import collector_paused
from kvblocks.server.access.encoding import run_on
from kvblocks.server.body.parsing import SMALL_TEXT, decode_json
from kvblocks.server.errors import ApiError, busy_error

T = TypeVar("T")

BODY_TIMEOUT_S = 30.0

SMALL_BODY = 64 * 2**10
"""A body up to this many bytes doesn't wait for others. The number of connections bounds the bytes of such bodies."""

_COMPRESSED = frozenset({"gzip", "x-gzip", "deflate", "compress", "br", "zstd"})

_LARGE_BODIES = 4
"""How many bodies of the largest allowed size may be held at the same time."""

_REST = 4.0
"""After a large body was parsed, the next one waits this many times as long as that took, so that other work gets the
interpreter.
"""

REFUSED_S = 1.0
"""Seconds to wait before reading the rest of a large body that is refused, since its client may retry at once.

Otherwise a busy server's event loop would spend its time on bytes that are thrown away.
"""

# A client doesn't see an early answer while it sends. So some bytes of a refused body are read and thrown away.
_DRAIN = 4


class BodyLoad:
    """One request's share of the bytes that large bodies may take together. It counts until `release`."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raise its bytes to a larger number. Raises ApiError 429 if all large bodies together would be too large."""
        if num_bytes <= SMALL_BODY:
            return
        bodies, more = self._bodies, num_bytes - self._num_bytes
        if bodies.num_bytes + more > bodies.max_bytes_together:
            what = f"expected at most {bodies.max_bytes_together} bytes of large bodies at once, got more: try later"
            raise busy_error(what, "too_many_bytes", 1)
        bodies.num_bytes += more
        self._num_bytes = num_bytes

    def release(self) -> None:
        """Give the bytes back. A second call does nothing."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


class Bodies:
    """Reads the request bodies of one server. Owned by the event loop.

    max_bytes: the most bytes of one body. num_bytes: the bytes of all large bodies now, from reading until
    `BodyLoad.release`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_together = _LARGE_BODIES * max(max_bytes, SMALL_BODY)
        self.num_bytes = 0
        self._short = ThreadPoolExecutor(1, "kvblocks-parse")
        self._long = ThreadPoolExecutor(1, "kvblocks-parse-long")
        self._rests_until_s = 0.0

    def nothing(self) -> BodyLoad:
        """Return a load of no bytes."""
        return BodyLoad(self)

    def stop(self) -> None:
        """Stop parsing bodies, without waiting for those that are being parsed."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, check: Callable[[Any], T]) -> T:
        """Return what `check` makes of the parsed body. Raises what `take` does."""
        value, load = await self.take(request, check)
        load.release()
        return value

    async def take(self, request: Request, check: Callable[[Any], T]) -> tuple[T, BodyLoad]:
        """Return what `check` makes of the parsed body, and its load, which counts until it is released.

        check: called on another thread, unless the body is small. Raises what it raises, and ApiError: 400 (no JSON),
        408 (too slow), 413 (too large), 415 (compressed, or no JSON) or 429 (busy). After an error no bytes count.
        (Browsers send JSON to another site only if that site allows it, so a web page can't use a server on its
        reader's machine.)
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"content-type: expected application/json, got {content_type or 'none'!r:.80}")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding in _COMPRESSED:  # others, such as "utf-8", are mistakes that change nothing
            raise ApiError(415, f"content-encoding: expected a body that isn't compressed, got {encoding}")
        load = BodyLoad(self)
        try:
            body = await self._read(request, load)
        except BaseException:
            load.release()
            raise
        if len(body) <= SMALL_TEXT:
            return check(decode_json(body)), load
        if len(body) <= SMALL_BODY:
            return await run_on(self._short, lambda: check(decode_json(body)), load.release), load
        return await run_on(self._long, partial(self._check, body, check), load.release), load

    async def _read(self, request: Request, load: BodyLoad) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                return await self._read_parts(request, load)
        except TimeoutError:
            if not limit.expired():  # another time limit has ended, such as the request's
                raise
            message = f"expected the body within {BODY_TIMEOUT_S:g} s, got only a part of it"
            raise ApiError(408, message, headers={"Connection": "close"}) from None

    async def _read_parts(self, request: Request, load: BodyLoad) -> bytes:
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else 0
        parts: list[bytes] = []
        num_read, refusal = 0, None
        if num_bytes <= _DRAIN * self.max_bytes:
            async for part in request.stream():
                num_read += len(part)
                if refusal is None and num_read <= self.max_bytes:
                    try:
                        load.grow(num_read)
                    except ApiError as error:
                        refusal = error
                        load.release()
                        parts.clear()
                        await asyncio.sleep(REFUSED_S)
                if refusal is not None or num_read > self.max_bytes:
                    parts.clear()
                else:
                    parts.append(part)
                if num_read > _DRAIN * self.max_bytes:
                    break
        if max(num_bytes, num_read) > self.max_bytes:
            got = num_bytes or f"more than {self.max_bytes}"
            message = f"expected a body of at most {self.max_bytes} bytes, got {got}"
            raise ApiError(413, message, code="too_large", headers={"Connection": "close"})
        if refusal is not None:
            raise refusal
        return b"".join(parts)

    def _check(self, body: bytes, check: Callable[[Any], T]) -> T:
        """Parse and check a large body, on the thread for them."""
        time.sleep(max(0.0, self._rests_until_s - time.monotonic()))
        begun_s = time.thread_time()
        try:
            with collector_paused():
                return check(decode_json(body))
        finally:
            self._rests_until_s = time.monotonic() + _REST * (time.thread_time() - begun_s)
