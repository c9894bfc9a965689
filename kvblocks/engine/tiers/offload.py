"""`Offload`: runs an engine's tiers. Between two steps it begins the manager's transfers, and reports ended ones.

The order is that of `kvblocks.tiers`: the step is launched, and then its transfers begin. Carriers wait for the
launched work (`BlockBytes.mark`).
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvblocks import Loaded, Tiers, Transfer
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.forgetting import FORGET_S, Forgetting
from kvblocks.engine.tiers.seeker import Seeker


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """The bytes moved between the device and a tier, and the seconds that took, by direction ("load", "store").

    Failed transfers don't count. place: the place's own counts, such as a disk's `DiskStats`, or None.
    """

    tier: str
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    place: object | None = None


class Offload:
    """The tiers of a manager with their carriers. Only the engine's thread calls it.

    carriers: those of all tiers. ends: their `on_end` puts something there; a `threading.Event` could be left locked by
    an interrupt. seeker: asks a shared store, if there is one. is_closed: whether `close` was called.
    """

    def __init__(
        self,
        tiers: Tiers,
        carriers: list[Carrier],
        ends: SimpleQueue[None],
        seeker: Seeker | None = None,
    ) -> None:
        self._tiers = tiers
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._ends = ends
        self._seeker = seeker
        self._under_way: set[Transfer] = set()
        self._forgettings: list[Forgetting] = []  # those that wait for transfers
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether any transfer is under way or waiting. O(tiers)."""
        return not self.is_closed and self._tiers.is_busy

    @property
    def is_seeking(self) -> bool:
        """Whether a request waits for a shared store's answer. O(1)."""
        return self._seeker is not None and self._seeker.is_seeking

    def seek(self, scheduler: Scheduler) -> None:
        """Ask a shared store which blocks of waiting requests it has, and note its answers. O(waiting requests)."""
        if self._seeker is not None:
            if self._seeker.take():
                scheduler.lookups.forget()
            self._seeker.seek(scheduler.waiting, scheduler.lookups)

    def advance(self) -> list[Loaded]:
        """Report ended transfers, begin new ones, and return the results of loads. O(blocks that move)."""
        loaded = self._collect()
        self._tiers.take_transfers()
        for transfer in self._tiers.unanswered:
            if transfer not in self._under_way:  # a new one, or one that an interrupted call has left
                self._carriers[transfer.tier].begin(transfer)
                self._under_way.add(transfer)
        self._note_changes()
        return loaded

    def forget(self, salt: str | None, num_blocks: int) -> Forgetting:
        """Begin to delete the bytes of a salt that the manager has just forgotten. Waits for nothing.

        Slots of persistent tiers are overwritten, at once if no transfer uses them, otherwise when the transfers under
        way have ended. In a shared store, all blocks of the salt are deleted, whichever server stored them. num_blocks:
        see `Forgetting`. O(slots of persistent tiers).
        """
        persistent = self._note_changes()
        shared = [] if self._seeker is None else [self._seeker.name]
        forgetting = Forgetting(salt, num_blocks, [*persistent, *shared], self._under_way)
        for tier in shared:
            forgetting.follow(tier, self._carriers[tier].forget(salt, [], FORGET_S))
        if forgetting.waits_for:
            self._forgettings.append(forgetting)
        for tier in persistent:
            deletion = self._carriers[tier].forget(salt, self._tiers.empty_slots(tier), FORGET_S)
            if not forgetting.waits_for:
                forgetting.follow(tier, deletion)
        return forgetting

    def wait(self, seconds: float) -> None:
        """Wait for at most `seconds`, until a transfer has ended since the last `advance` or a store has answered."""
        if self._seeker is None or not self._seeker.has_answer:
            with suppress(Empty):
                self._ends.get(timeout=seconds)

    def traffic(self) -> list[TierTraffic]:
        """Return what was moved so far, by tier. Any thread may call this."""
        return [
            TierTraffic(carrier.name, dict(carrier.num_bytes), dict(carrier.seconds), carrier.stats())
            for carrier in self._carriers.values()
        ]

    def describe(self) -> list[str]:
        """Return a readable line about each tier, the fastest first. O(tiers)."""
        return [self._carriers[tier.name].describe(tier.num_cached_blocks) for tier in self._tiers]

    def close(self, timeout_s: float) -> None:
        """Store waiting blocks for at most `timeout_s` seconds, make what was stored durable, and end.

        What isn't stored by then is dropped, except for transfers under way. A second call does nothing. It ends even
        if it raises an error of the manager.
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
                for forgetting in self._forgettings:
                    ending.callback(forgetting.abandon)  # called last
                for carrier in self._carriers.values():
                    ending.callback(carrier.close, drops=not is_done)
                if self._seeker is not None:
                    ending.callback(self._seeker.close)  # called first, so that nothing waits for the network

    def _collect(self) -> list[Loaded]:
        with suppress(Empty):
            while True:
                self._ends.get_nowait()
        loaded: list[Loaded] = []
        for carrier in self._carriers.values():
            for ended in carrier.ended():
                loaded += self._tiers.complete(ended.transfer, ended.ok, seconds=ended.seconds)
                self._under_way.discard(ended.transfer)
        if self._forgettings:
            self._overwrite_freed()
        return loaded

    def _note_changes(self) -> list[str]:
        """Have persistent tiers remember what became of their slots, and return the names of these tiers."""
        for tier, slots in self._tiers.take_uses().items():
            self._carriers[tier].note_used(slots)
        changes = self._tiers.take_changes()
        for tier in changes:
            self._carriers[tier].remember(changes[tier])
        return [*changes]

    def _overwrite_freed(self) -> None:
        """Go on with deletions whose transfers have ended: now no transfer uses their slots."""
        waiting: list[Forgetting] = []
        for forgetting in self._forgettings:
            forgetting.waits_for &= self._under_way
            if forgetting.waits_for:
                waiting.append(forgetting)
                continue
            for tier in self._note_changes():
                deletion = self._carriers[tier].forget(forgetting.salt, self._tiers.empty_slots(tier), FORGET_S)
                forgetting.follow(tier, deletion)
        self._forgettings = waiting
