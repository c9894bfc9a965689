"""POST /v1/cache/hints, and `kvblocks cache hints`: hints carried out on a running server's cache."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from server.server_harness import MODEL, Gate, running_server, tiny_loaded, wait_for

from kvblocks import Sequence
from kvblocks.cli import app as cli
from kvblocks.cli.client import ServerClient
from kvblocks.wire.hints.envelope import parse_envelope

PROMPT = [(7 * index) % 250 for index in range(300)]  # eighteen full blocks of sixteen


@pytest.fixture(scope="module")
def model(tiny_folder):
    torch.set_num_threads(1)
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def shared(model):
    """A server whose pool is so large that the prompt takes less than an eighth of it."""
    with running_server(model, cache={"num_blocks": 160, "host_cache": "16MiB"}) as running:
        yield running


@pytest.fixture
def server(shared):
    def clear():
        for salt in (None, "ann", "bob", "other"):
            shared.service.thread.hints.forget(salt)
        shared.engine.manager.reset_prefix_cache()

    shared.on_thread(clear)
    yield shared
    shared.wait_until_idle()


def action(kind, payload, action_id="a"):
    return {"action_id": action_id, "action_type": kind, "action_version": "1.0", "payload": payload}


def envelope(*actions):
    envelope.number += 1
    return {"protocol_version": "0.1", "message_id": f"m{envelope.number}", "actions": list(actions)}


envelope.number = 0


def send(http, body, salt=None):
    response = http.post("/v1/cache/hints", json={**body, "cache_salt": salt})
    assert response.status_code == 200, response.text
    values = response.json()
    assert values["message_id"] == body["message_id"]
    parse_envelope(values, 64)  # the answer is an envelope
    return [answer["payload"] for answer in values["actions"]]


def complete(http, prompt, salt=None):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]


def fill(server, http):
    """Push everything out of the pool that nobody pinned, once all is stored."""
    server.wait_until_idle()
    for number in range(9):
        complete(http, [(11 * index + number) % 250 for index in range(300)], salt="other")
    server.wait_until_idle()


def test_a_prompt_is_pinned_before_it_comes_and_stays(server):
    with server.http() as http:
        body = envelope(action("pin", {"token_ids": PROMPT, "ttl_s": 600}))
        assert send(http, body)[0]["outcome"] == "deferred"
        complete(http, PROMPT)
        server.wait_until_idle()
        (answer,) = send(http, body)  # asked again: by now it holds
        assert (answer["outcome"], answer["num_held_blocks"]) == ("accepted", 18)
        fill(server, http)
        assert complete(http, PROMPT)["cached_tokens_by_tier"]["device"] == 288
        assert send(http, envelope(action("release", {"pin_id": answer["pin_id"]})))[0]["num_pins"] == 1


def test_hints_are_counted_in_the_caches_numbers(server):
    def counted(http):
        return http.get("/v1/cache/stats").json()["hints"]

    with server.http() as http:
        wait_for(lambda: not counted(http)["num_pins"])
        before = counted(http)["num_answers"].get("deferred", 0)
        body = envelope(action("pin", {"token_ids": PROMPT, "ttl_s": 600}))
        assert send(http, body)[0]["outcome"] == "deferred"
        wait_for(lambda: counted(http)["num_pins"] == 1)
        after = counted(http)
        assert (after["num_pinned_blocks"], after["num_answers"]["deferred"]) == (18, before + 1)


def test_a_pin_is_named_by_what_events_call_its_blocks(server):
    with server.http() as http:
        complete(http, PROMPT, salt="ann")
        digests = server.engine.manager.inspect.block_hashes(Sequence("x", PROMPT, salt="ann"))
        hashes = [int.from_bytes(digest[-8:], "big") for digest in digests]
        body = action("pin", {"block_hashes": hashes})
        assert send(http, envelope(body), salt="ann")[0]["num_held_blocks"] == 18
        assert send(http, envelope(body), salt="bob") == send(http, envelope(body))
        assert send(http, envelope(body))[0]["outcome"] == "missing"


def test_a_prompt_is_loaded_before_it_comes(server):
    with server.http() as http:
        complete(http, PROMPT)
        fill(server, http)
        (answer,) = send(http, envelope(action("prefetch", {"token_ids": PROMPT})))
        assert (answer["outcome"], answer["num_loading_blocks"]) == ("accepted", 18)
        server.wait_until_idle()  # and all blocks are free again
        found = complete(http, PROMPT)["cached_tokens_by_tier"]
        assert found == {"device": 288, "host": 0}


def test_a_load_goes_on_beside_requests(server):
    """It begins behind a step that runs, and another request finds what it brings."""
    body = envelope(action("prefetch", {"token_ids": PROMPT}))
    with server.http() as http, ThreadPoolExecutor() as pool:
        complete(http, PROMPT)
        fill(server, http)
        gate = Gate(server.engine)
        gate.shut()
        other = pool.submit(complete, http, [1, 2, 3])
        gate.wait_for_step()
        thread = server.service.thread
        sent = thread.call(lambda: thread.hints.carry_out(body, None, time.monotonic()))
        later = pool.submit(complete, http, PROMPT)
        gate.open()
        assert sent.result(timeout=60).answers[0].outcome == "accepted"
        assert later.result(timeout=60)["cached_tokens"] == 288
        assert other.result(timeout=60)["cached_tokens"] == 0
    assert server.service.thread.hints.stats.num_failed_prefetches == 0


def test_a_pin_ends_while_nothing_runs(server):
    with server.http() as http:
        complete(http, PROMPT)
        server.wait_until_idle()
        assert send(http, envelope(action("pin", {"token_ids": PROMPT, "ttl_s": 0.05})))[0]["outcome"] == "accepted"
        wait_for(lambda: not server.engine.manager.pins)


def test_a_forgotten_salt_has_no_hints(server):
    with server.http() as http:
        send(http, envelope(action("pin", {"token_ids": PROMPT})), salt="ann")
        send(http, envelope(action("pin", {"token_ids": PROMPT})), salt="bob")
        assert http.post("/v1/cache/forget", json={"cache_salt": "ann"}).status_code == 200
        assert [pin.sequence.salt for pin in server.engine.manager.pins] == ["bob"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "envelope: protocol_version: expected '0.1', got None"),
        ({"protocol_version": "0.1", "message_id": "m", "actions": 3}, "envelope: actions: expected a list, got 3"),
        ({"protocol_version": "0.1", "message_id": "m", "actions": [], "cache_salt": 3}, "cache_salt"),
        ({"protocol_version": "0.1", "message_id": "m", "actions": [{}] * 65}, "expected at most 64, got 65"),
    ],
)
def test_what_is_no_envelope_is_a_400(server, body, words):
    with server.http() as http:
        response = http.post("/v1/cache/hints", json=body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


def test_an_operators_key_is_asked_for(model):
    with running_server(model, api_key="secret") as server, server.http() as http:
        assert http.post("/v1/cache/hints", json=envelope()).status_code == 401


def test_the_command_sends_a_file(server, capsys, tmp_path, monkeypatch):
    file = tmp_path / "hints.json"

    def run(*arguments):
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", "hints", str(file), *arguments, "--url", server.url])
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out + captured.err

    body = envelope(action("pin", {"token_ids": PROMPT, "ttl_s": 60}), action("retain", {}, "b"))
    file.write_text(json.dumps(body))
    code, output = run("--salt", "ann")
    first, second = output.splitlines()
    assert code == 0
    assert first.startswith(
        "a pin: deferred; what isn't cached yet is held once it is cached; pin_id hint-1; num_blocks 18"
    )
    assert second == "b retain: rejected; retain: expected a manager with sessions, whose prefixes are retained"
    code, output = run("--salt", "ann", "--json")
    assert json.loads(output)["actions"][0]["payload"]["outcome"] == "deferred"
    assert len(server.engine.manager.pins) == 1
    with monkeypatch.context() as patched:
        patched.setattr(ServerClient, "ask", lambda *_: {"status": "ok"})
        code, said = run()
        assert code == 2
        assert "got an answer without 'actions'" in said
    for text, words in (
        ("[1]", "expected a JSON object in"),
        ("{", "expected a file of JSON"),
        ("{}", "protocol_version"),
    ):
        file.write_text(text)
        code, said = run()
        assert code == 2
        assert words in said
