"""The Triton kernels of `extend`: causal attention of ragged rows, divided evenly by tiles of keys.

A unit of `shares` is a tile of rows of one sequence: `tiles.find_segment` finds the sequence. A unit's keys are read in
up to three parts: those that a window hides from some of its rows, those that all of its rows see, and those around the
rows' own positions. Only the first and last part need masks.

Padding (rows that belong to no sequence) is treated as one more sequence, which sees nothing.
"""

import triton
import triton.language as tl

from kvblocks.kernels.device.shares import (
    SPREAD,
    find_cut,
    find_heads,
    find_tiles,
    merge_rows,
)
from kvblocks.kernels.device.tiles import (
    LOG2_E,
    attend_pages,
    begin_rows,
    find_segment,
    find_segments,
    finish_rows,
    head_scale,
    narrow_rows,
)


@triton.jit
def first_key(position, window, TILE_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key that a row at `position` sees, rounded down to a multiple of TILE_N."""
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // TILE_N * TILE_N
    return first


@triton.jit
def find_rows(start_ptr, len_ptr, unit, num_rows, num_seqs, TILE_Q: tl.constexpr):
    """Find a tile's sequence. Returns its index, its first row in the batch and its number of rows; then the tile's
    first row, counted within the sequence; then the tokens in context before the sequence's rows.
    """
    seq = find_segment(start_ptr, unit, num_seqs + 1, TILE_Q)
    is_seq = seq < num_seqs
    seq_start = tl.load(start_ptr + seq)
    seq_rows = tl.load(start_ptr + seq + 1, mask=is_seq, other=num_rows) - seq_start
    first = (unit - (seq_start // TILE_Q + seq)) * TILE_Q
    return seq, seq_start, seq_rows, first, tl.load(len_ptr + seq, mask=is_seq, other=0) - seq_rows


@triton.jit
def attend_causal(
    query,
    output,
    odd,
    row_max,
    row_sum,
    position,
    first_position,
    last_position,
    start,
    stop,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend causally to the keys from `start` to `stop`, where `start` is a multiple of TILE_N.

    position: int32 [TILE_M], with `first_position` and `last_position` as its minimum and maximum. A row at a position
    below 0 sees nothing. The other arguments and the result are as in `attend_pages`.
    """
    full_stop = tl.minimum(tl.maximum(tl.maximum(first_position + 1, 0) // TILE_N * TILE_N, start), stop)
    if HAS_WINDOW:
        full_start = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_N) * TILE_N
        full_start = tl.minimum(tl.maximum(full_start, start), full_stop)
        output, odd, row_max, row_sum = attend_pages(
            query, output, odd, row_max, row_sum, position, start, full_start, table_ptr, k_ptr, v_ptr,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip
        start = full_start
    output, odd, row_max, row_sum = attend_pages(
        query, output, odd, row_max, row_sum, position, start, full_stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    output, odd, row_max, row_sum = attend_pages(
        query, output, odd, row_max, row_sum, position, full_stop, stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return output, odd, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_units", "window"],
    do_not_specialize_on_alignment=["start_ptr", "len_ptr", "end_ptr"],
)
def extend_ends_kernel(
    start_ptr,
    len_ptr,
    end_ptr,
    num_rows,
    num_seqs,
    num_units,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_COST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute where each unit's tiles end in the line of all tiles. Grid: (1,). TILE_N may be that of `pieces`.

    HEAD_COST: the empty tiles at the end of each head of a unit, which stand for what a head costs in addition to its
    tiles. So a program whose heads have few keys gets fewer heads. A unit whose rows see nothing has one more empty
    tile.
    """
    total = 0
    for begin in tl.range(0, num_units, CHUNK):
        unit = begin + tl.arange(0, CHUNK)
        seq = find_segments(start_ptr, unit, num_seqs + 1, TILE_Q)
        is_seq = seq < num_seqs
        seq_start = tl.load(start_ptr + seq)
        seq_rows = tl.load(start_ptr + seq + 1, mask=is_seq, other=num_rows) - seq_start
        first = (unit - (seq_start // TILE_Q + seq)) * TILE_Q
        before = tl.load(len_ptr + seq, mask=is_seq, other=0) - seq_rows
        stop = tl.maximum(before + tl.minimum(first + TILE_Q, seq_rows), 0)
        keys = stop - first_key(before + first, window, TILE_N, HAS_WINDOW)
        tiles = tl.maximum(tl.cdiv(keys, TILE_N), 1) + HEAD_COST
        tiles = tl.where((first < seq_rows) & (unit < num_units), tiles * NUM_KV_HEADS, 0)
        tl.store(end_ptr + unit, total + tl.cumsum(tiles, 0), mask=unit < num_units)
        total += tl.sum(tiles, 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_units", "window", "stride_table"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "start_ptr",
        "len_ptr",
        "end_ptr",
        "sink_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def extend_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    end_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    num_seqs,
    num_units,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    NARROWED: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one program's share of all tiles. Grid: (any number of programs,).

    The programs of a prompt's last rows, which have the most keys, begin first.

    Shapes as in `extend`; last strides are 1; output_ptr and lse_ptr are contiguous; part_ptr: fp32 [programs, 2,
    TILE_M, HEAD_DIM]; part_lse_ptr: fp32 [programs, 2, TILE_M].
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    begin, end, first_head, stop_head = find_heads(end_ptr, num_units, program, tl.num_programs(0), NUM_KV_HEADS)
    packed = tl.arange(0, TILE_M)
    element = tl.arange(0, HEAD_DIM)
    # Values that the compiler moves out of this loop would take registers throughout the inner loop, over keys.
    for index in tl.range(first_head, stop_head, num_stages=1, disable_licm=True):
        unit, kv_head, first_tile, last_tile, head_tiles = find_tiles(end_ptr, index, begin, end, NUM_KV_HEADS)
        seq, seq_start, seq_rows, first, before = find_rows(start_ptr, len_ptr, unit, num_rows, num_seqs, TILE_Q)
        row = first + packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        is_row = (packed < TILE_Q * GROUP) & (row < seq_rows)
        at_row = (seq_start + row).to(tl.int64)
        query_at = at_row * stride_query_row + head.to(tl.int64) * stride_query_head
        query = tl.load(query_ptr + query_at[:, None] + element[None, :], mask=is_row[:, None], other=0.0)
        query, row_scale = narrow_rows(query, scale * head_scale(k_scale_ptr, kv_head), NARROWED)
        output, odd, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM, PAIRED)
        if HAS_SINKS:
            sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            row_max = tl.where(first_tile == 0, sink, row_max)
            row_sum = tl.where(first_tile == 0, 1.0, row_sum)

        stop = tl.maximum(before + tl.minimum(first + TILE_Q, seq_rows), 0)
        start = first_key(before + first, window, TILE_N, HAS_WINDOW)
        stop = tl.minimum(start + last_tile * TILE_N, stop)
        start += first_tile * TILE_N
        output, odd, row_max, row_sum = attend_causal(
            query, output, odd, row_max, row_sum, before + row, before + first,
            before + tl.minimum(first + TILE_Q, seq_rows) - 1, start, stop,
            table_ptr + seq.to(tl.int64) * stride_table,
            k_ptr + kv_head.to(tl.int64) * stride_k_head, v_ptr + kv_head.to(tl.int64) * stride_v_head,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, row_scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, INTERPRETED,
        )  # fmt: skip
        output, lse = finish_rows(output, odd, row_max, row_sum, head_scale(v_scale_ptr, kv_head))
        if (first_tile == 0) & (last_tile == head_tiles):
            head_at = at_row * NUM_HEADS + head
            output_at = output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :]
            tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_row[:, None])
            tl.store(lse_ptr + head_at, lse, mask=is_row)
        else:
            part_row = (2 * program + (first_tile == 0).to(tl.int32)) * TILE_M + packed
            tl.store(part_ptr + part_row[:, None] * HEAD_DIM + element[None, :], output, mask=is_row[:, None])
            tl.store(part_lse_ptr + part_row, lse, mask=is_row)


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_units", "num_programs"],
    do_not_specialize_on_alignment=["start_ptr", "len_ptr", "end_ptr"],
)
def extend_merge_kernel(
    start_ptr,
    len_ptr,
    end_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    num_seqs,
    num_units,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of a unit's head, ROWS rows at a time, if a share begins within it.

    Grid: (num_programs - 1, SPREAD); the rest as in `extend_kernel`.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    unit, kv_head, first_part, num_parts = find_cut(
        end_ptr, num_units, num_programs, tl.program_id(0) + 1, NUM_KV_HEADS
    )  # fmt: skip
    _, seq_start, seq_rows, first, _ = find_rows(start_ptr, len_ptr, unit, num_rows, num_seqs, TILE_Q)
    if num_parts == 0:
        return
    num_packed = tl.minimum(seq_rows - first, TILE_Q) * GROUP
    for begin in tl.range(tl.program_id(1) * ROWS, num_packed, SPREAD * ROWS):
        packed = begin + tl.arange(0, ROWS)
        is_row = packed < num_packed
        output, lse = merge_rows(
            part_ptr, part_lse_ptr, first_part, num_parts, packed, is_row, 2, TILE_M, ROWS, PARTS, HEAD_DIM
        )  # fmt: skip
        head_at = (seq_start + first + packed // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP)
        head_at += kv_head * GROUP + packed % GROUP
        output_at = output_ptr + (head_at * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_row[:, None])
        tl.store(lse_ptr + head_at, lse, mask=is_row)
