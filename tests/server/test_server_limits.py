"""What bounds the server: slots, sizes, times, keys, clients that go away, steps that fail, and its own end."""

import os
import signal
import time

import openai
import pytest
from server.server_harness import (
    HELLO,
    MODEL,
    Gate,
    connect,
    in_background,
    outcomes,
    raw_request,
    read_all,
    running_server,
    slow_encoder,
    tiny_loaded,
    wait_for,
)

from kvblocks.engine.errors import ModelError
from kvblocks.server.access import bodies


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, max_requests=3, max_body_bytes=5000, request_timeout_s=20) as running:
        yield running


@pytest.fixture(scope="module")
def shared_gate(server):
    return Gate(server.engine)


@pytest.fixture
def gate(server, shared_gate):
    """The gate before the server's model; it is open before the test and after it, and then all is free again."""
    yield shared_gate
    shared_gate.open()
    server.wait_until_idle()


# --- slots -----------------------------------------------------------------------------------------------------------


def test_when_all_slots_are_taken_others_are_told_when_to_come_back(server, gate):
    gate.shut()
    with server.client() as client:
        waiting = [in_background(lambda: client.completions.create(max_tokens=2, **HELLO)) for _ in range(3)]
        wait_for(lambda: server.service.num_open == 3)
        with pytest.raises(openai.RateLimitError, match="at most 3 unfinished answers, got 3 and 1 more") as raised:
            client.completions.create(max_tokens=2, **HELLO)
        assert raised.value.code == "queue_full"
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        with server.http() as http:
            assert http.get("/health").status_code == 200
        gate.open()
        for thread in waiting:
            thread.join(60)
        assert client.completions.create(max_tokens=2, **HELLO).usage.completion_tokens == 2


def test_samples_take_a_slot_each(server, gate):
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="at most 3 answers at once, got 4"):
            client.completions.create(n=4, **HELLO)
        gate.shut()
        thread = in_background(lambda: client.completions.create(n=2, max_tokens=2, **HELLO))
        wait_for(lambda: server.service.num_open == 2)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(n=2, **HELLO)
        gate.open()
        thread.join(60)


def test_the_real_client_comes_back_by_itself(server, gate):
    gate.shut()
    with server.client() as client:
        waiting = [in_background(lambda: client.completions.create(max_tokens=2, **HELLO)) for _ in range(3)]
        wait_for(lambda: server.service.num_open == 3)
        refused = outcomes(server)["refused"]
        patient = client.with_options(max_retries=5)

        def open_when_refused():
            wait_for(lambda: outcomes(server)["refused"] > refused)
            gate.open()

        opener = in_background(open_when_refused)
        assert patient.completions.create(max_tokens=2, **HELLO).usage.completion_tokens == 2
        for thread in [*waiting, opener]:
            thread.join(60)


def test_a_text_takes_its_slot_before_it_is_encoded(server, monkeypatch):
    with server.client() as client:
        with slow_encoder(server, monkeypatch) as begun:
            waiting = [in_background(lambda: client.completions.create(max_tokens=2, **HELLO)) for _ in range(3)]
            wait_for(lambda: server.service.num_open == 3)
            with pytest.raises(openai.RateLimitError, match="at most 3 unfinished answers, got 3 and 1 more"):
                client.completions.create(max_tokens=2, **HELLO)
            wait_for(lambda: len(begun) == 2)  # short ones go two at a time
        for thread in waiting:
            thread.join(60)
    server.wait_until_idle()


@pytest.mark.parametrize(("error", "status"), [(ModelError("expected another text"), 400), (OSError("bug"), 500)])
def test_a_text_that_cannot_be_encoded_gives_its_slot_back(server, monkeypatch, error, status):
    before = outcomes(server)
    outcome = "rejected" if status == 400 else "failed"
    with server.http() as http:
        with slow_encoder(server, monkeypatch, error):
            response = []
            thread = in_background(lambda: response.append(http.post("/v1/completions", json=HELLO)))
            wait_for(lambda: server.service.num_open == 1)
        thread.join(60)
        assert response[0].status_code == status
    assert server.service.num_open == 0
    assert outcomes(server) == before | {outcome: before[outcome] + 1}


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5001, 15_000, 100_000])
def test_a_large_body_is_refused(server, size):
    body = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
    with server.http() as http:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert f"at most 5000 bytes, got {size}" in response.json()["error"]["message"]
    assert response.headers["connection"] == "close"


def test_a_large_body_of_unknown_length_is_refused(server):
    def chunks():
        for _ in range(100):
            yield b"a" * 100

    with server.http() as http:
        response = http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "got more than 5000" in response.json()["error"]["message"]


