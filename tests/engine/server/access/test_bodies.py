"""Bodies: what large ones take together, how they are read, and that parsing them leaves the interpreter to others."""

import asyncio
import gc
import json

import pytest
from starlette.requests import Request

from kvblocks.engine.server.access import bodies
from kvblocks.engine.server.access.bodies import REFUSED_S, SMALL_BODY, Bodies
from kvblocks.engine.server.errors import ApiError

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


def take(reader, *parts, **options):
    return asyncio.run(reader.take(request_of(*parts, **options)))


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
        asyncio.run(reader.take(request))
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
                await reader.take(request_of(b"a" * LARGE, None))

    asyncio.run(run())
    assert reader.num_bytes == 0


def test_after_a_large_body_others_have_the_interpreter_before_the_next_one_is_parsed(monkeypatch):
    parsed, collected = [], []

    def parse(body):
        parsed.append(len(body))
        collected.append(gc.isenabled())

    monkeypatch.setattr(bodies, "_parse_json", parse)
    rests = []

    async def rest(seconds):
        assert seconds > 0
        rests.append(asyncio.Event())
        await rests[-1].wait()

    async def run():
        reader = Bodies(100_000)
        monkeypatch.setattr(bodies.asyncio, "sleep", rest)
        large = [asyncio.create_task(reader.take(request_of(body_of(size)))) for size in (LARGE, LARGE + 1)]
        while not rests:
            await asyncio.wait(large, timeout=0.001)
        await reader.take(request_of(body_of(10)))  # past them
        assert parsed == [LARGE, 10]
        rests[0].set()
        await large[0]
        while len(rests) < 2:
            await asyncio.wait(large[1:], timeout=0.001)
        rests[1].set()
        await large[1]

    asyncio.run(run())
    assert parsed == [LARGE, 10, LARGE + 1]
    assert collected == [False, True, False]  # the collector
    assert gc.isenabled()
