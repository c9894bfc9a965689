"""Turns chat messages into prompt text, by the Jinja template in a model's folder.

This module finds the template, renders it, and keeps users' text apart from the model's markup.

Invariants:
- Rendered text equals that of `transformers`' apply_chat_template, character by character.
- A template is downloaded code, so it runs in Jinja's immutable sandbox and sees only plain JSON values.
- Markup comes from the template alone. Where a message contains the text of a special token, such as "<|im_end|>", a
  private-use character that occurs nowhere else replaces it while the template runs. The resulting spans say which text
  may be read as markup. If a template garbles this placeholder, the result is odd text, but never markup. (A template
  may build markup from pieces, such as "<|" + role + "|>", so let the caller choose the roles, not the users.)

The environment (options, loop controls, raise_exception, strftime_now, tojson that does not escape HTML) follows what
`transformers` documents for the authors of templates.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvblocks.engine.errors import ModelError
from kvblocks.errors import InvalidArgumentError

__all__ = ["ChatTemplate", "Message", "Span"]

Message = Mapping[str, Any]
"""One turn: a "role", a "content", and whatever else the template reads (tool calls, names). JSON values only."""

_STAND_INS = range(0xF0000, 0xFFFFE)  # Supplementary Private Use Area-A: without meaning, and not used by templates
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Span(NamedTuple):
    """A piece of a prompt: its text, and whether special tokens in it are the template's markup or users' text."""

    text: str
    is_markup: bool


class ChatTemplate:
    """A compiled chat template. Rendering changes no state. source: its text. variables: the names of what it reads."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """`source` is Jinja; `variables` are visible to it by name, such as bos_token.

        Raises ModelError if the source does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        self._variables = dict(variables)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a Hugging Face folder, or None if it has none (base models don't).

        chat_template.jinja takes precedence over the "chat_template" of tokenizer_config.json, as in `transformers`. If
        there are several named templates, the one called "default" is used. Raises ModelError if the template does not
        compile.
        """
        path = folder / "chat_template.jinja"
        if path.is_file():
            tokenizer_config = {**tokenizer_config, "chat_template": path.read_text(encoding="utf-8")}
        return cls.from_config(tokenizer_config, str(folder))

    @classmethod
    def from_config(cls, tokenizer_config: Mapping[str, Any], place: str = "the model") -> "ChatTemplate | None":
        """As `from_folder`, but from the fields of tokenizer_config.json alone.

        place: where these are from, for errors.
        """
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(f"expected the chat template of {place} to be text, got {type(source).__name__}")
        named_tokens = {name: token_text(tokenizer_config.get(name)) for name in _NAMED_TOKENS}
        return cls(source, {name: text for name, text in named_tokens.items() if text is not None})

    def render(
        self,
        messages: list[Message],
        special_texts: Collection[str],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[Span]:
        """Render messages as spans, whose texts joined are the prompt.

        `special_texts` are markup only where the template wrote them. `variables` (JSON values, such as tools or
        enable_thinking) are visible to the template by name, and protected like messages.

        Raises InvalidArgumentError if messages aren't JSON values, or if the template refuses them. O(length).
        """
        plain = _plain_copy({**variables, "messages": messages})
        stand_ins = _StandIns(special_texts, taken=self.source + json.dumps(plain, ensure_ascii=False))
        protected = stand_ins.protect(plain)
        try:
            text = self._template.render(
                {"tools": None, "documents": None, **self._variables, **protected},
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the chat template does not accept these messages: {error}") from error
        return list(stand_ins.split(text))


class _StandIns:
    """One private-use character for each special text that occurs in users' text."""

    def __init__(self, special_texts: Collection[str], taken: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(special_texts, key=len, reverse=True))) or r"(?!)")
        self._free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        self._characters: dict[str, str] = {}  # special text -> its stand-in

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value, with stand-ins for special texts, in keys too."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._stand_in(match[0]), value)
        if isinstance(value, list):
            return [self.protect(element) for element in value]
        if isinstance(value, dict):
            return {self.protect(key): self.protect(element) for key, element in value.items()}
        return value

    def _stand_in(self, special_text: str) -> str:
        if special_text not in self._characters:
            self._characters[special_text] = next(self._free)
        return self._characters[special_text]

    def split(self, text: str) -> Iterator[Span]:
        """The rendered text as spans, with the special texts put back as plain text."""
        special_texts = {character: special_text for special_text, character in self._characters.items()}
        pieces = re.split(f"([{''.join(special_texts)}])", text) if special_texts else [text]
        for piece in filter(None, pieces):
            yield Span(special_texts.get(piece, piece), is_markup=piece not in special_texts)


def token_text(value: object) -> str | None:
    """The text of a token as tokenizer_config.json writes it: a string, an object with "content", or null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _plain_copy(value: Mapping[str, Any]) -> dict[str, Any]:
    for message in value["messages"]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f"expected messages with a text 'role', got {message!r}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"expected messages of JSON values, got something else: {error}") from error
    return plain


def _to_json(value: Any, *, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
