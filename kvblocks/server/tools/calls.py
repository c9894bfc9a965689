"""Tool calls, and how they are read from JSON."""

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any, NoReturn

from kvblocks.server.body.parsing import is_small

_SEPARATORS = " \n\r\t;,"
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: the text of a JSON object, as clients get it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Written:
    """A call as the model wrote it, without an id. arguments: the text of a JSON object."""

    name: str
    arguments: str


def new_call_id(length: int = 0) -> str:
    """Return a new call id. length: some templates want ids of this many letters and digits; 0: our own form."""
    if length:
        return "".join(secrets.choice(_LETTERS) for _ in range(length))
    return f"call_{secrets.token_hex(12)}"


def read_calls(text: str, *, may_go_on: bool = False, needs_arguments: bool = False) -> list[Written] | None:
    """Return the calls in a text that consists of JSON objects, or lists of them, and separators, else None.

    may_go_on: whether other text may follow, which is dropped. needs_arguments: whether an object without arguments is
    no call. O(text).
    """
    index = 0
    found: list[Written] = []
    while True:
        while index < len(text) and text[index] in _SEPARATORS:
            index += 1
        if index == len(text) or (may_go_on and found and text[index] not in "{["):
            return found or None
        try:
            value, index = _DECODER.raw_decode(text, index)
        except (ValueError, RecursionError):
            return None
        for item in value if isinstance(value, list) else [value]:
            call = as_call(item)
            if call is None or (needs_arguments and item.keys().isdisjoint(("arguments", "parameters"))):
                return None
            found.append(call)


def read_named_call(name: str, text: str) -> Written | None:
    """Return a call of `name` with the arguments that a text begins with; None if it doesn't begin with JSON.

    O(text).
    """
    try:
        arguments, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return as_call({"name": name, "arguments": arguments})


def as_call(value: Any) -> Written | None:
    """Return a JSON value as a call, or None if it isn't one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    return write_call(value["name"], arguments) if isinstance(arguments, dict) else None


def write_call(name: str, arguments: dict[str, Any]) -> Written | None:
    """Return a call with these arguments, or None for those that JSON or a later request couldn't have.

    That is infinity, which `1e999` is read as, and arguments of too many values or nested too deep.
    """
    try:
        return Written(name, write_json(arguments)) if is_small(arguments) else None
    except ValueError:
        return None


def write_json(value: Any) -> str:
    """Return a JSON value as templates write it, so that a call that comes back later has the same tokens.

    Raises ValueError for a number that isn't finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected JSON, got {constant}")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
