"""What a body asks for that is to be computed, checked; nothing here computes, or knows of HTTP.

Fields that would change an answer and that this engine doesn't have are refused by name, unless their value asks for
nothing. Fields that change nothing are let pass. The fields are OpenAI's; `cache_salt`, `top_k`,
`ignore_eos` and `return_token_ids` are extras, named as vLLM names them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from kvblocks.engine.options import OptionValues
from kvblocks.engine.server.access.callers import ANYONE, Caller, Slots
from kvblocks.engine.server.answers.sampling_fields import check_size, parse_echo, parse_logprobs, parse_sampling
from kvblocks.engine.server.errors import ApiError, as_api_error
from kvblocks.engine.server.fields import Fields, is_unicode, show
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import KVBlocksError

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_ITEMS = 10_000
"""Messages of a chat, parts of a message, or prompts of a body: checking each takes some microseconds."""
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

AnswerKind = Literal["completion", "chat"]
Kind = AnswerKind | Literal["warm"]
Prompt = str | list[int]
Message = dict[str, str]

_PREFIX_KINDS = ("text", "system", "messages", "token_ids")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What clients send along and no answer depends on.
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
# Fields that would change an answer, and their values that don't.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "this server doesn't fill in the middle"),
    "logit_bias": (({},), "this server has no bias of tokens"),
    "tools": (([],), "this server calls no tools"),
    "tool_choice": (("none", "auto"), "this server calls no tools"),
    "functions": (([],), "this server calls no functions"),
    "function_call": (("none", "auto"), "this server calls no functions"),
    "response_format": (({"type": "text"},), "this server doesn't constrain what is generated"),
    "modalities": ((["text"],), "this server generates text"),
    "audio": ((), "this server generates text"),
    "prediction": ((), "this server has no predicted outputs"),
    "reasoning_effort": (("none",), "this server has no reasoning models"),
    "verbosity": ((), "this server has no such models"),
    "web_search_options": ((), "this server searches nothing"),
}


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that a body is about, in one of four forms; value: what stands there, checked."""

    kind: Literal["text", "system", "messages", "token_ids"]
    value: Any

    @property
    def num_chars(self) -> int:
        """How much text it is, in characters. O(messages)."""
        if self.kind == "token_ids":
            return 0
        return _num_chars(self.value) if self.kind == "messages" else len(self.value)

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """Return its tokens; of a system prompt, what all chats with it begin with. Raises ApiError. O(length)."""
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
    """One body, checked. Of `prompts`, `messages` and `prefixes` one isn't empty, by `kind`.

    options: all of them, for each prompt. echo: whether answers begin with their prompts. salts: of prefixes, one for
    each. caller: who asks.
    """

    kind: Kind
    model: str | None
    prompts: tuple[Prompt, ...]
    messages: tuple[Message, ...]
    options: OptionValues
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    prefixes: tuple[Prefix, ...] = ()
    salts: tuple[str | None, ...] = ()
    caller: Caller = ANYONE

    def asked_by(self, caller: Caller) -> Self:
        """Return it as this caller may ask it, with its salts. Raises ApiError for a salt that it may not choose."""
        options = OptionValues(**{**self.options, "salt": caller.salt_for(self.options.get("salt"))})
        return replace(self, caller=caller, options=options, salts=tuple(map(caller.salt_for, self.salts)))

    @property
    def slots(self) -> Slots:
        """What it takes of those answers that may be unfinished."""
        return Slots(self.caller, self.num_choices)

    @property
    def is_long(self) -> bool:
        """Whether its answer may be megabytes: with log probabilities of prompts."""
        return self.options.get("prompt_logprobs") is not None

    @property
    def num_choices(self) -> int:
        """How many answers it is for."""
        return self.options["n"] * max(1, len(self.prompts), len(self.prefixes))

    def options_of(self, index: int) -> OptionValues:
        """Return the options of a prompt."""
        return OptionValues(**{**self.options, "salt": self.salts[index]}) if self.salts else self.options

    @property
    def num_chars(self) -> tuple[int, ...]:
        """How much text each prompt is, in characters; 0 for token ids. O(prompts + messages)."""
        if self.kind == "chat":
            return (_num_chars(self.messages),)
        if self.kind == "warm":
            return tuple([prefix.num_chars for prefix in self.prefixes])
        return tuple([len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompts])

    def encode(self, tokenizer: Tokenizer | None) -> list[list[int]]:
        """Return its prompts as tokens. Raises ApiError and what the tokenizer raises. O(length)."""
        if self.kind == "warm":
            return [prefix.encode(tokenizer) for prefix in self.prefixes]
        if self.kind == "completion":
            prompts = [encode_prompt(prompt, tokenizer) for prompt in self.prompts]
            check_size(prompts, self.options["n"], self.options["prompt_logprobs"])
            return prompts
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ApiError(400, "expected /v1/completions, since this model has no chat template", param="messages")
        return [tokenizer.apply_chat_template(list(self.messages))]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return a prompt as tokens. Raises ApiError for a text without a tokenizer, or one that has no tokens."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ApiError(400, "prompt: expected token ids, since this model has no tokenizer", param="prompt")
    tokens = tokenizer.encode(prompt)
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
    """Read a body of /v1/cache/warm: prompts that are to be computed, and not answered. Raises ApiError."""
    fields = Fields(body)
    items, salt = fields.take("prompts"), fields.text("cache_salt")
    fields.refuse_unknown()
    if not isinstance(items, list) or not items:
        raise fields.error("prompts", "a list of prompts")
    _check_number("prompts", items)
    prefixes, salts = [], []
    for index, item in enumerate(items):
        own = Fields({"text": item} if isinstance(item, str) else item, f"prompts[{index}]")
        prefixes.append(parse_prefix(own, f"prompts[{index}]"))
        salts.append(own.text("cache_salt") or salt)
        own.refuse_unknown()
    return AnswerRequest(
        kind="warm",
        model=None,
        prompts=(),
        messages=(),
        options=OptionValues(n=1, max_tokens=0),
        stream=False,
        include_usage=False,
        return_token_ids=False,
        prefixes=tuple(prefixes),
        salts=tuple(salts),
    )


def parse_prefix(fields: Fields, purpose: str) -> Prefix:
    """Read the prefix or prompt that a body is about: in one of four forms. purpose: for errors. Raises ApiError."""
    given = [kind for kind in _PREFIX_KINDS if kind in fields]
    if len(given) != 1:
        raise ApiError(400, f"{purpose}: expected one of {', '.join(_PREFIX_KINDS)}, got {given or 'none'}")
    if given == ["text"]:
        return Prefix("text", fields.text("text"))
    if given == ["system"]:
        return Prefix("system", fields.text("system"))
    if given == ["messages"]:
        return Prefix("messages", parse_messages(fields.take("messages")))
    value = fields.take("token_ids")
    prompts = parse_prompts(value) if isinstance(value, list) else ()
    if len(prompts) != 1 or isinstance(prompts[0], str):
        raise fields.error("token_ids", "a list of token ids")
    return Prefix("token_ids", prompts[0])


def system_prefix(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens that all chats with this system prompt begin with.

    That is what two chats have in common whose users say different things; so it holds for any template. Raises
    ModelError and InvalidArgumentError. O(length).
    """
    chats: list[list[Message]] = [
        [{"role": "system", "content": text}, {"role": "user", "content": question}] for question in ("a", "Z")
    ]
    one, other = (tokenizer.apply_chat_template(list(chat)) for chat in chats)
    count = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return one[:count]


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Read a text, a list of token ids, or a list of several of either. Raises ApiError."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return (_parse_prompt(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise ApiError(
            400,
            f"prompt: expected a text, a list of token ids, or a list of such prompts, got {show(value)}",
            param="prompt",
        )
    _check_number("prompt", value)
    return tuple(_parse_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Read the messages of a chat: those of text. Raises ApiError."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"messages: expected a list of messages, got {show(value)}", param="messages")
    _check_number("messages", value)
    return tuple(_parse_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _finish(
    kind: AnswerKind,
    fields: Fields,
    prompts: tuple[Prompt, ...],
    messages: tuple[Message, ...],
    n: int,
    most: int | None,
) -> AnswerRequest:
    """Read the fields that both kinds have, and refuse all that is left."""
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
        salt=fields.text("cache_salt"),
    )
    stream = fields.flag("stream")
    include_usage = _parse_stream_options(fields, stream=stream)
    request = AnswerRequest(
        kind=kind,
        model=fields.text("model"),
        prompts=prompts,
        messages=messages,
        options=options,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.flag("return_token_ids"),
        echo=echo,
    )
    fields.refuse_all(_REFUSED)
    fields.ignore(_WITHOUT_EFFECT)
    fields.refuse_unknown()
    return request


def _parse_stream_options(fields: Fields, *, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise fields.error("stream_options", "none without stream")
    options = Fields(value, "stream_options")
    include_usage = options.flag("include_usage")
    options.ignore(("include_obfuscation",))
    options.refuse_unknown()
    return include_usage


def _parse_prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        if value and is_unicode(value):
            return value
    elif isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32:
        return value  # True and False aren't of the type int itself
    raise ApiError(
        400,
        f"{name}: expected a text of valid Unicode or a list of token ids, not empty, got {show(value)}",
        param="prompt",
    )


def _parse_message(value: Any, name: str) -> Message:
    fields = Fields(value, name)
    role = fields.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        # A template may build markup out of a role, so the client doesn't choose it freely.
        raise fields.error("role", f"one of {', '.join(_ROLES)}")
    message = {"role": _ROLES[role], "content": _parse_content(fields)}
    sender = fields.text("name")
    fields.refuse("tool_calls", ([],), "this server calls no tools")
    fields.refuse("function_call", (), "this server calls no functions")
    fields.refuse("audio", (), "this server reads text")
    fields.ignore(("tool_call_id", "refusal", "annotations"))
    fields.refuse_unknown()
    return message if sender is None else {**message, "name": sender}


def _parse_content(fields: Fields) -> str:
    """Read a text, or parts that are texts, joined."""
    content = fields.take("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise fields.error("content", "a text or a list of parts")
    _check_number("content", parts)
    texts = [part if isinstance(part, str) else _text_of(part) for part in parts]
    if not all(text is not None and is_unicode(text) for text in texts):
        raise fields.error("content", "a text of valid Unicode, or parts of type 'text'")
    return "".join(text for text in texts if text is not None)


def _check_number(name: str, items: list[Any]) -> None:
    """Raise ApiError for a list of more than MAX_ITEMS."""
    if len(items) > MAX_ITEMS:
        raise ApiError(400, f"{name}: expected at most {MAX_ITEMS}, got {len(items)}", param=name)


def _num_chars(messages: Iterable[Message]) -> int:
    return sum(len(text) for message in messages for text in message.values())


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
