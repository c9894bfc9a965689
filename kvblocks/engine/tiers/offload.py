"""`Offload`: an engine's tiers at work. Between two steps it begins what the manager wants moved and says what ended.

The order of a step is that of `kvblocks.tiers`: the step is launched, then its transfers begin; whoever carries them
waits for what was launched (`BlockBytes.mark`).
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
    """What was moved between the device and a tier, by direction ("load", "store"): bytes, and the seconds it took.

    Transfers that failed aren't in it. disk: what a disk counted itself, damage and failures; None: the tier is none.
    store: the same of a store that servers share.
    """

    tier: str
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    disk: DiskStats | None = None
    store: StoreStats | None = None


@dataclass(frozen=True, slots=True)
class SharedTier:
    """A store that servers share. loads: who carries its loads, which so don't wait for stores. seeker: asks it."""

    store: SharedStore
    loads: Carrier
    seeker: Seeker


class Offload:
    """The tiers of a manager, and who carries each one's transfers. One thread calls it, the engine's.

    carriers: of all tiers. something_ended: what their `on_end` sets. shared: the store that servers share, and what
    belongs to it; None: there is none. is_closed: whether `close` was called.
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
        """Whether anything is on its way, or waits for that. O(tiers)."""
        return not self.is_closed and self._tiers.is_busy

    @property
    def is_seeking(self) -> bool:
        """Whether a request waits for what a shared store says. O(1)."""
        return self._shared is not None and self._shared.seeker.is_seeking

    def seek(self, scheduler: Scheduler) -> None:
        """Ask a shared store what it has of requests that wait, and take note of its answers. O(waiting requests)."""
        if self._shared is not None:
            if self._shared.seeker.take():
                scheduler.lookups.forget()
            self._shared.seeker.seek(scheduler.waiting, scheduler.lookups)

    def advance(self) -> list[Loaded]:
        """Tell what has ended, begin what can be begun, and return what became of loads. O(blocks that move)."""
        loaded = self._collect()
        for transfer in self._tiers.take_transfers():
            carriers = self._loaders if transfer.is_load else self._carriers
            carriers[transfer.tier].begin(transfer)
        for tier, changes in self._tiers.take_changes().items():
            self._carriers[tier].remember(changes)
        return loaded

    def erase_forgotten(self, salt: str | None, timeout_s: float) -> None:
        """Overwrite what persistent tiers have in slots that hold nothing to be found, and wait until that is durable.

        What a shared store has of `salt`, whoever stored it, is deleted. Raises DiskError and StoreError if it can't be
        done, or not in time; it may be asked for again. O(such slots), and O(keys of the store).
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
                raise DiskError(f"expected what is deleted to be overwritten in {timeout_s:g} s, it isn't") from None

    def wait(self, seconds: float) -> None:
        """Return when a transfer has ended since the last `advance`, or a store has answered, or after so long."""
        if self._shared is None or not self._shared.seeker.has_answer:
            self._something_ended.wait(seconds)

    def traffic(self) -> list[TierTraffic]:
        """Return what was moved so far, by tier. Any thread may ask."""
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
        """Store what waits for it, for so many seconds at most, make it durable, and end. Nothing the second time.

        What isn't stored by then is dropped, except for transfers under way. Raises what the manager does, and has
        ended all the same.
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
            with ExitStack() as ending:  # all of them, whatever happens to one
                for carrier in (*self._carriers.values(), *self._loaders.values()):
                    ending.callback(carrier.close, drops=not is_done)
                if self._shared is not None:
                    ending.callback(self._shared.seeker.close)  # the first of all: nobody waits for the network then

    def _collect(self) -> list[Loaded]:
        self._something_ended.clear()
        loaded: list[Loaded] = []
        for carrier in {*self._carriers.values(), *self._loaders.values()}:
            for ended in carrier.ended():
                loaded += self._tiers.complete(ended.transfer, ended.ok, seconds=ended.seconds)
        return loaded
