"""A step on its way to the device: whatever of it is new, in one transfer.

What a step says goes into one vector of int32 in pinned host memory: tokens, and for each sequence its row of the
resident table, its length and how much of it is read only; then the table's new entries. Positions, slots and the
batch's block tables are made of that on the device. A decode step is 16 bytes a sequence, 8 more for each new block,
and one transfer, whose latency is far above what keeping the lengths there, too, would save of its bytes.

Invariant: the vector is written again only after the device has read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from kvblocks.engine.batch import SequenceRows, StepBatch, StepShape
from kvblocks.engine.resident_table import ResidentTable, TableChanges

DECODE_COLUMNS = 4
"""Rows of what a decode step is made of: token ids, table rows, lengths, read-only tokens."""


@dataclass(frozen=True)
class UploadedStep:
    """A step as it came: int32 vectors on the device, good until the next upload.

    decode_columns: [DECODE_COLUMNS, num_seqs], padded; or None when the step isn't all decodes. The rest: as in
    `StepBatch`, with `table_rows` and `num_readonly` by sequence.
    """

    token_ids: Tensor
    table_rows: Tensor
    seq_lens: Tensor
    num_readonly: Tensor
    query_start: Tensor
    logits_rows: Tensor
    decode_columns: Tensor | None
    shape: StepShape


@dataclass
class UploadCounts:
    """What was uploaded so far: transfers, their bytes, and entries of block tables among them."""

    num_transfers: int = 0
    num_bytes: int = 0
    num_block_ids: int = 0


class StepUploader:
    """Uploads steps, and the changes of `table`, which is this object's to change. Reads: counts."""

    def __init__(self, table: ResidentTable, block_size: int) -> None:
        self.table = table
        self.counts = UploadCounts()
        self._block_size = block_size
        self._device = table.blocks.device
        self._host, self._staging = self._buffers(1024)
        self._was_read: torch.cuda.Event | None = None

    def upload(self, rows: Sequence[SequenceRows], num_padded: int = 0) -> UploadedStep:
        """Bring a step of at least one sequence to the device, and the table's rows of its sequences up to date.

        rows: their `block_ids` are the sequences' own lists (see `resident_table`). num_padded: a step of single
        tokens is padded to so many sequences, which have no tokens. Raises InvalidArgumentError, and has uploaded
        nothing then. O(tokens + new blocks), and O(blocks) for sequences without a row.
        """
        shape = StepShape.of(rows)
        is_decode = shape.num_decodes == len(rows) and all(sequence.wants_logits for sequence in rows)
        changes = TableChanges()
        self.table.reserve(len(rows))
        try:
            sections = self._pack(rows, changes, num_padded if is_decode else 0)
            if not is_decode:
                sections += _ragged_sections(rows)
            sections += [changes.places, changes.block_ids]
            parts = self._transfer(sections)
        except BaseException:
            self.table.forget()
            raise
        if changes.places:
            self.table.blocks.view(-1).index_copy_(0, parts[-2].long(), parts[-1])
        self.counts.num_block_ids += len(changes.places)
        token_ids, table_rows, seq_lens, num_readonly, query_start, logits_rows = parts[:6]
        if is_decode:  # without the last two sections
            num_seqs = len(token_ids)
            columns: Tensor | None = self._staging[: DECODE_COLUMNS * num_seqs].view(DECODE_COLUMNS, num_seqs)
            index = torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device)
            query_start, logits_rows, shape = index, index[:-1], replace(shape, num_decodes=num_seqs)
        else:
            columns = None
        return UploadedStep(token_ids, table_rows, seq_lens, num_readonly, query_start, logits_rows, columns, shape)

    def batch(self, step: UploadedStep) -> StepBatch:
        """Lay out a step that was just uploaded; its block tables are cut to what the longest context fills."""
        width = -(-step.shape.max_seq_len // self._block_size)
        return lay_out(step, self.table.blocks[:, :width], self._block_size)

    def _pack(self, rows: Sequence[SequenceRows], changes: TableChanges, num_padded: int) -> list[list[int]]:
        """Token ids, table rows, lengths and read-only tokens. A sequence of padding has no tokens, all read only."""
        size = self._block_size
        table_rows = [
            self.table.place(_own_list(sequence), sequence.start // size, -(-sequence.seq_len // size), changes)
            for sequence in rows
        ]
        token_ids = list(chain.from_iterable(sequence.token_ids for sequence in rows))
        seq_lens = [sequence.seq_len for sequence in rows]
        num_readonly = [sequence.num_readonly_tokens for sequence in rows]
        missing = max(0, num_padded - len(rows))
        zeros = [0] * missing
        return [token_ids + zeros, table_rows + zeros, seq_lens + zeros, num_readonly + [1] * missing]

    def _transfer(self, sections: list[list[int]]) -> list[Tensor]:
        """Copy lists of ints to the device, together: a vector of each."""
        sizes = [len(section) for section in sections]
        values = torch.tensor(list(chain.from_iterable(sections)), dtype=torch.int32)
        if self._was_read is not None:
            self._was_read.synchronize()
        if len(values) > len(self._host):
            self._host, self._staging = self._buffers(2 * len(values))
        host, staging = self._host[: len(values)], self._staging[: len(values)]
        host.copy_(values)
        staging.copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            self._was_read = torch.cuda.Event()
            self._was_read.record()
        self.counts.num_transfers += 1
        self.counts.num_bytes += host.nbytes
        return list(staging.split(sizes))

    def _buffers(self, num_values: int) -> tuple[Tensor, Tensor]:
        """The vector on the host and the one on the device."""
        host = torch.empty(num_values, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return host, torch.empty(num_values, dtype=torch.int32, device=self._device)


def lay_out(step: UploadedStep, tables: Tensor, block_size: int) -> StepBatch:
    """The batch of a step, from tensors on the device alone; it reads none of them on the host.

    tables: int32 [num_rows, max_blocks], of which the step's rows are taken.
    """
    num_tokens, num_seqs = step.token_ids.shape[0], step.seq_lens.shape[0]
    block_tables = tables.index_select(0, step.table_rows)
    if step.decode_columns is not None:
        owner = torch.arange(num_seqs, device=tables.device)
        positions = (step.seq_lens.long() - 1).clamp_(min=0)  # padding has no last token
    else:
        lengths = step.query_start.diff().long()
        index = torch.arange(num_seqs, device=tables.device)
        owner = torch.repeat_interleave(index, lengths, output_size=num_tokens)
        first_positions = step.seq_lens.long() - lengths - step.query_start[:-1]
        positions = torch.arange(num_tokens, device=tables.device) + first_positions[owner]
    slots = block_tables[owner, positions // block_size].long() * block_size + positions % block_size
    return StepBatch(
        token_ids=step.token_ids.long(),
        positions=positions,
        slot_mapping=slots.masked_fill(positions < step.num_readonly[owner], -1),
        block_tables=block_tables,
        query_start=step.query_start,
        seq_lens=step.seq_lens,
        logits_rows=step.logits_rows.long(),
        shape=step.shape,
    )


def _own_list(sequence: SequenceRows) -> list[int]:
    """The block table as the object that a row belongs to."""
    block_ids = sequence.block_ids
    return block_ids if isinstance(block_ids, list) else list(block_ids)


def _ragged_sections(rows: Sequence[SequenceRows]) -> list[list[int]]:
    """Each sequence's first row, then the end, and the rows whose logits are wanted."""
    query_start = [0, *accumulate(len(sequence.token_ids) for sequence in rows)]
    wanted = [end - 1 for sequence, end in zip(rows, query_start[1:], strict=True) if sequence.wants_logits]
    return [query_start, wanted]
