"""Bodies that nobody reads: small ones are read off, and connections with others are closed after the answer."""

import asyncio

import pytest

from kvblocks.server.access import unread
from kvblocks.server.access.unread import MAX_UNREAD_BYTES, UnreadBodies


async def answer(scope, receive, send):
    """Answer without a look at the body."""
    await send({"type": "http.response.start", "status": 200, "headers": scope["answer_headers"]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def ask(headers, parts, app=answer, answer_headers=()):
    """The first message of an answer, and how many parts were received. With the last part the body ends.

    If it is None, it doesn't come.
    """
    waiting, sent = list(parts), []

    async def receive():
        part = waiting.pop(0)
        if part is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": headers, "answer_headers": list(answer_headers)}
    asyncio.run(UnreadBodies(app)(scope, receive, send))
    return sent[0], len(parts) - len(waiting)


CLOSE = (b"connection", b"close")
CHUNKED = [(b"transfer-encoding", b"chunked")]


def test_a_small_body_is_read_off():
    message, num_read = ask(CHUNKED, [b"a", b"b", b"c"])
    assert CLOSE not in message["headers"]
    assert num_read == 3


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_without_a_body_nothing_is_received(headers):
    message, num_read = ask(headers, [b"a"])
    assert CLOSE not in message["headers"]
    assert num_read == 0


@pytest.mark.parametrize(
    ("headers", "num_read"),
    [
        ([(b"content-length", str(MAX_UNREAD_BYTES + 1).encode())], 0),
        ([(b"content-length", b"10"), (b"expect", b"100-continue")], 0),
        (CHUNKED, 3),
    ],
)
def test_the_connection_of_a_larger_one_is_closed(headers, num_read):
    message, read = ask(headers, [b"a" * (MAX_UNREAD_BYTES // 2)] * 9)
    assert message["headers"] == [CLOSE]
    assert read == num_read


def test_a_body_that_does_not_come_is_waited_for_a_moment(monkeypatch):
    monkeypatch.setattr(unread, "READ_OFF_S", 0.02)
    message, _ = ask(CHUNKED, [b"a", None])
    assert CLOSE in message["headers"]


def test_a_connection_that_is_closed_anyway_is_not_read():
    message, num_read = ask(CHUNKED, [b"a", b"b"], answer_headers=[CLOSE])
    assert message["headers"] == [CLOSE]
    assert num_read == 0


def test_what_the_application_reads_is_its_own():
    async def read_and_answer(scope, receive, send):
        assert [(await receive())["body"] for _ in range(2)] == [b"a", b"b"]
        await answer(scope, receive, send)

    message, num_read = ask(CHUNKED, [b"a", b"b"], read_and_answer)
    assert CLOSE not in message["headers"]
    assert num_read == 2
