"""`ManagerPins`, which is `manager.pins`: the calls about pins. `retention.pins` says what a pin is and does."""

from collections.abc import Iterable, Iterator
from typing import Any, SupportsFloat, final

from kvblocks.arguments import Given, Text, check_number, is_a, wrong
from kvblocks.closed import Closed
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import TokenIds
from kvblocks.errors import InvalidArgumentError
from kvblocks.hashing.extra_keys import PositionKey
from kvblocks.retention.pins import Pin, Pins, Priority


@final
class ManagerPins(Closed):
    """The pins of a manager: `manager.pins`. Iterating yields those that haven't ended, oldest first.

    Made by a manager. As with the manager's own calls, one that raises has changed nothing.
    """

    def __init__(self, link: ManagerLink, pins: Pins) -> None:
        self._link = link
        self._change = link.change
        self._slots = link.slots
        self._pins = pins

    @property
    def max_blocks(self) -> int:
        """How many blocks the prefixes of all pins together may have: the share `pin_budget` of the pool. O(1)."""
        return self._pins.max_blocks

    def __len__(self) -> int:
        return len(self._pins.pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.pins))

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
        """Keep the full blocks of a prefix cached until `unpin` or expiry, starting now or when they are computed.

        - token_ids, salt, lora, extra_keys: as for a `Sequence`.
        - priority: 0 to 100, or (start, end, priority) for ranges of tokens. With ranges, a block gets at least the
          priority of the blocks after it, and blocks after the last range aren't pinned. When a call needs blocks and
          only pinned ones are left, those of lowest priority are given up; those of priority 100 never are.
        - expires_at: on the caller's clock, see `expire`; None: never.

        Raises PinBudgetError when the prefixes of all pins together would have more blocks than `pin_budget` allows (a
        block in two pins counts twice), InvalidArgumentError and InvalidTokensError. O(tokens + pins).

        While the pin lacks blocks, freeing a sequence that has the same first tokens costs one more lookup. While there
        are pins, a call that finds too few free blocks costs O(pins) more, and O(pinned blocks) if a shared block got
        or lost an owner since the last such call.
        """
        self._change.check_whole()
        if not self._link.caches:
            raise InvalidArgumentError("pins.pin: expected enable_caching=True when the manager was made, got False")
        end = None if expires_at is None else check_number("expires_at", expires_at, "a number or None")
        prefix = Sequence("pin", token_ids, salt=salt, lora=lora, extra_keys=extra_keys)
        pin = self._pins.make(prefix, priority, end)
        self._change.begin()
        self._slots.soft_holds = self._pins
        self._pins.add(pin)
        self._link.end()
        return pin

    def unpin(self, pin: Given[Pin]) -> None:
        """End a pin. Its blocks stay cached until they are reused. Raises InvalidArgumentError. O(its blocks)."""
        self._change.check_whole()
        given: Any = pin
        if not is_a(given, Pin):
            raise wrong("pins.unpin", "a Pin", given)
        if given not in self._pins.pins:
            raise InvalidArgumentError(f"pins.unpin: expected a pin of this manager that hasn't ended, got {given}")
        self._change.begin()
        self._remove([given])

    def expire(self, now: SupportsFloat) -> list[Pin]:
        """End and return the pins whose `expires_at` is at or before `now`, and set the clock `manager.now`.

        The pins' blocks become free, and are reused before any block that is still pinned. No pin expires by itself, so
        call this regularly. Raises InvalidArgumentError. O(pins + blocks freed).
        """
        self._change.check_whole()
        time = check_number("now", now)
        self._link.set_time(time)
        expired = self._pins.expired(time)
        self._change.begin()
        self._remove(expired)
        return expired

    def _remove(self, ended: list[Pin]) -> None:
        """Remove pins and end the change. If no pins are left, the slots no longer ask for pins."""
        for pin in ended:
            self._pins.remove(pin)
        if not self._pins.pins:
            self._slots.soft_holds = None
        self._link.end()
