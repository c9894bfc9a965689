"""Connections: their number, the time for heads and for reading, framing, and a process without descriptors."""

import json
import logging
import socket
import sys
import threading
import time

import httpx2
import openai
import pytest
from engine.server.server_harness import (
    HELLO,
    Gate,
    connect,
    read_all,
    running_server,
    serving,
    tiny_loaded,
    wait_for,
)

from kvblocks.engine.server.access import connections
from kvblocks.engine.server.access.connections import SPARE_DESCRIPTORS, SeldomWarning, count_connections

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


def test_one_connection_too_many_is_refused(server, caplog):
    held = [connect(server) for _ in range(MOST)]
    wait_for(lambda: len(server.server.server_state.connections) == MOST)
    with caplog.at_level(logging.WARNING, "kvblocks.server"):
        for _ in range(3):
            with connect(server) as another:
                reply = read_all(another)
                assert reply.startswith(b"HTTP/1.1 503 ")
                assert b"connection: close" in reply
                error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
                assert f"at most {MOST} connections" in error["message"]
    assert len([record for record in caplog.records if "connections" in record.message]) <= 1
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


@pytest.mark.parametrize("drip", [b"X-A: b\r\n", b"a"], ids=["headers", "the body of an answered request"])
def test_a_client_that_sends_a_little_again_and_again_is_not_waited_for(server, monkeypatch, drip):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    if drip == b"a":
        begin += b"Content-Length: 100000\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(begin)
        has_ended = threading.Event()

        def send():
            while not has_ended.is_set():
                try:
                    connection.sendall(drip)
                except OSError:
                    return
                time.sleep(0.05)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            wait_for(lambda: server.server.server_state.connections)
            wait_for(lambda: not server.server.server_state.connections)
        finally:
            has_ended.set()
            thread.join(60)


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
    ],
)
def test_a_body_with_two_lengths_ends_its_connection(server, sent):
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
    for most, expected in ((1024, 512), (300, 300 - SPARE_DESCRIPTORS), (10, 1), (-1, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, most))
        assert count_connections(512) == expected


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
