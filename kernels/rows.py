"""The row-wise operations between a layer's matrix products and its attention: norms, the MLP's gate, and RoPE.

Plain torch takes 20 to 35 small kernels per layer for these. Here it is 4 launches, as many as there are matrix
products.

A program computes one row, or a fixed number of heads or columns of one row, whatever the batch is. So a row's bits
depend only on the row. Kernels compute in float32, and their docstrings say where they round.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.layout import (
    FP8,
    QUERY_DTYPES,
    KernelArgumentError,
    check_cache,
    check_contiguous,
    check_devices,
    check_dtype,
    check_indices,
    check_shape,
)
from kvblocks.kernels.store import encode_e4m3

MAX_COLUMNS = 8192
"""The most columns of a row that can be normed, since a program holds the whole row in registers."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

_TILE = 1024
"""Elements per program where it needs no whole row: 8 per thread, which is a load of 16 bytes for 16-bit elements."""


@triton.jit
def scale_rows(values, mean, eps, weight, dtype: tl.constexpr):
    """RMS norm of fp32 values, given the mean of their squares, rounded to the rows' dtype.

    With a weight in a narrower dtype than fp32, the normed values are rounded to that dtype before the product, as
    torch and these models do.
    """
    normed = (values * tl.rsqrt(mean + eps)).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def norm_kernel(
    hidden_ptr,
    added_ptr,
    output_norm_ptr,
    norm_ptr,
    normed_ptr,
    eps,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_OUTPUT_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Compute one row: hidden += added, or hidden += norm(added); then normed = norm(hidden). Grid: (num_rows,).

    hidden, added, normed: contiguous [num_rows, NUM_COLUMNS] in one dtype; each result is rounded to it. The norms'
    weights: [NUM_COLUMNS], in that dtype or fp32.
    """
    column = tl.arange(0, TILE)
    is_column = column < NUM_COLUMNS
    at = tl.program_id(0).to(tl.int64) * NUM_COLUMNS + column
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + at, mask=is_column, other=0.0).to(tl.float32)
    if HAS_ADDED:
        added = tl.load(added_ptr + at, mask=is_column, other=0.0).to(tl.float32)
        if HAS_OUTPUT_NORM:
            weight = tl.load(output_norm_ptr + column, mask=is_column, other=0.0)
            mean = tl.sum(added * added, 0) / NUM_COLUMNS
            added = scale_rows(added, mean, eps, weight, dtype).to(tl.float32)
        total = (hidden + added).to(dtype)
        tl.store(hidden_ptr + at, total, mask=is_column)
        hidden = total.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=is_column, other=0.0)
        mean = tl.sum(hidden * hidden, 0) / NUM_COLUMNS
        tl.store(normed_ptr + at, scale_rows(hidden, mean, eps, weight, dtype), mask=is_column)


@triton.jit
def gate_kernel(gate_up_ptr, output_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, IS_GELU: tl.constexpr):
    """Compute TILE columns of a row: act(gate) * up, rounded once. Grid: (num_rows, ceil(WIDTH / TILE)).

    gate_up: [num_rows, 2 * WIDTH], the gate first; output: [num_rows, WIDTH]; both contiguous. The activation is SiLU,
    or GELU by tanh: x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < WIDTH
    at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up_ptr + at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=is_column, other=0.0).to(tl.float32)
    inner = gate
    if IS_GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate * tl.sigmoid(inner) * up
    tl.store(output_ptr + row * WIDTH + column, result.to(output_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr", "k_scale_ptr", "v_scale_ptr"])
def place_kernel(
    heads_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    eps,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    QUANTISED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Norm, rotate and write TILE_HEADS heads of a row. Grid: (num_rows, ceil(all heads / TILE_HEADS)).

    heads: contiguous [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]: of queries, then of K, then of V. Heads of
    queries and K are normed, if there is a norm [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM]. Then they are rotated by the
    angles of the row's position: cos, sin: [num_positions, HEAD_DIM / 2]. They are rounded after the norm and after the
    rotation. Queries go to `query`, contiguous [num_rows, NUM_HEADS, HEAD_DIM]. K and V go to the row's slot; a slot
    below 0 stores nothing. QUANTISED: the caches are uint8, with the e4m3 bits of K and V divided by their head's
    scale, fp32 [NUM_KV_HEADS].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    pair = tl.arange(0, HEAD_DIM // 2)[None, :]
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    heads_at = heads_ptr + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + pair
    low = tl.load(heads_at, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(heads_at + HEAD_DIM // 2, mask=is_head, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = ((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM)[:, None]
        norm_at = norm_ptr + head * HEAD_DIM + pair
        low_weight = tl.load(norm_at, mask=is_turned, other=0.0)
        high_weight = tl.load(norm_at + HEAD_DIM // 2, mask=is_turned, other=0.0)
        low = tl.where(is_turned, scale_rows(low, mean, eps, low_weight, dtype).to(tl.float32), low)
        high = tl.where(is_turned, scale_rows(high, mean, eps, high_weight, dtype).to(tl.float32), high)
    angle_at = tl.load(position_ptr + row) * (HEAD_DIM // 2) + pair
    cos = tl.load(cos_ptr + angle_at).to(tl.float32)
    sin = tl.load(sin_ptr + angle_at).to(tl.float32)
    turned_low = tl.where(is_turned, low * cos - high * sin, low).to(dtype)
    turned_high = tl.where(is_turned, high * cos + low * sin, high).to(dtype)
    is_query = head < NUM_HEADS
    query_at = query_ptr + (row * NUM_HEADS + head) * HEAD_DIM + pair
    tl.store(query_at, turned_low, mask=is_query)
    tl.store(query_at + HEAD_DIM // 2, turned_high, mask=is_query)
    slot = tl.load(slot_ptr + row)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    # int64: in a cache with its heads first, head * stride may exceed int32.
    key_head = (head - NUM_HEADS).to(tl.int64)
    value_head = key_head - NUM_KV_HEADS
    is_key = (key_head >= 0) & is_turned & (slot >= 0)
    is_value = (value_head >= 0) & is_head & (slot >= 0)
    key_low, key_high, value_low, value_high = turned_low, turned_high, turned_low, turned_high
    if QUANTISED:
        scale = tl.full([TILE_HEADS, 1], 1.0, tl.float32)
        if HAS_SCALES:
            scale = tl.load(k_scale_ptr + key_head, mask=is_key, other=1.0)
            scale = tl.load(v_scale_ptr + value_head, mask=is_value, other=scale)
        key_low = encode_e4m3(tl.div_rn(turned_low.to(tl.float32), scale))
        key_high = encode_e4m3(tl.div_rn(turned_high.to(tl.float32), scale))
        value_low, value_high = key_low, key_high
    key_at = k_ptr + block * stride_k_block + offset * stride_k_slot + key_head * stride_k_head + pair
    value_at = v_ptr + block * stride_v_block + offset * stride_v_slot + value_head * stride_v_head + pair
    tl.store(key_at, key_low, mask=is_key)
    tl.store(key_at + HEAD_DIM // 2, key_high, mask=is_key)
    tl.store(value_at, value_low, mask=is_value)
    tl.store(value_at + HEAD_DIM // 2, value_high, mask=is_value)


@dataclass(frozen=True)
class Turn:
    """How the heads of queries and K are normed, and then rotated by the angles of their rows' positions (RoPE).

    cos, sin: [num_positions, head_dim / 2], the angles of the pairs (i, i + head_dim / 2); positions: int64 [num_rows],
    below num_positions; norm: the norm's weights, [num_heads + num_kv_heads, head_dim], or None; eps: the norm's
    epsilon.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    norm: Tensor | None = None
    eps: float = 0.0


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of contiguous rows [num_rows, num_columns]; weight: [num_columns], in the rows' dtype or fp32.

    With a weight in the rows' dtype, normed values are rounded to it before the product. Returns a new tensor. One
    launch. Raises KernelArgumentError. Changes nothing, and never waits for the device.
    """
    _check_rows(rows, weight)
    normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _launch_norm(rows, (None, None, weight, normed), eps)
    return normed


def add_norm(
    hidden: Tensor, added: Tensor, eps: float, *, output_norm: Tensor | None = None, weight: Tensor | None = None
) -> Tensor | None:
    """Add to `hidden`, and return the norm of the sum. Changes `hidden`.

    hidden, added: contiguous [num_rows, num_columns]. output_norm: the weight with which `added` is normed first, or
    None. weight: the weight of the sum's norm; if None, None is returned. Weights and norms are as in `norm`. The sum
    is rounded before it is normed. One launch. Raises KernelArgumentError. Never waits for the device.
    """
    _check_rows(hidden, output_norm, weight)
    check_shape("added", added, tuple(hidden.shape))
    check_dtype("added", added, (hidden.dtype,))
    check_contiguous("added", added)
    check_devices(hidden=hidden, added=added)
    normed = None if weight is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch_norm(hidden, (added, output_norm, weight, normed), eps)
    return normed


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up, [num_rows, width], rounded once, for contiguous [num_rows, 2 * width], the gate first.

    activation: one of ACTIVATIONS. One launch. Raises KernelArgumentError. Changes nothing, and never waits for the
    device.
    """
    if activation not in ACTIVATIONS:
        raise KernelArgumentError(f"activation: expected {' or '.join(ACTIVATIONS)}, got {activation!r}")
    check_dtype("gate_up", gate_up, QUERY_DTYPES)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise KernelArgumentError(f"gate_up: expected [num_rows, 2 * width], got the shape {tuple(gate_up.shape)}")
    check_contiguous("gate_up", gate_up)
    check_devices(gate_up=gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        gate_kernel[(num_rows, triton.cdiv(width, _TILE))](
            gate_up, output, WIDTH=width, TILE=_TILE, IS_GELU=activation != "silu", num_warps=4
        )
    return output


def place(
    heads: Tensor,
    turn: Turn,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Norm and rotate the heads of queries and K, write K and V to their slots, and return the queries.

    heads: contiguous [num_rows, num_heads + 2 * num_kv_heads, head_dim], of queries, then of K, then of V; caches, of K
    and of V: see `layout`, in the heads' dtype or e4m3; slot_mapping: int64 [num_rows], distinct slots, where -1 stores
    nothing. scales: of K and of V by head, fp32 [num_kv_heads] each; e4m3 stores K and V divided by them. Returns a new
    tensor [num_rows, num_heads, head_dim]. Values are rounded after the norm, and after the rotation. One launch.
    Raises KernelArgumentError. Changes the caches, and never waits for the device.
    """
    key_cache, value_cache = caches
    num_rows, num_heads = _check_place(heads, turn, caches, slot_mapping, scales)
    num_kv_heads, head_dim = key_cache.shape[2:]
    query = torch.empty(num_rows, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    quantised = key_cache.dtype == FP8
    if quantised:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    tile_heads = _TILE // head_dim
    if num_rows > 0:
        place_kernel[(num_rows, triton.cdiv(heads.shape[1], tile_heads))](
            *(heads, turn.norm, turn.cos, turn.sin, turn.positions, slot_mapping, query, key_cache, value_cache),
            *((None, None) if scales is None else scales),
            *(turn.eps, *key_cache.stride()[:3], *value_cache.stride()[:3]),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[1],
            TILE_HEADS=tile_heads,
            HAS_NORM=turn.norm is not None,
            QUANTISED=quantised,
            HAS_SCALES=scales is not None,
            num_warps=4,
        )
    return query


def _launch_norm(
    hidden: Tensor, others: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], eps: float
) -> None:
    """others: `added`, the weights of its norm and of the sum's norm, and the tensor for the result."""
    num_rows, num_columns = hidden.shape
    added, output_norm, weight, _ = others
    tile = triton.next_power_of_2(num_columns)
    if num_rows > 0:
        norm_kernel[(num_rows,)](
            *(hidden, *others, eps),
            NUM_COLUMNS=num_columns,
            TILE=tile,
            HAS_ADDED=added is not None,
            HAS_OUTPUT_NORM=output_norm is not None,
            HAS_NORM=weight is not None,
            num_warps=max(1, min(16, tile // 256)),
        )


def _check_rows(rows: Tensor, *norms: Tensor | None) -> None:
    """Raise KernelArgumentError for rows that can't be normed by these weights."""
    check_dtype("rows", rows, QUERY_DTYPES)
    if rows.dim() != 2 or not 1 <= rows.shape[1] <= MAX_COLUMNS:
        raise KernelArgumentError(
            f"rows: expected [num_rows, num_columns] with at most {MAX_COLUMNS} columns, got the shape"
            f" {tuple(rows.shape)}"
        )
    check_contiguous("rows", rows)
    check_devices(rows=rows)
    for weight in norms:
        if weight is not None:
            check_shape("weight", weight, (rows.shape[1],))
            check_dtype("weight", weight, (rows.dtype, torch.float32))
            check_contiguous("weight", weight)
            check_devices(rows=rows, weight=weight)


def _check_place(
    heads: Tensor,
    turn: Turn,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[int, int]:
    """(num_rows, num_heads). Raises KernelArgumentError for arguments that `place` doesn't support."""
    shape = check_cache(*caches)
    quantised = caches[0].dtype == FP8
    check_dtype("heads", heads, QUERY_DTYPES if quantised else (caches[0].dtype,))
    num_heads = heads.shape[1] - 2 * shape.num_kv_heads if heads.dim() == 3 else 0
    if num_heads < 1 or heads.shape[2] != shape.head_dim:
        raise KernelArgumentError(
            f"heads: expected [num_rows, num_heads + 2 * {shape.num_kv_heads}, {shape.head_dim}], got the shape"
            f" {tuple(heads.shape)}"
        )
    check_contiguous("heads", heads)
    check_devices(heads=heads, key_cache=caches[0])
    for name, angles in (("turn.cos", turn.cos), ("turn.sin", turn.sin)):
        check_shape(name, angles, (len(turn.cos), shape.head_dim // 2))
        check_dtype(name, angles, QUERY_DTYPES)
        check_contiguous(name, angles)
        check_devices(**{"heads": heads, name: angles})
    for name, indices in (("turn.positions", turn.positions), ("slot_mapping", slot_mapping)):
        check_indices(name, indices, len(heads), torch.int64)
        check_devices(**{"heads": heads, name: indices})
    if turn.norm is not None:
        check_shape("turn.norm", turn.norm, (num_heads + shape.num_kv_heads, shape.head_dim))
        check_dtype("turn.norm", turn.norm, (heads.dtype, torch.float32))
        check_contiguous("turn.norm", turn.norm)
        check_devices(**{"heads": heads, "turn.norm": turn.norm})
    if scales is not None and not quantised:
        raise KernelArgumentError(f"scales: expected None unless the caches are {FP8}, got some")
    for scale in scales or ():
        check_shape("scales", scale, (shape.num_kv_heads,))
        check_dtype("scales", scale, (torch.float32,))
        check_contiguous("scales", scale)
        check_devices(heads=heads, scales=scale)
    return len(heads), num_heads
