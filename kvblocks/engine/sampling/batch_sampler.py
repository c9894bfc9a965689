"""Draws the tokens of a step: all rows together, on their device, with one transfer back to the host.

A step's draws are begun, and read later (`BegunDraws`), so that the next step can be launched between the two.

Draws that need the same work form a group: greedy draws, plain draws, and draws that read only the most likely tokens.
The last kind first reads a fixed number of tokens, which nearly always suffices. If it doesn't, the draw is repeated
with the whole sorted vocabulary and the same random number, so the token is always the one that `SamplingParams`
defines.

On a GPU with Triton, one launch of a kernel (`kernels.draw`) draws all tokens for which no log probabilities were
asked. It reads only as much as each draw needs.

On a CPU a group is computed a few rows at a time, so that intermediate values stay in the processor's cache.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.drawn import Drawn, Outcome, TokenLogprobs
from kvblocks.engine.sampling.host_copy import HostCopy
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
    scale_of,
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
    """A draw with its index among the outcomes, its row of logits, and how many of the most likely tokens it reads."""

    place: int
    row: int
    draw: Draw
    num_likely: int


DrawTokens = Callable[[Tensor, Tensor], Tensor]
"""`kernels.draw.draw_tokens`: from logits and draws' parameters to a row per draw: token, whether broken, and 1."""


def num_to_look_at(params: SamplingParams, logits: Tensor) -> int:
    """How many of the most likely tokens a draw reads first: 0 if it needs no order, all if it may need nearly all."""
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
    """Draws that need the same work. width: the most top tokens whose log probabilities a draw wants; -1: none at all.

    is_changed: whether logits are changed before the draw, by penalties, a bias or excluded tokens. draw_tokens: the
    kernel that draws them, or None. With it, greedy and limited draws need the same work, so the group is marked as
    neither.
    """

    slots: list[Slot]
    is_greedy: bool
    is_limited: bool
    is_changed: bool
    num_likely: int
    width: int
    draw_tokens: DrawTokens | None = None

    @property
    def num_results(self) -> int:
        """How many numbers each draw returns."""
        return _NUM_FACTS if self.width < 0 else _NUM_FACTS + 1 + 2 * self.width

    @property
    def is_by_kernel(self) -> bool:
        """Whether the kernel draws from the unchanged logits, so that no copy of them is needed."""
        return self.draw_tokens is not None and not self.is_changed

    def is_final(self, vocab_size: int) -> bool:
        """Whether the device alone decides the tokens: no draw is ever repeated, and none returns log probabilities."""
        return self.width < 0 and (self.draw_tokens is not None or not self.is_limited or self.num_likely == vocab_size)

    @property
    def is_bare(self) -> bool:
        """Whether only the most likely token of the unchanged logits is wanted."""
        return self.draw_tokens is None and self.is_greedy and not self.is_changed and self.width < 0


def group_slots(slots: Sequence[Slot], vocab_size: int, draw_tokens: DrawTokens | None = None) -> Iterator[AlikeDraws]:
    """Yield groups of slots that need the same work. Each group keeps the slots' order.

    draw_tokens: the kernel for draws without log probabilities, or None.
    """
    groups: dict[tuple[bool, bool, bool, int, bool], list[Slot]] = {}
    for slot in slots:
        draw = slot.draw
        params = draw.params
        is_by_kernel = draw_tokens is not None and params.logprobs is None
        is_greedy = not is_by_kernel and params.is_greedy
        is_limited = not is_by_kernel and _is_limited(params, vocab_size)
        is_changed = params.is_penalized or bool(draw.banned or draw.bias) or draw.allowed is not None
        key = (is_greedy, is_limited, is_changed, slot.num_likely, params.logprobs is not None)
        groups.setdefault(key, []).append(slot)
    for (is_greedy, is_limited, is_changed, num_likely, has_logprobs), members in groups.items():
        width = max(_num_named(slot, vocab_size) for slot in members) if has_logprobs else -1
        draws_by = None if has_logprobs else draw_tokens
        yield AlikeDraws(members, is_greedy, is_limited, is_changed, num_likely, width, draws_by)


def _num_named(slot: Slot, vocab_size: int) -> int:
    """How many of the most likely tokens a draw's logarithms cover."""
    return min(slot.draw.params.logprobs or 0, vocab_size)


class BatchSampler:
    """Draws the tokens of steps. draw_tokens: the kernel for draws without log probabilities; None: plain torch draws.

    Attribute: counts.
    """

    def __init__(self, draw_tokens: DrawTokens | None = None) -> None:
        self.counts = SamplingCounts()
        self._memory = Workspace()
        self.draw_tokens = draw_tokens

    def sample(self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]]) -> list[Outcome]:
        """The outcome of each draw, in order: `begin`, and then `BegunDraws.read`."""
        return self.begin(logits, draws).read()

    @torch.inference_mode()
    def begin(self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]]) -> "BegunDraws":
        """Begin to draw, without waiting. `draws[i]` is drawn from row i of `logits` [len(draws), vocab].

        An exception in the place of a draw becomes its outcome. The outcome of a row with NaN is BrokenLogitsError.
        Neither affects other draws. logits: any float dtype, unchanged. They may be overwritten once the draws have
        been read; if `BegunDraws.tokens` isn't None, work that the device does later may overwrite them, too. O(draws x
        vocab).
        """
        failures: dict[int, Outcome] = {}
        slots: list[Slot] = []
        draws_by, place = self.draw_tokens, 0
        for row, own in enumerate(draws):
            for draw in own:
                if isinstance(draw, Exception):
                    failures[place] = draw
                else:
                    is_by_kernel = draws_by is not None and draw.params.logprobs is None
                    slots.append(Slot(place, row, draw, 0 if is_by_kernel else num_to_look_at(draw.params, logits)))
                place += 1
        self.counts.num_draws += len(slots)
        return BegunDraws(logits, slots, failures, self)

    def enqueue(self, logits: Tensor, slots: Sequence[Slot]) -> tuple[list[AlikeDraws], Tensor]:
        """Begin these draws. Returns their groups, and the results on the device, group by group. Doesn't wait."""
        self.counts.num_sorted += sum([slot.num_likely == logits.shape[1] for slot in slots])
        groups = list(group_slots(slots, logits.shape[1], self.draw_tokens))
        return groups, enqueue(logits, groups, self._memory)


