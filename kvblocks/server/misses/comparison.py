"""Finds where two prompts of a conversation begin to differ, and puts the most common reasons into words.

Tools, system text and messages are compared in this order, as the client sent them; tokens, as the model read them.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.misses.prompts import KeptMessage, KeptPrompt, KeptTool

Part = Literal["tools", "system", "messages", "answer", "prompt", "settings"]

_NUM_SHOWN = 12  # tokens before the first different one
_NUM_SEARCHED = 48  # tokens before and after it, where a time or an id is looked for
_THINK, _THOUGHT = "<think>", "</think>"
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?|\d{1,2}:\d\d(?::\d\d)?(?: ?[AP]M)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,4}(?:, \d{4})?|\b1[0-9]{9,12}\b",
)
_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token and its text; both are None if the prompt ends there."""

    token_id: int | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt compared with the previous one.

    key: the id of the other prompt's answer. num_common: how many leading tokens are equal. part: what differs first;
    None if the prompt only continues the other one. item: which tool or message. words: what has changed, in words.
    before, after: the first different token of each prompt. context: the text before it. num_before: the tokens of the
    other prompt and its answer.
    """

    key: str
    num_common: int
    num_before: int
    part: Part | None = None
    item: str | None = None
    words: str = "the prompt continues the one before it and its answer"
    before: ShownToken = ShownToken(None, None)
    after: ShownToken = ShownToken(None, None)
    context: str = ""


def compare(before: KeptPrompt, after: KeptPrompt, tokenizer: Tokenizer | None) -> Comparison:
    """Compare a prompt with the previous one. O(length of both)."""
    common, first = after.num_common(before), before.tokens + before.output
    if common == len(first) or common >= len(after.tokens):
        words = (
            Comparison.__dataclass_fields__["words"].default
            if common == len(first)
            else "the prompt is a beginning of the one before it"
        )
        return Comparison(before.key, common, len(first), words=str(words))
    part, item, words = _difference(before, after, common)
    shown = [_show(tokens, common, tokenizer) for tokens in (first, after.tokens)]
    span = slice(max(0, common - _NUM_SEARCHED), common + _NUM_SEARCHED)
    around = [_text(tokens[span], tokenizer) for tokens in (first, after.tokens)]
    words = _changed_value(*around) or words
    context = _text(after.tokens[max(0, common - _NUM_SHOWN) : common], tokenizer)
    return Comparison(before.key, common, len(first), part, item, words, shown[0], shown[1], context)


def _difference(before: KeptPrompt, after: KeptPrompt, common: int) -> tuple[Part, str | None, str]:
    """What the client sent otherwise: its part, the item, and words for it."""
    if before.tools != after.tools:
        return ("tools", *_tool_difference(before.tools, after.tools))
    systems = ["\n".join([m.text for m in one.messages if m.role == "system"]) for one in (before, after)]
    if systems[0] != systems[1]:
        return "system", "system", "the system text has changed"
    for index, (old, new) in enumerate(zip(before.messages, after.messages, strict=False)):
        if old != new:
            return ("messages", f"messages[{index}] ({new.role})", _message_difference(old, new))
    if len(after.messages) < len(before.messages):
        return "messages", f"messages[{len(after.messages)}]", "messages at the end are missing: the history was cut"
    if common >= len(before.tokens) and len(after.messages) > len(before.messages):
        return (
            "answer",
            f"messages[{len(before.messages)}] (assistant)",
            "the answer came back with other tokens than were generated",
        )
    if not after.messages:
        return "prompt", None, "the prompt's text has changed"
    return "settings", None, "the messages are equal, but the chat template, or a value for it, has changed their text"


def _tool_difference(before: tuple[KeptTool, ...], after: tuple[KeptTool, ...]) -> tuple[str, str]:
    names = [[tool.name for tool in tools] for tools in (before, after)]
    pairs = enumerate(zip(before, after, strict=False))
    at = next((index for index, (old, new) in pairs if old != new), min(len(before), len(after)))
    name = (names[1] if at < len(after) else names[0])[at]
    item = f"tools[{at}] ({name})"
    if sorted(before) == sorted(after):
        return item, "the tools are the same, but in another order"
    added = [one for one in names[1] if one not in set(names[0])]
    gone = [one for one in names[0] if one not in set(names[1])]
    changes = [f"added: {', '.join(added[:5])}"] if added else []
    changes += [f"removed: {', '.join(gone[:5])}"] if gone else []
    return item, f"tools were {'; '.join(changes)}" if changes else f"the definition of the tool {name} has changed"


def _message_difference(old: KeptMessage, new: KeptMessage) -> str:
    if old.role != new.role:
        return f"the role was {old.role}, and is {new.role} now"
    if old.text != new.text and _without_thoughts(old.text) == _without_thoughts(new.text):
        return "a thinking block was " + ("stripped" if len(new.text) < len(old.text) else "added")
    if old.text == new.text:
        return "the text is the same, but its tool calls or names have changed"
    return "an earlier message was edited"


def _without_thoughts(text: str) -> str:
    """A text without its thinking blocks. O(text)."""
    parts, at = [], 0
    while (start := text.find(_THINK, at)) >= 0 and (end := text.find(_THOUGHT, start)) >= 0:
        parts.append(text[at:start])
        at = end + len(_THOUGHT)
    return "".join([*parts, text[at:]]).strip()


def _changed_value(old: str, new: str) -> str | None:
    """Words for a time, a date or an id that has changed near the first different token; None: it is something else."""
    for pattern, what in ((_TIME, "a time or date"), (_ID, "an id")):
        pairs = zip(pattern.findall(old), pattern.findall(new), strict=False)
        for one, other in pairs:
            if one != other:
                return f"{what} has changed: {one!r} is now {other!r}"
    return None


def _show(tokens: Any, index: int, tokenizer: Tokenizer | None) -> ShownToken:
    if index >= len(tokens):
        return ShownToken(None, None)
    return ShownToken(tokens[index], _text(tokens[index : index + 1], tokenizer))


def _text(tokens: Any, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.decode(list(tokens), skip_special_tokens=False)
