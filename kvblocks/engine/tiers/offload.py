"""`Offload`: runs an engine's tiers. Between two steps it begins the manager's transfers, and reports ended ones.

The order of a step is that of `kvblocks.tiers`: the step is launched, then its transfers begin. Carriers wait for the
launched work (`BlockBytes.mark`).
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.seeker import Seeker
from kvblocks.tiers.disk import DiskError, DiskStats
from kvblocks.tiers.store import SharedStore, StoreStats
from kvblocks.tiers.tiers import Tiers
from kvblocks.tiers.transfer import Loaded


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """What was moved between the device and a tier, by direction ("load", "store"): bytes, and seconds.

    Failed transfers don't count. disk: a disk's own counts of damage and failures; None for other tiers. store: the
    same for a store that servers share.
    """

    tier: str
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    disk: DiskStats | None = None
    store: StoreStats | None = None


@dataclass(frozen=True, slots=True)
class SharedTier:
    """A store that servers share. loads: a carrier for loads alone, which don't wait for stores. seeker: asks it."""

    store: SharedStore
    loads: Carrier
    seeker: Seeker


class Offload:
    """The tiers of a manager with their carriers. Only the engine's thread calls it.

    carriers: of all tiers. something_ended: set by their `on_end`. shared: the store that servers share, or None.
    is_closed: whether `close` was called.
    """

    def __init__(
        self,
        tiers: Tiers,
        carriers: list[Carrier],
        something_ended: threading.Event,
        shared: "SharedTier | None" = None,
    ) -> None:
        self._tiers = tiers
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._loaders = dict(self._carriers)
        self._something_ended = something_ended
        self._shared = shared
        if shared is not None:
            self._loaders[shared.loads.name] = shared.loads
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether any transfer is under way or waiting. O(tiers)."""
        return not self.is_closed and self._tiers.is_busy

    @property
    def is_seeking(self) -> bool:
        """Whether a request waits for a shared store's answer. O(1)."""
        return self._shared is not None and self._shared.seeker.is_seeking

    def seek(self, scheduler: Scheduler) -> None:
        """Ask a shared store which blocks of waiting requests it has, and note its answers. O(waiting requests)."""
        if self._shared is not None:
            if self._shared.seeker.take():
                scheduler.lookups.forget()
            self._shared.seeker.seek(scheduler.waiting, scheduler.lookups)

    def advance(self) -> list[Loaded]:
        """Report ended transfers, begin new ones, and return the results of loads. O(blocks that move)."""
        loaded = self._collect()
        for transfer in self._tiers.take_transfers():
            carriers = self._loaders if transfer.is_load else self._carriers
            carriers[transfer.tier].begin(transfer)
        for tier, changes in self._tiers.take_changes().items():
            self._carriers[tier].remember(changes)
        return loaded

    def erase_forgotten(self, salt: str | None, timeout_s: float) -> None:
        """Overwrite the slots of persistent tiers that hold no cached block, and wait until that is durable.

        A shared store's blocks of `salt`, from any server, are deleted. Raises DiskError and StoreError if this fails
        or takes too long; call it again then. O(such slots), and O(keys of the store).
        """
        waiting: list[Future[None]] = []
        if self._shared is not None:
            shared = self._shared
            waiting.append(self._carriers[shared.loads.name].call(lambda: shared.store.forget(salt, timeout_s)))
        for tier, changes in self._tiers.take_changes().items():
            self._carriers[tier].remember(changes)
            waiting.append(self._carriers[tier].erase(self._tiers.empty_slots(tier)))
        for future in waiting:
            try:
                future.result(timeout_s)
            except TimeoutError:
                raise DiskError(f"expected deleted blocks to be overwritten in {timeout_s:g} s, got none yet") from None

    def wait(self, seconds: float) -> None:
        """Wait until a transfer has ended since the last `advance`, or a store has answered, but at most `seconds`."""
        if self._shared is None or not self._shared.seeker.has_answer:
            self._something_ended.wait(seconds)

    def traffic(self) -> list[TierTraffic]:
        """Return what was moved so far, by tier. Any thread may call this."""
        return [
            TierTraffic(
                carrier.name,
                {"load": loader.num_bytes["load"], "store": carrier.num_bytes["store"]},
                {"load": loader.seconds["load"], "store": carrier.seconds["store"]},
                carrier.disk_stats,
                carrier.store_stats,
            )
            for carrier, loader in zip(self._carriers.values(), self._loaders.values(), strict=True)
        ]

    def close(self, timeout_s: float) -> None:
        """Store the blocks that wait, for at most `timeout_s` seconds, make them durable, and end.

        What isn't stored by then is dropped, except for transfers under way. A second call does nothing. Raises the
        manager's errors, but ends nevertheless.
        """
        if self.is_closed:
            return
        end_s = time.monotonic() + timeout_s
        is_done = False
        try:
            self.advance()
            while self.has_work and time.monotonic() < end_s:
                self.wait(max(0.0, min(0.1, end_s - time.monotonic())))
                self.advance()
            is_done = not self.has_work
        finally:
            self.is_closed = True
            with ExitStack() as ending:  # closes all of them, even if one fails
                for carrier in (*self._carriers.values(), *self._loaders.values()):
                    ending.callback(carrier.close, drops=not is_done)
                if self._shared is not None:
                    ending.callback(self._shared.seeker.close)  # called first, so that nothing waits for the network

    def _collect(self) -> list[Loaded]:
        self._something_ended.clear()
        loaded: list[Loaded] = []
        for carrier in {*self._carriers.values(), *self._loaders.values()}:
            for ended in carrier.ended():
                loaded += self._tiers.complete(ended.transfer, ended.ok, seconds=ended.seconds)
        return loaded
