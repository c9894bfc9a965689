"""Request bodies: of bounded size, read within bounded time, and parsed so that other requests don't wait for long.

The JSON parser keeps the interpreter's lock: for 0.1 s, if a body has 4 MiB of small values. So large bodies are parsed
one after another. After each, other work gets several times as long before the next one is parsed.
"""

import asyncio
import json
import time
from typing import Any

from starlette.requests import Request

from kvblocks.engine.collector import collector_paused
from kvblocks.engine.server.errors import ApiError, busy_error

BODY_TIMEOUT_S = 30.0

SMALL_BODY = 64 * 2**10
"""Up to so many bytes, a body is read and parsed at once. The number of connections bounds the bytes of such bodies."""

_LARGE_BODIES = 4
"""How many bodies of the largest size may be held at the same time."""

_REST = 4.0
"""After a large body is parsed, the next one waits this many times as long, so that other work has the interpreter."""

REFUSED_S = 1.0
"""Seconds that a large body without room waits before the rest of it is read, since its client may retry at once.

Otherwise the event loop of a busy server would spend its time on bytes that are thrown away.
"""

# A client doesn't see an early answer while it sends. So some bytes of a refused body are read and thrown away.
_DRAIN = 4


class Load:
    """One request's bytes, out of those that large bodies may take together. They count until `release`."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Set its bytes to a larger number. Raises ApiError, 429, if all large bodies together would be too large."""
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
    """Reads the bodies of one server. Owned by the event loop.

    max_bytes: of one body. num_bytes: of all large bodies now, each from its reading until `Load.release`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_together = _LARGE_BODIES * max(max_bytes, SMALL_BODY)
        self.num_bytes = 0
        self._parsing = asyncio.Lock()

    def nothing(self) -> Load:
        """Return a load of no bytes."""
        return Load(self)

    async def read(self, request: Request) -> Any:
        """Return the parsed body. Raises as `take` does."""
        value, load = await self.take(request)
        load.release()
        return value

    async def take(self, request: Request) -> tuple[Any, Load]:
        """Return the parsed body, and its bytes, which count until they are released.

        Raises ApiError, with no bytes taken: 415 for another content type than JSON, 413, 408, 429, 400. (Browsers send
        JSON to another site only if that site allows it. So a web page can't use a server on its reader's machine.)
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"content-type: expected application/json, got {content_type or 'none'!r:.80}")
        load = Load(self)
        try:
            return await self._parse(await self._read(request, load)), load
        except BaseException:
            load.release()
            raise

    async def _read(self, request: Request, load: Load) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                return await self._read_parts(request, load)
        except TimeoutError:
            if not limit.expired():  # another time limit has ended, such as the request's
                raise
            message = f"expected the body within {BODY_TIMEOUT_S:g} s, got less of it"
            raise ApiError(408, message, headers={"Connection": "close"}) from None

    async def _read_parts(self, request: Request, load: Load) -> bytes:
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

    async def _parse(self, body: bytes) -> Any:
        if len(body) <= SMALL_BODY:
            return _parse_json(body)
        async with self._parsing:
            begun_s = time.perf_counter()
            try:
                with collector_paused():
                    return _parse_json(body)
            finally:
                await asyncio.sleep(_REST * (time.perf_counter() - begun_s))


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise ApiError(400, "expected a JSON body, got one that is nested too deep") from None
    except ValueError as error:  # invalid UTF-8 as well
        raise ApiError(400, f"expected a JSON body, got an error: {ascii(str(error))[1:-1]:.200}") from None
