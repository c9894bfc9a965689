"""How soon a paused session comes back: a life table, learned from the pauses of one kind, in the caller's time.

Pauses differ by orders of magnitude, between kinds and between sessions. The table therefore uses logarithms, and
compares each pause with its rhythm: the length that is usual for its session and for how long the request before it
ran. The table counts, in half octaves, how much longer or shorter than its rhythm each pause was. From this it derives
what keeping a paused request's blocks is worth: the chance that the pause ends within a horizon, per unit of time for
which they are kept.
"""

from math import log2, sqrt
from typing import Final

STEPS: Final = 2  # steps of the table per octave
_MIDDLE: Final = 16  # octaves: the largest difference from the rhythm; larger ones count as that
_LENGTH: Final = 2 * _MIDDLE * STEPS
_MOST: Final = 4096  # pauses; beyond that all counts are halved, so that the latest pauses matter most
_RHYTHM_STEPS: Final = 4  # steps of a rhythm per octave
_RHYTHM_WEIGHT: Final = 5.0  # after so many pauses of its own, a session's rhythm counts as much as its kind's
_RHYTHM_KEPT: Final = 0.9  # with each pause that ends, a session's earlier ones count less: about the last ten matter
_SLOPE_WEIGHT: Final = 20.0  # how much run times must vary, in squared octaves, before they predict pauses
RECENCY_WEIGHT: Final = 5.0  # so many imagined pauses are added, in which the latest to pause returns first
_PARTS: Final = (1 / 16, 1 / 4, 1.0)  # parts of the horizon at which the table is read


class Rhythm:
    """The usual length of pauses of one kind.

    number: how many pauses. total: the sum of the base-2 logarithms of their lengths. Old pauses count less in both.
    """

    __slots__ = ("number", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.number = 0.0

    def mean(self) -> float:
        """Return the mean of the logarithms, 0 if there are none. O(1)."""
        return self.total / self.number if self.number else 0.0


class Returns:
    """The pauses of one kind. num_open: pauses that haven't ended; some never will.

    recency_weight: the weight, in pauses seen, of the assumption that the latest to pause returns first.
    """

    def __init__(self, recency_weight: float) -> None:
        self._recency_weight = recency_weight
        self.num_open = 0.0
        self._usual, self._took = Rhythm(), Rhythm()
        self._took_by_length = self._took_by_took = 0.0  # sums for the straight line from run times to lengths
        self._ended = [0.0] * _LENGTH
        self._longer: list[float] = []  # by step: how many pauses were at least so long; made at the first use

    def rhythm(self, own: Rhythm | None, took: float) -> float:
        """Return the usual length of a pause, as a base-2 logarithm rounded to rhythm steps. O(1).

        own: the rhythm of its session. took: how long the request before it ran; 0: not known.
        """
        slope = self._took_by_length / (self._took_by_took + _SLOPE_WEIGHT)
        return round((self._mean(own) + slope * self._beside(took)) * _RHYTHM_STEPS) / _RHYTHM_STEPS

    def _mean(self, own: Rhythm | None) -> float:
        usual = self._usual.mean()
        if own is not None:
            usual = (usual * _RHYTHM_WEIGHT + own.total) / (_RHYTHM_WEIGHT + own.number)
        return usual

    def _beside(self, took: float) -> float:
        """Return by how many octaves a request ran longer than usual; 0 if that isn't known."""
        return log2(took) - self._took.mean() if took > 0.0 and self._took.number else 0.0

    def learn(self, length: float, took: float, rhythm: float, own: Rhythm | None) -> None:
        """Learn from a pause that has ended. length: more than 0. rhythm: its rhythm when the pause began. O(1)."""
        logarithm = log2(length)
        if self._usual.number:  # the first pause had no rhythm to compare with
            self._ended[min(max(int((logarithm - rhythm + _MIDDLE) * STEPS), 0), _LENGTH - 1)] += 1.0
        beside = self._beside(took)
        self._took_by_length += beside * (logarithm - self._mean(own))
        self._took_by_took += beside * beside
        self._usual.total += logarithm
        self._usual.number += 1.0
        if took > 0.0:
            self._took.total += log2(took)
            self._took.number += 1.0
        if own is not None:
            own.total = own.total * _RHYTHM_KEPT + logarithm
            own.number = own.number * _RHYTHM_KEPT + 1.0
        if self._usual.number > _MOST:
            self._halve()
        self._longer = []

    def _halve(self) -> None:
        for known in (self._usual, self._took):
            known.total /= 2
            known.number /= 2
        self.num_open /= 2
        self._took_by_length /= 2
        self._took_by_took /= 2
        self._ended = [number / 2 for number in self._ended]

    def close(self) -> None:
        """Note that a pause has ended, or that its end is no longer expected. O(1)."""
        self.num_open = max(0.0, self.num_open - 1.0)

    def worth(self, lasted: float, horizon: float, rhythm: float) -> float:
        """Return what it is worth to keep the blocks of a request that has paused for `lasted`. O(1).

        This is the chance that the pause ends within the horizon, divided by the share of the horizon for which the
        blocks would be kept: at least 0, and more than 1 where most pauses end soon. lasted, horizon: more than 0.
        Where few pauses lasted this long, the latest to pause is assumed to be likelier to return.
        """
        first = before = self._num_longer(log2(lasted) - rhythm) + self._recency_weight
        kept, end = self.num_open, 0.0
        for part in _PARTS:
            then = lasted + part * horizon
            number = self._num_longer(log2(then) - rhythm) + self._recency_weight * sqrt(lasted / then)
            kept += (part - end) * (before + number) / 2
            before, end = number, part
        return (first - before) / kept if kept > 0.0 else 0.0

    def _num_longer(self, octaves: float) -> float:
        """Return how many pauses were longer than their rhythm by more than this many octaves. O(1)."""
        if not self._longer:
            number, longer = 0.0, [0.0] * (_LENGTH + 1)
            for step in range(_LENGTH - 1, -1, -1):
                number += self._ended[step]
                longer[step] = number
            self._longer = longer
        place = min(max((octaves + _MIDDLE) * STEPS, 0.0), _LENGTH - 1.0)
        step = int(place)
        return self._longer[step] + (place - step) * (self._longer[step + 1] - self._longer[step])
