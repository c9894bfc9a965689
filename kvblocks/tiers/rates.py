"""Load or compute: whether a load is expected to be faster, from what is known of the tiers' and the model's speed."""

from collections.abc import Sequence as Items

MOST_NUMBER = 1e300
"""Seconds and rates are below this, so that sums of them are numbers."""

SMOOTHING = 0.2
"""The share of a new measurement in a learned rate."""


class Rate:
    """Units a second, learned from measurements: an exponentially weighted mean of the seconds a unit takes.

    expected: what is taken until there is one; None: not known.
    """

    def __init__(self, expected: float | None = None) -> None:
        self._seconds_a_unit = 0.0 if expected is None else 1.0 / expected
        self._is_measured = False

    @property
    def seconds_a_unit(self) -> float:
        """What one unit takes; 0.0 while that isn't known."""
        return self._seconds_a_unit

    def note(self, num_units: int, seconds: float) -> None:
        """Learn that so many units took so long. Nothing is learned from none."""
        if num_units <= 0 or seconds <= 0.0:
            return
        found = seconds / num_units
        if self._is_measured:
            found = (1.0 - SMOOTHING) * self._seconds_a_unit + SMOOTHING * found
        self._seconds_a_unit = found
        self._is_measured = True

    def doubt(self) -> None:
        """Take what was learned for a little too slow: who no longer uses something learns nothing of it."""
        self._seconds_a_unit *= 1.0 - SMOOTHING


def num_worth_loading(loads: Items[tuple[int, float]], seconds_a_token: float) -> int:
    """Return how many first `loads` to take, so that most time is saved: 0 if computing is faster than any of them.

    loads: of a prefix, one behind the other: how many tokens, and how many seconds it takes; the next one is of no
    use without those before it. seconds_a_token: of computing, 0.0 where that isn't known: then all are taken. Of
    several equal answers the least. O(loads).
    """
    if seconds_a_token <= 0.0:
        return len(loads)
    best, most, saved = 0, 0.0, 0.0
    for number, (num_tokens, seconds) in enumerate(loads, 1):
        saved += num_tokens * seconds_a_token - seconds
        if saved > most:
            best, most = number, saved
    return best
