"""The arithmetic of sampling on tensors, one row per draw, on any device.

Weights are integers in proportion to e ** (logit / temperature). The largest is 2 ** q, with q chosen so that a row's
sum has at most 62 bits. So sums are exact, and a token depends neither on the order in which a device adds nor on the
batch. A token less likely than 2 ** -q of the most likely one is never drawn; q is 44 for a vocabulary of 128k. All
operations but `exp` are exact, or round each number by itself. Tests check that `exp` gives a number the same bits at
any index.

A random number u selects the first token at which the running sum of weights exceeds u times the sum of all weights.
Nothing here reads a tensor's value on the host, so nothing waits for a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.workspace import Workspace

_BLOCK = 128
"""Weights per block.

The search first finds a block by the blocks' sums, which is faster than a running sum over a row.
"""

_GROUP = 16
"""Values per group. The search for a row's largest values first compares the groups' maxima."""

_MAGNITUDE = 0x7FFFFFFF
_INDEX = 0xFFFFFFFF
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Columns:
    """The parameters of draws as tensors [num_draws, 1], and facts about all of them that the host knows.

    scale: 1 / temperature, float32. top_k: int64, at most the vocabulary's size. top_p, min_p: float64.
    num_logprobs: int64. repetition, presence, frequency: float32. has_min_p: whether any draw has a min_p.
    has_share_of_all: whether any draw has neither min_p nor top_k, so that its top_p is a share of all weights.
    """

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_logprobs: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    has_min_p: bool
    has_share_of_all: bool

    @classmethod
    def upload(cls, asked: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "Columns":
        """The columns on `device`, uploaded in one transfer, without waiting for it. O(draws)."""
        rows = [
            (
                scale_of(params),
                vocab_size if params.top_k is None else min(params.top_k, vocab_size),
                params.top_p,
                params.min_p,
                min(params.logprobs or 0, vocab_size),
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            for params in asked
        ]
        table = to_device(torch.tensor(rows, dtype=torch.float64), device)
        scale, top_k, top_p, min_p, num_logprobs, *penalties = table.split(1, dim=1)
        # Clamped to finite float32: infinity times 0 would be NaN, which stands for broken weights.
        repetition, presence, frequency = (column.clamp(-_LARGEST, _LARGEST).float() for column in penalties)
        return cls(
            scale=scale.float(),
            top_k=top_k.long(),
            top_p=top_p,
            min_p=min_p,
            num_logprobs=num_logprobs.long(),
            repetition=repetition.clamp(min=_SMALLEST),
            presence=presence,
            frequency=frequency,
            has_min_p=any(params.min_p > 0 for params in asked),
            has_share_of_all=any(
                not params.min_p and (params.top_k is None or params.top_k >= vocab_size) for params in asked
            ),
        )


def scale_of(params: SamplingParams) -> float:
    """1 / temperature, clamped so that it is neither infinite nor 0 in float32. Useful temperatures aren't affected."""
    return min(max(1 / max(params.temperature, 2.0**-126), 2.0**-100), 2.0**126)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` without waiting. torch keeps the pinned memory until the copy is done."""
    is_on_its_way = device.type == "cuda" and values.device.type == "cpu"
    return values.pin_memory().to(device, non_blocking=True) if is_on_its_way else values.to(device)


def penalize(logits: Tensor, entries: Tensor, columns: Columns) -> None:
    """Change float32 `logits` [num_draws, vocab] by the penalties for earlier tokens. O(entries).

    entries: int64 [3, num_entries]: rows of draws, tokens (each at most once per draw), and how often the answer has
    them.
    """
    draws, tokens, counts = entries
    flat, places = logits.view(-1), draws * logits.shape[1] + tokens
    values, penalty = flat[places], columns.repetition[draws, 0]
    values = torch.where(values > 0, values / penalty, values * penalty)
    taken = columns.frequency[draws, 0] * counts + columns.presence[draws, 0] * (counts > 0)
    flat[places] = values - taken.clamp_(-_LARGEST, _LARGEST)


def add_bias(logits: Tensor, entries: Tensor, values: Tensor) -> None:
    """Add biases to float32 `logits` [num_draws, vocab], in place. O(entries).

    entries: int64 [2, num_entries]: rows of draws, and tokens (each at most once per draw). values: float32
    [num_entries].
    """
    draws, tokens = entries
    logits.view(-1)[draws * logits.shape[1] + tokens] += values


def ban(logits: Tensor, entries: Tensor) -> None:
    """Make tokens impossible in float32 `logits` [num_draws, vocab], in place. A NaN stays NaN. O(entries).

    entries: int64 [2, num_entries]: rows of draws, and tokens.
    """
    draws, tokens = entries
    flat, places = logits.view(-1), draws * logits.shape[1] + tokens
    values = flat[places]
    flat[places] = values.masked_fill(~values.isnan(), -torch.inf)


def restrict(logits: Tensor, rows: Tensor, is_allowed: Tensor) -> None:
    """Make tokens impossible in some rows of float32 `logits` [num_draws, vocab], in place. A NaN stays NaN.

    rows: int64 [num_rows]. is_allowed: bool [num_rows, vocab]. O(num_rows x vocab).
    """
    own = logits.index_select(0, rows)
    logits.index_copy_(0, rows, own.masked_fill(is_allowed.logical_or(own.isnan()).logical_not_(), -torch.inf))


def pick_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's first largest logit, and whether the row has a NaN: int64 and bool [num_draws, 1]."""
    if logits.is_cpu and logits.dtype == torch.float32:  # numpy's argmax takes a tenth of the time
        tokens = torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))
    else:
        tokens = logits.argmax(-1, keepdim=True)  # both functions count NaN as the largest
    return tokens, logits.gather(1, tokens).isnan()


def below_largest(logits: Tensor, memory: Workspace) -> tuple[Tensor, Tensor]:
    """How far each logit is below its row's largest, at most 0; and whether the row has a NaN: bool [num_draws, 1].

    Infinite logits count as the largest and smallest float32. So if all tokens of a row are masked, all are equally
    likely.
    """
    below = _clamped(logits, memory)
    largest = below.amax(-1, keepdim=True)
    return below.sub_(largest), largest.isnan()


def pick_plain(below: Tensor, columns: Columns, uniform: Tensor, memory: Workspace) -> Tensor:
    """Draw a token of each row by weight: int64 [num_draws, 1]. O(vocab).

    below: from `below_largest`; overwritten. uniform: the random numbers, float64 [num_draws, 1].
    """
    num_draws, vocab_size = below.shape
    num_blocks = -(-vocab_size // _BLOCK)
    weights = memory.take("integers", (num_draws, num_blocks * _BLOCK), torch.int64, below.device)
    _weigh(below, columns.scale, vocab_size, weights[:, :vocab_size])
    weights[:, vocab_size:] = 0
    blocks = weights.view(num_draws, num_blocks, _BLOCK)
    sums = blocks.sum(-1)
    upto = sums.cumsum(-1)
    place = _place(upto[:, -1:], uniform)
    block = _reaching(upto, place)
    place -= upto.gather(1, block) - sums.gather(1, block)
    inner = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    token = block * _BLOCK + _reaching(inner.cumsum(-1), place)
    return token.clamp_(max=vocab_size - 1)  # a row with NaN may give any index


def pick_limited(
    below: Tensor, columns: Columns, uniform: Tensor, num_likely: int, memory: Workspace
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, by weight, from those that min_p, top_k and top_p leave: int64 [num_draws, 1].

    Also returns whether the token is certain, that is, the same as if all logits had been read: bool [num_draws, 1].
    Only the `num_likely` largest of each row are read, so a token isn't certain if min_p, top_k and top_p may leave
    more than these. top_k must be less than num_likely, or both must be the vocabulary's size. below, uniform: as for
    `pick_plain`.
    """
    num_draws, vocab_size = below.shape
    keys = _ranked(below, num_likely, memory)
    total = keys[:, :1]
    if columns.has_share_of_all and num_likely < vocab_size:
        weights = memory.take("integers", (num_draws, vocab_size), torch.int64, below.device)
        total = _weigh(below, columns.scale, vocab_size, weights).sum(-1, keepdim=True)
    weights = memory.take("integers", (num_draws, num_likely), torch.int64, below.device)
    values = memory.take("likely", (num_draws, num_likely), torch.float32, below.device)
    values.view(torch.int32).copy_(torch.bitwise_right_shift(keys, 32, out=weights))
    _weigh(values.neg_(), columns.scale, vocab_size, weights)
    limit = columns.top_k.clamp(max=num_likely)
    if columns.has_min_p:
        least = (columns.min_p * _unit(vocab_size)).ceil().long()
        limit = (weights >= least).sum(-1, keepdim=True).minimum(limit).clamp_(min=1)
    upto = weights.cumsum_(-1)
    mass, is_known = upto.gather(1, limit - 1), limit < num_likely
    if columns.has_share_of_all and num_likely < vocab_size:
        is_share_of_all = (columns.min_p == 0) & (columns.top_k == vocab_size)
        mass, is_known = torch.where(is_share_of_all, total, mass), is_known | is_share_of_all
    goal = (mass * columns.top_p).ceil().long().minimum(mass)
    last = torch.searchsorted(upto, goal).minimum(limit - 1)
    index = _reaching(upto, _place(upto.gather(1, last), uniform))
    if num_likely == vocab_size:
        is_certain = torch.ones_like(is_known)
    else:  # more tokens may be as likely as the last one that was read, and come earlier in the vocabulary
        is_certain = is_known & (keys.gather(1, last) >> 32 < keys[:, -1:] >> 32)
    return keys.gather(1, index) & _INDEX, is_certain


def logprobs_of(
    logits: Tensor, tokens: Tensor, columns: Columns, num_likely: int, width: int, memory: Workspace
) -> tuple[Tensor, Tensor]:
    """The log probabilities of `tokens` [num_draws, 1], and of the `width` most likely tokens of each row.

    Returns float64 [num_draws, 1 + 2 x width]: the log probability of the token, those of the most likely tokens, and
    the ids of these tokens. Also returns whether these are certainly the most likely ones: bool [num_draws, 1].
    num_likely: how many of the largest logits are read: more than `width`, or all. Infinite logits count as the largest
    and smallest float32.
    """
    logs = memory.take("logarithms", (logits.shape[0], logits.shape[1]), torch.float32, logits.device)
    torch.log_softmax(_clamped(logits, memory), -1, out=logs)
    own = logs.gather(1, tokens).double()
    if not width:
        return own, torch.ones_like(tokens, dtype=torch.bool)
    keys = _ranked(logs, num_likely, memory)
    last = keys.gather(1, columns.num_logprobs.clamp(min=1) - 1)
    is_certain = (columns.num_logprobs == 0) | (last >> 32 < keys[:, -1:] >> 32)
    is_certain |= num_likely == logits.shape[1]
    named = keys[:, :width] & _INDEX
    return torch.cat([own, logs.gather(1, named).double(), named.double()], 1), is_certain


def _clamped(logits: Tensor, memory: Workspace) -> Tensor:
    """The logits without infinities."""
    floats = memory.take("floats", (logits.shape[0], logits.shape[1]), torch.float32, logits.device)
    return torch.clamp(logits, -_LARGEST, _LARGEST, out=floats)


def _ranked(values: Tensor, number: int, memory: Workspace) -> Tensor:
    """The `number` largest of each row of float32 [num_rows, size] in falling order, as keys: int64 [num_rows, number].

    values: none above 0. The upper bits of a key are the value's bits without its sign, which are ordered by the
    distance from 0. The lower bits are the index. So no two keys are equal, and of equal values the lower index comes
    first. Unless `number` is the row's size, values that equal the last returned one may be left out although their
    indices are lower. O(size), O(size log size) for all.
    """
    num_rows, size = values.shape
    if number < size:
        found, indices = _largest(values, number)
    else:
        found, indices = values, torch.arange(size, device=values.device)
    keys = memory.take("keys", (num_rows, number), torch.int64, values.device)
    keys.copy_(found.view(torch.int32)).bitwise_and_(_MAGNITUDE).bitwise_left_shift_(32).bitwise_or_(indices)
    if keys.device.type == "cpu":
        keys.numpy().sort(-1)  # 20 times as fast as torch's sort, with AVX-512
        return keys
    return keys.sort().values


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row and their indices, in any order. Ties for the least one go to any index.

    Only the `count` groups with the largest maxima are searched. That suffices: if a value were larger than the least
    result and in no such group, each of these groups would have a value at least as large, so there would be `count`
    larger results.
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
    """The most likely token's weight. A vocabulary of such weights sums to less than 2 ** 62."""
    return float(2 ** (62 - vocab_size.bit_length()))


def _weigh(below: Tensor, scale: Tensor, vocab_size: int, weights: Tensor) -> Tensor:
    """Write the weights of float32 `below` [num_draws, number] to `weights`, and return these. Overwrites `below`."""
    return weights.copy_(below.mul_(scale).exp_().mul_(_unit(vocab_size)))


def _place(total: Tensor, uniform: Tensor) -> Tensor:
    """uniform * total, from 0 to below `total`: int64 [num_draws, 1].

    A uniform number is at most 1 - 2 ** -53. That reduces the total by at least as much as rounding it to a float can
    add.
    """
    return (total * uniform).long()


def _reaching(upto: Tensor, place: Tensor) -> Tensor:
    """The first index whose running sum in `upto` [num_draws, number] exceeds `place`. Its weight is above 0."""
    return torch.searchsorted(upto, place, right=True).clamp_(max=upto.shape[1] - 1)
