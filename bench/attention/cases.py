"""The workloads of `bench.attention`, their tensors, what they move, and the check of a result.

All have 32 query heads, 8 heads of K and V, a head_dim of 128, bf16 and blocks of 16, as Llama 3 8B has. Pages lie in
random order. A rehearsal keeps the shapes' kinds and shrinks their sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvblocks.kernels import extend as extend_module
from kvblocks.kernels import oracle, table
from kvblocks.kernels.cascade import OwnParts, cascade_decode, own_parts
from kvblocks.kernels.decode import decode
from kvblocks.kernels.extend import extend
from kvblocks.kernels.layout import FP8
from kvblocks.kernels.runs import SharedRuns

SPLIT_KEYS = 512
NUM_CHECKED_ROWS = 8
LARGEST_ERROR = 0.01
"""The largest error that counts as right: the root mean square, relative to the exact result's.

Rounding to bf16 causes about 0.003, and 0.005 in the interpreter. Leaving out one key of 4,096 causes 0.016.
"""


@dataclass(frozen=True)
class Workload:
    """One kind of step. lengths: (rows, tokens in context) for each sequence. num_shared: how many tokens all share.

    dtype: of queries, and of K and V unless these are e4m3. options: further keywords of the kernels.
    """

    name: str
    lengths: list[tuple[int, int]] = field(repr=False)
    num_shared: int = 0
    is_fp8: bool = False
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one row."""
        return all(rows == 1 for rows, _ in self.lengths)

    @property
    def scales(self) -> dict[str, float]:
        """The scales of K and V, the same for all heads; empty if K and V are not fp8."""
        return {"k_scale": 0.03, "v_scale": 0.02} if self.is_fp8 else {}

    def cache_bytes(self, *, shared_once: bool) -> int:
        """Bytes of K and V that a step reads. The shared part counts once, or once for each sequence."""
        num_tokens = sum(context for _, context in self.lengths)
        if shared_once:
            num_tokens -= self.num_shared * (len(self.lengths) - 1)
        return num_tokens * 2 * self.heads[1] * self.head_dim * (1 if self.is_fp8 else self.dtype.itemsize)

    def moved_bytes(self, *, shared_once: bool) -> int:
        """Bytes of K and V, queries, outputs and block tables."""
        num_rows = sum(rows for rows, _ in self.lengths)
        tables = sum(-(-context // self.block_size) for _, context in self.lengths) * 4
        rows = 2 * num_rows * self.heads[0] * self.head_dim * self.dtype.itemsize
        return self.cache_bytes(shared_once=shared_once) + rows + tables

    def num_flops(self) -> int:
        """Operations of the two matrix products, over the keys that the causal mask leaves."""
        pairs = sum(rows * context - rows * (rows - 1) // 2 for rows, context in self.lengths)
        return 4 * pairs * self.heads[0] * self.head_dim


@dataclass(frozen=True)
class Batch:
    """A workload's tensors. `runs` and `own` are None where nothing is shared."""

    workload: Workload
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    runs: SharedRuns | None
    own: OwnParts | None

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.workload.head_dim**-0.5

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keywords that our kernels take."""
        num_kv_heads, device = self.workload.heads[1], self.query.device
        scales = {
            name: torch.full((num_kv_heads,), value, device=device) for name, value in self.workload.scales.items()
        }
        return {"scale": self.scale, **scales, **self.workload.options}


Contestant = Callable[[Batch], Tensor]


def workloads() -> list[Workload]:
    """Return all workloads."""
    mixed = [128 + (8192 - 128) * (index * 37 % 64) // 63 for index in range(64)]
    decode_4k = [(1, 4096)] * 64
    return [
        Workload("decode 64 x 4,096", decode_4k),
        Workload("decode 8 x 4,096", [(1, 4096)] * 8),
        Workload("decode 1 x 32,768", [(1, 32_768)]),
        Workload("decode 1 x 131,072", [(1, 131_072)]),
        Workload("decode 64 mixed, 128 to 8,192", [(1, context) for context in mixed]),
        Workload("decode 64 x 4,096, K and V in e4m3", decode_4k, is_fp8=True),
        Workload("prefill 8,192", [(8192, 8192)]),
        Workload("decode 64 x 4,096, 3,584 shared", decode_4k, num_shared=3584),
        Workload("decode 64 x 33,024, 32,768 shared", [(1, 33_024)] * 64, num_shared=32_768),
    ]


def shrink(workload: Workload) -> Workload:
    """The same kind of step, small enough for Triton's interpreter."""
    longest = max(context for _, context in workload.lengths)
    lengths = [(1, max(1, context * 160 // longest)) for _, context in workload.lengths[:5]]
    if not workload.is_decode:
        lengths = [(120, 120)]
    num_shared = workload.num_shared * 160 // longest // 16 * 16
    return replace(workload, lengths=lengths, num_shared=num_shared, heads=(8, 2), head_dim=64)


def build(workload: Workload, device: torch.device, seed: int) -> Batch:
    """Random tensors, in pages of random order."""
    generator = torch.Generator().manual_seed(seed)
    block_size, (num_heads, num_kv_heads) = workload.block_size, workload.heads
    num_blocks = [-(-context // block_size) for _, context in workload.lengths]
    num_shared = workload.num_shared // block_size
    num_pages = num_shared + sum(count - num_shared for count in num_blocks)
    pages = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(num_blocks), max(num_blocks), dtype=torch.int32)
    tables[:, :num_shared] = pages[:num_shared]
    first = num_shared
    for index, count in enumerate(num_blocks):
        tables[index, num_shared:count] = pages[first : first + count - num_shared]
        first += count - num_shared
    tables = tables.to(device)
    rows = torch.tensor([0, *(rows for rows, _ in workload.lengths)])
    seq_lens = torch.tensor([context for _, context in workload.lengths], dtype=torch.int32, device=device)
    shape = (len(pages), block_size, num_kv_heads, workload.head_dim)
    # Tensors of the device "meta" have shapes alone: for what only compiles.
    on_device = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    caches = [torch.randn(shape, generator=on_device, dtype=workload.dtype, device=device) for _ in range(2)]
    if workload.is_fp8:
        caches = [(c / s).to(FP8) for c, s in zip(caches, workload.scales.values(), strict=True)]
    query = torch.randn(int(rows.sum()), num_heads, workload.head_dim, generator=on_device, device=device)
    runs = own = None
    if num_shared:
        runs = SharedRuns.build([(range(len(num_blocks)), 0, num_shared)], len(num_blocks), device)
        own = own_parts(tables, seq_lens, runs, block_size)
    start = rows.cumsum(0).int().to(device)
    return Batch(workload, query.to(workload.dtype), *caches, tables, start, seq_lens, runs, own)


def our_contestants(workload: Workload) -> Iterator[tuple[str, Contestant, bool]]:
    """Yield kvblocks' ways of computing a workload: (name, way, whether it reads shared pages once)."""
    if workload.is_decode:
        yield "kvblocks decode", _decode, False
        yield "kvblocks decode, without PDL", without_pdl(_decode), False
        yield f"kvblocks decode, splits of {SPLIT_KEYS}", _decode_splits, False
    else:
        yield "kvblocks extend", _extend, False
    if workload.num_shared:
        yield "kvblocks cascade_decode", _cascade, True
        return
    yield "kvblocks extend, batch-invariant", extend_invariant, False
    if len(workload.lengths) == 1:
        yield "kvblocks extend, batch-invariant, uncut", _extend_uncut, False


def _extend(batch: Batch) -> Tensor:
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.query_start, batch.seq_lens)
    return extend(*tensors, **batch.options)[0]


def extend_invariant(batch: Batch) -> Tensor:
    """Attend as the engine's deterministic mode does."""
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.query_start, batch.seq_lens)
    return extend(*tensors, batch_invariant=True, **batch.options)[0]


def _extend_uncut(batch: Batch) -> Tensor:
    """One piece of all keys: a program for each head of a tile, however long its context is."""
    with patch.object(extend_module, "PIECE_KEYS", 1 << 20):
        return extend_invariant(batch)


def _decode(batch: Batch) -> Tensor:
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.seq_lens)
    return decode(*tensors, **batch.options)[0]


def _decode_splits(batch: Batch) -> Tensor:
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.seq_lens)
    return decode(*tensors, split_keys=SPLIT_KEYS, **batch.options)[0]


def _cascade(batch: Batch) -> Tensor:
    assert batch.runs is not None and batch.own is not None
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.own, batch.block_tables, batch.runs)
    return cascade_decode(*tensors, **batch.options)[0]


def without_pdl(way: Contestant) -> Contestant:
    """The same, but merges are launched when the programs before them have ended."""

    def attend(batch: Batch) -> Tensor:
        with patch.object(table, "launches_early", lambda _device: False):
            return way(batch)

    return attend


class Checker:
    """The exact results of some rows of a batch, each computed as the last row of a separate sequence."""

    def __init__(self, batch: Batch) -> None:
        num_rows = len(batch.query)
        self.rows = torch.linspace(0, num_rows - 1, min(NUM_CHECKED_ROWS, num_rows)).round().long()
        starts = batch.query_start.cpu()
        seqs = torch.searchsorted(starts[1:].contiguous(), self.rows, right=True)
        # A sequence's last row is its last position.
        lengths = batch.seq_lens.cpu()[seqs] - (starts[seqs + 1] - 1 - self.rows)
        tables = batch.block_tables[seqs.to(batch.block_tables.device)]
        query_start = torch.arange(len(self.rows) + 1)
        caches = (batch.key_cache, batch.value_cache)
        self.expected, _ = oracle.attention(
            batch.query[self.rows.to(batch.query.device)], *caches, tables, query_start, lengths, **batch.options
        )

    def error(self, output: Tensor) -> float:
        """The root mean square error, relative to the exact result's."""
        got = output[self.rows.to(output.device)].double().cpu()
        return float((got - self.expected).norm() / self.expected.norm())
