"""Bytes that are no HTTP: the answer is an error like any other, whoever of the layers below finds it."""

import json

import pytest
from server.server_harness import (
    HELLO,
    Gate,
    connect,
    in_background,
    raw_request,
    read_all,
    running_server,
    tiny_loaded,
)


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder)) as running:
        yield running


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a space in a name": b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad name: x\r\n\r\n",
    "a length that is none": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a chunk that is none": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_http_is_answered_as_any_wrong_request(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith("http/1.1 40")
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    assert f"content-length: {len(body)}" in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("expected")


def test_an_answer_that_has_begun_is_not_mixed_with_an_error(server):
    """Bytes that are no HTTP come behind a request whose answer is a stream under way."""
    gate = Gate(server.engine)
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 5, "ignore_eos": True}).encode()
    with connect(server) as connection:
        connection.sendall(raw_request(body))
        first = connection.recv(10_000)
        gate.shut()
        connection.sendall(b"\x00nonsense\r\n\r\n")
        opened = in_background(gate.open)
        rest = read_all(connection)
        opened.join(60)
    answers = (first + rest).count(b"HTTP/1.1 ")
    assert answers == 1 or b"[DONE]" in (first + rest).split(b"HTTP/1.1 ")[1]
    server.wait_until_idle()
