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

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
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


class AlikeDraws(NamedTuple):
    """Draws that need the same work. places, rows: each one's index among the outcomes, and its row of logits.

    is_changed: whether logits are changed before the draw, by penalties, a bias or excluded tokens. num_likely: how
    many of the most likely tokens they read. width: the most top tokens whose log probabilities a draw wants; -1: none
    at all. draw_tokens: the kernel that draws them, or None. With it, greedy and limited draws need the same work, so
    the group is marked as neither. parameters: what the kernel takes, float64 [draws, 6], but for rows and random
    numbers.
    """

    places: list[int]
    rows: list[int]
    draws: list[Draw]
    is_greedy: bool
    is_limited: bool
    is_changed: bool
    num_likely: int
    width: int
    draw_tokens: DrawTokens | None = None
    parameters: NDArray[np.float64] | None = None

    def take(self, indexes: list[int]) -> "AlikeDraws":
        """Only these of the draws. O(indexes)."""
        return self._replace(
            places=[self.places[index] for index in indexes],
            rows=[self.rows[index] for index in indexes],
            draws=[self.draws[index] for index in indexes],
            parameters=None if self.parameters is None else self.parameters[indexes],
        )

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


def group_draws(
    draws: Sequence[Draw | Exception], rows: Sequence[int], logits: Tensor, draw_tokens: DrawTokens | None = None
) -> list[AlikeDraws]:
    """Return groups of draws that need the same work. Each keeps the draws' order; exceptions are in none.

    rows: of `logits`, one for each draw. draw_tokens: the kernel for draws without log probabilities, or None.
    """
    vocab_size = logits.shape[1]
    groups: dict[tuple[bool, bool, bool, int, bool], list[tuple[int, int, Draw]]] = {}
    for place, (draw, row) in enumerate(zip(draws, rows, strict=True)):
        if isinstance(draw, Exception):
            continue
        params = draw.params
        is_by_kernel = draw_tokens is not None and params.logprobs is None
        is_greedy = not is_by_kernel and params.is_greedy
        is_limited = not is_by_kernel and _is_limited(params, vocab_size)
        num_likely = 0 if is_by_kernel else num_to_look_at(params, logits)
        key = (is_greedy, is_limited, draw.is_changed, num_likely, params.logprobs is not None)
        groups.setdefault(key, []).append((place, row, draw))
    found = []
    for (is_greedy, is_limited, is_changed, num_likely, has_logprobs), members in groups.items():
        places, own_rows, own = map(list, zip(*members, strict=True))
        width = max(min(draw.params.logprobs or 0, vocab_size) for draw in own) if has_logprobs else -1
        draws_by = None if has_logprobs else draw_tokens
        parameters = None if draws_by is None else _parameters(own, vocab_size)
        flags = (is_greedy, is_limited, is_changed)
        found.append(AlikeDraws(places, own_rows, own, *flags, num_likely, width, draws_by, parameters))
    return found


class BatchSampler:
    """Draws the tokens of steps. draw_tokens: the kernel for draws without log probabilities; None: plain torch draws.

    Attribute: counts.
    """

    def __init__(self, draw_tokens: DrawTokens | None = None) -> None:
        self.counts = SamplingCounts()
        self._memory = Workspace()
        self._grouped: tuple[object, list[AlikeDraws]] = None, []  # what the last step asked for, and its groups
        self.draw_tokens = draw_tokens

    def sample(self, logits: Tensor, draws: Sequence[Sequence[Draw | Exception]]) -> list[Outcome]:
        """The outcome of each draw, in order: `begin`, and then `BegunDraws.read`. `draws[i]` are those of row i."""
        rows = [row for row, own in enumerate(draws) for _ in own]
        return self.begin(logits, [*chain.from_iterable(draws)], rows).read()

    @torch.inference_mode()
    def begin(self, logits: Tensor, draws: Sequence[Draw | Exception], rows: list[int]) -> "BegunDraws":
        """Begin to draw, without waiting. rows: of `logits` [rows, vocab], the one from which each draw is made.

        An exception in the place of a draw becomes its outcome. The outcome of a row with NaN is BrokenLogitsError.
        Neither affects other draws. logits: any float dtype, unchanged. They may be overwritten once the draws have
        been read; if `BegunDraws.tokens` isn't None, work that the device does later may overwrite them, too. O(draws x
        vocab).
        """
        sound = [draw for draw in draws if not isinstance(draw, Exception)]
        self.counts.num_draws += len(sound)
        if len(sound) == len(draws):
            return BegunDraws(logits, self._group(logits, sound, rows), {}, self)
        failures: dict[int, Outcome] = {place: draw for place, draw in enumerate(draws) if isinstance(draw, Exception)}
        return BegunDraws(logits, group_draws(draws, rows, logits, self.draw_tokens), failures, self)

    def enqueue(self, logits: Tensor, groups: Sequence[AlikeDraws]) -> Tensor:
        """The results of these draws, group by group, on the device. Doesn't wait."""
        self.counts.num_sorted += sum([len(group.draws) for group in groups if group.num_likely == logits.shape[1]])
        return enqueue(logits, groups, self._memory)

    def _group(self, logits: Tensor, draws: list[Draw], rows: list[int]) -> list[AlikeDraws]:
        """As `group_draws`, which is only called if the last step's groups aren't these."""
        params, are_changed = [draw.params for draw in draws], [draw.is_changed for draw in draws]
        key = (logits.shape[1], logits.device, self.draw_tokens, rows, params, are_changed)
        if key != self._grouped[0]:
            self._grouped = key, group_draws(draws, rows, logits, self.draw_tokens)
            return self._grouped[1]
        return [group._replace(draws=[draws[place] for place in group.places]) for group in self._grouped[1]]


class BegunDraws:
    """Draws that have begun on a device, with their results on the way to the host. Made by `BatchSampler.begin`.

    tokens: the tokens on the device, in the order of the draws, if all of them are final there: [num_draws], of any
    dtype. None if a draw has failed or may have to be repeated, or if there are log probabilities or no draws.
    """

    def __init__(
        self, logits: Tensor, groups: list[AlikeDraws], failures: dict[int, Outcome], sampler: BatchSampler
    ) -> None:
        self._logits: Tensor | None = logits  # while a draw may have to be repeated: they are large
        self._sampler = sampler
        self._outcomes = failures
        self._groups = groups
        self.tokens: Tensor | None = None
        self._results: HostCopy | None = None
        if groups:
            results = sampler.enqueue(logits, groups)
            if not failures and all(group.is_final(logits.shape[1]) for group in groups):
                self.tokens, self._logits = _in_order(groups, results), None
            self._results = HostCopy(results)

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
                self._groups = [group._replace(num_likely=self._logits.shape[1]) for group in uncertain]
                self._results = HostCopy(self._sampler.enqueue(self._logits, self._groups))
        return [outcomes[place] for place in range(len(outcomes))]


def enqueue(logits: Tensor, groups: Sequence[AlikeDraws], memory: Workspace) -> Tensor:
    """Begin to draw, without waiting. Returns the results of `_draw`, group by group, draw by draw."""
    results = [_draw(logits, tile, memory).flatten() for group in groups for tile in _tiles(group, logits)]
    return results[0] if len(results) == 1 else torch.cat(results)


