"""Matrix products, and weights laid out for them.

A decoded token reads every weight once, so with few rows a product is as fast as memory allows. On x86 processors the
weights are kept in oneDNN's blocked layout. Products read it about twice as fast as MKL reads a plain matrix. Products
of many rows gain as much. On other processors, and in float16, a matrix stays plain and the product is torch's own. The
measurement is in bench/README.md.

Invariant: a weight is held once, in one layout. An embedding that is tied to the head is read from the head's layout.

The layout is made and multiplied by operators that torch keeps for its compiler. They exist since torch 2.0, but torch
doesn't promise them. Where one is missing or fails, matrices stay plain.
"""

import ctypes
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_MULTIPLY: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_ADDRESS: Any = getattr(torch.ops.mkldnn, "data_ptr", None)
_NUM_BYTES: Any = getattr(torch.ops.mkldnn, "_nbytes", None)

_BLOCK_ROWS = 64
"""Rows of a matrix that lie in one block of the layout."""


def pack(matrix: Tensor) -> Tensor:
    """The matrix [out, in] in the layout that `product` reads fastest: a copy, or `matrix` itself. O(bytes)."""
    if not _is_packable(matrix):
        return matrix
    try:
        # Without a number of rows, oneDNN chooses a layout that serves all numbers.
        packed: Tensor = _REORDER(matrix, None)
    except RuntimeError:  # this processor or build has no kernel for the dtype
        return matrix
    return packed


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [num_rows, in], weight [out, in] as `pack` returned it, bias [out] or None -> [num_rows, out].

    Sums are in float32, in an order that the library chooses. Changes nothing.
    """
    if weight.is_mkldnn:
        result: Tensor = _MULTIPLY(rows, weight, bias, "none", [], "")
        return result
    return F.linear(rows, weight, bias)


def packed_rows(packed: Tensor, matrix: Tensor) -> Tensor | None:
    """A row-wise view of `packed`, which `pack` made of `matrix`: [blocks, in / pair, 64, pair].

    Row r is [r // 64, :, r % 64], padded with zeros at its end; see `take_rows`. The layout is internal to the library,
    so every element is compared with `matrix`. Returns None if the layout is a different one. O(bytes). Changes
    nothing.
    """
    if not packed.is_mkldnn or _ADDRESS is None or _NUM_BYTES is None:
        return None
    num_rows, width = matrix.shape
    pair = 4 // matrix.element_size()  # numbers of less than 4 bytes lie in pairs, since the processor multiplies pairs
    num_bytes, num_blocks = int(_NUM_BYTES(packed)), -(-num_rows // _BLOCK_ROWS)
    num_columns, rest = divmod(num_bytes, num_blocks * _BLOCK_ROWS * matrix.element_size())
    if rest or num_columns % pair or num_columns < width:
        return None
    buffer: Any = (ctypes.c_char * num_bytes).from_address(_ADDRESS(packed))
    buffer.owner = packed  # the view keeps the buffer alive, and so the memory
    view = torch.frombuffer(buffer, dtype=matrix.dtype).view(num_blocks, -1, _BLOCK_ROWS, pair)
    for indexes in torch.arange(num_rows).split(1024):
        if not torch.equal(take_rows(view, indexes, width), matrix[indexes]):
            return None
    return view


def take_rows(view: Tensor, indexes: Tensor, width: int) -> Tensor:
    """Rows [num_indexes, width] of `packed_rows`' view, contiguous and new. O(num_indexes * width)."""
    return view[indexes // _BLOCK_ROWS, :, indexes % _BLOCK_ROWS].flatten(1)[:, :width].contiguous()


def _is_packable(matrix: Tensor) -> bool:
    """Whether the packed layout was measured to be faster for such a matrix, and this torch can make it."""
    return (
        matrix.device.type == "cpu"
        and matrix.dtype in (torch.float32, torch.bfloat16)
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and _REORDER is not None
        and _MULTIPLY is not None
    )
