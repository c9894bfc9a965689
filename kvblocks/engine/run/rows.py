"""How the rows of a step are passed to the model's row-wise operations (matrix products, norms, activations).

A matrix product may give a row different low bits when the number of rows changes, because the library picks other
kernels. Even SiLU may, because the last elements of a tensor take a scalar path. A strategy fixes which numbers of rows
occur:

- `NATURAL`: all rows at once. Fastest, but the bits of a row depend on its batch.
- `FIXED64`: every chunk has 64 rows, in any order. For GPUs, where a product of a few rows costs about as much as one
  of 64, and where a row's bits mostly depend on a product's shape and not on the row's index (checked, too).
- `PACKED16`: rows are padded to a multiple of 16 and cut into chunks whose sizes are in a short list. Bit-exact if, for
  those sizes, a row's bits depend neither on the size nor on its index. `determinism` checks exactly that.
- `PACKED2`: the same with rows padded to a multiple of 2. For packed weights, whose products of 2 rows cost little more
  than those of one row. (A single row takes other kernels of the library, with other bits.)
- `TILE16`: every chunk has 16 rows, the row of position p has index p % 16, and the head takes one row at a time. A row
  is always computed at the same index of the same shape. So it is bit-exact at any number of threads, as long as a
  row's bits don't depend on the numbers in other rows. Rows of several sequences share a chunk if their indexes differ.

Invariant: within one strategy, an operation never sees a number of rows that is not in its list.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvblocks.engine.attention.batch import StepBatch


@dataclass(frozen=True)
class RowStrategy:
    """Which numbers of rows an operation may be called with. `row_counts` is ascending; empty: any number.

    Every count is a multiple of the first count, to which rows are padded. `head_row_counts` is the list for the final
    norm and the output projection. With `is_aligned`, the row of position p has the index p modulo the first count.
    `num_threads` is the number of torch threads for which the strategy is valid; None: any.
    """

    name: str
    row_counts: tuple[int, ...] = ()
    head_row_counts: tuple[int, ...] = ()
    is_aligned: bool = False
    num_threads: int | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether a row's bits are meant to be independent of its batch."""
        return bool(self.row_counts)


NATURAL = RowStrategy("natural")
# On SmolLM2's shapes a product of 256 rows has 94% of the speed of one of 1088 rows, and a product of 128 rows 90%. A
# whole prefill is as fast as a natural one, since the operations between the products stay in the processor's cache.
PACKED16 = RowStrategy("packed16", (*range(16, 129, 16), 256), (16, 32, 64))
PACKED2 = RowStrategy("packed2", (*range(2, 33, 2), *range(48, 129, 16), 256), (2, 4, 8, 16, 32, 64))
TILE16 = RowStrategy("tile16", (16,), (1,), is_aligned=True)
FIXED64 = RowStrategy("fixed64", (64,), (64,))


def chunks(num_rows: int, row_counts: tuple[int, ...]) -> Iterator[slice]:
    """Cut `num_rows`, a multiple of the first count, into slices whose sizes are in `row_counts`, the largest first."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        size = max(count for count in row_counts if count <= left) if row_counts else left
        yield slice(start, start + size)
        start += size


def pad_rows(rows: Tensor, row_counts: tuple[int, ...]) -> Tensor:
    """`rows` with zero rows added up to a multiple of the first count; `rows` itself if there is nothing to add."""
    num_missing = -rows.shape[0] % row_counts[0] if row_counts else 0
    return torch.cat([rows, rows.new_zeros(num_missing, *rows.shape[1:])]) if num_missing else rows


@dataclass(frozen=True)
class RowLayout:
    """The rows that the model computes for a step: the batch's own, and dummy rows where the strategy pads.

    token_ids, positions, and slot_mappings (one per group): int64 [num_rows]; a dummy row is token 0 at position 0 and
    is not stored.
    logits_rows: int64 [num_logits]. own_rows: int64 [num_tokens], the index of each row of the batch; None: dummy rows,
    if any, come last.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    logits_rows: Tensor
    own_rows: Tensor | None
    num_tokens: int

    @classmethod
    def build(cls, batch: StepBatch, strategy: RowStrategy) -> "RowLayout":
        """Lay out `batch` as `strategy` asks. O(rows). Changes nothing."""
        if strategy.is_aligned:
            return _align(batch, strategy.row_counts[0])
        counts = strategy.row_counts
        num_dummies = -batch.num_tokens % counts[0] if counts else 0
        unstored = batch.token_ids.new_full((num_dummies,), -1)
        return cls(
            token_ids=pad_rows(batch.token_ids, counts),
            positions=pad_rows(batch.positions, counts),
            slot_mappings=tuple(
                torch.cat([slots, unstored]) if num_dummies else slots for slots in batch.slot_mappings
            ),
            logits_rows=batch.logits_rows,
            own_rows=None,
            num_tokens=batch.num_tokens,
        )

    @property
    def num_rows(self) -> int:
        """Rows computed, dummies included."""
        return self.token_ids.shape[0]

    def take_own(self, rows: Tensor) -> Tensor:
        """Select the batch's own rows, [num_tokens, ...], from `rows`, [num_rows, ...]."""
        if self.own_rows is None:
            return rows if len(rows) == self.num_tokens else rows[: self.num_tokens]
        return rows.index_select(0, self.own_rows)

    def put_own(self, own: Tensor) -> Tensor:
        """The inverse of `take_own`: [num_rows, ...], zero in the dummy rows."""
        if self.own_rows is None and self.num_rows == self.num_tokens:
            return own
        rows = own.new_zeros(self.num_rows, *own.shape[1:])
        if self.own_rows is None:
            rows[: self.num_tokens] = own
            return rows
        return rows.index_copy_(0, self.own_rows, own)


def _align(batch: StepBatch, tile: int) -> RowLayout:
    """Put the row of position p at index p % tile of a tile. The n-th row that needs an index gets it in tile n.

    Consecutive positions fill whole tiles, and rows of other sequences fill the free indexes.
    """
    indexes = batch.positions % tile
    order = indexes.argsort(stable=True)
    num_rows_at = indexes.bincount(minlength=tile)
    first_at = num_rows_at.cumsum(0) - num_rows_at
    ranks = torch.arange(batch.num_tokens, device=indexes.device) - first_at[indexes[order]]
    own_rows = torch.empty_like(order).index_copy_(0, order, ranks * tile + indexes[order])
    num_rows = int(num_rows_at.max()) * tile

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full((num_rows,), fill).index_copy_(0, own_rows, values)

    return RowLayout(
        token_ids=spread(batch.token_ids, 0),
        positions=spread(batch.positions, 0),
        slot_mappings=tuple(spread(slots, -1) for slots in batch.slot_mappings),
        logits_rows=own_rows[batch.logits_rows],
        own_rows=own_rows,
        num_tokens=batch.num_tokens,
    )
