"""Encoding: long texts go one by one, short ones pass them, and slots are given back when nobody waits any more."""

import asyncio
import threading
import time

import pytest

from kvblocks.server.access.encoding import LONG_TEXT, Encoders


class Work:
    """A function that begins, waits until it is let go, and ends; and what was given back for it."""

    def __init__(self, error=None):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.num_given_back = 0
        self._error = error

    def __call__(self):
        self.begun.set()
        assert self.may_end.wait(60)
        if self._error is not None:
            raise self._error
        return "tokens"

    def give_back(self):
        self.num_given_back += 1


@pytest.fixture
def run():
    """Runs a coroutine function, which gets encoders."""

    def run_with_encoders(scenario):
        async def begin():
            encoders = Encoders()
            try:
                await scenario(encoders)
            finally:
                encoders.stop()

        asyncio.run(begin())

    return run_with_encoders


def start(encoders, work, num_chars):
    return asyncio.create_task(encoders.run(work, num_chars, work.give_back))


async def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_long_texts_go_one_by_one_and_short_ones_past_them(run):
    async def scenario(encoders):
        works = [Work(), Work(), Work()]
        first, second, short = works
        tasks = [
            start(encoders, work, num_chars) for work, num_chars in zip(works, (LONG_TEXT + 1,) * 2 + (9,), strict=True)
        ]
        await until(lambda: first.begun.is_set() and short.begun.is_set())
        assert not second.begun.is_set()
        short.may_end.set()
        assert await tasks[2] == "tokens"
        first.may_end.set()
        assert await tasks[0] == "tokens"
        await until(second.begun.is_set)
        second.may_end.set()
        assert await tasks[1] == "tokens"
        assert [work.num_given_back for work in works] == [0, 0, 0]  # the caller's now

    run(scenario)


def test_what_is_being_encoded_counts_until_it_has_ended_whoever_has_gone(run):
    async def scenario(encoders):
        work = Work()
        task = start(encoders, work, LONG_TEXT + 1)
        await until(work.begun.is_set)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await asyncio.sleep(0.01)
        assert work.num_given_back == 0
        work.may_end.set()
        await until(lambda: work.num_given_back)
        assert work.num_given_back == 1

    run(scenario)


def test_what_waits_is_never_begun_once_nobody_wants_it(run):
    async def scenario(encoders):
        first, second, third = works = [Work(), Work(), Work()]
        tasks = [start(encoders, work, LONG_TEXT + 1) for work in works]
        await until(first.begun.is_set)
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        assert second.num_given_back == 1  # at once
        first.may_end.set()
        third.may_end.set()
        assert await tasks[2] == "tokens"
        assert not second.begun.is_set()

    run(scenario)


def test_threads_that_take_nothing_more_give_back_too(run):
    async def scenario(encoders):
        work = Work()
        encoders.stop()
        for num_chars in (5, LONG_TEXT + 1):
            with pytest.raises(RuntimeError):
                await start(encoders, work, num_chars)
        assert (work.num_given_back, work.begun.is_set()) == (2, False)

    run(scenario)


def test_what_cannot_be_encoded_gives_back(run):
    async def scenario(encoders):
        work = Work(ValueError("no"))
        work.may_end.set()
        with pytest.raises(ValueError, match="no"):
            await start(encoders, work, 5)
        assert work.num_given_back == 1

    run(scenario)
