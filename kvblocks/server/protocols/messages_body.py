"""Reads bodies of Anthropic's Messages: translates them to chats, and finds the marked prefixes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvblocks.server.body.fields import Fields
from kvblocks.server.body.messages import check_number, parse_messages
from kvblocks.server.body.parsing import MAX_DEPTH, MAX_ITEMS, is_small
from kvblocks.server.body.prefix_mark import PrefixMark
from kvblocks.server.errors import ApiError
from kvblocks.server.requests import MAX_REQUEST_ID, AnswerRequest, parse_chat

Json = dict[str, Any]

MAX_MARKS = 4
_TTLS = {"5m": 300.0, "1h": 3600.0}
# Tuples, since a client may send a list, which can't be looked for in a set.
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive")
_CHOICES = ("auto", "any", "tool", "none")
_LEFT_OUT = ("thinking", "redacted_thinking")
# A system text that Claude Code sends for its own server's books. It differs in each request, and isn't for the model.
_BILLING = "x-anthropic-billing-header:"
_WITHOUT_EFFECT = (
    *("metadata", "service_tier", "inference_geo", "container", "context_management", "mcp_servers", "speed", "betas"),
    *("fallbacks", "output_config", "user_profile_id"),
)
_COPIED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "prompt_cache_key")


def parse_message(body: Any) -> AnswerRequest:
    """Read a body of /v1/messages. Raises ApiError."""
    fields = Fields(body)
    if fields.take("max_tokens") is None:
        raise fields.error("max_tokens", "the most tokens of the answer, since this field has no default")
    fields.ignore(_WITHOUT_EFFECT)
    chat: Json = {name: fields.take(name) for name in _COPIED}
    chat["stop"] = list(fields.texts("stop_sequences", 16)) or None
    compares_with = _parse_diagnostics(fields)
    chat.update(_parse_thinking(fields))
    translated = _translate(fields)
    fields.refuse_unknown()
    asked = parse_chat({**chat, **translated.chat})
    return replace(asked, id_prefix="msg_", marks=tuple(translated.marks), compares_with=compares_with, clamps=True)


def parse_count(body: Any) -> AnswerRequest:
    """Read a body of /v1/messages/count_tokens. Raises ApiError."""
    values = body if isinstance(body, dict) else {}
    return parse_message({**values, "max_tokens": 1, "stream": False} if values else body)


class _Translated:
    """A body as a chat. chat: the fields of a chat. marks: the marked prefixes, first to last."""

    def __init__(self) -> None:
        self.chat: Json = {}
        self.marks: list[PrefixMark] = []


def _translate(fields: Fields) -> _Translated:
    found = _Translated()
    system, system_marks = _parse_system(fields)
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "a list of messages")
    check_number("messages", messages)
    blocks = _fold([_parse_message(item, f"messages[{index}]") for index, item in enumerate(messages)])
    chat = [*_system_message(system), *[one for role, parts in blocks for one in _chat_messages(role, parts)]]
    tools, tool_marks = _parse_tools(fields)
    found.chat = {"messages": chat, **tools}
    # Templates write tools beside the system text, so both are pinned.
    marks = [_mark(seconds, [*_system_message(system), *_other(blocks, 0)]) for seconds in tool_marks]
    for index, seconds in system_marks:
        rest = system[index + 1 :]
        texts = [*system[: index + 1], _unlike(rest[0])] if rest else system
        marks.append(_mark(seconds, [*_system_message(texts), *_other(blocks, 0)]))
    for at, (role, parts) in enumerate(blocks):
        for index, (_, ttl_s) in enumerate(parts):
            if ttl_s is None:
                continue
            before = [one for r, p in blocks[:at] for one in _chat_messages(r, p)]
            own = parts[: index + 1]
            if index + 1 < len(parts):
                following = str(parts[index + 1][0].get("text", ""))
                variant = _chat_messages(role, [*own, ({"type": "text", "text": _unlike(following)}, None)])
            else:
                variant = [*_chat_messages(role, own), *_other(blocks, at + 1, role)]
            marks.append(_mark(ttl_s, [*_system_message(system), *before, *variant]))
    last = _ttl_of(fields.take("cache_control"), "cache_control")
    if last is not None:  # of the whole prompt
        marks.append(_mark(last, [*chat, *_other(blocks, len(blocks), blocks[-1][0])]))
    if len(marks) > MAX_MARKS:
        raise ApiError(400, f"cache_control: expected at most {MAX_MARKS} in a request, got {len(marks)}")
    found.marks = marks
    return found


def _fold(messages: Sequence[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """Make system texts among the turns text of the user: most templates take only one system text, the first."""
    found: list[tuple[str, list[Any]]] = []
    for role, parts in messages:
        if role != "system":
            found.append((role, parts))
        elif found and found[-1][0] == "user":
            found[-1] = ("user", [*found[-1][1], *parts])
        else:
            found.append(("user", parts))
    return found


def _mark(ttl_s: float, chat: Sequence[Json]) -> PrefixMark:
    return PrefixMark(ttl_s, parse_messages(list(chat)))


def _unlike(text: str) -> str:
    """A text that begins otherwise."""
    return "Z" if text.startswith("a") else "a"


def _other(blocks: Sequence[tuple[str, list[Any]]], at: int, role: str = "assistant") -> list[Json]:
    """A message that the chat doesn't have at this index: what is behind a mark must not be like the chat."""
    following = blocks[at] if at < len(blocks) else None
    text = "" if following is None or not following[1] else str(following[1][0][0].get("text", ""))
    other = "assistant" if role == "user" else "user"
    return [{"role": other if following is None else following[0], "content": _unlike(text)}]


