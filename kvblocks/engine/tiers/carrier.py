"""`Carrier`: carries the transfers of one tier out, one after the other, on a thread of its own.

A transfer is over when its bytes are where they belong: the engine asks for `ended` between two steps and tells the
manager. What goes wrong with one makes that one fail, and is counted; nothing is raised to the engine.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.tiers.disk import DiskError, DiskStats
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.transfer import Transfer

logger = logging.getLogger("kvblocks.engine.tiers")

PATIENCE_S = 1.0
"""What a store is told to remember it makes durable after so many seconds, at the latest."""


class Place(Protocol):
    """Where a tier's bytes are. Only the carrier's thread calls it."""

    def store(self, slots: list[int], block_ids: list[int], identities: list[BlockIdentity], after: Any) -> bool:
        """Copy blocks to slots, and return whether all are there. after: see `BlockBytes`."""

    def load(self, slots: list[int], block_ids: list[int], identities: list[BlockIdentity], after: Any) -> bool:
        """Copy slots to blocks, and return whether all hold what they should."""

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Take note of what slots hold from now on, None: nothing."""

    def settle(self) -> None:
        """Make what is to be remembered durable."""

    def erase(self, slots: list[int]) -> None:
        """Overwrite what slots hold, durably: it is to be deleted."""

    def close(self) -> None:
        """End: no call comes any more."""

    @property
    def disk_stats(self) -> DiskStats | None:
        """What a disk counted; None: it is none. Any thread may ask."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that is over. seconds: what it took, waiting not included."""

    transfer: Transfer
    ok: bool
    seconds: float


class Carrier:
    """The transfers of tier `name`, whose bytes are in `place`. block_bytes: the device's side.

    on_end: called on the thread whenever a transfer is over. num_bytes, seconds: moved and spent so far, by direction
    ("load", "store"), those that failed not included; only the thread writes them.
    """

    def __init__(self, name: str, place: Place, block_bytes: BlockBytes, on_end: Callable[[], None]) -> None:
        self.name = name
        self.num_bytes = {"load": 0, "store": 0}
        self.seconds = {"load": 0.0, "store": 0.0}
        self._place = place
        self._block_bytes = block_bytes
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ended: deque[Ended] = deque()
        self._is_open = True
        self._is_hurried = False
        self._is_unsettled = False
        self._thread = threading.Thread(target=self._run, name=f"kvblocks-{name}", daemon=True)
        self._thread.start()

    def begin(self, transfer: Transfer) -> None:
        """Have a transfer carried out after everything that is launched on the device so far."""
        identities, after = transfer.identities(), self._block_bytes.mark()
        self._commands.put(lambda: self._carry(transfer, identities, after))

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Have it remembered what slots hold, after what was begun so far, and made durable soon."""
        if changes:
            self._commands.put(lambda: self._remember(changes))

    def erase(self, slots: list[int]) -> "Future[None]":
        """Have the bytes of slots overwritten, after what was begun so far and before what begins later.

        Returns a future that is done when they are, durably, or that has the place's error.
        """
        future: Future[None] = Future()

        def run() -> None:
            try:
                self._place.erase(slots)
                future.set_result(None)
            except Exception as error:  # noqa: BLE001  # the caller's to handle
                future.set_exception(error)

        self._commands.put(run)
        return future

    def ended(self) -> list[Ended]:
        """Return the transfers that are over since the last call."""
        found: list[Ended] = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    @property
    def disk_stats(self) -> DiskStats | None:
        """As `Place`."""
        return self._place.disk_stats

    def close(self, *, drops: bool = False) -> None:
        """Make what was stored durable, and end. Waits for that, and does nothing the second time.

        drops: transfers that are begun and not under way yet fail; else they are carried out.
        """
        self._is_hurried = self._is_hurried or drops
        if self._thread.is_alive():
            self._commands.put(self._stop)
            self._thread.join()

    def _run(self) -> None:
        settle_at = 0.0
        while self._is_open:
            was_unsettled = self._is_unsettled
            left = max(0.0, settle_at - time.monotonic()) if was_unsettled else None
            with suppress(queue.Empty):
                self._commands.get(timeout=left)()
            if self._is_unsettled and not was_unsettled:
                settle_at = time.monotonic() + PATIENCE_S
            if self._is_unsettled and (time.monotonic() >= settle_at or not self._is_open):
                self._is_unsettled = not self._try(self._place.settle)  # tried again, if it failed
                settle_at = time.monotonic() + PATIENCE_S
        self._try(self._place.close)

    def _carry(self, transfer: Transfer, identities: list[BlockIdentity], after: Any) -> None:
        kind = "load" if transfer.is_load else "store"
        carry = self._place.load if transfer.is_load else self._place.store
        start = time.perf_counter()
        ok = False
        try:
            ok = not self._is_hurried and carry(transfer.slots, transfer.block_ids, identities, after)
        except DiskError:
            pass  # the store counts it, and warns of it now and then
        except Exception:
            logger.exception("a %s of %d blocks failed in tier %r", kind, len(transfer.slots), self.name)
        seconds = time.perf_counter() - start
        if ok:
            self.num_bytes[kind] += transfer.num_bytes
            self.seconds[kind] += seconds
        self._ended.append(Ended(transfer, ok, seconds))
        self._on_end()

    def _remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        self._try(lambda: self._place.remember(changes))
        self._is_unsettled = True

    def _stop(self) -> None:
        self._is_open = False

    def _try(self, function: Callable[[], None]) -> bool:
        """Call a function of the place, and return whether it raised nothing."""
        try:
            function()
        except DiskError:
            return False  # logged as in `_carry`
        except Exception:
            logger.exception("tier %r could not remember what it holds", self.name)
            return False
        return True
