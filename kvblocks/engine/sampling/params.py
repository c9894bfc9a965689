"""The sampling parameters of a request, checked once."""

import math
from dataclasses import dataclass
from typing import Any

from kvblocks.arguments import check_count, is_number, wrong

MAX_LOGPROBS = 1000
"""The most top tokens whose log probabilities can be asked for."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from logits. The parameters apply in this order:

    repetition_penalty: logits of tokens in prompt or answer are divided by it if positive, else multiplied. Above 0.
    frequency_penalty: subtracted from a token's logit for each time that the answer has it. presence_penalty:
    subtracted once if the answer has it. Any finite number.
    temperature: 0 is greedy: the first of the largest logits is taken, and the parameters below are ignored. Otherwise
    logits are divided by it, and tokens are drawn in proportion to e ** logit.
    min_p: keeps tokens whose probability is at least this share of the most likely token's. 0 to 1.
    top_k: keeps the k most likely of the remaining tokens; None: all. top_p: of these, keeps the smallest set of most
    likely ones that together have this share of their total probability. Of equally likely tokens, the first in the
    vocabulary counts as more likely.
    logprobs: how many of the most likely tokens are returned with each drawn token, with their log probabilities; 0:
    only the drawn token's own; None: none. They are those of the logits before all of the above.

    The defaults have no effect and no cost. Raises InvalidArgumentError.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        temperature = _check_real("temperature", self.temperature, "a number of at least 0")
        if temperature < 0:
            raise wrong("temperature", "a number of at least 0", self.temperature)
        top_p = _check_real("top_p", self.top_p, "a number above 0.0 and up to 1.0")
        if not 0 < top_p <= 1:
            raise wrong("top_p", "a number above 0.0 and up to 1.0", self.top_p)
        min_p = _check_real("min_p", self.min_p, "a number from 0.0 to 1.0")
        if not 0 <= min_p <= 1:
            raise wrong("min_p", "a number from 0.0 to 1.0", self.min_p)
        repetition = _check_real("repetition_penalty", self.repetition_penalty, "a number above 0.0")
        if repetition <= 0:
            raise wrong("repetition_penalty", "a number above 0.0", self.repetition_penalty)
        values: dict[str, float | None] = {
            "temperature": temperature,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition,
            "presence_penalty": _check_real("presence_penalty", self.presence_penalty, "a finite number"),
            "frequency_penalty": _check_real("frequency_penalty", self.frequency_penalty, "a finite number"),
            "top_k": None if self.top_k is None else check_count("top_k", self.top_k, 1),
            "logprobs": None if self.logprobs is None else check_count("logprobs", self.logprobs, 0, MAX_LOGPROBS),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # converted to plain numbers

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw. O(1)."""
        return self.temperature == 0

    @property
    def is_penalized(self) -> bool:
        """Whether any penalty changes how likely earlier tokens are. O(1)."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def _check_real(name: str, value: Any, expected: str) -> float:
    """Return `value` as a finite float, else raise InvalidArgumentError."""
    try:
        number = float(value) if is_number(value) else math.inf
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise wrong(name, expected, value)
    return number
