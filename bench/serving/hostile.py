"""Hostile clients for bench.serving.bounds. Each attack is made by a process of its own.

    python -m bench.serving.hostile URL "tiny chunks" 8 1.0    # clients, and their pause in seconds

repeats an attack from when it prints "begun" until its standard input ends. Then it prints how often each outcome came,
as JSON.
"""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from bench.serving.hostile_bodies import CHAT, FILLING, NEW_BODIES, OLD_BODIES

TINY_CHUNK = b"1\r\n \r\n"
TINY_CHUNK_RATE = 400_000.0  # bytes a second
TICK_S = 0.02
TIMEOUT_S = 120.0
_JSON = b"Content-Type: application/json\r\n"
_GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n"
_CLOSED = (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Server:
    """The attacked server, when the attack ends, and its outcomes so far. pause_s: the pause between two tries."""

    host: str
    port: int
    pause_s: float
    has_ended: asyncio.Event
    outcomes: Counter[str]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Give a connection, which is closed at the end."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def pause(self, seconds: float | None = None) -> None:
        """Wait, but not beyond the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.has_ended.wait(), self.pause_s if seconds is None else seconds)


Attempt = Callable[[Server], Awaitable[str]]


@dataclass(frozen=True)
class Attack:
    """An attack that clients repeat. num_clients: None for the number that the bench is given.

    leaves_room: whether others' chats must be answered meanwhile, and soon. is_new: whether the bounds that it tests
    came later than those of the others.
    """

    attempt: Attempt
    num_clients: int | None = None
    leaves_room: bool = True
    is_new: bool = True


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """Return a request with a JSON body."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n" % (path.encode(), _JSON, len(body))
    return head + b"".join(headers) + b"\r\n" + body


async def outcome_of(reader: asyncio.StreamReader) -> str:
    """Return the status of the next answer, and an error's code. The rest of a stream isn't read."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
    except _CLOSED:
        return "closed"
    status = head.split(b" ", 2)[1].decode()
    code = json.loads(body)["error"].get("code") if status >= "400" and b'"error"' in body else None
    return f"{status} {code}" if code else status


async def send(server: Server, request: bytes) -> str:
    """Send bytes as fast as possible, and return the outcome."""
    async with server.connect() as (reader, writer):
        writer.write(request)
        return await outcome_of(reader)


async def send_body(server: Server, path: str, make: Callable[[], bytes]) -> str:
    """Send a body."""
    return await send(server, post(path, make()))


async def stream(server: Server, head: bytes, part: bytes, rate: float) -> str:
    """Send a head, then the same part repeatedly at `rate` bytes per second, until the server answers or closes."""
    async with server.connect() as (reader, writer):
        writer.write(head)
        answer = asyncio.create_task(outcome_of(reader))
        parts = part * max(1, int(rate * TICK_S / len(part)))
        while not server.has_ended.is_set() and not writer.is_closing():
            try:
                writer.write(parts)
                await writer.drain()
            except OSError:
                break
            await asyncio.sleep(len(parts) / rate)
        if not answer.done():
            await asyncio.wait({answer}, timeout=0.1)
        if not answer.done():
            answer.cancel()
            return "not answered"
        return answer.result()


async def hold(server: Server, sent: bytes) -> str:
    """Send bytes, and wait until the server closes."""
    async with server.connect() as (reader, writer):
        writer.write(sent)
        ended = asyncio.create_task(server.has_ended.wait())
        reading = asyncio.create_task(reader.read(1))
        done, _ = await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, reading):
            task.cancel()
        return ("answered" if reading.result() else "closed") if reading in done else "held to the end"


async def read_nothing(server: Server) -> str:
    """Ask for a lot, and never read it."""
    async with server.connect() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write((_GET % b"/metrics" + b"\r\n") * 8)
        await server.pause(3.0)
        return "left"


async def flood(server: Server, path: str) -> str:
    """Ask 16 questions at once, and another one whenever one is answered."""
    question = _GET % path.encode() + b"\r\n"
    async with server.connect() as (reader, writer):
        writer.write(question * 16)
        while not server.has_ended.is_set():
            answers = (await reader.read(2**18)).count(b"HTTP/1.1 ")
            if not answers and reader.at_eof():
                return "closed"
            server.outcomes["answered"] += answers
            writer.write(question * answers)
        return "flooded to the end"


async def hold_unread(server: Server) -> str:
    """Ask 16 times for what is large, and read nothing until the server closes."""
    async with server.connect() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write((_GET % b"/docs" + b"\r\n") * 16)
        while not server.has_ended.is_set() and not writer.is_closing():
            await server.pause(0.2)
        return "left"


async def go_away(server: Server, *, reset: bool) -> str:
    """Ask for a long answer, and disconnect while it is generated."""
    body = b'{"prompt": "hello", "max_tokens": 500, "ignore_eos": true, "stream": true}'
    async with server.connect() as (reader, writer):
        writer.write(post("/v1/completions", body))
        await reader.read(100)
        if reset:
            own: socket.socket = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "gone"


def _head(path: str, *lines: bytes, is_post: bool = True) -> bytes:
    method = b"POST" if is_post else b"GET"
    return method + b" %b HTTP/1.1\r\nHost: localhost\r\n%b" % (path.encode(), _JSON) + b"".join(lines) + b"\r\n"


def _half_a_body(path: str) -> bytes:
    return post(path, b" " * 100)[:-50]


_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_UNWANTED = _head("/health", _CHUNKED, is_post=False)
_TWO_LENGTHS = _head(CHAT, b"Content-Length: 5\r\n", _CHUNKED) + b"0\r\n\r\n" + _GET % b"/health" + b"\r\n"


def _streamed(head: bytes, part: bytes, rate: float = 100e6) -> Attempt:
    return partial(stream, head=head, part=part, rate=rate)


# Attacks by the bytes of connections, rather than by what a whole body says.
_OLD_BYTES: dict[str, Attack] = {
    "half a head": Attack(partial(hold, sent=_GET % b"/health")),
    "headers without end, slowly": Attack(_streamed(_GET % b"/health", b"X-A: b\r\n", 400.0)),
    "a body nobody wants, slowly": Attack(_streamed(_head("/health", b"Content-Length: 100000\r\n"), b"a", 50.0)),
    "half a body": Attack(partial(hold, sent=_half_a_body(CHAT))),
    "a client that reads nothing": Attack(read_nothing),
    "a client that goes away": Attack(partial(go_away, reset=False)),
    "a client that is killed": Attack(partial(go_away, reset=True)),
    "two lengths": Attack(partial(send, request=_TWO_LENGTHS)),
    "a body of 15 MB, announced": Attack(partial(send, request=post(CHAT, b" " * 15_000_000))),
    "a body of 20 MB, not announced": Attack(
        partial(send, request=_head(CHAT, _CHUNKED) + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 610)
    ),
    "requests sent at once": Attack(partial(send, request=(_GET % b"/health" + b"\r\n") * 3)),
}
_NEW_BYTES: dict[str, Attack] = {
    "tiny chunks": Attack(_streamed(_head(CHAT, _CHUNKED), TINY_CHUNK, TINY_CHUNK_RATE), 1),
    "tiny chunks nobody wants": Attack(_streamed(_UNWANTED, TINY_CHUNK, TINY_CHUNK_RATE), 1),
    "tiny chunks, fast": Attack(_streamed(_head(CHAT, _CHUNKED), TINY_CHUNK * 1000)),
    "a body nobody wants, fast": Attack(_streamed(_head("/health", b"Content-Length: 9999999999\r\n"), b"a" * 65536)),
    "a chunk's extension without end": Attack(_streamed(_head(CHAT, _CHUNKED) + b"1;", b"a" * 65536)),
    "a header without end": Attack(_streamed(_GET % b"/health" + b"X-A: ", b"a" * 65536)),
    "headers without end, fast": Attack(_streamed(_GET % b"/health", b"X-A: b\r\n" * 1000)),
    "requests without end": Attack(_streamed(b"", (_GET % b"/health" + b"\r\n") * 1000)),
    "1,000 idle connections": Attack(partial(hold, sent=b""), 1000),
    "1,000 halves of a head": Attack(partial(hold, sent=_GET % b"/health"), 1000),
    "1,000 halves of a body": Attack(partial(hold, sent=_half_a_body(CHAT)), 1000, leaves_room=False),
    "1,000 halves of an operator's body": Attack(
        partial(hold, sent=_half_a_body("/v1/cache/reset")), 1000, leaves_room=False
    ),
    "1,000 halves, a path with escapes": Attack(
        partial(hold, sent=_half_a_body("/v1/cache/%77arm")), 1000, leaves_room=False
    ),
    "a flood of /metrics": Attack(partial(flood, path="/metrics"), 64, leaves_room=False),
    "a flood of /metrics, 600 connections": Attack(partial(flood, path="/metrics"), 600, leaves_room=False),
    "660 clients that read nothing": Attack(hold_unread, 660, leaves_room=False),
}
ATTACKS: dict[str, Attack] = {
    **_NEW_BYTES,
    **{
        name: Attack(partial(send_body, path=path, make=make), leaves_room=name not in FILLING)
        for name, (path, make) in NEW_BODIES.items()
    },
    **{name: Attack(attack.attempt, is_new=False) for name, attack in _OLD_BYTES.items()},
    **{
        name: Attack(partial(send_body, path=path, make=make), is_new=False)
        for name, (path, make) in OLD_BODIES.items()
    },
}


async def attack(url: str, name: str, num_clients: int, pause_s: float) -> Counter[str]:
    """Make an attack until the standard input ends. Returns how often each outcome came.

    Tries that are under way two seconds later count as "not answered".
    """
    parts, chosen = urlsplit(url), ATTACKS[name]
    server = Server(str(parts.hostname), int(parts.port or 80), pause_s, asyncio.Event(), Counter())

    async def repeat() -> None:
        while not server.has_ended.is_set():
            try:
                outcome = await chosen.attempt(server)
            except _CLOSED as error:
                outcome = type(error).__name__
            server.outcomes[outcome] += 1
            await server.pause()

    tasks = [asyncio.create_task(repeat()) for _ in range(chosen.num_clients or num_clients)]
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.has_ended.set()
    _, under_way = await asyncio.wait(tasks, timeout=2.0)
    for task in under_way:
        task.cancel()
        server.outcomes["not answered"] += 1
    return server.outcomes


if __name__ == "__main__":
    _, given_url, given_name, given_clients, given_pause_s = sys.argv
    print(json.dumps(asyncio.run(attack(given_url, given_name, int(given_clients), float(given_pause_s)))), flush=True)
