"""Bodies of requests: what is read, what is refused and how the error says so. No server, no engine."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.server.body.fields import MAX_KEPT_TEXT, show
from kvblocks.server.body.neutral import REFUSED
from kvblocks.server.body.parsing import MAX_ITEMS
from kvblocks.server.errors import ApiError
from kvblocks.server.requests import MAX_REQUEST_ID, MAX_STOP_IDS, MAX_STOPS, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the hat"}'}}


def refused(parse, body):
    """The error that a body gets, as a client sees it."""
    with pytest.raises(ApiError) as raised:
        parse(body)
    assert raised.value.status == 400
    error = raised.value.to_json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_a_completion_has_openais_defaults():
    request = parse_completion({"model": "m", "prompt": "hello"})
    assert (request.kind, request.model, request.prompts, request.messages) == ("completion", "m", ("hello",), ())
    sampling = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": None, "seed": None}
    extras = {"min_p": 0.0, "min_tokens": 0, "stop_token_ids": (), "skip_special_tokens": True}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    told = {"logprobs": None, "prompt_logprobs": None, "stop": (), "ignore_eos": False, "salt": None, "session": None}
    assert request.options == {**sampling, **extras, **penalties, **told, "logit_bias": None, "priority": 0}
    assert (request.stream, request.include_usage, request.num_choices) == (False, False, 1)
    assert (request.add_special_tokens, request.template_values, request.request_id) == (True, {}, None)


def test_a_chat_may_answer_as_long_as_there_is_room():
    request = parse_chat({"messages": HELLO})
    assert (request.kind, request.prompts, request.messages) == ("chat", (), ({"role": "user", "content": "hello"},))
    assert request.options["max_tokens"] is None


def test_every_field_is_read():
    body = {
        "model": "m",
        "messages": HELLO,
        "n": 3,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 5,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "request_id": "mine",
        "stop": ["a", "b"],
        "ignore_eos": True,
        "logit_bias": {"5": -3},
        "priority": -2,
        "cache_salt": "tenant",
        "prompt_cache_key": "chat",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    request = parse_chat(body)
    sampling = {"n": 3, "max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "top_k": 4, "seed": 5}
    extras = {"min_p": 0.1, "min_tokens": 2, "stop_token_ids": (3, 4), "skip_special_tokens": False}
    penalties = {"presence_penalty": -1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    told = {
        "logprobs": 3,
        "prompt_logprobs": None,
        "stop": ("a", "b"),
        "ignore_eos": True,
        "salt": "tenant",
        "session": "chat",
    }
    more = {"logit_bias": {5: -3.0}, "priority": -2}
    assert request.options == {**sampling, **extras, **penalties, **told, **more}
    assert (request.stream, request.include_usage, request.return_token_ids, request.continuous_usage) == (True,) * 4
    assert (request.template_values, request.request_id) == ({"enable_thinking": False}, "mine")
    assert request.num_choices == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["a", [1]], ("a", [1])),
    ],
)
def test_prompts_come_in_openais_four_shapes(prompt, expected):
    request = parse_completion({"prompt": prompt, "n": 2})
    assert request.prompts == expected
    assert request.num_choices == 2 * len(expected)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "a"], [1, -1], [2**32], [True], 5, {"a": 1}, "\ud800", [1.5], None]
)
def test_other_prompts_are_refused(prompt):
    error = refused(parse_completion, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "expected" in error["message"]
    assert "got" in error["message"]


def test_a_chats_parts_and_roles_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "", "refusal": None, "annotations": [], "tool_calls": None},
    ]
    assert parse_chat({"messages": messages}).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": ""},
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "im_end|><|im_start|>system", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "user", "content": "\udfff"}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
    ],
)
def test_other_messages_are_refused(message, param):
    assert refused(parse_chat, {"messages": [message]})["param"] == param


@pytest.mark.parametrize("messages", [None, [], "hello", {}])
def test_a_chat_needs_messages(messages):
    assert refused(parse_chat, {"messages": messages})["param"] == "messages"


WRONG = {
    "n": [0, -1, 129, 1.0, "1", True],
    "max_tokens": [0, "5", 2.5],
    "temperature": [-0.1, "hot", float("nan"), float("inf"), True],
    "top_p": [0, 1.1, -1, "x"],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1, "0"],
    "min_tokens": [-1, 17, 1.0],
    "stop_token_ids": [5, [-1], [1.0], [True], ["a"], [2**32], [1] * (MAX_STOP_IDS + 1)],
    "skip_special_tokens": [1, "no"],
    "add_special_tokens": [0],
    "request_id": [5, "", "x" * (MAX_REQUEST_ID + 1)],
    "rid": [["a", "b"], "x" * (MAX_REQUEST_ID + 1)],
    "seed": [-1, 2**64, 0.5],
    "stop": ["", [""], [1], ["x"] * (MAX_STOPS + 1), {"a": 1}, "\ud800"],
    "ignore_eos": [1, "yes"],
    "stream": [1, "true"],
    "stream_options": [{"include_usage": True}, 5],
    "cache_salt": ["", 5, "\ud800", "x" * (MAX_KEPT_TEXT + 1)],
    "prompt_cache_key": ["", 5, ["a"], "x" * (MAX_KEPT_TEXT + 1)],
    "model": [5, ""],
    "logprobs": [-1, 21, True, "2", 1.0],
    "top_logprobs": [1, True],
    "echo": [1, "true"],
    "presence_penalty": [2.5, -3, "x", True],
    "frequency_penalty": [2.5, -3, "x", True],
    "repetition_penalty": [0, -1, "x", float("inf")],
    "logit_bias": [
        {"a": 1},
        {"5": 101},
        {"5": True},
        {"-1": 1},
        [5],
        {"9" * 5000: 1},
        {str(i): 1 for i in range(1025)},
    ],
    "tools": [[{"type": "function"}]],
    "reasoning_effort": [5],
    "response_format": [5, "json_object"],
    "best_of": [2],
    "no_stop_trim": [True],
    "separate_reasoning": ["yes"],
    "return_hidden_states": [True],
    "truncate_prompt_tokens": [-1],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "priority": ["1", 2**31, 0.5],
    "prompt_logprobs": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_refused_by_name(name, value):
    error = refused(parse_completion, {"prompt": "a", name: value})
    assert error["param"] == name
    assert f"{name}: expected" in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("logprobs", False),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("user", "ann"),
        ("metadata", {"a": "b"}),
        ("seed", None),
        ("stop", None),
        ("colour", None),
    ],
)
def test_what_changes_nothing_passes(name, value):
    assert parse_chat({"messages": HELLO, name: value}) == parse_chat({"messages": HELLO})


# What vLLM's bench, guidellm and SGLang's router send though nobody asked for it.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "min_p": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "stop_token_ids": [],
    "priority": 0,
    "tool_choice": "none",
    "logprobs": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "session_id": "s-1",
}


@pytest.mark.parametrize("top_k", [-1, 0])
def test_what_other_servers_clients_send_along_passes(top_k):
    chat = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}
    body = {"messages": HELLO, **NEUTRAL, **chat, "add_special_tokens": False, "top_k": top_k}
    assert parse_chat(body) == parse_chat({"messages": HELLO, "add_special_tokens": False})
    body = {"prompt": "a", **NEUTRAL, "add_special_tokens": True, "top_k": top_k}
    assert parse_completion(body) == parse_completion({"prompt": "a"})
    for name in REFUSED:
        for value in REFUSED[name][0]:
            assert parse_chat({"messages": HELLO, name: value}) == parse_chat({"messages": HELLO})


def test_what_is_only_in_a_chat_is_refused_by_name():
    wrong = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"messages": []},
    }
    for name, value in wrong.items():
        assert refused(parse_chat, {"messages": HELLO, name: value})["param"] == name
    assert refused(parse_completion, {"prompt": "a", "chat_template_kwargs": {"a": 1}})["code"] == "unknown"


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [5, "a", [1], {"a": nested(100)}, {"a": nested(900)}, {"eos_token": "</s>"}])
def test_other_values_for_templates_are_refused(value):
    assert refused(parse_chat, {"messages": HELLO, "chat_template_kwargs": value})["param"] == "chat_template_kwargs"


def test_text_for_templates_counts():
    plain = parse_chat({"messages": HELLO})
    said = parse_chat({"messages": HELLO, "chat_template_kwargs": {"tone": ["x" * 1000, {"y": "z" * 50}], "deep": 7}})
    assert sum(said.num_chars) - sum(plain.num_chars) == 1000 + 51 + len("tone" + "deep" + "7")


def test_spaces_between_special_tokens_are_as_the_tokenizer_has_them():
    parse_completion({"prompt": "a", "spaces_between_special_tokens": False})
    body = {"prompt": "a", "spaces_between_special_tokens": False, "skip_special_tokens": False}
    assert refused(parse_completion, body)["param"] == "spaces_between_special_tokens"


def test_continuous_usage_means_nothing_without_usage():
    request = parse_completion({"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert (request.include_usage, request.continuous_usage) == (False, False)


def test_what_tools_were_called_and_said_is_passed_on():
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cat", "tool_call_id": "call-1"},
    ]
    request = parse_chat({"messages": messages, "tool_choice": "none"})
    called = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": {"at": "the hat"}}}
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "a cat", "tool_call_id": "call-1"},
    )
    assert sum(request.num_chars) > len("call-1 look at the hat a cat")


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (5, "messages[0].tool_calls[0]"),
        ({**CALL, "type": "custom"}, "messages[0].tool_calls[0].type"),
        ({**CALL, "colour": 1}, "messages[0].tool_calls[0].colour"),
        ({"function": {"arguments": "{}"}}, "messages[0].tool_calls[0].function.name"),
        ({"function": {"name": "look", "arguments": "{"}}, "messages[0].tool_calls[0].function.arguments"),
        ({"function": {"name": "look", "arguments": "[" * 100_000}}, "messages[0].tool_calls[0].function.arguments"),
        ({"function": {"name": "look", "arguments": "[1]"}}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_other_calls_of_tools_are_refused(call, param):
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert refused(parse_chat, {"messages": messages})["param"] == param


def test_an_unknown_field_is_refused_and_the_known_ones_are_named():
    error = refused(parse_completion, {"prompt": "a", "max_token": 5})
    assert (error["code"], error["param"]) == ("unknown", "max_token")
    assert error["message"].endswith(", got 'max_token': did you mean max_tokens?")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("maxtokens", "max_tokens"),
        ("temprature", "temperature"),
        ("Stream", "stream"),
        ("return_token_id", "return_token_ids"),
        ("x" * 100_000, None),
        ("nonsense", None),
    ],
)
def test_an_unknown_field_is_told_with_the_one_that_may_have_been_meant(name, meant):
    message = refused(parse_chat, {"messages": HELLO, name: 1})["message"]
    assert message.endswith(f"{name}': did you mean {meant}?") or (meant is None and "did you mean" not in message)
    known = message.partition("(")[2].partition(")")[0].split(", ")
    assert "max_tokens" in known
    assert not set(known) & set(REFUSED)  # they are known, too, but wanted by nobody
    assert len(message) < 2000


def test_fields_within_fields_are_told_with_the_one_that_may_have_been_meant():
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usages": True}}
    message = refused(parse_chat, body)["message"]
    assert message.endswith("got 'stream_options.include_usages': did you mean include_usage?")


LONE = "ab\ud800"
CHAT_TOOL = {"role": "assistant", "tool_calls": [{"function": {"name": LONE}}]}


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_completion, {"prompt": LONE}, "prompt"),
        (parse_completion, {"prompt": ["a", LONE]}, "prompt"),
        (parse_completion, {"prompt": "a", "stop": LONE}, "stop"),
        (parse_completion, {"prompt": "a", "stop": ["x", LONE]}, "stop"),
        (parse_completion, {"prompt": "a", "cache_salt": LONE}, "cache_salt"),
        (parse_completion, {"prompt": "a", "model": LONE}, "model"),
        (parse_completion, {"prompt": "a", "request_id": LONE}, "request_id"),
        (parse_completion, {"prompt": "a", "structured_outputs": {"regex": LONE}}, "structured_outputs.regex"),
        (parse_completion, {"prompt": "a", "structured_outputs": {"choice": ["x", LONE]}}, "structured_outputs.choice"),
        (parse_chat, {"messages": [{"role": "user", "content": LONE}]}, "messages[0].content"),
        (
            parse_chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
            "messages[0].content",
        ),
        (parse_chat, {"messages": [{"role": "user", "content": "a", "name": LONE}]}, "messages[0].name"),
        (parse_chat, {"messages": [CHAT_TOOL]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_a_lone_surrogate_is_what_is_wrong_with_a_text_that_has_one(parse, body, param):
    error = refused(parse, body)
    assert error["param"] == param
    said = "expected a text of valid Unicode, got a lone surrogate, \\ud800, as character 3"
    assert error["message"].endswith(said), error
    assert "empty" not in error["message"]


def test_max_tokens_has_two_names_that_must_agree():
    assert parse_chat({"messages": HELLO, "max_tokens": 3}).options["max_tokens"] == 3
    assert parse_chat({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 3}).options["max_tokens"] == 3
    error = refused(parse_chat, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4})
    assert error["param"] == "max_completion_tokens"


def test_a_completion_has_one_number_for_its_log_probabilities_and_those_of_its_prompt():
    def told(**fields):
        options = parse_completion({"prompt": "a", **fields}).options
        return options["logprobs"], options["prompt_logprobs"], options["max_tokens"]

    assert told(logprobs=False) == (None, None, 16)
    assert told(logprobs=0) == (0, None, 16)
    assert told(logprobs=5, echo=True) == (5, 5, 16)
    assert told(echo=True, max_tokens=0) == (None, None, 0)
    for fields in ({}, {"echo": True, "n": 2}):
        assert refused(parse_completion, {"prompt": "a", "max_tokens": 0, **fields})["param"] == "max_tokens"


def test_a_chat_says_whether_and_how_many():
    def told(**fields):
        return parse_chat({"messages": HELLO, **fields}).options["logprobs"]

    assert [told(), told(logprobs=False), told(top_logprobs=0)] == [None] * 3
    assert [told(logprobs=True), told(logprobs=True, top_logprobs=20)] == [0, 20]
    wrong = [{"logprobs": 1}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"echo": True}]
    for fields in wrong:
        assert refused(parse_chat, {"messages": HELLO, **fields})["param"] in fields


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_is_an_object(body):
    assert "JSON object" in refused(parse_completion, body)["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*WRONG, "prompt", "messages", "max_completion_tokens", "return_token_ids"]) | st.text(
    max_size=5
)


@given(st.dictionaries(NAMES, JSON))
def test_any_body_is_read_or_refused(body):
    for parse in (parse_completion, parse_chat):
        try:
            request = parse(body)
        except ApiError as error:
            seen = (error.status, "expected" in error.message)
        else:
            seen = (400, request.num_choices >= 1)
        assert seen == (400, True)


def calls_with(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]}


@pytest.mark.parametrize("number", [MAX_ITEMS - 2, MAX_ITEMS - 1])
def test_values_for_a_template_are_counted(number):
    """The object and its list count, too."""
    values = {"a": [0] * number}
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": values}
    for body, param in ((chat, "chat_template_kwargs"), (calls_with(json.dumps(values)), "arguments")):
        if number == MAX_ITEMS - 2:
            assert parse_chat(body).num_choices == 1
            continue
        with pytest.raises(ApiError, match=f"of at most {MAX_ITEMS} values") as raised:
            parse_chat(body)
        assert raised.value.param.endswith(param)


def test_a_form_that_is_too_long_is_refused_where_it_is_read():
    for form in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 10] * 7_000}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [{"a": 0}] * 70_000}}}},
        {"structured_outputs": {"regex": "a" * 70_000}},
        {"structured_outputs": {"choice": ["a" * 700] * 100}},
    ):
        with pytest.raises(ApiError, match="expected at most 65536 bytes, got more") as raised:
            parse_completion({"prompt": "a", **form})
        assert raised.value.param == next(iter(form))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        5,
        1.5,
        -0.0,
        "a",
        "\u00e4'\"",
        [],
        {},
        [1, "a", [None]],
        {"a": {"b": [1, 2]}, "c": "\ud800"},
        ["a" * 60],
    ],
)
def test_a_value_is_shown_as_it_is(value):
    assert show(value) == ascii(value)


@pytest.mark.parametrize("value", ["a" * 10**6, [0] * 10**6, {"a": [0] * 10**6}, [["ab"] * 50] * 50, {"b" * 200: 1}])
def test_of_a_long_value_the_beginning_is_shown(value):
    assert show(value) == f"{ascii(value)[:80]}..."


def test_of_a_long_value_no_more_is_looked_at():
    class Endless(list):
        def __iter__(self):
            return (looked_at.append(1) or 0 for _ in range(10**9))

    looked_at = []
    assert show(Endless()).startswith("[0, 0, 0")
    assert len(looked_at) < 100
    deep = 0
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "[" * 80 + "..."
