"""Defines what the kernels must compute, written to be obviously right: one row at a time, in float64.

It is slow and only for tests and checks, since it copies lengths and block tables to the host. A kernel that disagrees
with it is wrong. Only the slots that a sequence owns are read, so all others may contain anything.
"""

import torch
from torch import Tensor

from kvblocks.kernels.layout import AttentionOptions


def attention(
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over block tables.

    query: [num_rows, num_heads, head_dim], the sequences' rows one after another; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim]; block_tables: [num_seqs, max_blocks]; query_start: [num_seqs + 1],
    each sequence's first row, then the end of the last; seq_lens: [num_seqs]; the rest as in `AttentionOptions`.

    Row i of a sequence with n rows is at position `seq_len - n + i`. A row before position 0, or of no sequence, sees
    nothing: its output is 0, and its lse is -inf or its sink. Returns the output, float64 [num_rows, num_heads,
    head_dim], and its lse, float64 [num_rows, num_heads]: the natural logarithm of the softmax's denominator. Changes
    nothing.
    """
    options = AttentionOptions(scale, window, softcap, sinks, k_scale, v_scale)
    output = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    if sinks is not None:
        lse[:] = sinks.double().cpu()
    starts, ends = query_start.tolist(), seq_lens.tolist()
    for index, end in enumerate(ends):
        rows = range(starts[index], starts[index + 1])
        key = gather(key_cache, block_tables[index], end) * _of_heads(k_scale)
        value = gather(value_cache, block_tables[index], end) * _of_heads(v_scale)
        for row in rows:
            position = end - len(rows) + row - rows.start
            first = 0 if window is None else max(0, position - window + 1)
            if position >= 0:
                seen = slice(first, position + 1)
                output[row], lse[row] = _attend_row(query[row], key[seen], value[seen], options)
    return output, lse


def _of_heads(scales: Tensor | None) -> Tensor | float:
    """The factor for K or V of shape [length, num_kv_heads, head_dim]."""
    return 1.0 if scales is None else scales.double().cpu()[:, None]


def gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """A sequence's K or V, float64 [length, num_kv_heads, head_dim], read from its own slots only."""
    positions = torch.arange(length, device=cache.device)
    blocks = block_table.to(cache.device).long()[positions // cache.shape[1]]
    return cache[blocks, positions % cache.shape[1]].double().cpu()


def merge(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute attention over several sets of keys from the attention over each set.

    outputs: [num_rows, num_heads, head_dim] each; lses: [num_rows, num_heads] each. A part with an lse of -inf has no
    weight, whatever its output holds. Returns both in float64. Changes nothing.
    """
    lse = torch.stack([part.double().cpu() for part in lses])
    total = torch.logsumexp(lse, 0)
    weights = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    values = torch.stack([part.double().cpu() for part in outputs])
    values = torch.where(weights[..., None] == 0, 0.0, values)
    return (weights[..., None] * values).sum(0), total


def _attend_row(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """One row's output [num_heads, head_dim] and lse [num_heads]; query: [num_heads, head_dim]."""
    group_size = query.shape[0] // key.shape[1]
    key, value = (heads.repeat_interleave(group_size, 1) for heads in (key, value))
    scores = torch.einsum("hd,thd->ht", query.double().cpu(), key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    lse = torch.logsumexp(scores, 1)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.double().cpu())
    return torch.einsum("ht,thd->hd", torch.exp(scores - lse[:, None]), value), lse


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension: rows / sqrt(mean(rows**2) + eps) * weight, in float64 of the rows' shape."""
    exact = rows.double().cpu()
    return exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double().cpu()


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up of [num_rows, 2 * width], float64 [num_rows, width]; activation: "silu", or else GELU by tanh."""
    first, up = gate_up.double().cpu().chunk(2, -1)
    if activation == "silu":
        return first / (1 + torch.exp(-first)) * up
    inner = (2 / torch.pi) ** 0.5 * (first + 0.044715 * first**3)
    return first * (1 + torch.tanh(inner)) / 2 * up


def turn(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of heads [num_rows, num_heads, head_dim] by its angle, in float64.

    cos, sin: [num_positions, head_dim / 2]; positions: [num_rows].
    """
    pairs = torch.complex(*(half.contiguous() for half in heads.double().cpu().chunk(2, -1)))
    angles = torch.complex(*(table.double().cpu()[positions.cpu()].unsqueeze(1) for table in (cos, sin)))
    turned = pairs * angles
    return torch.cat([turned.real, turned.imag], -1)