def test_the_largest_body_is_read(server):
    body = b'{"prompt": "hello", "max_tokens": 1}'
    body += b" " * (5000 - len(body))
    with server.http() as http:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty_server(model):
    with running_server(model, request_timeout_s=2.0) as running:
        yield running, Gate(running.engine)


def test_a_request_whose_time_is_over_is_answered_so_at_once(hasty_server):
    server, gate = hasty_server
    gate.shut()
    with server.client() as client:
        start = time.monotonic()
        with pytest.raises(openai.InternalServerError, match=r"an answer within 2 s") as raised:
            client.completions.create(max_tokens=5, **HELLO)
        assert 1.9 < time.monotonic() - start < 20  # though the step goes on
        assert raised.value.status_code == 504
        assert raised.value.type == "timeout_error"
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert server.service.num_open == 1  # until the engine has dropped it
        num_steps = gate.num_steps
        gate.open()
        server.wait_until_idle()
        assert gate.num_steps == num_steps
        assert outcomes(server)["timed_out"] == 1


def test_a_stream_whose_time_is_over_ends_with_an_error(hasty_server):
    server, gate = hasty_server
    before = outcomes(server)["timed_out"]
    with server.client() as client:
        stream = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gate.shut()
        with pytest.raises(openai.APIError, match=r"within 2 s"):
            list(stream)
        gate.open()
    server.wait_until_idle()
    assert outcomes(server)["timed_out"] == before + 1


def test_a_body_that_does_not_come_is_waited_for_a_while(server, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    with connect(server) as connection:
        connection.sendall(raw_request(b"x" * 100)[:-50])
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"expected the body within 0.2 s" in reply


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(server, gate, stream):
    before = outcomes(server)["cancelled"]
    extra = b', "stream": true' if stream else b""
    body = b'{"prompt": "hello", "max_tokens": 1000, "ignore_eos": true' + extra + b"}"
    with connect(server) as connection:
        connection.sendall(raw_request(body))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: server.engine.scheduler.running)
        gate.shut()
        gate.wait_for_step()
        assert server.engine.manager.num_free_blocks < 256
    wait_for(lambda: outcomes(server)["cancelled"] == before + 1)  # at once, in the middle of a step
    num_steps = gate.num_steps
    gate.open()
    server.wait_until_idle()
    assert gate.num_steps == num_steps  # no step after the one that was under way
    assert server.engine.scheduler.running == []


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(server, gate):
    before = outcomes(server)["cancelled"]
    gate.shut()
    with connect(server) as running, connect(server) as waiting:
        running.sendall(raw_request(b'{"prompt": "hello", "max_tokens": 3}'))
        gate.wait_for_step()
        waiting.sendall(raw_request(b'{"prompt": "hello", "max_tokens": 3, "n": 2}'))
        wait_for(lambda: server.service.num_open == 3)
        waiting.close()
        wait_for(lambda: outcomes(server)["cancelled"] == before + 1)
        gate.open()
        wait_for(lambda: server.service.num_open == 0)
        assert running.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_goes_away_before_its_body_is_whole_leaves_nothing(server):
    before = outcomes(server)
    with connect(server) as connection:
        connection.sendall(raw_request(b"x" * 100)[:-50])
        wait_for(lambda: server.server.server_state.tasks)
    wait_for(lambda: outcomes(server) == before | {"cancelled": before["cancelled"] + 1})
    server.wait_until_idle()
    with server.http() as http:
        assert http.get("/health").status_code == 200


# --- keys ------------------------------------------------------------------------------------------------------------


def test_with_a_key_only_who_has_it_is_served(model):
    with running_server(model, api_key="secret-1") as server, server.http() as http:
        for headers in ({}, {"authorization": "Bearer secret-2"}, {"authorization": "secret-1"}):
            for path in ("/v1/models", "/v1/cache/stats", "/v1/nonsense"):
                response = http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "secret" not in response.text
        assert http.get("/v1/models", headers={"authorization": "Bearer secret-1"}).status_code == 200
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        with server.client() as client:
            assert client.completions.create(max_tokens=1, **HELLO).usage.completion_tokens == 1
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="other").models.list()


# --- steps that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_fails_its_requests_and_the_server_goes_on(server, gate, stream, caplog):
    gate.failure = RuntimeError("the weights are at /secret/path")
    before = outcomes(server)["failed"]
    with server.client() as client:
        with pytest.raises(openai.InternalServerError, match="got RuntimeError") as raised:
            client.completions.create(max_tokens=3, stream=stream, **HELLO)
        assert raised.value.code == "step_failed"
        assert raised.value.type == "server_error"
        assert "secret" not in raised.value.message
        assert client.completions.create(max_tokens=3, **HELLO).usage.completion_tokens == 3
    assert outcomes(server)["failed"] == before + 1
    assert "/secret/path" in caplog.text  # in the log, for who runs the server


