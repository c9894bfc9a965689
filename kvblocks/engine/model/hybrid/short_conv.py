"""The gated short convolution of LFM2 (Liquid AI 2025). Its state is its last inputs."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvblocks.engine.model.hybrid.mixer import MixerTensors, StatePart, States, Weights, convolve, split_columns


@dataclass(frozen=True)
class ShortConv:
    """A convolution of x * b over the last `kernel` tokens, multiplied by c. x, b and c are projections of the rows."""

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
