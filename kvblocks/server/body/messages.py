"""Reads the messages of a chat, and the client's other values for the model's template. Nothing is rendered here.

Tool calls of earlier answers, and their results, are passed on to the template, as in vLLM. A template ignores what it
doesn't know.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvblocks.server.body.fields import Fields, show
from kvblocks.server.body.parsing import MAX_DEPTH, MAX_ITEMS, is_small, parse_json
from kvblocks.server.errors import ApiError

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Names that this server gives a template, or that would replace the template.
_NOT_FOR_CLIENTS = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    )
)


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Read the messages of a chat, which may only contain text. Raises ApiError."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"messages: expected a list of messages, got {show(value)}", param="messages")
    check_number("messages", value)
    return tuple(_parse_message(item, f"messages[{index}]") for index, item in enumerate(value))


def parse_template_values(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`: values that the template may read, such as enable_thinking. Raises ApiError."""
    name = "chat_template_kwargs"
    value = fields.take(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not is_small(value):
        raise fields.error(name, f"an object of at most {MAX_ITEMS} values, nested at most {MAX_DEPTH} deep")
    taken = _NOT_FOR_CLIENTS & set(value)
    if taken:
        raise fields.error(name, f"values that a client may choose, without {min(taken)}")
    return dict(value)


def num_chars(value: Any) -> int:
    """Return the number of characters in all texts of a JSON value, field names included. O(value)."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(num_chars(name) + num_chars(item) for name, item in value.items())
    return sum(map(num_chars, value)) if isinstance(value, (list, tuple)) else len(str(value))


def num_message_chars(messages: Iterable[Message]) -> int:
    """Return the number of characters in all texts of messages. O(messages)."""
    return sum(len(item) if isinstance(item, str) else num_chars(item) for one in messages for item in one.values())


def check_number(name: str, items: list[Any]) -> None:
    """Raise ApiError for a list of more than MAX_ITEMS items."""
    if len(items) > MAX_ITEMS:
        raise ApiError(400, f"{name}: expected at most {MAX_ITEMS}, got {len(items)}", param=name)


def _parse_message(value: Any, name: str) -> Message:
    fields = Fields(value, name)
    role = fields.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        # A template may build markup out of a role, so a client can't choose any text as a role.
        raise fields.error("role", f"one of {', '.join(_ROLES)}")
    calls = _parse_tool_calls(fields, name)
    if calls and role != "assistant":
        raise fields.error("tool_calls", "none, since only an assistant calls tools")
    content = _content(fields, or_nothing=bool(calls))
    message: Message = {"role": _ROLES[role], "content": content}
    for key in ("name", "tool_call_id"):
        text = fields.text(key)
        if text is not None:
            message[key] = text
    if calls:
        message["tool_calls"] = calls
    fields.refuse("function_call", (), "this server takes tool_calls")
    fields.refuse("audio", (), "this server reads text")
    fields.ignore(("refusal", "annotations"))
    fields.refuse_unknown()
    return message


def _parse_tool_calls(fields: Fields, name: str) -> list[Message]:
    """Read an earlier answer's tool calls. Their arguments become values, as templates expect."""
    value = fields.take("tool_calls")
    if value is None:
        return []
    if not isinstance(value, list):
        raise fields.error("tool_calls", "a list of calls")
    check_number(f"{name}.tool_calls", value)
    return [_parse_tool_call(item, f"{name}.tool_calls[{index}]") for index, item in enumerate(value)]


def _parse_tool_call(value: Any, name: str) -> Message:
    call = Fields(value, name)
    call_id = call.text("id")
    call.refuse("type", ("function",), "tools are functions")
    call.ignore(("index",))
    function = Fields(call.take("function"), f"{name}.function")
    call.refuse_unknown()
    called = function.text("name")
    if called is None:
        raise function.error("name", "the name of a function")
    arguments = _parse_arguments(function)
    function.refuse_unknown()
    found: Message = {"type": "function", "function": {"name": called, "arguments": arguments}}
    return found if call_id is None else {"id": call_id, **found}


def _parse_arguments(function: Fields) -> dict[str, Any]:
    text = function.take("arguments")
    if text is None or text == "":
        return {}
    try:
        value = parse_json(text) if isinstance(text, str) else text
    except ApiError:
        value = None
    if not isinstance(value, dict) or not is_small(value):
        most = f"of at most {MAX_ITEMS} values, nested at most {MAX_DEPTH} deep"
        raise function.error("arguments", f"the text of a JSON object {most}")
    return value


def _content(fields: Fields, *, or_nothing: bool) -> str:
    """Read a text, or parts that are texts, joined."""
    content = fields.take("content")
    if content is None and or_nothing:
        return ""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise fields.error("content", "a text or a list of parts")
    check_number("content", parts)
    texts = [part if isinstance(part, str) else _text_of(part) for part in parts]
    for text in texts:
        if text is None:
            raise fields.error("content", "a text, or parts of type 'text'")
        fields.check_unicode("content", text)
    return "".join(text for text in texts if text is not None)


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
