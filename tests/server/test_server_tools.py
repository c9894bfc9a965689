"""Tools over HTTP, with OpenAI's client: required calls by grammar, calls in streams, and what is refused."""

import json

import openai
import pytest
from server.server_harness import MODEL, running_server, tiny_loaded

ASK = [{"role": "user", "content": "Which kettles are there?"}]
KETTLE = {
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/Colour"},
        "litres": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_new": {"type": "boolean"},
    },
    "required": ["colour", "litres", "is_new"],
    "additionalProperties": False,
    "$defs": {"Colour": {"enum": ["slate", "sand"]}},
}
FIND = {"type": "function", "function": {"name": "find_kettle", "description": "Find a kettle.", "parameters": KETTLE}}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "maxProperties": 0}}}
TOOLS = [FIND, PING]


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder, 4096), cache={"deterministic": True}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 200} | options
    )


def fits(call):
    """Whether a call's arguments fit its schema."""
    values = json.loads(call.function.arguments)
    if call.function.name == "ping":
        return values == {}
    return (
        set(values) == {"colour", "litres", "is_new"}
        and values["colour"] in {"slate", "sand"}
        and values["litres"] in range(10)
        and isinstance(values["is_new"], bool)
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find_kettle"}}])
def test_a_required_call_fits_its_schema_at_any_temperature(client, choice):
    for seed in range(1 if choice == "required" else 2):
        answer = ask(client, tool_choice=choice, temperature=2.0, seed=seed, parallel_tool_calls=False).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert fits(call)
        assert choice == "required" or call.function.name == "find_kettle"


def test_several_required_calls_fit_and_a_stream_has_the_same(client):
    options = {"tool_choice": "required", "temperature": 1.5, "seed": 7, "max_tokens": 900}
    whole = ask(client, **options).choices[0]
    assert all(map(fits, whole.message.tool_calls))
    chunks = list(ask(client, stream=True, **options))
    calls = {}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"name": "", "arguments": "", "id": None})
            call["id"] = delta.id or call["id"]
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert list(calls) == list(range(len(calls)))
    assert len({call["id"] for call in calls.values()}) == len(calls)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.finish_reason
    ]


def test_a_call_that_is_cut_off_is_text_and_says_length(client):
    answer = ask(client, tool_choice="required", max_tokens=12, temperature=0).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
    assert answer.message.content.startswith("<tool_call>")


def test_with_auto_an_answer_without_calls_is_text(client):
    """A random model calls nothing."""
    plain = ask(client, temperature=0, max_tokens=20).choices[0]
    none = ask(client, temperature=0, max_tokens=20, tool_choice="none").choices[0]
    assert plain.message.content == none.message.content
    assert (plain.message.tool_calls, plain.finish_reason) == (None, none.finish_reason)
    streamed = ask(client, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == plain.message.content


def test_none_and_auto_have_the_same_prompt_so_that_the_cache_is_hit(client):
    long = [{"role": "user", "content": "Which kettles? " * 20}]
    first = ask(client, messages=long, max_tokens=2, tool_choice="none", temperature=0).usage
    second = ask(client, messages=long, max_tokens=2, temperature=0).usage
    assert second.prompt_tokens == first.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens - 17


def test_a_turn_after_a_call_hits_the_call(client):
    """Calls come back as they were written: their tokens are those of the answer, and are found in the cache."""
    first = ask(client, tool_choice="required", temperature=1.0, seed=3, parallel_tool_calls=False)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a slate one " * 5}
    turn = [*ASK, message.model_dump(exclude_none=True), result]
    again = ask(client, messages=turn, max_tokens=2, temperature=0).usage
    assert again.prompt_tokens > first.usage.total_tokens
    assert again.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [PING] * 513}, "tools"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "n": 33}, "n"),
    ],
)
def test_what_is_wrong_with_tools_is_told_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **options)
    assert raised.value.param == param
    assert "expected" in raised.value.message


@pytest.mark.parametrize(
    "schema",
    [{"not": {}}, {"type": "object", "x-guidance": {}}, {"type": "nonsense"}, {"type": "string", "pattern": "(?=a)b"}],
)
def test_a_schema_that_no_grammar_can_have_is_refused_where_a_call_is_required(client, schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, tools=tools, tool_choice="required")
    assert raised.value.param == "tools"
    assert ask(client, tools=tools, max_tokens=2).choices[0].finish_reason in {"stop", "length"}


def test_tools_are_counted_by_tokenize_as_by_a_chat(client, server):
    with server.http() as http:
        count = http.post("/tokenize", json={"messages": ASK, "tools": TOOLS}).json()["count"]
    assert count == ask(client, max_tokens=1).usage.prompt_tokens


def test_a_bias_decides_and_a_field_without_effect_is_named(client, server):
    token = server.engine.model.tokenizer.encode("q", add_special_tokens=False)[-1]
    options = {"tools": openai.omit, "temperature": 0, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    answer = ask(client, logit_bias={str(token): 100}, **options)
    assert answer.choices[0].message.content == "qqqq"
    free = ask(client, **options)
    first = server.engine.model.tokenizer.encode(free.choices[0].message.content, add_special_tokens=False)
    assert ask(client, logit_bias={str(one): -100 for one in first}, **options).choices[0] != free.choices[0]
    with pytest.raises(openai.BadRequestError, match="logit_bias: expected token ids below"):
        ask(client, logit_bias={"99999": 1}, **options)
    told = ask(client, reasoning_effort="high", verbosity="low", **options)
    assert [warning.partition(":")[0] for warning in told.warnings] == ["reasoning_effort", "verbosity"]
    assert told.choices[0].message.content == free.choices[0].message.content
