"""litellm, from PyPI: as a server of OpenAI's API, and as one of vLLM's."""

import sys

import litellm

URL, MODEL = sys.argv[1:]
CHAT = [{"role": "system", "content": "The kettle holds 1.2 litres. " * 12}, {"role": "user", "content": "How much?"}]
litellm.telemetry = False
for provider in ("openai", "hosted_vllm"):
    options = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 6, "temperature": 0}
    whole = litellm.completion(messages=CHAT, **options)
    parts = list(litellm.completion(messages=CHAT, stream=True, stream_options={"include_usage": True}, **options))
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == whole.choices[0].message.content, (provider, said)
    again = litellm.completion(messages=CHAT, **options)
    assert again.usage.prompt_tokens_details.cached_tokens > 64, again.usage
    more = litellm.completion(
        messages=CHAT, extra_body={"min_tokens": 3, "repetition_penalty": 1.0, "top_k": -1}, **options
    )
    assert more.usage.completion_tokens >= 3
    name = None
    try:
        litellm.completion(messages=CHAT, **{**options, "max_tokens": 10**6})
    except litellm.BadRequestError as error:
        name = type(error).__name__
    assert name == "ContextWindowExceededError", name
