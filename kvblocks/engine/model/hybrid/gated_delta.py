"""Gated delta nets (Yang et al. 2024), the linear attention of Qwen3-Next and Qwen3.5.

A head's state is a matrix S [key_dim, value_dim]. Each token lets S decay, reads what S has under the token's key, and
adds the difference to the token's value there: S = exp(g) S; S += k (beta (v - k S)). The output is q S. Before that,
queries, keys and values pass through a short causal convolution, whose last inputs are also part of the state.

`scan` takes chunks of 64 tokens. Within a chunk the writes are the solution of a triangular system (the "UT transform"
of the paper), so a chunk costs a few matrix products instead of 64 updates of S.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.hybrid.delta_kernels import DeltaInputs
from kvblocks.engine.model.hybrid.delta_rule import recur_delta, scan_delta
from kvblocks.engine.model.hybrid.mixer import (
    MixerTensors,
    StatePart,
    States,
    Weights,
    convolve,
    gated_norm,
    split_columns,
)

CHUNK_TOKENS = 64
"""Tokens of a chunk of `scan`, as in the published kernels."""


@dataclass(frozen=True)
class GatedDelta:
    """The sizes of a gated delta net. Each key head serves num_value_heads / num_key_heads value heads.

    is_interleaved: whether the input projection is stored by key heads, in two matrices (Qwen3-Next), or by its parts,
    in four (Qwen3.5).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    epsilon: float
    is_interleaved: bool

    @property
    def _num_keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def num_outputs(self) -> int:
        """As `StateMixer` says."""
        return self.num_value_heads * self.value_dim

    @property
    def _num_mixed(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self._num_keys + self.num_outputs

    @property
    def num_inputs(self) -> int:
        """As `StateMixer` says: queries, keys, values, gates, and two numbers a head."""
        return self._num_mixed + self.num_outputs + 2 * self.num_value_heads

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """As `StateMixer` says: the convolution's last inputs, and a matrix a head."""
        matrices = StatePart((self.num_value_heads, self.key_dim, self.value_dim), is_precise=True)
        return StatePart((self.kernel - 1, self._num_mixed)), matrices

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """As `StateMixer` says."""
        heads, values = self.num_value_heads, self.num_outputs
        if self.is_interleaved:
            inputs = {"in_proj_qkvz": self._num_mixed + values, "in_proj_ba": 2 * heads}
        else:
            inputs = {"in_proj_qkv": self._num_mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"linear_attn.{name}.weight": (width, hidden_size) for name, width in inputs.items()
        }
        return shapes | {
            "linear_attn.conv1d.weight": (self._num_mixed, 1, self.kernel),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden_size, values),
        }

    def load(self, read: Callable[[str], Tensor]) -> MixerTensors:
        """As `StateMixer` says."""
        return MixerTensors(
            torch.cat(self._read_inputs(read)),
            read("linear_attn.out_proj.weight"),
            {
                "conv": read("linear_attn.conv1d.weight").squeeze(1).T.contiguous(),
                "decay": -read("linear_attn.A_log").exp(),
                "step_bias": read("linear_attn.dt_bias"),
                "norm": read("linear_attn.norm.weight"),
            },
        )

    def _read_inputs(self, read: Callable[[str], Tensor]) -> list[Tensor]:
        """The input projection's parts: queries, keys, values, gates, b and a; each by heads."""
        if not self.is_interleaved:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return [read(f"linear_attn.{name}.weight") for name in names]
        shared = self.num_value_heads // self.num_key_heads
        sizes = [self.key_dim, self.key_dim, shared * self.value_dim, shared * self.value_dim]
        parts: list[Tensor] = []
        for name, columns in (("in_proj_qkvz", sizes), ("in_proj_ba", [shared, shared])):
            by_head = read(f"linear_attn.{name}.weight").unflatten(0, (self.num_key_heads, sum(columns)))
            parts += [part.flatten(0, 1) for part in by_head.split_with_sizes(columns, 1)]
        return parts

    def recur(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, gate, write, time = self._split(rows)
        mixed, past = convolve(mixed[:, None], states[0], weights["conv"])
        inputs = DeltaInputs(*self._heads(mixed[:, 0]), *self._rates(weights, write, time))
        output, state = recur_delta("gated_delta_rule", rows, inputs, states[1])
        return self._finish(weights, output, gate, rows.dtype), (past, state)

    def scan(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, gate, write, time = self._split(rows)
        mixed, past = convolve(mixed, states[0][0], weights["conv"])
        inputs = DeltaInputs(*self._heads(mixed), *self._rates(weights, write, time))
        output, state = scan_delta("gated_delta_rule", rows, inputs, states[1], delta_chunk, CHUNK_TOKENS)
        return self._finish(weights, output, gate, rows.dtype), (past[None], state)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        heads = self.num_value_heads
        return split_columns(rows, [self._num_mixed, self.num_outputs, heads, heads])

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of convolved rows, [num_rows, num_value_heads, dim] each; the first two normed."""
        query, key, value = F.silu(mixed).split_with_sizes([self._num_keys, self._num_keys, self.num_outputs], -1)
        shared = self.num_value_heads // self.num_key_heads
        query, key = (self._normed(heads).repeat_interleave(shared, 1) for heads in (query, key))
        return query * self.key_dim**-0.5, key, value.unflatten(-1, (self.num_value_heads, self.value_dim))

    def _normed(self, heads: Tensor) -> Tensor:
        split: Tensor = heads.unflatten(-1, (self.num_key_heads, self.key_dim))
        return split * torch.rsqrt(split.pow(2).sum(-1, keepdim=True) + 1e-6)

    def _rates(self, weights: Weights, write: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of each head's decay, and how much it writes: [num_rows, num_value_heads] each."""
        return weights["decay"] * F.softplus(time + weights["step_bias"]), write.sigmoid()

    def _finish(self, weights: Weights, output: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        normed = gated_norm(output, F.silu(gate.reshape(output.shape)), weights["norm"], self.epsilon)
        return normed.flatten(-2).to(dtype)


def delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk's tokens, and the state after them.

    query, key: [num_heads, num_tokens, key_dim]; value: [num_heads, num_tokens, value_dim]; decay (as a logarithm) and
    beta: [num_heads, num_tokens]; state: [num_heads, key_dim, value_dim]. All float32. Changes nothing.
    """
    sums = decay.cumsum(-1)
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
    between = (sums[:, :, None] - sums[:, None, :]).masked_fill(later, -torch.inf).exp()
    written = key * beta[..., None]
    system = (written @ key.mT) * between  # its diagonal is taken as 1
    values = value * beta[..., None] - (written * sums.exp()[..., None]) @ state
    values = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    output = (query * sums.exp()[..., None]) @ state + ((query @ key.mT) * between) @ values
    kept = (sums[:, -1:] - sums).exp()[..., None]
    return output, state * sums[:, -1].exp()[:, None, None] + (key * kept).mT @ values
