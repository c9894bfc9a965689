"""`Breaker`: decides how long a failed store is not called."""

import random
from collections.abc import Callable

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 10.0


class Breaker:
    """A circuit breaker: it opens with a failure, and closes when a probe, which the caller makes, succeeds.

    This way a store that fails delays one call only. The pause doubles with each failure, up to MOST_PAUSE_S, and half
    of it is random, so that servers don't come back all at once. Not thread-safe. clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float], draw: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._draw = draw
        self._pause_s = 0.0
        self._until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store must not be called."""
        return self._until is not None

    def note_failure(self) -> None:
        """Record that the store failed. Of several failures at one moment only the first counts."""
        if self._until is not None and self._clock() < self._until:
            return
        self._pause_s = min(MOST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._until = self._clock() + self._pause_s * (1 + self._draw()) / 2

    def note_answer(self) -> None:
        """Record that a probe was answered. The pause stays as it is, since the store may fail again under load."""
        self._until = None

    def note_success(self) -> None:
        """Record that the store does its work again. The next pause is the shortest one."""
        self._until, self._pause_s = None, 0.0

    def seconds_to_probe(self) -> float | None:
        """Return how long it is until the next probe; None if the breaker is closed."""
        return None if self._until is None else max(0.0, self._until - self._clock())
