"""Turns logits into tokens: the most likely one, or a draw by temperature.

Every request has a sampler, and a sampler its own random numbers, one for each token it draws. So what a request gets
does not depend on what else is in the batch, nor on preemption.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvblocks.arguments import check_count, is_number
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.errors import InvalidArgumentError


class Sampler:
    """Samples one request's tokens. temperature 0 is greedy; `seed` None: a fresh one. Raises InvalidArgumentError.

    top_k: only the k most likely tokens are drawn from; None: all. top_p: of these, only the most likely ones, as few
    as have this probability together. Of equally likely tokens the first in the vocabulary count as the more likely.
    """

    def __init__(
        self, temperature: float = 0.0, seed: int | None = None, *, top_p: float = 1.0, top_k: int | None = None
    ) -> None:
        if not is_number(temperature) or not 0 <= temperature < math.inf:
            raise InvalidArgumentError(f"temperature: expected a number of at least 0, got {temperature!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
            raise InvalidArgumentError(f"seed: expected None or an int from 0 to 2**64 - 1, got {seed!r}")
        if not is_number(top_p) or not 0 < top_p <= 1:
            raise InvalidArgumentError(f"top_p: expected a number above 0.0 and up to 1.0, got {top_p!r}")
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = None if top_k is None else check_count("top_k", top_k, 1)
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def sample(self, logits: Tensor, best: int | None = None) -> int:
        """The next token, from `logits` [vocab]. Draws one random number unless greedy. O(vocab), or its sorting.

        best: the most likely token, if the caller knows it already.
        """
        if self.temperature == 0:
            return int(logits.argmax()) if best is None else best
        doubles = logits.cpu().double()
        # Subtracted before it is divided: a quotient of the smallest temperatures would be infinite.
        weights = (doubles - doubles.max()).div_(self.temperature).exp_()
        if self.top_k is not None or self.top_p < 1:
            self._drop_unlikely(weights)
        sums = weights.cumsum(0)
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * sums[-1]
        # right=True: the first token whose sum exceeds what was drawn, so never one of probability 0.
        return int(torch.searchsorted(sums, drawn, right=True).clamp_(max=len(sums) - 1))

    def _drop_unlikely(self, weights: Tensor) -> None:
        """Set the weights that `top_k` and `top_p` leave out to 0."""
        ranked, order = weights.sort(descending=True, stable=True)
        num_kept = len(ranked) if self.top_k is None else min(self.top_k, len(ranked))
        if self.top_p < 1:
            sums = ranked[:num_kept].cumsum(0)
            # The first index at which enough is together, and at least one.
            num_kept = min(num_kept, int(torch.searchsorted(sums, sums[-1] * self.top_p)) + 1)
        weights[order[num_kept:]] = 0


def sample_seed(seed: int, number: int) -> int:
    """The seed of a prompt's sample `number`, counted from 0, in a call with `seed`: that seed itself for the first.

    The others' are hashed, so that calls with neighbouring seeds have no sample in common. seed: 0 to 2**64 - 1. Raises
    InvalidArgumentError.
    """
    checked, index = check_count("seed", seed, 0, 2**64 - 1), check_count("number", number, 0, 2**64 - 1)
    if not index:
        return checked
    digest = blake2b(checked.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def make_samplers(
    num_samples: int, temperature: float, seed: int | None, *, top_p: float = 1.0, top_k: int | None = None
) -> list[Sampler]:
    """A sampler for each sample of a prompt, with seeds of their own. Raises InvalidArgumentError. O(num_samples)."""
    first = Sampler(temperature, seed, top_p=top_p, top_k=top_k)
    seeds = [None if seed is None else sample_seed(seed, number) for number in range(1, num_samples)]
    return [first, *(Sampler(temperature, own_seed, top_p=top_p, top_k=top_k) for own_seed in seeds)]


def sample_step(logits: Tensor, samplers: Sequence[Sequence[Sampler]]) -> list[int | Exception]:
    """A token for each sampler, in order, where `samplers[i]` are those of row i of `logits` [len(samplers), vocab].

    Instead of a token: BrokenLogitsError for a row with NaN, of which none is drawn; and what a sampler raised. None
    of that keeps the others from their tokens. O(samplers x vocab). The most likely tokens of all rows are found
    together, so that a GPU is waited for once.
    """
    rows = range(len(samplers))
    is_broken = logits.isnan().any(dim=1).tolist() if bool(logits.isnan().any()) else [False] * len(rows)
    best: list[int] = logits.argmax(-1).tolist() if len(logits) else []
    return [
        _try_sample(sampler, logits[row], best[row], is_broken=is_broken[row])
        for row in rows
        for sampler in samplers[row]
    ]


def _try_sample(sampler: Sampler, logits: Tensor, best: int, *, is_broken: bool) -> int | Exception:
    if is_broken:
        return BrokenLogitsError("expected logits that are numbers, got NaN: the weights or the KV cache are broken")
    try:
        return sampler.sample(logits, best)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this sampler's
        return error
