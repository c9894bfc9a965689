"""The row-wise parts of a decoder: everything but attention.

In each function here, a row of the result is made of the same row of the input and the weights, and of nothing else.
That is what lets `rows` cut a step as it likes, and what `determinism` checks bit by bit.

Activations are taken of a view whose rows are strided, not of a contiguous copy: torch then goes through it row by row,
and an element's path (vector or scalar, whose bits differ) depends on its column alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.products import product
from kvblocks.engine.model.rope import rotate
from kvblocks.engine.model.weights import LayerWeights, ModelWeights

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`linear(rows, weight, bias)`: rows [num_rows, in], weight [out, in], bias [out] or None -> [num_rows, out].

Weights are as `products.pack` returned them.
"""


@dataclass(frozen=True)
class DecoderLayers:
    """The row-wise functions of a model. `linear` is the matrix product they use."""

    config: ModelConfig
    linear: Linear = product

    def project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, the first two rotated to their positions.

        hidden: [num_rows, hidden]; cos, sin: [num_rows, 1, head_dim], the rows' angles, see `rope.rotate`. Returns
        [num_rows, num_heads, head_dim] and twice [num_rows, num_kv_heads, head_dim]. Changes nothing.
        """
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = self.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = heads.view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
        turned, value = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
        turned = rotate(turned if layer.qk_norm is None else self._norm(turned, layer.qk_norm), cos, sin)
        query, key = turned.split_with_sizes((num_heads, num_kv_heads), 1)
        return query, key, value

    def mix(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> None:
        """Add the attention's output projection and the MLP to `hidden`.

        hidden: [num_rows, hidden]; attended: [num_rows, num_heads, head_dim]. Changes `hidden`.
        """
        added = self.linear(attended.flatten(1), layer.output, layer.output_bias)
        hidden += added if layer.attention_output_norm is None else self._norm(added, layer.attention_output_norm)
        normed = self._norm(hidden, layer.mlp_norm)
        gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        added = self.linear(self._activate(gate).mul_(up), layer.down, layer.down_bias)
        hidden += added if layer.mlp_output_norm is None else self._norm(added, layer.mlp_output_norm)

    def logits(self, weights: ModelWeights, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab] of `hidden` [num_rows, hidden]. Changes nothing."""
        logits = self.linear(self._norm(hidden, weights.final_norm), weights.lm_head, None).float()
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @cached_property
    def _epsilon(self) -> Tensor:
        """The norms' epsilon as a tensor on the CPU: a number in its place would be made one in every call."""
        return torch.tensor(self.config.rms_norm_eps)

    def _activate(self, gate: Tensor) -> Tensor:
        """The MLP's activation. Returns a new tensor."""
        return F.silu(gate) if self.config.architecture.activation == "silu" else F.gelu(gate, approximate="tanh")

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in float32 whatever the dtype. Returns a new tensor."""
        if rows.is_cpu and rows.dtype == weight.dtype == torch.float32:  # the same, in fewer calls
            root = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            scale = torch.addcmul(self._epsilon, root, root, value=1 / rows.shape[-1]).rsqrt_()
            return (rows * scale).mul_(weight)
        precise = rows.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True).add_(self.config.rms_norm_eps))
        return (precise * scale).to(weight.dtype).mul_(weight).to(rows.dtype)
