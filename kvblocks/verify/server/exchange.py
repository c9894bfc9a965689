"""Requests over HTTP that end in time with an answer of bounded size, whatever the server does.

httpx2's own timeouts are those of one read, so a server that sends a byte now and then would be heard for ever. Here
each request is a task of an event loop, which is cancelled when its time is over, wherever it waits.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import httpx2

MAX_ANSWER_BYTES: Final = 16 << 20

_MOST_CONNECTIONS: Final = 64
_CONNECT_S: Final = 10.0

T = TypeVar("T")


class TooLargeError(Exception):
    """The answer is larger than `MAX_ANSWER_BYTES`."""


class HttpAnswer(NamedTuple):
    """A server's answer. kind: the content type."""

    status: int
    kind: str
    content: bytes


class Exchange:
    """Sends requests from any thread, and waits for their answers. Close it."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvblocks-verify", daemon=True)
        self._http = httpx2.AsyncClient(
            base_url=base_url,
            # What is compressed may be small and become large.
            headers={**headers, "Accept-Encoding": "identity", "Content-Type": "application/json"},
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=_MOST_CONNECTIONS),
            trust_env=False,
        )
        self._thread.start()

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        if not self._loop.is_closed():
            with suppress(TimeoutError, httpx2.HTTPError):
                self._run(self._http.aclose(), _CONNECT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def ask(self, method: str, path: str, body: Any, seconds: float) -> HttpAnswer:
        """Return the answer to a request, with a body in JSON unless that is None.

        Raises TimeoutError if it isn't complete within `seconds`, TooLargeError, and httpx2.HTTPError.
        """
        return self._run(self._ask(method, path, body), seconds)

    def begin(self, path: str, body: Any, seconds: float) -> None:
        """Post a request, and close the connection when the answer's body begins, or after `seconds`."""
        with suppress(TimeoutError, httpx2.HTTPError):
            self._run(self._begin(path, body), seconds)

    async def _ask(self, method: str, path: str, body: Any) -> HttpAnswer:
        async with self._http.stream(method, path, content=_encoded(body)) as answer:
            content = bytearray()
            async for part in answer.aiter_raw():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise TooLargeError
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise httpx2.DecodingError(f"its content-encoding is {encoding[:20]!r}, which was not asked for")
            return HttpAnswer(answer.status_code, answer.headers.get("content-type", ""), bytes(content))

    async def _begin(self, path: str, body: Any) -> None:
        async with self._http.stream("POST", path, content=_encoded(body)) as answer:
            async for _ in answer.aiter_raw():
                return

    def _run(self, task: Coroutine[Any, Any, T], seconds: float) -> T:
        async def limited() -> T:
            async with asyncio.timeout(seconds):
                return await task

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()


def _encoded(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()
