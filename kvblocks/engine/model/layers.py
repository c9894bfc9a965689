"""The row-wise parts of a decoder: everything but attention.

In each function here, a row of the result depends only on the same row of the input and on the weights. So `rows` may
cut a step into any chunks. `determinism` checks this property bit by bit.

Activations are computed on a view with strided rows, not on a contiguous copy, so torch processes them row by row. Then
an element's column alone decides whether it takes the vector path or the scalar one, whose bits differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.llama4 import Experts
from kvblocks.engine.model.products import product
from kvblocks.engine.model.rope import rotate
from kvblocks.engine.model.weights import ExpertWeights, LayerWeights, ModelWeights

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`linear(rows, weight, bias)`: rows [num_rows, in], weight [out, in], bias [out] or None -> [num_rows, out].

Weights are as `products.pack` returned them.
"""


class RowOps(Protocol):
    """The row-wise operations between the matrix products of a model."""

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in float32 whatever the dtype. Returns a new tensor."""

    def add(self, hidden: Tensor, added: Tensor, output_norm: Tensor | None, next_norm: Tensor | None) -> Tensor | None:
        """Add `added`, normed by `output_norm` if given, to `hidden`. Return the sum normed by `next_norm`, or None.

        Changes `hidden`.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """Apply the MLP's activation to the first half of the columns, times the second half. Returns a new tensor."""


