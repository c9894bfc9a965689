"""The parameters of attention, beside the weights, that differ from layer to layer of a model."""

from dataclasses import dataclass
from typing import NamedTuple


class LayerLocation(NamedTuple):
    """Where a layer's K and V are: in the blocks of a KV-cache group, and in one of the slots that a block has."""

    group: int
    slot: int


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends.

    A score is `scale * (q . k)`, then `softcap * tanh(score / softcap)` if there is a softcap. A row at position p
    sees the keys from p - window + 1 to p, or all up to p without a window. `group` is the KV-cache group that the
    layer belongs to: its block tables and slots are those of that group.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    group: int = 0
