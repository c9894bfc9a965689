"""Delta nets by the kernels of flash-linear-attention, on a GPU where that package is installed (`kvblocks[fla]`).

The package has the recurrent and the chunked form of gated delta nets and of Kimi's delta attention, in Triton. It
rounds float32 products to TF32, so models in float32 are computed in plain torch, as on all other devices.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["gated_delta_rule", "kda"]
"""A delta rule's name in the package. One has a single decay per head, the other a decay per channel of the keys."""


class DeltaInputs(NamedTuple):
    """The inputs of a delta rule, by row, in float32. Queries and keys are already normed, and queries also scaled.

    query, key: [num_rows, num_heads, key_dim]; value: [num_rows, num_heads, value_dim]; decay: logarithms, [num_rows,
    num_heads], or shaped like `key` if each channel has its own; beta: [num_rows, num_heads].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def has_kernels(rows: Tensor) -> bool:
    """Whether to use the package for `rows`: it is installed, and they are float16 or bfloat16 on a CUDA device.

    O(1).
    """
    return _is_on_gpu(rows) and rows.dtype in (torch.float16, torch.bfloat16) and is_installed()


def recurrent(rule: Rule, inputs: DeltaInputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Advance several sequences by one token each. Returns the outputs, and the states after it. Changes nothing.

    state: float32 [num_rows, num_heads, key_dim, value_dim]; dtype: of the rows. Returns float32.
    """
    output, after = _call(
        load_kernels(rule)[1], DeltaInputs(*(part[:, None].contiguous() for part in inputs)), state, dtype
    )
    return output[:, 0], after


def chunked(rule: Rule, inputs: DeltaInputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `recurrent`, for many tokens of one sequence, in order. state: [1, num_heads, key_dim, value_dim]."""
    output, after = _call(
        load_kernels(rule)[0], DeltaInputs(*(part[None].contiguous() for part in inputs)), state, dtype
    )
    return output[0], after


def _call(
    kernel: Callable[..., tuple[Tensor, Tensor]], inputs: DeltaInputs, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """inputs: [batch, num_tokens, num_heads, ...]."""
    query, key, value = (part.to(dtype) for part in inputs[:3])
    # The state is copied, so that no version of the package writes to it.
    options = {"scale": 1.0, "initial_state": state.clone(), "output_final_state": True}
    output, after = kernel(q=query, k=key, v=value, g=inputs.decay, beta=inputs.beta, **options)
    return output.float(), after


@cache
def load_kernels(rule: Rule) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    """The chunked and the recurrent form of a rule. Cached. Raises ImportError if the package is broken."""
    if rule == "kda":
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return chunk_kda, fused_recurrent_kda
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


@cache
def is_installed() -> bool:
    """Whether the package is installed. Cached."""
    return find_spec("fla") is not None


def _is_on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda
