"""The calls whose kernels aot.py compiles, with tensors of an engine's shapes.

The launches of each call are recorded for a target (`bench.attention.recording`), and compiled. So tiles, constants,
and what Triton knows of addresses and strides are those of a real call. Nothing is computed: only shapes matter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from kvblocks.kernels.cascade import cascade_decode, own_parts
from kvblocks.kernels.copy import CacheTable, copy_blocks, gather_blocks, restore_states, save_states, scatter_blocks
from kvblocks.kernels.decode import decode
from kvblocks.kernels.draw import NUM_PARAMETERS, draw_tokens
from kvblocks.kernels.extend import extend
from kvblocks.kernels.layout import BLOCK_SIZES, FP8, HEAD_DIMS
from kvblocks.kernels.rows import ACTIVATIONS, MAX_COLUMNS, Turn, add_norm, gate, norm, place
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.store import store

TARGETS = ("sm80", "sm89", "sm90", "sm100", "gfx942")
FP8_TARGETS = ("sm89", "sm90", "sm100")
DTYPES = {1: (torch.bfloat16, FP8), 2: (torch.bfloat16, torch.bfloat16), 4: (torch.float32, torch.float32)}
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 71)
"""Query heads that share a head of K and V: those of models, and one that is no power of 2 above the tiles' rows."""


@dataclass(frozen=True)
class Model:
    """The shapes of a model's attention. width: bytes of an element of K."""

    head_dim: int = 128
    width: int = 2
    group: int = 4
    block_size: int = 16
    options: dict = field(default_factory=dict)

    def __str__(self):
        options = "".join(f", {name}" for name in self.options)
        return f"{self.head_dim} x {self.width} bytes, group {self.group}, pages {self.block_size}{options}"

    def tensors(self, num_seqs, rows):
        """A query, caches, tables, first rows and lengths."""
        dtype, cache_dtype = DTYPES[self.width]
        query = torch.empty(num_seqs * rows, 8 * self.group, self.head_dim, dtype=dtype)
        caches = torch.empty(2, 4, self.block_size, 8, self.head_dim, dtype=cache_dtype)
        tables = torch.zeros(num_seqs, 256, dtype=torch.int32)
        starts, lengths = torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
        return query, caches[0], caches[1], tables, starts, lengths


def make_prompt(model):
    """Prompts and chunks of them."""
    extend(*model.tensors(2, 512), scale=1.0, **model.options)


def make_verification(model):
    """A few rows each."""
    extend(*model.tensors(16, 2), scale=1.0, **model.options)


def make_fixed(model):
    """Batch-invariant calls of `extend`."""
    extend(*model.tensors(2, 512), scale=1.0, batch_invariant=True, **model.options)


def make_decode(model):
    """Single rows, shared evenly."""
    query, *caches, tables, _, lengths = model.tensors(64, 1)
    decode(query, *caches, tables, lengths, scale=1.0, **model.options)


def make_split_decode(model):
    """Single rows, split into so many keys each."""
    query, *caches, tables, _, lengths = model.tensors(64, 1)
    decode(query, *caches, tables, lengths, scale=1.0, split_keys=512, **model.options)


def make_cascade(model):
    """Single rows that share pages."""
    query, *caches, tables, _, lengths = model.tensors(64, 1)
    runs = SharedRuns.build([(range(64), 0, 8)], 64)
    own = own_parts(tables, lengths, runs, model.block_size)
    cascade_decode(query, *caches, own, tables, runs, scale=1.0, **model.options)


