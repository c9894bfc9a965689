"""One request's side of sampling: its parameters, its seed, and the tokens that it has so far."""

import secrets
from array import array
from collections.abc import Collection
from typing import NamedTuple, Protocol

from torch import Tensor

from kvblocks import Sequence
from kvblocks.arguments import as_int, wrong
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.random_numbers import MAX_SEED, sample_seed

GREEDY = SamplingParams()


class TokenCounts:
    """How often each token has come in an answer. with_prompt: also list the prompt's tokens, with a count of 0.

    tokens, counts: int64, in the same order, each token once. They grow in place, so copy them before the next
    `catch_up`.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        self.tokens = array("q")
        self.counts = array("q")
        self._places: dict[int, int] = {}
        self._with_prompt = with_prompt
        self._num_seen = 0
        self._is_whole = True

    def catch_up(self, sequence: Sequence) -> None:
        """Count the tokens that `sequence` has gained since the last call. O(new tokens)."""
        if not self._is_whole:  # the last call was interrupted: begin again
            self.tokens, self.counts, self._places, self._num_seen = array("q"), array("q"), {}, 0
        self._is_whole = False
        num_prompt_tokens = sequence.num_prompt_tokens
        if not self._num_seen and not self._with_prompt:
            self._num_seen = num_prompt_tokens
        for position, token in enumerate(sequence.token_ids(self._num_seen), self._num_seen):
            place = self._places.setdefault(token, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[place] += position >= num_prompt_tokens
        self._num_seen = sequence.num_tokens
        self._is_whole = True


class Constraint(Protocol):
    """The state of one answer whose text must follow a grammar."""

    def allowed(self, sequence: Sequence) -> Tensor:
        """Return which tokens may come next, as a bit mask: int32 [vocab / 32] on the host.

        Valid until the next call.
        """


class Draw(NamedTuple):
    """How to draw from a row of logits, but for the random number. An answer has the same object for most tokens.

    seen: counts of earlier tokens, if there are penalties. banned: tokens to exclude. allowed: a bit mask of the
    allowed tokens, as from `Constraint`; None: all are allowed. bias: what to add to the logits of tokens.
    """

    params: SamplingParams
    seen: TokenCounts | None = None
    banned: tuple[int, ...] = ()
    allowed: Tensor | None = None
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether logits are changed before the draw: by penalties or a bias, or to exclude tokens. O(1)."""
        return self.seen is not None or bool(self.banned or self.bias) or self.allowed is not None


class Sampler:
    """Prepares the draws of one request. seed: 0 to 2**64 - 1; None: a random one. Raises InvalidArgumentError.

    random_seed: the seed of its random numbers; None: its draws are greedy, and take none. constraint: the form of the
    answer's text; None: any text. bias: for each biased token, what to add to its logit.
    """

    def __init__(self, params: SamplingParams = GREEDY, seed: int | None = None) -> None:
        number = secrets.randbits(64) if seed is None else as_int(seed)
        if number is None or not 0 <= number <= MAX_SEED:
            raise wrong("seed", "None or an int from 0 to 2**64 - 1", seed)
        self.params = params
        self.seed = number
        self.random_seed = None if params.is_greedy else number
        self._seen = TokenCounts(with_prompt=params.repetition_penalty != 1) if params.is_penalized else None
        self.constraint: Constraint | None = None
        self.bias: tuple[tuple[int, float], ...] = ()
        self._banned: tuple[int, ...] = ()
        self._num_without = 0
        self._draw = Draw(params, self._seen)  # the last token's

    def ban(self, tokens: Collection[int], num_tokens: int) -> None:
        """Exclude `tokens` from the first `num_tokens` of the answer. They must not be the whole vocabulary."""
        self._banned, self._num_without = tuple(tokens), num_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether a draw depends on the answer's earlier tokens, because of penalties or a grammar. O(1)."""
        return self._seen is not None or self.constraint is not None

    def next_draw(self, sequence: Sequence, position: int) -> Draw:
        """How to draw the answer's token at `position`. Calls give the same result until the sequence has that token.

        The sequence has all tokens before it, or may lack some if the sampler doesn't `needs_tokens`. O(new tokens).
        """
        if self._seen is not None:
            self._seen.catch_up(sequence)
        banned = self._banned if position < self._num_without else ()
        allowed = None if self.constraint is None else self.constraint.allowed(sequence)
        draw = self._draw
        if draw.banned is not banned or draw.allowed is not allowed or draw.bias is not self.bias:
            draw = self._draw = Draw(self.params, self._seen, banned, allowed, self.bias)
        return draw


def make_samplers(params: SamplingParams, seed: int | None, num_samples: int) -> list[Sampler]:
    """A sampler for each sample of a prompt, each with its own seed. Raises InvalidArgumentError. O(num_samples)."""
    first = Sampler(params, seed)
    seeds = [None if seed is None else sample_seed(seed, number) for number in range(1, num_samples)]
    return [first, *(Sampler(params, own_seed) for own_seed in seeds)]
