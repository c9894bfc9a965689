"""Values that a caller may pass by mistake, with the kinds of parameters that take them, for tests/test_bad_input.py.

`ODD` is name -> (make, kinds): `make` returns a new value, and `kinds` are the roles that it may fill. A parameter that
takes "int" must accept the values with this kind, and refuse all others. "uncalled": a function that is kept and not
called on trial.
"""

from array import array
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import kvblocks

try:
    import numpy as np
except ImportError:
    np = None


class Mine(Exception):  # noqa: N818  # no error of ours
    """An error that the caller's own code raises; any call may pass it on."""


class Index:
    """An int by `__index__`. answers: how often `__index__` returns; then it raises `error`."""

    def __init__(self, number: int = 1, answers: int = 1000, error: type[Exception] = Mine) -> None:
        self.number, self.answers, self.error = number, answers, error

    def __index__(self) -> int:
        self.answers -= 1
        if self.answers < 0:
            raise self.error("no more answers")
        return self.number


class IndexIsText:
    def __index__(self) -> Any:
        return "1"  # noqa: PLE0305  # that is what is odd about it


class Float:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error("no float")


class Hash:
    """Hashable `answers` times."""

    def __init__(self, answers: int, error: type[Exception] = Mine) -> None:
        self.answers, self.error = answers, error

    def __hash__(self) -> int:
        self.answers -= 1
        if self.answers < 0:
            raise self.error("no hash")
        return 7

    def __eq__(self, other: object) -> bool:
        return self is other


class HashVaries(Hash):
    def __hash__(self) -> int:
        self.answers += 1
        return self.answers


class EqRaises:
    def __eq__(self, other: object) -> bool:
        raise Mine("no comparison")

    def __hash__(self) -> int:
        return hash("running")


class EqNever:
    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return hash("running")


class EqAlways:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


class IterRaises:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        raise self.error("no iterator")


class IterIsNone:
    def __iter__(self) -> Any:
        return 5


class BoolRaises:
    def __bool__(self) -> bool:
        raise Mine("no truth")


class ReprRaises:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no repr")


