"""`kvblocks serve --session-gate`, end to end: who waits, what is shown of it, and how the engine's thread waits."""

import time

import pytest
from server.server_harness import MODEL, in_background, running_server, tiny_loaded, wait_for

from kvblocks.engine.schedule.entrance import Entrance


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"num_blocks": 16, "session_gate": True}) as running:
        yield running


def complete(http, session, num_tokens, first=3):
    prompt = [first + number % 200 for number in range(num_tokens)]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2, "prompt_cache_key": session}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


def test_sessions_take_turns_and_the_operator_sees_them(server):
    with server.http() as http:
        assert complete(http, "one", 150) == 150
        gate = http.get("/v1/cache/stats").json()["session_gate"]
        assert gate["num_room_tokens"] == 256
        assert gate["num_entries"] == 1
        assert complete(http, "two", 150, first=5) == 150  # as soon as the first one's hold is over, or all is idle
        assert complete(http, None, 20) == 20
        server.wait_until_idle()
        gate = http.get("/v1/cache/stats").json()["session_gate"]
        assert (gate["num_entries"], gate["num_waiting_requests"], gate["waiting"]) == (2, 0, [])
        assert "two" in {member["session"] for member in gate["members"]}
        assert "kvblocks_gate_entries_total 2.0" in http.get("/metrics").text


def test_a_request_that_waits_is_shown_with_the_reason(server):
    entrance = server.engine.scheduler.entrance

    def make_patient():
        entrance.gate.end_session("two")
        entrance.rounds.seconds_per_token = 1e6  # prompts seem to take days, so places are kept

    def give_up():
        entrance.gate.end_session("three")
        entrance.rounds.seconds_per_token = 0.0
        entrance.rounds.note_change()

    with server.http() as http:
        server.on_thread(make_patient)
        assert complete(http, "three", 150) == 150
        answers = []
        thread = in_background(lambda: answers.append(complete(http, "four", 160, first=9)))
        with server.http() as other:
            wait_for(lambda: other.get("/v1/cache/stats").json()["session_gate"]["waiting"])
            (waits,) = other.get("/v1/cache/stats").json()["session_gate"]["waiting"]
            assert (waits["session"], waits["reason"], waits["num_ahead"]) == ("four", "idle", 0)
            assert waits["num_missing_tokens"] == 152 + 160 - 243
            assert 'kvblocks_gate_waiting{reason="idle"} 1.0' in other.get("/metrics").text
        server.on_thread(give_up)
        thread.join(60)
        assert answers == [160]
        server.wait_until_idle()


def test_the_engine_thread_waits_until_the_gate_may_let_somebody_in(server, monkeypatch):
    server.wait_until_idle()
    monkeypatch.setattr(Entrance, "wake_at", time.monotonic() + 50.0)
    left = server.service.thread._seconds_left()  # noqa: SLF001
    assert 0 < left <= 50.0
