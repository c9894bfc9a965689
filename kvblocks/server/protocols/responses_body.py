"""Reads bodies of OpenAI's Responses, and translates them to chats."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvblocks.server.access.callers import Caller
from kvblocks.server.body.fields import Fields, show
from kvblocks.server.body.messages import check_number, parse_messages
from kvblocks.server.body.origin import Origin
from kvblocks.server.body.parsing import MAX_DEPTH, MAX_ITEMS, is_small
from kvblocks.server.body.prefix_mark import PrefixMark
from kvblocks.server.errors import ApiError
from kvblocks.server.protocols.response_store import ResponseStore
from kvblocks.server.requests import MAX_REQUEST_ID, AnswerRequest, parse_chat

Json = dict[str, Any]

_RETAINED_S = 3600.0
_AROUND_SCHEMA = 16  # values and levels of a tool or a form beside its schema, which is bounded where it is read
_COPIED = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "cache_salt", "prompt_cache_key")
_ALSO_COPIED = ("prompt_cache_options", "priority")
_WITHOUT_EFFECT = ("include", "metadata", "user", "safety_identifier", "service_tier", "max_tool_calls", "top_logprobs")
_ECHOED = ("instructions", "previous_response_id", "temperature", "top_p", "max_output_tokens", "metadata", "user")
# Tuples, since a client may send a list, which can't be looked for in a set.
_LEFT_OUT = ("reasoning",)
_TEXTS = ("input_text", "output_text", "text", "summary_text")
_NO_EFFORT = (None, "none")


def parse_response(body: Any, store: ResponseStore, caller: Caller) -> AnswerRequest:
    """Read a body of /v1/responses that a caller has sent. Raises ApiError."""
    fields = Fields(body)
    chat: Json = {name: fields.take(name) for name in (*_COPIED, *_ALSO_COPIED)}
    stored = fields.take("store") is None or fields.flag("store")
    instructions = fields.take("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise fields.error("instructions", "a text")
    earlier = _parse_previous(fields, store, caller)
    items = _parse_input(fields)
    turns = [*earlier, *items]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += turns
    chat |= {"messages": messages, "max_completion_tokens": fields.count("max_output_tokens", 1)}
    chat |= _parse_tools(fields) | _parse_text(fields)
    if chat["stream"] and fields.take("stream_options") is not None:
        Fields(fields.take("stream_options"), "stream_options").ignore(("include_obfuscation",))
    warnings = _parse_told(fields)
    retention = fields.take("prompt_cache_retention")
    if retention not in {None, "in_memory", "in-memory", "24h"} if isinstance(retention, str | None) else True:
        raise fields.error("prompt_cache_retention", "in_memory or 24h")
    fields.refuse("background", (False,), "this server answers at once")
    fields.refuse("conversation", (), "this server keeps single answers: previous_response_id")
    fields.refuse("prompt", (), "this server keeps no prompts")
    fields.ignore(_WITHOUT_EFFECT)
    fields.refuse_unknown()
    asked = parse_chat(chat)
    marks: tuple[PrefixMark, ...] = ()
    if retention == "24h":
        other = "assistant" if messages[-1]["role"] == "user" else "user"
        marks = (PrefixMark(_RETAINED_S, parse_messages([*messages, {"role": other, "content": "a"}])),)
    echo = {name: body.get(name) for name in _ECHOED}
    echo |= {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto"}
    echo |= {"parallel_tool_calls": body.get("parallel_tool_calls") is not False, "store": stored}
    echo |= {"text": body.get("text") or {"format": {"type": "text"}}, "prompt_cache_key": body.get("prompt_cache_key")}
    _check_echo(fields, echo)
    return replace(
        asked,
        id_prefix="resp_",
        marks=marks,
        clamps=True,
        warnings=(*asked.warnings, *warnings),
        origin=Origin(echo, tuple(turns), is_stored=stored),
    )


def _check_echo(fields: Fields, echo: Json) -> None:
    """Raise ApiError for a field that the answer repeats and that is nested too deep to be written."""
    for name, value in echo.items():
        parts = value if name == "tools" else [value]
        if not all(is_small(part, _AROUND_SCHEMA) for part in parts):
            raise fields.error(name, f"at most {MAX_ITEMS} values, nested at most {MAX_DEPTH} deep")


def _parse_previous(fields: Fields, store: ResponseStore, caller: Caller) -> Sequence[Json]:
    """Return the turns of the answer that this one goes on from, without its instructions."""
    name = fields.text("previous_response_id", MAX_REQUEST_ID)
    if name is None:
        return ()
    found, chosen = store.find(name, caller.tenant), fields.kept_text("cache_salt")
    if found is None or found.salt != caller.salt_for(chosen):
        message = f"previous_response_id: expected the id of an answer that is kept, got {show(name)}"
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    chat: list[Json] = json.loads(found.chat)
    return chat


def _parse_input(fields: Fields) -> list[Json]:
    value = fields.take("input")
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise fields.error("input", "a text, or a list of items")
    check_number("input", value)
    found: list[Json] = []
    for index, item in enumerate(value):
        _add_item(Fields(item, f"input[{index}]"), found)
    return found


def _add_item(item: Fields, found: list[Json]) -> None:
    """Add an item to a chat. Calls join the assistant's message before them."""
    kind = item.take("type") or "message"
    item.ignore(("id", "status", "phase"))
    if kind == "message":
        role = item.take("role")
        found.append({"role": role, "content": _text_of(item, "content")})
    elif kind == "function_call":
        function = {"name": item.take("name"), "arguments": item.take("arguments")}
        call = {"type": "function", "id": item.text("call_id"), "function": function}
        item.ignore(("namespace", "caller"))
        if found and found[-1]["role"] == "assistant":
            found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", ()), call]}
        else:
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        text = _text_of(item, "output")
        found.append({"role": "tool", "content": text, "tool_call_id": item.text("call_id")})
        item.ignore(("name", "namespace", "caller"))
    elif kind in _LEFT_OUT:
        item.ignore(("summary", "content", "encrypted_content"))
    else:
        raise item.error("type", "message, function_call, function_call_output or reasoning")
    item.refuse_unknown()


