"""Decoding for requests that share blocks: a pass over the shared blocks, a pass over each request's own, and a merge.

The result is that of `decode`. A cascade pays off if many requests share many blocks: `decode` reads shared blocks once
for each request, a cascade reads them once for each cohort. The last merge takes the partial results of all levels in
one launch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.decode import attend_stream, decode, prepare_stream, share_decodes
from kvblocks.kernels.device.decode import merge_cut_head
from kvblocks.kernels.device.prefix import merge_cut_rows
from kvblocks.kernels.device.tiles import LN_2, LOG2_E
from kvblocks.kernels.launching import Shares
from kvblocks.kernels.layout import (
    AttentionOptions,
    check_attention,
    check_devices,
    check_dtype,
    check_indices,
    check_last_stride,
    check_shape,
)
from kvblocks.kernels.prefix_decode import attend_runs, new_lse, share_runs
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import Launch

_TILE_HEADS = 4
_LEVELS = 4
"""How many levels' partial results are read at once. More levels are rare."""


@dataclass(frozen=True)
class CascadeShares:
    """How `cascade_decode` divides its work on the runs and on each request's own blocks; see `share_cascade`.

    lse: room for the lse of the runs, fp32 [num_levels, num_rows, num_heads]; -inf for rows that are in no cohort of a
    level.
    """

    runs: Shares
    own: Shares
    lse: Tensor


@dataclass(frozen=True)
class OwnParts:
    """Each request's blocks after those that it shares.

    block_tables: int32 [num_rows, max_blocks]; seq_lens: int32 [num_rows].
    """

    block_tables: Tensor
    seq_lens: Tensor


