"""One request's side of sampling: what it asked for, its seed, and the tokens that it has had."""

import secrets
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvblocks.arguments import as_int, wrong
from kvblocks.core.sequence import Sequence
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.random_numbers import MAX_SEED, sample_seed, uniform

GREEDY = SamplingParams()


class TokenCounts:
    """How often an answer has each token so far; with its prompt's tokens, of which none is counted, if `with_prompt`.

    tokens, counts: int64, in the same order, each token once. They grow in place: whoever reads them copies them before
    the next `catch_up`.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        self.tokens = array("q")
        self.counts = array("q")
        self._places: dict[int, int] = {}
        self._with_prompt = with_prompt
        self._num_seen = 0
        self._is_whole = True

    def catch_up(self, sequence: Sequence) -> None:
        """Take in the tokens that `sequence` has got since the last time. O(new tokens)."""
        if not self._is_whole:  # the last time was interrupted: from the start
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
    """Where one answer stands whose tokens must make up a text of some form."""

    def allowed(self, sequence: Sequence) -> Tensor:
        """Return which tokens may be the next one: a bit each, int32 [vocab / 32] on the host, until the next call."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What is to be drawn from a row of logits. uniform: its random number. seen: only where there are penalties.

    banned: tokens that it can't be. allowed: a bit for each token that it can be, as `Constraint` has them; None: any.
    """

    params: SamplingParams
    uniform: float = 0.0
    seen: TokenCounts | None = None
    banned: tuple[int, ...] = ()
    allowed: Tensor | None = None


class Sampler:
    """What one request draws by. seed: 0 to 2**64 - 1; None: one that nobody knows. Raises InvalidArgumentError.

    ban: keeps tokens from the beginning of an answer. constraint: what its text must be like; None: anything.
    """

    def __init__(self, params: SamplingParams = GREEDY, seed: int | None = None) -> None:
        number = secrets.randbits(64) if seed is None else as_int(seed)
        if number is None or not 0 <= number <= MAX_SEED:
            raise wrong("seed", "None or an int from 0 to 2**64 - 1", seed)
        self.params = params
        self.seed = number
        self._seen = TokenCounts(with_prompt=params.repetition_penalty != 1) if params.is_penalized else None
        self.constraint: Constraint | None = None
        self._banned: tuple[int, ...] = ()
        self._num_without = 0

    def ban(self, tokens: Collection[int], num_tokens: int) -> None:
        """Let none of `tokens`, which aren't the whole vocabulary, be among the first `num_tokens` of the answer."""
        self._banned, self._num_without = tuple(tokens), num_tokens

    def next_draw(self, sequence: Sequence) -> Draw:
        """What the next token of `sequence` is drawn by. The same again until it has that. O(tokens new to it)."""
        if self._seen is not None:
            self._seen.catch_up(sequence)
        position = sequence.num_tokens - sequence.num_prompt_tokens
        banned = self._banned if position < self._num_without else ()
        number = 0.0 if self.params.is_greedy else uniform(self.seed, position)
        allowed = None if self.constraint is None else self.constraint.allowed(sequence)
        return Draw(self.params, number, self._seen, banned, allowed)


def make_samplers(params: SamplingParams, seed: int | None, num_samples: int) -> list[Sampler]:
    """A sampler for each sample of a prompt, with seeds of their own. Raises InvalidArgumentError. O(num_samples)."""
    first = Sampler(params, seed)
    seeds = [None if seed is None else sample_seed(seed, number) for number in range(1, num_samples)]
    return [first, *(Sampler(params, own_seed) for own_seed in seeds)]
