"""The parameters of attention, beside the weights, that differ from layer to layer of a model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvblocks import FullAttention, Group

EVERYTHING = FullAttention(1)
"""The kind of layers whose rows see all keys up to their own position."""


class LayerLocation(NamedTuple):
    """Where a layer's K and V are: in which KV-cache group, and in which of a block's slots for layers."""

    group: int
    slot: int


@dataclass(frozen=True)
class Temperature:
    """A factor of scores that grows with the position: 1 + strength * log(1 + floor((position + 1) / num_tokens)).

    From: Scalable-Softmax (Nakanishi 2025), in the stepwise form of Llama 4 (attn_scale, floor_scale).
    """

    num_tokens: int
    strength: float

    def table(self, num_positions: int) -> Tensor:
        """The factor of every position: float32 [num_positions], computed in the same order as in `transformers`."""
        steps = torch.floor((torch.arange(num_positions).float() + 1.0) / self.num_tokens)
        return torch.log1p(steps) * self.strength + 1.0


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends.

    A score is `scale * (q . k)`, then `softcap * tanh(score / softcap)` if there is a softcap. A row sees the keys up
    to its own position from `kind.first_seen` on. `kind` is that of the layer's KV-cache group, but with blocks of one
    token, since a model doesn't know the block size. `temperature` scales queries, before attention. `group` is the
    KV-cache group whose block tables and slots the layer uses.
    """

    scale: float
    kind: Group = EVERYTHING
    softcap: float | None = None
    group: int = 0
    temperature: Temperature | None = None
