"""How soon what pauses comes back: a life table that is learned from the pauses of one kind, by the caller's clock.

Pauses differ by orders of magnitude, between kinds and between sessions, so all is learned of the logarithms of their
lengths, and relative to what is usual for the session (its rhythm): how many were so many half octaves longer or
shorter than that. From this comes the chance that one which has lasted so long ends within the next so long.
"""

from math import log2, sqrt
from typing import Final

STEPS: Final = 2  # of the table, an octave
_MIDDLE: Final = 16  # octaves: what is shorter or longer than the rhythm by more counts as that
_LENGTH: Final = 2 * _MIDDLE * STEPS
_MOST: Final = 4096  # pauses that count in full; then all are halved, so that the last ones matter most
_RHYTHM_WEIGHT: Final = 10.0  # pauses of its own after which a session's rhythm counts as much as its kind's
RECENCY_WEIGHT: Final = 20.0  # pauses that as good as nothing but recency is expected of, beside those that were seen


class Rhythm:
    """The usual length of one session's pauses of one kind. total: of the base-2 logarithms of `number` of them."""

    __slots__ = ("number", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.number = 0.0


class Returns:
    """The pauses of one kind. num_open: those that haven't ended, or never will.

    recency_weight: how many pauses the expectation that what paused last comes back first counts as.
    """

    def __init__(self, recency_weight: float) -> None:
        self._recency_weight = recency_weight
        self.num_open = 0.0
        self._usual = Rhythm()
        self._ended = [0.0] * _LENGTH
        self._longer: list[float] = []  # from each step on, how many ended; made when it is asked

    def rhythm(self, own: Rhythm | None) -> float:
        """Return the length, as a logarithm and to half an octave, that is usual for a session's pauses. O(1)."""
        usual = self._usual.total / self._usual.number if self._usual.number else 0.0
        if own is not None:
            usual = (usual * _RHYTHM_WEIGHT + own.total) / (_RHYTHM_WEIGHT + own.number)
        return round(usual * STEPS) / STEPS

    def learn(self, length: float, rhythm: float, own: Rhythm | None) -> None:
        """Note that a pause has ended. length: more than 0. rhythm: what was usual when it began. O(1)."""
        logarithm = log2(length)
        if self._usual.number:  # the first ones had no rhythm
            self._ended[min(max(int((logarithm - rhythm + _MIDDLE) * STEPS), 0), _LENGTH - 1)] += 1.0
        for known in (self._usual, own):
            if known is not None:
                known.total += logarithm
                known.number += 1.0
        if self._usual.number > _MOST:
            self._usual.total /= 2
            self._usual.number /= 2
            self.num_open /= 2
            self._ended = [number / 2 for number in self._ended]
        self._longer = []

    def close(self) -> None:
        """Note that a pause is over, or that nobody waits for its end any more. O(1)."""
        self.num_open = max(0.0, self.num_open - 1.0)

    def chance(self, lasted: float, horizon: float, rhythm: float) -> float:
        """Return the chance, 0 to 1, that a pause which has lasted so long ends within the horizon. O(1).

        Both more than 0. What few pauses lasted so long says little; then what paused last is likelier to come back.
        """
        end = lasted + horizon
        now, then = self._num_longer(log2(lasted) - rhythm), self._num_longer(log2(end) - rhythm)
        by_recency = 1.0 - sqrt(lasted / end)
        expected, weight = self._recency_weight * by_recency, self._recency_weight + self.num_open
        return (now - then + expected) / (now + weight) if now + weight > 0.0 else 0.0

    def _num_longer(self, octaves: float) -> float:
        """Return how many pauses were longer than their rhythm by more than so many octaves. O(1)."""
        if not self._longer:
            number, longer = 0.0, [0.0] * (_LENGTH + 1)
            for step in range(_LENGTH - 1, -1, -1):
                number += self._ended[step]
                longer[step] = number
            self._longer = longer
        place = min(max((octaves + _MIDDLE) * STEPS, 0.0), _LENGTH - 1.0)
        step = int(place)
        return self._longer[step] + (place - step) * (self._longer[step + 1] - self._longer[step])
