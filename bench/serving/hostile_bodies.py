"""Hostile request bodies, for bench.serving.bounds and bench.serving.soak. None of them may be answered with 500."""

import json
import random
from collections.abc import Callable
from typing import Any

NUM_CHARS = 3_900_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

Bodies = dict[str, tuple[str, Callable[[], bytes]]]
"""For each name, the path that a body goes to, and the function that makes it."""


def chat_of(content: Any, **more: Any) -> bytes:
    """A chat of one message, with other fields."""
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}).encode()


def _with_calls(*arguments: str) -> bytes:
    """A chat whose second message calls a tool once with each of these arguments."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    return json.dumps({"messages": messages, "max_tokens": 2}, separators=(",", ":")).encode()


def _with_schema(schema: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat_of("a", response_format=form)


def _array(num_chars: int = NUM_CHARS) -> str:
    return "[" + "0," * (num_chars // 2) + "0]"


def _body(text: bytes, path: str = COMPLETION) -> tuple[str, Callable[[], bytes]]:
    return path, lambda: text


def _schema(schema: Any) -> tuple[str, Callable[[], bytes]]:
    return CHAT, lambda: _with_schema(schema)


NEW_BODIES: Bodies = {
    "an array for the template": (CHAT, lambda: chat_of("a")[:-1] + b', "chat_template_kwargs": {"a": %b}}' % _zeros()),
    "an array in a tool call": (CHAT, lambda: _with_calls('{"a": ' + _array() + "}")),
    "63,000 tool calls": (CHAT, lambda: _with_calls(*["{}"] * 63_000)),
    "9,000 tool calls": (CHAT, lambda: _with_calls(*['{"a": [0, 0, 0]}'] * 9_000)),
    "390,000 keys": (CHAT, lambda: json.dumps({f"{n:x}": 1 for n in range(390_000)}, separators=(",", ":")).encode()),
    "keys in a tool call": (CHAT, lambda: _with_calls(json.dumps({f"{n:x}": 1 for n in range(300_000)}))),
    "a schema of 3 MB": (CHAT, lambda: _with_schema({"enum": [f"{n:08}" for n in range(250_000)]})),
    "fractions": (COMPLETION, lambda: b'{"prompt": [' + b"1.5," * (NUM_CHARS // 4) + b"1]}"),
    "token ids": (COMPLETION, lambda: b'{"prompt": ' + _zeros() + b"}"),
    "names of empty values": (COMPLETION, lambda: b'{"prompt": [' + b'{"a":{}},' * (NUM_CHARS // 9) + b"1]}"),
    "the largest answers": (COMPLETION, lambda: _echo(8000)),
    "half as large, many": (COMPLETION, lambda: b'{"prompt": [' + b"[]," * 20_000 + b"[]]}"),
}

FILLING = frozenset({"the largest answers"})
"""Bodies that are valid, and of which one fills a default pool of SmolLM2's: what comes behind them has to wait."""


def _echo(num_tokens: int) -> bytes:
    """An answer of some 10 MB, which needs no token to be generated."""
    prompt = [random.randrange(256) for _ in range(num_tokens)]
    return json.dumps({"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()


def _zeros() -> bytes:
    return _array().encode()


# The first four are large; the next ones are small and wrong; the last ones are schemas.
OLD_BODIES: Bodies = {
    "digits": (CHAT, lambda: chat_of("1234567890" * (NUM_CHARS // 10))),
    "near the bound": (CHAT, lambda: chat_of("1234567890" * 66_000)),  # SmolLM2's: context x longest token = 663,552
    "empty lists": (COMPLETION, lambda: b'{"prompt": [' + b"[]," * (NUM_CHARS // 3) + b"[]]}"),
    "small messages": (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 110_000}).encode()),
    "not json": _body(b'{"prompt": "a'),
    "nested": _body(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "unknown field": _body(b'{"prompt": "a", "max_token": 5}'),
    "wrong types": _body(b'{"prompt": {"a": 1}, "n": "many", "temperature": "hot"}'),
    "huge numbers": _body(b'{"prompt": "a", "max_tokens": 99999999999999999999999, "seed": -1}'),
    "surrogates": _body(b'{"prompt": "\\ud800", "stop": "\\udfff"}'),
    "ids": _body(b'{"prompt": [4294967295], "max_tokens": 1}'),
    "many items": (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 60_000}).encode()),
    "deep values for the template": (
        CHAT,
        lambda: chat_of("a")[:-1] + b', "chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    ),
    "log probabilities": _body(b'{"prompt": "a", "logprobs": 1000000, "echo": true, "n": 1000000}'),
    "penalties": _body(b'{"prompt": "a", "presence_penalty": 1e300, "repetition_penalty": 0, "min_p": 7}'),
    "nothing": _body(b""),
    "binary": _body(bytes(range(256)) * 16),
    "schema: a pattern of many states": _schema({"type": "string", "pattern": "(a|b|ab)*c{1,900}(x|y){900}"}),
    "schema: not a type": _schema({"type": "nonsense"}),
    "schema: recursive": _schema({"$ref": "#"}),
    "schema: deep": (CHAT, lambda: _with_schema(json.loads('{"items":' * 200 + "{}" + "}" * 200))),
    "schema: huge": (CHAT, lambda: _with_schema({"enum": [f"{n:08}" for n in range(30_000)]})),
    "schema: a multiple": _schema({"multipleOf": 999_983}),
    "schema: open brackets": _schema({"type": "string", "pattern": "(" * 3000}),
    "schema: not supported": _schema({"uniqueItems": True}),
}
