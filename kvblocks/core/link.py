"""What the parts of a manager that callers see share with it: `manager.pins`, `.quotas`, `.states`, `.tiers` and so on.

A part checks a call's arguments, begins a change, makes it and ends it, as the manager's own calls do.
"""

from collections.abc import Callable, Hashable
from typing import Any

from kvblocks.arguments import Given
from kvblocks.core.change import Change
from kvblocks.core.sequence import Sequence, as_sequence, not_a_sequence
from kvblocks.core.slots import SlotAllocator
from kvblocks.errors import InvalidArgumentError, KVBlocksError, SequenceStateError


class ManagerLink:
    """A manager's guard, its sequences by id, its clock, its counters, and how it refuses a call."""

    def __init__(
        self,
        change: Change,
        slots: SlotAllocator,
        check: Callable[[], None],
        free: Callable[[Sequence], None],
        *,
        caches: bool,
    ) -> None:
        self.change = change
        """Whether a change is under way."""
        self.slots = slots
        """Who gives blocks to sequences."""
        self.caches = caches
        """Whether prefixes are reused."""
        self.sequences: dict[Hashable, Sequence] = {}
        """The allocated sequences by their ids, the oldest first."""
        self.num_queries = self.num_hits = self.num_queried_tokens = self.num_hit_tokens = 0
        """As in `CacheStats`."""
        self.num_started = 0
        """How many calls have begun a sequence."""
        self.now: int | float = 0.0
        """The caller's clock."""
        self.free = free
        """The manager's `free`."""
        self._check = check

    def end(self) -> None:
        """End a change; in debug mode, check that all is consistent. O(1), in debug mode O(pool)."""
        rest = self.change.rest
        self.change.state = rest
        if rest:
            self._check()

    def set_time(self, now: Any) -> None:
        """Set the caller's clock. O(1)."""
        self.now = now
        chooser = self.slots.pool.chooser
        if chooser is not None:
            chooser.set_time(now)

    def check_owned(self, sequence: Given[Sequence], call: str) -> Sequence:
        """Return `sequence` if it is one of the manager's, else raise SequenceStateError or InvalidArgumentError.

        Raises CorruptStateError if a call was left half done. O(1).
        """
        if self.change.state:
            self.change.check_whole()
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code checks its type here
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self.change or self.sequences.get(own.sequence_id) is not own:
            raise self.refusal(call, sequence)
        return own

    def refusal(self, call: str, sequence: object) -> KVBlocksError:
        """Return the error for what isn't one of the manager's allocated sequences."""
        try:
            got = as_sequence(call, sequence).describe_for(self.change)
        except InvalidArgumentError as error:
            return error
        return SequenceStateError(f"{call}: expected a sequence allocated here, got {got}")

    def check_has_primary(self, call: str) -> None:
        """Raise InvalidArgumentError unless a group has full attention. O(1)."""
        layout = self.slots.layout
        if layout is not None and layout.primary is None:
            raise InvalidArgumentError(
                f"{call}: expected a manager with a group of full attention, got {layout.groups}"
            )
