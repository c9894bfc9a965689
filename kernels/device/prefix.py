"""The Triton functions of `prefix_decode`: attention of cohorts of single queries over the runs that they share.

A unit of `shares` is a tile of a cohort's members: `tiles.find_segment` finds the cohort.
"""

import triton
import triton.language as tl

from kvblocks.kernels.device.shares import find_cut, find_heads, find_tiles, merge_rows
from kvblocks.kernels.device.tiles import (
    attend_pages,
    begin_rows,
    find_segment,
    find_segments,
    finish_rows,
    head_scale,
    narrow_rows,
)


@triton.jit
def find_members(start_ptr, unit, num_cohorts, TILE_Q: tl.constexpr):
    """A tile's cohort (index, first member, number of members), and the tile's first member within the cohort."""
    cohort = find_segment(start_ptr, unit, num_cohorts, TILE_Q)
    cohort_start = tl.load(start_ptr + cohort)
    num_members = tl.load(start_ptr + cohort + 1) - cohort_start
    return cohort, cohort_start, num_members, (unit - (cohort_start // TILE_Q + cohort)) * TILE_Q


@triton.jit
def attend_run(
    query,
    output,
    odd,
    row_max,
    row_sum,
    position,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend to all positions from `start` to `stop`. The other arguments and the result are as in `attend_pages`."""
    full_stop = start + (stop - start) // TILE_N * TILE_N
    output, odd, row_max, row_sum = attend_pages(
        query, output, odd, row_max, row_sum, position, start, full_stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    output, odd, row_max, row_sum = attend_pages(
        query, output, odd, row_max, row_sum, position, full_stop, stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return output, odd, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_cohorts", "num_units"],
    do_not_specialize_on_alignment=["start_ptr", "run_start_ptr", "run_stop_ptr", "end_ptr"],
)
def prefix_ends_kernel(
    start_ptr,
    run_start_ptr,
    run_stop_ptr,
    end_ptr,
    num_cohorts,
    num_units,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute where each unit's tiles end in the line of all tiles. Grid: (1,). An empty cohort has no unit."""
    total = 0
    for begin in tl.range(0, num_units, CHUNK):
        unit = begin + tl.arange(0, CHUNK)
        cohort = find_segments(start_ptr, unit, num_cohorts, TILE_Q)
        cohort_start = tl.load(start_ptr + cohort)
        num_members = tl.load(start_ptr + cohort + 1) - cohort_start
        first = (unit - (cohort_start // TILE_Q + cohort)) * TILE_Q
        keys = (tl.load(run_stop_ptr + cohort) - tl.load(run_start_ptr + cohort)) * BLOCK_SIZE
        tiles = tl.cdiv(keys, TILE_N) * NUM_KV_HEADS
        tiles = tl.where((first < num_members) & (unit < num_units), tiles, 0)
        tl.store(end_ptr + unit, total + tl.cumsum(tiles, 0), mask=unit < num_units)
        total += tl.sum(tiles, 0)


@triton.jit(
    do_not_specialize=["num_cohorts", "num_units", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=[
        *("table_ptr", "members_ptr", "start_ptr", "run_start_ptr", "run_stop_ptr", "level_ptr", "end_ptr"),
        *("k_scale_ptr", "v_scale_ptr"),
    ],
)
def prefix_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    members_ptr,
    start_ptr,
    run_start_ptr,
    run_stop_ptr,
    level_ptr,
    end_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_cohorts,
    num_units,
    num_rows,
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
    INTERPRETED: tl.constexpr,
):
    """Compute one program's share of all tiles. Grid: (any number of programs,).

    output: fp32 [num_levels, num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM]; lse: fp32 [num_levels, num_rows, NUM_KV_HEADS *
    GROUP]; both contiguous. part_ptr: fp32 [programs, 2, TILE_M, HEAD_DIM]; part_lse_ptr: fp32 [programs, 2, TILE_M].
    The other arguments are as in `attend_runs`.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    program = tl.program_id(0)
    begin, end, first_head, stop_head = find_heads(end_ptr, num_units, program, tl.num_programs(0), NUM_KV_HEADS)
    packed = tl.arange(0, TILE_M)
    element = tl.arange(0, HEAD_DIM)
    # Values that the compiler moves out of this loop would take registers throughout the inner loop, over keys.
    for index in tl.range(first_head, stop_head, num_stages=1, disable_licm=True):
        unit, kv_head, first_tile, last_tile, head_tiles = find_tiles(end_ptr, index, begin, end, NUM_KV_HEADS)
        cohort, cohort_start, num_members, first = find_members(start_ptr, unit, num_cohorts, TILE_Q)
        member = first + packed // GROUP
        is_row = (packed < TILE_Q * GROUP) & (member < num_members)
        row = tl.load(members_ptr + cohort_start + member, mask=is_row, other=0).to(tl.int64)
        head = kv_head * GROUP + packed % GROUP
        query_at = row * stride_query_row + head.to(tl.int64) * stride_query_head
        query = tl.load(query_ptr + query_at[:, None] + element[None, :], mask=is_row[:, None], other=0.0)
        query, row_scale = narrow_rows(query, scale * head_scale(k_scale_ptr, kv_head), NARROWED)
        output, odd, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM, PAIRED)
        run_start = tl.load(run_start_ptr + cohort) * BLOCK_SIZE
        start = run_start + first_tile * TILE_N
        stop = tl.minimum(run_start + last_tile * TILE_N, tl.load(run_stop_ptr + cohort) * BLOCK_SIZE)
        position = packed * 0 + stop  # any position behind the run would do
        output, odd, row_max, row_sum = attend_run(
            query, output, odd, row_max, row_sum, position, start, stop,
            table_ptr + tl.load(members_ptr + cohort_start).to(tl.int64) * stride_table,
            k_ptr + kv_head.to(tl.int64) * stride_k_head, v_ptr + kv_head.to(tl.int64) * stride_v_head,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, row_scale, softcap,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, HAS_SOFTCAP, INTERPRETED,
        )  # fmt: skip
        output, lse = finish_rows(output, odd, row_max, row_sum, head_scale(v_scale_ptr, kv_head))
        if (first_tile == 0) & (last_tile == head_tiles):
            level = tl.load(level_ptr + cohort).to(tl.int64)
            head_at = (level * num_rows + row) * (NUM_KV_HEADS * GROUP) + head
            tl.store(output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :], output, mask=is_row[:, None])
            tl.store(lse_ptr + head_at, lse, mask=is_row)
        else:
            part_row = (2 * program + (first_tile == 0).to(tl.int32)) * TILE_M + packed
            tl.store(part_ptr + part_row[:, None] * HEAD_DIM + element[None, :], output, mask=is_row[:, None])
            tl.store(part_lse_ptr + part_row, lse, mask=is_row)


@triton.jit
def merge_cut_rows(
    cut,
    packed,
    members_ptr,
    start_ptr,
    level_ptr,
    end_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_cohorts,
    num_units,
    num_rows,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of rows of a unit's head, if the share of program `cut` begins within. packed: int32 [ROWS]."""
    TILE_Q: tl.constexpr = TILE_M // GROUP
    unit, kv_head, first_part, num_parts = find_cut(end_ptr, num_units, num_programs, cut, NUM_KV_HEADS)
    if num_parts > 0:
        cohort, cohort_start, num_members, first = find_members(start_ptr, unit, num_cohorts, TILE_Q)
        member = first + packed // GROUP
        is_row = (packed < TILE_Q * GROUP) & (member < num_members)
        row = tl.load(members_ptr + cohort_start + member, mask=is_row, other=0).to(tl.int64)
        output, lse = merge_rows(
            part_ptr, part_lse_ptr, first_part, num_parts, packed, is_row, 2, TILE_M, ROWS, PARTS, HEAD_DIM
        )  # fmt: skip
        level = tl.load(level_ptr + cohort).to(tl.int64)
        head_at = (level * num_rows + row) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
        element = tl.arange(0, HEAD_DIM)
        tl.store(output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :], output, mask=is_row[:, None])
        tl.store(lse_ptr + head_at, lse, mask=is_row)
