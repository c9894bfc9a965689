"""Numbers for contexts: equal numbers mean equal KV, and equal KV has equal numbers."""

from collections.abc import Iterable


class Contexts:
    """Numbers contexts. A context is the root that it began with and every token up to a position.

    A context is extended by one part at a time, in O(1). A part is a token, or whatever else KV depends on there.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._made_of: list[tuple[object, object]] = []

    def root(self, *parts: object) -> int:
        """Return the number of an empty context, which depends on things such as salt, adapter and weights."""
        return self._number(None, parts)

    def extend(self, number: int, part: object) -> int:
        """Return the number of the context that continues the context `number` with `part`."""
        return self._number(number, part)

    def chain(self, number: int, parts: Iterable[object]) -> list[int]:
        """Return the numbers of the contexts that end after each of `parts`, which follow the context `number`."""
        found = []
        for part in parts:
            number = self._number(number, part)
            found.append(number)
        return found

    def parts(self, number: int) -> tuple[tuple[object, ...], list[object]]:
        """Return what a context is made of: the arguments of `root`, and the parts after it. O(parts)."""
        found: list[object] = []
        before, part = self._made_of[number]
        while isinstance(before, int):
            found.append(part)
            before, part = self._made_of[before]
        assert isinstance(part, tuple), "a context begins with a root"
        return part, found[::-1]

    def _number(self, before: int | None, part: object) -> int:
        key = (before, part)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._made_of)
            self._made_of.append(key)
        return number
