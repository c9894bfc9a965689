"""Reads `tools`, `tool_choice` and `parallel_tool_calls`, and says which form a required call has."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from kvblocks.engine.grammar.grammar import Grammar, GrammarCompiler
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.body.fields import Fields
from kvblocks.server.body.parsing import MAX_ITEMS, is_small
from kvblocks.server.errors import ApiError
from kvblocks.server.tools.calls import write_json
from kvblocks.server.tools.formats import ToolFormat

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools.

    definitions: the checked definitions in OpenAI's format, for the template. choice: whether the answer calls tools.
    only: the one tool to call (`choice` is then "required"), or None for any. is_one: whether at most one call is
    allowed. fingerprints: the name and a digest of each definition.
    """

    definitions: tuple[Mapping[str, Any], ...]
    choice: Choice
    only: str | None = None
    is_one: bool = False
    fingerprints: tuple[tuple[str, bytes], ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether calls are read from the answer."""
        return self.choice != "none"

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Return the argument schemas of the tools that a required call may name."""
        functions = [one["function"] for one in self.definitions]
        return {
            function["name"]: function.get("parameters") or {"type": "object"}
            for function in functions
            if self.only in {None, function["name"]}
        }


@dataclass(frozen=True, slots=True)
class CallsForm:
    """The form of an answer that must call tools. name: the field's name, for errors."""

    use: ToolUse
    tool_format: ToolFormat
    name: str = "tool_choice"

    def compile(self, compiler: GrammarCompiler, tokenizer: Tokenizer | None) -> Grammar:
        """Compile it to a grammar, which takes a second or much longer.

        Raises ApiError for schemas that aren't accepted.
        """
        of = self.tool_format
        calls = [(*of.call_parts(name), schema) for name, schema in self.use.schemas().items()]
        special = {} if tokenizer is None else of.special_marks(tokenizer)
        around = (of.before, of.between, of.after)
        try:
            return compiler.calls(calls, around, special, is_list=of.is_list, is_one=self.use.is_one)
        except InvalidArgumentError as error:
            raise ApiError(400, f"tools: {ascii(str(error))[1:-1]:.400}", param="tools") from error


def parse_tools(fields: Fields) -> ToolUse | None:
    """Read a chat's fields about tools; None if it has no tools. Raises ApiError."""
    value, choice = fields.take("tools"), fields.take("tool_choice")
    is_one = fields.take("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls")
    if value is not None and not isinstance(value, list):
        raise fields.error("tools", "a list of tools")
    if not value:
        if choice not in {None, "none", "auto"} if isinstance(choice, (str, type(None))) else True:
            raise fields.error("tool_choice", "none or auto without tools")
        return None
    if len(value) > MAX_TOOLS:
        raise ApiError(400, f"tools: expected at most {MAX_TOOLS}, got {len(value)}", param="tools")
    definitions = tuple([_parse_tool(item, f"tools[{index}]") for index, item in enumerate(value)])
    return make_use(fields, definitions, choice, is_one=is_one)


def make_use(fields: Fields, definitions: tuple[Mapping[str, Any], ...], choice: Any, *, is_one: bool) -> ToolUse:
    """Make a `ToolUse` of checked definitions. choice: OpenAI's field `tool_choice`. Raises ApiError."""
    prints = tuple([(one["function"]["name"], sha256(write_json(one).encode()).digest()) for one in definitions])
    if choice is None:
        return ToolUse(definitions, "auto", None, is_one, prints)
    if isinstance(choice, str) and choice in _CHOICES:
        kind: Choice = "none" if choice == "none" else "auto" if choice == "auto" else "required"
        return ToolUse(definitions, kind, None, is_one, prints)
    name = _name_of(choice)
    known = [one["function"]["name"] for one in definitions]
    if name not in known:
        raise fields.error("tool_choice", f"none, auto, required, or one of the functions {', '.join(known)[:200]}")
    return ToolUse(definitions, "required", name, is_one=True, fingerprints=prints)


def _name_of(choice: Any) -> str | None:
    """The name in a choice of one function: Chat Completions' shape, or that of Responses."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _parse_tool(value: Any, name: str) -> Mapping[str, Any]:
    tool = Fields(value, name)
    kind = tool.take("type")
    if kind != "function":
        raise tool.error("type", "function, since this server runs no tools of its own")
    function = Fields(tool.take("function"), f"{name}.function")
    tool.ignore(("defer_loading", "cache_control"))
    tool.refuse_unknown()
    found = parse_function(function, "parameters")
    function.refuse_unknown()
    return found


def parse_function(function: Fields, schema_name: str) -> Mapping[str, Any]:
    """Read the name, description and schema of a function. Returns a definition in OpenAI's format. Raises ApiError."""
    called, text = function.text("name"), function.take("description")
    if called is None or not _NAME.fullmatch(called):
        raise function.error("name", "1 to 128 letters, digits, and _ . : / -")
    if text is not None and not isinstance(text, str):
        raise function.error("description", "a text")
    function.check_unicode("description", text or "")
    schema = function.take(schema_name)
    if schema is not None and (not isinstance(schema, dict) or not is_small(schema)):
        raise function.error(schema_name, f"a JSON schema, an object of at most {MAX_ITEMS} values")
    function.check_unicode(schema_name, write_json(schema or {}))
    function.ignore(("strict",))
    described = {} if text is None else {"description": text}
    return {"type": "function", "function": {"name": called, **described, "parameters": schema or {"type": "object"}}}
