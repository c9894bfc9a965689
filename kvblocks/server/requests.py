"""Reads and checks the bodies of requests to compute. Nothing here computes, or knows about HTTP.

A field that this engine doesn't have and that would change an answer is refused by name, unless its value asks for
nothing. Fields that change nothing are ignored. The fields are OpenAI's; extra ones, such as `cache_salt`, `top_k`,
`min_tokens` and `return_token_ids`, have vLLM's names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from kvblocks.engine.grammar.grammar import Grammar
from kvblocks.engine.options import OptionValues
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import KVBlocksError
from kvblocks.server.access.callers import ANYONE, AnswerSlots, Caller
from kvblocks.server.body.fields import Fields, check_unicode, show
from kvblocks.server.body.messages import (
    Message,
    check_number,
    num_chars,
    num_message_chars,
    parse_messages,
    parse_template_values,
)
from kvblocks.server.body.neutral import REFUSED, TOLD, WITHOUT_EFFECT
from kvblocks.server.body.origin import Origin
from kvblocks.server.body.prefix_mark import PrefixMark
from kvblocks.server.body.response_format import Form, parse_form
from kvblocks.server.body.sampling import (
    check_size,
    most_scored_tokens,
    parse_echo,
    parse_logit_bias,
    parse_logprobs,
    parse_priority,
    parse_sampling,
)
from kvblocks.server.errors import ApiError, as_api_error
from kvblocks.server.tools.choice import CallsForm, ToolUse, parse_tools
from kvblocks.server.tools.formats import FORMATS, ToolFormat
from kvblocks.server.tools.teaching import encode_chat

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_STOP_IDS = 128
MAX_REQUEST_ID = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

AnswerKind = Literal["completion", "chat"]
Kind = AnswerKind | Literal["warm"]
Prompt = str | list[int]

PrefixKind = Literal["text", "system", "messages", "token_ids"]
_PREFIX_KINDS: tuple[PrefixKind, ...] = ("text", "system", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class PrefixBody:
    """The tokens that a body names, in one of four forms. value: the field's value, checked.

    num_chars: the length of its text, 0 for token ids.
    """

    kind: PrefixKind
    value: Any
    num_chars: int

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """Return its tokens; for a system prompt, those that all its chats begin with. Raises ApiError. O(length)."""
        try:
            if self.kind == "token_ids":
                tokens: list[int] = self.value
                return tokens
            if self.kind == "text":
                return encode_prompt(self.value, tokenizer)
            if tokenizer is None or not tokenizer.has_chat_template:
                message = f"{self.kind}: expected text, since this model has no chat template"
                raise ApiError(400, message, param=self.kind)
            if self.kind == "system":
                return system_prefix(tokenizer, self.value)
            return tokenizer.apply_chat_template(list(self.value))
        except KVBlocksError as error:
            raise as_api_error(error, param=self.kind) from error


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A checked body. `kind` says which one of `prompts`, `messages` and `prefixes` isn't empty.

    num_chars: the length of each prompt's text in characters, 0 for token ids. options: the same for all prompts.
    salts: one for each prefix. caller: who sent it. include_usage, continuous_usage: whether to send the usage at a
    stream's end, and in each chunk. template_values: for a chat's template. add_special_tokens: whether texts get the
    tokens that the tokenizer adds to prompts. request_id: the client's own id, for logs. echo: whether answers begin
    with their prompts. form: the form of the answers' texts, not yet compiled. tools: what it says about tools;
    tool_format: how the model writes calls. warnings: about fields that aren't honored. compares_with: an earlier
    answer's id, to report where the prompts differ. id_prefix: how the answer's id begins; "": as usual for its kind.
    marks: prefixes to keep cached; marked_tokens: their lengths. clamps: whether max_tokens is reduced to the room in
    the context, instead of an error. origin: what else a body of Responses said; None for other bodies.
    """

    kind: Kind
    model: str | None
    prompts: tuple[Prompt, ...]
    messages: tuple[Message, ...]
    num_chars: tuple[int, ...]
    options: OptionValues
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    form: Form | CallsForm | None = None
    tools: ToolUse | None = None
    tool_format: ToolFormat = FORMATS["hermes"]
    warnings: tuple[str, ...] = ()
    compares_with: str | None = None
    id_prefix: str = ""
    marks: tuple[PrefixMark, ...] = ()
    marked_tokens: tuple[int, ...] = ()
    clamps: bool = False
    origin: Origin | None = None
    continuous_usage: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    request_id: str | None = None
    prefixes: tuple[PrefixBody, ...] = ()
    salts: tuple[str | None, ...] = ()
    caller: Caller = ANYONE

    def asked_by(self, caller: Caller) -> Self:
        """Return a copy with this caller and its salts. Raises ApiError for a salt that the caller may not use."""
        options = OptionValues(**{**self.options, "salt": caller.salt_for(self.options.get("salt"))})
        return replace(self, caller=caller, options=options, salts=tuple(map(caller.salt_for, self.salts)))

    def speaking(self, tool_format: ToolFormat, *, has_special_marks: bool) -> Self:
        """Return a copy for a model that writes calls like this. has_special_marks: whether with special tokens."""
        if self.tools is None:
            return replace(self, tool_format=tool_format)
        form = CallsForm(self.tools, tool_format) if self.tools.choice == "required" else self.form
        options = self.options
        if has_special_marks and self.tools.is_read:  # the marks are not to be left out of the text
            options = OptionValues(**{**options, "skip_special_tokens": False})
        return replace(self, tool_format=tool_format, form=form, options=options)

    def constrained(self, grammar: Grammar) -> Self:
        """Return a copy with its form compiled to a grammar."""
        return replace(self, options=OptionValues(**{**self.options, "grammar": grammar}))

    @property
    def slots(self) -> AnswerSlots:
        """The slots for unfinished answers that it takes."""
        return AnswerSlots(self.caller, self.num_choices)

    @property
    def is_long(self) -> bool:
        """Whether its answer may have megabytes, because of log probabilities, or of the prompt in each choice."""
        return self.echo or self.options.get("logprobs") is not None

    @property
    def num_choices(self) -> int:
        """How many choices (samples of all prompts) it asks for."""
        return self.options["n"] * max(1, len(self.prompts), len(self.prefixes))

    def options_of(self, index: int, room: Callable[[], int]) -> OptionValues:
        """Return the options of a prompt. room: returns how many tokens may follow it; called only if needed."""
        most = most_scored_tokens(self.options) if self.options["max_tokens"] is None else None
        if self.clamps and self.options["max_tokens"] is not None:
            most = self.options["max_tokens"]
        if most is not None:
            return OptionValues(**{**self.options, "max_tokens": max(1, min(most, room()))})
        return OptionValues(**{**self.options, "salt": self.salts[index]}) if self.salts else self.options

    def find_marks(self, tokenizer: Tokenizer | None, tokens: list[int]) -> tuple[int, ...]:
        """Return how many of the prompt's leading tokens each marked prefix has; 0 if the template refuses it.

        O(length) for each mark.
        """
        return tuple([self._num_shared(tokenizer, tokens, mark.variant) for mark in self.marks])

    def with_system_end(self, tokenizer: Tokenizer | None, tokens: list[int]) -> Self:
        """Return a copy with a mark where its prompt begins to differ from other chats with the same system prompt.

        What a template writes about tools is part of that. Without either there is no mark. O(system prompt).
        """
        if self.kind != "chat":
            return self
        system = [message for message in self.messages[:1] if message["role"] == "system"]
        if not system and (self.tools is None or not self.tools.definitions):
            return self
        ends = [self._num_shared(tokenizer, tokens, [*system, {"role": "user", "content": text}]) for text in "aZ"]
        return replace(self, options=OptionValues(**{**self.options, "marks": (min(ends),)})) if min(ends) else self

    def _num_shared(self, tokenizer: Tokenizer | None, tokens: list[int], variant: Sequence[Message]) -> int:
        """How many first tokens a prompt shares with another chat of the same tools; 0 if the template refuses it."""
        assert tokenizer is not None, "the chat was encoded with it"
        try:
            other = encode_chat(
                tokenizer, variant, self.template_values, self.tools, self.tool_format, begins_answer=False
            )
        except KVBlocksError:
            return 0
        pairs = enumerate(zip(tokens, other, strict=False))
        return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))

    def encode(self, tokenizer: Tokenizer | None) -> list[list[int]]:
        """Return its prompts as tokens. Raises ApiError and what the tokenizer raises. O(length)."""
        if self.kind == "warm":
            return [prefix.encode(tokenizer) for prefix in self.prefixes]
        if self.kind == "completion":
            adds = self.add_special_tokens
            prompts = [encode_prompt(prompt, tokenizer, add_special_tokens=adds) for prompt in self.prompts]
            check_size(prompts, self.options, echo=self.echo)
            return prompts
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ApiError(400, "expected /v1/completions, since this model has no chat template", param="messages")
        check_size([()], self.options, echo=False)
        return [encode_chat(tokenizer, self.messages, self.template_values, self.tools, self.tool_format)]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> list[int]:
    """Return a prompt as tokens. Special tokens that are spelled out in a text are parsed, as vLLM does.

    Raises ApiError for a text that has no tokens, and for any text if the model has no tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ApiError(400, "prompt: expected token ids, since this model has no tokenizer", param="prompt")
    tokens = tokenizer.encode(prompt, parse_special=True, add_special_tokens=add_special_tokens)
    if not tokens:
        raise ApiError(400, "prompt: expected at least one token, got an empty text", param="prompt")
    return tokens


def parse_completion(body: Any) -> AnswerRequest:
    """Read a body of /v1/completions. Raises ApiError."""
    fields = Fields(body)
    prompts = parse_prompts(fields.take("prompt"))
    n = fields.count("n", 1, MAX_SAMPLES) or 1
    best_of = fields.count("best_of", 1, MAX_SAMPLES)
    if best_of is not None and best_of != n:
        raise fields.error("best_of", f"none or n ({n}), since this server doesn't choose among answers")
    max_tokens = fields.count("max_tokens", 0)
    max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    return _finish("completion", fields, prompts, (), n, max_tokens)


def parse_chat(body: Any) -> AnswerRequest:
    """Read a body of /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    messages = parse_messages(fields.take("messages"))
    n = fields.count("n", 1, MAX_SAMPLES) or 1
    newer, older = fields.count("max_completion_tokens", 1), fields.count("max_tokens", 1)
    if newer is not None and older is not None and newer != older:
        raise fields.error("max_completion_tokens", f"the same as max_tokens ({older}), or only one of them")
    return _finish("chat", fields, (), messages, n, older if newer is None else newer)