@triton.jit(
    do_not_specialize=["stride_table", "stride_own_table"],
    do_not_specialize_on_alignment=["table_ptr", "len_ptr", "num_shared_ptr", "own_table_ptr", "own_len_ptr"],
)
def own_parts_kernel(
    table_ptr,
    len_ptr,
    num_shared_ptr,
    own_table_ptr,
    own_len_ptr,
    stride_table,
    stride_own_table,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Move one row's blocks from `num_shared` on to the front. Grid: (num_rows,). Shapes as in `own_parts`."""
    row = tl.program_id(0).to(tl.int64)
    num_shared = tl.load(num_shared_ptr + row)
    seq_len = tl.maximum(tl.load(len_ptr + row) - num_shared * BLOCK_SIZE, 0)
    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    table_ptr += row * stride_table + num_shared
    own_table_ptr += row * stride_own_table
    for first in tl.range(0, num_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        block = tl.load(table_ptr + column, mask=column < num_blocks, other=0)
        tl.store(own_table_ptr + column, block, mask=column < num_blocks)
    tl.store(own_len_ptr + row, seq_len)


@triton.jit(
    do_not_specialize=["num_cohorts", "num_units", "num_rows", "run_programs", "num_seqs", "own_programs"],
    do_not_specialize_on_alignment=["members_ptr", "start_ptr", "level_ptr", "run_end_ptr", "own_end_ptr"],
)
def merge_parts_kernel(
    members_ptr,
    start_ptr,
    level_ptr,
    run_end_ptr,
    run_output_ptr,
    run_lse_ptr,
    run_part_ptr,
    run_part_lse_ptr,
    num_cohorts,
    num_units,
    num_rows,
    run_programs,
    own_end_ptr,
    own_output_ptr,
    own_lse_ptr,
    own_part_ptr,
    own_part_lse_ptr,
    num_seqs,
    own_programs,
    stride_own_row,
    stride_own_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    ROWS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    OWN_PARTS: tl.constexpr,
):
    """Merge what shares have split: the first programs merge runs, the others do what `stream_merge_kernel` does.

    Each of the first programs merges ROWS rows of a unit's head, if a share begins within it (`merge_cut_rows`).
    Grid: ((run_programs - 1) * TILE_M // ROWS + (own_programs - 1) * GROUP,).
    """
    program = tl.program_id(0)
    num_in_front = (run_programs - 1) * (TILE_M // ROWS)
    if program < num_in_front:
        merge_cut_rows(
            program // (TILE_M // ROWS) + 1, program % (TILE_M // ROWS) * ROWS + tl.arange(0, ROWS),
            members_ptr, start_ptr, level_ptr, run_end_ptr, run_output_ptr, run_lse_ptr, run_part_ptr, run_part_lse_ptr,
            num_cohorts, num_units, num_rows, run_programs, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_M, ROWS, RUN_PARTS,
        )  # fmt: skip
    else:
        own = program - num_in_front
        merge_cut_head(
            own // GROUP + 1, own % GROUP + tl.arange(0, 1),
            own_end_ptr, own_output_ptr, own_lse_ptr, own_part_ptr, own_part_lse_ptr,
            num_seqs, own_programs, stride_own_row, stride_own_head, NUM_KV_HEADS, GROUP, HEAD_DIM, OWN_PARTS,
            PDL=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_levels", "num_rows"], do_not_specialize_on_alignment=["num_shared_ptr"])
def merge_shared_kernel(
    own_ptr,
    own_lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_shared_ptr,
    output_ptr,
    lse_ptr,
    num_levels,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Merge TILE_HEADS heads of one row. Grid: (num_rows, ceil(num_heads / TILE_HEADS)); everything is contiguous.

    own, output: [num_rows, num_heads, HEAD_DIM]; part: fp32 [num_levels, num_rows, num_heads, HEAD_DIM], of which
    LEVELS levels are read at once, where the lse is above -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    element = tl.arange(0, HEAD_DIM)
    is_head = head < num_heads
    at = row * num_heads + head
    top = tl.load(own_lse_ptr + at, mask=is_head, other=-float("inf")) * LOG2_E
    total = tl.where(top > -float("inf"), 1.0, 0.0)
    output_at = at[:, None] * HEAD_DIM + element[None, :]
    output = tl.load(own_ptr + output_at, mask=is_head[:, None], other=0.0).to(tl.float32)
    if tl.load(num_shared_ptr + row) == 0:
        num_levels = 0
    for first in tl.range(0, num_levels, LEVELS):
        level = first + tl.arange(0, LEVELS)
        part_at = (level[:, None] * num_rows + row) * num_heads + head[None, :]
        is_there = (level < num_levels)[:, None] & is_head[None, :]
        lse = tl.load(part_lse_ptr + part_at, mask=is_there, other=-float("inf")) * LOG2_E
        rows_at = part_ptr + part_at[:, :, None] * HEAD_DIM + element[None, None, :]
        rows = tl.load(rows_at, mask=(lse > -float("inf"))[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        kept = tl.exp2(top - base)
        weights = tl.exp2(lse - base[None, :])
        output = output * kept[:, None] + tl.sum(rows * weights[:, :, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = new_top
    has_seen = total > 0
    divisor = tl.where(has_seen, total, 1.0)
    output = output / divisor[:, None]
    lse = tl.where(has_seen, (top + tl.log2(divisor)) * LN_2, -float("inf"))
    tl.store(output_ptr + output_at, output.to(output_ptr.dtype.element_ty), mask=is_head[:, None])
    tl.store(lse_ptr + at, lse, mask=is_head)


def own_parts(block_tables: Tensor, seq_lens: Tensor, runs: SharedRuns, block_size: int) -> OwnParts:
    """Return each request's blocks and tokens after the runs that it shares.

    block_tables: int32 [num_rows, max_blocks]; seq_lens: int32 [num_rows], each at least as long as the row's runs.
    The result is the same in every layer: make it once per step. One launch. Raises KernelArgumentError. Changes
    nothing, and never waits for the device.
    """
    num_rows = block_tables.shape[0]
    check_dtype("block_tables", block_tables, (torch.int32,))
    check_last_stride("block_tables", block_tables)
    check_indices("seq_lens", seq_lens, num_rows)
    check_indices("runs.num_shared", runs.num_shared, num_rows)
    check_devices(block_tables=block_tables, seq_lens=seq_lens, num_shared=runs.num_shared)
    own = OwnParts(
        torch.empty(block_tables.shape, dtype=torch.int32, device=block_tables.device), torch.empty_like(seq_lens)
    )
    if num_rows > 0:
        own_parts_kernel[(num_rows,)](
            *(block_tables, seq_lens, runs.num_shared, own.block_tables, own.seq_lens),
            *(block_tables.stride(0), own.block_tables.stride(0)),
            BLOCK_SIZE=block_size,
            CHUNK=256,
        )
    return own


def share_cascade(
    query: Tensor, key_cache: Tensor, own: OwnParts, runs: SharedRuns, *, launch: Launch | None = None
) -> CascadeShares:
    """Plan how `cascade_decode` divides its work, for all layers of a step. At least one cohort; shapes as there.

    `cascade_decode` makes the shares itself if it gets none. launch: used for the runs instead of the table's entry.
    Three launches: two of one program, and one that fills a tensor. Changes nothing, and never waits for the device.
    """
    of_runs = share_runs(query, key_cache, runs, launch=launch)
    return CascadeShares(of_runs, share_decodes(query, key_cache, own.seq_lens), new_lse(query, runs))


def cascade_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    own: OwnParts,
    block_tables: Tensor,
    runs: SharedRuns,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    shares: CascadeShares | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `decode` does, for a batch in which requests share runs of blocks.

    query: [num_rows, num_heads, head_dim], one row a request; key_cache, value_cache: as in `decode`; own:
    `own_parts(block_tables, seq_lens, runs, block_size)`; block_tables: int32 [num_rows, max_blocks]; runs: see
    `SharedRuns`. There is no `window` parameter: with windows, only pass cohorts of rows that still see their whole
    shared run. shares: the result of `share_cascade`, which all layers of a step can use; the call changes its `lse`.

    Returns the output, [num_rows, num_heads, head_dim] in the query's dtype, and its lse, fp32 [num_rows, num_heads]:
    the natural logarithm of the softmax's denominator. Four launches with `shares`: the runs, each request's own
    blocks, a merge of what either has split, and the merge of both. Raises KernelArgumentError. Changes nothing else,
    and never waits for the device.
    """
    options = AttentionOptions(scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    check_shape("own.seq_lens", own.seq_lens, (block_tables.shape[0],))
    tensors, of_own = (query, key_cache, value_cache, block_tables), (own.block_tables, own.seq_lens)
    runs.check(check_attention(*tensors, runs.num_shared, options))
    shape = check_attention(*tensors[:3], *of_own, options)
    if runs.num_cohorts == 0:
        alone_options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        return decode(*tensors[:3], *of_own, scale=scale, **alone_options)
    shares = share_cascade(query, key_cache, own, runs) if shares is None else shares
    parts, of_parts = attend_runs(tensors, runs, options, shape, shares.runs, shares.lse)
    alone = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    alone_lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    own_tensors = (*tensors[:3], *of_own)
    call = prepare_stream(own_tensors, options, shape, shares.own)
    of_alone = attend_stream(own_tensors, options, call, shares.own, (alone, alone_lse))
    if of_parts.num_programs + of_alone.num_programs > 0:
        constants = {name: value for name, value in of_parts.constants.items() if name != "PARTS"}
        merge_parts_kernel[(of_parts.num_programs + of_alone.num_programs,)](
            *(*of_parts.arguments, *of_alone.arguments),
            **constants,
            RUN_PARTS=of_parts.constants["PARTS"],
            OWN_PARTS=of_alone.constants["PARTS"],
            num_warps=4,
        )
    return _merge_shared((alone, alone_lse), (parts, shares.lse), runs, query.dtype)


def _merge_shared(
    alone: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor], runs: SharedRuns, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge each row's own output and lse with its partial ones."""
    num_rows, num_heads, head_dim = alone[0].shape
    output = torch.empty(alone[0].shape, dtype=dtype, device=alone[0].device)
    lse = torch.empty_like(alone[1])
    if num_rows > 0:
        merge_shared_kernel[num_rows, triton.cdiv(num_heads, _TILE_HEADS)](
            *(*alone, *parts, runs.num_shared, output, lse, parts[0].shape[0], num_rows, num_heads),
            HEAD_DIM=head_dim,
            TILE_HEADS=_TILE_HEADS,
            LEVELS=_LEVELS,
            num_warps=4,
        )
    return output, lse
