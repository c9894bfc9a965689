"""Scores of prompts: the log probability of each token, given those before it.

Each row of a step predicts the next token, so scoring a prompt needs the logits of all its rows, not only of the last
one. They are computed and reduced a few rows at a time, so that only one tile of logits exists at once.

A cached token is not computed, so it has no logits. Therefore a prompt to score only hits tokens that are scored
already (`PromptScores.num_scored`), for example after a preemption. What it computes is cached for all requests.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.batch_sampler import num_to_look_at
from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.weights import Columns, logprobs_of, to_device
from kvblocks.engine.sampling.workspace import Workspace

# Logits in memory at a time: 16 MiB, with several times that of intermediate values; on a GPU 256 MiB.
_CPU_TILE = 2**22
_GPU_TILE = 2**26


class PromptScores:
    """The scores of one prompt, which its samples share. num_logprobs: how many top tokens each score includes.

    logprobs: the scores so far, from the first token on. The first one's is None, since nothing comes before it.
    """

    def __init__(self, num_prompt_tokens: int, num_logprobs: int) -> None:
        self.params = SamplingParams(logprobs=num_logprobs)
        self.logprobs: list[TokenLogprobs | None] = [None]
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def num_scored(self) -> int:
        """How many leading tokens needn't be computed again for the scores. O(1)."""
        return len(self.logprobs) - 1

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are scored. O(1)."""
        return len(self.logprobs) == self._num_prompt_tokens

    def rows(self, start: int, stop: int) -> range:
        """Return the positions to score now, out of the computed ones from `start` to `stop`. O(1)."""
        return range(max(start, self.num_scored), min(stop, self._num_prompt_tokens - 1))


class ScoredRows(NamedTuple):
    """Rows of a step to score: the first row's index, and the token that follows each row."""

    scores: PromptScores
    first_row: int
    targets: Sequence[int]


class Scorer:
    """Scores the rows of one step. Call it with the last layer's output, and `commit` once the step has succeeded."""

    def __init__(self, wanted: Sequence[ScoredRows]) -> None:
        self._wanted = wanted
        self._found: list[list[TokenLogprobs]] = []
        self._memory = Workspace()

    def __call__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """Score rows of `hidden` [rows of the step, hidden]. head: computes rows' logits, float32 [rows, vocab].

        Raises BrokenLogitsError for NaN. O(rows x vocab). Waits for a GPU.
        """
        self._found = [self._score(hidden, rows, head) for rows in self._wanted]

    def commit(self) -> None:
        """Add the step's scores to the prompts'. O(rows)."""
        for rows, found in zip(self._wanted, self._found, strict=True):
            rows.scores.logprobs += found

    def _score(self, hidden: Tensor, rows: ScoredRows, head: Callable[[Tensor], Tensor]) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        params, size = rows.scores.params, 1
        while len(found) < len(rows.targets):
            first = rows.first_row + len(found)
            targets = rows.targets[len(found) : len(found) + size]
            logits = head(hidden[first : first + len(targets)])
            found += self._read(logits, targets, params)
            size = max(1, (_GPU_TILE if logits.device.type == "cuda" else _CPU_TILE) // logits.shape[1])
        return found

    def _read(self, logits: Tensor, targets: Sequence[int], params: SamplingParams) -> list[TokenLogprobs]:
        """The scores of rows, from their logits."""
        vocab_size, width = logits.shape[1], min(params.logprobs or 0, logits.shape[1])
        columns = Columns.upload([params] * len(targets), vocab_size, logits.device)
        tokens = to_device(torch.tensor(targets, dtype=torch.int64).view(-1, 1), logits.device)
        first_look = num_to_look_at(params, logits)
        for num_likely in dict.fromkeys((first_look, vocab_size)):
            logs, is_certain = logprobs_of(logits, tokens, columns, num_likely, width, self._memory)
            if bool(is_certain.all()):
                break
        if bool(logs[:, 0].isnan().any()):
            raise BrokenLogitsError("expected logits that are numbers, got NaN: the weights or the KV cache are broken")
        return [
            TokenLogprobs(own, tuple(zip(map(int, rest[width:]), rest[:width], strict=True)))
            for own, *rest in logs.tolist()
        ]