def parse_warm(body: Any) -> AnswerRequest:
    """Read a body of /v1/cache/warm: prompts to compute without an answer. Raises ApiError."""
    fields = Fields(body)
    items, salt = fields.take("prompts"), fields.kept_text("cache_salt")
    fields.refuse_unknown()
    if not isinstance(items, list) or not items:
        raise fields.error("prompts", "a list of prompts")
    check_number("prompts", items)
    prefixes, salts = [], []
    for index, item in enumerate(items):
        own = Fields({"text": item} if isinstance(item, str) else item, f"prompts[{index}]")
        prefixes.append(parse_prefix(own, f"prompts[{index}]"))
        salts.append(own.kept_text("cache_salt") or salt)
        own.refuse_unknown()
    return AnswerRequest(
        kind="warm",
        model=None,
        prompts=(),
        messages=(),
        num_chars=tuple([prefix.num_chars for prefix in prefixes]),
        options=OptionValues(n=1, max_tokens=0),
        stream=False,
        include_usage=False,
        return_token_ids=False,
        prefixes=tuple(prefixes),
        salts=tuple(salts),
    )


def parse_prefix(fields: Fields, purpose: str) -> PrefixBody:
    """Read a body's prefix or prompt, in one of four forms. purpose: a phrase for errors. Raises ApiError."""
    given = [kind for kind in _PREFIX_KINDS if kind in fields]
    if len(given) != 1:
        raise ApiError(400, f"{purpose}: expected one of {', '.join(_PREFIX_KINDS)}, got {given or 'none'}")
    kind = given[0]
    if kind in {"text", "system"}:
        text = fields.text(kind)
        return PrefixBody(kind, text, len(text or ""))
    if kind == "messages":
        messages = parse_messages(fields.take(kind))
        return PrefixBody(kind, messages, num_message_chars(messages))
    value = fields.take("token_ids")
    prompts = parse_prompts(value) if isinstance(value, list) else ()
    if len(prompts) != 1 or isinstance(prompts[0], str):
        raise fields.error("token_ids", "a list of token ids")
    return PrefixBody("token_ids", prompts[0], 0)


