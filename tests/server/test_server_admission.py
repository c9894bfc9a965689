"""The checks before a prompt is computed: lengths, slots and bytes while it is encoded, and the time limit."""

import json

import httpx2
import openai
import pytest
from server.server_harness import (
    MODEL,
    connect,
    in_background,
    outcomes,
    raw_request,
    running_server,
    slow_encoder,
    tiny_loaded,
    wait_for,
)

from kvblocks.server.access import bodies, encoding
from kvblocks.server.body.parsing import MAX_ITEMS

CONTEXT = 1024


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder, CONTEXT)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, max_requests=4, max_body_bytes=200_000) as running:
        yield running


@pytest.fixture(scope="module")
def most_chars(model):
    return CONTEXT * model.tokenizer.longest_token


@pytest.fixture(autouse=True)
def idle(server):
    yield
    server.wait_until_idle()
    wait_for(lambda: server.service.bodies.num_bytes == 0)  # closed connections are noticed later


PATHS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": ["hello", text]},
    "/v1/cache/warm": lambda text: {"prompts": ["hello", {"system": text}]},
    "/v1/cache/pins": lambda text: {"text": text},
    "/v1/cache/explain": lambda text: {"messages": [{"role": "user", "content": text}]},
}


def check_is_too_long(response):
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "expected " in error["message"]
    return error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server, most_chars, monkeypatch, path):
    def fail(*_, **__):
        raise AssertionError("it was encoded")

    monkeypatch.setattr(server.engine.model.tokenizer, "encode", fail)
    with server.http() as http:
        message = check_is_too_long(http.post(path, json=PATHS[path]("1" * (most_chars + 1))))
    assert f"at most {CONTEXT} tokens" in message
    assert f"at most {most_chars} characters" in message


@pytest.mark.parametrize("path", PATHS)
def test_a_text_with_too_many_tokens_is_refused_before_the_engine_sees_it(server, monkeypatch, path):
    monkeypatch.setattr(server.engine, "submit", None)
    with server.http() as http:
        message = check_is_too_long(http.post(path, json=PATHS[path]("1 " * CONTEXT)))
    assert f"at most {CONTEXT} tokens" in message
    assert "characters" not in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * (CONTEXT + 1)}),
        ("/v1/completions", {"prompt": [1] * CONTEXT}),  # no room for an answer
        ("/v1/completions", {"prompt": [1] * 10, "max_tokens": CONTEXT}),
        ("/v1/cache/explain", {"token_ids": [1] * (CONTEXT + 1)}),
        ("/v1/cache/pins", {"token_ids": [1] * (CONTEXT + 1)}),
    ],
)
def test_too_many_token_ids_have_the_same_code(server, path, body):
    with server.http() as http:
        check_is_too_long(http.post(path, json=body))


def test_the_real_client_sees_the_code(server, most_chars):
    with server.client() as client, pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "1" * (most_chars + 1)}])
    assert raised.value.code == "context_length_exceeded"


def test_a_prompt_that_fills_the_context_is_answered(server):
    with server.http() as http:
        response = http.post("/v1/completions", json={"prompt": [1] * (CONTEXT - 1), "max_tokens": 1})
    assert response.json()["usage"]["prompt_tokens"] == CONTEXT - 1


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [{}] * (MAX_ITEMS + 1)}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * (MAX_ITEMS + 1)}]}, "content"),
        ("/v1/completions", {"prompt": [[]] * (MAX_ITEMS + 1)}, "prompt"),
        ("/v1/cache/warm", {"prompts": ["a"] * (MAX_ITEMS + 1)}, "prompts"),
    ],
)
def test_a_body_of_very_many_items_is_refused_before_they_are_looked_at(server, path, body, name):
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400
    assert f"{name}: expected at most {MAX_ITEMS}, got {MAX_ITEMS + 1}" in response.json()["error"]["message"]


def test_texts_take_turns_and_slots_while_they_are_encoded(server, monkeypatch):
    monkeypatch.setattr(encoding, "LONG_TEXT", 100)
    long, answers = {"prompt": "a" * 101, "max_tokens": 1}, []
    with server.http() as http:

        def ask(body):
            answers.append(http.post("/v1/completions", json=body).status_code)

        with slow_encoder(server, monkeypatch) as begun:
            threads = [in_background(lambda: ask(long)) for _ in range(2)]
            wait_for(lambda: server.service.num_open == 2 and begun)
            assert len(begun) == 1  # long ones go one by one
            threads.append(in_background(lambda: ask({"prompt": "hello", "max_tokens": 1})))
            wait_for(lambda: len(begun) == 2)  # a short one goes past them
            threads.append(in_background(lambda: http.post("/v1/cache/explain", json={"text": "a" * 101})))
            wait_for(lambda: server.service.num_open == 4)  # what isn't to be answered takes a slot, too
            response = http.post("/v1/cache/pins", json={"text": "hello"})
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        for thread in threads:
            thread.join(60)
    assert answers == [200, 200, 200]


