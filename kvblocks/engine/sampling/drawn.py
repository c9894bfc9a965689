"""The results of draws."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities of a token and its alternatives, before penalties, temperature and limits.

    logprob: that of the token itself. top: the most likely tokens with theirs, as many as were asked for, in descending
    order; equally likely ones in the order of the vocabulary. All are finite: a masked token has about -3.4e38.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawn(NamedTuple):
    """A drawn token. logprobs: None unless they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


Outcome = Drawn | Exception
"""A token, or the exception that says why there is none."""
