"""Whether a decode step reads blocks that its sequences share once for all of them, and which.

The manager tells the groups; the kernels' table says from where on they are worth it. Groups depend on which sequences
are in the batch and on nothing that a decode step changes: what a sequence adds to its table is its own. So they are
looked for, and brought to the device, when the batch changes, and stay there.

Invariant: a group's blocks are full, and computed, in every step for which its runs are used: with the same block-table
lists (see `resident_table`), whose sequences are as long as the group's stretch at least.
"""

from collections.abc import Sequence as Items
from typing import Protocol

import torch

from kvblocks.core.sequence import Sequence
from kvblocks.engine.attention.attention import KVCache, StepAttention
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.sampling.weights import to_device
from kvblocks.kernels.runs import SharedRun, SharedRuns
from kvblocks.kernels.table import CASCADE, CascadeThreshold
from kvblocks.observe.shared_prefixes import SharedPrefix


class FindGroups(Protocol):
    """`KVCacheManager.shared_prefixes`."""

    def __call__(self, sequences: Items[Sequence], *, min_blocks: int) -> list[SharedPrefix]:
        """Return the groups, parents before children, whose stretches are of at least so many blocks."""


class CascadePlanner:
    """Finds the shared runs of decode steps, for a `TritonAttention` that isn't batch-invariant.

    group: the KV-cache group whose blocks `find_groups` speaks of, the manager's primary one. Reads: num_transfers, how
    often it brought runs to the device.
    """

    def __init__(
        self,
        find_groups: FindGroups,
        block_size: int,
        device: torch.device,
        threshold: CascadeThreshold = CASCADE,
        group: int = 0,
    ) -> None:
        self.num_transfers = 0
        self._group = group
        self.threshold = threshold
        self._find_groups = find_groups
        self._block_size = block_size
        self._min_blocks = max(1, -(-threshold.min_run_tokens // block_size))
        self._device = device
        self._tables: list[list[int]] = []
        self._num_shared: list[int] = []
        self._runs: SharedRuns | None = None

    def plan(self, sequences: Items[Sequence]) -> SharedRuns | None:
        """Return what the sequences of a decode step share, in their order, if reading it once is worth it.

        Their slots are allocated. Changes nothing but this object. O(sequences), and what `shared_prefixes` takes when
        the batch is another than in the last call.
        """
        tables = [sequence.block_ids for sequence in sequences]
        if not self._is_as_before(tables, sequences):
            groups = self._find_groups(sequences, min_blocks=self._min_blocks)
            self._tables = tables
            self._num_shared = [0] * len(sequences)
            for group in groups:
                for member in group.members:
                    self._num_shared[member] = (group.start_block + group.num_blocks) * self._block_size
            num_saved = sum((len(group.members) - 1) * group.num_tokens for group in groups)
            num_read = sum(sequence.num_computed_tokens for sequence in sequences)
            is_worth_it = bool(groups) and num_saved >= self.threshold.min_saved_share * num_read
            self._runs = self._upload(groups, len(sequences)) if is_worth_it else None
        return self._runs

    def begin(self, batch: StepBatch, kv_cache: KVCache, runs: SharedRuns) -> StepAttention:
        """Begin a decode step with what `plan` returned for it. Raises InvalidArgumentError for any other step."""
        from kvblocks.engine.attention.triton_attention import TritonAttention

        return TritonAttention().begin_cascade(batch, kv_cache, runs, self._group)

    def begin_any(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Begin a decode step whose sequences share their first block, as if it were worth it: for warming up."""
        num_seqs = batch.seq_lens.shape[0]
        return self.begin(batch, kv_cache, SharedRuns.build([(range(num_seqs), 0, 1)], num_seqs, self._device))

    def _is_as_before(self, tables: list[list[int]], sequences: Items[Sequence]) -> bool:
        return (
            len(tables) == len(self._tables)
            and all(table is known for table, known in zip(tables, self._tables, strict=True))
            and all(
                sequence.num_computed_tokens >= num_shared
                for sequence, num_shared in zip(sequences, self._num_shared, strict=True)
            )
        )

    def _upload(self, groups: list[SharedPrefix], num_seqs: int) -> SharedRuns:
        """The runs on the device, as parts of one vector."""
        stretches: list[SharedRun] = [
            (group.members, group.start_block, group.start_block + group.num_blocks) for group in groups
        ]
        runs = SharedRuns.build(stretches, num_seqs)
        parts = (runs.members, runs.group_start, runs.run_start, runs.run_stop, runs.level, runs.num_shared)
        vector = to_device(torch.cat(parts), self._device)
        self.num_transfers += 1
        members, group_start, run_start, run_stop, level, num_shared = vector.split([len(part) for part in parts])
        return SharedRuns(members, group_start, run_start, run_stop, level, num_shared, runs.num_levels)
