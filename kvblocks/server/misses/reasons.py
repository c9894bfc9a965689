"""What only the cache knows about a miss: evicted or unwritten blocks, a missing window or state, another salt.

A block was "pinned out" or "over quota" if it would still be cached without pins or the quota. With LRU eviction, a
pool that is larger by as many blocks as were taken since the eviction would still have the block.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvblocks import Explanation

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

    at: the time, as in `time.time`; None: longer ago than is remembered. tenant: the tenant for whose prompt it was
    evicted, or None if unknown. is_own: whether that is the asking tenant; None: unknown.
    """

    at: float | None = None
    tenant: str | None = None
    is_own: bool | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of the cache when a prompt came, as far as it matters for a miss.

    num_pinned_blocks: the blocks that pins held. is_over_quota: whether the salt was over its quota.
    num_pending_tokens: the prompt's tokens after its hit that other requests were about to compute. loss: the loss of
    the prompt's first missing block. loss_behind_tiers: that of the first block that no tier has either.
    """

    num_pinned_blocks: int = 0
    is_over_quota: bool = False
    num_pending_tokens: int = 0
    loss: Loss = field(default_factory=Loss)
    loss_behind_tiers: Loss = field(default_factory=Loss)


NOTHING_KNOWN = Surroundings()
"""For a prompt that missed nothing, or whose miss isn't explained."""


def reason_of(explanation: Explanation, around: Surroundings, *, sees_others: bool) -> Reason:
    """Return the reason for a miss, as far as the caller may know it.

    sees_others: whether that includes others' prompts.
    """
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
    """Records about once a second how many blocks have been taken from the pool. Owned by the engine's thread."""

    _times: "deque[tuple[float, int]]" = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))

    def note(self, now: float, num_taken: int) -> None:
        """Note a moment. O(1)."""
        if not self._times or now - self._times[-1][0] >= 1.0:
            self._times.append((now, num_taken))

    def when(self, num_taken: int) -> float | None:
        """Return when `num_taken` blocks had been taken, to about a second; None if that is longer ago. O(moments)."""
        if not self._times or num_taken < self._times[0][1]:
            return None
        return next((time for time, number in self._times if number >= num_taken), self._times[-1][0])
