"""Stop strings: text that ends a generation, and is not part of it.

Text comes in pieces of any size, and can't be taken back once it was shown. So text that may be the beginning of a stop
string is held back until that is clear. The result doesn't depend on how the text is cut into pieces. The stop string
that ends first counts; if several end there, the longest one.
"""

from collections.abc import Iterable


class StopMatcher:
    """Passes text on up to the first of `stops`, none of which is empty.

    num_exempt: how many of the first pieces are passed on unchecked; a stop string can't begin in them.
    is_matched: whether a stop string was found; text that is fed afterwards is dropped.
    """

    def __init__(self, stops: Iterable[str] = (), num_exempt: int = 0) -> None:
        self._stops = tuple(stops)
        self._num_first_exempt = num_exempt
        self.reset()

    def reset(self) -> None:
        """Begin again, as if nothing had been fed. O(1)."""
        self._num_exempt = self._num_first_exempt
        self._held = ""
        self.is_matched = False

    def feed(self, text: str) -> str:
        """Return the text that is certain now. O(text x stops)."""
        if self.is_matched or not self._stops:
            return "" if self.is_matched else text
        if self._num_exempt:
            self._num_exempt -= 1
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.is_matched, self._held = True, ""
            return text[: min(found)[1]]
        certain = next(index for index in range(len(text) + 1) if self._may_begin(text[index:]))
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back. Call it when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        """Whether `text`, which may be empty, is the beginning of a stop string."""
        return any(stop.startswith(text) for stop in self._stops)
