"""The row-wise parts of a Llama layer: everything but attention.

In each function here, a row of the result is made of the same row of the input and the weights, and of nothing else.
That is what lets `rows` cut a step as it likes, and what `determinism` checks bit by bit.

SiLU is taken of a view whose rows are strided, not of a contiguous copy: torch then goes through it row by row, and an
element's path (vector or scalar, whose bits differ) depends on its column alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.config import ModelConfig
from kvblocks.engine.rope import rotate
from kvblocks.engine.weights import LayerWeights, ModelWeights

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`linear(rows, weight, bias)`: rows [num_rows, in], weight [out, in], bias [out] or None -> [num_rows, out]."""


@dataclass(frozen=True)
class DecoderLayers:
    """The row-wise functions of a model. `linear` is the matrix product they use."""

    config: ModelConfig
    linear: Linear = F.linear

    def project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, the first two rotated to their positions.

        hidden: [num_rows, hidden]; cos, sin: [num_rows, head_dim / 2], the rows' angles. Returns [num_rows, num_heads,
        head_dim] and twice [num_rows, num_kv_heads, head_dim]. Changes nothing.
        """
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = self.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = heads.unflatten(-1, (num_heads + 2 * num_kv_heads, self.config.head_dim))
        turned = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        return turned[:, :num_heads], turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]

    def mix(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> None:
        """Add the attention's output projection and the MLP to `hidden`.

        hidden: [num_rows, hidden]; attended: [num_rows, num_heads, head_dim]. Changes `hidden`.
        """
        hidden += self.linear(attended.flatten(1), layer.output, layer.output_bias)
        normed = self._norm(hidden, layer.post_attention_norm)
        gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        hidden += self.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def logits(self, weights: ModelWeights, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab] of `hidden` [num_rows, hidden]. Changes nothing."""
        return self.linear(self._norm(hidden, weights.final_norm), weights.lm_head, None).float()

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, in float32 whatever the dtype. Returns a new tensor."""
        precise = rows.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True).add_(self.config.rms_norm_eps))
        return (precise * scale).to(rows.dtype).mul_(weight)
