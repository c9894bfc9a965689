"""Draws the tokens of a step: all rows together, on their device, with one transfer back to the host.

A step's draws are begun, and read later (`BegunDraws`), so that the next step can be launched between the two.

Draws that need the same work form a group: greedy draws, plain draws, and draws that read only the most likely tokens.
The last kind first reads a fixed number of tokens, which nearly always suffices. If it doesn't, the draw is repeated
with the whole sorted vocabulary and the same random number, so the token is always the one that `SamplingParams`
defines. Most steps have the groups of the step before, since their requests are the same.

On a GPU with Triton, one launch of a kernel (`kernels.draw`) draws all tokens for which no log probabilities were
asked. It reads only as much as each draw needs.

On a CPU a group is computed a few rows at a time, so that intermediate values stay in the processor's cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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


class Work(NamedTuple):
    """The work that a draw needs.

    is_changed: whether logits are changed before the draw, by penalties, a bias or excluded tokens. num_likely: how
    many of the most likely tokens it reads. draw_tokens: the kernel that draws it, or None. With it, greedy and limited
    draws need the same work, so they are marked as neither.
    """

    is_greedy: bool
    is_limited: bool
    is_changed: bool
    num_likely: int
    has_logprobs: bool
    draw_tokens: DrawTokens | None

    @property
    def is_by_kernel(self) -> bool:
        """Whether the kernel draws from the unchanged logits, so that no copy of them is needed."""
        return self.draw_tokens is not None and not self.is_changed

    @property
    def is_bare(self) -> bool:
        """Whether only the most likely token of the unchanged logits is wanted."""
        return self.draw_tokens is None and self.is_greedy and not self.is_changed and not self.has_logprobs

    def is_final(self, vocab_size: int) -> bool:
        """Whether the device alone decides the tokens: no draw is ever repeated, and none returns log probabilities."""
        is_certain = self.draw_tokens is not None or not self.is_limited or self.num_likely == vocab_size
        return is_certain and not self.has_logprobs


_Fields = tuple[bool, bool, bool, int, bool, DrawTokens | None]
"""Those of `Work`, which are compared faster."""

_Member = tuple[int, int, Draw]
"""A draw with its index among the outcomes, and its row of logits."""


class AlikeDraws:
    """Draws that need the same work, and are drawn together. members: at least one.

    places, rows: each one's index among the outcomes, and its row of logits. width: the most top tokens whose log
    probabilities a draw wants; -1: none at all. What is the same in each step that has these draws is on the device
    already: columns; banned and bias, as `ban` and `add_bias` take them, or None.
    """

    def __init__(self, work: Work, members: Sequence[_Member], vocab_size: int, device: torch.device) -> None:
        self.work = work
        places, rows, draws = zip(*members, strict=True)
        self.places: list[int] = [*places]
        self.rows: list[int] = [*rows]
        self.draws: list[Draw] = [*draws]
        asked = [draw.params for draw in self.draws]
        self.width = max(min(params.logprobs or 0, vocab_size) for params in asked) if work.has_logprobs else -1
        is_plain = work.is_by_kernel or work.is_bare
        self.columns = None if is_plain else Columns.upload(asked, vocab_size, device)
        self.banned = None if is_plain else _banned(self.draws, device)
        self.bias = None if is_plain else _bias(self.draws, device)
        own_rows = range(len(asked)) if work.is_changed else self.rows  # of what the kernel gets
        self._parameters = None if work.draw_tokens is None else _parameters(asked, own_rows, vocab_size)
        self._uploaded: Tensor | None = None
        if self._parameters is not None and not any(params.temperature for params in asked):
            self._uploaded = to_device(torch.from_numpy(self._parameters), device)

    def __len__(self) -> int:
        return len(self.draws)

    @property
    def num_results(self) -> int:
        """How many numbers each draw returns."""
        return _NUM_FACTS if self.width < 0 else _NUM_FACTS + 1 + 2 * self.width

    def upload_parameters(self, numbers: NDArray[np.float64], device: torch.device) -> Tensor:
        """What `DrawTokens` takes for these draws, without waiting for it. One transfer, unless all are greedy.

        numbers: the random numbers of all draws of the step.
        """
        if self._uploaded is not None:
            return self._uploaded
        assert self._parameters is not None
        table = self._parameters.copy()
        table[:, -1] = numbers[self.places]
        return to_device(torch.from_numpy(table), device)


def group_draws(
    draws: Sequence[Draw | Exception], rows: Sequence[int], logits: Tensor, draw_tokens: DrawTokens | None = None
) -> list[AlikeDraws]:
    """Return groups of draws that need the same work. Each keeps the draws' order; exceptions are in none.

    rows: of `logits`, one for each draw. draw_tokens: the kernel for draws without log probabilities, or None.
    """
    vocab_size = logits.shape[1]
    alike: dict[_Fields, list[_Member]] = {}
    for place, (draw, row) in enumerate(zip(draws, rows, strict=True)):
        if isinstance(draw, Exception):
            continue
        params, is_changed = draw.params, draw.is_changed
        if draw_tokens is not None and params.logprobs is None:
            work: _Fields = (False, False, is_changed, 0, False, draw_tokens)
        else:
            is_limited, num_likely = _is_limited(params, vocab_size), num_to_look_at(params, logits)
            work = (params.temperature == 0, is_limited, is_changed, num_likely, params.logprobs is not None, None)
        alike.setdefault(work, []).append((place, row, draw))
    return _groups({Work(*work): members for work, members in alike.items()}, logits)


def _groups(members: Mapping[Work, Sequence[_Member]], logits: Tensor) -> list[AlikeDraws]:
    """Groups that are drawn one after the other: of each kind of work one, or several so that each fits a tile."""
    vocab_size, device = logits.shape[1], logits.device
    tile = max(1, (_GPU_TILE if device.type == "cuda" else _CPU_TILE) // vocab_size)
    groups = []
    for work, own in members.items():
        size = len(own) if work.is_by_kernel else tile
        groups += [AlikeDraws(work, own[at : at + size], vocab_size, device) for at in range(0, len(own), size)]
    return groups


class BatchSampler:
    """Draws the tokens of steps. draw_tokens: the kernel for draws without log probabilities; None: plain torch draws.

    Attribute: counts.
    """

    def __init__(self, draw_tokens: DrawTokens | None = None) -> None:
        self.counts = SamplingCounts()
        self._memory = Workspace()
        self._last: tuple[object, list[Draw], list[AlikeDraws]] = None, [], []  # a step's key and draws, and its groups
        self.draw_tokens = draw_tokens

    def sample(
        self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]], numbers: Sequence[float]
    ) -> list[Outcome]:
        """The outcome of each draw, in order: `begin`, and then `BegunDraws.read`. `draws[i]` are those of row i."""
        rows = [row for row, own in enumerate(draws) for _ in own]
        return self.begin(logits, [*chain.from_iterable(draws)], rows, np.array(numbers, dtype=np.float64)).read()

    @torch.inference_mode()
    def begin(
        self, logits: Tensor, draws: Sequence[Draw | Exception], rows: list[int], numbers: NDArray[np.float64]
    ) -> "BegunDraws":
        """Begin to draw, without waiting. rows: of `logits` [rows, vocab], the one from which each draw is made.

        numbers: each draw's random number in [0, 1), which greedy ones ignore. An exception in the place of a draw
        becomes its outcome. The outcome of a row with NaN is BrokenLogitsError. Neither affects other draws. logits:
        any float dtype, unchanged. They may be overwritten once the draws have been read; if `BegunDraws.tokens` isn't
        None, work that the device does later may overwrite them, too. O(draws x vocab).
        """
        sound = [draw for draw in draws if not isinstance(draw, Exception)]
        self.counts.num_draws += len(sound)
        if len(sound) == len(draws):
            return BegunDraws(logits, self._group(logits, sound, rows), numbers, {}, self)
        failures = {place: draw for place, draw in enumerate(draws) if isinstance(draw, Exception)}
        return BegunDraws(logits, group_draws(draws, rows, logits, self.draw_tokens), numbers, failures, self)

    def enqueue(self, logits: Tensor, groups: Sequence[AlikeDraws], numbers: NDArray[np.float64]) -> Tensor:
        """The results of these draws, group by group, on the device. Doesn't wait."""
        self.counts.num_sorted += sum([len(group) for group in groups if group.work.num_likely == logits.shape[1]])
        return enqueue(logits, groups, numbers, self._memory)

    def _group(self, logits: Tensor, draws: list[Draw], rows: list[int]) -> list[AlikeDraws]:
        """As `group_draws`, which is only called if the last step's draws weren't these objects."""
        key = (logits.shape[1], logits.device, self.draw_tokens, rows)
        last_key, last_draws, groups = self._last
        if key != last_key or len(draws) != len(last_draws) or not all(map(is_, draws, last_draws)):
            groups = group_draws(draws, rows, logits, self.draw_tokens)
            self._last = key, draws, groups  # at once: an interrupt can't leave the groups of another step
        return groups


