"""Describes which requests of a batch share which blocks, for `prefix_decode`.

Here a run is a range of block-table columns that several requests share. `SharedRuns.build` checks two invariants that
no kernel can check: the runs of a row follow one another without a gap, from column 0 of its block table, and no two
cohorts of one level share a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvblocks.kernels.layout import AttentionShape, KernelArgumentError, check_devices, check_indices

SharedRun = tuple[Sequence[int], int, int]
"""A cohort for `SharedRuns.build`: its members, and the block columns where its run starts and stops."""


@dataclass(frozen=True)
class SharedRuns:
    """Which rows share which blocks, as int32 tensors on the device.

    Cohort g has the members `members[cohort_start[g] : cohort_start[g + 1]]`, which are rows of the query and of the
    block tables. Their tables agree in the columns from `run_start[g]` to before `run_stop[g]`, and all these blocks
    are full. `level[g]` is below `num_levels`, and differs between cohorts that share a member. `num_shared`,
    [num_rows], is the column where a row's last run stops and its own part starts, or 0 without runs.

    For CUDA graphs, tensors may be longer than their contents. The additional cohorts are empty: they start where the
    last cohort ends. Kernels don't check the values, but `build` does.
    """

    members: Tensor
    cohort_start: Tensor
    run_start: Tensor
    run_stop: Tensor
    level: Tensor
    num_shared: Tensor
    num_levels: int

    @classmethod
    def build(cls, cohorts: Sequence[SharedRun], num_rows: int, device: torch.device | str = "cpu") -> "SharedRuns":
        """Make runs from lists. A row's runs, in the order of `cohorts`, must follow one another from column 0.

        Raises KernelArgumentError. O(members).
        """
        num_shared, depth = [0] * num_rows, [0] * num_rows
        members: list[int] = []
        cohort_start, level = [0], []
        for rows, start, stop in cohorts:
            if len(rows) == 0 or stop <= start or min(rows) < 0 or max(rows) >= num_rows or len(set(rows)) < len(rows):
                raise KernelArgumentError(
                    f"cohorts: expected different rows below {num_rows} and a run of at least one block, got rows "
                    f"{list(rows)} and columns {start} to {stop}"
                )
            for row in rows:
                if num_shared[row] != start:
                    raise KernelArgumentError(
                        f"cohorts: expected row {row}'s next run to start at {num_shared[row]}, got {start}"
                    )
            level.append(max(depth[row] for row in rows))
            for row in rows:
                num_shared[row], depth[row] = stop, level[-1] + 1
            members += rows
            cohort_start.append(len(members))
        columns = {
            "members": members,
            "cohort_start": cohort_start,
            "run_start": [start for _, start, _ in cohorts],
            "run_stop": [stop for _, _, stop in cohorts],
            "level": level,
            "num_shared": num_shared,
        }
        tensors = {name: torch.tensor(column, dtype=torch.int32, device=device) for name, column in columns.items()}
        return cls(**tensors, num_levels=max(depth, default=0))

    def check(self, shape: AttentionShape) -> None:
        """Raise KernelArgumentError unless these runs' tensors fit a batch of decodes of this shape."""
        if shape.num_rows != shape.num_seqs:
            raise KernelArgumentError(
                f"query: expected a row for each of {shape.num_seqs} tables, got {shape.num_rows}"
            )
        check_indices("runs.members", self.members, self.members.shape[0])
        check_indices("runs.cohort_start", self.cohort_start, self.num_cohorts + 1)
        check_indices("runs.run_start", self.run_start, self.num_cohorts)
        check_indices("runs.run_stop", self.run_stop, self.num_cohorts)
        check_indices("runs.level", self.level, self.num_cohorts)
        check_indices("runs.num_shared", self.num_shared, shape.num_rows)
        tensors = (self.members, self.cohort_start, self.run_start, self.run_stop, self.level)
        for tensor in tensors:
            check_devices(num_shared=self.num_shared, runs=tensor)
        if self.num_levels < 0:
            raise KernelArgumentError(f"runs.num_levels: expected at least 0, got {self.num_levels}")

    @property
    def num_cohorts(self) -> int:
        """How many cohorts fit into the tensors."""
        return self.run_start.shape[0]
