"""The results of draws."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token: logarithms of probability, before penalties, temperature and limits.

    logprob: of the token itself. top: the most likely tokens with their logarithms, as many as were asked for, the most
    likely first; of equally likely ones, the first in the vocabulary. Logarithms are finite: a masked token has about
    -3.4e38.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawn(NamedTuple):
    """A token. logprobs: if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


Outcome = Drawn | Exception
"""A token, or the exception that says why there is none."""
