"""Draws the tokens of a step: all rows together, on their device, with one transfer back to the host.

Draws that need the same work form a group: greedy draws, plain draws, and draws that read only the most likely tokens.
The latter first read a fixed number of tokens, which nearly always suffices. Otherwise the draw is repeated with the
whole sorted vocabulary and the same random number. So the token is always the one that `SamplingParams` defines.

On a CPU a group is computed a few rows at a time, so that intermediate values stay in the processor's cache.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.drawn import Drawn, Outcome, TokenLogprobs
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Draw
from kvblocks.engine.sampling.weights import (
    Columns,
    add_bias,
    ban,
    below_largest,
    logprobs_of,
    penalize,
    pick_greedy,
    pick_limited,
    pick_plain,
    restrict,
    to_device,
)
from kvblocks.engine.sampling.workspace import Workspace

# How many of the most likely tokens a draw reads first. Repeating a draw means to wait for a GPU once more, but a GPU
# reads more tokens at little cost.
_CPU_LIKELY = 128
_GPU_LIKELY = 1024
# Logits that are processed at a time: 2 MiB, and twice that of weights; on a GPU some hundred MiB.
_CPU_TILE = 2**19
_GPU_TILE = 2**24

_NUM_FACTS = 3
_BROKEN = "expected logits that are numbers, got NaN: the weights or the KV cache are broken"


@dataclass
class SamplingCounts:
    """How many tokens were drawn so far, and how many of them needed the whole vocabulary sorted."""

    num_draws: int = 0
    num_sorted: int = 0


class Slot(NamedTuple):
    """A draw: its index among the outcomes, its row of logits, and how many of the most likely tokens it reads."""

    place: int
    row: int
    draw: Draw
    num_likely: int


class BatchSampler:
    """Draws the tokens of steps. Reads: counts."""

    def __init__(self) -> None:
        self.counts = SamplingCounts()
        self._memory = Workspace()

    @torch.inference_mode()
    def sample(self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]]) -> list[Outcome]:
        """The outcome of each draw, in order. `draws[i]` are drawn from row i of `logits` [len(draws), vocab].

        An exception in place of a draw is its own outcome. A row with NaN gives BrokenLogitsError. Other draws get
        their tokens anyway. logits: of any float type; they aren't changed. O(draws x vocab). Waits for a GPU once, and
        once more if draws have to be repeated.
        """
        outcomes: dict[int, Outcome] = {}
        waiting: list[Slot] = []
        for place, (row, draw) in enumerate((row, draw) for row, own in enumerate(draws) for draw in own):
            if isinstance(draw, Exception):
                outcomes[place] = draw
            else:
                waiting.append(Slot(place, row, draw, num_to_look_at(draw.params, logits)))
        self.counts.num_draws += len(waiting)
        while waiting:
            self.counts.num_sorted += sum(slot.num_likely == logits.shape[1] for slot in waiting)
            groups = list(group_slots(waiting, logits.shape[1]))
            uncertain = _read(groups, enqueue(logits, groups, self._memory), outcomes)
            waiting = [slot._replace(num_likely=logits.shape[1]) for slot in uncertain]
        return [outcomes[place] for place in range(len(outcomes))]


def num_to_look_at(params: SamplingParams, logits: Tensor) -> int:
    """How many of the most likely tokens a draw reads first: 0 if it needs none, all if it may need nearly all."""
    vocab_size = logits.shape[1]
    is_limited = _is_limited(params, vocab_size)
    if not is_limited and not params.logprobs:
        return 0
    top_k = params.top_k if is_limited and params.top_k is not None and params.top_k < vocab_size else 0
    first = _GPU_LIKELY if logits.device.type == "cuda" else _CPU_LIKELY
    return first if max(top_k, params.logprobs or 0) < first < vocab_size else vocab_size


def _is_limited(params: SamplingParams, vocab_size: int) -> bool:
    """Whether tokens are drawn, and some are left out."""
    has_limit = params.top_p < 1 or params.min_p > 0 or (params.top_k is not None and params.top_k < vocab_size)
    return has_limit and not params.is_greedy


class AlikeDraws(NamedTuple):
    """Draws that need the same work. width: the most top tokens whose logarithms a draw wants; -1: no logarithms.

    is_changed: whether logits are changed before the draw: by penalties or a bias, or to exclude tokens.
    """

    slots: list[Slot]
    is_greedy: bool
    is_limited: bool
    is_changed: bool
    num_likely: int
    width: int

    @property
    def num_results(self) -> int:
        """How many numbers a draw results in."""
        return _NUM_FACTS if self.width < 0 else _NUM_FACTS + 1 + 2 * self.width

    @property
    def is_bare(self) -> bool:
        """Whether only the most likely token is wanted."""
        return self.is_greedy and not self.is_changed and self.width < 0


def group_slots(slots: Sequence[Slot], vocab_size: int) -> Iterator[AlikeDraws]:
    """Groups of slots that need the same work. Each group keeps the slots' order."""
    groups: dict[tuple[bool, bool, bool, int, bool], list[Slot]] = {}
    for slot in slots:
        params = slot.draw.params
        is_limited = _is_limited(params, vocab_size)
        draw = slot.draw
        is_changed = params.is_penalized or bool(draw.banned or draw.bias) or draw.allowed is not None
        key = (params.is_greedy, is_limited, is_changed, slot.num_likely, params.logprobs is not None)
        groups.setdefault(key, []).append(slot)
    for (is_greedy, is_limited, is_changed, num_likely, has_logprobs), members in groups.items():
        width = max(_num_named(slot, vocab_size) for slot in members) if has_logprobs else -1
        yield AlikeDraws(members, is_greedy, is_limited, is_changed, num_likely, width)


