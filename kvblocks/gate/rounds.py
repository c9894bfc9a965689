"""`GateRounds`: when to let a session gate decide, and what to tell it before, for callers that make requests wait.

A round looks up what the cache has of the requests that wait, since others may have evicted it, and lets the gate
decide. That costs lookups, so a round is made only when it may change something.
"""

from collections.abc import Callable
from math import inf
from typing import Any, SupportsFloat, SupportsIndex

from kvblocks.arguments import check_count, check_number, wrong
from kvblocks.gate.gate import MOST_NUMBER, SessionGate

NUM_LOOKED_UP = 32
"""How many of the waiting requests are looked up in a round, the next ones first."""

_WEIGHT = 0.1  # of the last step in the mean of seconds per token


class GateRounds:
    """The rounds of a gate. gate: ask it about new requests, and tell it of ends; then call `note_change`.

    seconds_per_token: how long one token of a prompt takes. `note_computed` maintains a mean, or the caller sets it.
    """

    def __init__(self, gate: SessionGate, seconds_per_token: float = 0.0) -> None:
        self.gate = gate
        self.seconds_per_token = seconds_per_token
        self._has_changed = self._was_busy = False
        self._wake_at: float | None = None

    @property
    def wake_at(self) -> float | None:
        """When a round is due if nothing else happens; -inf: at once; None: never. O(1)."""
        return -inf if self._has_changed else self._wake_at

    def note_change(self) -> None:
        """Note that the gate was asked about a request, or told that one has ended or was cancelled. O(1)."""
        self._has_changed = True

    def note_computed(self, num_tokens: SupportsIndex, seconds: SupportsFloat) -> None:
        """Record how long this many tokens of prompts took. num_tokens: 1 or more. O(1).

        Raises InvalidArgumentError.
        """
        number = check_count("num_tokens", num_tokens, 1)
        took_s = check_number("seconds", seconds, "a number of at least 0")
        if not 0 <= took_s <= MOST_NUMBER:
            raise wrong("seconds", "a number of at least 0", seconds)
        each, old = took_s / number, self.seconds_per_token
        self.seconds_per_token = old + _WEIGHT * (each - old) if old else each

    def is_due(self, num_busy: int, now: float) -> bool:
        """Whether a round may admit anybody: after a change, at `wake_at`, and when work begins or ends. O(1).

        num_busy: as in `SessionGate.release`.
        """
        is_late = self._wake_at is not None and now >= self._wake_at
        return self._has_changed or is_late or (num_busy > 0) != self._was_busy

    def decide(self, num_busy: int, now: float, count_cached: Callable[[Any], int]) -> list[Any]:
        """Return the waiting requests that may begin now, in order. O(sessions), and a few lookups.

        num_busy: as in `SessionGate.release`. count_cached: returns how many tokens of a request's prompt are cached.
        """
        for request in self.gate.waiting()[:NUM_LOOKED_UP]:
            self.gate.note_cached(request, count_cached(request))
        decision = self.gate.release(num_busy, self.seconds_per_token, now)
        self._has_changed, self._wake_at = False, decision.wake_at
        self._was_busy = num_busy + len(decision.admitted) > 0
        return list(decision.admitted)

    def restart(self) -> None:
        """Start over with a gate that knows nobody, after an interruption, which may leave a gate in any state."""
        old, self._has_changed, self._wake_at = self.gate, False, None
        self.gate = SessionGate(old.num_tokens, fill=old.fill, max_overtakes=old.max_overtakes, turn_s=old.turn_s)
