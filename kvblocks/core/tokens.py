"""Token ids packed as 32-bit unsigned integers: the only form in which the core stores and compares them.

Packing a list costs 5 to 30 ns per token, more than all the rest of a hit. A sequence therefore packs its tokens once.
Packed tokens are little-endian, in memory and in the digest format.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Protocol, SupportsIndex

from kvblocks.arguments import as_int, has_no_order, is_a, shown
from kvblocks.errors import InvalidTokensError, NoTokensError

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError(f"kvblocks: expected a little-endian machine, got a {sys.byteorder}-endian one")


class Buffer(Protocol):
    """An object with the buffer protocol, such as array, memoryview and NumPy's arrays."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the memory."""


class HasNumpy(Protocol):
    """An object with a `numpy()` method, such as torch's CPU tensors."""

    def numpy(self) -> Any:
        """Return a NumPy array of the same memory."""


TokenIds = Iterable[SupportsIndex] | Buffer | HasNumpy
"""Ints, or anything that `pack_tokens` takes as a buffer."""

MAX_TOKEN_ID = 2**32 - 1

_WIDE = "ids have 32 bits, so give a wider one (a hash of an image, say) as an extra key of a placeholder token"


def pack_tokens(token_ids: TokenIds) -> "array[int] | memoryview[int]":
    """Return `token_ids` as 4-byte unsigned integers: a new array, or a view of the caller's buffer.

    token_ids may be:

    - an iterable of ints in an order of its own, so no set and no dict. An int is any object with `__index__`. A list
      that begins with a bool, such as a mask, is refused. A bool further on counts as 0 or 1, since a look at each item
      would make packing 3 to 7 times as slow.
    - a one-dimensional buffer of 2-, 4- or 8-byte integers, such as array("I"), a NumPy array, or an object with a
      `numpy()` method (a torch CPU tensor).

    Bytes are refused, since they may be text or packed ids. For packed u32, pass `memoryview(packed).cast("I")`.

    A buffer of 4-byte integers is not copied: whoever keeps the result copies it (`own_tokens`), unless the caller
    promises not to change the buffer. Raises InvalidTokensError unless all ids are from 0 to 2**32 - 1, and
    NoTokensError if there are none. O(1) for unsigned 4-byte integers; O(tokens) for everything else, cheapest first:
    int32 (a check of the signs), int64, lists.
    """
    given: Any = token_ids
    if type(given) is array and given.typecode == "I" and given:
        return memoryview(given)  # always valid
    if type(given) is list or type(given) is tuple:
        return _pack_ints(given)
    if is_a(given, str):
        raise InvalidTokensError("token ids: expected integers, got a str")
    if is_a(given, bytes) or is_a(given, bytearray):
        raise InvalidTokensError(
            f"token ids: expected integers, got {_name(given)}, which may be text; for packed u32, pass"
            ' memoryview(packed).cast("I")'
        )
    source: Any = _tensor_on_cpu(given) if hasattr(given, "numpy") else given
    try:
        view = memoryview(source)
    except (TypeError, ValueError) as error:  # NumPy has dtypes that no buffer can have
        if is_a(source, memoryview):
            raise InvalidTokensError(f"token ids: expected a buffer, got one that says: {error}") from None
        return _pack_ints(_listed(source))
    return _pack_buffer(view)


def own_tokens(token_ids: TokenIds) -> "array[int]":
    """Return `token_ids`, packed, in a new array that the caller's buffer has no part in.

    Raises what `pack_tokens` raises. O(tokens).
    """
    packed = pack_tokens(token_ids)
    if isinstance(packed, array):
        return packed
    own = array("I")
    own.frombytes(packed.cast("B"))
    return own


def num_equal(one: Any, other: Any) -> int:
    """Return how many leading items two buffers of bytes, or two lists of blocks, have in common.

    Compares slices, each twice as long as the one before, until they differ; then bisects. O(items in common).
    """
    end, low, high = min(len(one), len(other)), 0, 64
    while low < end and _are_equal(one, other, low, min(high, end)):
        low, high = min(high, end), 2 * high
    high = min(high, end)
    while high - low > 1:  # the first `low` items are equal; of the first `high`, one differs
        middle = (low + high) // 2
        if _are_equal(one, other, low, middle):
            low = middle
        else:
            high = middle
    return low


def _are_equal(one: Any, other: Any, start: int, end: int) -> bool:
    ours, theirs = one[start:end], other[start:end]
    if type(ours) is memoryview:  # == of memoryviews compares item by item
        return bytes(ours) == bytes(theirs)
    return bool(ours == theirs)


def _tensor_on_cpu(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:  # on a GPU, of bfloat16, with a gradient: the error says which
        raise InvalidTokensError(f"token ids: expected a CPU tensor of integers, got one that says: {error}") from error


def _listed(token_ids: Any) -> list[Any]:
    try:
        iterator = iter(token_ids)
    except TypeError:
        raise InvalidTokensError(f"token ids: expected an iterable or buffer, got {_name(token_ids)}") from None
    if has_no_order(token_ids):
        raise InvalidTokensError(f"token ids: expected integers in order, got a {_name(token_ids)}, which has none")
    return list(iterator)


def _pack_ints(token_ids: "list[Any] | tuple[Any, ...]") -> "array[int]":
    packed = array("I")
    try:  # a third faster than array("I", token_ids)
        packed.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    except (TypeError, OverflowError, ValueError):
        raise InvalidTokensError(describe_bad_id(token_ids)) from None
    if not packed:
        raise NoTokensError("token ids: expected at least one, got none")
    if type(token_ids[0]) is bool:
        raise InvalidTokensError(describe_bad_id(token_ids))
    return packed


def describe_bad_id(token_ids: "list[Any] | tuple[Any, ...]") -> str:
    """Return the error message for ids of which at least one is invalid."""
    for position, token_id in enumerate(token_ids):
        number = as_int(token_id)
        if number is None:
            return f"token ids: expected integers, got {_name(token_id)} {shown(token_id)} at position {position}"
        if not 0 <= number <= MAX_TOKEN_ID:
            text = f"token ids: expected 0 to {MAX_TOKEN_ID}, got {shown(token_id)} at position {position}"
            return text if number < 0 else f"{text}: {_WIDE}"
    return f"token ids: expected integers from 0 to {MAX_TOKEN_ID}, got {shown(token_ids)}"


def _pack_buffer(view: memoryview) -> "array[int] | memoryview[int]":
    if view.ndim != 1:
        raise InvalidTokensError(f"token ids: expected one dimension, got shape {view.shape}")
    if not view.nbytes:
        raise NoTokensError("token ids: expected at least one, got none")
    kind = view.format.removeprefix("@")
    if len(kind) != 1 or kind not in "hHiIlLqQnN":  # 1-byte items may be ids, text or packed ids
        raise InvalidTokensError(
            f"token ids: expected a buffer of native integers of 2, 4 or 8 bytes, got format {view.format!r}"
        )
    if view.itemsize < 4 or not view.c_contiguous:
        return _pack_ints(view.tolist())
    flat = view.cast("B").toreadonly()
    if view.itemsize == 4:
        # Only the top byte of each id decides whether a signed one is negative; isascii() looks for its high bit.
        if kind.islower() and not bytes(flat)[3::4].isascii():
            return _pack_ints(view.tolist())
        return flat.cast("I")
    words = array("I", bytes(flat))
    if words[1::2] != array("I", bytes(view.nbytes // 2)):
        return _pack_ints(view.tolist())
    return words[::2]


def _name(value: object) -> str:
    return type(value).__name__
