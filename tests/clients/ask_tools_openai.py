"""OpenAI's own Python client with tools and Responses: a call, its result, streams, and a tool that is required."""

import json
import sys

import openai

URL, MODEL = sys.argv[1:]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["slate", "sand"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FIND = {"name": "find_kettle", "description": "Find a kettle.", "parameters": SCHEMA}
client = openai.OpenAI(base_url=URL, api_key="none")
ask = [{"role": "user", "content": "Which kettles are there?"}]
options = {"model": MODEL, "tools": [{"type": "function", "function": FIND}]}
assert client.chat.completions.create(messages=ask, max_tokens=5, **options).choices[0].message
called = client.chat.completions.create(messages=ask, tool_choice="required", max_tokens=900, **options).choices[0]
(call, *_) = called.message.tool_calls
assert json.loads(call.function.arguments)["colour"] in {"slate", "sand"}
results = [{"role": "tool", "tool_call_id": one.id, "content": "sold"} for one in called.message.tool_calls]
turn = [*ask, called.message.model_dump(exclude_none=True), *results]
assert client.chat.completions.create(messages=turn, max_tokens=5, **options).usage.prompt_tokens > 0
with client.chat.completions.stream(
    messages=ask, tool_choice="required", parallel_tool_calls=False, max_tokens=300, **options
) as stream:
    (final,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(final.function.arguments)["colour"] in {"slate", "sand"}
said = client.responses.create(model=MODEL, input="Who?", max_output_tokens=6)
assert client.responses.create(model=MODEL, input="And?", previous_response_id=said.id, max_output_tokens=6).id
