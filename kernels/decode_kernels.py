"""The Triton kernels of `decode`: two ways to split the keys of a batch of single queries, each with its merge."""

import triton
import triton.language as tl

from kvblocks.kernels.parts import attend_span, count_keys, merge_parts, write_unseeing


@triton.jit
def stream_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    len_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_seqs,
    window,
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
    stride_output_row,
    stride_output_head,
    MAX_SEQS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program's share of all tiles. Grid: (any number of programs,); MAX_SEQS: a power of 2, at least num_seqs.

    Shapes as in `decode`; last strides are 1; part_ptr: fp32 [programs, 2, GROUP, HEAD_DIM]; part_lse_ptr: fp32
    [programs, 2, GROUP]. Of the two parts the first goes on from the program before, the second begins its head.
    """
    program = tl.program_id(0)
    index = tl.arange(0, MAX_SEQS)
    lengths = tl.load(len_ptr + index, mask=index < num_seqs, other=0)
    ends = tl.cumsum(tl.cdiv(count_keys(lengths, window, HAS_WINDOW), TILE_N), 0) * NUM_KV_HEADS
    num_tiles = tl.max(ends, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(0))
    tile = program * share
    end = tl.minimum(tile + share, num_tiles)
    packed = tl.arange(0, TILE_M)
    is_head = packed < GROUP
    element = tl.arange(0, HEAD_DIM)
    while tile < end:
        is_before = ends <= tile
        seq = tl.sum(is_before.to(tl.int32), 0)
        seq_len = tl.load(len_ptr + seq)
        num_keys = count_keys(seq_len, window, HAS_WINDOW)
        head_tiles = tl.cdiv(num_keys, TILE_N)
        tile_of_seq = tile - tl.max(tl.where(is_before, ends, 0), 0)
        kv_head = tile_of_seq // head_tiles
        first = tile_of_seq - kv_head * head_tiles
        last = tl.minimum(first + end - tile, head_tiles)
        begin = seq_len - num_keys
        output, lse = attend_span(
            seq, kv_head, begin + first * TILE_N, tl.minimum(begin + last * TILE_N, seq_len), first == 0,
            query_ptr, k_ptr, v_ptr, table_ptr, sink_ptr, scale, softcap, v_scale, stride_query_row, stride_query_head,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
            GROUP, HEAD_DIM, BLOCK_SIZE, TILE_M, TILE_N, STAGES, HAS_SOFTCAP, HAS_SINKS, INTERPRETED,
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
def stream_merge_kernel(
    len_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_seqs,
    num_programs,
    window,
    stride_output_row,
    stride_output_head,
    MAX_SEQS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge one head's parts, if `stream_kernel` split it. Grid: (num_seqs, num_heads); the rest as there."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.arange(0, MAX_SEQS)
    lengths = tl.load(len_ptr + index, mask=index < num_seqs, other=0)
    tiles = tl.cdiv(count_keys(lengths, window, HAS_WINDOW), TILE_N)
    share = tl.cdiv(tl.sum(tiles, 0) * NUM_KV_HEADS, num_programs)
    head_tiles = tl.sum(tl.where(index == seq, tiles, 0), 0)
    begin = tl.sum(tl.where(index < seq, tiles, 0), 0) * NUM_KV_HEADS + head // GROUP * head_tiles
    output_at = output_ptr + seq.to(tl.int64) * stride_output_row + head * stride_output_head
    lse_at = lse_ptr + seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    if head_tiles == 0:
        write_unseeing(output_at, lse_at, sink_ptr, head, HEAD_DIM, HAS_SINKS)
    else:
        first = begin // share
        num_parts = (begin + head_tiles - 1) // share - first + 1
        if num_parts > 1:
            output, lse = merge_parts(
                part_ptr, part_lse_ptr, 2 * first, num_parts, head % GROUP, 2, GROUP, HEAD_DIM
            )  # fmt: skip
            tl.store(output_at + tl.arange(0, HEAD_DIM), output.to(output_ptr.dtype.element_ty))
            tl.store(lse_at + tl.arange(0, 1), lse)


@triton.jit
def split_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    len_ptr,
    sink_ptr,
    part_ptr,
    part_lse_ptr,
    window,
    split_keys,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One split of one sequence. Grid: (num_seqs, num_kv_heads, the most splits that a sequence can have).

    Shapes as in `decode`; last strides are 1; part_ptr: fp32 [*grid, GROUP, HEAD_DIM]; part_lse_ptr: fp32 [*grid,
    GROUP].
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(len_ptr + seq)
    start = seq_len - count_keys(seq_len, window, HAS_WINDOW) + split * split_keys
    if start < seq_len:
        output, lse = attend_span(
            seq, kv_head, start, tl.minimum(start + split_keys, seq_len), split == 0,
            query_ptr, k_ptr, v_ptr, table_ptr, sink_ptr, scale, softcap, v_scale, stride_query_row, stride_query_head,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
            GROUP, HEAD_DIM, BLOCK_SIZE, TILE_M, TILE_N, STAGES, HAS_SOFTCAP, HAS_SINKS, INTERPRETED,
        )  # fmt: skip
        packed = tl.arange(0, TILE_M)
        element = tl.arange(0, HEAD_DIM)
        part = (seq.to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(2) + split
        row = part * GROUP + packed
        tl.store(part_ptr + row[:, None] * HEAD_DIM + element[None, :], output, mask=(packed < GROUP)[:, None])
        tl.store(part_lse_ptr + row, lse, mask=packed < GROUP)


@triton.jit
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
):
    """Merge one head's splits, always in the same order. Grid: (num_seqs, num_heads); the rest as in `split_kernel`."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    num_splits = tl.cdiv(count_keys(tl.load(len_ptr + seq), window, HAS_WINDOW), split_keys)
    output_at = output_ptr + seq.to(tl.int64) * stride_output_row + head * stride_output_head
    lse_at = lse_ptr + seq.to(tl.int64) * num_heads + head
    if num_splits == 0:
        write_unseeing(output_at, lse_at, sink_ptr, head, HEAD_DIM, HAS_SINKS)
    else:
        first = (seq.to(tl.int64) * (num_heads // GROUP) + head // GROUP) * max_splits
        output, lse = merge_parts(part_ptr, part_lse_ptr, first, num_splits, head % GROUP, 1, GROUP, HEAD_DIM)
        tl.store(output_at + tl.arange(0, HEAD_DIM), output.to(output_ptr.dtype.element_ty))
        tl.store(lse_at + tl.arange(0, 1), lse)
