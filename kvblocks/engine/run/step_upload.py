"""Uploads what is new in a step to the device, in one transfer.

A step is packed into one vector of int32 in pinned host memory: the tokens; for each sequence its length, the number of
its read-only tokens, and its row of each group's resident table; then the tables' new entries. The device computes
positions, slots and the batch's block tables from these. A decode step takes 12 bytes a sequence and 4 for each group,
and 8 more for each new block. (Lengths could stay on the device, but the bytes saved are small beside the latency of
the one transfer.)

Invariant: the vector is overwritten only after the device has read it.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add

import torch
from torch import Tensor

from kvblocks.engine.attention.batch import SequenceRows, StepBatch, StepShape
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

    def upload_ragged(self, rows: Sequence[SequenceRows], size: RaggedSize, drawn: Tensor | None = None) -> Tensor:
        """Upload a step padded to `size`, and return int32 [size.num_values], in the order of `RaggedSize.split`.

        An extra sequence after the last one holds the padding's tokens, at read-only positions. Otherwise as `upload`.
        """
        num_missing = size.num_tokens - sum(len(sequence.token_ids) for sequence in rows)
        zeros = [0] * (size.num_seqs - len(rows))

        def arrange(token_ids: list[int], seq_lens: list[int], readonly: list[int], *table_rows: list[int]) -> Sections:
            query_start, logits_rows = _ragged_sections(rows)
            of_padding = [num_missing, *zeros[1:]] if zeros else []
            return [
                token_ids + [0] * num_missing,
                seq_lens + of_padding,
                readonly + of_padding,
                *(numbers + zeros for numbers in table_rows),
                query_start + [size.num_tokens] * len(zeros),
                logits_rows + [0] * (size.num_seqs - len(logits_rows)),
            ]

        parts = self._upload(rows, arrange, drawn)
        assert sum(len(part) for part in parts) == size.num_values
        return self._staging[: size.num_values]

    def upload_decodes(self, rows: Sequence[SequenceRows], num_seqs: int, drawn: Tensor | None = None) -> Tensor:
        """Upload a step of single tokens whose logits are wanted: int32 [DECODE_COLUMNS + num_groups, num_seqs].

        num_seqs: the step is padded to so many sequences by some that have no tokens. A padding sequence's length is 0,
        and it has a read-only token. Otherwise as `upload`.
        """
        zeros = [0] * (num_seqs - len(rows))

        def arrange(token_ids: list[int], seq_lens: list[int], readonly: list[int], *table_rows: list[int]) -> Sections:
            of_padding = [1] * len(zeros)
            return [token_ids + zeros, seq_lens + zeros, readonly + of_padding, *(own + zeros for own in table_rows)]

        num_columns = len(self._upload(rows, arrange, drawn))
        return self._staging[: num_columns * num_seqs].view(num_columns, num_seqs)

    def upload(self, rows: Sequence[SequenceRows], drawn: Tensor | None = None) -> UploadedStep:
        """Upload a step of at least one sequence, and the new entries of its sequences' table rows.

        rows: their block tables are the sequences' own lists (see `resident_table`). drawn: see `feed`. Raises
        InvalidArgumentError, and uploads nothing then. O(tokens + new blocks), and O(blocks) for those without a row.
        """
        shape = StepShape.of(rows)
        if shape.num_decodes == len(rows) and all(sequence.wants_logits for sequence in rows):
            index = torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device)
            return UploadedStep.of_decodes(self.upload_decodes(rows, len(rows), drawn), index, shape)
        parts = self._upload(rows, lambda *packed: [*packed, *_ragged_sections(rows)], drawn)
        token_ids, seq_lens, num_readonly, *rest = parts
        *table_rows, query_start, logits_rows = rest
        return UploadedStep(token_ids, seq_lens, num_readonly, tuple(table_rows), query_start, logits_rows, None, shape)

    def _upload(
        self, rows: Sequence[SequenceRows], arrange: Callable[..., Sections], drawn: Tensor | None
    ) -> list[Tensor]:
        """Upload sections, and write the tables' changes that are found. Returns the sections.

        arrange: makes the sections from what `_pack` returns. The first one is the tokens; `drawn` are put in there.
        """
        changes = [TableChanges() for _ in self.tables]
        try:
            for table in self.tables:
                table.reserve(len(rows))
            packed = self._pack(rows, changes)
            sections = arrange(*packed)
            num_sections = len(sections)
            sections += [values for change in changes for values in (change.indexes, change.block_ids)]
            parts = self._transfer(sections)
        except BaseException:
            for table in self.tables:
                table.forget()
            raise
        if drawn is not None:
            feed(parts[0], packed[0], drawn)
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

    def _pack(self, rows: Sequence[SequenceRows], changes: Sequence[TableChanges]) -> Sections:
        """Token ids, lengths, read-only tokens, and table rows of each group."""
        size = self._block_size
        token_ids, starts, block_ids, num_readonly, _, others, _ = zip(*rows, strict=True)
        seq_lens = [*map(add, starts, map(len, token_ids))]
        start_blocks, num_used = [start // size for start in starts], [-(-seq_len // size) for seq_len in seq_lens]
        table_rows = []
        for group, (table, change) in enumerate(zip(self.tables, changes, strict=True)):
            block_tables = block_ids if not group else [own[group - 1] for own in others]
            own_lists = [own if isinstance(own, list) else list(own) for own in block_tables]
            table_rows.append(table.assign_rows(own_lists, start_blocks, num_used, change))
        return [[*chain.from_iterable(token_ids)], seq_lens, [*num_readonly], *table_rows]

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


def _ragged_sections(rows: Sequence[SequenceRows]) -> Sections:
    """Each sequence's first row, then the end, and the rows whose logits are wanted."""
    query_start = [0, *accumulate(len(sequence.token_ids) for sequence in rows)]
    wanted = [end - 1 for sequence, end in zip(rows, query_start[1:], strict=True) if sequence.wants_logits]
    return [query_start, wanted]
