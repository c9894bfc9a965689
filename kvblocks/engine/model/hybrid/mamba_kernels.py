"""Mamba2 by the kernels of mamba-ssm, on a GPU where that package is installed (`kvblocks[mamba]`).

It has both forms, in Triton. As with delta nets, models in float32 are computed in plain torch, as on other devices.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 256
"""Tokens of a chunk of the package's scan, as in published configs."""

Kernel = Callable[..., Tensor | tuple[Tensor, Tensor]]


class Mamba2Inputs(NamedTuple):
    """What Mamba2 takes of each row, float32.

    value: [num_rows, num_heads, head_dim]; key, query: [num_rows, num_groups, state_dim]; time, before the bias and
    softplus: [num_rows, num_heads].
    """

    value: Tensor
    key: Tensor
    query: Tensor
    time: Tensor


class Mamba2Rates(NamedTuple):
    """What the heads of a layer have, float32 [num_heads] each. decay is negative; skip multiplies the value."""

    decay: Tensor
    skip: Tensor
    step_bias: Tensor


def has_kernels(rows: Tensor) -> bool:
    """Whether the package serves `rows`: on a CUDA device, in float16 or bfloat16. O(1)."""
    return _is_on_gpu(rows) and rows.dtype in (torch.float16, torch.bfloat16) and is_installed()


def recurrent(inputs: Mamba2Inputs, rates: Mamba2Rates, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One token of each of several sequences: their outputs, and their states after it. Changes nothing.

    state: float32 [num_rows, num_heads, head_dim, state_dim]; dtype: of the rows. Returns float32.
    """
    value, key, query = (part.to(dtype).contiguous() for part in inputs[:3])
    after = state.clone()  # the kernel rewrites it
    # What a head's channels share has a stride of 0, by which the kernel knows it.
    decay = rates.decay[:, None, None].expand(after.shape[1:])
    skip, step_bias = (part[:, None].expand(value.shape[1:]) for part in rates[1:])
    time = inputs.time[..., None].expand(value.shape)
    output = load_kernels()[1](after, value, time, decay, key, query, D=skip, dt_bias=step_bias, dt_softplus=True)
    assert isinstance(output, Tensor)
    return output.float(), after


def chunked(inputs: Mamba2Inputs, rates: Mamba2Rates, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence, in order. As `recurrent`; state: [1, num_heads, head_dim, state_dim]."""
    value, key, query = (part.to(dtype)[None].contiguous() for part in inputs[:3])
    output, after = load_kernels()[0](
        *(value, inputs.time[None].contiguous(), rates.decay, key, query, CHUNK_TOKENS),
        D=rates.skip,
        dt_bias=rates.step_bias,
        dt_softplus=True,
        initial_states=state.clone(),
        return_final_states=True,
    )
    return output[0].float(), after.float()


@cache
def load_kernels() -> tuple[Kernel, Kernel]:
    """The chunked and the recurrent form. Remembered. Raises ImportError if the package is broken."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined, selective_state_update


@cache
def is_installed() -> bool:
    """Whether the package is there. Remembered."""
    return find_spec("mamba_ssm") is not None


def _is_on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda
