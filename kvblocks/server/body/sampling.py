"""The fields of sampling, log probabilities and echoes. Their names and bounds are OpenAI's and vLLM's."""

from collections.abc import Sequence
from typing import Literal

from kvblocks.engine.options import MAX_BIASED, MAX_PRIORITY, OptionValues
from kvblocks.server.body.fields import Fields
from kvblocks.server.errors import ApiError

MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 2**18
"""The most log probabilities in one answer, which then has 10 to 20 MB of JSON.

Without log probabilities, this bounds the tokens of echoed prompts.
"""
MAX_DIGITS = 10
_NO_CHAT_ECHO = "a chat's answer doesn't repeat its messages; only /v1/completions has this field"


def parse_sampling(fields: Fields) -> OptionValues:
    """Read how tokens are drawn. Raises ApiError."""
    temperature, top_p = fields.number("temperature", 0.0), fields.number("top_p", 0.0, 1.0)
    repetition = fields.number("repetition_penalty", 0.0)
    for name, value in (("top_p", top_p), ("repetition_penalty", repetition)):
        if value == 0:
            raise fields.error(name, "a number above 0, up to 1" if name == "top_p" else "a number above 0")
    return OptionValues(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=_parse_top_k(fields),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
    )


def _parse_top_k(fields: Fields) -> int | None:
    """Read top_k. 0 and -1 mean any number of tokens, as in vLLM and SGLang."""
    value = fields.count("top_k", -1)
    return None if value in {None, 0, -1} else value


def parse_logit_bias(fields: Fields) -> dict[int, float] | None:
    """Read the numbers to add to the logits of tokens; None if there are none. Raises ApiError."""
    value = fields.take("logit_bias")
    if not value and value in ({}, None):
        return None
    expected = f"at most {MAX_BIASED} numbers from -100 to 100, by token id"
    if not isinstance(value, dict) or len(value) > MAX_BIASED:
        raise fields.error("logit_bias", expected)
    found = {}
    for token, bias in value.items():
        is_id = token.isascii() and token.isdecimal() and len(token) <= MAX_DIGITS
        if not is_id or isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise fields.error("logit_bias", expected)
        found[int(token)] = float(bias)
    return found


def parse_priority(fields: Fields) -> int:
    """Read a request's priority: smaller numbers go first. Raises ApiError."""
    return fields.count("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0


def parse_logprobs(kind: Literal["completion", "chat"], fields: Fields) -> int | None:
    """Read how many of the most likely tokens to show with each token; None: no log probabilities. Raises ApiError."""
    if kind == "completion":
        fields.refuse("top_logprobs", (0,), "/v1/completions takes their number in logprobs")
        return None if fields.take("logprobs") is False else fields.count("logprobs", 0, MAX_TOP_LOGPROBS)
    is_wanted, number = fields.flag("logprobs"), fields.count("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if number and not is_wanted:
        raise fields.error("top_logprobs", "logprobs: true with it")
    return (number or 0) if is_wanted else None


def parse_echo(kind: Literal["completion", "chat"], fields: Fields) -> bool:
    """Read whether the answer begins with its prompt. Raises ApiError."""
    if kind == "chat":
        fields.refuse("echo", (False,), _NO_CHAT_ECHO)
        return False
    return fields.flag("echo")


def most_scored_tokens(options: OptionValues) -> int | None:
    """Return how many tokens MAX_LOGPROBS allows in each answer to one prompt; None: no log probabilities. O(1)."""
    num_logprobs = options.get("logprobs")
    return None if num_logprobs is None else MAX_LOGPROBS // (options["n"] * (1 + num_logprobs))


def check_size(prompts: Sequence[Sequence[int]], options: OptionValues, *, echo: bool) -> None:
    """Raise ApiError if one answer would have too many log probabilities, or tokens of echoed prompts. O(prompts).

    Without max_tokens, an answer ends at `most_scored_tokens`.
    """
    num_logprobs, most = options["logprobs"], options["max_tokens"]
    if num_logprobs is None and not echo:
        return
    num_repeated = sum(map(len, prompts)) if echo else 0
    num_generated = len(prompts) * (most or 0) if num_logprobs is not None else 0
    number = (num_repeated + num_generated) * options["n"] * (1 + (num_logprobs or 0))
    if number <= MAX_LOGPROBS:
        return
    name = "echo" if echo else "logprobs"
    what, less = (
        ("tokens of prompts", "") if num_logprobs is None else ("log probabilities", ", or fewer likely tokens")
    )
    message = f"{name}: expected at most {MAX_LOGPROBS} {what} in one answer, got up to {number}"
    raise ApiError(400, f"{message}: ask for fewer choices at once, or fewer tokens{less}", param=name)
