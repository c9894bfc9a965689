"""Causal attention of ragged rows over block tables: prefill, chunked prefill and speculative verification.

A program computes one tile of rows of one sequence for one head of K and V (`tiles` tells how rows are packed and
found). It runs over the keys in up to three parts: those that a window hides from some of its rows, those that all of
its rows see, and those around the rows' own positions. Only the first and the last pay for masks. Later tiles of a
prompt see more keys, so they are started first.

Nothing is computed on the host but the grid, from shapes alone, so that a call can be captured in a CUDA graph and
replayed with other lengths, as long as the shapes stay. Rows that no sequence has, which such calls are padded with,
are treated as one more sequence, which sees nothing.

A row's bits depend on the rows that share its tile, a little: which of its keys are in the part without masks, and
which tiles are taken, follows from them. `batch_invariant` takes one part and one size of tile for all. What a row adds
up, in which order, then follows from its own position: tiles of keys begin at multiples of the tile's size, and one of
which a row sees nothing leaves it as it is (its weights are 0, and what it had is multiplied by 1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.layout import (
    AttentionOptions,
    AttentionShape,
    check_attention,
    check_devices,
    check_indices,
    is_interpreted,
)
from kvblocks.kernels.table import EXTEND, EXTEND_NARROW, Launch, find
from kvblocks.kernels.tiles import (
    LOG2_E,
    attend_pages,
    begin_rows,
    find_segment,
    finish_rows,
    tile_constants,
    tile_rows,
)

_INTERPRETED = is_interpreted()

NARROW_ROWS = 32
"""Up to so many rows a sequence on average, heads of a group counted one by one, small tiles are taken."""


@triton.jit
def attend_causal(
    query,
    output,
    row_max,
    row_sum,
    position,
    first_position,
    last_position,
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
    UNIFORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention of rows at `position`, int32 [TILE_M], of which the first and the last are given, to their past.

    UNIFORM: all keys are in the part with masks. The rest, and what is returned, as in `attend_pages`. Positions may be
    below 0: such rows see nothing.
    """
    start = 0
    full_stop = tl.maximum(first_position + 1, 0) // TILE_N * TILE_N
    stop = tl.maximum(last_position + 1, 0)
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0) // TILE_N * TILE_N
    if UNIFORM:
        full_stop = start
    elif HAS_WINDOW:
        full_start = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_N) * TILE_N
        full_start = tl.minimum(full_start, full_stop)
        output, row_max, row_sum = attend_pages(
            query, output, row_max, row_sum, position, start, full_start, table_ptr, k_ptr, v_ptr,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip
        start = full_start
    if not UNIFORM:
        output, row_max, row_sum = attend_pages(
            query, output, row_max, row_sum, position, start, full_stop, table_ptr, k_ptr, v_ptr,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip
    output, row_max, row_sum = attend_pages(
        query, output, row_max, row_sum, position, full_stop, stop, table_ptr, k_ptr, v_ptr,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
        INTERPRETED=INTERPRETED,
    )  # fmt: skip
    return output, row_max, row_sum


@triton.jit
def extend_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    num_rows,
    num_seqs,
    scale,
    softcap,
    window,
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
    stride_lse_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UNIFORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of rows and one head of K and V.

    Grid: (num_rows // (TILE_M // GROUP) + num_seqs + 1, num_kv_heads). Shapes as in
    `extend`; last strides are 1, and `output_ptr` has no gap between heads.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_segment(start_ptr, tile, num_seqs + 1, TILE_Q)
    is_seq = seq < num_seqs
    seq_start = tl.load(start_ptr + seq)
    seq_rows = tl.load(start_ptr + seq + 1, mask=is_seq, other=num_rows) - seq_start
    first = (tile - (seq_start // TILE_Q + seq)) * TILE_Q
    if first >= seq_rows:
        return
    seq_len = tl.load(len_ptr + seq, mask=is_seq, other=0)

    packed = tl.arange(0, TILE_M)
    element = tl.arange(0, HEAD_DIM)
    row = first + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_row = (packed < TILE_Q * GROUP) & (row < seq_rows)
    at_row = (seq_start + row).to(tl.int64)
    query_at = (
        query_ptr + (at_row * stride_query_row + head.to(tl.int64) * stride_query_head)[:, None] + element[None, :]
    )
    query = tl.load(query_at, mask=is_row[:, None], other=0.0)
    output, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM)
    if HAS_SINKS:
        row_max = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        row_sum += 1.0

    last = tl.minimum(first + TILE_Q, seq_rows) - 1
    output, row_max, row_sum = attend_causal(
        query, output, row_max, row_sum, seq_len - seq_rows + row, seq_len - seq_rows + first,
        seq_len - seq_rows + last, table_ptr + seq.to(tl.int64) * stride_table,
        k_ptr + kv_head.to(tl.int64) * stride_k_head, v_ptr + kv_head.to(tl.int64) * stride_v_head,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, UNIFORM, INTERPRETED,
    )  # fmt: skip
    output, lse = finish_rows(output * v_scale, row_max, row_sum)
    output_at = output_ptr + (at_row * stride_output_row + head * HEAD_DIM)[:, None] + element[None, :]
    tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse_ptr + at_row * stride_lse_row + head, lse, mask=is_row)


def extend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over block tables.

    query: [num_rows, num_heads, head_dim] in fp32, fp16 or bf16, the sequences' rows one after another; key_cache,
    value_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32
    [num_seqs, max_blocks]; query_start: int32 [num_seqs + 1], each sequence's first row, then the end of the last;
    seq_lens: int32 [num_seqs], the tokens in context, this step's included: their K and V are stored already. Row i of
    a sequence with n rows is at position `seq_len - n + i`. A sequence may have no rows. The rest: `AttentionOptions`.

    A row before position 0, or that no sequence has, sees nothing: its output is 0 and its lse -inf, or its sink.

    batch_invariant: a row's bits depend on its query and position and its sequence's K and V only, not on the other
    rows of the call; somewhat slower.

    Returns the output, [num_rows, num_heads, head_dim] in the query's dtype, and the natural logarithm of what it was
    divided by, fp32 [num_rows, num_heads]. Raises KernelArgumentError. Changes nothing, and never waits for the device.
    """
    options = AttentionOptions(scale, window, softcap, sinks, k_scale, v_scale)
    shape = check_attention(query, key_cache, value_cache, block_tables, seq_lens, options)
    check_indices("query_start", query_start, shape.num_seqs + 1)
    check_devices(query=query, query_start=query_start)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    launch = _choose_launch(query, key_cache, shape, is_fixed=batch_invariant)
    num_tiles = shape.num_rows // (tile_rows(shape, launch) // shape.group_size) + shape.num_seqs + 1
    if shape.num_rows > 0:
        extend_kernel[num_tiles, shape.cache.num_kv_heads](
            *(query, key_cache, value_cache, block_tables, query_start, seq_lens, sinks, output, lse),
            *(shape.num_rows, shape.num_seqs, scale * k_scale, softcap or 0.0, window or 0, v_scale),
            *(*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
            *(block_tables.stride(0), output.stride(0), lse.stride(0)),
            **tile_constants(shape, launch),
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_SINKS=sinks is not None,
            UNIFORM=batch_invariant,
            INTERPRETED=_INTERPRETED,
        )
    return output, lse


def _choose_launch(query: Tensor, key_cache: Tensor, shape: AttentionShape, *, is_fixed: bool) -> Launch:
    """The table's entry: for short sequences of rows on average, as in speculative verification, one of small tiles.

    is_fixed: the same entry whatever the rows are.
    """
    is_narrow = not is_fixed and shape.num_rows * shape.group_size <= NARROW_ROWS * shape.num_seqs
    # With queries in fp32 the tiles are computed in fp32, whatever K and V are stored as.
    element_bytes = 4 if query.dtype == torch.float32 else key_cache.element_size()
    return find(EXTEND_NARROW if is_narrow else EXTEND, query.device, shape.cache.head_dim, element_bytes)
