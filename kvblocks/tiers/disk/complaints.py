"""`Complaints`: warnings that don't fill the log when a disk or a store dies."""

import logging
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger("kvblocks.tiers.disk")


class Complaints:
    """Warnings of a store. The first of a kind is logged at once, later ones at most once per interval, with a count.

    clock: in seconds. logger: where warnings go; by default, the logger for disks. Any thread may call it. No lock is
    held while a logger's handlers run.
    """

    def __init__(
        self,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        logger: logging.Logger = _LOG,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._logger = logger
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log a warning, or count it for the next warning of its kind."""
        now = self._clock()
        with self._lock:
            if kind in self._last and now - self._last[kind] < self._seconds:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return
            self._last[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        self._logger.warning("%s%s", message, f" (and {unsaid} more like it before)" if unsaid else "")
