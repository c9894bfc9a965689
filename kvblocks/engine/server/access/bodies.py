"""Request bodies: of bounded size, read within bounded time, and parsed so that others don't wait for it.

The parser keeps the interpreter's lock: for 0.1 s, where a body has 4 MiB of small values. So large bodies are parsed
one after another, and between two of them everybody else gets several times as long.
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
"""Bytes of a body that is read and parsed at once; what connections hold of these is bounded by their number."""

_LARGE_BODIES = 4
"""How many of the largest bodies may be here together."""

_REST = 4.0
"""After a large body was parsed, how many times as long others have the interpreter before the next one is."""

REFUSED_S = 1.0
"""How long a large body for which there is no room waits before the rest of it is read: its client may not wait itself.

What a busy server reads and throws away would otherwise keep the event loop from everybody else.
"""

# A client that is still sending doesn't see an early answer, so some of what is refused is read and thrown away.
_DRAIN = 4


class Load:
    """The bytes that one request takes of those which large bodies may have together, until `release`."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Let it be so many bytes, more than before. Raises ApiError, 429, if they are too many together."""
        if num_bytes <= SMALL_BODY:
            return
        bodies, more = self._bodies, num_bytes - self._num_bytes
        if bodies.num_bytes + more > bodies.max_bytes_together:
            what = f"expected at most {bodies.max_bytes_together} bytes of large bodies at once, got more: try later"
            raise busy_error(what, "too_many_bytes", 1)
        bodies.num_bytes += more
        self._num_bytes = num_bytes

    def release(self) -> None:
        """Give the bytes back. Nothing the second time."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


class Bodies:
    """Reads the bodies of one server. Owned by the event loop.

    max_bytes: of one body. num_bytes: what large ones take now, from reading until `Load.release`.
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

        Raises ApiError, with none taken: 415 for another content type (browsers send JSON to other sites only when
        these agree, so a web page can't use a server on its reader's machine), 413, 408, 429, 400.
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
            if not limit.expired():  # a wider limit, such as the request's
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
    except ValueError as error:  # of UTF-8 as well
        raise ApiError(400, f"expected a JSON body, got an error: {ascii(str(error))[1:-1]:.200}") from None