def _tiles(group: AlikeDraws, logits: Tensor) -> Iterator[AlikeDraws]:
    """The parts of a group that are drawn one after the other."""
    size = max(1, (_GPU_TILE if logits.device.type == "cuda" else _CPU_TILE) // logits.shape[1])
    number = len(group.draws)
    if group.is_by_kernel or number <= size:
        yield group
        return
    for start in range(0, number, size):
        yield group.take(list(range(start, min(start + size, number))))


def _draw(logits: Tensor, tile: AlikeDraws, memory: Workspace) -> Tensor:
    """float64 [draws, num_results]: token, whether its row has NaN, whether it is certain, and wanted logarithms."""
    device, vocab_size, draws = logits.device, logits.shape[1], tile.draws
    if tile.draw_tokens is not None and not tile.is_changed:
        return tile.draw_tokens(_in_float32(logits), _upload_parameters(tile, tile.rows, device))
    own = _rows(logits, tile.rows)
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
        return tile.draw_tokens(changed, _upload_parameters(tile, range(len(draws)), device))
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


def _parameters(draws: Sequence[Draw], vocab_size: int) -> NDArray[np.float64]:
    """What `DrawTokens` takes for these draws, but for what may differ in the next step: rows and random numbers."""
    table = [
        (
            0,
            0.0 if params.temperature == 0 else scale_of(params),
            vocab_size if params.top_k is None else min(params.top_k, vocab_size),
            params.top_p,
            params.min_p,
            0.0,
        )
        for params in [draw.params for draw in draws]
    ]
    # numpy reads a list of tuples several times as fast as torch.
    return np.array(table, dtype=np.float64)


def _upload_parameters(tile: AlikeDraws, rows: Sequence[int], device: torch.device) -> Tensor:
    """What `DrawTokens` takes for draws from these rows, uploaded in one transfer, without waiting for it."""
    assert tile.parameters is not None
    table = tile.parameters.copy()
    table[:, 0], table[:, -1] = rows, [draw.uniform for draw in tile.draws]
    return to_device(torch.from_numpy(table), device)


def _entries(draws: Sequence[Draw]) -> Tensor:
    """The tokens that each draw's answer has: int64 [3, number], as `penalize` takes them."""
    seen = [(index, draw.seen) for index, draw in enumerate(draws) if draw.seen is not None]
    tokens, counts = array("q"), array("q")
    for _, own in seen:
        tokens.extend(own.tokens)
        counts.extend(own.counts)
    owners = np.repeat([index for index, _ in seen], [len(own.tokens) for _, own in seen])
    return torch.from_numpy(np.array([owners, tokens, counts], dtype=np.int64))


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


def _in_order(groups: Sequence[AlikeDraws], results: Tensor) -> Tensor:
    """The tokens of results that have no logarithms, in the order of the draws."""
    tokens = results.view(-1, _NUM_FACTS)[:, 0]
    if len(groups) == 1:
        return tokens
    order = torch.tensor([place for group in groups for place in group.places]).argsort()
    return tokens.index_select(0, to_device(order, results.device))


def _read(groups: Sequence[AlikeDraws], results: list[float], outcomes: dict[int, Outcome]) -> list[AlikeDraws]:
    """Store the outcomes by index, and return the groups to draw again, without the draws that are certain."""
    values = iter(results)
    if len(results) == _NUM_FACTS * sum([len(group.draws) for group in groups]):  # no logarithms
        tokens, are_broken, are_certain = results[::_NUM_FACTS], results[1::_NUM_FACTS], results[2::_NUM_FACTS]
        if not any(are_broken) and all(are_certain):
            places = chain.from_iterable([group.places for group in groups])
            outcomes.update(zip(places, map(Drawn, map(int, tokens)), strict=True))
            return []
    uncertain: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for index, (place, draw) in enumerate(zip(group.places, group.draws, strict=True)):
            token, is_broken, is_certain, *logs = islice(values, group.num_results)
            if is_broken:
                outcomes[place] = BrokenLogitsError(_BROKEN)
            elif not is_certain:
                uncertain.setdefault(number, []).append(index)
            else:
                outcomes[place] = Drawn(int(token), _logprobs(logs, group.width, draw.params) if logs else None)
    return [groups[number].take(indexes) for number, indexes in uncertain.items()]


def _logprobs(logs: list[float], width: int, params: SamplingParams) -> TokenLogprobs:
    """The logarithms of a draw, from its row of results."""
    own, number = logs[0], params.logprobs or 0
    found = zip(logs[1 + width :], logs[1 : 1 + width], strict=True)
    return TokenLogprobs(own, tuple((int(token), logprob) for token, logprob in islice(found, number)))
