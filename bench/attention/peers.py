"""Peers of `bench.attention`, if they can be imported. Each plans for one batch and returns a call that attends.

FlashInfer and vLLM's unified kernel read the same pages as ours. fa3-fwd and torch's FlexAttention get K and V laid out
contiguously, which is an advantage. Plans are made once and never timed.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from bench.attention.cases import Batch, Workload

Attend = Callable[[], Tensor]
Plan = Callable[[Batch], Attend]
WORKSPACE_BYTES = 256 << 20
FA2_PAGE_TOKENS = 256


def peers(workload: Workload) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of the peers that can compute a workload."""
    yield "FlashInfer", plan_flashinfer
    if workload.num_shared:
        yield "FlashInfer cascade", plan_flashinfer_cascade
    yield "vLLM unified", plan_vllm
    if not workload.is_fp8:
        yield "flash-attn 2, pages of 256", plan_fa2
    same_lengths = len(set(workload.lengths)) == 1
    if same_lengths and not workload.is_fp8 and not workload.num_shared:
        yield "fa3-fwd, contiguous", plan_fa3
        yield "FlexAttention, contiguous", plan_flex


def pages_of(batch: Batch, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table from column `first` on: each sequence's start in the pages, the pages of all sequences
    in one row, and how many tokens are in each sequence's last page.
    """
    block_size = batch.workload.block_size
    lengths = [context - first * block_size for _, context in batch.workload.lengths]
    counts = [-(-length // block_size) for length in lengths]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    pages = torch.cat([table[first : first + count] for table, count in zip(batch.block_tables, counts, strict=True)])
    last = torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32)
    device = batch.query.device
    return starts.to(device), pages, last.to(device)


def plan_flashinfer(batch: Batch) -> Attend:
    """Decode or prefill over pages."""
    import flashinfer

    workload, caches = batch.workload, (batch.key_cache, batch.value_cache)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.query.device)
    shape = (*workload.heads, workload.head_dim, workload.block_size)
    types = {"q_data_type": batch.query.dtype, "kv_data_type": batch.key_cache.dtype, "sm_scale": batch.scale}
    if workload.is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages_of(batch), *shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(batch.query_start, *pages_of(batch), *shape, causal=True, **types)
    return lambda: wrapper.run(batch.query, caches, **workload.scales)


def plan_flashinfer_cascade(batch: Batch) -> Attend:
    """Two levels: the part that all share, and the rest."""
    import flashinfer

    workload = batch.workload
    num_shared = workload.num_shared // workload.block_size
    device = batch.query.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    starts, pages, last = pages_of(batch, num_shared)
    all_rows = torch.tensor([0, len(batch.query)], dtype=torch.int32, device=device)
    wrapper.plan(
        [all_rows, batch.query_start],
        [torch.tensor([0, num_shared], dtype=torch.int32, device=device), starts],
        [batch.block_tables[0, :num_shared].contiguous(), pages],
        [torch.tensor([workload.block_size], dtype=torch.int32, device=device), last],
        *(*workload.heads, workload.head_dim, workload.block_size),
        sm_scale=batch.scale,
        q_data_type=batch.query.dtype,
    )
    caches = torch.stack([batch.key_cache, batch.value_cache], 1)
    return lambda: wrapper.run(batch.query, caches)


def plan_vllm(batch: Batch) -> Attend:
    """The Triton kernel that serves both prefill and decode, with its split softmax for small batches."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    workload = batch.workload
    num_heads, num_kv_heads = workload.heads
    num_segments, device = 16, batch.query.device
    output = torch.empty_like(batch.query)
    segments = torch.empty(len(batch.query), num_heads, num_segments, workload.head_dim, device=device)
    largest, sums = (torch.empty(segments.shape[:3], device=device) for _ in range(2))
    scales = {name: torch.tensor(value, device=device) for name, value in workload.scales.items()}

    def attend() -> Tensor:
        unified_attention(
            *(batch.query, batch.key_cache, batch.value_cache, output, batch.query_start),
            *(max(rows for rows, _ in workload.lengths), batch.seq_lens, batch.block_tables.shape[1] * 16),
            *(batch.scale, True, (-1, -1), batch.block_tables, 0.0, None),
            *(scales.get("k_scale"), scales.get("v_scale")),
            seq_threshold_3D=128 // num_kv_heads,
            num_par_softmax_segments=num_segments,
            softmax_segm_output=segments,
            softmax_segm_max=largest,
            softmax_segm_expsum=sums,
        )
        return output

    return attend


def pages_of_256(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and block tables of the same tokens in pages of 256 tokens, the smallest that flash-attn takes."""
    per_page = FA2_PAGE_TOKENS // batch.workload.block_size
    num_seqs, width = batch.block_tables.shape
    padded = torch.nn.functional.pad(batch.block_tables, (0, -width % per_page)).long()
    key, value = (cache[padded].flatten(0, 2) for cache in (batch.key_cache, batch.value_cache))
    tables = torch.arange(padded.numel() // per_page, dtype=torch.int32, device=key.device).view(num_seqs, -1)
    key, value = (cache.unflatten(0, (-1, FA2_PAGE_TOKENS)) for cache in (key, value))
    return key, value, tables


def plan_fa2(batch: Batch) -> Attend:
    """FlashAttention 2 over pages of 256 tokens. Each sequence gets a copy of the shared ones."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    key, value, tables = pages_of_256(batch)
    options = {"softmax_scale": batch.scale, "causal": True, "block_table": tables}
    if batch.workload.is_decode:
        rows = batch.query.unsqueeze(1)
        return lambda: flash_attn_with_kvcache(rows, key, value, cache_seqlens=batch.seq_lens, **options).squeeze(1)
    key_start = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    most = [max(numbers) for numbers in zip(*batch.workload.lengths, strict=True)]
    starts = (batch.query_start, key_start)
    return lambda: flash_attn_varlen_func(batch.query, key, value, *starts, *most, **options)


def contiguous(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Query, K and V as [num_seqs, tokens, heads, head_dim], for sequences of one length."""
    rows, context = batch.workload.lengths[0]
    query = batch.query.unflatten(0, (-1, rows))
    caches = (cache[batch.block_tables.long()].flatten(1, 2) for cache in (batch.key_cache, batch.value_cache))
    key, value = (cache[:, :context].contiguous() for cache in caches)
    return query, key, value


def plan_fa3(batch: Batch) -> Attend:
    """FlashAttention 3, forward only."""
    from fa3_fwd_interface import flash_attn_func

    query, key, value = contiguous(batch)
    # 0: the kernel chooses the number of splits.
    options = {"softmax_scale": batch.scale, "causal": True, "num_splits": 0}
    return lambda: _first(flash_attn_func(query, key, value, **options)).flatten(0, 1)


def plan_flex(batch: Batch) -> Attend:
    """FlexAttention with a causal block mask, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = (tensor.transpose(1, 2) for tensor in contiguous(batch))
    rows, context = batch.workload.lengths[0]
    is_gpu = batch.query.device.type == "cuda"
    attend = _compiled_flex() if is_gpu else flex_attention
    options = {"scale": batch.scale, "enable_gqa": True}
    if rows > 1:

        def is_visible(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
            return position <= row + (context - rows)

        options["block_mask"] = create_block_mask(is_visible, None, None, rows, context, device=batch.query.device)
    return lambda: attend(query, key, value, **options).transpose(1, 2).flatten(0, 1)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """One function for all pools, so that it is compiled once for a shape."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
