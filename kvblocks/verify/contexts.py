"""Numbers for contexts: equal numbers mean equal KV, and equal KV has equal numbers."""

from collections.abc import Iterable


class Contexts:
    """Gives each context a number: the root that it began with, and every token up to there.

    A context is extended by one part at a time, O(1) each. A part is a token, or whatever else KV depends on there.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._made_of: list[tuple[object, object]] = []

    def root(self, *parts: object) -> int:
        """Return the number of an empty context: of a salt, an adapter, weights."""
        return self._number(None, parts)

    def extend(self, number: int, part: object) -> int:
        """Return the number of the context that has `part` behind the context `number`."""
        return self._number(number, part)

    def chain(self, number: int, parts: Iterable[object]) -> list[int]:
        """Return the numbers of the contexts that end behind each of `parts`, which follow `number`."""
        found = []
        for part in parts:
            number = self._number(number, part)
            found.append(number)
        return found

    def parts(self, number: int) -> tuple[tuple[object, ...], list[object]]:
        """Return what a context is made of: what `root` was told, and the parts behind it. O(parts)."""
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
