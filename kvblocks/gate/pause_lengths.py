"""How long sessions pause after a stop reason, and for how long it pays to keep a paused session's place.

Suppose that places are kept for t seconds. If a session comes back within that time, its place was held for the length
of the pause. If it comes back later, its place was held for t seconds in vain, and it must compute its prompt again.
The hold is the t that would have cost least over the pauses seen so far. This is the ski-rental problem, with a known
distribution.
"""

from typing import Final

HOLDS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
"""The holds to choose from, in seconds."""

MOST_S: Final = HOLDS_S[-1]
"""No place is kept for longer than this, so all longer pauses count the same."""

_PRIOR_S = 10.0
_NUM_PRIOR = 10
_MOST_PAUSES = 2000  # then all counts are halved, so that old pauses count less and less


class PauseLengths:
    """The pauses after one stop reason. It begins as if ten pauses of ten seconds had been seen."""

    def __init__(self) -> None:
        self.num_open = 0
        self._counts = [0.0] * (len(HOLDS_S) + 1)  # by the first hold that is long enough; the last: longer than all
        self._seconds = [0.0] * len(HOLDS_S)
        self._num = 0.0
        for _ in range(_NUM_PRIOR):
            self._add(_PRIOR_S)

    def begin(self) -> None:
        """Note that a pause has begun. While it lasts, it counts as longer than any hold. O(1)."""
        self.num_open += 1

    def end(self, seconds: float | None) -> None:
        """Record that a pause has ended. seconds: how long it was; None: the session will not come back. O(1)."""
        self.num_open -= 1
        if seconds is not None:
            self._add(seconds)

    def hold_s(self, cost_s: float) -> float:
        """Return how many seconds a place is worth keeping. O(1).

        cost_s: what it costs if the session comes back later than that: the seconds to compute its room again.
        """
        best_s, least = 0.0, float("inf")
        num_longer, shorter_s = self._num + self.num_open, 0.0
        for hold_s, num, seconds in zip(HOLDS_S, self._counts, self._seconds, strict=False):
            num_longer -= num
            shorter_s += seconds
            cost = shorter_s + num_longer * (hold_s + cost_s)
            if cost < least:
                best_s, least = hold_s, cost
        return best_s

    def _add(self, seconds: float) -> None:
        index = next((index for index, hold_s in enumerate(HOLDS_S) if seconds <= hold_s), len(HOLDS_S))
        self._counts[index] += 1.0
        if index < len(HOLDS_S):
            self._seconds[index] += seconds
        self._num += 1.0
        if self._num > _MOST_PAUSES:
            self._counts = [num / 2 for num in self._counts]
            self._seconds = [each / 2 for each in self._seconds]
            self._num = sum(self._counts)
