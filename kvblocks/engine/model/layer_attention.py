"""The parameters of attention, beside the weights, that differ from layer to layer of a model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvblocks.groups.kinds import ChunkedLocal, FullAttention, Group, SlidingWindow


class LayerLocation(NamedTuple):
    """Where a layer's K and V are: in the blocks of a KV-cache group, and in one of the slots that a block has."""

    group: int
    slot: int


@dataclass(frozen=True)
class Temperature:
    """Scores grow with the position: by a factor of 1 + strength * log(1 + floor((position + 1) / num_tokens)).

    From: Scalable-Softmax (Nakanishi 2025), in the steps of Llama 4 (attn_scale, floor_scale).
    """

    num_tokens: int
    strength: float

    def table(self, num_positions: int) -> Tensor:
        """The factor of every position: float32 [num_positions], in `transformers`' order of operations."""
        steps = torch.floor((torch.arange(num_positions).float() + 1.0) / self.num_tokens)
        return torch.log1p(steps) * self.strength + 1.0


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends.

    A score is `scale * (q . k)`, then `softcap * tanh(score / softcap)` if there is a softcap. A row at position p
    sees the keys up to p: with a window, from p - window + 1 on; with a chunk size, from its last multiple up to p on.
    `temperature` is a factor of the queries, which the model applies before it attends. `group` is the KV-cache group
    that the layer belongs to: its block tables and slots are those of that group.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    group: int = 0
    chunk_size: int | None = None
    temperature: Temperature | None = None

    @property
    def sees_all(self) -> bool:
        """Whether a row sees all positions up to its own."""
        return self.window is None and self.chunk_size is None

    def kind(self, block_size: int) -> Group:
        """Return the kind of KV-cache group that the layer belongs to. Raises InvalidArgumentError."""
        if self.chunk_size is not None:
            return ChunkedLocal(block_size, self.chunk_size)
        return FullAttention(block_size) if self.window is None else SlidingWindow(block_size, self.window)
