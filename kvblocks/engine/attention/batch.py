"""What one step of the model computes: a ragged batch as tensors.

`SequenceRows` describes one sequence of a step. `StepBatch` is all of them as tensors, ready for any attention backend.
The tokens of the sequences lie one after another ("rows" of the step), without padding.

A model's layers belong to KV-cache groups. A sequence has one block table per group, and a row has one slot per group.

Invariant: a row's slot is -1 exactly when its position lies in a shared block, whose K and V are already there. All
other rows are stored, in blocks of their own sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from kvblocks.engine.model.hybrid.mixer import StateRows
from kvblocks.errors import InvalidArgumentError


class SequenceRows(NamedTuple):
    """The tokens of one sequence that a step computes.

    The first of `token_ids` is at position `start`. `block_ids` is the sequence's block table in the first group, and
    `other_block_ids` has its tables in the other groups. All of them cover the tokens. Entries that no row sees may
    hold any id of the cache. Positions below `num_readonly_tokens` lie in shared blocks, which must not be written.
    With `wants_logits` the step returns the logits of the last token. `state_slot` is the slot of the sequence's state,
    in models with recurrent layers.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_readonly_tokens: int = 0
    wants_logits: bool = True
    other_block_ids: Sequence[Sequence[int]] = ()
    state_slot: int | None = None

    def check(self, block_size: int) -> None:
        """Raise InvalidArgumentError if the numbers don't fit together. O(blocks)."""
        for name in ("start", "num_readonly_tokens"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"expected {name} of at least 0, got {getattr(self, name)}")
        if self.wants_logits and not self.token_ids:
            raise InvalidArgumentError("expected at least one token where logits are wanted, got none")
        for block_ids in self.block_tables:
            num_slots = len(block_ids) * block_size
            if self.seq_len > num_slots:
                raise InvalidArgumentError(
                    f"expected blocks for {self.seq_len} tokens (position {self.start} and {len(self.token_ids)}"
                    f" tokens), got {len(block_ids)} blocks of {block_size}, room for {num_slots}"
                )
            if min(block_ids, default=0) < 0:
                raise InvalidArgumentError(f"expected block ids of at least 0, got {min(block_ids)}")

    @property
    def block_tables(self) -> tuple[Sequence[int], ...]:
        """The block tables of all groups. O(groups)."""
        return (self.block_ids, *self.other_block_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in context once the step has run."""
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> range:
        """The positions of the tokens."""
        return range(self.start, self.seq_len)


class StepColumns(NamedTuple):
    """The sequences of a step by columns, with an entry for each sequence, in the same order.

    It says what `SequenceRows` says of each sequence. token_ids: the tokens of all sequences, one after another, of
    which each has as many as `lengths` says. block_tables: for each KV-cache group, the sequences' own lists. The other
    columns have the names of that class's fields.
    """

    token_ids: list[int]
    lengths: Sequence[int]
    starts: Sequence[int]
    num_readonly_tokens: Sequence[int]
    wants_logits: Sequence[bool]
    block_tables: Sequence[Sequence[list[int]]]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens in context once the step has run. O(sequences)."""
        return [*map(add, self.starts, self.lengths)]

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, whose logits are wanted. O(sequences)."""
        return max(self.lengths) == 1 and all(self.wants_logits)


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step, as known on the host. Reading them from a tensor would wait for the device.

    num_decodes: how many leading sequences have exactly one row each. max_rows, max_seq_len: upper bounds of a
    sequence's rows, and of the tokens in its context. lengths: for each sequence, its number of rows and of tokens in
    context; None if these change from replay to replay, as in a CUDA graph. stores_any: whether any row is stored; True
    if that may change, too.
    """

    num_decodes: int
    max_rows: int
    max_seq_len: int
    lengths: tuple[tuple[int, int], ...] | None = None
    stores_any: bool = True

    @classmethod
    def of(cls, lengths: Sequence[int], seq_lens: Sequence[int], num_readonly: Sequence[int]) -> "StepShape":
        """The shape of a step: each sequence's number of rows, of tokens in context, and of read-only tokens.

        O(sequences).
        """
        num_decodes = next((index for index, length in enumerate(lengths) if length != 1), len(lengths))
        pairs = tuple(zip(lengths, seq_lens, strict=True))
        stores_any = any(rows and end > first for (rows, end), first in zip(pairs, num_readonly, strict=True))
        return cls(num_decodes, max(lengths, default=0), max(seq_lens, default=0), pairs, stores_any)


@dataclass(frozen=True)
class StepBatch:
    """One step's rows and where their K and V live.

    token_ids, positions: int64 [num_tokens]. slot_mappings, of each group: int64 [num_tokens]; slot = block_id *
    block_size + offset, or -1: don't store. block_tables, of each group: int32 [num_seqs, max_blocks], the blocks that
    hold each sequence's context; entries after a sequence's last block are 0 and never read. query_start: int32
    [num_seqs + 1], each sequence's first row, then num_tokens. seq_lens: int32 [num_seqs], tokens in context, those of
    this step included. logits_rows: int64 [num_logits], ascending: the rows whose logits are wanted. shape: the sizes
    that the host knows. state_rows: the slots of the sequences' states; None if a sequence has no state.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    query_start: Tensor
    seq_lens: Tensor
    logits_rows: Tensor
    shape: StepShape
    state_rows: StateRows | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.token_ids.shape[0]

    @classmethod
    def build(cls, rows: Sequence[SequenceRows], block_size: int, device: torch.device | str = "cpu") -> "StepBatch":
        """Lay out `rows` as tensors on `device`; block tables are cut to the blocks that the context fills.

        Raises InvalidArgumentError if a sequence's numbers don't fit together, sequences have unlike numbers of groups,
        or there is no token at all. O(groups * (tokens of the step + blocks in context)). Changes nothing.
        """
        if block_size <= 0:
            raise InvalidArgumentError(f"expected a block_size of at least 1, got {block_size}")
        for sequence in rows:
            sequence.check(block_size)
        num_others = {len(sequence.other_block_ids) for sequence in rows}
        if len(num_others) > 1:
            raise InvalidArgumentError(
                f"expected sequences with equally many block tables, got {sorted(num_others)} beside the first"
            )
        lengths = [len(sequence.token_ids) for sequence in rows]
        query_start = [0, *accumulate(lengths)]
        if query_start[-1] == 0:
            raise InvalidArgumentError(f"expected a step of at least one token, got {len(rows)} sequences without any")
        groups = range(1 + max(num_others))
        slots = [sequence.state_slot for sequence in rows if sequence.state_slot is not None]
        positions = [position for sequence in rows for position in sequence.positions]
        return cls(
            token_ids=torch.tensor([t for sequence in rows for t in sequence.token_ids]).to(device),
            positions=torch.tensor(positions).to(device),
            slot_mappings=tuple(torch.tensor(_slots(rows, block_size, group)).to(device) for group in groups),
            block_tables=tuple(_block_table(rows, block_size, group).to(device) for group in groups),
            query_start=torch.tensor(query_start, dtype=torch.int32).to(device),
            seq_lens=torch.tensor([sequence.seq_len for sequence in rows], dtype=torch.int32).to(device),
            logits_rows=torch.tensor(
                [stop - 1 for sequence, stop in zip(rows, query_start[1:], strict=True) if sequence.wants_logits],
                dtype=torch.int64,
            ).to(device),
            shape=StepShape.of(
                lengths,
                [sequence.seq_len for sequence in rows],
                [sequence.num_readonly_tokens for sequence in rows],
            ),
            state_rows=StateRows(tuple(slots), tuple(query_start)) if len(slots) == len(rows) else None,
        )


def _slots(rows: Sequence[SequenceRows], block_size: int, group: int) -> list[int]:
    """The slot of every row in a group, or -1. A list, since tensor operations take longer for few rows."""
    slots: list[int] = []
    for sequence in rows:
        block_ids = sequence.block_tables[group]
        for position in sequence.positions:
            column, offset = divmod(position, block_size)
            is_stored = position >= sequence.num_readonly_tokens
            slots.append(block_ids[column] * block_size + offset if is_stored else -1)
    return slots


def _block_table(rows: Sequence[SequenceRows], block_size: int, group: int) -> Tensor:
    """int32 [num_seqs, max_blocks] on the CPU: the blocks of a group that each context fills, then zeros."""
    used = [list(sequence.block_tables[group][: -(-sequence.seq_len // block_size)]) for sequence in rows]
    width = max(len(block_ids) for block_ids in used)
    return torch.tensor([block_ids + [0] * (width - len(block_ids)) for block_ids in used], dtype=torch.int32)
