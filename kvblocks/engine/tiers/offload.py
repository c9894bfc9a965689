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

from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.tiers.disk import DiskError, DiskStats
from kvblocks.tiers.tiers import Tiers
from kvblocks.tiers.transfer import Loaded


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """What was moved between the device and a tier, by direction ("load", "store"): bytes, and the seconds it took.

    Transfers that failed aren't in it. disk: what a disk counted itself, damage and failures; None: the tier is none.
    """

    tier: str
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    disk: DiskStats | None = None


class Offload:
    """The tiers of a manager, and who carries each one's transfers. One thread calls it, the engine's.

    carriers: of all tiers. something_ended: what their `on_end` sets. is_closed: whether `close` was called.
    """

    def __init__(self, tiers: Tiers, carriers: list[Carrier], something_ended: threading.Event) -> None:
        self._tiers = tiers
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._something_ended = something_ended
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether anything is on its way, or waits for that. O(tiers)."""
        return not self.is_closed and self._tiers.is_busy

    def advance(self) -> list[Loaded]:
        """Tell what has ended, begin what can be begun, and return what became of loads. O(blocks that move)."""
        loaded = self._collect()
        for transfer in self._tiers.take_transfers():
            self._carriers[transfer.tier].begin(transfer)
        for tier, changes in self._tiers.take_changes().items():
            self._carriers[tier].remember(changes)
        return loaded

    def erase_forgotten(self, timeout_s: float) -> None:
        """Overwrite what persistent tiers have in slots that hold nothing to be found, and wait until that is durable.

        Raises DiskError if it can't be done, or not in time; it may be asked for again. O(such slots).
        """
        waiting: list[Future[None]] = []
        for tier, changes in self._tiers.take_changes().items():
            self._carriers[tier].remember(changes)
            waiting.append(self._carriers[tier].erase(self._tiers.empty_slots(tier)))
        for future in waiting:
            try:
                future.result(timeout_s)
            except TimeoutError:
                raise DiskError(f"expected what is deleted to be overwritten in {timeout_s:g} s, it isn't") from None

    def wait(self, seconds: float) -> None:
        """Return when a transfer has ended since the last `advance`, or after so long."""
        self._something_ended.wait(seconds)

    def traffic(self) -> list[TierTraffic]:
        """Return what was moved so far, by tier. Any thread may ask."""
        return [
            TierTraffic(carrier.name, dict(carrier.num_bytes), dict(carrier.seconds), carrier.disk_stats)
            for carrier in self._carriers.values()
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
                for carrier in self._carriers.values():
                    ending.callback(carrier.close, drops=not is_done)

    def _collect(self) -> list[Loaded]:
        self._something_ended.clear()
        loaded: list[Loaded] = []
        for carrier in self._carriers.values():
            for ended in carrier.ended():
                loaded += self._tiers.complete(ended.transfer, ended.ok, seconds=ended.seconds)
        return loaded
