"""A stand-in for the package flashinfer, in plain torch. It has, and checks, the signatures of 0.6.4 and 0.7.2.

Parameters that the engine doesn't use are refused, not ignored.
"""

import types

import torch

from kvblocks.kernels import oracle

PLANS: list[tuple[object, ...]] = []
"""What each plan was made for: its lengths of rows and its options."""


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of prompts. A plan that isn't the last one of its wrapper is gone."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", **other):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and other == {"backend": "auto"}

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        num_seqs = len(paged_kv_last_page_len)
        for starts in (qo_indptr, paged_kv_indptr):
            assert starts.dtype == torch.int32 and starts.shape == (num_seqs + 1,) and int(starts[0]) == 0
            assert starts.is_cpu and starts.is_contiguous(), "read by the host, which must not wait for the device"
        assert paged_kv_indices.dtype == paged_kv_last_page_len.dtype == torch.int32
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert bool((paged_kv_last_page_len >= 1).all()) and bool((paged_kv_last_page_len <= page_size).all())
        assert causal and q_data_type == kv_data_type and q_data_type in (torch.float16, torch.bfloat16)
        counts = paged_kv_indptr.diff()
        tables = torch.zeros(num_seqs, int(counts.max()), dtype=torch.int32)
        for table, pages in zip(tables, paged_kv_indices.split(counts.tolist()), strict=True):
            table[: len(pages)] = pages
        lengths = (counts - 1) * page_size + paged_kv_last_page_len
        window = None if window_left < 0 else window_left + 1
        self._planned = (tables, qo_indptr, lengths, num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._options = {"scale": sm_scale, "window": window, "softcap": logits_soft_cap}
        PLANS.append((tuple(qo_indptr.diff().tolist()), window, logits_soft_cap))

    def run(self, q, paged_kv_cache, *, out=None):
        tables, starts, lengths, num_heads, num_kv_heads, head_dim, page_size = self._planned
        keys, values = paged_kv_cache
        assert q.shape == (int(starts[-1]), num_heads, head_dim) and q.stride(-1) == 1
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert keys.stride() == values.stride() and keys.dtype == q.dtype
        attended = oracle.attention(q, keys, values, tables, starts, lengths, **self._options)[0].to(q.dtype)
        return attended if out is None else out.copy_(attended)


def module():
    """The package, to be put in sys.modules."""
    package = types.ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return package
