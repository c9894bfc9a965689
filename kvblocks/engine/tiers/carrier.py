"""`Carrier`: carries out the transfers of one tier: loads on one thread, stores and everything else on another.

So a load, for which a request waits, never waits for a store, a flush or a deletion. Each thread does one thing at a
time. A transfer has ended when its bytes are where they belong. Between two steps the engine asks for `ended`
transfers, and tells the manager. An error fails only its own transfer and is counted; nothing is raised to the engine.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvblocks import BlockIdentity, Transfer
from kvblocks.arguments import counted
from kvblocks.engine.tiers.block_bytes import BlockBytes, Staging
from kvblocks.engine.tiers.place import Move, Place
from kvblocks.tiers.disk import DiskError
from kvblocks.tiers.store import StoreError

logger = logging.getLogger("kvblocks.engine.tiers")

PATIENCE_S = 1.0
"""After at most this many seconds, what a place remembers is made durable."""

USES_S = 10.0
"""The same for the order of use, which isn't worth a commit per second: a kill loses only that order."""

Commands = queue.SimpleQueue[Callable[[], object] | None]
"""What a thread is to call, in order; None ends the thread."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that has ended. seconds: how long it took, without its wait in the queue."""

    transfer: Transfer
    ok: bool
    seconds: float


class Carrier:
    """Carries out the transfers of tier `name`, whose bytes are in `place`. block_bytes: the device's side.

    on_end: called on one of the carrier's threads whenever a transfer has ended. num_bytes, seconds: what was moved and
    how long it took so far, by direction ("load", "store"), without failed transfers; only the carrier's threads write
    them.
    """

    def __init__(self, name: str, place: Place, block_bytes: BlockBytes, on_end: Callable[[], None]) -> None:
        self.name = name
        self.num_bytes = {"load": 0, "store": 0}
        self.seconds = {"load": 0.0, "store": 0.0}
        self._place = place
        self._blocks = block_bytes
        self._staging = Staging(block_bytes), Staging(block_bytes)  # of the stores' thread, and of the loads'
        self._on_end = on_end
        self._loads: Commands = queue.SimpleQueue()
        self._commands: Commands = queue.SimpleQueue()
        self._ended: deque[Ended] = deque()
        self._last: dict[str, Transfer | None] = {"load": None, "store": None}
        self._lock = threading.Lock()  # guards the next attribute
        self._uses: dict[int, None] = {}  # noted, and not yet given to the place; the latest is last
        self._is_open = True
        self._is_hurried = False
        self._settle_at: float | None = None  # on the clock; None: nothing is to be made durable
        self._loader = threading.Thread(target=self._run_loads, name=f"kvblocks-{name}-loads", daemon=True)
        self._thread = threading.Thread(target=self._run, name=f"kvblocks-{name}", daemon=True)
        self._loader.start()
        self._thread.start()

    def begin(self, transfer: Transfer) -> None:
        """Queue a transfer. It begins after all work that has been launched on the device so far.

        Repeat an interrupted call before the next one: the transfer is carried out once, even if it was queued already.
        """
        move = self._move_of(transfer)
        commands = self._loads if transfer.is_load else self._commands
        commands.put(lambda: self._carry(transfer, move))

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Queue a note of what slots hold. It comes after the calls queued so far, and is made durable soon."""
        if changes:
            self._commands.put(lambda: self._remember(changes))

    def note_used(self, slots: list[int]) -> None:
        """Queue a note of the slots in which used prefixes end.

        It is made durable within `USES_S`, or with other notes. While the place hangs, a note per slot waits at most.
        """
        if not slots:
            return
        with self._lock:
            if not self._uses:  # the command first, so that an interrupt leaves no notes that nobody gives to the place
                self._commands.put(self._note_used)
            for slot in slots:
                self._uses.pop(slot, None)
                self._uses[slot] = None

    def forget(self, salt: str | None, slots: list[int], timeout_s: float) -> "Future[None]":
        """Queue the deletion of a salt's bytes, between earlier and later calls (see `Place`).

        Returns a future that is done when they are durably gone, or that has the place's error.
        """
        return self.call(lambda: self._place.forget(salt, slots, timeout_s))

    def call(self, function: Callable[[], object]) -> "Future[None]":
        """Queue a call of a function, after all earlier calls except loads.

        Returns a future that is done when the function has returned, or that has its error.
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

    def ended(self) -> Iterator[Ended]:
        """Take the transfers that have ended. One stays if its turn is interrupted, before the next one is taken."""
        while self._ended:
            yield self._ended[0]
            self._ended.popleft()

    def stats(self) -> object | None:
        """As `Place`."""
        return self._place.stats()

    def describe(self, num_cached_blocks: int) -> str:
        """As `Place`."""
        return self._place.describe(num_cached_blocks)

    def close(self, *, drops: bool = False) -> None:
        """Make durable what was stored, wait for that, and end. A second call does nothing.

        drops: whether queued transfers that aren't under way fail; otherwise they are carried out.
        """
        self._is_hurried = self._is_hurried or drops
        self._loads.put(None)
        self._loader.join()
        self._commands.put(None)
        self._thread.join()

    def _move_of(self, transfer: Transfer) -> Move:
        """A transfer, for the place. Called on the manager's thread. O(blocks), as `Transfer.identities`."""
        quota = transfer.max_blocks
        return Move(
            transfer.slots,
            transfer.block_ids,
            transfer.identities(),
            self._blocks,
            self._staging[transfer.is_load],
            self._blocks.mark(),
            transfer.salt,
            quota,
            transfer.position,
            () if quota is None else transfer.digests_before(),
        )

    def _run_loads(self) -> None:
        while (command := self._loads.get()) is not None:
            command()

    def _run(self) -> None:
        while self._is_open:
            left = None if self._settle_at is None else max(0.0, self._settle_at - time.monotonic())
            with suppress(queue.Empty):
                command = self._commands.get(timeout=left)
                if command is None:
                    self._is_open = False
                else:
                    command()
            if self._settle_at is not None and (time.monotonic() >= self._settle_at or not self._is_open):
                self._settle_at = None
                if not self._try(self._place.settle):
                    self._settle_within(PATIENCE_S)
        self._try(self._place.close)

    def _settle_within(self, seconds: float) -> None:
        """Have the place settle at the latest in so many seconds."""
        at = time.monotonic() + seconds
        self._settle_at = at if self._settle_at is None else min(at, self._settle_at)

    def _carry(self, transfer: Transfer, move: Move) -> None:
        kind = "load" if transfer.is_load else "store"
        if transfer is self._last[kind]:  # it was queued twice
            return
        self._last[kind] = transfer
        carry = self._place.load if transfer.is_load else self._place.store
        start = time.perf_counter()
        ok = False
        try:
            ok = not self._is_hurried and carry(move)
        except (DiskError, StoreError):
            pass  # the place counts it, and logs a warning now and then
        except Exception:
            logger.exception("a %s of %s failed in tier %r", kind, counted(len(transfer.slots), "block"), self.name)
        seconds = time.perf_counter() - start
        if ok:
            self.num_bytes[kind] += transfer.num_bytes
            self.seconds[kind] += seconds
        self._ended.append(Ended(transfer, ok, seconds))
        self._on_end()

    def _remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        self._try(lambda: self._place.remember(changes))
        self._settle_within(PATIENCE_S)

    def _note_used(self) -> None:
        with self._lock:
            slots, self._uses = [*self._uses], {}
        if slots:  # there are none if `note_used` was interrupted
            self._try(lambda: self._place.note_used(slots))
            self._settle_within(USES_S)

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