@pytest.mark.parametrize("size", [50, 90_000])
def test_what_a_client_that_has_gone_left_behind_counts_until_it_is_encoded(server, monkeypatch, size):
    monkeypatch.setattr(type(server.service), "_check_num_chars", lambda *_: None)
    before = outcomes(server)["cancelled"]
    with slow_encoder(server, monkeypatch) as begun:
        with connect(server) as connection:
            connection.sendall(raw_request(json.dumps({"prompt": "1" * size}).encode()))
            wait_for(lambda: begun)
        wait_for(lambda: outcomes(server)["cancelled"] == before + 1)
        assert server.service.num_open == 1
        assert (server.service.bodies.num_bytes > size) is (size == 90_000)  # small ones aren't counted in bytes
    wait_for(lambda: server.service.num_open == 0)
    assert len(begun) == 1


def test_a_client_that_goes_while_its_text_waits_leaves_the_queue(server, monkeypatch):
    monkeypatch.setattr(encoding, "LONG_TEXT", 100)
    before = outcomes(server)["cancelled"]
    body = json.dumps({"prompt": "a" * 101}).encode()
    with slow_encoder(server, monkeypatch) as begun, connect(server) as first:
        first.sendall(raw_request(body))
        wait_for(lambda: begun)
        with connect(server) as second:
            second.sendall(raw_request(body))
            wait_for(lambda: server.service.num_open == 2)
        wait_for(lambda: server.service.num_open == 1)
        wait_for(lambda: outcomes(server)["cancelled"] == before + 1)
    wait_for(lambda: server.service.num_open == 0)
    assert len(begun) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/explain", "/v1/cache/pins"])
def test_the_time_for_a_request_covers_encoding(model, monkeypatch, path):
    body = {"prompt": "hello"} if path == "/v1/completions" else {"text": "hello"}
    with running_server(model, request_timeout_s=0.3) as server, server.http() as http:
        with slow_encoder(server, monkeypatch):
            response = http.post(path, json=body)
            assert response.status_code == 504
            assert "an answer within 0.3 s" in response.json()["error"]["message"]
            assert response.headers["x-should-retry"] == "false"
            assert outcomes(server)["timed_out"] == (path == "/v1/completions")
            assert server.service.num_open == 1  # its thread goes on
        wait_for(lambda: server.service.num_open == 0)


def test_large_bodies_that_are_on_their_way_are_bounded_together(server, monkeypatch):
    monkeypatch.setattr(bodies, "REFUSED_S", 0.01)
    body = json.dumps({"prompt": "a", "user": "b" * 150_000}).encode()
    parts = []
    try:
        while server.service.bodies.num_bytes + len(body) <= server.service.bodies.max_bytes_together:
            before = server.service.bodies.num_bytes
            parts.append(connect(server))
            parts[-1].sendall(raw_request(body)[:-1])
            wait_for(lambda before=before: server.service.bodies.num_bytes >= before + len(body) - 1)
        with server.http() as http:
            headers = {"content-type": "application/json"}
            response = http.post("/v1/completions", content=body, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_bytes")
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            parts[0].sendall(body[-1:])
            assert parts[0].recv(100).startswith(b"HTTP/1.1 200 ")
            assert http.post("/v1/completions", content=body, headers=headers).status_code == 200
    finally:
        for connection in parts:
            connection.close()


def test_a_client_without_patience_sees_why_its_large_body_is_refused(server, monkeypatch):
    """The answer comes after the body was read and thrown away. An earlier answer would be lost with the connection."""
    monkeypatch.setattr(bodies, "REFUSED_S", 0.01)
    taken, before = server.service.bodies, outcomes(server)["refused"]
    server.on_thread(lambda: setattr(taken, "num_bytes", taken.max_bytes_together))
    try:
        with httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            for _ in range(3):
                response = http.post("/v1/completions", json={"prompt": "a" * 190_000})
                assert response.status_code == 429
                assert "Retry-After" in response.headers
            assert outcomes(server)["refused"] == before + 3
    finally:
        taken.num_bytes = 0
