"""How far apart two answers to one prompt are, and how far they may be."""

import math
from dataclasses import dataclass

from kvblocks.verify.server.target import Reply

SMALLEST_TOLERANCE = 0.002
"""In nats. Even a server that is exact to the last bit may round what it prints."""

TIMES_NOISE = 4.0


def distance(first: Reply, second: Reply) -> float:
    """Return the largest difference of log probabilities, in nats, up to the first token that differs.

    There, greedy answers may differ if two tokens are about equally likely. So what counts there is how much less
    likely the second most likely token was than the chosen one, in the first answer. Infinite if the server doesn't say
    that, or if there are no log probabilities and the texts differ.
    """
    if not first.tokens or not second.tokens:
        return 0.0 if first.text == second.text else math.inf
    found = 0.0
    for index, (one, other) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if one != other:
            runner_up = first.runners_up[index]
            return max(found, math.inf if runner_up is None else first.logprobs[index] - runner_up)
        found = max(found, abs(first.logprobs[index] - second.logprobs[index]))
    return found


@dataclass(frozen=True)
class Tolerance:
    """How much difference is normal. noise: the largest distance seen between answers in equal states of the cache."""

    noise: float

    @property
    def is_known(self) -> bool:
        """Whether answers can be compared at all."""
        return math.isfinite(self.noise)

    @property
    def nats(self) -> float:
        """The largest distance that isn't a fault."""
        return max(SMALLEST_TOLERANCE, TIMES_NOISE * self.noise)

    def times(self, first: Reply, second: Reply) -> float:
        """How far apart two answers are, in units of the tolerance. More than 1.0 is a fault."""
        return distance(first, second) / self.nats


def show(reply: Reply) -> str:
    """Return an answer as readable text: its tokens with their log probabilities."""
    if not reply.tokens:
        return repr(reply.text)
    return " ".join(f"{token!r}:{value:.4f}" for token, value in zip(reply.tokens, reply.logprobs, strict=True))