def system_prefix(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens that all chats with this system prompt begin with.

    These are the leading tokens that two chats with different user messages have in common, so any template works.
    Raises ModelError and InvalidArgumentError. O(length).
    """
    chats: list[list[Message]] = [
        [{"role": "system", "content": text}, {"role": "user", "content": question}] for question in ("a", "Z")
    ]
    one, other = (tokenizer.apply_chat_template(list(chat)) for chat in chats)
    count = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return one[:count]


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Read a text, a list of token ids, or a list of several such prompts. Raises ApiError."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return (_parse_prompt(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise ApiError(
            400,
            f"prompt: expected a text, a list of token ids, or a list of such prompts, got {show(value)}",
            param="prompt",
        )
    check_number("prompt", value)
    return tuple(_parse_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def _finish(
    kind: AnswerKind,
    fields: Fields,
    prompts: tuple[Prompt, ...],
    messages: tuple[Message, ...],
    n: int,
    most: int | None,
) -> AnswerRequest:
    """Read the fields that both kinds have, and refuse all other fields."""
    echo, logprobs = parse_echo(kind, fields), parse_logprobs(kind, fields)
    if most == 0 and (n > 1 or not echo):
        raise fields.error("max_tokens", "at least 1, unless a prompt is only to be repeated once (echo, and n of 1)")
    options = OptionValues(
        **parse_sampling(fields),
        n=n,
        max_tokens=most,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        seed=fields.count("seed", 0, 2**64 - 1),
        stop=fields.texts("stop", MAX_STOPS),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=_parse_min_tokens(fields, most),
        stop_token_ids=_parse_stop_ids(fields),
        skip_special_tokens=_parse_skip_special(fields),
        salt=fields.kept_text("cache_salt"),
        session=fields.kept_text("prompt_cache_key"),
        logit_bias=parse_logit_bias(fields),
        priority=parse_priority(fields),
    )
    tools = parse_tools(fields) if kind == "chat" else None
    if kind == "completion":
        refuse_tools(fields)
    stream = fields.flag("stream")
    include_usage, continuous_usage = _parse_stream_options(fields, stream=stream)
    values = parse_template_values(fields) if kind == "chat" else {}
    texts = [len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts]
    request = AnswerRequest(
        kind=kind,
        model=fields.text("model"),
        prompts=prompts,
        messages=messages,
        num_chars=tuple(texts) if kind == "completion" else (_num_chat_chars(messages, values, tools),),
        options=options,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.flag("return_token_ids"),
        echo=echo,
        form=parse_form(fields, n * max(1, len(prompts)), must_call=tools is not None and tools.choice == "required"),
        tools=tools,
        warnings=parse_told(fields),
        compares_with=parse_cache_options(fields),
        continuous_usage=continuous_usage,
        template_values=values,
        add_special_tokens=_parse_add_special(fields, kind),
        request_id=_parse_request_id(fields),
    )
    fields.refuse_all(REFUSED)
    fields.ignore(WITHOUT_EFFECT)
    fields.refuse_unknown()
    return request


def parse_told(fields: Fields) -> tuple[str, ...]:
    """Read fields that the server doesn't honor but only reports. Return a warning for each."""
    given = {name: fields.take(name) for name in TOLD}
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise fields.error(name, "a text")
    return tuple([f"{name}: {TOLD[name]}" for name, value in given.items() if value not in {None, "none"}])


def parse_cache_options(fields: Fields) -> str | None:
    """Read OpenAI's `prompt_cache_options`: the id of an answer to compare with, or None. Raises ApiError."""
    value = fields.take("prompt_cache_options")
    if value is None:
        return None
    options = Fields(value, "prompt_cache_options")
    found = options.text("comparison_response_id", MAX_REQUEST_ID)
    options.ignore(("mode", "ttl"))
    options.refuse_unknown()
    return found


def refuse_tools(fields: Fields) -> None:
    """Refuse tools in a body without messages. Raises ApiError."""
    fields.refuse("tools", ([],), "/v1/chat/completions has tools")
    fields.refuse("tool_choice", ("none", "auto"), "/v1/chat/completions has tools")
    fields.ignore(("parallel_tool_calls",))


def _num_chat_chars(messages: tuple[Message, ...], values: Mapping[str, Any], tools: ToolUse | None) -> int:
    return num_message_chars(messages) + num_chars(values) + (0 if tools is None else num_chars(tools.definitions))


def _parse_min_tokens(fields: Fields, most: int | None) -> int:
    value = fields.count("min_tokens", 0) or 0
    if most is not None and value > most:
        raise fields.error("min_tokens", f"at most max_tokens ({most})")
    return value


def _parse_stop_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.take("stop_token_ids")
    if value is None:
        return ()
    is_list = isinstance(value, list) and len(value) <= MAX_STOP_IDS
    if not is_list or not all(type(item) is int and 0 <= item < 2**32 for item in value):
        raise fields.error("stop_token_ids", f"a list of at most {MAX_STOP_IDS} token ids")
    return tuple(value)


def _parse_skip_special(fields: Fields) -> bool:
    skips = fields.take("skip_special_tokens") is None or fields.flag("skip_special_tokens")
    spaced = fields.take("spaces_between_special_tokens") is None or fields.flag("spaces_between_special_tokens")
    if not spaced and not skips:
        raise fields.error("spaces_between_special_tokens", "true, since texts are as the tokenizer decodes them")
    return skips


def _parse_add_special(fields: Fields, kind: Kind) -> bool:
    """Whether the tokenizer adds special tokens. In a chat the template decides; in a completion the client may."""
    if kind == "chat":
        fields.refuse("add_special_tokens", (False,), "the chat template adds them")
        return False
    return fields.take("add_special_tokens") is None or fields.flag("add_special_tokens")


def _parse_request_id(fields: Fields) -> str | None:
    """The client's own name of a request: vLLM's field, or SGLang's."""
    request_id, rid = (fields.text(name, MAX_REQUEST_ID) for name in ("request_id", "rid"))
    return rid if request_id is None else request_id


def _parse_stream_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream's end has the usage, and whether each chunk does."""
    value = fields.take("stream_options")
    if value is None:
        return False, False
    if not stream:
        raise fields.error("stream_options", "none without stream")
    options = Fields(value, "stream_options")
    include_usage, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore(("include_obfuscation",))
    options.refuse_unknown()
    return (
        include_usage,
        include_usage and continuous,
    )  # as in vLLM, continuous_usage has no effect without include_usage


def _parse_prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        if value:
            check_unicode(name, value, "prompt")
            return value
    elif isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32:
        return value  # True and False aren't of the type int itself
    raise ApiError(
        400,
        f"{name}: expected a text or a list of token ids, not empty, got {show(value)}",
        param="prompt",
    )
