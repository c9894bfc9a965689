"""Uploads what is new in a step to the device, in one transfer.

A step is packed into one vector of int32 in pinned host memory: the tokens; for each sequence its length, the number of
its read-only tokens, and its row of each group's resident table; then the tables' new entries. The device computes
positions, slots and the batch's block tables from these. A decode step takes 12 bytes a sequence and 4 for each group,
and 8 more for each new block. (Lengths could stay on the device, but the bytes saved are small beside the latency of
the one transfer.)

Invariant: the vector is overwritten only after the device has read it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from kvblocks.engine.attention.batch import StepBatch, StepColumns, StepShape
from kvblocks.engine.run.resident_table import ResidentTable, TableChanges
from kvblocks.engine.sampling.feeding import feed

DECODE_COLUMNS = 3
"""How many rows of a decode step's columns come first: token ids, lengths, read-only tokens.

Table rows by group follow.
"""

Sections = list[list[int]]
"""Parts of the vector that a step is."""


@dataclass(frozen=True)
class UploadedStep:
    """An uploaded step: int32 vectors on the device, valid until the next upload.

    decode_columns: [DECODE_COLUMNS + num_groups, num_seqs], padded; or None when the step isn't all decodes.
    table_rows: for each group, the row of each sequence in the resident table. num_readonly: the read-only tokens of
    each sequence. The other fields are as in `StepBatch`.
    """

    token_ids: Tensor
    seq_lens: Tensor
    num_readonly: Tensor
    table_rows: tuple[Tensor, ...]
    query_start: Tensor
    logits_rows: Tensor
    decode_columns: Tensor | None
    shape: StepShape

    @classmethod
    def of_decodes(cls, columns: Tensor, index: Tensor, shape: StepShape) -> "UploadedStep":
        """A step of single tokens: views of `columns`. index: int32 [num_seqs + 1], from 0 on."""
        token_ids, seq_lens, num_readonly, *table_rows = columns.unbind(0)
        return cls(token_ids, seq_lens, num_readonly, tuple(table_rows), index, index[:-1], columns, shape)


@dataclass(frozen=True)
class RaggedSize:
    """The padded size of a step: numbers of tokens, of sequences, and of KV-cache groups.

    Each sequence has one row of logits, whether wanted or not.
    """

    num_tokens: int
    num_seqs: int
    num_groups: int

    @property
    def num_values(self) -> int:
        """The length of the int32 vector that holds a step."""
        return sum(self._sizes)

    def split(self, vector: Tensor, max_seq_len: int) -> UploadedStep:
        """Split a vector into the fields of a step, as views.

        max_seq_len: an upper bound of the tokens in a context.
        """
        token_ids, seq_lens, num_readonly, *rest = vector.split(self._sizes)
        *table_rows, query_start, logits_rows = rest
        shape = StepShape(0, self.num_tokens, max_seq_len)
        return UploadedStep(token_ids, seq_lens, num_readonly, tuple(table_rows), query_start, logits_rows, None, shape)

    @property
    def _sizes(self) -> list[int]:
        num_seqs = self.num_seqs
        return [self.num_tokens, *[num_seqs] * (DECODE_COLUMNS - 1 + self.num_groups), num_seqs + 1, num_seqs]


@dataclass
class UploadCounts:
    """What was uploaded so far: the number of transfers, their bytes, and the number of block-table entries."""

    num_transfers: int = 0
    num_bytes: int = 0
    num_block_ids: int = 0


class StepUploader:
    """Uploads steps and the changes of `tables`, one for each group, which it owns. Attribute: counts."""

    def __init__(self, tables: Sequence[ResidentTable], block_size: int) -> None:
        self.tables = tuple(tables)
        self.counts = UploadCounts()
        self._block_size = block_size
        self._device = self.tables[0].blocks.device
        self._host, self._staging = self._buffers(1024)
        self._was_read: torch.cuda.Event | None = None

    def upload_ragged(self, step: StepColumns, size: RaggedSize, drawn: Tensor | None = None) -> Tensor:
        """Upload a step padded to `size`, and return int32 [size.num_values], in the order of `RaggedSize.split`.

        An extra sequence after the last one holds the padding's tokens, at read-only positions. Otherwise as `upload`.
        """
        num_missing = size.num_tokens - len(step.token_ids)
        zeros = [0] * (size.num_seqs - len(step.starts))
        of_padding = [num_missing, *zeros[1:]] if zeros else []
        query_start, logits_rows = _ragged_sections(step)
        behind = [query_start + [size.num_tokens] * len(zeros), logits_rows + [0] * (size.num_seqs - len(logits_rows))]
        padding = ([0] * num_missing, of_padding, of_padding, zeros)
        parts = self._upload(step, padding, behind, drawn)
        assert sum(len(part) for part in parts) == size.num_values
        return self._staging[: size.num_values]

    def upload_decodes(self, step: StepColumns, num_seqs: int, drawn: Tensor | None = None) -> Tensor:
        """Upload a step of single tokens whose logits are wanted: int32 [DECODE_COLUMNS + num_groups, num_seqs].

        num_seqs: the step is padded to so many sequences by some that have no tokens. A padding sequence's length is 0,
        and it has a read-only token. Otherwise as `upload`.
        """
        zeros = [0] * (num_seqs - len(step.starts))
        num_columns = len(self._upload(step, (zeros, zeros, [1] * len(zeros), zeros), [], drawn))
        return self._staging[: num_columns * num_seqs].view(num_columns, num_seqs)

    def upload(self, step: StepColumns, drawn: Tensor | None = None) -> UploadedStep:
        """Upload a step of at least one sequence, and the new entries of its sequences' table rows.

        step: its block tables are the sequences' own lists (see `resident_table`). drawn: see `feed`. Raises
        InvalidArgumentError, and uploads nothing then. O(tokens + new blocks), and O(blocks) for those without a row.
        """
        shape = StepShape.of(step.lengths, step.seq_lens, step.num_readonly_tokens)
        if step.is_decode:
            num_seqs = len(step.starts)
            index = torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device)
            return UploadedStep.of_decodes(self.upload_decodes(step, num_seqs, drawn), index, shape)
        parts = self._upload(step, ([], [], [], []), [*_ragged_sections(step)], drawn)
        token_ids, seq_lens, num_readonly, *rest = parts
        *table_rows, query_start, logits_rows = rest
        return UploadedStep(token_ids, seq_lens, num_readonly, tuple(table_rows), query_start, logits_rows, None, shape)

    def _upload(
        self, step: StepColumns, padding: tuple[list[int], ...], behind: Sections, drawn: Tensor | None
    ) -> list[Tensor]:
        """Upload a step's sections, and write the changes of the tables. Returns the sections.

        They are the tokens, lengths, read-only tokens and rows of each group's table. padding: what follows in these,
        the last one for all groups. behind: further sections.
        """
        changes = [TableChanges() for _ in self.tables]
        of_tokens, of_lengths, of_readonly, of_rows = padding
        seq_lens = step.seq_lens
        try:
            for table in self.tables:
                table.reserve(len(step.starts))
            sections = [step.token_ids + of_tokens, seq_lens + of_lengths, [*step.num_readonly_tokens, *of_readonly]]
            sections += [numbers + of_rows for numbers in self._assign_rows(step, seq_lens, changes)]
            sections += behind
            num_sections = len(sections)
            sections += [values for change in changes for values in (change.indexes, change.block_ids)]
            parts = self._transfer(sections)
        except BaseException:
            for table in self.tables:
                table.forget()
            raise
        if drawn is not None:
            feed(parts[0], step.token_ids, drawn)
        self._write(changes, parts[num_sections:])
        return parts[:num_sections]

    def batch(self, step: UploadedStep) -> StepBatch:
        """Lay out the last uploaded step as a batch. Block tables are cut to the length of the longest context."""
        width = -(-step.shape.max_seq_len // self._block_size)
        found = zip(self.tables, step.table_rows, strict=True)
        tables = [table.blocks[:, :width].index_select(0, rows) for table, rows in found]
        return lay_out(step, tables, self._block_size)

    def _write(self, changes: Sequence[TableChanges], parts: list[Tensor]) -> None:
        """Write the tables' new entries. parts: of each table, indexes and block ids, on the device."""
        for table, change, indexes, block_ids in zip(self.tables, changes, parts[::2], parts[1::2], strict=True):
            if change.indexes:
                table.blocks.view(-1).index_copy_(0, indexes.long(), block_ids)
            self.counts.num_block_ids += len(change.indexes)

    def _assign_rows(self, step: StepColumns, seq_lens: list[int], changes: Sequence[TableChanges]) -> Sections:
        """The sequences' rows of each group's table. Adds the entries that the device lacks to `changes`."""
        size = self._block_size
        start_blocks, num_used = [start // size for start in step.starts], [-(-seq_len // size) for seq_len in seq_lens]
        found = zip(self.tables, step.block_tables, changes, strict=True)
        return [table.assign_rows(block_ids, start_blocks, num_used, change) for table, block_ids, change in found]

    def _transfer(self, sections: Sections) -> list[Tensor]:
        """Copy lists of ints to the device in one transfer. Returns a vector for each."""
        sizes = [len(section) for section in sections]
        values = torch.frombuffer(array("i", list(chain.from_iterable(sections))), dtype=torch.int32)
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


def lay_out(step: UploadedStep, block_tables: Sequence[Tensor], block_size: int) -> StepBatch:
    """The batch of a step, computed on the device. Reads no tensor on the host.

    block_tables: for each group, int32 [num_seqs, max_blocks], the rows of the step's sequences.
    """
    num_tokens, num_seqs, device = step.token_ids.shape[0], step.seq_lens.shape[0], step.token_ids.device
    if step.decode_columns is not None:
        owner = torch.arange(num_seqs, device=device)
        positions = (step.seq_lens.long() - 1).clamp_(min=0)  # a padding sequence has length 0
    else:
        lengths = step.query_start.diff().long()
        index = torch.arange(num_seqs, device=device)
        owner = torch.repeat_interleave(index, lengths, output_size=num_tokens)
        first_positions = step.seq_lens.long() - lengths - step.query_start[:-1]
        positions = torch.arange(num_tokens, device=device) + first_positions[owner]
    columns, offsets = positions // block_size, positions % block_size
    is_readonly = positions < step.num_readonly[owner]
    slots = [table[owner, columns].long() * block_size + offsets for table in block_tables]
    return StepBatch(
        token_ids=step.token_ids.long(),
        positions=positions,
        slot_mappings=tuple(own.masked_fill(is_readonly, -1) for own in slots),
        block_tables=tuple(block_tables),
        query_start=step.query_start,
        seq_lens=step.seq_lens,
        logits_rows=step.logits_rows.long(),
        shape=step.shape,
    )


def _ragged_sections(step: StepColumns) -> tuple[list[int], list[int]]:
    """Each sequence's first row, then the end, and the rows whose logits are wanted."""
    query_start = [0, *accumulate(step.lengths)]
    ends = zip(query_start[1:], step.wants_logits, strict=True)
    return query_start, [end - 1 for end, is_wanted in ends if is_wanted]
