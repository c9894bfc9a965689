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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvblocks.engine.tiers.block_bytes import BlockBytes
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

    def close(self) -> None:
        """End: no call comes any more."""


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
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended: deque[Ended] = deque()
        self._is_open = True
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

    def ended(self) -> list[Ended]:
        """Return the transfers that are over since the last call."""
        found: list[Ended] = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def close(self) -> None:
        """Carry out what was begun, make it durable, and end. Waits for that. Nothing the second time."""
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
                self._is_unsettled = False
                self._try(self._place.settle)
        self._try(self._place.close)

    def _carry(self, transfer: Transfer, identities: list[BlockIdentity], after: Any) -> None:
        kind = "load" if transfer.is_load else "store"
        carry = self._place.load if transfer.is_load else self._place.store
        start = time.perf_counter()
        ok = False
        try:
            ok = carry(transfer.slots, transfer.block_ids, identities, after)
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

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            logger.exception("tier %r could not remember what it holds", self.name)