def _system_message(blocks: Sequence[str]) -> list[Json]:
    return [{"role": "system", "content": "\n".join(blocks)}] if blocks else []


def _parse_system(fields: Fields) -> tuple[list[str], list[tuple[int, float]]]:
    """Read the system text's blocks, and which of them are marked, with seconds."""
    value = fields.take("system")
    if value is None:
        return [], []
    items = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise fields.error("system", "a text, or a list of blocks of text")
    check_number("system", items)
    texts: list[str] = []
    marks: list[tuple[int, float]] = []
    for index, item in enumerate(items):
        block, ttl_s = _parse_block(item, f"system[{index}]")
        if block["type"] != "text":
            raise ApiError(400, f"system[{index}]: expected a block of text, got {block['type']}", param="system")
        if block["text"].startswith(_BILLING):
            continue
        texts.append(block["text"])
        if ttl_s is not None:
            marks.append((len(texts) - 1, ttl_s))
    return texts, marks


def _parse_message(value: Any, name: str) -> tuple[str, list[tuple[Json, float | None]]]:
    """Read a message: its role, and its blocks, each with the seconds of its mark."""
    message = Fields(value, name)
    role, content = message.take("role"), message.take("content")
    if role not in _ROLES:
        raise message.error("role", "user or assistant")
    message.refuse_unknown()
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(items, list):
        raise message.error("content", "a text, or a list of blocks")
    check_number(f"{name}.content", items)
    blocks = [_parse_block(item, f"{name}.content[{index}]") for index, item in enumerate(items)]
    return role, blocks


def _parse_block(value: Any, name: str) -> tuple[Json, float | None]:
    """Read a block, and the seconds of its mark."""
    block = Fields(value, name)
    kind, ttl_s = block.take("type"), _ttl_of(block.take("cache_control"), f"{name}.cache_control")
    if kind == "text":
        text = block.take("text")
        if not isinstance(text, str):
            raise block.error("text", "a text")
        block.check_unicode("text", text)
        block.ignore(("citations",))
        found: Json = {"type": "text", "text": text}
    elif kind == "tool_use":
        called, arguments = block.text("name"), block.take("input")
        if called is None or not isinstance(arguments, dict) or not is_small(arguments):
            most = f"of at most {MAX_ITEMS} values, nested at most {MAX_DEPTH} deep"
            raise block.error("input" if called else "name", f"a tool's name, and an object as its input, {most}")
        found = {"type": kind, "id": block.text("id"), "name": called, "input": arguments}
        block.ignore(("caller",))
    elif kind == "tool_result":
        text = _result_text(block, name)
        found = {"type": kind, "id": block.text("tool_use_id"), "text": text}
        block.flag("is_error")
    elif kind in _LEFT_OUT:
        found = {"type": kind}
        block.ignore(("thinking", "signature", "data"))
    else:
        raise block.error("type", "text, tool_use, tool_result or thinking, since this server reads text")
    block.refuse_unknown()
    return found, ttl_s