def make_rest(model):
    """Kernels without tiles of keys: storing and copying."""
    query, key_cache, value_cache, *_ = model.tensors(64, 1)
    key = torch.empty(64, 8, model.head_dim, dtype=query.dtype)
    store(key, key, key_cache, value_cache, torch.zeros(64, dtype=torch.int64))
    table = CacheTable.of([torch.empty(4, 8192, dtype=torch.uint8) for _ in range(2)])
    ids, staging = torch.zeros(2, dtype=torch.int64), torch.empty(2, table.staging_bytes, dtype=torch.uint8)
    copy_blocks(table, ids.view(1, 2))
    gather_blocks(table, ids, staging)
    scatter_blocks(table, ids, staging)
    slots, pieces = (
        torch.empty(2, 3 * table.staging_bytes // 2, dtype=torch.uint8),
        torch.zeros(2, 3, dtype=torch.int64),
    )
    save_states(table, slots, pieces)
    restore_states(table, slots, pieces)


def make_rows(model):
    """The operations between products and attention, for models of several widths, with all norms and without."""
    query, *caches, _, _, _ = model.tensors(64, 1)
    num_heads, dtype = query.shape[1], query.dtype
    heads = torch.empty(64, num_heads + 16, model.head_dim, dtype=dtype)
    angles, positions = torch.empty(32, model.head_dim // 2, dtype=dtype), torch.zeros(64, dtype=torch.int64)
    scales = (torch.ones(8), torch.ones(8)) if model.width == 1 else None
    for weight in (None, torch.empty(num_heads + 8, model.head_dim)):
        place(heads, Turn(angles, angles, positions, weight), tuple(caches), positions, scales)
    for num_columns in WIDTHS:
        rows, weight = torch.empty(64, num_columns, dtype=dtype), torch.empty(num_columns)
        norm(rows, weight.to(dtype), 0.0)
        add_norm(rows, rows, 0.0, weight=weight.to(dtype))
        add_norm(rows, rows, 0.0, output_norm=weight, weight=weight)
        add_norm(rows, rows, 0.0)
    for activation in ACTIVATIONS:
        gate(torch.empty(64, 2 * 1536, dtype=dtype), activation)


def make_draws(_model):
    """Drawing tokens, for the vocabulary of Llama 3."""
    draw_tokens(torch.empty(64, 128256), torch.zeros(64, NUM_PARAMETERS, dtype=torch.float64))


WIDTHS = (576, 4096, MAX_COLUMNS)
"""Columns of rows that are normed: of SmolLM2, of Llama 3 8B, and the most."""
OPTIONS = {"window": 100, "softcap": 5.0, "sinks": torch.zeros(32)}
SOFTCAP = {"softcap": 5.0}
ATTENDING = (make_prompt, make_verification, make_decode, make_cascade)

Call = tuple[str, Callable, Model]
"""(target, what makes the call, of which model)."""


def usual_calls() -> Iterator[Call]:
    """Every entry of the table, for 4 query heads a group and pages of 16; all options, and the other kernels, once."""
    for target, head_dim, width in product(TARGETS, HEAD_DIMS, DTYPES):
        if width > 1 or target in FP8_TARGETS:
            for make in ATTENDING:
                yield target, make, Model(head_dim, width)
    for target in TARGETS:
        for make in (make_prompt, make_decode, make_split_decode):
            yield target, make, Model(options=OPTIONS)
        yield target, make_fixed, Model()
        yield target, make_cascade, Model(options=SOFTCAP)
    for target in ("sm90", "gfx942"):
        yield target, make_rest, Model()
    yield "sm90", make_rest, Model(width=1)
    for target in TARGETS:
        yield target, make_rows, Model()
        yield target, make_draws, Model()
    for head_dim, width in ((64, 1), (256, 1), (64, 4), (256, 4)):
        yield "sm90", make_rows, Model(head_dim, width)


def all_calls() -> Iterator[Call]:
    """Beside the usual: every group and page size, windows and softcaps; on sm90 all of it, elsewhere the extremes."""
    window = {"window": 100}
    for make, width, group in product(ATTENDING, DTYPES, GROUPS):
        yield "sm90", make, Model(width=width, group=group)
    for make, head_dim, width, block_size in product(ATTENDING, HEAD_DIMS, DTYPES, BLOCK_SIZES[1:]):
        yield "sm90", make, Model(head_dim, width, block_size=block_size)
    for head_dim, width in product(HEAD_DIMS, DTYPES):
        yield "sm90", make_fixed, Model(head_dim, width)
        yield "sm90", make_prompt, Model(head_dim, width, options=window)
        yield "sm90", make_decode, Model(head_dim, width, options=window)
        yield "sm90", make_prompt, Model(head_dim, width, options=SOFTCAP)
        yield "sm90", make_cascade, Model(head_dim, width, group=64)
        yield "sm90", make_decode, Model(head_dim, width, group=64)
    for target, make, width, group in product(("sm80", "sm100"), ATTENDING, (2, 4), (1, 32, 64)):
        yield target, make, Model(width=width, group=group)
