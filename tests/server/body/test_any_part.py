"""Bodies with one part replaced by something else: whatever it is, the body is read or refused by an error of 400.

What is read can be repeated in an answer, which is JSON.
"""

import copy
import json
from functools import partial

import pytest

from kvblocks.server.access.callers import ANYONE
from kvblocks.server.errors import ApiError
from kvblocks.server.protocols.messages_body import parse_count, parse_message
from kvblocks.server.protocols.response_store import ResponseStore
from kvblocks.server.protocols.responses_body import parse_response
from kvblocks.server.requests import parse_chat, parse_completion

LONE = "\ud800"
JUNK = [None, True, 0, -1, 10**30, 0.5, "", LONE, "none", [], [[]], [None], ["a"], [{}], {}, {"type": []}, {LONE: LONE}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"enable_thinking": True},
    "stream": True,
    "stream_options": {"include_usage": True},
    "prompt_cache_options": {"comparison_response_id": "x"},
}
FORMED = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema"}}
FORMED["response_format"]["json_schema"] = {"name": "n", "strict": True, "schema": SCHEMA}
COMPLETION = {"prompt": ["a", [1, 2]], "stop": ["x"], "stop_token_ids": [3], "structured_outputs": {"choice": ["a"]}}
RESPONSE = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a cat"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "go on"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "look"},
    "metadata": {"a": "b"},
    "user": "ann",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "prompt_cache_retention": "24h",
}
CONTROL = {"type": "ephemeral", "ttl": "1h"}
MESSAGE = {
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": CONTROL}, {"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking"}, {"type": "tool_use", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "a cat"}]}]},
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA, "cache_control": CONTROL}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "stop_sequences": ["x"],
    "diagnostics": {"previous_message_id": "z"},
}
respond = partial(parse_response, store=ResponseStore(), caller=ANYONE)
BODIES = {
    "chat": (parse_chat, CHAT),
    "form": (parse_chat, FORMED),
    "completion": (parse_completion, COMPLETION),
    "response": (respond, RESPONSE),
    "message": (parse_message, MESSAGE),
    "count": (parse_count, MESSAGE),
}


def parts_of(value, path=()):
    """The paths to all parts of a value, itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from parts_of(item, (*path, key))


def replaced(body, path, part):
    if not path:
        return part
    found = around = copy.deepcopy(body)
    for key in path[:-1]:
        around = around[key]
    around[path[-1]] = part
    return found


@pytest.mark.parametrize("name", BODIES)
def test_whatever_stands_in_a_part_the_body_is_read_or_refused(name):
    parse, body = BODIES[name]
    assert parse(body).num_choices >= 1
    seen = set()
    for path in parts_of(body):
        for part in JUNK:
            try:
                request = parse(replaced(body, path, part))
            except ApiError as error:
                seen.add(error.status)
            else:
                seen.add("read")
                assert json.dumps(None if request.origin is None else request.origin.echo, allow_nan=False)
    assert seen == {"read", 400}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("response", ("metadata", "a")),
        ("response", ("user",)),
        ("response", ("tools", 0, "strict")),
        ("response", ("tool_choice", "more")),
        ("message", ("messages", 1, "content", 1, "input", "a")),
    ],
)
def test_what_is_nested_too_deep_to_be_written_is_refused_by_name(name, path):
    parse, body = BODIES[name]
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(ApiError, match="nested at most 64 deep") as raised:
        parse(replaced(body, path, deep))
    assert raised.value.param.split(".")[-1].split("[")[0] in path


def test_a_schema_as_deep_as_it_may_be_is_repeated():
    deep = 0
    for _ in range(62):
        deep = {"a": deep}
    request = respond(replaced(RESPONSE, ("tools", 0, "parameters"), deep))
    assert request.origin.echo["tools"][0]["parameters"] == deep
    with pytest.raises(ApiError, match="JSON schema"):
        respond(replaced(RESPONSE, ("tools", 0, "parameters"), {"a": {"a": {"a": deep}}}))