def _result_text(block: Fields, name: str) -> str:
    content = block.take("content")
    items = [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(items, list):
        raise block.error("content", "a text, or a list of blocks of text")
    texts = []
    for index, item in enumerate(items):
        part, _ = _parse_block(item, f"{name}.content[{index}]")
        if part["type"] != "text":
            raise block.error("content", "blocks of text")
        texts.append(part["text"])
    return "\n".join(texts)


def _chat_messages(role: str, parts: Sequence[tuple[Json, float | None]]) -> list[Json]:
    """A message as those of a chat: results of tools first, then the text. Thinking is left out, as templates do."""
    blocks = [part for part, _ in parts]
    results = [
        {"role": "tool", "content": block["text"], **_id("tool_call_id", block)}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    text = "\n".join([block["text"] for block in blocks if block["type"] == "text"])
    calls = [
        {"type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}, **_id("id", b)}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    has_text = any(block["type"] == "text" for block in blocks)
    if calls:
        return [*results, {"role": role, "content": text, "tool_calls": calls}]
    return [*results, {"role": role, "content": text}] if has_text or not results else results


def _id(name: str, block: Mapping[str, Any]) -> Json:
    return {} if block["id"] is None else {name: block["id"]}


def _parse_tools(fields: Fields) -> tuple[Json, list[float]]:
    """Read the tools as fields of a chat, and the seconds of marked ones."""
    value, choice = fields.take("tools"), fields.take("tool_choice")
    if value is not None and not isinstance(value, list):
        raise fields.error("tools", "a list of tools")
    tools: list[Json] = []
    marks: list[float] = []
    for index, item in enumerate(value or ()):
        tool = Fields(item, f"tools[{index}]")
        tool.refuse("type", ("custom",), "this server runs no tools of its own")
        tool.ignore(("strict", "defer_loading", "allowed_callers", "input_examples", "eager_input_streaming"))
        ttl_s = _ttl_of(tool.take("cache_control"), f"tools[{index}].cache_control")
        function = {"name": tool.take("name"), "description": tool.take("description")}
        tools.append({"type": "function", "function": {**function, "parameters": tool.take("input_schema")}})
        tool.refuse_unknown()
        marks += [] if ttl_s is None else [ttl_s]
    found: Json = {"tools": tools} if tools else {}
    if choice is not None:
        found.update(_parse_choice(Fields(choice, "tool_choice")))
    return found, marks


def _parse_choice(choice: Fields) -> Json:
    kind, name = choice.take("type"), choice.take("name")
    is_one = choice.flag("disable_parallel_tool_use")
    choice.refuse_unknown()
    if kind not in _CHOICES:
        raise choice.error("type", "auto, any, tool or none")
    named = {"type": "function", "function": {"name": name}}
    chosen = {"auto": "auto", "none": "none", "any": "required"}.get(str(kind), named)
    return {"tool_choice": chosen, "parallel_tool_calls": not is_one}


def _parse_thinking(fields: Fields) -> Json:
    """Read `thinking`: the template's `enable_thinking`, if the client says anything."""
    value = fields.take("thinking")
    if value is None:
        return {}
    thinking = Fields(value, "thinking")
    kind = thinking.take("type")
    if kind not in _THINKING:
        raise thinking.error("type", "enabled, disabled or adaptive")
    thinking.ignore(("budget_tokens", "display"))
    thinking.refuse_unknown()
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}


def _parse_diagnostics(fields: Fields) -> str | None:
    value = fields.take("diagnostics")
    if value is None:
        return None
    diagnostics = Fields(value, "diagnostics")
    found = diagnostics.text("previous_message_id", MAX_REQUEST_ID)
    diagnostics.refuse_unknown()
    return found


def _ttl_of(value: Any, name: str) -> float | None:
    """Read a `cache_control`: its seconds; None: there is none."""
    if value is None:
        return None
    control = Fields(value, name)
    control.take("type")
    if control.take("type") != "ephemeral":
        raise control.error("type", "ephemeral")
    ttl = control.take("ttl")
    control.ignore(("scope",))
    control.refuse_unknown()
    if ttl is not None and (not isinstance(ttl, str) or ttl not in _TTLS):
        raise control.error("ttl", f"one of {', '.join(_TTLS)}")
    return _TTLS["5m" if ttl is None else ttl]
