"""Reads a call as FunctionGemma writes it: `call:NAME{key:<escape>text<escape>,other:[1,true]}`."""

import re
from typing import Any

from kvblocks.server.tools.calls import Written, write_call

_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"([^:{}\[\],]++):\s*+")
_ESCAPED = re.compile(r"<escape>(.+)<escape>", re.DOTALL)
_PLAIN = re.compile(r"[^,{}\[\]]+")
_TEXT = re.compile(r"<escape>(.*?)<escape>", re.DOTALL)
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64


def read_gemma_call(text: str) -> Written | None:
    """Return the call in a text, or None if it isn't one. O(text)."""
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        value, end = _value(text, head.end(), 0)
    except ValueError:
        return None
    return write_call(head[1], value) if not text[end:].strip() else None


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at an index, and the index behind it. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if text.startswith("{", at):
        return _items(text, at + 1, depth, is_object=True)
    if text.startswith("[", at):
        return _items(text, at + 1, depth, is_object=False)
    quoted = _TEXT.match(text, at)
    if quoted is not None:
        return quoted[1], quoted.end()
    plain = _PLAIN.match(text, at)
    if plain is None or "<escape>" in plain[0]:
        raise ValueError("expected a value")
    word = plain[0].strip()
    if word in _CONSTANTS:
        return _CONSTANTS[word], plain.end()
    if re.fullmatch(r"-?\d+", word):
        return int(word), plain.end()
    if re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", word):
        return float(word), plain.end()
    return word, plain.end()


def _items(text: str, at: int, depth: int, *, is_object: bool) -> tuple[Any, int]:
    """The items of an object or a list from behind its bracket on, and the index behind its end."""
    found: dict[str, Any] | list[Any] = {} if is_object else []
    end = "}" if is_object else "]"
    while True:
        while at < len(text) and text[at] in " \n\t,":
            at += 1
        if text.startswith(end, at):
            return found, at + 1
        if isinstance(found, dict):
            key = _KEY.match(text, at)
            name = "" if key is None else key[1].strip()
            if key is None or not name:
                raise ValueError("expected a key")
            escaped = _ESCAPED.fullmatch(name)
            found[name if escaped is None else escaped[1]], at = _value(text, key.end(), depth + 1)
        else:
            value, at = _value(text, at, depth + 1)
            found.append(value)
