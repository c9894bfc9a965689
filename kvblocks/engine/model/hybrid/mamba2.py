"""Mamba2 (Dao and Gu 2024), the state spaces of Bamba and Granite 4.

A head's state is a matrix S [head_dim, state_dim]. Each token lets S decay by exp(dt A), adds dt x b, and reads S c.
Before that, x, b and c pass through a short causal convolution, whose last inputs are also part of the state.

`scan` takes chunks of 64 tokens. Within a chunk, what a token reads of earlier ones is a product of scores c b and of
decays, as in attention (the "state space duality" of the paper).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.hybrid.mamba_kernels import Mamba2Inputs, Mamba2Rates, chunked, has_kernels, recurrent
from kvblocks.engine.model.hybrid.mixer import MixerTensors, StatePart, States, Weights, convolve, split_columns

CHUNK_TOKENS = 64
"""Tokens of a chunk of `scan`. Published configs say 256, for GPUs; apart from rounding the result is the same."""


@dataclass(frozen=True)
class Mamba2:
    """The sizes of a Mamba2 layer. Each of num_groups pairs of b and c serves num_heads / num_groups heads."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel: int
    epsilon: float
    has_conv_bias: bool
    has_bias: bool

    @property
    def num_outputs(self) -> int:
        """As `StateMixer` says."""
        return self.num_heads * self.head_dim

    @property
    def _num_mixed(self) -> int:
        """Columns that pass the convolution: x, b and c."""
        return self.num_outputs + 2 * self.num_groups * self.state_dim

    @property
    def num_inputs(self) -> int:
        """As `StateMixer` says: gates, what the convolution takes, and the time step of each head."""
        return self.num_outputs + self._num_mixed + self.num_heads

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """As `StateMixer` says: the convolution's last inputs, and a matrix a head."""
        matrices = StatePart((self.num_heads, self.head_dim, self.state_dim), is_precise=True)
        return StatePart((self.kernel - 1, self._num_mixed)), matrices

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """As `StateMixer` says."""
        shapes: dict[str, tuple[int, ...]] = {
            "mamba.in_proj.weight": (self.num_inputs, hidden_size),
            "mamba.conv1d.weight": (self._num_mixed, 1, self.kernel),
            "mamba.A_log": (self.num_heads,),
            "mamba.D": (self.num_heads,),
            "mamba.dt_bias": (self.num_heads,),
            "mamba.norm.weight": (self.num_outputs,),
            "mamba.out_proj.weight": (hidden_size, self.num_outputs),
        }
        if self.has_conv_bias:
            shapes["mamba.conv1d.bias"] = (self._num_mixed,)
        if self.has_bias:
            shapes |= {"mamba.in_proj.bias": (self.num_inputs,), "mamba.out_proj.bias": (hidden_size,)}
        return shapes

    def load(self, read: Callable[[str], Tensor]) -> MixerTensors:
        """As `StateMixer` says."""
        weights = {
            "conv": read("mamba.conv1d.weight").squeeze(1).T.contiguous(),
            "decay": -read("mamba.A_log").exp(),
            "skip": read("mamba.D"),
            "step_bias": read("mamba.dt_bias"),
            "norm": read("mamba.norm.weight"),
        }
        if self.has_conv_bias:
            weights["conv_bias"] = read("mamba.conv1d.bias")
        biases = (read("mamba.in_proj.bias"), read("mamba.out_proj.bias")) if self.has_bias else (None, None)
        return MixerTensors(read("mamba.in_proj.weight"), read("mamba.out_proj.weight"), weights, *biases)

    def recur(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        gate, mixed, time = self._split(rows)
        mixed, past = convolve(mixed[:, None], states[0], weights["conv"], weights.get("conv_bias"))
        inputs = Mamba2Inputs(*self._parts(mixed[:, 0]), time)
        if has_kernels(rows):
            output, state = recurrent(inputs, _rates(weights), states[1], rows.dtype)
            return self._finish(weights, output, gate, rows.dtype), (past, state)
        value, key, query = self._by_heads(inputs)
        step = F.softplus(time + weights["step_bias"])
        state = states[1] * (step * weights["decay"]).exp()[..., None, None]
        state.addcmul_((value * step[..., None])[..., None], key[..., None, :])
        output = (state * query[..., None, :]).sum(-1) + value * weights["skip"][:, None]
        return self._finish(weights, output, gate, rows.dtype), (past, state)

    def scan(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        gate, mixed, time = self._split(rows)
        mixed, past = convolve(mixed, states[0][0], weights["conv"], weights.get("conv_bias"))
        inputs = Mamba2Inputs(*self._parts(mixed), time)
        if has_kernels(rows):
            output, after = chunked(inputs, _rates(weights), states[1], rows.dtype)
            return self._finish(weights, output, gate, rows.dtype), (past[None], after)
        value, key, query = (part.transpose(0, 1) for part in self._by_heads(inputs))
        step = F.softplus(time + weights["step_bias"]).T
        decay, written = step * weights["decay"][:, None], value * step[..., None]
        state, outputs = states[1][0], []
        for start in range(0, len(rows), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            output, state = scan_chunk(query[:, part], key[:, part], written[:, part], decay[:, part], state)
            outputs.append(output)
        output = (torch.cat(outputs, 1) + value * weights["skip"][:, None, None]).transpose(0, 1)
        return self._finish(weights, output, gate, rows.dtype), (past[None], state[None])

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return split_columns(rows, [self.num_outputs, self._num_mixed, self.num_heads])

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x by heads, and b and c by groups, of convolved rows: [num_rows, heads or groups, dim] each."""
        of_groups = self.num_groups * self.state_dim
        value, key, query = F.silu(mixed).split_with_sizes([self.num_outputs, of_groups, of_groups], -1)
        key, query = (part.unflatten(-1, (self.num_groups, self.state_dim)) for part in (key, query))
        return value.unflatten(-1, (self.num_heads, self.head_dim)), key, query

    def _by_heads(self, inputs: Mamba2Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """x, b and c of each head: [num_rows, num_heads, head_dim], and twice state_dim."""
        shared = self.num_heads // self.num_groups
        key, query = (part.repeat_interleave(shared, -2) for part in (inputs.key, inputs.query))
        return inputs.value, key, query

    def _finish(self, weights: Weights, output: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """The gate, and then the norm of each group."""
        gated = (output.flatten(-2) * F.silu(gate)).unflatten(-1, (self.num_groups, -1))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self.epsilon)
        weighted: Tensor = normed.flatten(-2) * weights["norm"]
        return weighted.to(dtype)


def _rates(weights: Weights) -> Mamba2Rates:
    return Mamba2Rates(weights["decay"], weights["skip"], weights["step_bias"])


def scan_chunk(query: Tensor, key: Tensor, written: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk's tokens, and the state after them.

    query, key: [num_heads, num_tokens, state_dim]; written (dt x): [num_heads, num_tokens, head_dim]; decay (as a
    logarithm): [num_heads, num_tokens]; state: [num_heads, head_dim, state_dim]. All float32. Changes nothing.
    """
    sums = decay.cumsum(-1)
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
    between = (sums[:, :, None] - sums[:, None, :]).masked_fill(later, -torch.inf).exp()
    output = ((query @ key.mT) * between) @ written + (query * sums.exp()[..., None]) @ state.mT
    kept = (sums[:, -1:] - sums).exp()[..., None]
    return output, state * sums[:, -1].exp()[:, None, None] + (written * kept).mT @ key
