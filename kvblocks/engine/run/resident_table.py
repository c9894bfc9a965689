"""The block tables of running sequences on the device: one row each, to which a step uploads only new entries.

There is one table for each KV-cache group. Its rows are a cache: nobody reports the end of a sequence, and the least
recently used row is reused first. A sequence's table is uploaded whole if it is new, or if its row was given to another
sequence meanwhile. A preemption, an abort or a free needn't be reported either, for this reason:

A row belongs to a *list object*, the sequence's own `block_ids`, and keeps it alive. Whenever a manager takes a
sequence's blocks away, it gives the sequence a new list. Otherwise a list changes only at its end; copy on write, after
a fork or a truncation, changes only the block of the next token to compute. So with the same list, all blocks before
that of the step's first token are unchanged since the last step that read them. That step uploaded them, since every
computed position goes through this table.

For a block that has left a window, the list has 0 and the row keeps the old entry. Neither is ever read.

Invariant: once a step's changes are on the device, the first `num_used` entries of each of its rows equal the list's,
except entries that have left the group's window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_

import torch
from torch import Tensor

from kvblocks.errors import InvalidArgumentError


@dataclass
class TableChanges:
    """Entries of a table that a step must write: their indexes (row * max_blocks + column), and their block ids."""

    indexes: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """The owner of a row, and how much of its table the device has."""

    number: int
    owner: list[int]
    resident: list[int] = field(default_factory=list)


_owner_of = attrgetter("owner")


class ResidentTable:
    """Block tables of at most `max_blocks` blocks each, with ids below `num_blocks`, on `device`.

    blocks: int32 [num_rows, max_blocks]. `reserve` replaces this tensor when it makes room for more rows.
    """

    def __init__(self, num_blocks: int, max_blocks: int, device: torch.device, num_rows: int = 64) -> None:
        self.blocks: Tensor = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = num_blocks
        self._rows: dict[int, _Row] = {}  # by the id of the list, least recently used first
        self._free = list(range(num_rows))
        self._last: list[_Row] = []  # those of the last step, which mostly has the same sequences

    def reserve(self, num_seqs: int) -> None:
        """Make room for a step of `num_seqs` sequences. Raises InvalidArgumentError for more than int32 can address."""
        num_rows, max_blocks = self.blocks.shape
        if num_seqs <= num_rows:
            return
        num_wanted = max(num_seqs, 2 * num_rows)
        if num_wanted * max_blocks >= 2**31:
            raise InvalidArgumentError(f"expected fewer than 2**31 entries, got {num_wanted} rows of {max_blocks}")
        grown = torch.zeros(num_wanted, max_blocks, dtype=torch.int32, device=self.blocks.device)
        grown[:num_rows] = self.blocks
        self.blocks = grown
        self._free += range(num_rows, num_wanted)

    def assign_rows(
        self, tables: Sequence[list[int]], start_blocks: Sequence[int], num_used: Sequence[int], changes: TableChanges
    ) -> list[int]:
        """Return the rows of a step's sequences. Add the entries that the device lacks to `changes`.

        Of each sequence: tables: its own list of block ids; start_blocks: the block of the first token that the step
        computes; num_used: how many first blocks the step needs. Call `reserve` before. Raises InvalidArgumentError for
        blocks that don't exist. O(blocks from start_blocks on), or O(num_used) for a sequence without a row.
        """
        last = self._last
        if len(last) != len(tables) or not all(map(is_, map(_owner_of, last), tables)):
            last = self._last = [self._use(block_ids) for block_ids in tables]
        for row, block_ids, start, used in zip(last, tables, start_blocks, num_used, strict=True):
            resident = row.resident
            is_for_decode = used == len(resident) == start + 1 <= len(block_ids)
            if not is_for_decode or resident[start] != block_ids[start]:  # mostly nothing is new
                self._update(row, start, used, changes)
        return [row.number for row in last]

    def _use(self, block_ids: list[int]) -> _Row:
        """The row of a list, which is now the most recently used one."""
        row = self._rows.pop(id(block_ids), None)
        if row is None:
            row = _Row(self._free.pop() if self._free else self._evict(), block_ids)
        self._rows[id(block_ids)] = row
        return row

    def _update(self, row: _Row, start_block: int, num_used: int, changes: TableChanges) -> None:
        """Take up what is new in a row's list from `start_block` on, and what the row lacks before it."""
        block_ids, resident, max_blocks = row.owner, row.resident, self.blocks.shape[1]
        if num_used > min(max_blocks, len(block_ids)):
            raise InvalidArgumentError(
                f"expected a context of at most {min(max_blocks, len(block_ids))} blocks, got {num_used}"
            )
        first, offset = min(start_block, len(resident)), row.number * max_blocks
        new, indexes = block_ids[first:num_used], [*range(offset + first, offset + num_used)]
        if first < len(resident):  # otherwise all are new, as for a sequence without a row
            lacking = [at for at in range(first, num_used) if at >= len(resident) or resident[at] != block_ids[at]]
            new, indexes = [block_ids[at] for at in lacking], [offset + at for at in lacking]
        if new and (min(new) < 0 or max(new) >= self._num_blocks):
            got = next(block_id for block_id in new if not 0 <= block_id < self._num_blocks)
            raise InvalidArgumentError(f"expected block ids from 0 to {self._num_blocks - 1}, got {got}")
        resident[first:num_used] = block_ids[first:num_used]
        changes.indexes += indexes
        changes.block_ids += new

    def forget(self) -> None:
        """Forget all rows. Call it after a step whose changes may not have reached the device. O(rows)."""
        self._rows.clear()
        self._last = []
        self._free = list(range(self.blocks.shape[0]))

    def _evict(self) -> int:
        oldest = next(iter(self._rows))
        return self._rows.pop(oldest).number
