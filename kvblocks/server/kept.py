"""What the server keeps of past requests, within bounds of number and of bytes."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedStore(Generic[T]):
    """Values by key, at most `max_number` of them and `max_bytes` of memory. The oldest are dropped for new ones.

    A value that is larger than `max_bytes` by itself isn't kept. One thread owns it; others may call `get`.
    """

    def __init__(self, max_number: int, max_bytes: int) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._values: OrderedDict[object, tuple[T, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, key: object, value: T) -> None:
        """Keep a value as the newest; one that is kept already stays in its place. O(its parts + values dropped).

        Call it again when a value has grown.
        """
        num_bytes = size_of(key) + size_of(value)
        if num_bytes > self._max_bytes:
            self.drop(key)
            return
        _, before = self._values.get(key, (None, 0))
        self._values[key] = value, num_bytes
        self.num_bytes += num_bytes - before
        while len(self._values) > self._max_number or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def get(self, key: object) -> T | None:
        """Return a value; None if it isn't kept. O(1)."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def drop(self, key: object) -> None:
        """Drop a value. Does nothing if it isn't kept. O(1)."""
        found = self._values.pop(key, None)
        if found is not None:
            self.num_bytes -= found[1]

    def forget(self, is_meant: Callable[[T], bool]) -> None:
        """Drop all values that are meant. O(values)."""
        for key in [key for key, (value, _) in self._values.items() if is_meant(value)]:
            self.drop(key)

    def newest_first(self) -> Iterable[T]:
        """The values, the newest first. O(1), and O(1) for each that is taken."""
        return (value for value, _ in reversed(self._values.values()))


def size_of(value: object) -> int:
    """Return the bytes of memory of a value and of what its items and fields refer to. O(these).

    What two of them share counts twice, so this is rather too much than too little.
    """
    size = sys.getsizeof(value)
    if isinstance(value, (tuple, list)):
        return size + sum(map(size_of, value))
    if is_dataclass(value):
        return size + sum([size_of(getattr(value, field.name)) for field in fields(value)])
    return size
