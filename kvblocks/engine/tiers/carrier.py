"""`Carrier`: carries out the transfers of one tier, one after the other, on a thread of its own.

A transfer has ended when its bytes are where they belong. Between two steps the engine asks for `ended`, and tells the
manager. An error fails only its own transfer, and is counted. Nothing is raised to the engine.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.tiers.disk import DiskError, DiskStats
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.store import StoreError, StoreStats
from kvblocks.tiers.transfer import Transfer

logger = logging.getLogger("kvblocks.engine.tiers")

PATIENCE_S = 1.0
"""The most seconds until what a place remembers is made durable."""


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, for a place: block_ids[i] on the device, slots[i] in the tier, and the block's identity.

    after: see `BlockBytes`. salt: of the blocks. max_blocks: the salt's quota in the tier, None without one. first: the
    position of the first block in its prefix. before: the digests of the blocks before it, if there is a quota.
    """

    slots: list[int]
    block_ids: list[int]
    identities: list[BlockIdentity]
    after: Any = None
    salt: str | None = None
    max_blocks: int | None = None
    first: int = 0
    before: Sequence[bytes] = ()


def move_of(transfer: Transfer, after: Any) -> Move:
    """Return a transfer as a Move. Call it on the manager's thread. O(blocks), as `Transfer.identities`."""
    quota = transfer.max_blocks
    before = () if quota is None else transfer.digests_before()
    identities, first = transfer.identities(), transfer.position
    return Move(transfer.slots, transfer.block_ids, identities, after, transfer.salt, quota, first, before)


class Place(Protocol):
    """Where a tier's bytes are. Only carriers' threads call it, and each kind of call comes from one thread."""

    def store(self, move: Move) -> bool:
        """Copy blocks to slots. Return whether all blocks are there now."""

    def load(self, move: Move) -> bool:
        """Copy slots to blocks. Return whether all blocks hold what they should."""

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Note what slots hold from now on; None: nothing."""

    def settle(self) -> None:
        """Make all that `remember` noted durable."""

    def erase(self, slots: list[int]) -> None:
        """Delete what slots hold, by overwriting it durably."""

    def close(self) -> None:
        """End. No call comes afterwards."""

    @property
    def disk_stats(self) -> DiskStats | None:
        """The counts of a disk; None for other places. Any thread may call this."""

    @property
    def store_stats(self) -> StoreStats | None:
        """The counts of a shared store's client; None for other places. Any thread may call this."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that has ended. seconds: how long it took, without waiting."""

    transfer: Transfer
    ok: bool
    seconds: float


class Carrier:
    """The transfers of tier `name`, whose bytes are in `place`. block_bytes: the device's side.

    on_end: called on the thread whenever a transfer has ended. num_bytes, seconds: moved and spent so far, by direction
    ("load", "store"), without failed transfers; only the thread writes them.
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
        """Queue a transfer. It begins after all work that is launched on the device so far."""
        move = move_of(transfer, self._block_bytes.mark())
        self._commands.put(lambda: self._carry(transfer, move))

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Queue a note of what slots hold. It follows the calls queued so far, and is made durable soon."""
        if changes:
            self._commands.put(lambda: self._remember(changes))

    def erase(self, slots: list[int]) -> "Future[None]":
        """Queue the overwriting of slots' bytes, between earlier and later calls.

        Returns a future that is done when the bytes are overwritten, durably, or that has the place's error.
        """
        return self.call(lambda: self._place.erase(slots))

    def call(self, function: Callable[[], object]) -> "Future[None]":
        """Queue a call of a function, between earlier and later calls.

        Returns a future that is done when it has returned, or that has its error.
        """
        future: Future[None] = Future()

        def run() -> None:
            try:
                function()
                future.set_result(None)
            except Exception as error:  # noqa: BLE001  # the caller's to handle
                future.set_exception(error)

        self._commands.put(run)
        return future

    def ended(self) -> list[Ended]:
        """Return the transfers that have ended since the last call."""
        found: list[Ended] = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    @property
    def disk_stats(self) -> DiskStats | None:
        """As `Place`."""
        return self._place.disk_stats

    @property
    def store_stats(self) -> StoreStats | None:
        """As `Place`."""
        return self._place.store_stats

    def close(self, *, drops: bool = False) -> None:
        """Make what was stored durable, and end. Waits for that. A second call does nothing.

        drops: fail the queued transfers that aren't under way; otherwise they are carried out.
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
                self._is_unsettled = not self._try(self._place.settle)  # a failure is tried again
                settle_at = time.monotonic() + PATIENCE_S
        self._try(self._place.close)

    def _carry(self, transfer: Transfer, move: Move) -> None:
        kind = "load" if transfer.is_load else "store"
        carry = self._place.load if transfer.is_load else self._place.store
        start = time.perf_counter()
        ok = False
        try:
            ok = not self._is_hurried and carry(move)
        except (DiskError, StoreError):
            pass  # the place counts it, and logs a warning now and then
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
        """Call a function of the place. Return whether it succeeded."""
        try:
            function()
        except (DiskError, StoreError):
            return False  # logged as in `_carry`
        except Exception:
            logger.exception("tier %r could not remember what it holds", self.name)
            return False
        return True
