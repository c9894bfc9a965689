"""Merge attention over several sets of keys into attention over all of them.

A part is an output and its lse, the natural logarithm of what it was divided by. The merged output is the parts' mean,
weighted by exp(lse): exact, whatever the sets are, as long as no key is in two of them.
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


@triton.jit
def merge_kernel(
    first_ptr,
    first_lse_ptr,
    second_ptr,
    second_lse_ptr,
    output_ptr,
    lse_ptr,
    num_heads,
    stride_first_row,
    stride_first_head,
    stride_first_lse,
    stride_second_row,
    stride_second_head,
    stride_second_lse,
    stride_output_row,
    stride_output_head,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """TILE_HEADS heads of one row. Grid: (num_rows, ceil(num_heads / TILE_HEADS)).

    first, second, output: [num_rows, num_heads, HEAD_DIM]; their lse: fp32 [num_rows, num_heads], the merged one
    contiguous. A part with an lse of -inf is not read. The output may be one of the parts.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    element = tl.arange(0, HEAD_DIM)[None, :]
    is_head = head < num_heads
    nothing = -float("inf")
    first_lse = tl.load(first_lse_ptr + row * stride_first_lse + head, mask=is_head, other=nothing) * LOG2_E
    second_lse = tl.load(second_lse_ptr + row * stride_second_lse + head, mask=is_head, other=nothing) * LOG2_E
    top = tl.maximum(first_lse, second_lse)
    has_keys = top > nothing
    top = tl.where(has_keys, top, 0.0)
    first_weight = tl.exp2(first_lse - top)
    second_weight = tl.exp2(second_lse - top)
    # At least 1 where there are keys; elsewhere the output is 0 and the lse -inf.
    total = tl.where(has_keys, first_weight + second_weight, 1.0)
    first_at = first_ptr + row * stride_first_row + head[:, None] * stride_first_head + element
    second_at = second_ptr + row * stride_second_row + head[:, None] * stride_second_head + element
    first = tl.load(first_at, mask=(first_lse > nothing)[:, None], other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=(second_lse > nothing)[:, None], other=0.0).to(tl.float32)
    output = first * (first_weight / total)[:, None] + second * (second_weight / total)[:, None]
    lse = tl.where(has_keys, (top + tl.log2(total)) * LN_2, nothing)
    output_at = output_ptr + row * stride_output_row + head[:, None] * stride_output_head + element
    tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_head[:, None])
    tl.store(lse_ptr + row * num_heads + head, lse, mask=is_head)


def merge_state(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two or more partial attentions of the same rows.

    outputs: [num_rows, num_heads, head_dim] each, any supported dtypes; lses: fp32 [num_rows, num_heads] each, in the
    same order. An lse of -inf says that a part has no keys for a row: its output is not read, so it may hold anything.
    A row without keys in any part becomes 0, its lse -inf. dtype: the merged output's; None is the first part's.

    Returns the merged output and lse. One launch for each part but the first; in between it is float32. Raises
    KernelArgumentError. Changes nothing, and never waits for the device.
    """
    _check_parts(outputs, lses)
    dtype = outputs[0].dtype if dtype is None else dtype
    num_rows, num_heads, head_dim = outputs[0].shape
    merged, merged_lse = outputs[0], lses[0]
    for index in range(1, len(outputs)):
        first, first_lse, second, second_lse = merged, merged_lse, outputs[index], lses[index]
        is_last = index == len(outputs) - 1
        merged = torch.empty(first.shape, dtype=dtype if is_last else torch.float32, device=first.device)
        check_dtype("dtype", merged, QUERY_DTYPES)
        merged_lse = torch.empty(first_lse.shape, dtype=torch.float32, device=first.device)
        if merged.numel() > 0:
            merge_kernel[(num_rows, triton.cdiv(num_heads, _TILE_HEADS))](
                *(first, first_lse, second, second_lse, merged, merged_lse, num_heads),
                *(*first.stride()[:2], first_lse.stride(0), *second.stride()[:2], second_lse.stride(0)),
                *merged.stride()[:2],
                HEAD_DIM=head_dim,
                TILE_HEADS=_TILE_HEADS,
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
