"""Compiles forms of answers to grammars, on threads of their own. A request waits for at most a second.

A thread can't be stopped, so a longer compilation goes on, without the interpreter's lock, until the compiler's own
limits end it. What its request has reserved is given back then.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvblocks.server.access.encoding import run_on
from kvblocks.server.errors import ApiError, busy_error

T = TypeVar("T")

COMPILE_S = 1.0
_AT_ONCE = 2


class Compilers:
    """The compiling threads of one server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "kvblocks-compile")

    async def run(self, function: Callable[[], T], give_back: Callable[[], None]) -> T:
        """Run a function on a thread, and return or raise what it does.

        Raises ApiError: 400 if the function takes longer than COMPILE_S, 429 if no thread is free for that long.
        give_back: see `Encoders.run`.
        """
        has_begun = threading.Event()

        def begin() -> T:
            has_begun.set()
            return function()

        try:
            async with asyncio.timeout(COMPILE_S) as limit:
                return await run_on(self._threads, begin, give_back)
        except TimeoutError:
            if not limit.expired():
                raise
            if not has_begun.is_set():
                raise busy_error(
                    "expected a thread for a grammar, got other grammars: try later", "compiling", 1
                ) from None
            message = f"expected a form of answers that compiles within {COMPILE_S:g} s, got one that takes longer"
            raise ApiError(400, message, code="compile_timeout") from None

    def stop(self) -> None:
        """Begin no more functions, without waiting for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
