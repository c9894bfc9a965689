"""The Triton kernels of `decode`: two ways to split the keys of single queries, each with its merge.

A unit of `shares` is a sequence; its rows are the GROUP query heads that share a head of K and V.
"""

import triton
import triton.language as tl

from kvblocks.kernels.device.shares import (
    find_cut,
    find_work,
    let_merge_begin,
    merge_rows,
    share_begin,
    wait_for_parts,
)
from kvblocks.kernels.device.tiles import LOG2_E, attend_pages, begin_rows, finish_rows, head_scale, narrow_rows


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
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
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
    NARROWED: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend over one sequence's positions from `start` to `stop`, for the GROUP heads that share `kv_head`.

    The sinks are added if `is_first`, which is true once per sequence. Returns fp32 [TILE_M, HEAD_DIM], of which the
    first GROUP rows are valid, and their lse, fp32 [TILE_M].
    """
    packed = tl.arange(0, TILE_M)
    is_head = packed < GROUP
    head = kv_head * GROUP + packed
    seq = seq.to(tl.int64)
    query_at = query_ptr + seq * stride_query_row + head[:, None] * stride_query_head + tl.arange(0, HEAD_DIM)[None, :]
    query = tl.load(query_at, mask=is_head[:, None], other=0.0)
    query, scale = narrow_rows(query, scale * head_scale(k_scale_ptr, kv_head), NARROWED)
    output, odd, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM, PAIRED)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        row_max = tl.where(is_first, sink, row_max)
        row_sum = tl.where(is_first, 1.0, row_sum)
    output, odd, row_max, row_sum = attend_pages(
        query, output, odd, row_max, row_sum, packed * 0 + stop - 1, start, stop,
        table_ptr + seq * stride_table,
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES,
        MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False, INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return finish_rows(output, odd, row_max, row_sum, head_scale(v_scale_ptr, kv_head))


@triton.jit(do_not_specialize=["num_seqs", "window"], do_not_specialize_on_alignment=["len_ptr", "end_ptr"])
def decode_ends_kernel(
    len_ptr,
    end_ptr,
    num_seqs,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute where each sequence's tiles end in the line of all tiles. Grid: (1,).

    A sequence without keys has one empty tile.
    """
    total = 0
    for first in tl.range(0, num_seqs, CHUNK):
        seq = first + tl.arange(0, CHUNK)
        length = tl.load(len_ptr + seq, mask=seq < num_seqs, other=0)
        tiles = tl.maximum(tl.cdiv(count_keys(length, window, HAS_WINDOW), TILE_N), 1) * NUM_KV_HEADS
        tiles = tl.where(seq < num_seqs, tiles, 0)
        tl.store(end_ptr + seq, total + tl.cumsum(tiles, 0), mask=seq < num_seqs)
        total += tl.sum(tiles, 0)


