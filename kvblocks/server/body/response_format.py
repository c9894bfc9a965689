"""The form of an answer: `response_format` as OpenAI's clients send it, or `structured_outputs` as vLLM's do.

The form is only read here; a thread of its own compiles it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvblocks.engine.grammar.bounds import check_form_size
from kvblocks.engine.grammar.grammar import Grammar, GrammarCompiler
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.body.fields import Fields
from kvblocks.server.errors import ApiError

MAX_CHOICES = 1000
MAX_FORMED = 32
"""The most answers with a form in one request. Each takes up to milliseconds for its grammar before each token."""

_FORMATS = ("text", "json_object", "json_schema")
_KINDS = ("json", "json_object", "regex", "choice")
# Fields of vLLM's object that have no effect here: they are options of its own libraries.
_WITHOUT_EFFECT = (
    *("disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
    *("whitespace_pattern", "grammar", "structural_tag"),
)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer's text must have. name: the field's name.

    value: a schema, a pattern, or a list of texts.
    """

    name: str
    kind: Literal["json_schema", "regex", "choice"]
    value: Any

    def compile(self, compiler: GrammarCompiler, tokenizer: Tokenizer | None) -> Grammar:
        """Compile it to a grammar, which takes a second or much longer.

        Raises ApiError if the compiler refuses the form.
        """
        del tokenizer  # the compiler has it
        try:
            if self.kind == "json_schema":
                return compiler.json_schema(self.value)
            return compiler.regex(self.value) if self.kind == "regex" else compiler.choice(self.value)
        except InvalidArgumentError as error:
            raise ApiError(400, f"{self.name}: {ascii(str(error))[1:-1]:.400}", param=self.name) from error


def parse_form(fields: Fields, num_answers: int = 1, *, must_call: bool = False) -> Form | None:
    """Read the form of `num_answers` answers; None: any text. must_call: they have to call tools. Raises ApiError."""
    openais, vllms = _parse_response_format(fields), _parse_structured_outputs(fields)
    if openais is not None and vllms is not None:
        raise fields.error("structured_outputs", "none beside response_format, which says the same")
    form = openais or vllms
    if form is not None and must_call:
        raise fields.error(form.name, "none where a tool has to be called, since that is a form, too")
    if form is not None:
        try:
            check_form_size(form.value)
        except InvalidArgumentError as error:
            raise ApiError(400, f"{form.name}: {error}", param=form.name) from error
    name = "tool_choice" if must_call else None if form is None else form.name
    if name is not None and fields.take("ignore_eos"):
        raise fields.error("ignore_eos", f"false with {name}, since the answer ends when it is whole")
    if name is not None and fields.take("min_tokens"):
        raise fields.error("min_tokens", f"0 with {name}, since the answer ends when it is whole")
    if name is not None and num_answers > MAX_FORMED:
        message = f"n: expected at most {MAX_FORMED} answers in one request with {name}, got {num_answers}"
        raise ApiError(400, message, param="n")
    return form


def _parse_response_format(fields: Fields) -> Form | None:
    value = fields.take("response_format")
    if value is None:
        return None
    own = Fields(value, "response_format")
    kind = own.take("type")
    if kind not in _FORMATS:
        raise own.error("type", f"one of {', '.join(_FORMATS)}")
    schema: object = {"type": "object"}
    if kind == "json_schema":
        inner = Fields(own.take("json_schema"), "response_format.json_schema")
        inner.ignore(("name", "description", "strict"))
        schema = inner.take("schema")
        if not isinstance(schema, dict):
            raise inner.error("schema", "a JSON schema, an object")
        inner.refuse_unknown()
    own.refuse_unknown()
    return None if kind == "text" else Form("response_format", "json_schema", schema)


def _parse_structured_outputs(fields: Fields) -> Form | None:
    value, name = fields.take("structured_outputs"), "structured_outputs"
    if value is None or value == {}:
        return None
    own = Fields(value, name)
    given = [kind for kind in _KINDS if kind in own and own.take(kind) is not False]
    if len(given) != 1:
        raise fields.error(name, f"one of {', '.join(_KINDS)}")
    form = _read_kind(own, given[0])
    for ignored in _WITHOUT_EFFECT:
        own.refuse(ignored, (False,), "this server has one library for it, with one setting")
    own.refuse_unknown()
    return form


def _read_kind(own: Fields, kind: str) -> Form:
    name, value = "structured_outputs", own.take(kind)
    if kind == "json_object":
        if value is not True:
            raise own.error(kind, "true")
        return Form(name, "json_schema", {"type": "object"})
    if kind == "json":
        if not isinstance(value, Mapping):
            raise own.error(kind, "a JSON schema, an object")
        return Form(name, "json_schema", value)
    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise own.error(kind, "a regular expression")
        own.check_unicode(kind, value)
        return Form(name, "regex", value)
    texts = own.texts(kind, MAX_CHOICES)
    if not texts:
        raise own.error(kind, f"a list of at most {MAX_CHOICES} texts")
    return Form(name, "choice", texts)
