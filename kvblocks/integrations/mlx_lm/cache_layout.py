"""`CacheLayout`: the layers of a prompt cache, and how their arrays are stacked."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvblocks.integrations.mlx_lm import layers
from kvblocks.integrations.mlx_lm.layers import Arrays, Held, Layer, Stack

State = tuple[Arrays, tuple[int, ...]]
"""The state of one layer: its arrays (or the one object that is kept whole), and the options that go with them."""


class CacheLayout:
    """The layers of one kind of prompt cache. Layouts are compared by `key`.

    stacks: all stacks, those of rows first. num_rows: how many of the stacks are rows; the others are windows, which
    reach back at most `most_reach` tokens. block_bytes: the bytes of a block's rows, at least 1. has_states: whether
    some layers have states or are kept whole. whole_names: the classes of layers that are kept whole. can_trim: whether
    there are such layers, and none with states or windows.
    """

    def __init__(self, shape: tuple[Any, ...], found: Sequence[Layer], block_size: int) -> None:
        self.key = shape, tuple(found)
        self._shape = shape
        self._layers = list(found)
        kinds = {layer.kind for layer in found}
        self.whole_names = sorted({layer.class_name for layer in found if layer.kind == layers.WHOLE})
        self.has_whole = bool(self.whole_names)
        self.has_states = self.has_whole or layers.STATE in kinds
        self.can_trim = self.has_whole and not kinds & {layers.STATE, layers.WINDOW}
        members: dict[Stack, list[tuple[int, int]]] = {}
        for number, layer in enumerate(found):
            for place, stack in enumerate(layer.stacks):
                members.setdefault(stack, []).append((number, place))
        self.stacks = sorted(members, key=lambda stack: (stack.reach, stack.shape, stack.dtype))
        self._members = [members[stack] for stack in self.stacks]
        self.most_reach = max([stack.reach for stack in self.stacks], default=0)
        self.num_rows = sum([not stack.reach for stack in self.stacks])
        row_bytes = [len(members[stack]) * _product(stack.shape) * _size_of(stack.dtype) for stack in self.stacks]
        self.block_bytes = max(1, block_size * sum(row_bytes[: self.num_rows]))

    def block_of_bytes(self, raw: bytes, block_size: int) -> Arrays:
        """Return the rows of a block from their concatenated bytes. O(bytes)."""
        arrays, start = [], 0
        for stack, members in zip(self.stacks[: self.num_rows], self._members, strict=False):
            shape = (len(members), *stack.shape[:-1], block_size, stack.shape[-1])
            end = start + _product(shape) * _size_of(stack.dtype)
            kind: Any = getattr(mx, stack.dtype.rpartition(".")[2])
            flat = mx.array(memoryview(raw)[start:end]) if end > start else mx.zeros(0, mx.uint8)
            arrays.append(flat.view(kind).reshape(shape))
            start = end
        return arrays

    def stretches(self, held: Sequence[Held]) -> list[tuple[int, int]]:
        """Return, for each stack, the range of tokens (first, end) for which it has all rows."""
        found = []
        for members in self._members:
            layers_of = [held[number] for number, _ in members]
            found.append((max([one.first for one in layers_of]), min([one.end or 0 for one in layers_of])))
        return found

    def cut(self, held: Sequence[Held], stack: int, first: int, end: int) -> mx.array:
        """Return the rows of a stack from `first` to `end`: a lazy array of shape (arrays, …, rows, size)."""
        parts = []
        for number, place in self._members[stack]:
            one = held[number]
            parts.append(one.arrays[place][..., first - one.first : end - one.first, :])
        return mx.stack(parts)

    def build(
        self, rows: Sequence[mx.array], states: Sequence[State], end: int, num_excess: int = 0
    ) -> list[Any] | None:
        """Return a new prompt cache of `end` tokens.

        rows: for each stack, the rows that its layers need, and perhaps room. num_excess: by how many tokens to trim
        layers that are kept whole. Returns None if one of these can't be trimmed.
        """
        left = iter(states)
        made = []
        arrays: list[list[mx.array]] = [[rows[0]] * len(layer.stacks) if rows else [] for layer in self._layers]
        for members, array in zip(self._members, rows, strict=True):
            for index, (number, place) in enumerate(members):
                arrays[number][place] = array[index]
        for layer, own in zip(self._layers, arrays, strict=True):
            if layer.kind == layers.WHOLE:
                whole = copy.deepcopy(next(left)[0][0])
                if num_excess and whole.trim(num_excess) != num_excess:
                    return None
                made.append(whole)
            elif layer.kind == layers.STATE:
                kept, options = next(left)
                made.append(layers.make(layer, [mx.contiguous(array) for array in kept], end, options))
            else:
                made.append(layers.make(layer, own, end))
        return layers.nested(self._shape, made)


def _product(numbers: Sequence[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _size_of(dtype: str) -> int:
    size: int = getattr(mx, dtype.rpartition(".")[2]).size
    return size
