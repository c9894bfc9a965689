"""Draws the tokens of a step: all rows together, on their device, with one transfer back to the host.

Draws that need the same work are put together: greedy ones, plain ones, and those that look at so many of the most
likely tokens. These are sure of their token in nearly all cases; one that is not is drawn again, by the same random
number and hence with the token that the definition says, from more of them, and in the end from the whole vocabulary.
On a CPU a group is taken a few rows at a time, so that what is computed in between stays in the processor's cache.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.drawn import Drawn, Outcome, TokenLogprobs
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Draw
from kvblocks.engine.sampling.weights import (
    Columns,
    below_largest,
    logprobs_of,
    penalize,
    pick_greedy,
    pick_limited,
    pick_plain,
    to_device,
)

# How many of the most likely tokens are looked at: first, and where that isn't enough. On a GPU each further try waits
# for it, while looking at more costs little.
_CPU_COUNTS = (128, 1024)
_GPU_COUNTS = (1024,)
# Logits that are worked on at a time: 2 MiB, and twice that of weights; on a GPU some hundred MiB.
_CPU_TILE = 2**19
_GPU_TILE = 2**24

_NUM_FACTS = 3
_BROKEN = "expected logits that are numbers, got NaN: the weights or the KV cache are broken"


@dataclass
class SamplingCounts:
    """What was drawn so far, and what it took.

    num_draws: tokens. num_widened: draws that were repeated, since the most likely tokens that were looked at weren't
    enough. num_sorted: draws that put the whole vocabulary in order, which takes far longer.
    """

    num_draws: int = 0
    num_widened: int = 0
    num_sorted: int = 0


class Slot(NamedTuple):
    """A draw: its place among the outcomes, its row of logits, and how many of the most likely it looks at; 0: none."""

    place: int
    row: int
    draw: Draw
    num_likely: int


class BatchSampler:
    """Draws the tokens of steps. Reads: counts."""

    def __init__(self) -> None:
        self.counts = SamplingCounts()

    @torch.inference_mode()
    def sample(self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]]) -> list[Outcome]:
        """What each draw gives, in order, where `draws[i]` are those from row i of `logits` [len(draws), vocab].

        An exception in place of a draw comes out as it is; a row with NaN gives BrokenLogitsError. Neither keeps others
        from their tokens. logits: of any float type; they stay as they are. O(draws x vocab). Waits for a GPU once, and
        once more where draws have to be repeated.
        """
        outcomes: dict[int, Outcome] = {}
        waiting: list[Slot] = []
        for place, (row, draw) in enumerate((row, draw) for row, own in enumerate(draws) for draw in own):
            if isinstance(draw, Exception):
                outcomes[place] = draw
            else:
                waiting.append(Slot(place, row, draw, next_count(draw.params, logits)))
        self.counts.num_draws += len(waiting)
        while waiting:
            self.counts.num_sorted += sum(slot.num_likely == logits.shape[1] for slot in waiting)
            groups = list(_groups(waiting, logits.shape[1]))
            uncertain = _read(groups, enqueue(logits, groups), outcomes)
            waiting = [
                slot._replace(num_likely=next_count(slot.draw.params, logits, slot.num_likely)) for slot in uncertain
            ]
            self.counts.num_widened += len(waiting)
        return [outcomes[place] for place in range(len(outcomes))]


def next_count(params: SamplingParams, logits: Tensor, before: int = 0) -> int:
    """How many of the most likely tokens to look at, more than `before`: the vocabulary at most, and 0 where none."""
    vocab_size = logits.shape[1]
    is_limited = _is_limited(params, vocab_size)
    if not is_limited and not params.logprobs:
        return 0
    top_k = params.top_k if is_limited and params.top_k is not None and params.top_k < vocab_size else 0
    least = max(before, top_k, params.logprobs or 0)
    counts = _GPU_COUNTS if logits.device.type == "cuda" else _CPU_COUNTS
    return min(next((count for count in counts if count > least), vocab_size), vocab_size)


def _is_limited(params: SamplingParams, vocab_size: int) -> bool:
    """Whether tokens are drawn, and some are left out."""
    has_limit = params.top_p < 1 or params.min_p > 0 or (params.top_k is not None and params.top_k < vocab_size)
    return has_limit and not params.is_greedy


class Group(NamedTuple):
    """Draws that need the same work. width: of how many most likely tokens logarithms are wanted, at most; -1: none."""

    slots: list[Slot]
    is_greedy: bool
    is_limited: bool
    is_penalized: bool
    num_likely: int
    width: int

    @property
    def num_results(self) -> int:
        """Numbers that come of a draw."""
        return _NUM_FACTS if self.width < 0 else _NUM_FACTS + 1 + 2 * self.width


def _groups(slots: Sequence[Slot], vocab_size: int) -> Iterator[Group]:
    """The slots by what they need, in their order."""
    groups: dict[tuple[bool, bool, bool, int, bool], list[Slot]] = {}
    for slot in slots:
        params = slot.draw.params
        is_limited = _is_limited(params, vocab_size)
        key = (params.is_greedy, is_limited, params.is_penalized, slot.num_likely, params.logprobs is not None)
        groups.setdefault(key, []).append(slot)
    for (is_greedy, is_limited, is_penalized, num_likely, has_logprobs), members in groups.items():
        width = max(_num_named(slot, vocab_size) for slot in members) if has_logprobs else -1
        yield Group(members, is_greedy, is_limited, is_penalized, num_likely, width)


def _num_named(slot: Slot, vocab_size: int) -> int:
    """How many of the most likely tokens a draw names."""
    return min(slot.draw.params.logprobs or 0, vocab_size)


def enqueue(logits: Tensor, groups: Sequence[Group]) -> Tensor:
    """Begin to draw, and wait for nothing: what `_draw` gives for the slots, group by group, one after another."""
    size = max(1, (_GPU_TILE if logits.device.type == "cuda" else _CPU_TILE) // logits.shape[1])
    tiles = (
        group._replace(slots=group.slots[start : start + size])
        for group in groups
        for start in range(0, len(group.slots), size)
    )
    return torch.cat([_draw(logits, tile).flatten() for tile in tiles])


def _draw(logits: Tensor, tile: Group) -> Tensor:
    """float64 [slots, 3 and what logarithms there are]: token, whether its row has NaN, whether it is certain."""
    vocab_size = logits.shape[1]
    draws = [slot.draw for slot in tile.slots]
    own = _rows(logits, [slot.row for slot in tile.slots]).float()
    changed = own
    columns = Columns.upload(draws, vocab_size, logits.device)
    if tile.is_penalized:
        changed = own.clone()
        penalize(changed, to_device(_entries(draws), logits.device), columns)
    if tile.is_greedy:
        token, is_broken = pick_greedy(changed)
        is_certain = torch.ones_like(is_broken)
    else:
        below, is_broken = below_largest(changed)
        if tile.is_limited:
            needs_total = any(_takes_share_of_all(draw.params, vocab_size) for draw in draws)
            token, is_certain = pick_limited(below, columns, tile.num_likely, needs_total=needs_total)
        else:
            token, is_certain = pick_plain(below, columns), torch.ones_like(is_broken)
    parts = [token.double(), is_broken.double(), is_certain.double()]
    if tile.width >= 0:
        logs, is_sure = logprobs_of(own, token, columns, tile.num_likely, tile.width)
        parts[2] = (is_certain & is_sure).double()
        parts.append(logs)
    return torch.cat(parts, 1)


def _takes_share_of_all(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top_p is the only limit."""
    return params.min_p == 0 and (params.top_k is None or params.top_k >= vocab_size)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows: the tensor's own where they follow each other, else copies."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, to_device(torch.tensor(rows), logits.device))


def _entries(draws: Sequence[Draw]) -> Tensor:
    """What each draw has had: int64 [3, number], as `penalize` takes them."""
    parts = [
        torch.stack([torch.full((len(seen.tokens),), index), _copied(seen.tokens), _copied(seen.counts)])
        for index, draw in enumerate(draws)
        if (seen := draw.seen) is not None and seen.tokens
    ]
    return torch.cat(parts, 1) if parts else torch.empty(3, 0, dtype=torch.int64)


def _copied(values: "array[int]") -> Tensor:
    """A tensor of its own: an array whose memory is in use can't grow."""
    return torch.frombuffer(values, dtype=torch.int64).clone()


def _read(groups: Sequence[Group], results: Tensor, outcomes: dict[int, Outcome]) -> list[Slot]:
    """Note the outcomes by their places, and return the slots that are to be drawn again. Waits: the one transfer."""
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
    """The logarithms of a draw, from the row of its group."""
    own, number = logs[0], slot.draw.params.logprobs or 0
    found = zip(logs[1 + width :], logs[1 : 1 + width], strict=True)
    return TokenLogprobs(own, tuple((int(token), logprob) for token, logprob in islice(found, number)))
