"""A stand-in for the package flash-attn, in plain torch. It has, and checks, the signatures of version 2.

Parameters that the engine doesn't use are refused, not ignored.
"""

import types

import torch

from kvblocks.kernels import oracle


def check_pages(k, v, block_table, q):
    assert q.dtype in (torch.float16, torch.bfloat16) and k.dtype == v.dtype == q.dtype
    assert k.dim() == 4 and k.shape == v.shape and k.shape[1] % 256 == 0, "pages of a multiple of 256 tokens"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert q.stride(-1) == 1 and q.shape[-1] == k.shape[-1] and q.shape[-2] % k.shape[2] == 0


def attend(q, k, v, block_table, query_start, seq_lens, softmax_scale, causal, window_size, softcap):
    assert causal, "single rows attend alike without it, but others don't"
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    return oracle.attention(
        *(q, k, v, block_table, query_start, seq_lens),
        scale=softmax_scale,
        window=None if left < 0 else left + 1,
        softcap=softcap or None,
    )[0].to(q.dtype)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """q: [total_q, heads, dim]; k, v: [num_blocks, page, kv_heads, dim]; cu_seqlens: int32 [batch + 1]."""
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    check_pages(k, v, block_table, q)
    assert q.dim() == 3
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (block_table.shape[0] + 1,)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert int(cu_seqlens_k[0]) == 0 and isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    CALLS.append("varlen")
    return attend(
        *(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff()),
        *(softmax_scale, causal, window_size, softcap),
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """q: [batch, seqlen, heads, dim]; caches as above; cache_seqlens: int32 [batch]."""
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    assert unused == (None,) * 7 and rotary_interleaved and not num_splits and not return_softmax_lse
    check_pages(k_cache, v_cache, block_table, q)
    assert q.dim() == 4 and q.shape[:2] == (block_table.shape[0], 1)
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == q.shape[:1]
    CALLS.append("kvcache")
    start = torch.arange(len(q) + 1)
    attended = attend(
        *(q[:, 0], k_cache, v_cache, block_table, start, cache_seqlens),
        *(softmax_scale, causal, window_size, softcap),
    )
    return attended[:, None]


CALLS: list[str] = []


def module():
    """The package, to be put in sys.modules."""
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    package.flash_attn_with_kvcache = flash_attn_with_kvcache
    return package
