"""The slots in which the live states of a model's sequences lie, and the copies between them and blocks of the pool.

A slot has the states of all layers one after another, as bytes. Each part of a layer's state is a view of all slots.
A checkpoint is the bytes of a slot, cut into blocks of the KV cache, in the order of the block ids.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from kvblocks import StateCopy
from kvblocks.engine.model.hybrid.mixer import StateMixer, StatePart, States
from kvblocks.errors import InvalidArgumentError

_ALIGNMENT = 64
"""Each part begins at a multiple of this many bytes."""


class Blocks(Protocol):
    """The blocks of a KV cache, as bytes. Properties and methods mean what they mean in `KVCache`."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""

    @property
    def num_block_bytes(self) -> int:
        """The bytes of one block."""

    @property
    def block_rows(self) -> Tensor | None:
        """All blocks, uint8 [num_blocks, num_block_bytes]; None if a block isn't contiguous."""

    @property
    def copies_by_kernel(self) -> bool:
        """Whether `move_states` may be called."""

    def move_states(self, slots: Tensor, pieces: Sequence[tuple[int, int, int]], *, saving: bool) -> None:
        """Copy states between slots and blocks."""

    def gather_blocks(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy blocks to a buffer."""

    def scatter_blocks(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy a buffer to blocks."""


def state_bytes(mixers: Iterable[StateMixer | None], dtype: torch.dtype) -> list[int]:
    """The bytes of one sequence's state in each layer that keeps a state. dtype: the model's. O(layers)."""
    return [sum(_num_bytes(part, dtype) for part in mixer.parts) for mixer in mixers if mixer is not None]


@dataclass(frozen=True)
class StateMemory:
    """Memory for the recurrent states of live sequences, a slot each.

    slots: uint8 [num_slots, bytes of a state]. layers: for each layer, the parts of its state as views of all slots,
    [num_slots, *shape] each; empty for a layer that keeps no state.
    """

    slots: Tensor
    layers: tuple[States, ...]

    @classmethod
    def allocate(
        cls, mixers: Sequence[StateMixer | None], num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> "StateMemory":
        """Zeroed slots for a model's layers. Raises InvalidArgumentError for fewer than one slot."""
        if num_slots < 1:
            raise InvalidArgumentError(f"expected num_slots of at least 1, got {num_slots}")
        slots = torch.zeros(num_slots, sum(state_bytes(mixers, dtype)), dtype=torch.uint8, device=device)
        layers, start = [], 0
        for mixer in mixers:
            parts = []
            for part in () if mixer is None else mixer.parts:
                kind = _dtype(part, dtype)
                own = slots[:, start : start + math.prod(part.shape) * kind.itemsize]
                parts.append(own.view(kind).unflatten(1, part.shape))
                start += _num_bytes(part, dtype)
            layers.append(tuple(parts))
        return cls(slots, tuple(layers))

    @property
    def num_slots(self) -> int:
        """How many states fit."""
        return self.slots.shape[0]

    def copy(self, copies: Iterable[StateCopy], blocks: Blocks) -> None:
        """Clear, fork, save and restore states, in order.

        Changes the slots; copies of kind "save" change the cache's blocks. Raises InvalidArgumentError for slots or
        blocks that don't exist. Adjacent copies of one kind are checked together before any of them is made; copies
        before those have been made then. O(bytes).
        """
        for kind, some in groupby(copies, key=attrgetter("kind")):
            group = list(some)
            for _, _, slot, source, block_ids in group:
                self._check(slot, source if kind == "fork" else slot, block_ids, blocks)
            if kind in ("clear", "fork"):
                for _, _, slot, source, _ in group:
                    self.slots[slot] = 0 if kind == "clear" else self.slots[source]
            elif blocks.copies_by_kernel:
                if kind == "restore":  # of two of a slot the second one counts, and one launch has no order
                    group = list({copy.slot: copy for copy in group}.values())
                pieces = [(copy.slot, place, block) for copy in group for place, block in enumerate(copy.block_ids)]
                blocks.move_states(self.slots, pieces, saving=kind == "save")
            else:
                for _, _, slot, _, block_ids in group:
                    self._move(slot, block_ids, blocks, saving=kind == "save")

    def _move(self, slot: int, block_ids: tuple[int, ...], blocks: Blocks, *, saving: bool) -> None:
        ids = torch.tensor(block_ids, device=self.slots.device)
        full, rest = divmod(self.slots.shape[1], blocks.num_block_bytes)
        whole = self.slots[slot, : full * blocks.num_block_bytes].unflatten(0, (full, -1)) if full else None
        (_put if saving else _take)(blocks, ids, whole, self.slots[slot, self.slots.shape[1] - rest :])

    def _check(self, slot: int, source: int, block_ids: tuple[int, ...], blocks: Blocks) -> None:
        if not 0 <= slot < self.num_slots or not 0 <= source < self.num_slots:
            raise InvalidArgumentError(
                f"copies of states: expected slots from 0 to {self.num_slots - 1}, got {slot} and {source}"
            )
        wanted = -(-self.slots.shape[1] // blocks.num_block_bytes)
        if block_ids and (len(block_ids) != wanted or min(block_ids) < 0 or max(block_ids) >= blocks.num_blocks):
            raise InvalidArgumentError(
                f"copies of states: expected {wanted} block ids from 0 to {blocks.num_blocks - 1}, got {block_ids}"
            )


def _take(blocks: Blocks, ids: Tensor, whole: Tensor | None, tail: Tensor) -> None:
    """Bring the bytes of blocks into a slot: of full ones to `whole`, [num_blocks, bytes], of the last to `tail`."""
    rows = blocks.block_rows
    staging = rows if rows is not None else _staging(blocks, ids)
    own = ids if rows is not None else torch.arange(len(ids), device=ids.device)
    if rows is None:
        blocks.gather_blocks(ids, staging)
    full = 0 if whole is None else len(whole)
    if whole is not None:
        torch.index_select(staging, 0, own[:full], out=whole)
    if len(tail):
        tail.copy_(staging[own[full], : len(tail)])


def _put(blocks: Blocks, ids: Tensor, whole: Tensor | None, tail: Tensor) -> None:
    """Bring the bytes of a slot into blocks, as `_take`. What the last block has behind them stays or becomes zeros."""
    rows = blocks.block_rows
    staging = rows if rows is not None else _staging(blocks, ids)
    own = ids if rows is not None else torch.arange(len(ids), device=ids.device)
    full = 0 if whole is None else len(whole)
    if whole is not None:
        staging.index_copy_(0, own[:full], whole)
    if len(tail):
        staging[own[full], : len(tail)] = tail
    if rows is None:
        blocks.scatter_blocks(ids, staging)


def _staging(blocks: Blocks, ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), blocks.num_block_bytes, dtype=torch.uint8, device=ids.device)


def _dtype(part: StatePart, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if part.is_precise else dtype


def _num_bytes(part: StatePart, dtype: torch.dtype) -> int:
    """Bytes of a part with what is left free behind it."""
    return -(-math.prod(part.shape) * _dtype(part, dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
