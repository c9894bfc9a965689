"""Steps without requests that compile and capture everything before the first request comes.

A kernel is compiled when it is first launched, which takes seconds, and a bucket of decode steps is captured when it is
first needed. So each kind of step is run once, on padding, whose rows are at read-only positions of block 0 and store
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from kvblocks.engine.attention.batch import StepBatch, StepShape
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import UploadedStep, lay_out

PROMPT_ROWS = 256
"""Enough rows that the kernels for prompts are chosen, for any number of query heads per KV head."""

WarmUpStep = tuple[str, Callable[[], object]]
"""A readable name, and the function that runs the step."""


def padding_batch(tables: Sequence[ResidentTable], block_size: int, rows: Sequence[int], length: int) -> StepBatch:
    """A step that stores nothing. rows: the rows of each sequence. length: the tokens in context, at least as many."""
    device = tables[0].blocks.device

    def vector(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(device)

    starts = [0, *accumulate(rows)]
    lengths = vector([length] * len(rows))
    num_decodes = next((index for index, count in enumerate(rows) if count != 1), len(rows))
    step = UploadedStep(
        token_ids=vector([0] * starts[-1]),
        seq_lens=lengths,
        num_readonly=lengths,
        table_rows=tuple(vector([0] * len(rows)) for _ in tables),
        query_start=vector(starts),
        logits_rows=vector([stop - 1 for stop in starts[1:]]),
        decode_columns=None,
        shape=StepShape(num_decodes, max(rows), length, tuple((count, length) for count in rows), stores_any=False),
    )
    found = zip(tables, step.table_rows, strict=True)
    return lay_out(step, [table.blocks.index_select(0, rows) for table, rows in found], block_size)


def batches(tables: Sequence[ResidentTable], block_size: int, max_tokens: int) -> Iterator[tuple[str, StepBatch]]:
    """Yield a prompt, a short prompt, and a decode with a prompt, with contexts of at most `max_tokens`."""
    room = min(max_tokens, tables[0].blocks.shape[1] * block_size)
    prompt = min(PROMPT_ROWS, room)
    kinds = (("prompts", [prompt]), ("short prompts", [min(2, room)]), ("decodes and prompts", [1, prompt]))
    for name, rows in kinds:
        yield name, padding_batch(tables, block_size, rows, max(rows))