def _text_of(item: Fields, name: str) -> str:
    """The text of a field that is a text, or a list of parts that are texts."""
    value = item.take(name)
    parts = [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise item.error(name, "a text, or a list of parts")
    check_number(name, parts)
    texts = []
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind == "refusal":
            text = part.get("refusal")
        elif kind not in _TEXTS:
            text = None
        if not isinstance(text, str):
            raise item.error(name, "parts of type input_text or output_text, since this server reads text")
        item.check_unicode(name, text)
        texts.append(text)
    return "".join(texts)


def _parse_tools(fields: Fields) -> Json:
    value, choice = fields.take("tools"), fields.take("tool_choice")
    if value is not None and not isinstance(value, list):
        raise fields.error("tools", "a list of tools")
    tools = []
    for index, item in enumerate(value or ()):
        tool = Fields(item, f"tools[{index}]")
        if tool.take("type") != "function":
            raise tool.error("type", "function, since this server runs no tools of its own")
        function = {name: tool.take(name) for name in ("name", "description", "parameters", "strict")}
        tool.ignore(("defer_loading", "output_schema", "allowed_callers"))
        tool.refuse_unknown()
        tools.append({"type": "function", "function": function})
    return {"tools": tools or None, "tool_choice": choice}


def _parse_text(fields: Fields) -> Json:
    """Read `text`: the form of the answer."""
    value = fields.take("text")
    if value is None:
        return {}
    text = Fields(value, "text")
    form, verbosity = text.take("format"), text.take("verbosity")
    text.refuse_unknown()
    found: Json = {"verbosity": None if verbosity == "medium" else verbosity}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = {name: form[name] for name in form if name != "type"}
        return {**found, "response_format": {"type": "json_schema", "json_schema": inner}}
    return {**found, "response_format": form}


def _parse_told(fields: Fields) -> tuple[str, ...]:
    """Read fields that are told rather than carried out, and return a warning for each."""
    warnings = []
    reasoning = fields.take("reasoning")
    if reasoning is not None:
        inner = Fields(reasoning, "reasoning")
        if inner.take("effort") not in _NO_EFFORT:
            warnings.append("reasoning: this server doesn't tell reasoning from answers")
        inner.ignore(("summary", "generate_summary", "context", "mode"))
        inner.refuse_unknown()
    truncation = fields.take("truncation")
    if truncation not in {None, "disabled", "auto"} if isinstance(truncation, str | None) else True:
        raise fields.error("truncation", "disabled or auto")
    if truncation == "auto":
        warnings.append("truncation: this server takes a prompt whole or not at all")
    return tuple(warnings)
