"""Writes the K and V of new tokens to their slots of a paged cache, unchanged or as e4m3.

The bits of e4m3 are computed by integer arithmetic and stored as bytes. So the same code runs on every architecture and
in Triton's interpreter, whose own conversion is wrong for small numbers. Rounding is to the nearest, ties to even, as
in torch. Numbers beyond 448 become 448, where torch makes them NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.layout import (
    FP8,
    QUERY_DTYPES,
    KernelArgumentError,
    check_cache,
    check_devices,
    check_dtype,
    check_indices,
    check_last_stride,
    check_scales,
    check_shape,
)

_MAX_TILE = 2048
"""How many elements of K a program stores at once: 16 per thread, and as many of V."""


@triton.jit
def encode_e4m3(number):
    """Return the bits of the nearest e4m3 numbers to fp32 numbers, as uint8. Beyond 448 becomes 448; NaN stays NaN."""
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2**-6 on: keep 3 of 23 bits of mantissa, rounded by a carry, and change the exponent's bias from 127 to 7.
    normal = tl.minimum(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    # Below, the numbers are multiples of 2**-9, which is one unit in the last place of 2**14: the addition rounds.
    lifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = lifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "k_scale_ptr", "v_scale_ptr"])
def store_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Store one token's K and V of TILE_HEADS heads. Grid: (num_tokens, ceil(NUM_KV_HEADS / TILE_HEADS)).

    Shapes are as in `store`, and last strides are 1. QUANTISED: the caches are uint8.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        # int64: in a cache with its heads first, head * stride may exceed int32.
        head = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]).to(tl.int64)
        element = tl.arange(0, HEAD_DIM)[None, :]
        is_head = head < NUM_KV_HEADS
        key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + element, mask=is_head)
        value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + element, mask=is_head)
        if QUANTISED:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
            if k_scale_ptr is not None:
                key = tl.div_rn(key, tl.load(k_scale_ptr + head, mask=is_head, other=1.0))
                value = tl.div_rn(value, tl.load(v_scale_ptr + head, mask=is_head, other=1.0))
            key = encode_e4m3(key)
            value = encode_e4m3(value)
        k_at = key_cache_ptr + block * stride_k_block + offset * stride_k_slot + head * stride_k_head + element
        v_at = value_cache_ptr + block * stride_v_block + offset * stride_v_slot + head * stride_v_head + element
        tl.store(k_at, key, mask=is_head)
        tl.store(v_at, value, mask=is_head)


def store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's K and V to its slot; a slot of -1 stores nothing.

    key, value: [num_tokens, num_kv_heads, head_dim], with a last stride of 1; key_cache, value_cache: [num_blocks,
    block_size, num_kv_heads, head_dim], of the same dtype, or e4m3; slot_mapping: int64 [num_tokens], with distinct
    slots. Caches in e4m3 get key / k_scale and value / v_scale, with one scale per head, fp32 [num_kv_heads], or None
    for 1. Raises KernelArgumentError. Changes both caches.
    """
    shape = check_cache(key_cache, value_cache)
    quantised = key_cache.dtype == FP8
    heads = (shape.num_kv_heads, shape.head_dim)
    check_shape("key", key, (*key.shape[:1], *heads))
    check_dtype("key", key, QUERY_DTYPES if quantised else (key_cache.dtype,))
    check_shape("value", value, tuple(key.shape))
    check_dtype("value", value, (key.dtype,))
    for name, tensor in (("key", key), ("value", value)):
        check_last_stride(name, tensor)
    check_indices("slot_mapping", slot_mapping, len(key), torch.int64)
    check_devices(key=key, value=value, key_cache=key_cache, slot_mapping=slot_mapping)
    check_scales(k_scale, v_scale, shape, key.device)
    if not quantised and k_scale is not None:
        raise KernelArgumentError(f"expected no scales unless the caches are {FP8}, got {k_scale} and {v_scale}")
    if quantised:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    tile_heads = min(_MAX_TILE // shape.head_dim, triton.next_power_of_2(shape.num_kv_heads))
    if len(key) > 0:
        store_kernel[(len(key), triton.cdiv(shape.num_kv_heads, tile_heads))](
            *(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale),
            *(*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            TILE_HEADS=tile_heads,
            QUANTISED=quantised,
            num_warps=4,
        )
