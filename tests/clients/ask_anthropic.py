"""Anthropic's own Python client: messages, streams, tools, marks, counts and errors."""

import sys

import anthropic

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
client = anthropic.Anthropic(base_url=URL, api_key="none")
SYSTEM = [{"type": "text", "text": "The teapot holds 0.7 litres. " * 12, "cache_control": {"type": "ephemeral"}}]
ask = [{"role": "user", "content": "How much?"}]
options = {"model": MODEL, "max_tokens": 6, "system": SYSTEM, "extra_body": {"temperature": 0}}
whole = client.messages.create(messages=ask, **options)
again = client.messages.create(messages=ask, **options)
assert whole.usage.cache_creation_input_tokens > 64, whole.usage
assert again.usage.cache_read_input_tokens > 64, again.usage
assert again.usage.cache_creation_input_tokens < 16, again.usage
with client.messages.stream(messages=ask, **options) as stream:
    assert "".join(stream.text_stream) == "".join(block.text for block in whole.content)
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["slate", "sand"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
tools = [{"name": "find_kettle", "description": "Find a kettle.", "input_schema": SCHEMA}]
called = client.messages.create(
    model=MODEL,
    max_tokens=900,
    messages=ask,
    tools=tools,
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
)
(block,) = called.content
assert (called.stop_reason, block.type) == ("tool_use", "tool_use")
assert block.input["colour"] in {"slate", "sand"}
result = {"type": "tool_result", "tool_use_id": block.id, "content": "sold"}
turn = [*ask, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(messages=turn, model=MODEL, max_tokens=5, tools=tools).usage.input_tokens > 0
assert client.messages.count_tokens(model=MODEL, messages=ask).input_tokens > 0
told = client.messages.create(
    model=MODEL, max_tokens=3, messages=ask, system="Other.", diagnostics={"previous_message_id": whole.id}
)
assert told.diagnostics.cache_miss_reason.type == "system_changed"
name = None
try:
    client.messages.create(model="another", max_tokens=6, messages=ask)
except anthropic.NotFoundError as error:
    name = error.body["error"]["type"]
assert name == "not_found_error", name
