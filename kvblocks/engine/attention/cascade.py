"""Decides whether a decode step reads shared blocks once for all sequences that share them, and which blocks.

The manager finds the cohorts (sequences that share a prefix), and the kernels' table says for which of them a cascade
pays off. Cohorts depend only on which sequences are in the batch, since a decode step adds only blocks that a sequence
has to itself. So cohorts are found, and uploaded to the device, only when the batch changes.

Invariant: in every step that uses a cohort's runs, the cohort's blocks are full and computed. Such a step has the same
block-table lists (see `resident_table`), and its sequences are at least as long as the cohort's shared stretch.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import ge, is_
from typing import Protocol

import torch
from torch import Tensor

from kvblocks import Sequence, SharedPrefix
from kvblocks.engine.attention.attention import KVCache, StepAttention
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.sampling.weights import to_device
from kvblocks.kernels.runs import SharedRun, SharedRuns
from kvblocks.kernels.table import CASCADE, CascadeThreshold, read_bytes_per_microsecond


class FindCohorts(Protocol):
    """The type of `manager.inspect.shared_prefixes`."""

    def __call__(self, sequences: Items[Sequence], *, min_blocks: int) -> list[SharedPrefix]:
        """Return the cohorts that share at least so many blocks, parents before children."""


BeginCascade = Callable[[StepBatch, KVCache, SharedRuns], StepAttention]
"""Begins a decode step whose sequences share runs."""

MAX_LEVELS = 4
"""The most levels of nested cohorts that a bucket holds: as many as one merge reads at once."""


@dataclass(frozen=True)
class RunBucket:
    """Fixed sizes for the runs of a captured step, since a CUDA graph always has the same tensors and launches.

    Two cohorts of at least two rows are nested or disjoint, so there are fewer cohorts than rows. The padding consists
    of cohorts without members. These have no tiles, and don't change a kernel's grid.
    """

    num_rows: int
    num_cohorts: int
    num_members: int
    num_levels: int = MAX_LEVELS

    @classmethod
    def of(cls, num_rows: int) -> "RunBucket":
        """The bucket for steps that are padded to `num_rows` sequences."""
        return cls(num_rows, num_rows, MAX_LEVELS * num_rows)

    def holds(self, runs: SharedRuns) -> bool:
        """Whether the runs fit into this bucket."""
        return (
            len(runs.num_shared) <= self.num_rows
            and runs.num_cohorts <= self.num_cohorts
            and len(runs.members) <= self.num_members
            and runs.num_levels <= self.num_levels
        )

    @property
    def num_values(self) -> int:
        """The length of the vector that `pack` makes. A vector of zeros stands for no runs."""
        return sum(self._sizes)

    def pack(self, runs: SharedRuns) -> Tensor:
        """Runs on the CPU, with padding, as one int32 vector on the CPU."""
        vector = torch.zeros(self.num_values, dtype=torch.int32)
        padded = self.split(vector)
        for own, whole in zip(_tensors(runs), _tensors(padded), strict=True):
            whole[: len(own)] = own
        padded.cohort_start[len(runs.cohort_start) :] = len(runs.members)
        return vector

    def split(self, vector: Tensor) -> SharedRuns:
        """The runs in a vector of `pack`: views of `vector`."""
        members, cohort_start, run_start, run_stop, level, num_shared = vector.split(self._sizes)
        return SharedRuns(members, cohort_start, run_start, run_stop, level, num_shared, self.num_levels)

    @property
    def _sizes(self) -> list[int]:
        cohorts = self.num_cohorts
        return [self.num_members, cohorts + 1, cohorts, cohorts, cohorts, self.num_rows]


def _tensors(runs: SharedRuns) -> tuple[Tensor, ...]:
    return runs.members, runs.cohort_start, runs.run_start, runs.run_stop, runs.level, runs.num_shared


class CascadePlanner:
    """Finds the shared runs of decode steps, for a `TritonAttention` that isn't batch-invariant.

    group: the KV-cache group whose blocks `find_cohorts` returns, the manager's primary one. token_bytes: the bytes of
    K and V that a token has in a layer; 0: the cost of launches doesn't count. Attributes: num_transfers, how often
    runs were uploaded; packed, the last plan's runs as its bucket packs them, or None.
    """

    def __init__(
        self,
        find_cohorts: FindCohorts,
        block_size: int,
        device: torch.device,
        threshold: CascadeThreshold = CASCADE,
        group: int = 0,
        token_bytes: int = 0,
    ) -> None:
        self.num_transfers = 0
        self.packed: Tensor | None = None
        self._token_bytes = token_bytes
        self._group = group
        self.threshold = threshold
        self._find_cohorts = find_cohorts
        self._block_size = block_size
        self._min_blocks = max(1, -(-threshold.min_run_tokens // block_size))
        self._device = device
        self._tables: list[list[int]] = []
        self._num_shared: list[int] = []
        self._runs: SharedRuns | None = None

    def plan(self, sequences: Items[Sequence], bucket: RunBucket | None = None) -> SharedRuns | None:
        """Return the shared runs of a decode step's sequences, or None if a cascade isn't worth it.

        The sequences' slots must be allocated. bucket: the bucket of the step, if steps of its size are captured. Runs
        that fit into it are padded to it. Changes only this object. O(sequences), and the cost of `shared_prefixes` if
        the batch has changed since the last call.
        """
        tables = [sequence.block_ids for sequence in sequences]
        if not self._is_as_before(tables, sequences):
            cohorts = self._find_cohorts(sequences, min_blocks=self._min_blocks)
            self._tables = tables
            self._num_shared = [0] * len(sequences)
            for cohort in cohorts:
                for member in cohort.members:
                    self._num_shared[member] = (cohort.start_block + cohort.num_blocks) * self._block_size
            self._runs, self.packed = None, None
            if cohorts:
                self._choose(cohorts, sequences, bucket)
        return self._runs

    def _choose(self, cohorts: list[SharedPrefix], sequences: Items[Sequence], bucket: RunBucket | None) -> None:
        """Upload the runs of at least one cohort to the device, as parts of one vector, if they are worth it."""
        stretches: list[SharedRun] = [
            (cohort.members, cohort.start_block, cohort.start_block + cohort.num_blocks) for cohort in cohorts
        ]
        runs = SharedRuns.build(stretches, len(sequences))
        fits = bucket is not None and bucket.holds(runs)
        num_saved = sum((len(cohort.members) - 1) * cohort.num_tokens for cohort in cohorts)
        num_read = sum(sequence.num_computed_tokens for sequence in sequences)
        is_alike = fits or bucket is None  # the cascade is captured exactly if the step without it would be
        cost = self.threshold.captured_microseconds if is_alike else self.threshold.eager_microseconds
        saved_microseconds = num_saved * self._token_bytes / read_bytes_per_microsecond(self._device)
        if num_saved < self.threshold.min_saved_share * num_read or (self._token_bytes and saved_microseconds < cost):
            return
        self.num_transfers += 1
        if bucket is not None and fits:
            self.packed = to_device(bucket.pack(runs), self._device)
            self._runs = bucket.split(self.packed)
            return
        parts = _tensors(runs)
        vector = to_device(torch.cat(parts), self._device)
        members, cohort_start, run_start, run_stop, level, num_shared = vector.split([len(part) for part in parts])
        self._runs = SharedRuns(members, cohort_start, run_start, run_stop, level, num_shared, runs.num_levels)

    def begin(self, batch: StepBatch, kv_cache: KVCache, runs: SharedRuns) -> StepAttention:
        """Begin a decode step with the runs that `plan` returned. Raises InvalidArgumentError for any other step."""
        from kvblocks.engine.attention.triton_attention import TritonAttention

        return TritonAttention().begin_cascade(batch, kv_cache, runs, self._group)

    def begin_any(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Begin a decode step whose sequences share their first block, even if that doesn't pay off: for warming up."""
        num_seqs = batch.seq_lens.shape[0]
        return self.begin(batch, kv_cache, SharedRuns.build([(range(num_seqs), 0, 1)], num_seqs, self._device))

    def _is_as_before(self, tables: list[list[int]], sequences: Items[Sequence]) -> bool:
        if len(tables) != len(self._tables) or not all(map(is_, tables, self._tables)):
            return False
        return all(map(ge, [sequence.num_computed_tokens for sequence in sequences], self._num_shared))
