"""The calls about pins: prefixes that stay cached, see `retention`."""

from collections.abc import Iterable
from typing import Any, SupportsFloat

from kvblocks.arguments import Given, Text, check_number, is_a, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.group_manager import GroupManager
from kvblocks.hashing import PositionKey
from kvblocks.retention import Pin, Priority, Refusal
from kvblocks.sequence import Sequence
from kvblocks.tokens import TokenIds, pack_tokens


class PinningManager(GroupManager):
    """`GroupManager` with pins. A part of `KVCacheManager`; not made by itself."""

    @property
    def pins(self) -> list[Pin]:
        """The pins that haven't ended, oldest first. O(pins)."""
        return list(self._retention.pins)

    @property
    def last_refusal(self) -> Refusal | None:
        """Why the last call that returned None did so; None before the first. O(1)."""
        return self._retention.last_refusal

    def pin(
        self,
        token_ids: TokenIds,
        *,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: Iterable[PositionKey] = (),
        priority: Priority = 50,
        expires_at: SupportsFloat | None = None,
    ) -> Pin:
        """Keep the full blocks of a prefix cached, from now or from when they are computed, until `unpin` or expiry.

        token_ids, salt, lora, extra_keys: as of a `Sequence`. priority: 0 to 100, or (start, end, priority) for
        ranges of tokens, where a block gets at least the priority of those behind it, and those behind the last range
        aren't pinned. When a call needs blocks and only pinned ones are left, those of lowest priority are given up,
        and those of 100 never. expires_at: on the caller's clock, see `expire_pins`; None: never.

        Raises PinBudgetError when all pins together would be for more than `pin_budget` allows (a block in two pins
        counts twice), InvalidArgumentError and InvalidTokensError. O(tokens + pins); and while it lacks blocks, a
        lookup whenever a sequence that begins like it is freed.
        """
        if not self.enable_caching:
            raise InvalidArgumentError("pin: expected enable_caching=True when the manager was made, got False")
        end = None if expires_at is None else check_number("expires_at", expires_at, "a number or None")
        copied = bytes(memoryview(pack_tokens(token_ids)).cast("B"))  # a pin may outlive the caller's buffer
        prefix = Sequence("pin", copied, salt=salt, lora=lora, extra_keys=extra_keys)
        pin = self._retention.add(prefix, priority, end)
        self._check_if_debugging()
        return pin

    def unpin(self, pin: Given[Pin]) -> None:
        """End a pin; its blocks stay cached as any others do. Raises InvalidArgumentError. O(its blocks)."""
        given: Any = pin
        if not is_a(given, Pin):
            raise wrong("unpin", "a Pin", given)
        self._retention.remove(given)
        self._check_if_debugging()

    def expire_pins(self, now: SupportsFloat) -> list[Pin]:
        """End and return the pins whose `expires_at` is not after `now`, on the clock that `expires_at` was told by.

        Their blocks are free then, and reused before any that is still pinned. Nothing expires by itself: call it now
        and then. Raises InvalidArgumentError. O(pins + blocks freed).
        """
        expired = self._retention.expire(check_number("now", now))
        self._check_if_debugging()
        return expired
