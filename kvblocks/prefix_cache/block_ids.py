"""Block ids as engines give them: ints from 0 to 2**63 - 1 in a list, another iterable or a buffer."""

from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.tokens import Buffer, HasNumpy
from kvblocks.errors import InvalidArgumentError

BlockIds = Iterable[SupportsIndex] | Buffer | HasNumpy
"""Ints, or anything that `check_block_ids` takes as a buffer."""

_EXPECTED = "an iterable of ints, or a buffer of them"


def check_block_ids(kv_block_ids: BlockIds, num_blocks: int, block_size: int) -> list[int]:
    """Return `kv_block_ids` as a list of `num_blocks` or more ints from 0 to 2**63 - 1; else raise
    InvalidArgumentError.

    kv_block_ids: an iterable of ints (a bool isn't one), or a one-dimensional buffer of native integers of 2, 4 or 8
    bytes, such as array("q"), a NumPy array, or an object with a `numpy()` method (a torch CPU tensor). Doesn't check
    that the ids are different. O(ids).
    """
    given: Any = kv_block_ids
    in_buffer = None if type(given) is list else _from_buffer(given)
    ids: list[Any] = listed("kv_block_ids", _EXPECTED, given, in_order=True) if in_buffer is None else in_buffer
    if len(ids) < num_blocks:
        raise InvalidArgumentError(
            f"kv_block_ids: expected at least {num_blocks}, one for each full block of {block_size} tokens, "
            f"got {len(ids)}"
        )
    are_ints = in_buffer is not None or set(map(type, ids)) <= {int}
    if not (are_ints and _fit(ids)):
        ids = [check_count(f"kv_block_ids: position {i}", kv_block_id, 0) for i, kv_block_id in enumerate(ids)]
    return ids


def _from_buffer(given: Any) -> list[int] | None:
    """Return the items of a buffer of integers; None if `given` is no buffer but may be an iterable."""
    if is_a(given, str) or is_a(given, bytes):
        return None
    source = given
    if hasattr(given, "numpy"):
        try:
            source = given.numpy()
        except (TypeError, RuntimeError) as error:  # on a GPU, of bfloat16, with a gradient: the error says which
            raise wrong("kv_block_ids", f"a CPU tensor of ints; it says {error}", given) from error
    try:
        view = memoryview(source)
    except (TypeError, ValueError) as error:  # no buffer; NumPy has dtypes that no buffer can have
        if is_a(source, memoryview):
            raise wrong("kv_block_ids", f"a buffer of ints; it says {error}", given) from error
        return None
    kind = view.format.removeprefix("@")
    if view.ndim != 1 or len(kind) != 1 or kind not in "hHiIlLqQnN":
        raise InvalidArgumentError(
            "kv_block_ids: expected one dimension of native integers of 2, 4 or 8 bytes, got format "
            f"{view.format!r} and shape {view.shape}"
        )
    return view.tolist()


def _fit(ids: list[Any]) -> bool:
    """Whether these ints are from 0 to 2**63 - 1. Takes half the time of min()."""
    packed = array("Q")
    try:
        packed.fromlist(ids)
    except OverflowError:
        return False
    return packed.tobytes()[7::8].isascii()  # the highest bit is in the last byte