def _num_named(slot: Slot, vocab_size: int) -> int:
    """How many of the most likely tokens a draw's logarithms cover."""
    return min(slot.draw.params.logprobs or 0, vocab_size)


def enqueue(logits: Tensor, groups: Sequence[AlikeDraws], memory: Workspace) -> Tensor:
    """Begin to draw, without waiting. Returns the results of `_draw`, group by group, slot by slot."""
    size = max(1, (_GPU_TILE if logits.device.type == "cuda" else _CPU_TILE) // logits.shape[1])
    tiles = (
        group._replace(slots=group.slots[start : start + size])
        for group in groups
        for start in range(0, len(group.slots), size)
    )
    return torch.cat([_draw(logits, tile, memory).flatten() for tile in tiles])


def _draw(logits: Tensor, tile: AlikeDraws, memory: Workspace) -> Tensor:
    """float64 [slots, num_results]: token, whether its row has NaN, whether it is certain, and wanted logarithms."""
    device, vocab_size = logits.device, logits.shape[1]
    draws = [slot.draw for slot in tile.slots]
    own = _rows(logits, [slot.row for slot in tile.slots])
    if tile.is_bare:
        return _facts(*pick_greedy(own))
    columns, changed = Columns.upload(draws, vocab_size, device), own
    if tile.is_changed:
        changed = memory.take("changed", (len(draws), vocab_size), torch.float32, device).copy_(own)
        penalize(changed, to_device(_entries(draws), device), columns)
        _add_bias(changed, draws)
        ban(changed, to_device(_banned(draws), device))
        _restrict(changed, draws)
    if tile.is_greedy:
        token, is_broken = pick_greedy(changed)
        is_certain = torch.ones_like(is_broken)
    else:
        below, is_broken = below_largest(changed, memory)
        if tile.is_limited:
            token, is_certain = pick_limited(below, columns, tile.num_likely, memory)
        else:
            token, is_certain = pick_plain(below, columns, memory), torch.ones_like(is_broken)
    if tile.width < 0:
        return _facts(token, is_broken, is_certain)
    logs, is_sure = logprobs_of(own, token, columns, tile.num_likely, tile.width, memory)
    return torch.cat([_facts(token, is_broken, is_certain & is_sure), logs], 1)


def _facts(token: Tensor, is_broken: Tensor, is_certain: Tensor | None = None) -> Tensor:
    """The first columns of results. is_certain: None: all tokens are."""
    certain = torch.ones_like(is_broken) if is_certain is None else is_certain
    return torch.cat([token.double(), is_broken.double(), certain.double()], 1)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows in float32: a view if they are consecutive and in float32 already, else a copy."""
    first, number = rows[0], len(rows)
    if rows == list(range(first, first + number)):
        found = logits[first : first + number]
    else:
        found = logits.index_select(0, to_device(torch.tensor(rows), logits.device))
    return found if found.dtype == torch.float32 else found.float()


def _entries(draws: Sequence[Draw]) -> Tensor:
    """The tokens that each draw's answer has: int64 [3, number], as `penalize` takes them."""
    parts = [
        torch.stack([torch.full((len(seen.tokens),), index), _copied(seen.tokens), _copied(seen.counts)])
        for index, draw in enumerate(draws)
        if (seen := draw.seen) is not None and seen.tokens
    ]
    return torch.cat(parts, 1) if parts else torch.empty(3, 0, dtype=torch.int64)


def _banned(draws: Sequence[Draw]) -> Tensor:
    """The tokens that each draw excludes: int64 [2, number], as `ban` takes them."""
    pairs = [(index, token) for index, draw in enumerate(draws) for token in draw.banned]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()


def _add_bias(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Add each draw's bias to its row."""
    added = [(index, token, value) for index, draw in enumerate(draws) for token, value in draw.bias]
    if added:
        entries = torch.tensor([[index for index, _, _ in added], [token for _, token, _ in added]])
        values = torch.tensor([value for _, _, value in added], dtype=torch.float32)
        add_bias(logits, to_device(entries, logits.device), to_device(values, logits.device))


def _restrict(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Exclude the tokens that a draw doesn't allow, in the rows of draws that say so."""
    words = [(index, draw.allowed) for index, draw in enumerate(draws) if draw.allowed is not None]
    if words:
        rows = torch.tensor([index for index, _ in words])
        octets = torch.stack([allowed for _, allowed in words]).view(torch.uint8).numpy()
        # Some ten times as fast as shifting all words by all bit positions.
        bits = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little")
        is_allowed = torch.from_numpy(bits).view(torch.bool)
        restrict(logits, to_device(rows, logits.device), to_device(is_allowed, logits.device))


def _copied(values: "array[int]") -> Tensor:
    """A copy: an array can't grow while a tensor uses its memory."""
    return torch.frombuffer(values, dtype=torch.int64).clone()


def _read(groups: Sequence[AlikeDraws], results: Tensor, outcomes: dict[int, Outcome]) -> list[Slot]:
    """Store the outcomes by index, and return the slots to draw again. Waits for the one transfer from the device."""
    values = iter(results.tolist())
    uncertain = []
    for group in groups:
        for slot in group.slots:
            token, is_broken, is_certain, *logs = islice(values, group.num_results)
            if is_broken:
                outcomes[slot.place] = BrokenLogitsError(_BROKEN)
            elif not is_certain:
                uncertain.append(slot)
            else:
                outcomes[slot.place] = Drawn(int(token), _logprobs(logs, group.width, slot) if logs else None)
    return uncertain


def _logprobs(logs: list[float], width: int, slot: Slot) -> TokenLogprobs:
    """The logarithms of a draw, from its row of results."""
    own, number = logs[0], slot.draw.params.logprobs or 0
    found = zip(logs[1 + width :], logs[1 : 1 + width], strict=True)
    return TokenLogprobs(own, tuple((int(token), logprob) for token, logprob in islice(found, number)))
