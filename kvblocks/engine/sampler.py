"""Turns logits into tokens: the most likely one, or a draw by temperature.

Every request has a sampler, and a sampler its own random numbers, one for each token it draws. So what a request gets
does not depend on what else is in the batch, nor on preemption.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvblocks.arguments import check_count
from kvblocks.engine.errors import ModelError
from kvblocks.errors import InvalidArgumentError


class Sampler:
    """Samples one request's tokens. temperature 0 is greedy; `seed` None: a fresh one. Raises InvalidArgumentError."""

    def __init__(self, temperature: float = 0.0, seed: int | None = None) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise InvalidArgumentError(f"temperature: expected a number of at least 0, got {temperature!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
            raise InvalidArgumentError(f"seed: expected None or an int from 0 to 2**64 - 1, got {seed!r}")
        self.temperature = temperature
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def sample(self, logits: Tensor) -> int:
        """The next token, from `logits` [vocab]. Draws one random number unless greedy. O(vocab)."""
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = logits.cpu().double() / self.temperature
        sums = scaled.sub_(scaled.max()).exp_().cumsum(0)
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * sums[-1]
        # right=True: the first token whose sum exceeds what was drawn, so never one of probability 0.
        return int(torch.searchsorted(sums, drawn, right=True).clamp_(max=len(sums) - 1))


def sample_seed(seed: int, number: int) -> int:
    """The seed of a prompt's sample `number`, counted from 0, in a call with `seed`: that seed itself for the first.

    The others' are hashed, so that calls with neighbouring seeds have no sample in common. seed: 0 to 2**64 - 1. Raises
    InvalidArgumentError.
    """
    checked, place = check_count("seed", seed, 0, 2**64 - 1), check_count("number", number, 0, 2**64 - 1)
    if not place:
        return checked
    digest = blake2b(checked.to_bytes(8, "little") + place.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def make_samplers(num_samples: int, temperature: float, seed: int | None) -> list[Sampler]:
    """A sampler for each sample of a prompt, with seeds of their own. Raises InvalidArgumentError. O(num_samples)."""
    first = Sampler(temperature, seed)
    seeds = [None if seed is None else sample_seed(seed, number) for number in range(1, num_samples)]
    return [first, *(Sampler(temperature, own_seed) for own_seed in seeds)]


def sample_step(logits: Tensor, samplers: Sequence[Sequence[Sampler]]) -> list[int]:
    """A token for each sampler, in order, where `samplers[i]` are those of row i of `logits` [len(samplers), vocab].

    Raises ModelError, before any is drawn, for NaN. O(samplers x vocab). The most likely tokens of all rows are found
    together, so that a GPU is waited for once.
    """
    if bool(logits.isnan().any()):
        raise ModelError("expected logits that are numbers, got NaN: the weights or the KV cache are broken")
    best: list[int] = logits.argmax(-1).tolist() if len(logits) else []
    return [
        top if sampler.temperature == 0 else sampler.sample(row)
        for row, top, own in zip(logits, best, samplers, strict=True)
        for sampler in own
    ]
