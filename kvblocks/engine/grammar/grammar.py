"""Grammars for the vocabulary of one model, and the states of answers in them. llguidance does the work.

Even a compiled grammar may need much time for a token, during which the engine's step waits. So the work for one token
is limited, far below the compiler's own limits. An answer that reaches the limit ends with GrammarError. Both compiling
and the work for a token release the interpreter's lock.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvblocks import Sequence as KVSequence
from kvblocks.arguments import pip_install
from kvblocks.engine.errors import GrammarError, ModelError
from kvblocks.engine.grammar.bounds import MAX_BYTES, check_schema, check_size, check_text
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import InvalidArgumentError

if TYPE_CHECKING:
    import llguidance

_WORD = 32
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between the tokens of JSON. It is bounded, since a model may generate spaces for ever."""
# These limit one grammar to about 0.1 s and 10 MB, and one token to some 10 ms.
_LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 20_000,
    "max_lexer_states": 5_000,
    "max_items_in_row": 500,
    "step_max_items": 5_000,
    "step_lexer_fuel": 10_000,
    "verbose_errors": False,
}
# The automaton of a choice has at most a state for each byte of its texts, which are bounded. With 64 KiB of texts, a
# token took up to 24 ms, and all states together up to 50 MB; an answer sees only those of its own text.
_CHOICE_LIMITS: Mapping[str, Any] = {
    **_LIMITS,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 1_000_000,
    "max_lexer_states": MAX_BYTES + 1_000,
}
_SHOWN = 200
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace in tool calls.

Chat templates write earlier calls the same way, so the next turn's prompt begins with the answer's own tokens.
"""

_PLAIN = frozenset({"enum", "const", "default", "examples"})
"""Keywords of a schema whose values are not schemas."""

MAX_CALLS = 16
"""The most function calls in one answer."""

Special = Mapping[str, int]
"""Texts that are special tokens of the model, with their ids."""


class GrammarCompiler:
    """Compiles grammars for one model. Threads may share it.

    tokenizer: the model's, or None if it has none. vocab_size: the width of its logits. stop_token_ids: the tokens that
    end a complete answer. Raises InvalidArgumentError if llguidance isn't installed, and ModelError for a model that it
    can't be used with. Takes about a second for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidArgumentError(
                f"expected llguidance for answers of a given form, got none: {pip_install('structured')}"
            ) from error
        stops = sorted(token for token in stop_token_ids if token < vocab_size)
        if tokenizer is None or not stops:
            lacks = "tokenizer" if tokenizer is None else "token that ends an answer"
            raise ModelError(f"expected a model that can answer in a given form, got one without a {lacks}")
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.definition, n_vocab=vocab_size, eos_token=stops)
        except ValueError as error:
            raise ModelError(f"expected a tokenizer that llguidance reads, got an error: {error!s:.200}") from error
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._choice_limits = llguidance.LLParserLimits(**_CHOICE_LIMITS)
        self._matcher = llguidance.LLMatcher
        self.vocab_size = vocab_size

    def json_schema(self, schema: Mapping[str, Any]) -> "Grammar":
        """A grammar of JSON by a schema. Raises InvalidArgumentError for a schema that isn't accepted or supported."""
        text = check_schema(schema)
        try:
            source = self._matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            raise InvalidArgumentError(f"expected a JSON schema, got an error: {error!s:.{_SHOWN}}") from error
        return self._compile(source, self._limits)

    def json_object(self) -> "Grammar":
        """A grammar of any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> "Grammar":
        """A grammar of texts that a regular expression matches as a whole. Raises InvalidArgumentError."""
        return self._compile(self._matcher.grammar_from_regex(check_text(pattern)), self._limits)

    def choice(self, texts: Sequence[str]) -> "Grammar":
        """A grammar that allows exactly these texts, none of them empty. Raises InvalidArgumentError."""
        if not texts or not all(texts):
            raise InvalidArgumentError(f"expected texts to choose from that aren't empty, got {list(texts)!r:.80}")
        for text in texts:
            check_text(text)
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        # One terminal, which the lexer reads with one automaton. As alternatives of a rule, each text would be an item
        # of the parser's row, and `max_items_in_row` would be reached.
        source = self._matcher.grammar_from_lark(check_size(f"start: TEXT\nTEXT: {choices}"))
        return self._compile(source, self._choice_limits)

    def calls(
        self,
        functions: Sequence[tuple[str, str, Mapping[str, Any]]],
        around: tuple[str, str, str],
        special: Special,
        *,
        is_list: bool,
        is_one: bool,
    ) -> "Grammar":
        """A grammar of one or more function calls, at most MAX_CALLS.

        functions: for each function, the text that a call begins with, the text that it ends with, and the JSON schema
        of the arguments in between. around: the texts before a call, between two calls, and after a call. is_list:
        whether the texts before and after enclose all calls, and not each of them. special: parts of these texts that
        are special tokens. is_one: exactly one call is allowed. An object may have other properties than those its
        schema names only if the schema says so explicitly; otherwise models tend to go on and on. Raises
        InvalidArgumentError.
        """
        first, between, last = (_literal(text, special) for text in around)
        most = 1 if is_one else MAX_CALLS
        one, opened, closed = ("call", first, last) if is_list else (f"{first} call {last}", "", "")
        more = f"({between} {one}){{0,{most - 1}}}" if most > 1 else ""
        rules = [f"start: {opened} {one} {more} {closed}"]
        rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}")
        for index, (begins, ends, schema) in enumerate(functions):
            text = check_schema(schema)
            known = schema if '"allOf"' in text else _without_others(schema)
            spaced = json.dumps({**known, "x-guidance": _AS_TEMPLATES_WRITE})
            rules.append(f"call_{index}: {_literal(begins, special)} args_{index} {_literal(ends, special)}")
            rules.append(f"args_{index}: %json {spaced}")
        source = "\n".join(rules)
        check_size(source)
        try:
            return self._compile(self._matcher.grammar_from_lark(source), self._limits)
        except ValueError as error:
            raise InvalidArgumentError(
                f"expected functions with JSON schemas, got an error: {error!s:.{_SHOWN}}"
            ) from error

    def _compile(self, source: str, limits: "llguidance.LLParserLimits") -> "Grammar":
        matcher = self._matcher(self._tokenizer, source, log_level=0, limits=limits)
        grammar = Grammar(matcher, self.vocab_size)
        if matcher.is_error():
            raise InvalidArgumentError(f"expected a grammar that can be compiled, got an error: {_first_line(matcher)}")
        try:
            grammar.start().allowed_after(())
        except GrammarError as error:
            raise InvalidArgumentError(
                f"expected a grammar that an answer can begin in, got another: {error}"
            ) from error
        return grammar


class Grammar:
    """A compiled grammar, which any number of answers may use: the option `grammar` of `Engine.generate`."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size

    def start(self) -> "GrammarState":
        """Return the state of an answer that has no tokens yet. O(grammar)."""
        return GrammarState(self._matcher.deep_copy(), self.vocab_size)


