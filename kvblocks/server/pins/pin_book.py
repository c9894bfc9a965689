"""The pins that clients made, with what the core doesn't keep: an id, a description, and an expiry time."""

import time
from dataclasses import dataclass

from kvblocks import KVCacheManager, Pin


@dataclass(frozen=True, slots=True)
class PinEntry:
    """A pin as clients see it. expires_at: its end by `time.monotonic`; None: never."""

    pin_id: str
    pin: Pin
    description: str
    priority: int

    def to_json(self, now: float) -> dict[str, object]:
        """Return the pin for a client, without its tokens."""
        expires_at = self.pin.expires_at
        return {
            "id": self.pin_id,
            "description": self.description,
            "num_tokens": self.pin.sequence.num_tokens,
            "num_blocks": self.pin.num_wanted_blocks,
            "num_held_blocks": self.pin.num_held_blocks,
            "priority": self.priority,
            "expires_in_s": None if expires_at is None else round(max(0.0, expires_at - now), 3),
        }


class PinBook:
    """The pins of a server. Owned by the engine's thread."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._entries: dict[str, PinEntry] = {}
        self._num_made = 0

    def add(
        self, token_ids: list[int], *, salt: str | None, description: str, ttl_s: float | None, priority: int
    ) -> PinEntry:
        """Pin a prefix for `ttl_s` seconds (None: until it is unpinned). Raises what `manager.pins.pin` does."""
        self.expire()
        expires_at = None if ttl_s is None else time.monotonic() + ttl_s
        pin = self._manager.pins.pin(token_ids, salt=salt, priority=priority, expires_at=expires_at)
        self._num_made += 1
        entry = PinEntry(f"pin-{self._num_made}", pin, description, priority)
        self._entries[entry.pin_id] = entry
        return entry

    def remove(self, pin_id: str) -> PinEntry | None:
        """End a pin and return it; None if no pin has that id."""
        self.expire()
        entry = self._entries.pop(pin_id, None)
        if entry is not None:
            self._manager.pins.unpin(entry.pin)
        return entry

    def remove_tokens(self, token_ids: list[int], *, salt: str | None) -> list[PinEntry]:
        """End all pins of exactly these tokens under this salt. Return them, the oldest first. O(pins + tokens)."""
        self.expire()
        ended = [
            entry
            for entry in self._entries.values()
            if entry.pin.sequence.salt == salt
            and entry.pin.sequence.num_tokens == len(token_ids)
            and list(entry.pin.sequence.token_ids(0, len(token_ids))) == token_ids
        ]
        for entry in ended:
            del self._entries[entry.pin_id]
            self._manager.pins.unpin(entry.pin)
        return ended

    def entries(self) -> list[PinEntry]:
        """Return the pins that haven't ended, the oldest first."""
        self.expire()
        return list(self._entries.values())

    def seconds_left(self) -> float | None:
        """Return the seconds until the next pin ends, at most an hour; None if no pin has an expiry time. O(pins)."""
        ends = [entry.pin.expires_at for entry in self._entries.values() if entry.pin.expires_at is not None]
        return min(3600.0, max(0.0, min(ends) - time.monotonic())) if ends else None

    def expire(self) -> None:
        """End the pins whose time has come. O(pins + blocks freed)."""
        if self._entries:
            self._manager.pins.expire(time.monotonic())
            if any(entry.pin.has_ended for entry in self._entries.values()):  # by this call or by another owner's
                self._entries = {key: entry for key, entry in self._entries.items() if not entry.pin.has_ended}