@dataclass(frozen=True)
class TorchRows:
    """`RowOps` in plain torch, on any device."""

    config: ModelConfig

    @cached_property
    def _epsilon(self) -> Tensor:
        """The norms' epsilon as a tensor on the CPU. torch would convert a number to a tensor in every call."""
        return torch.tensor(self.config.rms_norm_eps)

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """As `RowOps` says."""
        if rows.is_cpu and rows.dtype == weight.dtype == torch.float32:  # the same result in fewer calls
            root = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            scale = torch.addcmul(self._epsilon, root, root, value=1 / rows.shape[-1]).rsqrt_()
            return (rows * scale).mul_(weight)
        precise = rows.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True).add_(self.config.rms_norm_eps))
        return (precise * scale).to(weight.dtype).mul_(weight).to(rows.dtype)

    def add(self, hidden: Tensor, added: Tensor, output_norm: Tensor | None, next_norm: Tensor | None) -> Tensor | None:
        """As `RowOps` says."""
        hidden += added if output_norm is None else self.norm(added, output_norm)
        return None if next_norm is None else self.norm(hidden, next_norm)

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `RowOps` says."""
        gate, up = gate_up.chunk(2, dim=-1)
        is_silu = self.config.architecture.activation == "silu"
        return (F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")).mul_(up)


class DecoderLayers:
    """The row-wise functions of a model.

    linear: the matrix product; ops: the operations between products; None: plain torch. keeps_rows: whether each expert
    computes all rows of a call, and not only those that chose it. Shapes then don't depend on what other rows chose.

    A layer takes normed rows. For the first layer they come from `norm`, for each other one from `mix` of the previous
    layer.
    """

    def __init__(
        self, config: ModelConfig, linear: Linear = product, ops: RowOps | None = None, *, keeps_rows: bool = False
    ) -> None:
        self.config = config
        self.linear = linear
        self._keeps_rows = keeps_rows
        self._ops: RowOps = TorchRows(config) if ops is None else ops
        self.norm = self._ops.norm

    def heads(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        """The heads of queries, of K and of V: [num_rows, num_heads + 2 * num_kv_heads, head_dim]. Changes nothing.

        In models with an output gate, num_heads heads of gates follow.
        """
        projected = self.project(layer, normed)
        return projected.view(projected.shape[0], -1, self.config.head_dim)

    def project(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        """The input projection of a layer: [num_rows, columns]. Changes nothing."""
        return self.linear(normed, layer.qkv, layer.qkv_bias)

    def latents(self, layer: LayerWeights, normed: Tensor, *, absorbs: bool) -> tuple[Tensor, Tensor]:
        """Queries and entries of latent attention: [num_rows, num_heads, dim], [num_rows, 1, entry_dim].

        absorbs: whether to return queries for entries instead of queries for the heads' keys. Changes nothing.
        """
        assert layer.latent is not None
        query, entry = layer.latent.split(self.project(layer, normed))
        return (layer.latent.absorb(query) if absorbs else query), entry

    def gates(self, heads: Tensor) -> Tensor | None:
        """The gates of the attention's output in `heads`, [num_rows, num_heads, head_dim], or None without gates."""
        return heads[:, -self.config.num_heads :] if self.config.architecture.has_output_gate else None

    def turn(self, layer: LayerWeights, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of `heads`. Query and key are rotated by position, after the norm if the model has one.

        cos, sin: [num_rows, 1, head_dim], the rows' angles, see `rope.rotate`. Returns [num_rows, num_heads, head_dim]
        and twice [num_rows, num_kv_heads, head_dim]. Changes nothing.
        """
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        turned = heads[:, : num_heads + num_kv_heads]
        value = heads[:, num_heads + num_kv_heads : num_heads + 2 * num_kv_heads]
        turned = rotate(turned if layer.qk_norm is None else self._ops.norm(turned, layer.qk_norm), cos, sin)
        query, key = turned.split_with_sizes((num_heads, num_kv_heads), 1)
        return query, key, value

    def mix(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        attended: Tensor,
        next_norm: Tensor | None,
        gates: Tensor | None = None,
        *,
        absorbed: bool = False,
    ) -> Tensor | None:
        """Add the output projection of attention or of a mixer, and then the MLP, to `hidden`, in place.

        hidden: [num_rows, hidden]. attended: the attention's output, [num_rows, num_heads, head_dim], or a mixer's,
        [num_rows, num_outputs]; in latent attention, weighted sums of entries, [num_rows, num_heads, entry_dim], if
        `absorbed`, else [num_rows, num_heads, value_dim]. next_norm: the weight of the next layer's input norm. gates:
        as `gates` returns them. Returns the next layer's normed rows, [num_rows, hidden]; None after the last layer.
        """
        if gates is not None:
            attended = attended * gates.sigmoid()
        if absorbed:
            assert layer.latent is not None
            attended = layer.latent.values(attended)
        added = self._scaled(self.linear(attended.flatten(1), layer.output, layer.output_bias))
        normed = self._ops.add(hidden, added, layer.attention_output_norm, layer.mlp_norm)
        assert normed is not None  # every layer has an mlp_norm
        gated = self._ops.gate(self.linear(normed, layer.gate_up, layer.gate_up_bias))
        added = self.linear(gated, layer.down, layer.down_bias)
        if layer.experts is not None:
            self._add_experts(layer.experts, normed, added)
        return self._ops.add(hidden, self._scaled(added), layer.mlp_output_norm, next_norm)

    def _scaled(self, added: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return added if scale == 1.0 else added.mul_(scale)

    def _add_experts(self, experts: ExpertWeights, normed: Tensor, added: Tensor) -> None:
        """Add to each row of `added` the outputs of the experts that the row chose. Both are [num_rows, hidden].

        normed: the experts' input. `added` has the shared expert's output. Waits for a GPU, to know which experts were
        chosen.
        """
        kind = self.config.experts
        assert kind is not None
        logits = self.linear(normed, experts.router, None)
        if kind.has_shared_gate:
            added *= logits[:, -1:].sigmoid()
            logits = logits[:, :-1]
        # On strided rows, for the reason that the module's docstring has.
        logits = F.pad(logits.float(), (0, 1))[:, :-1]
        by_softmax = kind.weighs_outputs and not kind.chooses_by_sigmoid
        scores = logits.softmax(-1) if by_softmax else logits.sigmoid()
        chosen = (logits if experts.bias is None else _ranks(kind, scores + experts.bias)).topk(kind.num_chosen).indices
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, value=True)
        scores = scores.masked_fill(~is_chosen, 0)
        if kind.normalizes:
            scores = scores / scores.sum(-1, keepdim=True)
        scores = scores * kind.scale
        scores = scores.to(normed.dtype)
        for expert in chosen.unique().tolist():
            own = is_chosen[:, expert].nonzero().squeeze(1)
            rows, score = (normed, scores) if self._keeps_rows else (normed[own], scores[own])
            weight = score[:, expert, None]
            inputs = rows if kind.weighs_outputs else rows * weight
            output = self.linear(
                self._ops.gate(self.linear(inputs, experts.gate_up[expert], None)), experts.down[expert], None
            )
            if kind.weighs_outputs:
                output = output * weight
            added.index_add_(0, own, output[own] if self._keeps_rows else output)

    def logits(self, weights: ModelWeights, hidden: Tensor) -> Tensor:
        """The logits, float32 [num_rows, vocab], of `hidden` [num_rows, hidden]. Changes nothing."""
        logits = self.linear(self._ops.norm(hidden, weights.final_norm), weights.lm_head, None).float()
        if self.config.logits_scale != 1.0:
            logits *= self.config.logits_scale
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _ranks(kind: Experts, ranks: Tensor) -> Tensor:
    """What rows choose by, [num_rows, num_experts], with -inf for the experts of all but a row's best groups."""
    if kind.num_groups == kind.num_chosen_groups:
        return ranks
    groups: Tensor = ranks.unflatten(1, (kind.num_groups, -1))
    best = groups.topk(2).values.sum(-1).topk(kind.num_chosen_groups).indices
    is_left = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, value=False)
    return groups.masked_fill(is_left[..., None], -torch.inf).flatten(1)
