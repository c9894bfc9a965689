"""How families of models write tool calls, and to which family a chat template belongs.

A grammar makes a model write required calls as JSON between its own marks. All formats also read that form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.tools.calls import Written, read_calls, read_named_call
from kvblocks.server.tools.gemma import read_gemma_call
from kvblocks.server.tools.pythonic import read_python_calls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. This class is for JSON between marks.

    name: the format's name in `--tool-parser`. marks: the texts that may begin calls. end: the text that ends them; "":
    the answer's end. opening: a text that begins calls without a mark, at the beginning of an answer only; "": none.
    before, after: the texts around each required call, or around all if they form a list; between: the text between two
    required calls. arguments: the name of the arguments' field. id_length: the length of call ids that the template
    wants; 0: any. is_taught: whether the template knows no tools, so that a system text has to say how to call them.
    """

    name: str
    marks: tuple[str, ...]
    end: str = ""
    opening: str = ""
    before: str = ""
    after: str = ""
    between: str = "\n"
    is_list: bool = False
    arguments: str = "arguments"
    id_length: int = 0
    is_taught: bool = False

    def read(self, text: str) -> list[Written] | None:
        """Return the calls in the text between a mark and `end`; None if it doesn't consist of calls. O(text).

        In formats without an `end`, text after the calls is dropped.
        """
        return read_calls(text, may_go_on=not self.end, needs_arguments=not self.is_list)

    def call_parts(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a required call of a tool."""
        return f'{{"name": "{name}", "{self.arguments}": ', "}"

    def special_marks(self, tokenizer: Tokenizer) -> Mapping[str, int]:
        """Return those marks that are special tokens of this tokenizer, with their ids."""
        texts = tokenizer.special_texts
        return {mark: texts[mark] for mark in (*self.marks, self.end, *self._inner_marks) if mark in texts}

    @property
    def _inner_marks(self) -> tuple[str, ...]:
        return ()


class GemmaFormat(ToolFormat):
    """FunctionGemma: `call:NAME{key:<escape>text<escape>}`."""

    __slots__ = ()

    def read(self, text: str) -> list[Written] | None:
        """As `ToolFormat`."""
        found = read_gemma_call(text)
        return read_calls(text) if found is None else [found]

    @property
    def _inner_marks(self) -> tuple[str, ...]:
        return ("<escape>",)


class PythonicFormat(ToolFormat):
    """Calls as Python writes them, `[name(key="text")]`: Llama 4, and Gemma 3 if the prompt asks for it."""

    __slots__ = ()

    def read(self, text: str) -> list[Written] | None:
        """As `ToolFormat`."""
        inner = text.strip().removesuffix("<|python_end|>")
        found = read_python_calls(inner)
        return read_calls(inner) if found is None else found


class MistralFormat(ToolFormat):
    """A list in JSON, or, in Mistral's newer templates, `NAME[ARGS]{...}` after each mark."""

    __slots__ = ()

    def read(self, text: str) -> list[Written] | None:
        """As `ToolFormat`."""
        found: list[Written] = []
        for part in text.split("[TOOL_CALLS]"):
            name, brace, rest = part.partition("{")
            name = name.removesuffix("[ARGS]").strip()
            is_named = brace and name and not set(name) & set(' "[],')
            if is_named:
                call = read_named_call(name, brace + rest)
                calls = None if call is None else [call]
            else:
                calls = read_calls(part, may_go_on=True)
            if calls is None:
                return None
            found += calls
        return found

    def call_parts(self, name: str) -> tuple[str, str]:
        """As `ToolFormat`."""
        return ToolFormat.call_parts(self, name) if self.is_list else (f"{name}[ARGS]", "")

    @property
    def _inner_marks(self) -> tuple[str, ...]:
        return ("[ARGS]",)


_HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>", before="<tool_call>\n", after="\n</tool_call>")
_MISTRAL = MistralFormat(
    "mistral", ("[TOOL_CALLS]",), before="[TOOL_CALLS][", after="]", between=", ", is_list=True, id_length=9
)
_FORMATS: tuple[ToolFormat, ...] = (
    _HERMES,
    ToolFormat("llama3", ("<|python_tag|>",), opening="{", between="; ", arguments="parameters"),
    _MISTRAL,
    MistralFormat("mistral-args", ("[TOOL_CALLS]",), before="[TOOL_CALLS]", between="", id_length=9),
    ToolFormat(
        "granite", ("<|tool_call|>", "<tool_call>"), before="<|tool_call|>[", after="]", between=", ", is_list=True
    ),
    PythonicFormat("pythonic", ("<|python_start|>",), opening="[", before="[", after="]", between=", ", is_list=True),
    GemmaFormat(
        "gemma",
        ("<start_function_call>",),
        "<end_function_call>",
        before="<start_function_call>",
        after="<end_function_call>",
        between="",
    ),
)
FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in _FORMATS}
"""All formats, by name."""

# Which format a template is of that has one of these texts; the first one that is there decides.
_BY_TEXT: Sequence[tuple[str, str]] = (
    ("<start_function_call>", "gemma"),
    ("[ARGS]", "mistral-args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters"', "llama3"),
)


def format_of(tokenizer: Tokenizer | None, name: str | None = None) -> ToolFormat:
    """Return the format of a model's calls. name: the chosen format; None: that of its template.

    A model whose template knows no tools is taught the chosen format, or hermes. O(template).
    """
    source = (None if tokenizer is None else tokenizer.chat_template) or ""
    is_taught = tokenizer is None or "tools" not in tokenizer.template_variables
    found = next((format_name for text, format_name in _BY_TEXT if text in source), "hermes")
    chosen = FORMATS[("hermes" if is_taught else found) if name is None else name]
    return replace(chosen, is_taught=True) if is_taught else chosen