class BegunDraws:
    """Draws that have begun on a device, with their results on the way to the host. Made by `BatchSampler.begin`.

    tokens: the tokens on the device, in the order of the draws, if all of them are final there: [num_draws], of any
    dtype. None if a draw has failed or may have to be repeated, or if there are log probabilities or no draws.
    """

    def __init__(
        self,
        logits: Tensor,
        groups: list[AlikeDraws],
        numbers: NDArray[np.float64],
        failures: Mapping[int, Exception],
        sampler: BatchSampler,
    ) -> None:
        self._logits: Tensor | None = logits  # while a draw may have to be repeated: they are large
        self._sampler = sampler
        self._outcomes: dict[int, Outcome] = {**failures}
        self._groups = groups
        self._numbers = numbers
        self.tokens: Tensor | None = None
        self._results: HostCopy | None = None
        if groups:
            results = sampler.enqueue(logits, groups, numbers)
            if not failures and all(group.work.is_final(logits.shape[1]) for group in groups):
                self.tokens, self._logits = _in_order(groups, results), None
            self._results = HostCopy(results)
        else:  # nothing to read, but the device's end to wait for: else nobody would know how long a step took
            self._results = HostCopy(logits.new_empty(0))

    @property
    def is_done(self) -> bool:
        """Whether the device has drawn. O(1)."""
        return self._results is None or self._results.is_done

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
                vocab_size = self._logits.shape[1]
                whole = {work._replace(num_likely=vocab_size): members for work, members in uncertain.items()}
                self._groups = _groups(whole, self._logits)
                self._results = HostCopy(self._sampler.enqueue(self._logits, self._groups, self._numbers))
        return [outcomes[place] for place in range(len(outcomes))]


