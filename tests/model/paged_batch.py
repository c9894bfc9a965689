"""A ragged batch whose K and V lie in scattered blocks of caches that hold poison everywhere else, for kernel tests.

Poison is NaN: a slot that is read, even to be multiplied by 0, spoils the result. (In Triton's interpreter e4m3's NaN
loads as 480, which spoils it too, unless it is multiplied by 0.)
"""

from itertools import pairwise

import torch

from kvblocks.kernels import oracle
from kvblocks.kernels.layout import FP8

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""The largest relative error of a conversion. bf16's is a whole unit in the last place: the interpreter truncates."""

SUM_ERROR = 1e-5
"""What fp32 sums of products of order 1 may be off by, here at most some 1e5 terms; most are below 1e-6."""


class PagedBatch:
    """Queries, caches and tables; `lengths` gives (rows of this step, tokens in context) of each sequence."""

    def __init__(
        self,
        lengths,
        *,
        device="cpu",
        heads=(4, 2),
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        cache_dtype=None,
        num_padding_rows=0,
        heads_first=False,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        num_blocks = [-(-context // block_size) for _, context in lengths]
        # Block 0, which masked lanes would read, is nobody's.
        blocks = torch.randperm(sum(num_blocks) + 1, generator=generator, dtype=torch.int32) + 1
        # Entries behind a sequence's last block name a block of poison.
        self.block_tables = torch.full((len(lengths), max([1, *num_blocks]) + 1), int(blocks[-1]), dtype=torch.int32)
        slots = []
        ends = torch.tensor([0, *num_blocks]).cumsum(0).tolist()
        for index, (start, stop) in enumerate(pairwise(ends)):
            self.block_tables[index, : stop - start] = blocks[start:stop]
            positions = torch.arange(lengths[index][1])
            slots.append(blocks[start:stop].long()[positions // block_size] * block_size + positions % block_size)
        shape = (
            2,
            len(blocks) + 1,
            *((num_kv_heads, block_size) if heads_first else (block_size, num_kv_heads)),
            head_dim,
        )
        caches = torch.full(shape, torch.nan)
        if heads_first:
            caches = caches.transpose(2, 3)
        owned = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
        new = torch.randn(2, len(owned), num_kv_heads, head_dim, generator=generator)
        caches[:, owned // block_size, owned % block_size] = new
        self.key_cache, self.value_cache = caches.to(device, cache_dtype or dtype)
        num_rows = [rows for rows, _ in lengths]
        self.query_start = torch.tensor([0, *num_rows]).cumsum(0).int()
        self.seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
        self.query = torch.randn(sum(num_rows) + num_padding_rows, num_heads, head_dim, generator=generator)
        self.query = self.query.to(device, dtype)
        self.sinks = torch.randn(num_heads, generator=generator).to(device)
        self.block_tables, self.query_start = self.block_tables.to(device), self.query_start.to(device)
        self.seq_lens = self.seq_lens.to(device)
        self.scale = head_dim**-0.5

    @property
    def tensors(self):
        """What ragged attention takes, in its order."""
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.query_start, self.seq_lens

    def check(self, output, lse, *, sum_error=SUM_ERROR, **options):
        """Assert that a result is ragged attention with these options, within what rounding explains."""
        expected, expected_lse = oracle.attention(*self.tensors, scale=self.scale, **options)
        query, key_cache, value_cache, *indices = self.tensors
        magnitudes = value_cache.float().abs().to(torch.bfloat16)
        weighed, _ = oracle.attention(query, key_cache, magnitudes, *indices, scale=self.scale, **options)
        check_close(output, lse, expected, expected_lse, weighed, ROUNDING[query.dtype], sum_error)


def check_close(output, lse, expected, expected_lse, weighed, rounding, sum_error=SUM_ERROR):
    """Assert closeness of attention, where `weighed` is what it would be for the magnitudes of V.

    Weights are rounded to the query's dtype before they are multiplied with V: by `rounding` times the sum of weights
    times magnitudes, at most. Rounding the output costs as much again, at most. Scores, and so the lse, are sums in
    fp32 of exact products.
    """
    error = (output.double().cpu() - expected).abs()
    worst = (error - (2 * rounding * weighed + sum_error)).max() if error.numel() else -1
    assert worst <= 0, f"output is off by up to {error.max():.2e}, {worst:.2e} more than rounding explains"
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=sum_error)


def slots_read(monkeypatch, cache, call):
    """The slots of `cache` of which `call` reads anything, by the interpreter; masked lanes read nothing."""
    from triton.runtime import interpreter

    load = interpreter.InterpreterBuilder.create_masked_load
    slots = set()
    element_bytes, slot_elements = cache.element_size(), cache[0, 0].numel()

    def recording_load(builder, pointers, mask, *rest):
        offsets = (pointers.data[mask.data].astype("int64") - cache.data_ptr()) // element_bytes
        inside = offsets[(offsets >= 0) & (offsets < cache.numel())]
        slots.update((inside // slot_elements).tolist())
        return load(builder, pointers, mask, *rest)

    assert cache.is_contiguous()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recording_load)
        call()
    return slots


def slots_owned(batch):
    """The slots of a batch's sequences."""
    block_size = batch.key_cache.shape[1]
    owned = set()
    for table, length in zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), strict=True):
        owned |= {table[position // block_size] * block_size + position % block_size for position in range(length)}
    return owned


def store_fp8(batch, *, k_scale, v_scale):
    """Turn a batch's caches into e4m3 with these scales; poison stays."""
    batch.key_cache = (batch.key_cache.float() / k_scale[:, None]).to(FP8)
    batch.value_cache = (batch.value_cache.float() / v_scale[:, None]).to(FP8)
    return batch


def head_scales(batch, k_scale=0.03, v_scale=0.02):
    """Scales of K and V for a batch's caches: another one for each head."""
    cache = batch.key_cache
    factors = 1 + torch.arange(cache.shape[2], device=cache.device) / 4
    return {"k_scale": k_scale * factors, "v_scale": v_scale / factors}
