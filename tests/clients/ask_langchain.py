"""langchain-openai, from PyPI: invoke, stream, batch, and usage."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
CHAT = [("system", "The kettle holds 1.2 litres. " * 12), ("human", "How much?")]
model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_completion_tokens=6, stream_usage=True)
whole = model.invoke(CHAT)
parts = list(model.stream(CHAT))
assert "".join(part.content for part in parts) == whole.content
total = parts[0]
for part in parts[1:]:
    total += part
assert total.usage_metadata["input_token_details"]["cache_read"] > 64, total.usage_metadata
assert [answer.content for answer in model.batch([CHAT, CHAT])] == [whole.content] * 2
tool_turns = [
    ("human", "Look."),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "a kettle", "tool_call_id": "c"},
]
assert model.invoke(tool_turns).usage_metadata["input_tokens"] > 0
assert isinstance(OpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=4).invoke("The kettle"), str)
