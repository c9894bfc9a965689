"""What a layer with a recurrent state is, and how a step advances the states of its sequences.

Such a layer has an input and an output projection, both row-wise, as attention has. Between them is the *mixer*: it
takes a sequence's rows in order, and rewrites the sequence's state at each of them. A mixer has two forms. `recur`
takes one token of each of several sequences. `scan` takes many tokens of one sequence, and may group them. The two
differ in the last bits, and so do two ways to cut a prompt into scans. So where bits must not depend on how a prompt
was cut, cached or preempted, every token goes through `recur` by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""The tensors that a mixer needs in addition to the two projections, in float32."""

States = tuple[Tensor, ...]
"""The parts of the states of several sequences, each [num_seqs, *shape of the part]."""


class StatePart(NamedTuple):
    """One tensor of a sequence's state in a layer. is_precise: float32 whatever the model's dtype is."""

    shape: tuple[int, ...]
    is_precise: bool = False


@dataclass(frozen=True)
class MixerTensors:
    """A layer's tensors, as a folder has them. input, output: the projections, [out, in]; biases may be None."""

    input: Tensor
    output: Tensor
    weights: dict[str, Tensor] = field(default_factory=dict)
    input_bias: Tensor | None = None
    output_bias: Tensor | None = None


class StateMixer(Protocol):
    """How the layers of a model that keep a state mix a sequence's rows.

    Implementations are frozen dataclasses of sizes.
    """

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The parts of a state. A new sequence begins with zeros."""

    @property
    def num_inputs(self) -> int:
        """The number of columns that the input projection produces."""

    @property
    def num_outputs(self) -> int:
        """The number of columns that the output projection takes."""

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer in a folder: their names, without the layer's prefix, and their shapes."""

    def load(self, read: Callable[[str], Tensor]) -> MixerTensors:
        """Read a layer's tensors: `read` returns one in float32, by its name in `shapes`."""

    def recur(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """Advance several sequences by one token each: rows [num_seqs, num_inputs] -> [num_seqs, num_outputs].

        Also returns the states after these tokens. Changes nothing.
        """

    def scan(self, weights: Weights, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """Advance one sequence by many tokens: rows [num_tokens, num_inputs] -> [num_tokens, num_outputs].

        states: those of this sequence alone. Also returns its states after the last token. Changes nothing.
        """


@dataclass(frozen=True)
class StateRows:
    """Which rows of a step advance which state: rows bounds[i] to bounds[i + 1] - 1 belong to the slot slots[i]."""

    slots: tuple[int, ...]
    bounds: tuple[int, ...]


def advance(
    mixer: StateMixer, weights: Weights, rows: Tensor, memory: States, where: StateRows, *, by_token: bool
) -> Tensor:
    """Mix a step's rows, in order: [num_rows, num_inputs] to [num_rows, num_outputs].

    memory: the parts of all slots, each [num_slots, *shape]. Changes the slots of `where`. by_token: whether every
    token goes through `recur` by itself, so that its bits depend on its own sequence only.
    """
    mixed = rows.new_empty(rows.shape[0], mixer.num_outputs)
    spans = list(zip(where.slots, where.bounds, where.bounds[1:], strict=False))
    singles = [] if by_token else [(slot, start) for slot, start, end in spans if end - start == 1]
    if singles:
        slots, own = (torch.tensor(numbers, device=rows.device) for numbers in zip(*singles, strict=True))
        outputs, states = mixer.recur(weights, rows[own], tuple(part[slots] for part in memory))
        mixed[own] = outputs
        for part, state in zip(memory, states, strict=True):
            part[slots] = state
    for slot, start, end in spans:
        if end - start == 1 and not by_token:
            continue
        states = tuple(part[slot : slot + 1].clone() for part in memory)
        if not by_token:
            mixed[start:end], states = mixer.scan(weights, rows[start:end], states)
        else:
            for row in range(start, end):  # copied, so that all tokens have the same alignment
                mixed[row : row + 1], states = mixer.recur(weights, rows[row : row + 1].clone(), states)
        for part, state in zip(memory, states, strict=True):
            part[slot : slot + 1] = state
    return mixed


def convolve(rows: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each column: rows [..., num_tokens, width] -> the same shape, in float32.

    past: the inputs before these rows, [..., kernel - 1, width]. weight: [kernel, width]. Also returns the new `past`.
    """
    joined = torch.cat([past.to(rows.dtype), rows], -2)
    num_tokens, kernel = rows.shape[-2], weight.shape[0]
    taps = [joined[..., tap : tap + num_tokens, :] * weight[tap] for tap in range(kernel)]
    mixed = taps[0]
    for tap in taps[1:]:
        mixed = mixed + tap
    return (mixed if bias is None else mixed + bias), joined[..., num_tokens:, :]


def gated_norm(rows: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The RMS norm over the last dimension, times the gate. All in float32, of one shape."""
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return rows * scale * weight * gate


def split_columns(rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of `rows` in float32, cut into parts of these sizes."""
    return rows.float().split_with_sizes(list(sizes), -1)
