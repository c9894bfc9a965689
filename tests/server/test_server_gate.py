"""`kvblocks serve --session-gate`, end to end: who waits, what is shown of it, and how the engine's thread waits."""

import time

import pytest
from server.server_harness import MODEL, in_background, running_server, tiny_loaded, wait_for

from kvblocks.engine.schedule.entrance import Entrance
from kvblocks.gate import SessionGate
from kvblocks.replay.readers import read_trace
from kvblocks.retention.sessions import Sessions


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


FIND = {"name": "find", "parameters": {"type": "object", "maxProperties": 0}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False, "prompt_cache_key": "agent"}


def test_gate_sessions_and_record_are_told_that_an_answer_called_a_tool(tiny_folder, monkeypatch, tmp_path):
    gate, sessions = [], []
    ended, pause = SessionGate.ended, Sessions.pause

    def note_ended(self, request_id, num_tokens, reason, now):
        gate.append(reason)
        return ended(self, request_id, num_tokens, reason, now)

    def note_pause(self, session, reason, salt=None):
        sessions.append(reason)
        return pause(self, session, reason, salt)

    monkeypatch.setattr(SessionGate, "ended", note_ended)
    monkeypatch.setattr(Sessions, "pause", note_pause)
    cache = {"session_gate": True, "eviction": "sessions"}
    path = tmp_path / "trace.jsonl"
    with (
        running_server(tiny_loaded(tiny_folder, 4096), cache=cache, record=path) as server,
        server.http() as http,
    ):
        openais = [{"type": "function", "function": FIND}]
        bodies = {
            "/v1/chat/completions": {**CHAT, "tools": openais, **ONE_CALL},
            "/v1/responses": {
                "model": MODEL,
                "input": "hi",
                "max_output_tokens": 300,
                "tools": [{"type": "function", **FIND}],
                **ONE_CALL,
            },
            "/v1/messages": {
                **CHAT,
                "tools": [{"name": "find", "input_schema": FIND["parameters"]}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        }
        for url, body in bodies.items():
            response = http.post(url, json=body)
            assert response.status_code == 200, response.text
        assert gate == ["tool_calls"] * 3
        assert sessions == ["tool_calls"] * 2  # a Message without metadata names no session
        cut = {**bodies["/v1/chat/completions"], "max_tokens": 8}
        plain = {**CHAT, "max_tokens": 3, "prompt_cache_key": "agent", "tools": openais, "ignore_eos": True}
        for body in (cut, plain):
            response = http.post("/v1/chat/completions", json=body)
            assert response.json()["choices"][0]["finish_reason"] == "length"
        assert gate[3:] == sessions[2:] == ["length"] * 2
        server.wait_until_idle()
    assert read_trace(path).stops == ["tool_calls"] * 3 + ["length"] * 2
