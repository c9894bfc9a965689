"""The delta rule of gated delta nets and of Kimi's delta attention: by the kernels of a library, or in plain torch.

The two differ in `DeltaInputs.decay`: a state decays by head in the former, by channel of the keys in the latter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvblocks.engine.model.hybrid.delta_kernels import DeltaInputs, Rule, chunked, has_kernels, recurrent

ChunkRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes a chunk from query, key, value, decay, beta and state, all by head.

Returns outputs and the state after it.
"""


def recur_delta(rule: Rule, rows: Tensor, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance several sequences by one token each. Returns the outputs, and the states after it. Changes nothing.

    rows: the rows that `inputs` were made of; their dtype and device decide between library and torch. state: float32
    [num_rows, num_heads, key_dim, value_dim]. Returns float32.
    """
    if has_kernels(rows):
        return recurrent(rule, inputs, state, rows.dtype)
    query, key, value, decay, beta = inputs
    after = state * decay.exp().reshape(*decay.shape, *[1] * (state.dim() - decay.dim()))
    matrices = after.flatten(0, 1)  # a product with a row passes over a state once, where a sum would write it anew
    known = torch.bmm(key.flatten(0, 1)[:, None], matrices).view_as(value)
    after.addcmul_(key[..., None], ((value - known) * beta[..., None])[..., None, :])
    return torch.bmm(query.flatten(0, 1)[:, None], matrices).view_as(value), after


def scan_delta(
    rule: Rule, rows: Tensor, inputs: DeltaInputs, state: Tensor, in_chunk: ChunkRule, num_chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """As `recur_delta`, for many tokens of one sequence, in order. state: [1, num_heads, key_dim, value_dim].

    in_chunk: computes up to num_chunk_tokens tokens in plain torch.
    """
    if has_kernels(rows):
        return chunked(rule, inputs, state, rows.dtype)
    by_head, after, outputs = [part.transpose(0, 1) for part in inputs], state[0], []
    for start in range(0, len(rows), num_chunk_tokens):
        query, key, value, decay, beta = (part[:, start : start + num_chunk_tokens] for part in by_head)
        output, after = in_chunk(query, key, value, decay, beta, after)
        outputs.append(output)
    return torch.cat(outputs, 1).transpose(0, 1), after[None]
