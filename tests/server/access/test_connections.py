"""Connections: their number, the time for heads and for reading, framing, and a process without descriptors."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
import threading
import time
from functools import partial

import httpx2
import openai
import pytest
from server.server_harness import (
    HELLO,
    Gate,
    connect,
    raw_request,
    read_all,
    running_server,
    serving,
    tiny_loaded,
    wait_for,
)

from kvblocks.errors import InvalidArgumentError
from kvblocks.server.access import connections
from kvblocks.server.access.callers import Caller, TenantKey, digest_of
from kvblocks.server.access.connections import (
    BEGUN_AT_ONCE,
    MAX_PIPELINED,
    RESERVE,
    SPARE_DESCRIPTORS,
    RequestQueue,
    SeldomWarning,
    count_connections,
)
from kvblocks.server.run import serve
from kvblocks.server.settings import CacheSettings, ServerSettings

resource = pytest.importorskip("resource", reason="limits of open files are POSIX'")
MOST = 4


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, max_connections=MOST) as running:
        yield running


@pytest.fixture(autouse=True)
def alone(server):
    wait_for(lambda: not server.server.server_state.connections)


def is_closed(connection, seconds=30):
    """Whether the other side closes before it sends anything. Waits for that."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(server, head):
    asked = HELLO | {"max_tokens": 20, "stream": True, "ignore_eos": True}
    for wanted in ({}, {"max_tokens": 0}):
        with connect(server) as connection:
            connection.sendall(raw_request(json.dumps(asked | wanted).encode()).replace(b"HTTP/1.1\r\n", head))
            reply_head, _, body = read_all(connection).partition(b"\r\n\r\n")
        fields = reply_head.lower().split(b"\r\n")
        assert b"connection: close" in fields and not any(field.startswith(b"transfer-encoding") for field in fields)
        if wanted:  # an error, whose length is known
            assert fields[0].endswith(b" 400 bad request") and b"content-length: %d" % len(body) in fields
            continue
        *events, rest = body.split(b"\n\n")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
        assert (events[-1], rest) == (b"data: [DONE]", b"") and len(chunks) > 1
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def busy(server, number):
    """So many connections with requests whose bodies don't come."""
    held = []
    for _ in range(number):
        held.append(connect(server))
        held[-1].sendall(raw_request(b" " * 100)[:-50])
    wait_for(lambda: len(server.server.server_state.tasks) == number)
    return held


@pytest.fixture
def all_busy(server):
    held = busy(server, MOST)
    yield held
    for connection in held:
        connection.close()


def ask(connection, path):
    """The status of an answer, and an error's words."""
    connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["message"] if b'"error"' in body else None


def test_when_all_are_busy_operators_paths_alone_are_served(server, all_busy, caplog):
    with caplog.at_level(logging.WARNING, "kvblocks.server"):
        for path, status in (("/health", 200), ("/v1/cache/stats", 200), ("/v1/models", 503), ("/", 503)):
            with connect(server) as another:
                got, words = ask(another, path)
            assert got == status, path
            assert words == (None if status == 200 else f"expected at most {MOST} connections, got more: try later")
    assert len([record for record in caplog.records if "connections" in record.message]) <= 1
    all_busy.pop().close()
    wait_for(lambda: len(server.server.server_state.tasks) == MOST - 1)
    with connect(server) as another:
        assert ask(another, "/v1/models")[0] == 200


def test_who_waits_longest_gives_its_place_to_a_new_connection(server):
    waiting = [connect(server) for _ in range(MOST + RESERVE)]
    waiting[0].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")  # now the second has waited longest
    assert waiting[0].recv(1000).startswith(b"HTTP/1.1 200 ")
    with connect(server) as another:
        assert is_closed(waiting[1])
        assert ask(another, "/v1/models")[0] == 200
    for connection in (waiting[0], *waiting[2:]):
        assert ask(connection, "/health")[0] == 200
    for connection in waiting:
        connection.close()


def slow(server, path, key=None):
    """A connection with a request whose body doesn't come."""
    connection = connect(server)
    head = raw_request(b"{" + b" " * 100, path)[:-100]
    if key is not None:
        head = head.replace(b"Host:", b"Authorization: Bearer %b\r\nHost:" % key.encode())
    connection.sendall(head)
    return connection


def waits_for_a_body(server):
    return any(one._held is not None for one in server.server.server_state.connections)  # noqa: SLF001


def read_to(connection, end):
    """What comes, up to these bytes."""
    reply = b""
    while not reply.endswith(end):
        part = connection.recv(1000)
        assert part, reply
        reply += part
    return reply


