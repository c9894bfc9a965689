"""The endpoints below /v1/cache, and `kvblocks cache`, which asks them."""

import json
import re
import threading
import time

import pytest
from server.server_harness import MODEL, running_server, tiny_loaded, wait_for

from kvblocks import Sequence
from kvblocks.cli import app as cli
from kvblocks.cli.client import ServerClient
from kvblocks.engine.schedule.request import Request
from kvblocks.server.arrivals import MAX_KEPT
from kvblocks.server.requests import parse_completion, system_prefix

SYSTEM = "the cat is in the hat. " * 10
QUESTION = "and the hen?"


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"num_blocks": 64}) as running:
        yield running


@pytest.fixture
def http(server):
    """A plain client, of a server that has cached nothing and pinned nothing."""

    def clear():
        for entry in server.service.thread.pins.entries():
            server.service.thread.pins.remove(entry.pin_id)
        server.engine.manager.reset_prefix_cache()

    server.on_thread(clear)
    with server.http() as http:
        yield http
    server.wait_until_idle()


@pytest.fixture
def kvblocks(server, http, capsys):
    """Runs `kvblocks cache ...` against the server: exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", *arguments, "--url", server.url])
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out, captured.err

    return run


def ask(http, salt=None, system=SYSTEM, question=QUESTION, max_tokens=2):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "cache_salt": salt}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached_tokens(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def fill(http):
    """Push everything out of the pool that nobody holds."""
    for number in range(8):
        prompt = [(index * 7 + number) % 250 for index in range(180)]
        response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 200


# --- stats -----------------------------------------------------------------------------------------------------------


def test_stats_say_what_the_cache_has_and_did(http, server):
    before = http.get("/v1/cache/stats").json()
    answers = [ask(http), ask(http)]
    stats = http.get("/v1/cache/stats").json()
    assert stats["num_hit_tokens"] - before["num_hit_tokens"] == cached_tokens(answers[1]) > 100
    assert stats["num_queried_tokens"] - before["num_queried_tokens"] == 2 * answers[0]["usage"]["prompt_tokens"]
    assert stats["num_entries"] == server.engine.manager.stats.num_cached_blocks == cached_tokens(answers[1]) // 16
    assert stats["lookups"]["num_lookups"] - before["lookups"]["num_lookups"] == 2
    assert 0 < stats["lookups"]["mean_s"] < 0.1
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, heads, head_dim, block_size, float32
    assert stats["memory"] == {
        "pool_bytes": 64 * block_bytes,
        "used_bytes": 0,
        "cached_bytes": stats["num_entries"] * block_bytes,
    }


def test_the_command_shows_them(kvblocks, http):
    ask(http)
    code, output, error = kvblocks("stats")
    assert (code, error) == (0, "")
    assert "entries" in output
    assert "of 64 blocks of 16 tokens" in output
    assert re.search(r"^pins +none$", output, re.MULTILINE)
    assert "average lookup" in output
    assert " us in " in output
    code, output, _ = kvblocks("stats", "--json")
    assert json.loads(output)["num_blocks"] == 64


# --- pins ------------------------------------------------------------------------------------------------------------


def test_what_is_pinned_stays_and_what_is_not_goes(http):
    other = SYSTEM.upper()
    pin = http.post("/v1/cache/pins", json={"system": SYSTEM, "description": "the hat"}).json()
    assert (pin["description"], pin["num_held_blocks"], pin["expires_in_s"]) == ("the hat", 0, None)
    ask(http), ask(http, system=other)
    fill(http)
    assert cached_tokens(ask(http)) == pin["num_blocks"] * 16 > 100
    assert cached_tokens(ask(http, system=other)) == 0
    (listed,) = http.get("/v1/cache/pins").json()["pins"]
    assert listed["num_held_blocks"] == listed["num_blocks"] == pin["num_blocks"]
    assert http.delete(f"/v1/cache/pins/{pin['id']}").json()["id"] == pin["id"]
    assert http.get("/v1/cache/pins").json() == {"pins": []}
    assert http.delete(f"/v1/cache/pins/{pin['id']}").status_code == 404
    fill(http)
    assert cached_tokens(ask(http)) == 0


def test_a_system_prompts_pin_is_what_its_chats_have_in_common(server):
    tokenizer = server.engine.model.tokenizer
    prefix = system_prefix(tokenizer, SYSTEM)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    whole = tokenizer.apply_chat_template(chat)
    assert whole[: len(prefix)] == prefix
    assert tokenizer.decode(prefix, skip_special_tokens=False).endswith("<|im_start|>user\n")


def test_pins_of_every_form(http):
    bodies = [
        {"text": "the hen " * 20},
        {"token_ids": list(range(40))},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    for body in bodies:
        assert http.post("/v1/cache/pins", json=body).status_code == 200
    assert [entry["num_tokens"] for entry in http.get("/v1/cache/pins").json()["pins"]][1] == 40


def test_a_pin_is_for_one_salt(http):
    http.post("/v1/cache/pins", json={"system": SYSTEM, "cache_salt": "a"})
    ask(http, salt="a"), ask(http, salt="b")
    fill(http)
    assert cached_tokens(ask(http, salt="a")) > 100
    assert cached_tokens(ask(http, salt="b")) == 0


def test_a_pin_ends_when_its_time_is_over(http):
    pin = http.post("/v1/cache/pins", json={"system": SYSTEM, "ttl_s": 0.3}).json()
    assert pin["expires_in_s"] <= 0.3
    time.sleep(0.35)
    assert http.get("/v1/cache/pins").json() == {"pins": []}
    pin = http.post("/v1/cache/pins", json={"system": SYSTEM, "ttl_s": 600}).json()
    assert 0 < pin["expires_in_s"] <= 600
    http.delete(f"/v1/cache/pins/{pin['id']}")
    pin = http.post("/v1/cache/pins", json={"system": SYSTEM, "ttl_s": 0.2}).json()
    ask(http)
    time.sleep(0.25)
    fill(http)  # nobody lists; the steps let it go
    assert cached_tokens(ask(http)) == 0


def test_a_pin_that_never_gives_way_leaves_an_answer_without_max_tokens_less_room(http):
    pin = http.post("/v1/cache/pins", json={"token_ids": [7] * 16 * 20, "priority": 100}).json()
    assert pin["priority"] == 100
    http.post("/v1/completions", json={"prompt": [7] * 321, "max_tokens": 1})
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == (64 - 20) * 16 + 1
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 800}).status_code == 503


def test_pins_beyond_the_budget_are_refused(http):
    response = http.post("/v1/cache/pins", json={"token_ids": [1] * 16 * 33})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "pin_budget"
    assert "at most 32 blocks" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "expected one of text, system, messages, token_ids, got none"),
        ({"text": "a", "system": "b"}, "got ['text', 'system']"),
        ({"token_ids": "abc"}, "token_ids: expected"),
        ({"token_ids": [[1], [2]]}, "token_ids: expected"),
        ({"messages": []}, "messages: expected"),
        ({"system": ""}, "system: expected"),
        ({"text": "a", "ttl_s": 0}, "ttl_s: expected"),
        ({"text": "a", "ttl_s": "soon"}, "ttl_s: expected"),
        ({"text": "a", "priority": 101}, "priority: expected"),
        ({"text": "a", "colour": "red"}, "got 'colour'"),
        ({"text": "a", "description": "x" * 257}, "description: expected a text of at most 256 characters"),
    ],
)
def test_wrong_pins_are_refused(http, body, words):
    response = http.post("/v1/cache/pins", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_commands_pin_list_and_unpin(kvblocks, tmp_path, http):
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM)
    code, output, _ = kvblocks("pin", "--file", str(path), "--description", "the hat", "--ttl", "500")
    assert code == 0
    pin_id = output.split()[0]
    assert "the hat" in output
    assert "ends in 500 s" in output
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(list(range(50))))
    assert kvblocks("pin", "--tokens", f"@{tokens}")[0] == kvblocks("pin", "--tokens", "1, 2," * 9 + "3")[0] == 0
    assert kvblocks("pin", "--raw", "the hen " * 10, "--priority", "7")[0] == 0
    ask(http)
    lines = kvblocks("list-pinned")[1].splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(pin_id)
    assert "50 tokens" in lines[1]
    assert "priority 7" in lines[3]
    assert kvblocks("unpin", pin_id)[1] == f"unpinned {pin_id}\n"
    assert len(json.loads(kvblocks("list-pinned", "--json")[1])["pins"]) == 3
    code, _, error = kvblocks("unpin", pin_id)
    assert code == 1
    assert error == f"kvblocks: expected the id of an existing pin, got '{pin_id}'\n"


def test_all_pins_of_some_tokens_end_together_and_those_of_others_stand(kvblocks):
    tokens, longer = ",".join(map(str, range(50))), ",".join(map(str, range(51)))
    commands = [(tokens,), (tokens, "--priority", "7"), (longer,), (tokens, "--salt", "a")]
    first, second, third, salted = (kvblocks("pin", "--tokens", *command)[1].split()[0] for command in commands)
    assert kvblocks("unpin", "--tokens", tokens) == (0, f"unpinned {first}\nunpinned {second}\n", "")
    assert [line.split()[0] for line in kvblocks("list-pinned")[1].splitlines()] == [third, salted]
    code, output, error = kvblocks("unpin", "--tokens", tokens)
    assert (code, output) == (1, "")
    assert error == "kvblocks: expected a prefix that is pinned, got one that isn't\n"
    _, output, _ = kvblocks("unpin", "--tokens", tokens, "--salt", "a", "--json")
    assert [entry["id"] for entry in json.loads(output)["pins"]] == [salted]
    assert kvblocks("unpin", third)[0] == 0


def test_what_is_cached_is_drawn_for_graphviz(kvblocks, http, server):
    ask(http)
    server.wait_until_idle()
    code, drawn, _ = kvblocks("dot")
    assert code == 0
    assert drawn == server.on_thread(server.engine.manager.inspect.to_dot) + "\n"
    ask(http, question="Why? " * 20)
    assert "left out: 2 nodes" in kvblocks("dot", "--max-nodes", "1")[1]
    for wrong in ("0", "-1", "x", "", "1" * 9, "\u0663"):
        response = http.get("/v1/cache/dot", params={"max_nodes": wrong})
        assert response.status_code == 400
        assert "max_nodes: expected a number from 1 to 999999" in response.json()["error"]["message"]


def test_a_pin_says_why_it_holds_nothing_yet_and_a_warm_one_holds_all(kvblocks):
    _, output, _ = kvblocks("pin", SYSTEM)
    assert re.search(r", 0 of \d+ blocks held \(the rest once a request computes it; see --warm\),", output)
    _, output, _ = kvblocks("pin", SYSTEM + "And more of it.", "--warm", "--description", "y" * 256)
    held, wanted = map(int, re.search(r", (\d+) of (\d+) blocks held, priority", output).groups())
    assert held == wanted > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pin"], "expected one of a text, --file and --tokens, got none of them"),
        (["pin", "a", "--tokens", "1"], "expected one of a text, --file and --tokens, got a text and --tokens"),
        (["pin", "--tokens", "1,a"], "--tokens: expected token ids"),
        (["pin", "--file", "/nonsense"], "expected a readable file"),
        (["pin", "--tokens", "1,2,3"], "full block"),
        (["unpin"], "expected a pin's id, or --tokens with or without --salt, got neither"),
        (["unpin", "pin-1", "--tokens", "1"], "got both"),
        (["unpin", "pin-1", "--salt", "a"], "got an id with --salt"),
        (["unpin", "--tokens", "1,a"], "--tokens: expected token ids"),
        (["explain", "a", "--request", "x"], "expected one of --request, --conversation and --last, without a prompt"),
        (["explain", "--request", "x", "--salt", "y"], "--request: expected no --salt with it"),
        (["explain", "--tokens", "1", "--system", "x"], "--system with a message only"),
        (["explain", "--request", "x"], "expected that of one of the last requests"),
    ],
)
def test_wrong_commands_say_why(kvblocks, arguments, words):
    code, output, error = kvblocks(*arguments)
    assert (code, output) == (
        1 if arguments == ["explain", "--request", "x"] else 2,
        "",
    )  # 404: it may have been there before
    assert words in error
    assert len(error.splitlines()) == 1


def test_json_that_is_nested_too_deeply_is_no_traceback(kvblocks, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 200_000, encoding="utf-8")
    for arguments in (["hints", str(file)], ["pin", "--tokens", f"@{file}"], ["warm", str(file)]):
        code, output, error = kvblocks(*arguments)
        assert (code, output) == (2, "")
        assert "expected" in error and len(error.splitlines()) == 1
    assert kvblocks("hints", "/nonsense")[2].count("expected") == 1


def test_without_a_server_the_command_says_so(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["cache", "stats", "--url", "http://127.0.0.1:1"])
    assert raised.value.code == 1  # the value may be right: start a server, or try later
    assert "expected a kvblocks server at http://127.0.0.1:1, got ConnectError" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        cli.main(["cache", "stats", "--url", "localhost:8000"])
    assert raised.value.code == 2
    assert "--url: expected http://HOST:PORT, got 'localhost:8000'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["stats"], "prefix_caching"),
        (["pin", "a"], "id"),
        (["unpin", "a"], "id"),
        (["unpin", "--tokens", "1"], "pins"),
        (["dot"], "dot"),
        (["list-pinned"], "pins"),
        (["reset"], "num_removed_entries"),
        (["forget", "--salt", "a"], "num_removed_entries"),
        (["explain", "a"], "prompts"),
    ],
)
def test_another_programs_answers_are_not_taken_for_the_servers(arguments, field, monkeypatch, capsys):
    monkeypatch.setattr(ServerClient, "ask", lambda *_: {"status": "ok"})
    with pytest.raises(SystemExit) as raised:
        cli.main(["cache", *arguments, "--url", "http://127.0.0.1:1"])
    words = f"expected a kvblocks server at http://127.0.0.1:1, got an answer without '{field}'"
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_brings_the_key(tiny_folder, capsys, monkeypatch):
    with running_server(tiny_loaded(tiny_folder), api_key="secret") as server:
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", "stats", "--url", server.url])
        assert raised.value.code == 1
        assert "expected 'Authorization: Bearer KEY'" in capsys.readouterr().err
        monkeypatch.setenv("KVBLOCKS_API_KEY", "secret")
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", "stats", "--url", server.url])
        assert not raised.value.code
        assert "entries" in capsys.readouterr().out


# --- reset and explain -----------------------------------------------------------------------------------------------


def test_a_reset_forgets_all(kvblocks, http):
    num_entries = cached_tokens([ask(http), ask(http)][1]) // 16
    assert kvblocks("reset")[1] == f"removed {num_entries} entries\n"
    assert cached_tokens(ask(http)) == 0


def test_a_salt_is_forgotten_and_others_are_not(kvblocks, http):
    for salt in ("ann", "bob"):
        ask(http, salt=salt)
    num_entries = cached_tokens(ask(http, salt="ann")) // 16
    assert num_entries
    assert kvblocks("forget", "--salt", "ann")[1] == f"removed {num_entries} entries\n"
    assert cached_tokens(ask(http, salt="ann")) == 0
    assert cached_tokens(ask(http, salt="bob")) == 16 * num_entries


@pytest.mark.parametrize("body", [{}, {"cache_salt": 7}, {"cache_salt": "a", "more": 1}])
def test_what_is_to_be_forgotten_is_named(http, body):
    response = http.post("/v1/cache/forget", json=body)
    assert response.status_code == 400
    assert "expected" in response.json()["error"]["message"]


def explain(http, **body):
    response = http.post("/v1/cache/explain", json=body)
    assert response.status_code == 200, response.text
    return response.json()["prompts"]


def test_why_a_prompt_would_miss(http, kvblocks):
    system = "a den in the hat. " * 10
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    assert explain(http, messages=messages)[0]["cause"] == "never cached"
    answer = ask(http, system=system)
    (found,) = explain(http, messages=messages)
    assert found["cause"] == "no miss"
    assert found["num_prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert explain(http, messages=messages, cache_salt="a")[0]["cause"] == "other keys"
    fill(http)
    assert explain(http, messages=messages)[0]["cause"] == "evicted"
    code, output, _ = kvblocks("explain", QUESTION, "--system", system)
    assert code == 0
    assert "was evicted" in output
    assert kvblocks("explain", "--raw", "zzzz " * 20)[1].endswith("never cached, as far as is remembered\n")


def test_why_a_request_missed_when_it_came(http, kvblocks):
    first, second, salted = ask(http), ask(http), ask(http, salt="a")
    assert explain(http, request_id=first["id"])[0]["cause"] in {"never cached", "reset"}
    (known,) = explain(http, request_id=second["id"])
    assert known["cause"] == "no miss"
    assert known["num_cached_tokens"] == known["num_cached_tokens_when_admitted"] == cached_tokens(second)
    assert explain(http, request_id=salted["id"])[0]["cause"] == "other keys"
    assert kvblocks("explain", "--request", second["id"])[1].startswith(f"{cached_tokens(second)} of ")
    assert http.post("/v1/cache/explain", json={"request_id": "cmpl-0"}).status_code == 404


def test_an_explanation_tells_nobody_elses_salt(http):
    answers = [ask(http, salt="secret-1"), ask(http, salt="b"), ask(http, salt="c")]
    for answer in answers[1:]:
        (known,) = explain(http, request_id=answer["id"])
        assert known["cause"] == "other keys"
        assert "another cache_salt" in known["text"]
        assert "secret" not in known["text"]


def test_a_pin_ends_while_nothing_runs(http):
    ask(http)
    pin = http.post("/v1/cache/pins", json={"system": SYSTEM, "ttl_s": 1.0}).json()
    assert pin["num_held_blocks"] > 0
    none = dict.fromkeys(("num_pins", "num_wanted_blocks", "num_held_blocks", "num_pinned_blocks"), 0)
    wait_for(lambda: http.get("/v1/cache/stats").json()["pins"] == none)  # stats don't wake the engine's thread


def test_a_long_text_keeps_nobody_waiting(server, http):
    """It is encoded beside the event loop."""
    encode, gate = server.engine.model.tokenizer.encode, threading.Event()

    def wait_and_encode(*arguments, **options):
        assert gate.wait(60)
        return encode(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine.model.tokenizer, "encode", wait_and_encode)
        asked = threading.Thread(target=lambda: explain(http, text="hello"))
        asked.start()
        time.sleep(0.2)
        with server.http() as other:
            assert other.get("/health", timeout=10).status_code == 200
        gate.set()
        asked.join(60)


@pytest.mark.parametrize("body", [{"text": "a" * 64, "ttl_s": 10**400}, {"text": "a" * 64, "priority": 10**400}])
def test_numbers_beyond_all_bounds_are_refused(http, body):
    assert http.post("/v1/cache/pins", json=body).status_code == 400


@pytest.mark.parametrize("arguments", [("--ttl", "inf"), ("--description", "\udcff")])
def test_what_json_or_unicode_does_not_have_is_an_error_of_one_line(kvblocks, arguments):
    code, _, error = kvblocks("pin", SYSTEM, *arguments)
    assert code == 2
    assert "expected" in error


def test_only_the_last_requests_are_remembered(server, http):
    first = ask(http)
    arrivals, asked = server.service.thread.arrivals, parse_completion({"prompt": [1, 2, 3]})

    def many():
        for number in range(MAX_KEPT):
            arrivals.note(f"other-{number}", asked, [Request(Sequence("other", [1, 2, 3]), 1)])

    server.on_thread(many)
    assert http.post("/v1/cache/explain", json={"request_id": first["id"]}).status_code == 404
    assert explain(http, request_id="other-0")[0]["num_prompt_tokens"] == 3


def test_the_engine_has_a_while_to_answer(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), request_timeout_s=0.2) as server, server.http() as http:
        blocker = threading.Event()
        server.service.thread.call(lambda: blocker.wait(60))
        response = http.get("/v1/cache/pins")
        blocker.set()
    assert response.status_code == 504
    assert "expected the engine to answer within 0.2 s" in response.json()["error"]["message"]


def test_without_a_history_requests_are_not_explained(tiny_folder):
    model = tiny_loaded(tiny_folder)
    with running_server(model, keep_reasons=False, cache={"num_history_blocks": 0}) as server, server.http() as http:
        answer = ask(http)
        (known,) = explain(http, request_id=answer["id"])
        assert (known["cause"], known["num_cached_tokens"]) == (None, 0)
        assert explain(http, token_ids=[200] * 32)[0]["cause"] == "never cached"


def test_without_prefix_caching_pins_are_refused(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"prefix_caching": False}) as server, server.http() as http:
        assert [cached_tokens(ask(http)), cached_tokens(ask(http))] == [0, 0]
        response = http.post("/v1/cache/pins", json={"text": "a"})
        assert response.status_code == 400
        assert "enable_caching" in response.json()["error"]["message"]
        assert http.get("/v1/cache/stats").json()["prefix_caching"] is False
