"""Anthropic's Messages over HTTP: answers, streams, tools, errors, and marks that pin."""

import json

import pytest
from server.protocols_help import events
from server.server_harness import MODEL, Gate, outcomes, running_server, tiny_loaded

from kvblocks.server.access.callers import Caller, TenantKey, digest_of
from kvblocks.server.errors import ApiError
from kvblocks.server.protocols.messages_body import parse_message

HELLO = [{"role": "user", "content": "Hello, who is there?"}]
SYSTEM = "the cat is in the hat. " * 10
MARK = {"type": "ephemeral"}
TOOL = {
    "name": "find_kettle",
    "description": "Find a kettle.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["slate", "sand"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder, 4096)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, cache={"deterministic": True}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def http(server):
    def clear():
        server.service.thread.marks.forget(None)
        server.engine.manager.reset_prefix_cache()

    server.on_thread(clear)
    with server.http() as http:
        yield http


def ask(http, headers=None, **options):
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": HELLO, **options}
    return http.post("/v1/messages", json=body, headers=headers)


def answer(http, **options):
    response = ask(http, **options)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_message_has_anthropics_shape(http):
    said = answer(http, system="Be brief.")
    assert set(said) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert said["id"].startswith("msg_")
    assert (said["type"], said["role"], said["model"]) == ("message", "assistant", MODEL)
    assert [block["type"] for block in said["content"]] == ["text"]
    assert (said["stop_reason"], said["stop_sequence"]) == ("max_tokens", None)
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    other = http.post("/v1/chat/completions", json={**body, "messages": chat}).json()
    assert other["choices"][0]["message"]["content"] == said["content"][0]["text"]
    usage = said["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == other["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 6


def test_a_stream_has_its_events_in_order_and_says_the_same(http):
    whole = answer(http, system=SYSTEM)
    told = events(ask(http, stream=True, system=SYSTEM))
    names = [name for name, _ in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert all(value["type"] == name for name, value in told)
    start = told[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] > 0  # known before the end
    text = "".join(value["delta"]["text"] for name, value in told if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    delta = told[-2][1]
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 6


def test_a_stop_sequence_is_named(http):
    text = answer(http, max_tokens=20, system=SYSTEM)["content"][0]["text"]
    stop = text[3]
    said = answer(http, max_tokens=20, system=SYSTEM, stop_sequences=["never", stop])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", stop)
    assert said["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find_kettle"}])
def test_a_required_call_is_a_block_whole_and_in_a_stream(http, choice):
    options = {"tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 100}
    said = answer(http, **options)
    (block,) = said["content"]
    assert (said["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "find_kettle")
    assert block["input"]["colour"] in {"slate", "sand"}
    told = events(ask(http, stream=True, **options))
    assert [name for name, _ in told[2:]] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[2][1]["content_block"] == {
        "type": "tool_use",
        "id": told[2][1]["content_block"]["id"],
        "name": block["name"],
        "input": {},
    }
    assert json.loads(told[3][1]["delta"]["partial_json"]) == block["input"]
    assert told[5][1]["delta"]["stop_reason"] == "tool_use"


def test_turns_with_tools_results_and_thinking_are_answered(http):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "find_kettle", "input": {"colour": "sand"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sold"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    asked = parse_message({"max_tokens": 5, "messages": turns, "tools": [TOOL]})
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool", "user"]
    assert asked.messages[0]["content"] == "Look.\nNow."
    assert asked.messages[1]["tool_calls"][0]["function"] == {"name": "find_kettle", "arguments": {"colour": "sand"}}
    assert answer(http, messages=turns, tools=[TOOL])["content"]


def test_tokens_are_counted_without_computing(http, server):
    before = outcomes(server)["finished"]
    body = {"model": MODEL, "messages": HELLO, "system": SYSTEM, "tools": [TOOL]}
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert outcomes(server)["finished"] == before
    usage = answer(http, system=SYSTEM, tools=[TOOL])["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


# The shape of a request that Claude Code's command line sends first, recorded from it; the texts are ours.
CLAUDE_CODE = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>"},
                {"type": "text", "text": "say hi", "cache_control": MARK},
            ],
        },
        {"role": "system", "content": "Agents: none."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0123;"},
        {"type": "text", "text": "You are an agent.", "cache_control": MARK},
        {"type": "text", "text": f"\nYou help. {SYSTEM}", "cache_control": MARK},
    ],
    "tools": [TOOL, {"name": "Bash", "description": "Run it.", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": "{}"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_what_claude_code_sends_is_answered_to_the_contexts_end(model):
    with running_server(model) as server, server.http() as http:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "sk-x"}
        told = events(http.post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers))
        start, delta = told[0][1]["message"], told[-2][1]
        assert delta["delta"]["stop_reason"] in {"end_turn", "model_context_window_exceeded"}
        assert len(start["cache_marks"]) == 3
        text = CLAUDE_CODE["system"][0]["text"].replace("0123", "4567")
        system = [{"type": "text", "text": text}, *CLAUDE_CODE["system"][1:]]
        again = events(http.post("/v1/messages", json={**CLAUDE_CODE, "system": system, "max_tokens": 2}))
        usage = again[0][1]["message"]["usage"]
        assert (
            usage["cache_read_input_tokens"] > 8 * usage["input_tokens"]
        )  # the billing header is no part of the prompt


def test_an_answer_ends_at_the_contexts_end(http):
    said = answer(http, system="x" * 3500, max_tokens=10**6)
    assert said["stop_reason"] in {"end_turn", "model_context_window_exceeded"}
    asked = parse_message({**CLAUDE_CODE, "max_tokens": 10**6})
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert asked.messages[1]["content"].endswith("say hi\nAgents: none.")
    assert "billing" not in asked.messages[0]["content"]
    assert asked.options_of(0, lambda: 5)["max_tokens"] == 5


# --- marks -----------------------------------------------------------------------------------------------------------


def marked(text, **more):
    return [{"type": "text", "text": text, "cache_control": {**MARK, **more}}]


def test_a_marked_system_text_is_pinned_and_counted(http, server):
    first = answer(http, system=marked(SYSTEM))
    usage, (mark,) = first["usage"], first["cache_marks"]
    assert (mark["outcome"], mark["ttl_s"], mark["reason"]) == ("pinned", 300.0, None)
    assert usage["cache_read_input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] == mark["num_tokens"] > 64
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": mark["num_tokens"], "ephemeral_1h_input_tokens": 0}
    pins = server.on_thread(
        lambda: [(pin.num_held_blocks, pin.num_wanted_blocks) for pin in server.service.thread.marks]
    )
    assert pins == [(mark["num_tokens"] // 16, mark["num_tokens"] // 16)]
    second = answer(http, system=marked(SYSTEM), messages=[{"role": "user", "content": "Other."}])
    usage, (mark,) = second["usage"], second["cache_marks"]
    assert mark["outcome"] == "renewed"
    assert usage["cache_read_input_tokens"] >= mark["num_tokens"] // 16 * 16
    assert usage["cache_creation_input_tokens"] < 16
    total = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    body = {"model": MODEL, "system": SYSTEM, "messages": [{"role": "user", "content": "Other."}]}
    assert http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] == total


def test_marks_of_a_conversation_move_on_in_one_pin(http, server):
    turns = [{"role": "user", "content": marked("Hello, who is there? " * 4)}]
    for number in range(3):
        said = answer(http, system=marked(SYSTEM), messages=turns)
        assert [mark["outcome"] for mark in said["cache_marks"]][-1] == "pinned"
        turns[-1] = {"role": "user", "content": turns[-1]["content"][0]["text"]}
        turns += [
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": marked(f"And {number}? " * 8)},
        ]
    pins = server.on_thread(lambda: [pin.num_held_blocks for pin in server.service.thread.marks])
    assert len(pins) == 1  # the longest prefix has taken the place of those that it begins with
    assert pins[0] > len(SYSTEM) // 16


def test_a_marked_prefix_survives_what_would_evict_it_and_an_evicted_one_says_so(model):
    with running_server(model, cache={"num_blocks": 64}) as server, server.http() as http:

        def fill():
            for number in range(8):
                prompt = [(index * 7 + number) % 250 for index in range(180)]
                assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200

        short = SYSTEM[:90]
        answer(http, system=marked(short))
        fill()
        said = answer(http, system=marked(short))
        assert said["cache_marks"][0]["outcome"] == "renewed"
        assert said["usage"]["cache_read_input_tokens"] >= said["cache_marks"][0]["num_tokens"] // 16 * 16
        large = [(index * 3) % 250 for index in range(16 * 62)]  # needs the pin's blocks
        assert http.post("/v1/completions", json={"prompt": large, "max_tokens": 1}).status_code == 200
        said = answer(http, system=marked(short))
        assert said["cache_marks"][0]["outcome"] == "evicted"
        assert said["usage"]["cache_read_input_tokens"] < said["cache_marks"][0]["num_tokens"]
        too_long = answer(http, system=marked(SYSTEM * 2))
        assert too_long["cache_marks"][0]["outcome"] == "refused"
        assert "expected marked prefixes of at most 8 blocks" in too_long["cache_marks"][0]["reason"]
        assert too_long["usage"]["cache_creation_input_tokens"] == 0
        brief = answer(http, messages=[{"role": "user", "content": "Hi"}], cache_control=MARK)
        assert brief["cache_marks"][0]["outcome"] in {"pinned", "refused"}


def test_a_mark_keeps_to_the_tenants_quota(model):
    key = "sk-ann-0123456789"
    tenants = (TenantKey(Caller(tenant="ann", may_choose_salt=False), digest_of(key), max_cached_blocks=5),)
    with running_server(model, keys=tenants) as server, server.http() as http:
        said = ask(http, headers={"x-api-key": key}, system=marked(SYSTEM)).json()
        assert "at most 5 blocks" in said["cache_marks"][0]["reason"]
        assert ask(http, headers={"x-api-key": "wrong"}).json()["error"]["type"] == "authentication_error"


def test_the_longer_time_counts_for_what_is_marked_twice(http, server):
    answer(http, system=marked(SYSTEM, ttl="1h"))
    answer(http, system=marked(SYSTEM))
    left = server.on_thread(server.service.thread.marks.seconds_left)
    assert 3500 < left <= 3600


# --- diagnostics -----------------------------------------------------------------------------------------------------


def test_diagnostics_are_in_anthropics_names(http):
    first = answer(http, system=SYSTEM, diagnostics={"previous_message_id": None})
    assert "diagnostics" not in first
    asked = {"diagnostics": {"previous_message_id": first["id"]}}
    grown = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And?"}]
    assert "diagnostics" not in answer(http, system=SYSTEM, messages=grown, **asked)
    found = answer(http, system="Another.", **asked)["diagnostics"]["cache_miss_reason"]
    assert found["type"] == "system_changed"
    assert found["cache_missed_input_tokens"] > 0
    found = answer(http, system=SYSTEM, tools=[TOOL], **asked)["diagnostics"]["cache_miss_reason"]
    assert found["type"] == "tools_changed"
    edited = [{"role": "user", "content": "Hello, who is here?"}]
    found = events(ask(http, system=SYSTEM, messages=edited, stream=True, **asked))[0][1]["message"]["diagnostics"]
    assert found["cache_miss_reason"]["type"] == "messages_changed"
    unknown = answer(http, diagnostics={"previous_message_id": "msg_unknown"})["diagnostics"]
    assert unknown == {"cache_miss_reason": {"type": "previous_message_not_found"}}


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": 5},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}]},
        {"system": 5},
        {"system": [{"type": "image"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "sometimes"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "unknown"}},
        {"thinking": {"type": "much"}},
        {"diagnostics": {"previous_message_id": 5}},
        {"cache_control": {"type": "eternal"}},
        {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
        {"system": [{"type": "text", "text": "a", "cache_control": MARK}] * 5},
        {"colour": 1},
    ],
)
def test_what_is_wrong_is_told_in_anthropics_shape(http, options):
    response = ask(http, **options)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "expected" in body["error"]["message"]
    assert set(body["error"]) == {"type", "message"}


def test_other_errors_have_anthropics_shape_too(http, server):
    found = ask(http, model="another")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
    assert http.get("/v1/messages").json()["type"] == "error"
    gate = Gate(server.engine)
    for stream in (False, True):
        gate.failure = RuntimeError("a fault of a test")
        failed = ask(http, stream=stream)
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    server.engine.runner.run = gate._run  # noqa: SLF001


@pytest.mark.parametrize("body", [5, [], "a", None])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ApiError):
        parse_message(body)
