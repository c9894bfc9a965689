"""What both ways of splitting a decode share: computing a part, and merging parts.

A part is attention over some of a sequence's keys, computed for the GROUP query heads that share a head of K and V:
fp32 rows [GROUP, HEAD_DIM], divided by their sums, and their lse to base e, fp32 [GROUP]. Every part that is merged has
at least one key.
"""

import triton
import triton.language as tl

from kvblocks.kernels.tiles import attend_pages, finish_rows

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def count_keys(seq_lens, window, HAS_WINDOW: tl.constexpr):
    """How many keys the last position of each sequence sees."""
    if HAS_WINDOW:
        seq_lens = tl.minimum(seq_lens, window)
    return seq_lens


@triton.jit
def attend_span(
    seq,
    kv_head,
    start,
    stop,
    is_first,
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    sink_ptr,
    scale,
    softcap,
    v_scale,
    stride_query_row,
    stride_query_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One sequence's attention over the positions from `start` to `stop`, for the GROUP heads that share `kv_head`.

    The sinks count where `is_first`: once per sequence. Returns fp32 [TILE_M, HEAD_DIM], of which GROUP rows mean
    something, and their lse, fp32 [TILE_M].
    """
    packed = tl.arange(0, TILE_M)
    is_head = packed < GROUP
    head = kv_head * GROUP + packed
    seq = seq.to(tl.int64)
    query_at = query_ptr + seq * stride_query_row + head[:, None] * stride_query_head + tl.arange(0, HEAD_DIM)[None, :]
    query = tl.load(query_at, mask=is_head[:, None], other=0.0)
    row_max = tl.full([TILE_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        row_max = tl.where(is_first, sink, row_max)
        row_sum = tl.where(is_first, 1.0, row_sum)
    output, row_max, row_sum = attend_pages(
        query, tl.zeros([TILE_M, HEAD_DIM], tl.float32), row_max, row_sum, packed * 0 + stop - 1, start, stop,
        table_ptr + seq * stride_table,
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES,
        MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False, INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return finish_rows(output * v_scale, row_max, row_sum)


@triton.jit
def merge_parts(
    part_ptr, part_lse_ptr, first, num_parts, packed, STRIDE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Merge a head's row of `num_parts` parts, at least one: numbers first, first + STRIDE, first + 2 * STRIDE, ...

    With a STRIDE of 2 the first part is number first + 1 instead. Returns fp32 [HEAD_DIM] and the lse, fp32 [1].
    """
    PARTS: tl.constexpr = 16
    element = tl.arange(0, HEAD_DIM)
    output = tl.zeros([HEAD_DIM], tl.float32)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        is_part = part < num_parts
        number = first + part * STRIDE
        if STRIDE == 2:
            number = tl.where(part == 0, first + 1, number)
        row = number.to(tl.int64) * GROUP + packed
        lse = tl.load(part_lse_ptr + row, mask=is_part, other=-float("inf")) * _LOG2_E
        rows = tl.load(part_ptr + row[:, None] * HEAD_DIM + element[None, :], mask=is_part[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        kept = tl.exp2(top - new_top)
        output = output * kept + tl.sum(rows * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = new_top
    return output / total, (top + tl.log2(total)) * _LN_2


@triton.jit
def write_unseeing(output_at, lse_at, sink_ptr, head, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Write the row of a sequence without keys: 0, and an lse of -inf or its sink."""
    lse = -float("inf")
    if HAS_SINKS:
        lse = tl.load(sink_ptr + head).to(tl.float32)
    tl.store(output_at + tl.arange(0, HEAD_DIM), tl.zeros([HEAD_DIM], tl.float32).to(output_at.dtype.element_ty))
    tl.store(lse_at, lse)
