"""The arithmetic of sampling on tensors, a row for each draw, on whatever device the rows are on.

Weights are integers: e ** (logit / temperature), of the largest logit 2 ** q, with q such that a row's sum has at most
62 bits. So sums are exact, and a token depends neither on the order in which a device adds up nor on its batch. What is
below 2 ** -q of the most likely token, q being 44 for a vocabulary of 128k, is never drawn. All steps but `exp` are
exact or round one number by itself; `exp` is checked (tests) to give a number the same bits wherever it stands.

A token is found by one random number: u times the sum of all weights is a place in the row, and the token is the one
that reaches over it. Nothing here reads a value of a tensor on the host, so nothing waits for a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvblocks.engine.sampling.sampler import Draw

_BLOCK = 128
"""Weights that are summed before a place is looked for among the sums: a running sum over all would take longer."""

_GROUP = 16
"""Values of which only the largest is looked at, at first, in a search for the largest of a row."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Columns:
    """What draws ask for: tensors [num_draws, 1].

    scale: one over the temperature, float32. top_k: int64, at most the vocabulary's size. top_p, min_p, uniform:
    float64. num_logprobs: int64. repetition, presence, frequency: float32.
    """

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    num_logprobs: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def upload(cls, draws: list[Draw], vocab_size: int, device: torch.device) -> "Columns":
        """The columns of `draws` on `device`, in one transfer that isn't waited for. O(draws)."""
        rows = [
            (
                # Far beyond what tells logits apart, and neither infinite nor 0 in float32.
                min(max(1 / max(params.temperature, 2.0**-126), 2.0**-100), 2.0**126),
                vocab_size if params.top_k is None else min(params.top_k, vocab_size),
                params.top_p,
                params.min_p,
                draw.uniform,
                min(params.logprobs or 0, vocab_size),
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            for draw in draws
            for params in (draw.params,)
        ]
        table = to_device(torch.tensor(rows, dtype=torch.float64), device)
        scale, top_k, top_p, min_p, uniform, num_logprobs, *penalties = table.split(1, dim=1)
        repetition, presence, frequency = (column.float() for column in penalties)
        return cls(
            scale.float(), top_k.long(), top_p, min_p, uniform, num_logprobs.long(), repetition, presence, frequency
        )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, which isn't waited for: torch keeps pinned memory until the copy has been made."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def penalize(logits: Tensor, entries: Tensor, columns: Columns) -> None:
    """Change float32 `logits` [num_draws, vocab] by what each draw has had already. O(entries).

    entries: int64 [3, number]: which draw, a token, each once a draw, and how often its answer has it.
    """
    draws, tokens, counts = entries
    flat, places = logits.view(-1), draws * logits.shape[1] + tokens
    values, penalty = flat[places], columns.repetition[draws, 0]
    values = torch.where(values > 0, values / penalty, values * penalty)
    values -= columns.frequency[draws, 0] * counts + columns.presence[draws, 0] * (counts > 0)
    flat[places] = values


def pick_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the first of the largest logits, and whether the row has a NaN: int64 and bool [num_draws, 1]."""
    tokens = logits.argmax(-1, keepdim=True)  # which takes NaN for the largest
    return tokens, logits.gather(1, tokens).isnan()


def below_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """How far each logit is below its row's largest, at most 0; and whether the row has a NaN: bool [num_draws, 1].

    Infinite ones count as the largest and smallest float32, so a row of which all are masked has equal ones.
    """
    below = logits.clamp(-_LARGEST, _LARGEST)
    largest = below.amax(-1, keepdim=True)
    return below.sub_(largest), largest.isnan()


def pick_plain(below: Tensor, columns: Columns) -> Tensor:
    """A token of each row by its weight: int64 [num_draws, 1]. below: of `below_largest`. O(vocab)."""
    num_draws, vocab_size = below.shape
    num_blocks = -(-vocab_size // _BLOCK)
    weights = _weights(below, columns.scale, vocab_size)
    if weights.shape[1] < num_blocks * _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, num_blocks * _BLOCK - vocab_size))
    blocks = weights.view(num_draws, num_blocks, _BLOCK)
    sums = blocks.sum(-1)
    upto = sums.cumsum(-1)
    place = _place(upto[:, -1:], columns.uniform)
    block = _reaching(upto, place)
    place -= upto.gather(1, block) - sums.gather(1, block)
    inner = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    token = block * _BLOCK + _reaching(inner.cumsum(-1), place)
    return token.clamp_(max=vocab_size - 1)


def pick_limited(below: Tensor, columns: Columns, count: int, *, needs_total: bool) -> tuple[Tensor, Tensor]:
    """A token of each row by its weight, of those that min_p, top_k and top_p leave: int64 [num_draws, 1].

    And whether it is certain: bool [num_draws, 1]. The `count` largest are looked at, and it isn't if more may be left;
    all of them: it always is. A certain token is the one that any larger count gives. needs_total: whether a row has
    top_p alone, which is a share of all weights. top_k is to be less than count, or both are all.
    """
    vocab_size = below.shape[1]
    values, tokens = ranked(below, count)
    weights = _weights(values, columns.scale, vocab_size)
    upto = weights.cumsum(-1)
    least = (columns.min_p * _unit(vocab_size)).ceil().long()
    limit = (weights >= least).sum(-1, keepdim=True).minimum(columns.top_k).clamp_(min=1)
    mass = upto.gather(1, limit - 1)
    is_known = limit < count
    if needs_total and count < vocab_size:
        has_none = (columns.min_p == 0) & (columns.top_k == vocab_size)
        mass = torch.where(has_none, _weights(below, columns.scale, vocab_size).sum(-1, keepdim=True), mass)
        is_known |= has_none
    goal = (mass * columns.top_p).ceil().long().minimum(mass)
    last = torch.searchsorted(upto, goal).minimum(limit - 1)
    token = tokens.gather(1, _reaching(upto, _place(upto.gather(1, last), columns.uniform)).minimum(last))
    if count == vocab_size:
        return token, torch.ones_like(is_known)
    # Of values that equal the last one looked at there may be more, earlier in the vocabulary.
    return token, is_known & (values.gather(1, last) > values[:, -1:])


def logprobs_of(logits: Tensor, tokens: Tensor, columns: Columns, count: int, width: int) -> tuple[Tensor, Tensor]:
    """The logarithms of probability of `tokens` [num_draws, 1], and of each row's `width` most likely, which are named.

    float64 [num_draws, 1 + 2 x width]: the token's, those of the most likely, and these. And whether they are certain:
    bool [num_draws, 1]. count: of how many they are chosen, more than are asked for, or all. Infinite logits count as
    the largest and smallest float32.
    """
    logs = logits.clamp(-_LARGEST, _LARGEST).log_softmax(-1)
    own = logs.gather(1, tokens).double()
    if not width:
        return own, torch.ones_like(tokens, dtype=torch.bool)
    values, names = ranked(logs, count)
    last = values.gather(1, columns.num_logprobs.clamp(min=1) - 1)
    is_certain = (columns.num_logprobs == 0) | (last > values[:, -1:]) | (count == logits.shape[1])
    return torch.cat([own, values[:, :width].double(), names[:, :width].double()], 1), is_certain


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, in falling order, of equal ones the lower index first; and their indices.

    Of those that equal the last one, any may be there, unless `count` is all. O(row), and O(row log row) for all.
    """
    if count >= values.shape[1]:
        found = values.sort(dim=-1, descending=True, stable=True)
        return found.values, found.indices
    unordered, indices = _largest(values, count)
    indices, order = indices.sort(dim=-1)
    found = unordered.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return found.values, indices.gather(1, found.indices)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their indices, in any order; of those that equal the least of them, any.

    A value that is larger than the least is in one of the `count` groups whose largest values are largest: else each of
    these would have one that is at least as large. So only those are searched.
    """
    num_rows, size = values.shape
    num_groups = size // _GROUP
    if num_groups < 2 * count:
        found = values.topk(count, sorted=False)
        return found.values, found.indices
    grouped = values[:, : num_groups * _GROUP].unflatten(1, (_GROUP, num_groups))
    groups = grouped.amax(1).topk(count, sorted=False).indices.unsqueeze(1).expand(-1, _GROUP, -1)
    starts = torch.arange(0, num_groups * _GROUP, num_groups, device=values.device).view(1, -1, 1)
    rest = torch.arange(num_groups * _GROUP, size, device=values.device).expand(num_rows, -1)
    indices = torch.cat([(groups + starts).flatten(1), rest], 1)
    found = values.gather(1, indices).topk(count, sorted=False)
    return found.values, indices.gather(1, found.indices)


def _unit(vocab_size: int) -> float:
    """The most likely token's weight: so many of them don't reach 2 ** 62."""
    return float(2 ** (62 - vocab_size.bit_length()))


def _weights(below: Tensor, scale: Tensor, vocab_size: int) -> Tensor:
    """int64 weights of float32 `below` [num_draws, any number]."""
    return (below * scale).exp_().mul_(_unit(vocab_size)).long()


def _place(total: Tensor, uniform: Tensor) -> Tensor:
    """A place in `total` weights, from 0 up to but without them: int64 [num_draws, 1]."""
    return (total * uniform).long().minimum(total - 1)


def _reaching(upto: Tensor, place: Tensor) -> Tensor:
    """The first index whose running sum in `upto` [num_draws, number] exceeds the place: none of weight 0."""
    return torch.searchsorted(upto, place, right=True).clamp_(max=upto.shape[1] - 1)