RESET = "/v1/cache/reset"


def test_a_slow_body_holds_no_connection_of_the_reserve(server, all_busy, monkeypatch):
    """Without keys everybody is an operator, so a whole body must have come."""
    monkeypatch.setattr(connections, "RESERVE", 1)
    for _ in range(3):
        with slow(server, RESET) as held:
            wait_for(lambda: waits_for_a_body(server))
            with connect(server) as another:
                assert ask(another, "/health")[0] == 200
            assert is_closed(held)


def test_an_operator_is_served_by_the_reserve_when_the_body_has_come(server, all_busy):
    with slow(server, RESET) as connection:
        wait_for(lambda: waits_for_a_body(server))
        connection.sendall(b" " * 99 + b"}")
        assert read_to(connection, b"}").startswith(b"HTTP/1.1 200 ")
        connection.sendall(raw_request(b"{}", RESET))
        assert read_to(connection, b"}").startswith(b"HTTP/1.1 200 ")
    with connect(server) as connection:
        connection.sendall(raw_request(b"{" + b" " * 200_000, RESET)[:-160_000])
        assert read_all(connection).startswith(b"HTTP/1.1 503 ")


TENANT, ADMIN = "sk-aaaaaaaaaaaaaaaa", "sk-operator-operator"


def test_the_reserve_is_for_keys_with_operators_rights_however_a_path_is_written(model):
    keys = (TenantKey(Caller(tenant="a"), digest_of(TENANT)),)
    with running_server(model, max_connections=MOST, keys=keys, admin_key=ADMIN) as server:
        held = [slow(server, "/v1/completions", TENANT) for _ in range(MOST)]
        wait_for(lambda: len(server.server.server_state.tasks) == MOST)
        for path in (
            "/v1/cache/%77arm",
            "/v1/cache/warm",
            RESET,
            "/v1/%63ache/reset",
            "http://localhost/v1/cache/reset",
        ):
            for key in (None, TENANT):
                with slow(server, path, key) as connection:
                    assert read_all(connection).startswith(b"HTTP/1.1 503 "), (path, key)
        for path in ("/%68ealth", "http://localhost/health", "/health?a"):
            with connect(server) as another:
                assert ask(another, path)[0] == 200
        with slow(server, "/v1/%63ache/reset", ADMIN) as connection:
            connection.sendall(b" " * 99 + b"}")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        for connection in held:
            connection.close()


