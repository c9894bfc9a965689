"""What the layers of a prompt cache hold, and how that is cut into rows and put together again.

mlx-lm keeps one cache object per layer. There are four kinds:

- *rows*: a row for each token, from the first on. The first n rows are valid for the first n tokens.
- *windows*: rows of the latest tokens. Continuing at a token needs the `reach` rows before it.
- *states*: what a layer keeps instead of rows. A state is valid at exactly one token.
- *whole objects*: objects of other classes. A copy of the object is kept, as mlx-lm's own prompt cache does with all
  classes. It is valid at exactly one token and, if it can be trimmed, at all earlier ones.

Arrays of one kind, shape and dtype are stacked, so that the number of arrays doesn't grow with the layers. Everything
here is copied, so nothing that is kept is part of somebody else's array.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as theirs

from kvblocks.integrations import probing

NAME = "kvblocks.integrations.mlx_lm"
ROWS, WINDOW, STATE, WHOLE, UNUSED = "rows", "window", "state", "whole", "unused"

Arrays = list[mx.array]


class Stack(NamedTuple):
    """A kind of arrays that are stacked: their reach (0 for rows), their shape without the rows, and their dtype."""

    reach: int
    shape: tuple[int, ...]
    dtype: str


class Layer(NamedTuple):
    """One cache object of mlx-lm. options: what it is made with.

    stacks: the stack of each of its arrays; empty for a state.
    """

    kind: str
    class_name: str
    options: tuple[int, ...]
    stacks: tuple[Stack, ...]


class Held(NamedTuple):
    """What one cache object holds: arrays of the rows from `first` to `end`, or of a state.

    end: None if unknown. options: those that differ between states of the same layer. For a whole object, `arrays`
    contains only its copy.
    """

    layer: Layer
    arrays: Arrays
    first: int
    end: int | None
    options: tuple[int, ...] = ()


def unnested(prompt_cache: Sequence[Any]) -> list[Any]:
    """Return the cache objects, with each CacheList replaced by its members."""
    found: list[Any] = []
    for cache in prompt_cache:
        found += unnested(cache.caches) if type(cache) is theirs.CacheList else [cache]
    return found


def shape_of(prompt_cache: Sequence[Any]) -> tuple[Any, ...]:
    """Return a prompt cache's structure: None for a cache object, a tuple for a CacheList."""
    return tuple([shape_of(cache.caches) if type(cache) is theirs.CacheList else None for cache in prompt_cache])


def read(cache: Any) -> Held:
    """Read what a cache object holds. Raises UnsupportedEngineError, naming the class, if it can't be kept."""
    kind = type(cache)
    if kind in (theirs.KVCache, theirs.ConcatenateKVCache):
        end = cache.offset
        arrays = [] if cache.keys is None else [cache.keys[..., :end, :], cache.values[..., :end, :]]
        return _held(ROWS, cache, (), arrays, 0, end)
    if kind is theirs.QuantizedKVCache:
        keys, values, end, group_size, bits = cache.state
        arrays = [] if keys is None else [array[..., :end, :] for array in (*keys, *values)]
        return _held(ROWS, cache, (group_size, bits), arrays, 0, end)
    if kind is theirs.RotatingKVCache:
        keys, values, end, keep, size, index = cache.state
        if keep and keys is not None:  # the first rows stay, and then there is a gap
            layer = Layer(STATE, kind.__name__, (size, keep), ())
            return Held(layer, [keys, values], 0, end, (end, keep, size, index))
        arrays = [] if keys is None else [_in_order(array, end, index) for array in (keys, values)]
        return _held(WINDOW, cache, (size, keep), arrays, end - arrays[0].shape[-2] if arrays else 0, end)
    if kind is theirs.ChunkedKVCache:
        keys, values, end, size, first = cache.state
        arrays = [] if keys is None else [array[..., : end - first, :] for array in (keys, values)]
        return _held(WINDOW, cache, (size,), arrays, first, end)
    if kind is theirs.ArraysCache:
        states, left_padding, lengths = cache.state
        if left_padding is not None or lengths is not None:
            raise probing.refuse(NAME, "an ArraysCache with padding", "take it out of its batch with `extract`")
        present = tuple([int(state is not None) for state in states])
        return _held(STATE, cache, present, [state for state in states if state is not None], 0, None)
    return _whole(cache)