class BegunDraws:
    """Draws that have begun on a device, with their results on the way to the host. Made by `BatchSampler.begin`.

    tokens: the tokens on the device, in the order of the draws, if all of them are final there: [num_draws], of any
    dtype. None if a draw has failed or may have to be repeated, or if there are log probabilities or no draws.
    """

    def __init__(
        self, logits: Tensor, slots: Sequence[Slot], failures: dict[int, Outcome], sampler: BatchSampler
    ) -> None:
        self._logits: Tensor | None = logits  # while a draw may have to be repeated: they are large
        self._sampler = sampler
        self._outcomes = failures
        self._groups: list[AlikeDraws] = []
        self.tokens: Tensor | None = None
        self._results: HostCopy | None = None
        if slots:
            self._groups, results = sampler.enqueue(logits, slots)
            if not failures and all(group.is_final(logits.shape[1]) for group in self._groups):
                self.tokens, self._logits = _in_order(self._groups, results), None
            self._results = HostCopy(results)

    def wait(self) -> None:
        """Wait until the device has drawn."""
        if self._results is not None:
            self._results.wait()

    @torch.inference_mode()
    def read(self) -> list[Outcome]:
        """The outcome of each draw, in order. Waits for the device, and once more if draws have to be repeated."""
        outcomes = self._outcomes
        while self._results is not None:
            uncertain = _read(self._groups, self._results.read(), outcomes)
            self._results = None
            if uncertain and self._logits is not None:
                size = self._logits.shape[1]
                again = [slot._replace(num_likely=size) for slot in uncertain]
                self._groups, results = self._sampler.enqueue(self._logits, again)
                self._results = HostCopy(results)
        return [outcomes[place] for place in range(len(outcomes))]


def enqueue(logits: Tensor, groups: Sequence[AlikeDraws], memory: Workspace) -> Tensor:
    """Begin to draw, without waiting. Returns the results on the device, group by group, slot by slot."""
    size = max(1, (_GPU_TILE if logits.device.type == "cuda" else _CPU_TILE) // logits.shape[1])
    tiles = (
        group._replace(slots=group.slots[start : start + step])
        for group in groups
        for step in [len(group.slots) if group.is_by_kernel else size]
        for start in range(0, len(group.slots), step)
    )
    results = [_draw(logits, tile, memory).flatten() for tile in tiles]
    return results[0] if len(results) == 1 else torch.cat(results)


def _draw(logits: Tensor, tile: AlikeDraws, memory: Workspace) -> Tensor:
    """float64 [slots, num_results]: token, whether its row has NaN, whether it is certain, and wanted logarithms."""
    device, vocab_size = logits.device, logits.shape[1]
    draws = [slot.draw for slot in tile.slots]
    if tile.draw_tokens is not None and not tile.is_changed:
        rows = [slot.row for slot in tile.slots]
        return tile.draw_tokens(_in_float32(logits), _parameters(draws, rows, vocab_size, device))
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
    if tile.draw_tokens is not None:
        return tile.draw_tokens(changed, _parameters(draws, range(len(draws)), vocab_size, device))
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
    return _in_float32(found)


def _in_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float32 else logits.float()


def _parameters(draws: Sequence[Draw], rows: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """What `DrawTokens` takes for draws from these rows, uploaded in one transfer, without waiting for it."""
    table = [
        (
            row,
            0.0 if params.temperature == 0 else scale_of(params),
            vocab_size if params.top_k is None else min(params.top_k, vocab_size),
            params.top_p,
            params.min_p,
            draw.uniform,
        )
        for row, draw in zip(rows, draws, strict=True)
        for params in (draw.params,)
    ]
    # numpy reads a list of tuples several times as fast as torch.
    return to_device(torch.from_numpy(np.array(table, dtype=np.float64)), device)


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


def _in_order(groups: Sequence[AlikeDraws], results: Tensor) -> Tensor:
    """The tokens of results that have no logarithms, in the order of the draws."""
    tokens = results.view(-1, _NUM_FACTS)[:, 0]
    places = [slot.place for group in groups for slot in group.slots]
    if places == list(range(len(places))):
        return tokens
    order = torch.tensor(places).argsort()
    return tokens.index_select(0, to_device(order, results.device))


def _read(groups: Sequence[AlikeDraws], results: Sequence[float], outcomes: dict[int, Outcome]) -> list[Slot]:
    """Store the outcomes by index, and return the slots to draw again."""
    uncertain: list[Slot] = []
    values = iter(results)
    if len(results) == _NUM_FACTS * sum([len(group.slots) for group in groups]):  # no logarithms
        tokens, are_broken, are_certain = results[::_NUM_FACTS], results[1::_NUM_FACTS], results[2::_NUM_FACTS]
        if not any(are_broken) and all(are_certain):
            places = [slot.place for group in groups for slot in group.slots]
            outcomes.update(zip(places, [Drawn(int(token)) for token in tokens], strict=True))
            return uncertain
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
