"""Prompts that branch, are edited and go on, through a model with and without a prompt cache."""

import copy
import random
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from integrations.mlx_lm.models import VOCABULARY

STEP = 16  # tokens of a chunk of a prompt


def forward(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    """Compute tokens in chunks. Returns their logits."""
    logits = []
    for start in range(0, len(tokens), STEP):
        output = model(mx.array([tokens[start : start + STEP]]), cache=cache)
        mx.eval(output, [one.state for one in cache])
        logits.append(output[0])
    return mx.concatenate(logits)


def decode(model: Any, cache: list[Any], logits: mx.array, number: int) -> list[int]:
    """Generate tokens greedily behind a prompt. All of them are in the cache then."""
    tokens = []
    for _ in range(number):
        tokens.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
        mx.eval(logits)
    return tokens


class Walk:
    """Users whose prompts share beginnings. theirs: a cache of mlx-lm's beside ours; None: none.

    worst: the largest difference of logits, as a share of the largest logit.
    """

    def __init__(self, model: Any, ours: Any, theirs: Any = None, seed: int = 0) -> None:
        self.model, self.ours, self.theirs = model, ours, theirs
        self.random = random.Random(seed)
        self.known = [self.some(24), self.some(30)]
        self.worst = 0.0
        self.num_computed = self.num_theirs = self.num_hits = self.num_worse = 0

    def some(self, number: int) -> list[int]:
        return [self.random.randrange(6, VOCABULARY) for _ in range(number)]

    def step(self) -> None:
        """A user goes on, edits what was said, or begins with what another said."""
        base = self.random.choice(self.known)
        cut = self.random.choice([len(base), len(base), self.random.randrange(1, len(base) + 1)])
        tokens = base[:cut] + self.some(self.random.randrange(1, 30))
        cache, rest = self.ours.fetch_nearest_cache("model", tokens)
        assert tokens[len(tokens) - len(rest) :] == rest and rest
        self.num_hits += cache is not None
        self.num_computed += len(rest)
        if self.theirs is not None:
            _, their_rest = self.theirs.fetch_nearest_cache("model", list(tokens))
            self.num_theirs += len(their_rest)
            self.num_worse += len(rest) > len(their_rest)
        cache = make_prompt_cache(self.model) if cache is None else cache
        logits = forward(self.model, cache, rest)
        cold = make_prompt_cache(self.model)
        expected = forward(self.model, cold, tokens)[-len(rest) :]
        largest = max(1.0, float(mx.abs(expected).max()))
        self.worst = max(self.worst, float(mx.abs(logits - expected).max()) / largest)
        if self.random.randrange(2):  # what is kept must not go further and further from the truth
            cache, logits = cold, expected
        whole = tokens + decode(self.model, cache, logits[-1], self.random.randrange(1, 12))
        if self.theirs is not None:
            self.theirs.insert_cache("model", list(whole), copy.deepcopy(cache))
        self.ours.insert_cache("model", whole, cache)
        self.ours.check()
        decode(self.model, cache, logits[-1], 3)  # the caller goes on with its own; nothing of it is shared
        self.known = [*self.known, whole][-12:]