def _whole(cache: Any) -> Held:
    """Copy an object of an unknown class, by the calls that mlx-lm's own prompt cache uses."""
    kind = type(cache)
    if kind in (theirs.BatchKVCache, theirs.BatchRotatingKVCache):
        raise probing.refuse(NAME, kind.__name__, "take its sequences out with `extract`")
    end = getattr(cache, "offset", None)
    if end is not None and type(end) is not int:
        raise probing.refuse(NAME, kind.__name__, f"its offset isn't an int, but {type(end).__name__}")
    try:
        own = copy.deepcopy(cache)
        _ = int(own.nbytes), own.is_trimmable() and own.trim
    except Exception as error:  # a stranger's code; nothing was changed
        raise probing.refuse(NAME, kind.__name__, f"it can't be kept: {type(error).__name__}: {error}") from error
    return Held(Layer(WHOLE, f"{kind.__module__}.{kind.__qualname__}", (), ()), [own], 0, end)


def _held(kind: str, cache: Any, options: tuple[int, ...], arrays: Arrays, first: int, end: int | None) -> Held:
    if not arrays:
        return Held(Layer(UNUSED, type(cache).__name__, options, ()), [], 0, None)
    for array in arrays:
        if array.shape[0] != 1:
            raise probing.refuse(NAME, f"a batch of {array.shape[0]}", "take its sequences out with `extract`")
    reach = options[0] if kind == WINDOW else 0
    shapes = [] if kind == STATE else [(*array.shape[:-2], array.shape[-1]) for array in arrays]
    stacks = [Stack(reach, shape, str(array.dtype)) for shape, array in zip(shapes, arrays, strict=False)]
    return Held(Layer(kind, type(cache).__name__, options, tuple(stacks)), arrays, first, end)


def _in_order(array: mx.array, end: int, index: int) -> mx.array:
    """Return the rows of a rotating array, the oldest first."""
    if index == array.shape[-2]:
        return array
    if index < end:
        return mx.concatenate([array[..., index:, :], array[..., :index, :]], axis=-2)
    return array[..., :index, :]


def make(layer: Layer, arrays: Arrays, end: int, options: tuple[int, ...] = ()) -> Any:
    """Return a new cache object of `end` tokens. arrays: it owns them from now on; rows may be followed by room.

    options: as in `Held`.
    """
    kind: Any = getattr(theirs, layer.class_name)
    if layer.kind == UNUSED:
        return kind(len(layer.options)) if kind is theirs.ArraysCache else kind(*layer.options)
    if kind is theirs.KVCache:
        return kind.from_state((*arrays, end))
    if kind is theirs.ConcatenateKVCache:
        return kind.from_state(tuple([array[..., :end, :] for array in arrays]))
    if kind is theirs.QuantizedKVCache:
        half = len(arrays) // 2
        return kind.from_state((arrays[:half], arrays[half:], end, *layer.options))
    if kind is theirs.ChunkedKVCache:
        return kind.from_state((*arrays, end, layer.options[0], end - arrays[0].shape[-2]))
    if kind is theirs.ArraysCache:
        left = iter(arrays)
        return kind.from_state(([next(left) if is_there else None for is_there in layer.options], None, None))
    if layer.kind == STATE:
        return kind.from_state((*arrays, *options))
    return kind.from_state((*arrays, end, 0, layer.options[0], arrays[0].shape[-2]))


def nested(shape: tuple[Any, ...], caches: list[Any]) -> list[Any]:
    """Return cache objects as a prompt cache of this structure. Undoes `unnested`."""
    left = iter(caches)

    def build(tree: tuple[Any, ...]) -> list[Any]:
        return [next(left) if part is None else theirs.CacheList(*build(part)) for part in tree]

    return build(shape)
