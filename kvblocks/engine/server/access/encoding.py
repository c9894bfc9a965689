"""Texts to tokens, on threads of their own: long texts one after another, and short ones past them."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LONG_TEXT = 32 * 2**10
"""Characters of a text that waits for other long ones. A shorter one takes some 20 ms at most."""

_SHORT_ONES = 2
"""How many short texts are encoded at once."""


class Encoders:
    """The threads that encode for one server."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_ONES, "kvblocks-encode")
        self._long = ThreadPoolExecutor(1, "kvblocks-encode-long")

    async def run(self, function: Callable[[], T], num_chars: int, give_back: Callable[[], None]) -> T:
        """Return what a function gives that encodes so many characters; raise what it raises.

        give_back: called once, in the event loop, if this doesn't return a result: not before the function has ended,
        since a thread can't be stopped. If it hasn't begun when the caller is cancelled, it never does.
        """
        return await run_on(self._short if num_chars <= LONG_TEXT else self._long, function, give_back)

    def stop(self) -> None:
        """Begin nothing more. Waits for nothing."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


async def run_on(threads: ThreadPoolExecutor, function: Callable[[], T], give_back: Callable[[], None]) -> T:
    """Run a function on one of these threads, as `Encoders.run` does."""
    loop = asyncio.get_running_loop()

    def end(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
            loop.call_soon_threadsafe(give_back)

    future: Future[T] | None = None
    try:
        future = threads.submit(function)
        return await asyncio.wrap_future(future)
    except BaseException:
        # Who cancels the wait cancels what hasn't begun.
        if future is None or future.done():
            give_back()
        else:
            future.add_done_callback(end)
        raise
