"""What only the cache knows of a miss: evicted, never written, a window or a state missing, another salt.

A block was "pinned out" or "over quota" if it would still be cached without that. In the order of least recent use a
block is evicted when the pool is short of one, and as many more blocks as were taken since would have kept it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvblocks.observe.explanation import Explanation

Reason = Literal[
    "hit",
    "evicted",
    "pinned_out",
    "over_quota",
    "never_written",
    "reset",
    "dropped",
    "window_missing",
    "state_missing",
    "salt_differs",
    "never_cached",
]
_REASONS: dict[str, Reason] = {
    "no miss": "hit",
    "evicted": "evicted",
    "aborted": "never_written",
    "reset": "reset",
    "dropped": "dropped",
    "group": "window_missing",
    "state": "state_missing",
    "other keys": "salt_differs",
    "partly equal": "never_cached",
    "never cached": "never_cached",
}
_MAX_TIMES = 4096


@dataclass(frozen=True, slots=True)
class Loss:
    """When a block was removed, and for whom.

    at: as `time.time`; None: longer ago than is remembered. tenant: for whose prompt it was evicted; None: nobody's
    that is known. is_own: whether that was the asker's own; None: it isn't known.
    """

    at: float | None = None
    tenant: str | None = None
    is_own: bool | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The cache when a prompt came.

    num_pinned_blocks: that pins held. is_over_quota: whether the salt was over its quota.
    num_pending_tokens: of the prompt, behind its hit, that others were about to compute. loss: of the prompt's first
    missing block. loss_behind_tiers: of the first one that no tier has either.
    """

    num_pinned_blocks: int = 0
    is_over_quota: bool = False
    num_pending_tokens: int = 0
    loss: Loss = field(default_factory=Loss)
    loss_behind_tiers: Loss = field(default_factory=Loss)


NOTHING_KNOWN = Surroundings()
"""Of a prompt that missed nothing, or whose miss isn't explained."""


def reason_of(explanation: Explanation, around: Surroundings, *, sees_others: bool) -> Reason:
    """Return the reason for a miss, as far as the asker may know it. sees_others: may know what others have cached."""
    found = _REASONS[explanation.cause]
    if found == "salt_differs" and not sees_others:
        return "never_cached"
    if found != "evicted" or explanation.removal is None or explanation.removal.tier is not None:
        return found  # neither the device's quotas nor pins have to do with what a tier evicts
    if around.is_over_quota:
        return "over_quota"
    if around.num_pinned_blocks > explanation.num_blocks_since:
        return "pinned_out"
    return found


@dataclass(slots=True)
class TakenTimes:
    """When how many blocks had been taken from the pool, about once a second. Owned by the engine's thread."""

    _times: "deque[tuple[float, int]]" = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))

    def note(self, now: float, num_taken: int) -> None:
        """Note a moment. O(1)."""
        if not self._times or now - self._times[-1][0] >= 1.0:
            self._times.append((now, num_taken))

    def when(self, num_taken: int) -> float | None:
        """Return when so many blocks had been taken, to about a second; None: longer ago. O(moments)."""
        if not self._times or num_taken < self._times[0][1]:
            return None
        return next((time for time, number in self._times if number >= num_taken), self._times[-1][0])