class GrammarState:
    """The state of one answer. It depends only on the answer's tokens, however often steps were undone or repeated."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._num_seen = 0
        self._is_whole = True
        self._words = torch.zeros(-(-vocab_size // _WORD), dtype=torch.int32)

    def allowed(self, sequence: KVSequence) -> Tensor:
        """Return which tokens may come next in a sequence's answer, as a bit mask: int32 [vocab / 32].

        Valid until the next call. Raises GrammarError if no token may come, or if finding one takes too much work.
        """
        if not self._is_whole:  # the last call was interrupted: begin again
            self._matcher.reset()
            self._num_seen = 0
        return self.allowed_after(sequence.token_ids(sequence.num_prompt_tokens + self._num_seen))

    def allowed_after(self, new_tokens: Sequence[int]) -> Tensor:
        """As `allowed`, given only the answer's tokens since the last call.

        O(new tokens), plus the work for the next token.
        """
        self._is_whole = False
        for token in new_tokens:
            if not self._matcher.consume_token(token):
                raise self._error()
            self._num_seen += 1
        self._matcher.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)
        if self._matcher.is_error() or not bool(self._words.any()):
            raise self._error()
        self._is_whole = True
        return self._words

    def _error(self) -> GrammarError:
        why = _first_line(self._matcher)
        return GrammarError(f"expected a token of the grammar to be found within the limits for one, got none: {why}")


def _without_others(schema: Any) -> Any:
    """A schema whose objects have only the properties that they name, where it doesn't say otherwise. O(size)."""
    if isinstance(schema, list):
        return [_without_others(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value if name in _PLAIN else _without_others(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def _literal(text: str, special: Special) -> str:
    """A text in the grammar's language, in which special tokens are named by their ids."""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    return " ".join([f"<[{special[one]}]>" if one in special else json.dumps(one) for one in pieces if one])


def _first_line(matcher: "llguidance.LLMatcher") -> str:
    """The library's error message, without what isn't for people."""
    lines = matcher.get_error().splitlines()
    return lines[0][:_SHOWN] if lines else "no more tokens may come"
