"""Merge attention over several sets of keys into attention over all of them.

A part is an output and its lse, the natural logarithm of the softmax's denominator. The merged output is the parts'
mean, weighted by exp(lse). It is exact for any sets of keys, as long as no key is in two of them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.device.tiles import LN_2, LOG2_E
from kvblocks.kernels.layout import (
    HEAD_DIMS,
    QUERY_DTYPES,
    KernelArgumentError,
    check_devices,
    check_dtype,
    check_last_stride,
    check_shape,
)

_TILE_HEADS = 4
_AT_ONCE = 4
"""How many parts a launch reads. The result of one launch is the first part of the next launch."""


@triton.jit
def load_lse(lse_ptr, stride_row, row, head, is_head):
    """One part's lse of some heads, to base 2."""
    return tl.load(lse_ptr + row * stride_row + head, mask=is_head, other=-float("inf")) * LOG2_E


@triton.jit
def add_part(output, total, top, ptr, lse, stride_row, stride_head, row, head, HEAD_DIM: tl.constexpr):
    """Add one part of some heads, weighted. A row with an lse of -inf is not read."""
    weight = tl.exp2(lse - top)
    at = ptr + row * stride_row + head[:, None] * stride_head + tl.arange(0, HEAD_DIM)[None, :]
    rows = tl.load(at, mask=(lse > -float("inf"))[:, None], other=0.0).to(tl.float32)
    return output + rows * weight[:, None], total + weight


@triton.jit(do_not_specialize_on_alignment=["lse_0", "lse_1", "lse_2", "lse_3"])
def merge_kernel(
    ptr_0,
    ptr_1,
    ptr_2,
    ptr_3,
    lse_0,
    lse_1,
    lse_2,
    lse_3,
    output_ptr,
    lse_ptr,
    num_heads,
    row_0,
    head_0,
    lse_row_0,
    row_1,
    head_1,
    lse_row_1,
    row_2,
    head_2,
    lse_row_2,
    row_3,
    head_3,
    lse_row_3,
    stride_output_row,
    stride_output_head,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """TILE_HEADS heads of one row of PARTS parts, 2 to 4. Grid: (num_rows, ceil(num_heads / TILE_HEADS)).

    ptr_i, output: [num_rows, num_heads, HEAD_DIM]; their lse: fp32 [num_rows, num_heads], the merged one contiguous;
    row_i, head_i, lse_row_i: strides. The output may be one of the parts.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_head = head < num_heads
    nothing = -float("inf")
    first = load_lse(lse_0, lse_row_0, row, head, is_head)
    second = load_lse(lse_1, lse_row_1, row, head, is_head)
    third = tl.full([TILE_HEADS], nothing, tl.float32)
    fourth = third
    if PARTS > 2:
        third = load_lse(lse_2, lse_row_2, row, head, is_head)
    if PARTS > 3:
        fourth = load_lse(lse_3, lse_row_3, row, head, is_head)
    top = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    has_keys = top > nothing
    top = tl.where(has_keys, top, 0.0)
    output = tl.zeros([TILE_HEADS, HEAD_DIM], tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    output, total = add_part(output, total, top, ptr_0, first, row_0, head_0, row, head, HEAD_DIM)
    output, total = add_part(output, total, top, ptr_1, second, row_1, head_1, row, head, HEAD_DIM)
    if PARTS > 2:
        output, total = add_part(output, total, top, ptr_2, third, row_2, head_2, row, head, HEAD_DIM)
    if PARTS > 3:
        output, total = add_part(output, total, top, ptr_3, fourth, row_3, head_3, row, head, HEAD_DIM)
    # At least 1 where there are keys; elsewhere the output is 0 and the lse -inf.
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, (top + tl.log2(total)) * LN_2, nothing)
    output_at = output_ptr + row * stride_output_row + head[:, None] * stride_output_head
    output = (output / total[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(output_at + tl.arange(0, HEAD_DIM)[None, :], output, mask=is_head[:, None])
    tl.store(lse_ptr + row * num_heads + head, lse, mask=is_head)


def merge_state(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two or more partial attentions of the same rows.

    outputs: [num_rows, num_heads, head_dim] each, any supported dtypes; lses: fp32 [num_rows, num_heads] each, in the
    same order. An lse of -inf says that a part has no keys for a row: its output is not read, so it may hold anything.
    A row without keys in any part becomes 0, its lse -inf. dtype: the merged output's; None is the first part's.

    Returns the merged output and lse. One launch for up to 4 parts, and one more for each 3 more; results between
    launches are float32. Raises KernelArgumentError. Changes nothing, and never waits for the device.
    """
    _check_parts(outputs, lses)
    dtype = outputs[0].dtype if dtype is None else dtype
    parts = list(zip(outputs, lses, strict=True))
    while len(parts) > 1:
        now, later = parts[:_AT_ONCE], parts[_AT_ONCE:]
        parts = [_merge(now, torch.float32 if later else dtype), *later]
    return parts[0]


_Part = tuple[Tensor, Tensor]


def _merge(parts: Sequence[_Part], dtype: torch.dtype) -> _Part:
    """Merge 2 to 4 parts. One launch."""
    (first, first_lse), *_ = parts
    num_rows, num_heads, head_dim = first.shape
    merged = torch.empty(first.shape, dtype=dtype, device=first.device)
    check_dtype("dtype", merged, QUERY_DTYPES)
    merged_lse = torch.empty(first_lse.shape, dtype=torch.float32, device=first.device)
    if merged.numel() > 0:
        slots = [*parts, *[parts[0]] * (_AT_ONCE - len(parts))]  # the kernel doesn't read the copies of parts[0]
        merge_kernel[(num_rows, triton.cdiv(num_heads, _TILE_HEADS))](
            *(output for output, _ in slots),
            *(lse for _, lse in slots),
            *(merged, merged_lse, num_heads),
            *(stride for output, lse in slots for stride in (*output.stride()[:2], lse.stride(0))),
            *merged.stride()[:2],
            HEAD_DIM=head_dim,
            TILE_HEADS=_TILE_HEADS,
            PARTS=len(parts),
            num_warps=4,
        )
    return merged, merged_lse


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if len(outputs) < 2 or len(lses) != len(outputs):
        raise KernelArgumentError(
            f"expected at least two outputs and as many lses, got {len(outputs)} outputs and {len(lses)} lses"
        )
    shape = tuple(outputs[0].shape)
    if len(shape) != 3 or shape[2] not in HEAD_DIMS:
        raise KernelArgumentError(
            f"outputs[0]: expected [num_rows, num_heads, head_dim] with a head_dim among {HEAD_DIMS}, got {shape}"
        )
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        check_shape(f"outputs[{index}]", output, shape)
        check_dtype(f"outputs[{index}]", output, QUERY_DTYPES)
        check_last_stride(f"outputs[{index}]", output)
        check_shape(f"lses[{index}]", lse, shape[:2])
        check_dtype(f"lses[{index}]", lse, (torch.float32,))
        check_last_stride(f"lses[{index}]", lse)
        check_devices(**{"outputs[0]": outputs[0], f"outputs[{index}]": output, f"lses[{index}]": lse})