def enqueue(logits: Tensor, groups: Sequence[AlikeDraws], numbers: NDArray[np.float64], memory: Workspace) -> Tensor:
    """Begin to draw, without waiting. Returns the results of `_draw`, group by group, draw by draw."""
    results = [_draw(logits, group, numbers, memory).flatten() for group in groups]
    return results[0] if len(results) == 1 else torch.cat(results)


def _draw(logits: Tensor, group: AlikeDraws, numbers: NDArray[np.float64], memory: Workspace) -> Tensor:
    """float64 [draws, num_results]: token, whether its row has NaN, whether it is certain, and wanted logarithms."""
    device, work, columns = logits.device, group.work, group.columns
    if work.draw_tokens is not None and not work.is_changed:
        return work.draw_tokens(_in_float32(logits), group.upload_parameters(numbers, device))
    own = _rows(logits, group.rows)
    if columns is None:
        return _facts(*pick_greedy(own))
    changed = _changed(own, group, columns, memory) if work.is_changed else own
    if work.draw_tokens is not None:
        return work.draw_tokens(changed, group.upload_parameters(numbers, device))
    if work.is_greedy:
        token, is_broken = pick_greedy(changed)
        is_certain = torch.ones_like(is_broken)
    else:
        below, is_broken = below_largest(changed, memory)
        uniform = to_device(torch.from_numpy(numbers[group.places]).unsqueeze(1), device)
        if work.is_limited:
            token, is_certain = pick_limited(below, columns, uniform, work.num_likely, memory)
        else:
            token, is_certain = pick_plain(below, columns, uniform, memory), torch.ones_like(is_broken)
    if group.width < 0:
        return _facts(token, is_broken, is_certain)
    logs, is_sure = logprobs_of(own, token, columns, work.num_likely, group.width, memory)
    return torch.cat([_facts(token, is_broken, is_certain & is_sure), logs], 1)


def _changed(own: Tensor, group: AlikeDraws, columns: Columns, memory: Workspace) -> Tensor:
    """The rows with penalties and biases, and without excluded tokens."""
    changed = memory.take("changed", (own.shape[0], own.shape[1]), torch.float32, own.device).copy_(own)
    entries = _entries(group.draws)
    if entries is not None:
        penalize(changed, to_device(entries, own.device), columns)
    if group.bias is not None:
        add_bias(changed, *group.bias)
    if group.banned is not None:
        ban(changed, group.banned)
    _restrict(changed, group.draws)
    return changed


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


