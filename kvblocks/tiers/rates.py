"""Load or compute: whether a load is expected to be faster, given what is known about the speeds of tiers and model."""

from collections.abc import Sequence as Items

MOST_NUMBER = 1e300
"""An upper bound for seconds and rates, so that their sums stay finite."""

SMOOTHING = 0.2
"""The weight of a new measurement in a learned rate."""


class Rate:
    """Units per second, learned from measurements: an exponentially weighted mean of the seconds that a unit takes.

    expected: used until there is a measurement; None: not known.
    """

    def __init__(self, expected: float | None = None) -> None:
        self._seconds_a_unit = 0.0 if expected is None else 1.0 / expected
        self._is_measured = False

    @property
    def seconds_a_unit(self) -> float:
        """Seconds that one unit takes; 0.0 while not known."""
        return self._seconds_a_unit

    def note(self, num_units: int, seconds: float) -> None:
        """Learn that num_units took this many seconds. Nothing is learned from 0 units or 0 seconds."""
        if num_units <= 0 or seconds <= 0.0:
            return
        found = seconds / num_units
        if self._is_measured:
            found = (1.0 - SMOOTHING) * self._seconds_a_unit + SMOOTHING * found
        self._seconds_a_unit = found
        self._is_measured = True

    def note_failed(self, num_units: int, seconds: float) -> None:
        """Learn from an attempt that failed after this many seconds: num_units would have taken at least that.

        It can only make the rate slower, since an attempt that failed at once says nothing. If there was no measurement
        before it, the next one replaces it.
        """
        found = seconds / num_units if num_units > 0 else 0.0
        if found > self._seconds_a_unit:
            share = SMOOTHING if self._is_measured else 1.0
            self._seconds_a_unit += share * (found - self._seconds_a_unit)

    def doubt(self) -> None:
        """Assume that the tier is a little faster than learned.

        A tier that is no longer used gets no new measurements, so without this one slow load would rule it out forever.
        """
        self._seconds_a_unit *= 1.0 - SMOOTHING


def num_worth_loading(loads: Items[tuple[int, float]], seconds_a_token: float) -> int:
    """Return how many of `loads`, from the first, to take to save the most time; 0 if computing is always faster.

    loads: consecutive parts of a prefix, as (tokens, seconds to load them). A part is of no use without those before
    it. seconds_a_token: that of computing; 0.0 if not known, in which case all parts are taken. Of several equally good
    answers, the smallest. O(loads).
    """
    if seconds_a_token <= 0.0:
        return len(loads)
    best, most, saved = 0, 0.0, 0.0
    for number, (num_tokens, seconds) in enumerate(loads, 1):
        saved += num_tokens * seconds_a_token - seconds
        if saved > most:
            best, most = number, saved
    return best
