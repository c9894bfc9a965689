"""OpenAI's own Python client, from PyPI: chats, streams, completions, usage, an error, and several at once."""

import asyncio
import sys

import openai

URL, MODEL, IS_ROUTED = sys.argv[1], sys.argv[2], "routed" in sys.argv
CHAT = [{"role": "system", "content": "The kettle holds 1.2 litres. " * 12}, {"role": "user", "content": "How much?"}]
client = openai.OpenAI(base_url=URL, api_key="none")
options = {"model": MODEL, "max_completion_tokens": 6, "temperature": 0}
whole = client.chat.completions.create(messages=CHAT, **options)
chunks = list(
    client.chat.completions.create(messages=CHAT, stream=True, stream_options={"include_usage": True}, **options)
)
said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert said == whole.choices[0].message.content, (said, whole)
assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 64, chunks[-1]
assert client.completions.create(model=MODEL, prompt="The kettle", max_tokens=4, n=2).usage.completion_tokens <= 8
if not IS_ROUTED:  # a router has a list of its own
    assert [model.id for model in client.models.list()] == [MODEL]
code = None
try:
    client.chat.completions.create(messages=CHAT, model=MODEL, max_completion_tokens=10**6)
except openai.BadRequestError as error:
    code = error.code
assert code == "context_length_exceeded", code


async def ask_at_once():
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as other:
        return await asyncio.gather(*(other.chat.completions.create(messages=CHAT, **options) for _ in range(4)))


assert {answer.choices[0].message.content for answer in asyncio.run(ask_at_once())} == {said}
