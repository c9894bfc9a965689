"""Prefixes that clients mark with `cache_control`.

Each becomes a pin for some time, within the salt's budget and quota. A longer prefix replaces the pins that it begins
with. So a conversation whose mark moves on has one pin per branch, and none of its blocks counts twice.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvblocks import KVCacheManager, Pin
from kvblocks.errors import InvalidArgumentError, PinBudgetError

Outcome = Literal["pinned", "renewed", "evicted", "refused"]

PRIORITY = 50
MAX_PINS = 256
"""The most pins of one salt, since each mark looks at all of them."""


@dataclass(frozen=True, slots=True)
class MarkOutcome:
    """What became of a mark.

    num_tokens: the length of its prefix. ttl_s: for how many seconds it is pinned. outcome: "pinned": it is pinned now;
    "renewed": it was pinned already; "evicted": it had been pinned, lost blocks to requests, and is pinned again;
    "refused": it isn't pinned, for the stated reason.
    """

    num_tokens: int
    ttl_s: float
    outcome: Outcome
    reason: str | None = None


@dataclass(slots=True)
class _Marked:
    """A pin. most_held: how many blocks it ever held."""

    tokens: "array[int]"
    pin: Pin
    expires_at: float
    most_held: int = 0


class MarkedPins:
    """The marked prefixes of all salts. Owned by the engine's thread.

    max_blocks: the most blocks that one salt may pin; its quota may be lower.
    """

    def __init__(self, manager: KVCacheManager, max_blocks: int) -> None:
        self._manager = manager
        self._max_blocks = max_blocks
        self._marked: dict[str | None, list[_Marked]] = {}

    def mark(self, token_ids: list[int], *, salt: str | None, ttl_s: float) -> MarkOutcome:
        """Pin a prefix for `ttl_s` seconds from now, if possible. O(the salt's marks + tokens)."""
        now, tokens = time.monotonic(), array("I", token_ids)
        self.expire()
        own = self._marked.setdefault(salt, [])
        known = next((one for one in own if one.tokens == tokens), None)
        beginnings = [one for one in own if one is not known and _begins(one.tokens, tokens)]
        had_lost = [one for one in [*beginnings, *([known] if known else [])] if _has_lost(one)]
        outcome: Outcome = "evicted" if had_lost else "pinned" if known is None else "renewed"
        if known is not None:
            known.expires_at = known.pin.expires_at = max(known.expires_at, now + ttl_s)
            return MarkOutcome(len(tokens), ttl_s, outcome)
        replaced = [one for one in beginnings if one.expires_at <= now + ttl_s]
        refusal = self._refusal(len(tokens), own, replaced, salt)
        if refusal is None:
            self._end(replaced)  # their blocks are those of the new pin
            refusal = self._pin(tokens, salt, now + ttl_s)
            if refusal is not None:  # side groups of layers want more blocks than were counted
                for one in replaced:
                    self._pin(one.tokens, salt, one.expires_at)
        if not own:
            self._marked.pop(salt, None)
        return MarkOutcome(len(tokens), ttl_s, outcome if refusal is None else "refused", refusal)

    def forget(self, salt: str | None) -> None:
        """End all pins of a salt."""
        self._end(list(self._marked.get(salt, ())))
        self._marked.pop(salt, None)

    def expire(self) -> None:
        """End the pins whose time has come, and note what the others hold. Call this at each step. O(pins)."""
        for own in self._marked.values():
            for one in own:
                one.most_held = max(one.most_held, one.pin.num_held_blocks)
        if self._marked:
            self._manager.pins.expire(time.monotonic())
            for salt in list(self._marked):
                self._marked[salt] = [one for one in self._marked[salt] if not one.pin.has_ended]
                if not self._marked[salt]:
                    del self._marked[salt]

    def seconds_left(self) -> float | None:
        """Return the seconds until the next pin ends; None if there is none. O(pins)."""
        ends = [one.expires_at for own in self._marked.values() for one in own]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def __iter__(self) -> Iterator[Pin]:
        return (one.pin for own in self._marked.values() for one in own)

    def _pin(self, tokens: "array[int]", salt: str | None, expires_at: float) -> str | None:
        """Pin a prefix. Return why it can't be pinned; None if it is."""
        try:
            pin = self._manager.pins.pin(tokens, salt=salt, priority=PRIORITY, expires_at=expires_at)
        except (PinBudgetError, InvalidArgumentError) as error:
            return str(error)
        self._marked.setdefault(salt, []).append(_Marked(tokens, pin, expires_at))
        return None

    def _refusal(self, num_tokens: int, own: list[_Marked], replaced: list[_Marked], salt: str | None) -> str | None:
        """Why a prefix can't be pinned; None if nothing here speaks against it."""
        size = self._manager.block_size
        if num_tokens < size:
            return f"expected at least one block of {size} tokens up to the mark, got {num_tokens} tokens"
        left = [one for one in own if one not in replaced]
        if len(left) >= MAX_PINS:
            return f"expected at most {MAX_PINS} marked prefixes at a time, got one more"
        quotas = [quota.max_cached_blocks for quota in self._manager.quotas if quota.salt == salt]
        most = min([self._max_blocks, *quotas])
        wanted, pinned = num_tokens // size, sum(one.pin.num_wanted_blocks for one in left)
        if pinned + wanted > most:
            return f"expected marked prefixes of at most {most} blocks, got {wanted} beside {pinned} that are pinned"
        pins = self._manager.pins
        others = sum(pin.num_wanted_blocks for pin in pins) - sum(one.pin.num_wanted_blocks for one in replaced)
        if others + wanted > pins.max_blocks:
            return f"expected pins of at most {pins.max_blocks} blocks together, got {wanted} beside {others}"
        return None

    def _end(self, marked: list[_Marked]) -> None:
        for one in marked:
            if not one.pin.has_ended:
                self._manager.pins.unpin(one.pin)
            own = self._marked.get(one.pin.sequence.salt, [])
            if one in own:
                own.remove(one)


def _begins(short: "array[int]", long: "array[int]") -> bool:
    """Whether a longer prompt begins with all of a shorter one."""
    return len(short) < len(long) and long[: len(short)].tobytes() == short.tobytes()


def _has_lost(one: _Marked) -> bool:
    return one.pin.num_held_blocks < one.most_held