def test_a_step_that_fails_after_the_first_token_ends_the_stream_with_an_error(server, gate):
    with server.client() as client:
        stream = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gate.failure = ValueError("once")
        with pytest.raises(openai.APIError, match="got ValueError"):
            list(stream)


def test_a_request_that_cannot_be_begun_for_a_bug_fails_alone(server, gate, monkeypatch, caplog):
    def fail(*_, **__):
        raise TypeError("a bug in /secret/path")

    with server.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "submit", fail)
            with pytest.raises(openai.InternalServerError, match="got TypeError: a bug; the server") as raised:
                client.completions.create(max_tokens=3, **HELLO)
        assert "secret" not in raised.value.message
        assert "/secret/path" in caplog.text
        assert client.completions.create(max_tokens=3, **HELLO).usage.completion_tokens == 3


def test_when_the_engines_thread_dies_everybody_is_told_and_the_server_ends(model, caplog):
    with running_server(model) as server:
        gate = Gate(server.engine)
        gate.shut()
        errors = []

        def ask():
            try:
                client.completions.create(max_tokens=3, **HELLO)
            except openai.APIError as error:
                errors.append(error)

        with server.client() as client:
            thread = in_background(ask)
            gate.wait_for_step()
            gate.failure = SystemExit("a bug")
            gate.open()
            thread.join(60)
        assert [error.status_code for error in errors] == [503]
        wait_for(lambda: not server.service.thread.is_alive)
        assert server.server.has_died
        assert server.server.should_exit
        assert "the engine's thread has died" in caplog.text


# --- the end ---------------------------------------------------------------------------------------------------------


def test_stopping_lets_running_requests_finish_and_takes_no_more(model):
    with running_server(model, grace_s=30) as server:
        gate = Gate(server.engine)
        gate.shut()
        answers = []
        with server.client() as client, connect(server) as late:
            thread = in_background(lambda: answers.append(client.completions.create(max_tokens=20, **HELLO)))
            gate.wait_for_step()
            late.sendall(raw_request(b'{"prompt": "hello"}')[:-5])  # a request that is on its way
            wait_for(lambda: len(server.server.server_state.tasks) == 2)
            server.server.handle_exit(15, None)
            late.sendall(raw_request(b'{"prompt": "hello"}')[-5:])
            reply = read_all(late)
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"stopping" in reply
            wait_for(lambda: not _accepts(server))
            gate.open()
            thread.join(60)
        assert answers[0].usage.completion_tokens == 20


def test_after_the_grace_period_what_is_left_fails(model):
    with running_server(model, grace_s=0.3) as server:
        gate = Gate(server.engine)
        with server.client() as client:
            stream = client.completions.create(
                model=MODEL, prompt="hello", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            gate.shut()
            server.server.handle_exit(15, None)
            with pytest.raises(openai.APIError, match="stopping"):
                list(stream)
            gate.open()


def test_a_second_signal_waits_for_nothing(model):
    with running_server(model, grace_s=60) as server:
        gate = Gate(server.engine)
        gate.shut()
        errors = []

        def ask():
            try:
                client.completions.create(max_tokens=3, **HELLO)
            except openai.APIError as error:
                errors.append(error)

        with server.client() as client:
            thread = in_background(ask)
            gate.wait_for_step()
            server.server.handle_exit(2, None)
            time.sleep(0.2)
            assert errors == []
            server.server.handle_exit(2, None)
            thread.join(60)
        assert [error.status_code for error in errors] == [503]
        gate.open()


@pytest.mark.skipif(os.name != "posix", reason="only POSIX systems tell that a terminal has ended")
def test_a_terminal_that_ends_is_a_signal_with_grace_even_if_told_twice(model):
    with running_server(model, grace_s=60) as server:
        gate = Gate(server.engine)
        gate.shut()
        answers = []
        before = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test may run under nohup
        try:
            with server.client() as client, server.server.capture_signals():
                thread = in_background(lambda: answers.append(client.completions.create(max_tokens=20, **HELLO)))
                gate.wait_for_step()
                assert signal.getsignal(signal.SIGHUP) == server.server.handle_exit
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGHUP)  # a shell tells its jobs, and the system does, too
                wait_for(lambda: not _accepts(server))
                gate.open()
                thread.join(60)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            assert answers[0].usage.completion_tokens == 20
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
            with server.server.capture_signals():
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)


def _accepts(server):
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return False
    return True
