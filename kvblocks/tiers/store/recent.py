"""`RecentUses`: prefixes whose use was reported to a store a moment ago."""

from collections.abc import Hashable

TOUCH_EVERY_S = 10.0
"""A store is told about uses of one prefix once in this many seconds. It keeps blocks much longer than that."""

MOST_KEPT = 4096


class RecentUses:
    """Prefixes whose use was reported, and when, so that a prompt that comes a thousand times a second costs one
    message in ten seconds.

    It reads no clock, so that a replay can have its own.
    """

    def __init__(self) -> None:
        self._told: dict[Hashable, float] = {}

    def is_due(self, prefix: Hashable, now_s: float) -> bool:
        """Whether a use of a prefix is to be reported now. If so, it counts as reported. O(1)."""
        told_s = self._told.get(prefix)
        if told_s is not None and now_s - told_s < TOUCH_EVERY_S:
            return False
        self._told.pop(prefix, None)
        self._told[prefix] = now_s
        if len(self._told) > MOST_KEPT:
            del self._told[next(iter(self._told))]
        return True

    def forget(self, prefix: Hashable) -> None:
        """Count a prefix as not reported. O(1)."""
        self._told.pop(prefix, None)