def _parameters(asked: Sequence[SamplingParams], rows: Sequence[int], vocab_size: int) -> NDArray[np.float64]:
    """What `DrawTokens` takes for draws from these rows, but for the random numbers, which are 0."""
    table = [
        (
            row,
            0.0 if params.temperature == 0 else scale_of(params),
            vocab_size if params.top_k is None else min(params.top_k, vocab_size),
            params.top_p,
            params.min_p,
            0.0,
        )
        for row, params in zip(rows, asked, strict=True)
    ]
    # numpy reads a list of tuples several times as fast as torch.
    return np.array(table, dtype=np.float64)


def _entries(draws: Sequence[Draw]) -> Tensor | None:
    """The tokens that each draw's answer has: int64 [3, number], as `penalize` takes them; None: there are none."""
    seen = [(index, draw.seen) for index, draw in enumerate(draws) if draw.seen is not None]
    numbers = [len(own.tokens) for _, own in seen]
    if not any(numbers):
        return None
    entries = np.empty((3, sum(numbers)), dtype=np.int64)
    entries[0] = np.repeat([index for index, _ in seen], numbers)
    entries[1] = np.frombuffer(b"".join([own.tokens for _, own in seen]), dtype=np.int64)
    entries[2] = np.frombuffer(b"".join([own.counts for _, own in seen]), dtype=np.int64)
    return torch.from_numpy(entries)


def _banned(draws: Sequence[Draw], device: torch.device) -> Tensor | None:
    """The tokens that each draw excludes: int64 [2, number], as `ban` takes them; None: there are none."""
    pairs = [(index, token) for index, draw in enumerate(draws) for token in draw.banned]
    return to_device(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), device) if pairs else None


def _bias(draws: Sequence[Draw], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Each draw's bias, as `add_bias` takes it; None: there is none."""
    added = [(index, token, value) for index, draw in enumerate(draws) for token, value in draw.bias]
    if not added:
        return None
    entries = torch.tensor([[index for index, _, _ in added], [token for _, token, _ in added]])
    values = torch.tensor([value for _, _, value in added], dtype=torch.float32)
    return to_device(entries, device), to_device(values, device)


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


def _in_order(groups: Sequence[AlikeDraws], results: Tensor) -> Tensor:
    """The tokens of results that have no logarithms, in the order of the draws."""
    tokens = results.view(-1, _NUM_FACTS)[:, 0]
    if len(groups) == 1:
        return tokens
    order = torch.tensor([place for group in groups for place in group.places]).argsort()
    return tokens.index_select(0, to_device(order, results.device))


def _read(
    groups: Sequence[AlikeDraws], results: list[float], outcomes: dict[int, Outcome]
) -> dict[Work, list[_Member]]:
    """Store the outcomes by index, without those of draws that are uncertain, and return these."""
    if len(results) == _NUM_FACTS * sum(map(len, groups)):  # no logarithms
        tokens, are_broken, are_certain = results[::_NUM_FACTS], results[1::_NUM_FACTS], results[2::_NUM_FACTS]
        if not any(are_broken) and all(are_certain):
            places = chain.from_iterable([group.places for group in groups])
            outcomes.update(zip(places, map(Drawn, map(int, tokens)), strict=True))
            return {}
    values = iter(results)
    uncertain: dict[Work, list[_Member]] = {}
    for group in groups:
        for place, row, draw in zip(group.places, group.rows, group.draws, strict=True):
            token, is_broken, is_certain, *logs = islice(values, group.num_results)
            if is_broken:
                outcomes[place] = BrokenLogitsError(_BROKEN)
            elif not is_certain:
                uncertain.setdefault(group.work, []).append((place, row, draw))
            else:
                outcomes[place] = Drawn(int(token), _logprobs(logs, group.width, draw.params) if logs else None)
    return uncertain


def _logprobs(logs: list[float], width: int, params: SamplingParams) -> TokenLogprobs:
    """The logarithms of a draw, from its row of results."""
    own, number = logs[0], params.logprobs or 0
    found = zip(logs[1 + width :], logs[1 : 1 + width], strict=True)
    return TokenLogprobs(own, tuple((int(token), logprob) for token, logprob in islice(found, number)))