@triton.jit(
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "len_ptr", "end_ptr", "sink_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def stream_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    len_ptr,
    end_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_seqs,
    window,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    stride_query_row,
    stride_query_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_output_row,
    stride_output_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    NARROWED: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one program's share of all tiles. Grid: (any number of programs,).

    Shapes as in `decode`; last strides are 1; part_ptr: fp32 [programs, 2, GROUP, HEAD_DIM]; part_lse_ptr: fp32
    [programs, 2, GROUP].
    """
    let_merge_begin(PDL)
    program = tl.program_id(0)
    num_tiles = tl.load(end_ptr + num_seqs - 1)
    tile = share_begin(program, num_tiles, tl.num_programs(0))
    end = share_begin(program + 1, num_tiles, tl.num_programs(0))
    packed = tl.arange(0, TILE_M)
    is_head = packed < GROUP
    element = tl.arange(0, HEAD_DIM)
    while tile < end:
        seq, kv_head, first, head_tiles = find_work(end_ptr, num_seqs, tile, NUM_KV_HEADS)
        seq_len = tl.load(len_ptr + seq)
        last = tl.minimum(first + end - tile, head_tiles)
        begin = seq_len - count_keys(seq_len, window, HAS_WINDOW)
        output, lse = attend_span(
            seq, kv_head, begin + first * TILE_N, tl.minimum(begin + last * TILE_N, seq_len), first == 0,
            query_ptr, k_ptr, v_ptr, table_ptr, sink_ptr, k_scale_ptr, v_scale_ptr, scale, softcap,
            stride_query_row, stride_query_head,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
            GROUP, HEAD_DIM, BLOCK_SIZE, TILE_M, TILE_N, STAGES, NARROWED, PAIRED, HAS_SOFTCAP, HAS_SINKS, INTERPRETED,
        )  # fmt: skip
        head = kv_head * GROUP + packed
        if (first == 0) & (last == head_tiles):
            output_at = output_ptr + seq.to(tl.int64) * stride_output_row + head[:, None] * stride_output_head
            tl.store(output_at + element[None, :], output.to(output_ptr.dtype.element_ty), mask=is_head[:, None])
            tl.store(lse_ptr + seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head, lse, mask=is_head)
        else:
            row = (2 * program + (first == 0).to(tl.int32)) * GROUP + packed
            tl.store(part_ptr + row[:, None] * HEAD_DIM + element[None, :], output, mask=is_head[:, None])
            tl.store(part_lse_ptr + row, lse, mask=is_head)
        tile += last - first


@triton.jit
def merge_cut_head(
    cut,
    packed,
    end_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_seqs,
    num_programs,
    stride_output_row,
    stride_output_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of a query head, if the share of program `cut` begins within its K head. packed: int32 [1]."""
    seq, kv_head, first, num_parts = find_cut(end_ptr, num_seqs, num_programs, cut, NUM_KV_HEADS)
    wait_for_parts(PDL)
    if num_parts > 0:
        output, lse = merge_rows(
            part_ptr, part_lse_ptr, first, num_parts, packed, packed < GROUP, 2, GROUP, 1, PARTS, HEAD_DIM
        )  # fmt: skip
        head = kv_head * GROUP + packed
        output_at = output_ptr + seq.to(tl.int64) * stride_output_row + head[:, None] * stride_output_head
        tl.store(output_at + tl.arange(0, HEAD_DIM)[None, :], output.to(output_ptr.dtype.element_ty))
        tl.store(lse_ptr + seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head, lse)


@triton.jit(do_not_specialize=["num_seqs", "num_programs"], do_not_specialize_on_alignment=["end_ptr"])
def stream_merge_kernel(
    end_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_seqs,
    num_programs,
    stride_output_row,
    stride_output_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of one head, if a share begins within it. Grid: (num_programs - 1, GROUP).

    The rest is as in `stream_kernel`.
    """
    merge_cut_head(
        tl.program_id(0) + 1, tl.program_id(1) + tl.arange(0, 1), end_ptr, output_ptr, lse_ptr, part_ptr, part_lse_ptr,
        num_seqs, num_programs, stride_output_row, stride_output_head, NUM_KV_HEADS, GROUP, HEAD_DIM, PARTS, PDL,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_kv_heads", "max_splits", "window", "split_keys", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "len_ptr", "sink_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def split_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    len_ptr,
    sink_ptr,
    part_ptr,
    part_lse_ptr,
    num_kv_heads,
    max_splits,
    window,
    split_keys,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
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
    NARROWED: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one split of one head of a sequence. Grid: (num_seqs * num_kv_heads * max_splits,).

    Shapes as in `decode`; last strides are 1; part_ptr: fp32 [num_seqs, num_kv_heads, splits, GROUP, HEAD_DIM];
    part_lse_ptr: fp32 [num_seqs, num_kv_heads, splits, GROUP].
    """
    let_merge_begin(PDL)
    split = tl.program_id(0) % max_splits
    seq = tl.program_id(0) // max_splits // num_kv_heads
    kv_head = tl.program_id(0) // max_splits % num_kv_heads
    seq_len = tl.load(len_ptr + seq)
    start = seq_len - count_keys(seq_len, window, HAS_WINDOW) + split * split_keys
    if start < seq_len:
        output, lse = attend_span(
            seq, kv_head, start, tl.minimum(start + split_keys, seq_len), split == 0,
            query_ptr, k_ptr, v_ptr, table_ptr, sink_ptr, k_scale_ptr, v_scale_ptr, scale, softcap,
            stride_query_row, stride_query_head,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
            GROUP, HEAD_DIM, BLOCK_SIZE, TILE_M, TILE_N, STAGES, NARROWED, PAIRED, HAS_SOFTCAP, HAS_SINKS, INTERPRETED,
        )  # fmt: skip
        packed = tl.arange(0, TILE_M)
        element = tl.arange(0, HEAD_DIM)
        row = tl.program_id(0).to(tl.int64) * GROUP + packed
        tl.store(part_ptr + row[:, None] * HEAD_DIM + element[None, :], output, mask=(packed < GROUP)[:, None])
        tl.store(part_lse_ptr + row, lse, mask=packed < GROUP)


@triton.jit(
    do_not_specialize=["window", "split_keys", "max_splits"],
    do_not_specialize_on_alignment=["len_ptr", "sink_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def split_merge_kernel(
    len_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    window,
    split_keys,
    max_splits,
    stride_output_row,
    stride_output_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge one head's splits, always in the same order. Grid: (num_seqs, num_heads); the rest as in `split_kernel`.

    A sequence without keys has no splits: its output is 0, and its lse -inf or its sink.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    num_heads = tl.num_programs(1)
    num_splits = tl.cdiv(count_keys(tl.load(len_ptr + seq), window, HAS_WINDOW), split_keys)
    first = (seq.to(tl.int64) * (num_heads // GROUP) + tl.program_id(1) // GROUP) * max_splits
    wait_for_parts(PDL)
    output, lse = merge_rows(
        part_ptr, part_lse_ptr, first, num_splits, head % GROUP, head < num_heads, 1, GROUP, 1, PARTS, HEAD_DIM
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        lse = tl.where(num_splits == 0, sink, lse)
    output_at = output_ptr + seq.to(tl.int64) * stride_output_row + head[:, None] * stride_output_head
    tl.store(output_at + tl.arange(0, HEAD_DIM)[None, :], output.to(output_ptr.dtype.element_ty))
    tl.store(lse_ptr + seq.to(tl.int64) * num_heads + head, lse)
