"""The record of one tenant's hints: its pins, its prefetches, and its last answers."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvblocks import Pin
from kvblocks.errors import InvalidArgumentError
from kvblocks.wire.hints.envelope import HintAction, HintAnswer
from kvblocks.wire.hints.prefetch import Load
from kvblocks.wire.hints.prefix import NamedPrefix


class Standing:
    """What an action left in effect, until `ends_at`. is_deferred: whether another answer to it will come.

    action: without its payload. prefix: the prefix that it concerns.
    """

    __slots__ = ("action", "ends_at", "is_deferred", "message_id", "prefix")

    def __init__(self, message_id: str, action: HintAction, prefix: NamedPrefix, ends_at: float) -> None:
        self.message_id = message_id
        self.action = without_payload(action)
        self.prefix = prefix
        self.ends_at = ends_at
        self.is_deferred = False


class StandingPin(Standing):
    """A pin that a hint made."""

    __slots__ = ("pin", "pin_id")

    def __init__(
        self, message_id: str, action: HintAction, prefix: NamedPrefix, ends_at: float, pin: Pin, pin_id: str
    ) -> None:
        super().__init__(message_id, action, prefix, ends_at)
        self.pin = pin
        self.pin_id = pin_id


class StandingPrefetch(Standing):
    """A prefetch that loads or waits. load: None while it waits. num_wanted_blocks: how many blocks the hint named."""

    __slots__ = ("load", "num_wanted_blocks")

    def __init__(
        self, message_id: str, action: HintAction, prefix: NamedPrefix, ends_at: float, num_wanted_blocks: int
    ) -> None:
        super().__init__(message_id, action, prefix, ends_at)
        self.num_wanted_blocks = num_wanted_blocks
        self.load: Load | None = None


class Book:
    """One tenant's hints. pins, prefetches: oldest first. num_pins_made: the number so far, which pins' ids contain."""

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant
        self.pins: dict[StandingPin, None] = {}
        self.prefetches: dict[StandingPrefetch, None] = {}
        self.num_pins_made = 0
        self._answers: OrderedDict[tuple[str, str], tuple[bytes, HintAnswer]] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """Whether the tenant has no pins and no prefetches. O(1)."""
        return not self.pins and not self.prefetches

    @property
    def num_pinned_blocks(self) -> int:
        """How many blocks its pins are for. O(its pins)."""
        return sum([standing.pin.num_wanted_blocks for standing in self.pins])

    def recall(self, message_id: str, action_id: str) -> tuple[bytes, HintAnswer] | None:
        """Return an action's fingerprint and its last answer; None if they aren't kept. O(1)."""
        return self._answers.get((message_id, action_id))

    def remember(self, message_id: str, print_of_action: bytes, answer: HintAnswer, most: int) -> None:
        """Keep an answer. Beyond `most` answers the oldest are dropped. O(1)."""
        self._answers[message_id, answer.action.action_id] = print_of_action, answer
        while len(self._answers) > most:
            self._answers.popitem(last=False)

    def correct(self, message_id: str, answer: HintAnswer) -> None:
        """Replace the kept answer that said deferred, if there is one. O(1)."""
        kept = self._answers.get((message_id, answer.action.action_id))
        if kept is not None:
            self._answers[message_id, answer.action.action_id] = kept[0], answer

    def named_by_id(self, payload: Mapping[str, Any]) -> list[Standing]:
        """Return the pins and prefetches with this pin_id, or this action_id with or without a message_id.

        O(pins and prefetches).
        """
        if "pin_id" in payload:
            return [standing for standing in self.pins if standing.pin_id == payload["pin_id"]]
        return [
            standing
            for standing in (*self.pins, *self.prefetches)
            if standing.action.action_id == payload["action_id"]
            and payload.get("message_id", standing.message_id) == standing.message_id
        ]

    def named_by_prefix(self, prefix: NamedPrefix) -> list[Standing]:
        """Return the pins and prefetches of exactly this prefix. O(pins and prefetches)."""
        return [standing for standing in (*self.pins, *self.prefetches) if standing.prefix.key == prefix.key]


def without_payload(action: HintAction) -> HintAction:
    """Return an action without its payload, which may be long."""
    return HintAction(action.action_id, action.action_type, action.action_version, {})


def fingerprint(action: HintAction) -> bytes:
    """Return bytes that distinguish an action from another one with the same ids. O(its payload).

    Raises InvalidArgumentError for a payload that doesn't consist of plain values.
    """
    try:
        text = json.dumps([action.action_type, action.action_version, action.payload], sort_keys=True, default=_bytes)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"payload: expected plain values, as JSON has them, got: {error}") from None
    return hashlib.sha256(text.encode()).digest()


def _bytes(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"an object of type {type(value).__name__}")
    return {"bytes": value.hex()}