def read_nothing(server):
    """A connection that takes only a few bytes of what it is sent."""
    url = httpx2.URL(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
    connection.settimeout(60)
    connection.connect((url.host, url.port))
    return connection


PAGE = b"x" * 8_000_000  # more than a socket holds
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def pages(server, monkeypatch):
    """The requests for /metrics so far, which get a large page."""
    asked = []

    async def page():
        asked.append(1)
        return PAGE

    monkeypatch.setattr(server.service.metrics, "page", page)
    return asked


def unread(server):
    return [one for one in server.server.server_state.connections if one.flow.write_paused]


def test_a_pipelined_request_begins_when_the_answer_before_it_is_read(server, pages):
    with read_nothing(server) as connection:
        connection.sendall(METRICS * 4)
        wait_for(lambda: unread(server))
        for _ in range(3):
            with connect(server) as another:
                assert ask(another, "/health")[0] == 200
        assert len(pages) == 1
        connection.sendall(METRICS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert read_all(connection).count(b"HTTP/1.1 200 ") == len(pages) == 5


def test_answers_that_nobody_reads_are_bounded_together(server, pages, monkeypatch):
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 2 * len(PAGE))
    held = [read_nothing(server) for _ in range(4)]
    for number, connection in enumerate(held):
        connection.sendall(METRICS)
        wait_for(lambda number=number: len(pages) == number + 1)
        wait_for(lambda: unread(server))
    wait_for(lambda: len(server.server.server_state.connections) < len(held))
    sizes = [one.transport.get_write_buffer_size() for one in server.server.server_state.connections]
    assert len(sizes) >= 2 and sum(sizes) <= 2 * len(PAGE)
    for connection in held:
        connection.close()


def test_who_reads_nothing_gives_its_place_to_a_new_connection(server, all_busy, pages, monkeypatch):
    monkeypatch.setattr(connections, "RESERVE", 2)
    held = [read_nothing(server) for _ in range(2)]
    for connection in held:
        connection.sendall(METRICS)
    wait_for(lambda: len(unread(server)) == 2)
    with connect(server) as another:
        assert ask(another, "/health")[0] == 200
    wait_for(lambda: len(unread(server)) == 1)
    for connection in held:
        connection.close()


def test_hundreds_of_requests_do_not_begin_in_a_row():
    begun = []

    async def count():
        turns, loop = RequestQueue(), asyncio.get_running_loop()
        for number in range(3 * BEGUN_AT_ONCE):
            turns.take(loop, partial(begun.append, number))
        counts = []
        while len(begun) < 3 * BEGUN_AT_ONCE:
            await asyncio.sleep(0)
            counts.append(len(begun))
        return counts

    assert asyncio.run(count()) == [BEGUN_AT_ONCE, 2 * BEGUN_AT_ONCE, 3 * BEGUN_AT_ONCE]
    assert begun == sorted(begun)


def test_with_none_that_waits_one_too_many_is_refused(server, monkeypatch):
    monkeypatch.setattr(connections, "RESERVE", 0)
    held = busy(server, MOST)
    with connect(server) as another:
        reply = read_all(another)
    assert reply.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Connection: close" in reply
    assert b"Retry-After: 1" in reply
    assert f"at most {MOST} connections" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]
    for connection in held:
        connection.close()
    wait_for(lambda: not server.server.server_state.connections)
    with server.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: localh", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"],
    ids=["nothing", "half a head", "a whole one and half of the next"],
)
def test_a_head_that_does_not_come_ends_its_connection(server, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    with connect(server) as connection:
        connection.sendall(sent)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 200 ") is (b"\r\n\r\n" in sent)


def drip(connection, part):
    """Send a part again and again until the other side closes. Returns what it answered."""
    has_ended, connection_reply = threading.Event(), []

    def send():
        while not has_ended.is_set():
            try:
                connection.sendall(part)
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(10_000):
                connection_reply.append(part)
    finally:
        has_ended.set()
        thread.join(60)
    return b"".join(connection_reply)


LONG = "a head, or a line of a body, of at most 65536 bytes"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_client_that_sends_a_little_again_and_again_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert drip(connection, b"X-A: b\r\n") == b""


@pytest.mark.parametrize("length", [b"Content-Length: 100000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_connection_whose_body_nobody_wants_is_closed(server, length):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n")
        reply = drip(connection, b"1\r\na\r\n")
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in reply


@pytest.mark.parametrize(
    ("begin", "part", "words"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 1000, "a body of at most 16384 chunks"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 5000, LONG),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n" * 1000, LONG),
        (HEAD, b"A: b\r\n" * 1000, LONG),
        (HEAD + b"A: ", b"a" * 5000, LONG),
        (b"GET /", b"a" * 5000, LONG),
    ],
    ids=["chunks", "a chunk's extension", "trailers", "headers", "a header", "a path"],
)
def test_what_has_no_end_is_refused(server, begin, part, words):
    with connect(server) as connection:
        connection.sendall(begin)
        reply = drip(connection, part)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1") == 1
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "too_much"
    assert f"expected {words}, got more" in error["message"]


def test_requests_without_end_are_not_read_on(server):
    """Those that were taken are answered, and then the connection ends."""
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        reply = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(10_000):
                reply += part
    assert 1 <= reply.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 1
    assert b"HTTP/1.1 400" not in reply


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/3\r\n"]
)
def test_what_is_no_http_is_told_so(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n")
    assert "expected HTTP, got" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("token", ["h2c", "websocket"])
def test_who_asks_for_another_protocol_with_a_body_is_answered(server, token):
    """As Java's client does with each first request."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAA\r\n" % token.encode()
    request = HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for pieces in ([request], [request[:90], request[90:-10], request[-10:]]):
        with connect(server) as connection:
            for _ in range(2):
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.01)
                reply = b""
                while b'"text_completion"' not in reply:
                    part = connection.recv(10_000)
                    assert part, reply
                    reply += part
                assert reply.startswith(b"HTTP/1.1 200 ")
                assert connection.recv(10_000) if not reply.endswith(b"}") else True


def test_connect_ends_its_connection(server):
    with connect(server) as connection:
        connection.sendall(
            b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        reply = read_all(connection)
    assert reply.count(b"HTTP/1.1") == 1
    assert reply.startswith(b"HTTP/1.1 4")


def test_a_trailer_is_no_header(server):
    """Else a client could put in a header behind what has been checked."""
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"0\r\nContent-Type: application/json\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 415 ")


def test_a_request_under_way_is_not_cut_off_by_the_time_for_heads(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    gate = Gate(server.engine)
    gate.shut()
    opener = threading.Timer(0.6, gate.open)
    opener.start()
    with server.http() as http:
        assert http.post("/v1/completions", json={**HELLO, "max_tokens": 2}).status_code == 200
    opener.join(60)


def test_a_connection_is_kept_for_the_next_request(server):
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(1000)
            assert reply.startswith(b"HTTP/1.1 200 ")


def test_several_requests_sent_at_once_are_answered_in_turn(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("comes_later", [False, True])
def test_a_client_that_goes_ends_its_answer_though_it_has_sent_more_requests(server, streams, comes_later):
    gate, before = Gate(server.engine), server.service.metrics.counts()
    long = raw_request(json.dumps({**HELLO, "max_tokens": 900, "ignore_eos": True, "stream": streams}).encode())
    with connect(server) as connection:
        gate.shut()
        connection.sendall(long if comes_later else long * 2)
        gate.wait_for_step()
        if comes_later:
            connection.sendall(long)
            wait_for(lambda: any(one.pipeline for one in server.server.server_state.connections))
    wait_for(lambda: not server.server.server_state.connections)
    wait_for(lambda: server.service.metrics.counts()["cancelled"] == before["cancelled"] + 1)
    gate.open()
    server.wait_until_idle()
    assert server.service.metrics.counts()["finished"] == before["finished"]
    assert gate.num_steps <= 2


def test_a_client_that_does_not_read_its_answer_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.3)
    url = httpx2.URL(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
        connection.connect((url.host, url.port))
        one = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.settimeout(1)
        try:
            for _ in range(3000):
                connection.sendall(one)
        except (TimeoutError, ConnectionError):
            pass  # the server reads no more from a client that doesn't read
        wait_for(lambda: not server.server.server_state.connections)


BOTH = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
BOTH += b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        BOTH,
        BOTH.replace(b"Content-Length: 5", b"content-length: 0").replace(b"chunked", b"CHUNKED"),
        BOTH.replace(b"/v1/completions", b"/health"),
        BOTH.replace(b"Transfer-Encoding: chunked", b"Content-Length: 6"),
        BOTH.replace(b"Content-Length: 5", b"Transfer-Encoding: gzip"),
        BOTH.replace(b"Content-Length: 5\r\n", b"").replace(b"chunked", b"gzip, chunked"),
        BOTH.replace(b"Content-Length: 5\r\n", b"").replace(b"chunked", b"xchunked"),
        BOTH.replace(b"Transfer-Encoding: chunked\r\n", b"Host: localhost\r\n"),
        BOTH.replace(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n"),
        BOTH.replace(b"Transfer-Encoding: chunked", b"Transfer-Encoding : chunked"),
        BOTH.replace(b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n", b""),
    ],
)
def test_a_body_whose_length_or_host_is_in_doubt_ends_its_connection(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1") == 1  # what was smuggled behind it isn't answered
    assert b"connection: close" in reply.lower()


def test_a_chunked_body_alone_is_read(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_process_that_may_open_few_files_takes_fewer_connections(monkeypatch):
    for most, expected in ((1024, 512), (300, 300 - SPARE_DESCRIPTORS), (SPARE_DESCRIPTORS + 1, 1), (-1, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, most))
        assert count_connections(512) == expected


@pytest.mark.parametrize("most", [10, 64, SPARE_DESCRIPTORS])
def test_a_process_that_may_open_too_few_files_is_no_server(monkeypatch, most):
    """It says so before a model is loaded."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    words = f"ulimit -n: expected a process that may open at least {SPARE_DESCRIPTORS + 1} files, got {most}"
    with pytest.raises(InvalidArgumentError, match=words):
        serve(pytest.fail, "tiny", CacheSettings(), ServerSettings(port=0), print)


def test_a_warning_is_said_once_a_minute(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    warning = SeldomWarning("expected peace")
    for _ in range(5):
        warning.warn()
    now[0] += 61
    warning.warn()
    assert [record.message for record in caplog.records] == [
        "expected peace (1 times lately; logged once a minute)",
        "expected peace (5 times lately; logged once a minute)",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="takes descriptors from a running process, which Linux can")
def test_without_descriptors_the_server_says_so_in_a_line_and_goes_on(tiny_folder):
    with serving(tiny_folder) as (process, url, lines):
        address = httpx2.URL(url)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (40, 4096))
        held = [socket.create_connection((address.host, address.port), timeout=30) for _ in range(60)]
        wait_for(lambda: any("file descriptor" in line for line in lines))
        time.sleep(2.5)  # it tries again every second
        assert len([line for line in lines if "descriptor" in line]) == 1
        assert "Traceback" not in "".join(lines)
        for connection in held:
            connection.close()
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            assert client.models.list().data
