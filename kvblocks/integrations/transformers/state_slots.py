"""The states of running sequences, and what transformers' layers see of them.

A slot holds a sequence's state: the bytes of all layers, one after another. A checkpoint is these bytes, cut into
blocks of transformers' own tensor. transformers' layers are written for one sequence, or for several with equally many
tokens. So in each step a layer is called once for every sequence with several tokens, and once for all sequences with
one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvblocks.integrations.transformers.state_kinds import StateKind, StateShape

_ALIGNMENT = 64
"""Each part of a state begins at a multiple of this many bytes."""

_RUNNING: ContextVar["ModelStates | None"] = ContextVar("_RUNNING", default=None)
"""The `ModelStates` whose step this thread runs."""


@dataclass
class LayerStates:
    """Some sequences' states in a layer, which takes the place of a `Cache` for transformers' layers.

    conv: [num_seqs, columns, kernel]; matrices: [num_seqs, ...], or None. The calls are those of `Cache`.
    """

    conv: Tensor
    matrices: Tensor | None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002
        """The convolution's last inputs. A single token rewrites them in place."""
        return self.conv

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:  # noqa: ARG002
        """Note a convolution's new inputs, [num_seqs, columns, num_tokens].

        Return the earlier inputs followed by these.
        """
        joined = torch.cat([self.conv, conv_states], -1)
        self.conv.copy_(joined[..., -self.conv.shape[-1] :])
        return joined

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """The heads' matrices."""
        return self.matrices

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002
        """Note new matrices."""
        assert self.matrices is not None
        return self.matrices.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Always False, since no tokens are taken back."""
        return False


class ModelStates:
    """The slots of a cache, and the step that uses them.

    layers: the numbers of the layers that keep a state. blocks: transformers' tensor as uint8 [num_blocks, bytes of a
    block], including the rows that don't belong to kvblocks. dtype: the model's.
    """

    def __init__(
        self,
        kind: StateKind,
        shape: StateShape,
        layers: Iterable[int],
        num_slots: int,
        blocks: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.kind, self.blocks = kind, blocks
        numbers = list(layers)
        self.slots = torch.zeros(
            num_slots, state_bytes(shape, dtype) * len(numbers), dtype=torch.uint8, device=blocks.device
        )
        self.parts: dict[int, LayerStates] = {}
        start = 0
        for layer in numbers:
            conv = self._part(start, shape.conv, dtype)
            start += _aligned(shape.conv, dtype)
            matrices = None
            if shape.matrices is not None:
                matrices = self._part(start, shape.matrices, torch.float32)
                start += _aligned(shape.matrices, torch.float32)
            self.parts[layer] = LayerStates(conv, matrices)
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._rows: list[tuple[int, int]] = []

    def _part(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        own = self.slots[:, start : start + prod(shape) * dtype.itemsize]
        part: Tensor = own.view(dtype).unflatten(1, shape)
        return part

    def plan_step(self, rows: list[tuple[int, int]], before: list[Any], after: list[Any]) -> None:
        """Note the next step: (slot, number of tokens) of each request, and the copies to make before and after it.

        If a step never ran, the copies before it are still made, in order, since a slot's new owner relies on them. The
        copies after it are dropped, as its checkpoints are.
        """
        self._rows = rows
        self._before += before
        self._after = after

    @contextmanager
    def step(self, model: Any) -> Iterator[None]:
        """Inside this context, this thread's call of `model` is the planned step: its layers use the slots' states."""
        before, self._before = self._before, []
        self.copy(before)
        layers = [module for module in model.modules() if type(module).__name__ == self.kind.layer]
        for layer in layers:
            layer.forward = partial(self._advance, layer.layer_idx, layer.forward)
        running = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(running)
            for layer in layers:
                del layer.forward
        after, self._after = self._after, []
        self.copy(after)

    def _advance(self, layer_idx: int, forward: Callable[..., Tensor], hidden_states: Tensor, **given: Any) -> Tensor:
        """Compute a layer for the step's rows, [1, num_tokens, width], and rewrite the states of its sequences."""
        if _RUNNING.get() is not self:  # another thread's call of the model
            return forward(hidden_states=hidden_states, **given)
        states, mixed, start = self.parts[layer_idx], torch.empty_like(hidden_states), 0
        singles: list[tuple[int, int]] = []
        for slot, num_tokens in self._rows:
            part = slice(start, start + num_tokens)
            start += num_tokens
            if num_tokens == 1:
                singles.append((slot, part.start))
                continue
            own = states.matrices if states.matrices is None else states.matrices[slot : slot + 1]
            view = LayerStates(states.conv[slot : slot + 1], own)
            mixed[:, part] = self._call(forward, hidden_states[:, part], view)
        assert start == hidden_states.shape[1], f"expected a step of {start} tokens, got {hidden_states.shape[1]}"
        if singles:
            slots, rows = (torch.tensor(numbers, device=mixed.device) for numbers in zip(*singles, strict=True))
            own = states.matrices if states.matrices is None else states.matrices[slots]
            some = LayerStates(states.conv[slots], own)
            mixed[0, rows] = self._call(forward, hidden_states[0, rows][:, None], some)[:, 0]
            states.conv[slots] = some.conv
            if states.matrices is not None and some.matrices is not None:
                states.matrices[slots] = some.matrices
        return mixed

    def _call(self, forward: Callable[..., Tensor], hidden_states: Tensor, states: LayerStates) -> Tensor:
        arguments: Mapping[str, Any] = {self.kind.argument: states}
        return forward(hidden_states=hidden_states, attention_mask=None, **arguments)

    def copy(self, copies: Iterable[Any]) -> None:
        """Make kvblocks' copies of states, in order. O(bytes)."""
        for kind, _, slot, source, block_ids in copies:
            if kind == "clear":
                self.slots[slot] = 0
            elif kind == "fork":
                self.slots[slot] = self.slots[source]
            else:
                ids = torch.tensor(block_ids, device=self.slots.device)
                full, rest = divmod(self.slots.shape[1], self.blocks.shape[1])
                whole, tail = self.slots[slot].split([self.slots.shape[1] - rest, rest])
                rows = whole.view(full, -1) if full else whole.view(0, self.blocks.shape[1])
                if kind == "restore":
                    rows.copy_(self.blocks[ids[:full]])
                    if rest:
                        tail.copy_(self.blocks[block_ids[-1], :rest])
                else:
                    self.blocks.index_copy_(0, ids[:full], rows)
                    if rest:
                        self.blocks[block_ids[-1], :rest] = tail


def state_bytes(shape: StateShape, dtype: torch.dtype) -> int:
    """The bytes of a state in one layer."""
    matrices = 0 if shape.matrices is None else _aligned(shape.matrices, torch.float32)
    return _aligned(shape.conv, dtype) + matrices


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
