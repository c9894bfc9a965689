"""Rotary position embeddings: the table of angles, and the rotation.

The table is computed once for every position, in float32 and in the order of operations that `transformers` uses, so
that its values are equal to the last bit. A row's angles depend on its position only.

From: RoFormer (Su et al. 2021); "linear" is position interpolation (Chen et al. 2023); "llama3" is Llama 3.1's, which
stretches long wavelengths, keeps short ones and blends between.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.rope_config import RopeConfig


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position's angles: [num_positions, head_dim / 2], in the model's dtype."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, rope: RopeConfig, num_positions: int, head_dim: int, like: Tensor) -> "RopeTable":
        """Compute the table in `like`'s dtype, on its device. O(num_positions * head_dim)."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        return cls(angles.cos().to(like), angles.sin().to(like))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The angles at int64 `positions` [num_rows], as `rotate` takes them: twice [num_rows, 1, head_dim]."""
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair: float32 [head_dim / 2]. Pairs that aren't rotated come last."""
    rotated = rope.rotated_dim(head_dim)
    if rotated < head_dim:
        return F.pad(inverse_frequencies(replace(rope, rotated_share=1.0), rotated), (0, (head_dim - rotated) // 2))
    plain: Tensor = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "none":
        return torch.zeros_like(plain)
    stretched = plain / rope.factor
    if rope.rope_type == "linear":
        return stretched
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_max_position_embeddings / rope.high_freq_factor
    shortest_stretched = rope.original_max_position_embeddings / rope.low_freq_factor
    turns = rope.original_max_position_embeddings / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(
        wavelength > shortest_stretched, stretched, torch.where(wavelength < longest_kept, plain, blended)
    )


def pair_order(rope: RopeConfig, head_dim: int) -> list[int]:
    """How to reorder a stored head for `rotate`, whose pairs are (i, i + head_dim / 2): each element's stored index.

    Stored heads have the rotated elements first, in pairs (i, i + rotated / 2).
    """
    half = rope.rotated_dim(head_dim) // 2
    middle = half + head_dim // 2
    return [*range(half), *range(2 * half, middle), *range(half, 2 * half), *range(middle, head_dim)]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's pairs (i, i + head_dim / 2) by their angle.

    heads: [num_rows, num_heads, head_dim]; cos, sin: [num_rows, 1, head_dim], with the pairs' angles in each half, and
    the sines of the first half negated. Returns a new tensor shaped like `heads`. A result is rounded after each
    product, and after the sum.
    """
    turned: Tensor = heads * cos
    return turned.add_(heads.roll(heads.shape[-1] // 2, -1).mul_(sin))
