"""LFM2 (Liquid AI 2025): layers with a gated short convolution, and layers with attention.

A convolution's state is its last inputs. The fields, their defaults and their meaning are those of `transformers`'
Lfm2Config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvblocks.engine.model.fields import read_flag, read_number, read_size
from kvblocks.engine.model.hybrid.layer_types import read_layer_types
from kvblocks.engine.model.hybrid.mixer import (
    MixerTensors,
    StatePart,
    States,
    Weights,
    convolve,
    split_columns,
)


@dataclass(frozen=True)
class ShortConv:
    """A convolution over the last `kernel` tokens of x * b, whose result is multiplied by c: all are projections."""

    width: int
    kernel: int
    has_bias: bool = False

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """As `StateMixer` says: the inputs of the last tokens."""
        return (StatePart((self.kernel - 1, self.width)),)

    @property
    def num_inputs(self) -> int:
        """As `StateMixer` says: b, c and x."""
        return 3 * self.width

    @property
    def num_outputs(self) -> int:
        """As `StateMixer` says."""
        return self.width

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """As `StateMixer` says."""
        shapes: dict[str, tuple[int, ...]] = {
            "conv.in_proj.weight": (3 * self.width, hidden_size),
            "conv.conv.weight": (self.width, 1, self.kernel),
            "conv.out_proj.weight": (hidden_size, self.width),
        }
        if self.has_bias:
            shapes |= {"conv.in_proj.bias": (3 * self.width,), "conv.conv.bias": (self.width,)}
            shapes["conv.out_proj.bias"] = (hidden_size,)
        return shapes

    def load(self, read: Callable[[str], Tensor]) -> MixerTensors:
        """As `StateMixer` says."""
        weights = {"conv": read("conv.conv.weight").squeeze(1).T.contiguous()}
        if not self.has_bias:
            return MixerTensors(read("conv.in_proj.weight"), read("conv.out_proj.weight"), weights)
        weights["bias"] = read("conv.conv.bias")
        biases = read("conv.in_proj.bias"), read("conv.out_proj.bias")
        return MixerTensors(read("conv.in_proj.weight"), read("conv.out_proj.weight"), weights, *biases)

    def recur(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, states = self._mix(weights, rows[:, None], states)
        return mixed[:, 0], states

    def scan(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, states = self._mix(weights, rows[None], states)
        return mixed[0], states

    def _mix(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """rows: [num_seqs, num_tokens, num_inputs]."""
        before, after, value = split_columns(rows, [self.width] * 3)
        mixed, past = convolve(before * value, states[0], weights["conv"], weights.get("bias"))
        return after * mixed, (past,)


def read_lfm2(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are LFM2's own, and its MLP's size. Raises ModelError."""
    conv = ShortConv(
        read_size(fields, "hidden_size"), read_size(fields, "conv_L_cache"), read_flag(fields, "conv_bias")
    )
    attends = fields.get("full_attn_idxs")
    default = None
    if isinstance(attends, list):
        default = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
    types = read_layer_types(fields, num_layers, "conv", default)
    return {
        "intermediate_size": _mlp_size(fields),
        "mixers": tuple(conv if kind == "conv" else None for kind in types),
    }


def _mlp_size(fields: Mapping[str, Any]) -> int:
    """The MLP's size: two thirds of the given one, times a factor, rounded up; or the given one itself."""
    size = read_size(fields, "intermediate_size")
    if not read_flag(fields, "block_auto_adjust_ff_dim"):
        return size
    multiple = read_size(fields, "block_multiple_of")
    adjusted = int(read_number(fields, "block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-adjusted // multiple) * multiple
