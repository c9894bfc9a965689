"""With the real SmolLM2-135M: each required call parses and fits its schema, whatever is asked."""

import itertools
import json
from contextlib import contextmanager

import pytest
from server.server_harness import running_server
from server.test_server_tools import KETTLE, PING

from kvblocks.engine import LoadedModel

ORDER = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 20, "pattern": "^[a-z ]+$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "tags": {"type": "array", "items": {"enum": ["gift", "fast"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["item", "count", "address"],
    "additionalProperties": False,
}
FUNCTIONS = {"find_kettle": KETTLE, "order": ORDER, "ping": PING["function"]["parameters"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in FUNCTIONS.items()]
QUESTIONS = ["Order two slate kettles to 12345.", "Is anybody there?", "Write a poem.", "{}", "</tool_call>"]


@contextmanager
def serving(folder):
    with running_server(LoadedModel.load(folder), name="smollm2") as server, server.client() as client:
        yield client.with_options(timeout=300)  # on a busy machine an answer takes minutes
        server.wait_until_idle()


def check(call):
    values = json.loads(call.function.arguments)
    if call.function.name == "find_kettle":
        assert set(values) == {"colour", "litres", "is_new"}
        assert values["colour"] in {"slate", "sand"}
        assert values["litres"] in range(10)
    elif call.function.name == "order":
        assert {"item", "count", "address"} <= set(values) <= {"item", "count", "tags", "address"}
        assert 0 < len(values["item"]) <= 20
        assert values["count"] in range(1, 21)
        assert set(values.get("tags", [])) <= {"gift", "fast"}
        assert len(values["address"]["zip"]) == 5
    else:
        assert (call.function.name, values) == ("ping", {})


CASES = [(QUESTIONS[0], (0,)), *[pytest.param(one, (0, 1.5), marks=pytest.mark.exhaustive) for one in QUESTIONS]]


@pytest.mark.model
@pytest.mark.parametrize(("question", "temperatures"), CASES)
def test_every_required_call_parses_and_fits_its_schema(smollm2_folder, question, temperatures):
    choices = ("required", {"type": "function", "function": {"name": "order"}})[: len(temperatures)]
    with serving(smollm2_folder) as client:
        for temperature, choice in itertools.product(temperatures, choices):
            answer = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": question}],
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=temperature,
                seed=5,
                max_tokens=150,
            ).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            check(call)
