"""Attention of decoding requests over the blocks that they share: each shared run is read once for all of its group.

The idea is from Hydragen and from FlashInfer's cascade. Requests with a common prefix hold the same physical blocks in
front, so that the queries of a group, with all their heads, make one matrix that multiplies one copy of K: a matrix
product of 128 rows instead of many of 4. What comes out is a partial result with its lse; `cascade.cascade_decode`
merges it with what each request attends to alone.

Groups nest: 64 requests share a system prompt, eight of them a document after it. A request is then in one group of
each level, and gets one partial result from each. All groups of all levels go in one launch. As a few groups would
leave most of a GPU idle, their runs are split, and a partial result is one split's; how many there are follows from
shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.layout import AttentionOptions, check_attention, is_interpreted
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import PREFIX_DECODE, find
from kvblocks.kernels.tiles import attend_pages, begin_rows, find_segment, finish_rows, tile_constants, tile_rows

_INTERPRETED = is_interpreted()
_INTERPRETED_SPLITS = 2


@triton.jit
def attend_run(
    query,
    output,
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
    """Attention of rows to all positions from `start` to `stop`; the rest and what is returned as in `attend_pages`."""
    full_stop = start + (stop - start) // TILE_N * TILE_N
    output, row_max, row_sum = attend_pages(
        query, output, row_max, row_sum, position, start, full_stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    output, row_max, row_sum = attend_pages(
        query, output, row_max, row_sum, position, full_stop, stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, 0,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=False,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return output, row_max, row_sum


@triton.jit(do_not_specialize=["num_groups", "num_rows", "num_splits"])
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
    output_ptr,
    lse_ptr,
    num_groups,
    num_rows,
    num_splits,
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
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of a group's members, one head of K and V, and one split of the group's run.

    Grid: (num_members // (TILE_M // GROUP) + num_groups, num_kv_heads, num_splits): programs that read the same keys
    are next to each other. output: fp32 [num_levels, num_splits, num_rows, NUM_HEADS, HEAD_DIM]; lse: fp32
    [num_levels, num_splits, num_rows, NUM_HEADS]; both contiguous. The rest as in `prefix_decode`.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group = find_segment(start_ptr, tile, num_groups, TILE_Q)
    group_start = tl.load(start_ptr + group)
    num_members = tl.load(start_ptr + group + 1) - group_start
    first = (tile - (group_start // TILE_Q + group)) * TILE_Q
    if first >= num_members:
        return
    run_start = tl.load(run_start_ptr + group) * BLOCK_SIZE
    run_stop = tl.load(run_stop_ptr + group) * BLOCK_SIZE
    split_keys = tl.cdiv(tl.cdiv(run_stop - run_start, TILE_N), num_splits) * TILE_N
    start = run_start + split * split_keys
    stop = tl.minimum(start + split_keys, run_stop)
    if start >= stop:
        return

    packed = tl.arange(0, TILE_M)
    element = tl.arange(0, HEAD_DIM)
    member = first + packed // GROUP
    is_row = (packed < TILE_Q * GROUP) & (member < num_members)
    row = tl.load(members_ptr + group_start + member, mask=is_row, other=0).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    query_at = query_ptr + (row * stride_query_row + head.to(tl.int64) * stride_query_head)[:, None] + element[None, :]
    query = tl.load(query_at, mask=is_row[:, None], other=0.0)
    output, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM)
    position = tl.full([TILE_M], 0, tl.int32) + stop  # whatever it is, it lies behind the run
    output, row_max, row_sum = attend_run(
        query, output, row_max, row_sum, position, start, stop,
        table_ptr + tl.load(members_ptr + group_start).to(tl.int64) * stride_table,
        k_ptr + kv_head.to(tl.int64) * stride_k_head, v_ptr + kv_head.to(tl.int64) * stride_v_head,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, HAS_SOFTCAP, INTERPRETED,
    )  # fmt: skip
    output, lse = finish_rows(output * v_scale, row_max, row_sum)
    state = tl.load(level_ptr + group) * num_splits + split
    at_row = (state.to(tl.int64) * num_rows + row) * NUM_HEADS + head
    tl.store(output_ptr + (at_row * HEAD_DIM)[:, None] + element[None, :], output, mask=is_row[:, None])
    tl.store(lse_ptr + at_row, lse, mask=is_row)


def prefix_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    runs: SharedRuns,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of single queries over the runs of blocks that they share, and over nothing else.

    query: [num_rows, num_heads, head_dim] in fp32, fp16 or bf16, one row a request; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32 [num_rows,
    max_blocks]; `runs`: see there. A group's blocks are read from its first member's table. `num_splits` parts are made
    of every run; by default as many as fill the GPU.

    Returns partial results, fp32 [num_levels * num_splits, num_rows, num_heads, head_dim], and their lse (natural
    logarithm), fp32 [num_levels * num_splits, num_rows, num_heads]. Where a row is in no group of a level, or the run
    is too short for a split, the lse is -inf and the partial result is undefined. Raises KernelArgumentError. Changes
    nothing, and never waits for the device.
    """
    options = AttentionOptions(scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale)
    shape = check_attention(query, key_cache, value_cache, block_tables, runs.num_shared, options)
    runs.check(shape)
    # With queries in fp32 the tiles are computed in fp32, whatever K and V are stored as.
    element_bytes = 4 if query.dtype == torch.float32 else key_cache.element_size()
    launch = find(PREFIX_DECODE, query.device, shape.cache.head_dim, element_bytes)
    num_members, num_kv_heads = runs.members.shape[0], shape.cache.num_kv_heads
    tile_members = tile_rows(shape, launch) // shape.group_size
    if num_splits is None:
        num_tiles = max(triton.cdiv(num_members, tile_members), runs.num_groups)
        num_splits = choose_splits(num_tiles * num_kv_heads, query.device)
    states = (runs.num_levels * num_splits, shape.num_rows, shape.num_heads)
    output = torch.empty((*states, shape.cache.head_dim), dtype=torch.float32, device=query.device)
    lse = torch.full(states, -torch.inf, dtype=torch.float32, device=query.device)
    if runs.num_groups > 0:
        prefix_kernel[num_members // tile_members + runs.num_groups, num_kv_heads, num_splits](
            *(query, key_cache, value_cache, block_tables, runs.members, runs.group_start),
            *(runs.run_start, runs.run_stop, runs.level, output, lse),
            *(runs.num_groups, shape.num_rows, num_splits, scale * k_scale, softcap or 0.0, v_scale),
            *(*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0)),
            **tile_constants(shape, launch),
            NUM_HEADS=shape.num_heads,
            HAS_SOFTCAP=softcap is not None,
            INTERPRETED=_INTERPRETED,
        )
    return output, lse


def choose_splits(num_programs: int, device: torch.device) -> int:
    """Into how many parts to split every run, so that `num_programs` for each make about one wave on the GPU."""
    if device.type != "cuda":
        return _INTERPRETED_SPLITS
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, num_sms // max(1, num_programs))
