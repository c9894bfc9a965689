"""Kimi delta attention (Kimi Team 2025), the linear attention of Kimi Linear.

A head's state is a matrix S [head_dim, head_dim], as in a gated delta net (`gated_delta`). But each row of S, that is
each channel of the keys, has its own decay: S = exp(g)[:, None] S; S += k (beta (v - k S)). The output is q S.

`scan` takes chunks of 16 tokens. What a token reads of an earlier one is a sum over channels, each with its own decay
between the two tokens. A matrix product of factored decays could overflow, so the decays are computed for each pair of
tokens. Their number grows with the square of the chunk's length, so chunks are short.
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

CHUNK_TOKENS = 16
"""Tokens of a chunk of `scan`: as many as the published kernels compute by pairs."""

_INPUTS = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")


@dataclass(frozen=True)
class KimiDelta:
    """The sizes of a layer. Queries, keys and values have equally many heads, of one size.

    The decays of the channels, and the gate of the output, come from projections of rank head_dim.
    """

    num_heads: int
    head_dim: int
    kernel: int
    epsilon: float

    @property
    def num_outputs(self) -> int:
        """As `StateMixer` says."""
        return self.num_heads * self.head_dim

    @property
    def _widths(self) -> list[int]:
        """Columns of the input projection's parts, in the order of `_INPUTS`, the first three as one."""
        return [3 * self.num_outputs, self.num_heads, self.head_dim, self.head_dim]

    @property
    def num_inputs(self) -> int:
        """As `StateMixer` says: queries, keys, values, what each head writes, and two parts of low rank."""
        return sum(self._widths)

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """As `StateMixer` says: the last inputs of the three convolutions, and a matrix a head."""
        matrices = StatePart((self.num_heads, self.head_dim, self.head_dim), is_precise=True)
        return StatePart((self.kernel - 1, 3 * self.num_outputs)), matrices

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """As `StateMixer` says."""
        outputs, (_, heads, rank, _) = self.num_outputs, self._widths
        shapes: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}.weight": (width, hidden_size)
            for name, width in zip(_INPUTS, (outputs, outputs, outputs, heads, rank, rank), strict=True)
        }
        shapes |= {f"self_attn.{name}_conv1d.weight": (outputs, 1, self.kernel) for name in "qkv"}
        return shapes | {
            "self_attn.f_b_proj.weight": (outputs, rank),
            "self_attn.g_b_proj.weight": (outputs, rank),
            "self_attn.A_log": (1, 1, heads, 1),
            "self_attn.dt_bias": (outputs,),
            "self_attn.o_norm.weight": (self.head_dim,),
            "self_attn.o_proj.weight": (hidden_size, outputs),
        }

    def load(self, read: Callable[[str], Tensor]) -> MixerTensors:
        """As `StateMixer` says."""
        convolutions = torch.cat([read(f"self_attn.{name}_conv1d.weight") for name in "qkv"])
        return MixerTensors(
            torch.cat([read(f"self_attn.{name}.weight") for name in _INPUTS]),
            read("self_attn.o_proj.weight"),
            {
                "conv": convolutions.squeeze(1).T.contiguous(),
                "decay": -read("self_attn.A_log").exp().flatten(),
                "step_bias": read("self_attn.dt_bias"),
                "forget": read("self_attn.f_b_proj.weight"),
                "gate": read("self_attn.g_b_proj.weight"),
                "norm": read("self_attn.o_norm.weight"),
            },
        )

    def recur(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, write, forget, gate = split_columns(rows, self._widths)
        mixed, past = convolve(mixed[:, None], states[0], weights["conv"])
        inputs = DeltaInputs(*self._heads(mixed[:, 0]), self._decays(weights, forget), write.sigmoid())
        output, state = recur_delta("kda", rows, inputs, states[1])
        return self._finish(weights, output, gate, rows.dtype), (past, state)

    def scan(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """As `StateMixer` says."""
        mixed, write, forget, gate = split_columns(rows, self._widths)
        mixed, past = convolve(mixed, states[0][0], weights["conv"])
        inputs = DeltaInputs(*self._heads(mixed), self._decays(weights, forget), write.sigmoid())
        output, state = scan_delta("kda", rows, inputs, states[1], kimi_chunk, CHUNK_TOKENS)
        return self._finish(weights, output, gate, rows.dtype), (past[None], state)

    def _by_heads(self, columns: Tensor) -> Tensor:
        heads: Tensor = columns.unflatten(-1, (self.num_heads, self.head_dim))
        return heads

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of convolved rows, [num_rows, num_heads, head_dim] each; the first two normed."""
        query, key, value = (self._by_heads(part) for part in F.silu(mixed).chunk(3, -1))
        query, key = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        return query * self.head_dim**-0.5, key, value

    def _decays(self, weights: Weights, forget: Tensor) -> Tensor:
        """The logarithm of each channel's decay: [num_rows, num_heads, head_dim]."""
        steps = F.softplus(forget @ weights["forget"].T + weights["step_bias"])
        return self._by_heads(steps) * weights["decay"][:, None]

    def _finish(self, weights: Weights, output: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        opened = self._by_heads(gate @ weights["gate"].T).sigmoid()
        return gated_norm(output, opened, weights["norm"], self.epsilon).flatten(-2).to(dtype)


def kimi_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk's tokens, and the state after them.

    query, key, value, and decay (as a logarithm): [num_heads, num_tokens, head_dim]; beta: [num_heads, num_tokens];
    state: [num_heads, head_dim, head_dim]. All float32. Changes nothing. O(num_tokens squared) memory.
    """
    sums = decay.cumsum(-2)
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
    between = (sums[:, :, None] - sums[:, None]).masked_fill(later[..., None], -torch.inf).exp()
    reached = between * key[:, None]  # of each token the keys before it, as far as they have not decayed
    written, since_start = key * beta[..., None], sums.exp()
    system = (reached @ written[..., None]).squeeze(-1)  # its diagonal is taken as 1
    values = value * beta[..., None] - (written * since_start) @ state
    values = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    output = (query * since_start) @ state + (reached @ query[..., None]).squeeze(-1) @ values
    kept = (sums[:, -1:] - sums).exp()
    return output, state * since_start[:, -1, :, None] + (key * kept).mT @ values
