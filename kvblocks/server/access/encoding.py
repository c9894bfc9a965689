"""Encodes texts to tokens, on threads of its own.

Long texts are encoded one by one; short texts don't wait for them.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LONG_TEXT = 32 * 2**10
"""A text of more characters than this waits for other long texts. A shorter one takes at most about 20 ms."""

_SHORT_ONES = 2
"""How many short texts are encoded at once."""


class Encoders:
    """The encoding threads of one server."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_ONES, "kvblocks-encode")
        self._long = ThreadPoolExecutor(1, "kvblocks-encode-long")

    async def run(self, function: Callable[[], T], num_chars: int, give_back: Callable[[], None]) -> T:
        """Run a function that encodes `num_chars` characters, and return or raise what it does.

        give_back: called once, in the event loop, if this call doesn't return a result. That happens only when the
        function has ended, since a thread can't be stopped. A function that hasn't begun when the caller is cancelled
        never begins.
        """
        return await run_on(self._short if num_chars <= LONG_TEXT else self._long, function, give_back)

    def stop(self) -> None:
        """Begin no more functions, without waiting for those that run."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


async def run_on(threads: ThreadPoolExecutor, function: Callable[[], T], give_back: Callable[[], None]) -> T:
    """Run a function on one of these threads, as `Encoders.run` does."""
    loop = asyncio.get_running_loop()

    def end(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing to give back to
            loop.call_soon_threadsafe(give_back)

    future: Future[T] | None = None
    try:
        future = threads.submit(function)
        return await asyncio.wrap_future(future)
    except BaseException:
        # Cancelling the wait cancels the function too if it hasn't begun.
        if future is None or future.done():
            give_back()
        else:
            future.add_done_callback(end)
        raise
