"""Mamba2 by the kernels of mamba-ssm, on a GPU where that package is installed (`kvblocks[mamba]`).

The package has both the recurrent and the chunked form, in Triton. Models in float32 are computed in plain torch, as
with delta nets, and so is everything on other devices.
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
    """The inputs of Mamba2, by row, in float32.

    value: [num_rows, num_heads, head_dim]; key, query: [num_rows, num_groups, state_dim]; time: the time steps before
    bias and softplus, [num_rows, num_heads].
    """

    value: Tensor
    key: Tensor
    query: Tensor
    time: Tensor


class Mamba2Rates(NamedTuple):
    """The per-head parameters of a layer, float32 [num_heads] each.

    `decay` is negative; `skip` multiplies the value.
    """

    decay: Tensor
    skip: Tensor
    step_bias: Tensor


def has_kernels(rows: Tensor) -> bool:
    """Whether to use the package for `rows`: it is installed, and they are float16 or bfloat16 on a CUDA device.

    O(1).
    """
    return _is_on_gpu(rows) and rows.dtype in (torch.float16, torch.bfloat16) and is_installed()


def recurrent(inputs: Mamba2Inputs, rates: Mamba2Rates, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Advance several sequences by one token each. Returns the outputs, and the states after it. Changes nothing.

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
    """As `recurrent`, for many tokens of one sequence, in order. state: [1, num_heads, head_dim, state_dim]."""
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
    """The chunked and the recurrent form. Cached. Raises ImportError if the package is broken."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined, selective_state_update


@cache
def is_installed() -> bool:
    """Whether the package is installed. Cached."""
    return find_spec("mamba_ssm") is not None


def _is_on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda
