"""Simulated KV memory, filled as a manager says: each slot holds the context that its KV was computed in."""

from collections.abc import Iterable, Sequence

from kvblocks.verify.adapter import Slot, WalkRequest
from kvblocks.verify.contexts import Contexts
from kvblocks.verify.errors import VerificationError

_UNWRITTEN = -1


class SlotMemory:
    """What slots hold now, and what they will hold when the step that is being assembled has run.

    A step may read what it writes, since each layer stores its K and V before it attends. So a request's own tokens
    must be right in the future contents. A failed step leaves the slots that it should have written half written, so
    they hold nothing.
    """

    def __init__(self) -> None:
        self.contexts = Contexts()
        self._now: dict[Slot, int] = {}
        self._then: dict[Slot, int] = {}
        self._touched: set[Slot] = set()  # by the step that is being put together
        self._weights = 0

    def change_weights(self) -> None:
        """From now on the same tokens have other KV."""
        self._weights += 1

    def numbers(self, request: WalkRequest) -> list[int]:
        """Return the context numbers that the slots of a request's tokens must hold, by position."""
        root = self.contexts.root(request.salt, self._weights)
        return self.contexts.chain(root, request.token_ids[: request.num_tokens])

    def copy(self, copies: Iterable[tuple[Slot, Slot]]) -> None:
        """Note that the next step begins with these copies, (source, destination)."""
        for source, destination in copies:
            self._put(destination, self._then.get(source, _UNWRITTEN))

    def write(self, slots: Sequence[Slot], numbers: list[int], start: int) -> None:
        """Note that the next step writes the slots of positions from `start` on."""
        for position in range(start, len(numbers)):
            self._put(slots[position], numbers[position])

    def run_step(self) -> None:
        """Note that the step has run."""
        self._now.update((slot, self._then[slot]) for slot in self._touched)
        self._touched.clear()

    def fail_step(self) -> None:
        """Note that the step has failed."""
        for slot in self._touched:
            self._now[slot] = self._then[slot] = _UNWRITTEN
        self._touched.clear()

    def check(self, request: WalkRequest, slots: Sequence[Slot], numbers: list[int]) -> None:
        """Raise VerificationError unless every slot of a request will hold its own KV when the step has run."""
        for position, number in enumerate(numbers):
            found = self._then.get(slots[position], _UNWRITTEN)
            if found != number:
                raise self._wrong(request, position, slots[position], found)

    def _put(self, slot: Slot, number: int) -> None:
        self._then[slot] = number
        self._touched.add(slot)

    def _wrong(self, request: WalkRequest, position: int, slot: Slot, found: int) -> VerificationError:
        where = f"token {position} of {request.name!r} is in slot {slot}, which holds"
        if found == _UNWRITTEN:
            return VerificationError("unwritten KV", f"{where} nothing that a step has written")
        (salt, weights), tokens = self.contexts.parts(found)
        more = "" if salt == request.salt else f", with salt {salt!r} rather than {request.salt!r}"
        more += "" if weights == self._weights else ", computed before the last reset"
        expected = request.token_ids[: position + 1]
        return VerificationError("wrong KV", f"{where} that of the last of {tokens}{more}; expected {expected}")