class Lies:
    """Says that it is a `kind`."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self.kind


class NumpyRaises:
    def numpy(self) -> Any:
        raise TypeError("it is on cuda:0")


class NumpyIsText:
    def numpy(self) -> Any:
        return "text"


class Text(str, Enum):  # noqa: UP042  # the str() of a StrEnum's member is its text
    """Texts whose str() is another one."""

    ABC = "abc"


class Plain:
    pass


def yielding(*items: Any, error: type[Exception] | None = None) -> Iterator[Any]:
    yield from items
    if error is not None:
        raise error("in the middle")


def released_view() -> memoryview:
    view = memoryview(b"1234")
    view.release()
    return view


def _foreign_sequence() -> kvblocks.Sequence:
    manager, sequence = kvblocks.KVCacheManager(4, 4), kvblocks.Sequence("running", [1, 2, 3])
    manager.allocate_slots(sequence)
    return sequence


def _duck() -> SimpleNamespace:
    """What an idle sequence looks like, in part."""
    return SimpleNamespace(
        owner=None, tail_owner=None, sequence_id="duck", tokens=array("I", [1]), keys=None, blocks=[]
    )


ODD: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "None": (lambda: None, {"none", "id"}),
    "object": (object, {"id"}),
    "text": (lambda: "abc", {"text", "id"}),
    "no text": (lambda: "", {"id"}),
    "a lone surrogate": (lambda: "\ud800", {"id"}),
    "text of an enum": (lambda: Text.ABC, {"text", "id"}),
    "4 bytes": (lambda: b"\1\0\0\0", {"tokens", "id", "bytes"}),
    "3 bytes": (lambda: b"abc", {"id", "bytes"}),
    "no bytes": (lambda: b"", {"id", "nothing", "bytes"}),
    "bytearray": (lambda: bytearray(4), {"tokens", "ints"}),
    "1.5": (lambda: 1.5, {"number", "id"}),
    "NaN": (lambda: float("nan"), set()),
    "infinity": (lambda: float("inf"), {"number", "id"}),
    "-infinity": (lambda: -float("inf"), {"number", "id"}),
    "complex": (lambda: 1j, {"id"}),
    "-1": (lambda: -1, {"int", "id"}),
    "0": (lambda: 0, {"int", "id"}),
    "1": (lambda: 1, {"int", "id"}),
    "2**63": (lambda: 2**63, {"int", "id"}),
    "a huge int": (lambda: 10**5000, {"int", "id"}),
    "True": (lambda: True, {"flag", "id"}),
    "False": (lambda: False, {"flag", "id"}),
    "[]": (list, {"empty"}),
    "()": (tuple, {"empty", "id"}),
    "{}": (dict, {"empty"}),
    "[1, 2]": (lambda: [1, 2], {"ints", "tokens"}),
    "(1, 2)": (lambda: (1, 2), {"ints", "tokens", "id"}),
    "{1, 2}": (lambda: {1, 2}, {"ints", "tokens"}),
    "{1: 2}": (lambda: {1: 2}, {"ints", "tokens"}),
    "range": (lambda: range(1, 3), {"ints", "tokens", "id"}),
    "array": (lambda: array("I", [1, 2]), {"ints", "tokens"}),
    "floats in an array": (lambda: array("d", [1.5, 2.5]), {"numbers"}),
    "[None]": (lambda: [None], set()),
    "[1.5]": (lambda: [1.5], {"numbers"}),
    "[NaN]": (lambda: [float("nan")], set()),
    "['a']": (lambda: ["a"], set()),
    "[[]]": (lambda: [[]], {"empties"}),
    "[[1]]": (lambda: [[1]], {"prompts"}),
    "[object]": (lambda: [object()], set()),
    "[-1]": (lambda: [-1], {"ints"}),
    "[a huge int]": (lambda: [10**5000], {"ints"}),
    "[True]": (lambda: [True], {"tokens"}),
    "[a duck]": (lambda: [_duck()], set()),
    "[an unhashable]": (lambda: [{}], {"empties"}),
    "[a tuple of one]": (lambda: [(1,)], {"prompts"}),
    "[a wrong triple]": (lambda: [("a", "b", "c")], set()),
    "a generator of ints": (lambda: yielding(1, 2), {"ints", "tokens", "id"}),
    "a generator of text": (lambda: yielding("a", "b"), {"id"}),
    "a generator of nothing": (yielding, {"empty", "id"}),
    "a generator that raises": (lambda: yielding(1, error=Mine), {"id"}),
    "a class": (lambda: Plain, {"id", "uncalled"}),
    "the class list": (lambda: list, {"id", "uncalled"}),
    "a function": (lambda: lambda: 0, {"id", "callable"}),
    "a builtin": (lambda: len, {"id", "uncalled"}),
    "a mock": (MagicMock, {"id", "callable", "int", "empty"}),
    "a mock of a sequence": (lambda: MagicMock(spec=kvblocks.Sequence), {"id", "callable"}),
    "a duck": (_duck, set()),
    "a foreign sequence": (_foreign_sequence, {"id", "sequence"}),
    "an index": (Index, {"int", "id"}),
    "an index that raises": (lambda: Index(answers=0), {"id"}),
    "an index that raises TypeError": (lambda: Index(answers=0, error=TypeError), {"id"}),
    "an index that raises the second time": (lambda: Index(answers=1), {"int", "id"}),
    "an index that is text": (IndexIsText, {"id"}),
    "[an index]": (lambda: [Index(), Index()], {"ints", "tokens"}),
    "[an index that raises the second time]": (lambda: [Index(answers=1)], {"ints", "tokens"}),
    "[an index that raises the third time]": (lambda: [Index(answers=2)], {"ints", "tokens"}),
    "[an index that raises]": (lambda: [Index(answers=0)], set()),
    "[an index that raises ValueError]": (lambda: [Index(answers=0, error=ValueError)], set()),
    "a float that raises": (lambda: Float(Mine), {"id"}),
    "a float that raises ValueError": (lambda: Float(ValueError), {"id"}),
    "a hash that raises": (lambda: Hash(0), set()),
    "a hash that raises TypeError": (lambda: Hash(0, TypeError), set()),
    "a hash that raises the second time": (lambda: Hash(1), {"id"}),
    "a hash that raises the third time": (lambda: Hash(2), {"id"}),
    "a hash that raises the fourth time": (lambda: Hash(3), {"id"}),
    "a hash that varies": (lambda: HashVaries(0), {"id"}),
    "an == that raises": (EqRaises, set()),
    "an == that is never": (EqNever, set()),
    "an == that is always": (EqAlways, {"id"}),
    "an iterator that raises": (lambda: IterRaises(Mine), {"id"}),
    "an iterator that raises TypeError": (lambda: IterRaises(TypeError), {"id"}),
    "an iterator that is none": (IterIsNone, {"id"}),
    "a truth that raises": (BoolRaises, {"id"}),
    "a repr that raises": (ReprRaises, {"id"}),
    "a liar about str": (lambda: Lies(str), {"id"}),
    "a liar about int": (lambda: Lies(int), {"id"}),
    "a liar about list": (lambda: Lies(list), {"id"}),
    "a liar about tuple": (lambda: Lies(tuple), {"id"}),
    "a liar about bytes": (lambda: Lies(bytes), {"id"}),
    "a liar about Sequence": (lambda: Lies(kvblocks.Sequence), {"id"}),
    "a liar about CacheHit": (lambda: Lies(kvblocks.CacheHit), {"id"}),
    "a liar about Pin": (lambda: Lies(kvblocks.Pin), {"id"}),
    "a liar about KVCacheManager": (lambda: Lies(kvblocks.KVCacheManager), {"id"}),
    "a released view": (released_view, {"empty"}),
    "a tensor on a GPU": (NumpyRaises, {"id"}),
    "a tensor of text": (NumpyIsText, {"id"}),
}

if np is not None:
    _ARRAYS: dict[str, tuple[Callable[[], Any], set[str]]] = {
        "int64": (lambda: np.int64(1), {"int", "id"}),
        "int64 -1": (lambda: np.int64(-1), {"int", "id"}),
        "uint8": (lambda: np.uint8(3), {"int", "id"}),
        "float64": (lambda: np.float64(0.5), {"number", "id"}),
        "float32": (lambda: np.float32(0.5), {"number", "id"}),
        "NaN": (lambda: np.float32("nan"), set()),
        "bool": (lambda: np.bool_(True), {"id"}),
        "str": (lambda: np.str_("abc"), {"text", "id"}),
        "bytes": (lambda: np.bytes_(b"\1\0\0\0"), {"tokens", "id", "bytes"}),
        "array of ints": (lambda: np.array([1, 2]), {"ints", "tokens"}),
        "array of floats": (lambda: np.array([1.5]), {"numbers"}),
        "array of bools": (lambda: np.array([True]), set()),
        "array of text": (lambda: np.array(["a"]), set()),
        "array of None": (lambda: np.array([None]), set()),
        "array of times": (lambda: np.array([0], "M8[s]"), set()),
        "array of 2 dimensions": (lambda: np.array([[1, 2], [3, 4]]), {"prompts"}),
        "array of no dimension": (lambda: np.array(3), {"int"}),
        "array of nothing": (lambda: np.array([], np.uint32), {"empty"}),
    }
    ODD |= {f"numpy {name}": entry for name, entry in _ARRAYS.items()}
