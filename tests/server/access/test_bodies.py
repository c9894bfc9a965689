"""Bodies: what large ones take together, how they are read, and that parsing them leaves the interpreter to others."""

import asyncio
import gc
import json
import threading
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from kvblocks.server.access import bodies
from kvblocks.server.access.bodies import REFUSED_S, SMALL_BODY, Bodies, BodyLoad
from kvblocks.server.body.parsing import SMALL_TEXT
from kvblocks.server.errors import ApiError

LARGE = SMALL_BODY + 10_000


def request_of(*parts, declared=None):
    """A request whose body comes in these parts; the last one ends it unless it is None, then nothing more comes."""
    waiting = list(parts)

    async def receive():
        part = waiting.pop(0)
        if part is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    headers = [(b"content-type", b"application/json")]
    if declared is not None:
        headers.append((b"content-length", str(declared).encode()))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def body_of(size):
    return json.dumps("a" * (size - 2)).encode()


def same(value):
    return value


def take(reader, *parts, **options):
    return asyncio.run(reader.take(request_of(*parts, **options), same))


def test_a_large_body_counts_until_it_is_released():
    reader = Bodies(100_000)
    value, load = take(reader, body_of(LARGE)[:50_000], body_of(LARGE)[50_000:])
    assert value == "a" * (LARGE - 2)
    assert reader.num_bytes == LARGE
    load.release()
    load.release()
    assert reader.num_bytes == 0


def test_a_small_body_counts_for_nothing():
    reader = Bodies(100_000)
    reader.num_bytes = reader.max_bytes_together
    assert take(reader, body_of(SMALL_BODY))[0] == "a" * (SMALL_BODY - 2)
    assert reader.num_bytes == reader.max_bytes_together


@pytest.mark.parametrize("declared", [None, LARGE])
def test_a_large_body_too_many_is_refused(declared, monkeypatch):
    monkeypatch.setattr(bodies, "REFUSED_S", 0.0)
    reader = Bodies(100_000)
    loads = [take(reader, body_of(100_000))[1] for _ in range(4)]
    assert reader.num_bytes == reader.max_bytes_together == 400_000
    with pytest.raises(ApiError, match="at most 400000 bytes of large bodies at once") as raised:
        take(reader, body_of(LARGE), declared=declared)
    assert (raised.value.status, raised.value.code) == (429, "too_many_bytes")
    assert int(raised.value.headers["Retry-After"]) >= 1
    assert reader.num_bytes == 400_000
    loads[0].release()
    assert take(reader, body_of(LARGE))[0]


def test_the_rest_of_a_body_that_is_refused_is_left_where_it_is_for_a_while(monkeypatch):
    """The wait happens once. Otherwise a client that retries at once would keep the event loop reading all the time."""
    read, rests = [], []

    async def receive():
        read.append(LARGE)
        return {"type": "http.request", "body": b"a" * LARGE, "more_body": len(read) < 3}

    async def rest(seconds):
        rests.append((seconds, len(read)))

    reader = Bodies(3 * LARGE)
    reader.num_bytes = reader.max_bytes_together
    monkeypatch.setattr(bodies.asyncio, "sleep", rest)
    request = Request(request_of().scope, receive)
    with pytest.raises(ApiError, match="bytes of large bodies at once"):
        asyncio.run(reader.take(request, same))
    assert rests == [(REFUSED_S, 1)]
    assert len(read) == 3


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((b"{" * LARGE,), 400),
        ((b"[" * LARGE,), 400),
        ((b"\xff" * LARGE,), 400),
        ((b"a" * LARGE, b"b" * LARGE), 413),
        ((b"a" * LARGE, None), 408),
    ],
)
def test_a_body_that_is_refused_takes_nothing(parts, status, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.05)
    reader = Bodies(100_000)
    with pytest.raises(ApiError) as raised:
        take(reader, *parts)
    assert raised.value.status == status
    assert reader.num_bytes == 0


def test_a_body_whose_reader_is_cancelled_takes_nothing():
    reader = Bodies(100_000)

    async def run():
        with pytest.raises(TimeoutError):  # the request's limit, not the body's
            async with asyncio.timeout(0.02):
                await reader.take(request_of(b"a" * LARGE, None), same)

    asyncio.run(run())
    assert reader.num_bytes == 0


@pytest.mark.parametrize("size", [100, SMALL_TEXT + 1, SMALL_BODY + 1])
def test_what_takes_long_is_checked_on_another_thread(size):
    reader = Bodies(100_000)
    checked = []

    def check(value):
        checked.append((threading.current_thread() is threading.main_thread(), gc.isenabled()))
        return len(value)

    value, load = asyncio.run(reader.take(request_of(body_of(size)), check))
    assert value == size - 2
    assert checked == [(size <= SMALL_TEXT, size <= SMALL_BODY)]
    assert gc.isenabled()
    load.release()


def test_a_body_whose_check_fails_takes_nothing():
    def check(_):
        raise ApiError(400, "expected another body")

    reader = Bodies(100_000)
    for size in (100, SMALL_TEXT + 1, SMALL_BODY + 1):
        with pytest.raises(ApiError, match="another body"):
            asyncio.run(reader.take(request_of(body_of(size)), check))
        assert reader.num_bytes == 0


def test_a_body_counts_until_its_check_has_ended_though_nobody_waits_any_more(monkeypatch):
    reader, has_begun, gate, given_back = Bodies(100_000), threading.Event(), threading.Event(), asyncio.Event()
    release = BodyLoad.release

    def release_and_say(load):
        release(load)
        given_back.set()

    monkeypatch.setattr(BodyLoad, "release", release_and_say)

    def check(_):
        has_begun.set()
        gate.wait(60)

    async def run():
        taking = asyncio.create_task(reader.take(request_of(body_of(LARGE)), check))
        assert await asyncio.to_thread(has_begun.wait, 60)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert reader.num_bytes == LARGE
        gate.set()
        async with asyncio.timeout(30):
            await given_back.wait()
        assert reader.num_bytes == 0

    asyncio.run(run())


def test_after_a_large_body_others_have_the_interpreter_before_the_next_one_is_parsed(monkeypatch):
    now, rests = [100.0], []

    def rest(seconds):
        rests.append(round(seconds, 3))
        now[0] += seconds

    clock = SimpleNamespace(sleep=rest, monotonic=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(bodies, "time", clock)

    def check(_):
        now[0] += 0.1

    async def run():
        reader = Bodies(100_000)
        for size in (LARGE, LARGE, 10, SMALL_BODY, LARGE):
            _, load = await reader.take(request_of(body_of(size)), check)
            load.release()
        now[0] += 10.0
        await reader.take(request_of(body_of(LARGE)), check)

    asyncio.run(run())
    assert rests == [0.0, 0.4, 0.2, 0.0]  # two that aren't large came between
