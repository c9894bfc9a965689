"""Live states: the slots of a manager's sequences, and what is to be copied to and from them.

The manager writes nothing. It says which copies the engine has to make before a step and after it. Once the scheduled
step has run, a live state is always the one after all tokens with slots, so its position isn't counted a second time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.sequence import Sequence
from kvblocks.core.state_copy import StateCopy

NOWHERE = 1 << 62
"""A position that no sequence reaches."""


class WaitingSave:
    """A save that the engine has taken, of a state whose prefix isn't cached yet."""

    __slots__ = ("blocks", "is_likely_end", "position")

    def __init__(self, position: int, blocks: list[KVCacheBlock], *, is_likely_end: bool) -> None:
        self.position = position
        self.blocks = blocks
        self.is_likely_end = is_likely_end


class ArrivingState:
    """The state that a sequence waits for while tiers load what comes after its hit.

    start: the number of tokens of the hit. end: the number up to the end of the loads. blocks: those of the checkpoint
    at `end`, either being loaded or on the device already. fallback: those of the hit's own checkpoint, for loads that
    fail. The sequence owns all of these.
    """

    __slots__ = ("blocks", "end", "fallback", "start")

    def __init__(self, start: int, end: int, blocks: list[KVCacheBlock], fallback: list[KVCacheBlock]) -> None:
        self.start = start
        self.end = end
        self.blocks = blocks
        self.fallback = fallback


class PendingCopy:
    """A copy that brings a state into a slot, until the engine has taken it.

    state: the live state it is for; None: that of a sequence that has ended or gone back since, so that only other
    copies read what this one brings. parent: the copy that brings the state which this one reads, if that is pending
    too. num_readers: how many pending copies have this one as their parent.
    """

    __slots__ = ("copy", "num_readers", "parent", "state")

    def __init__(self, copy: StateCopy, parent: "PendingCopy | None") -> None:
        self.copy = copy
        self.state: LiveState | None = None
        self.parent = parent
        self.num_readers = 0


class LiveState:
    """A sequence's live state."""

    __slots__ = (
        "arriving",
        "every",
        "made",
        "next_place",
        "num_taken",
        "origin",
        "places",
        "restoring",
        "slot",
        "start",
        "waiting",
    )

    def __init__(self, copy: StateCopy, restoring: list[KVCacheBlock]) -> None:
        self.slot = copy.slot
        """Where it lies."""
        self.origin: PendingCopy | None = None
        """The copy that brings the state to the slot, until the engine has taken that copy."""
        self.restoring = restoring
        """Blocks of the checkpoint that this copy, or one that it depends on, reads. The sequence owns them."""
        self.arriving: ArrivingState | None = None
        """What it waits for before there is such a copy; None: it loads nothing."""
        self.places: list[int] = []
        """Where to save, ascending."""
        self.every = 0
        """Also save at multiples of this; 0: nowhere else."""
        self.next_place = NOWHERE
        """The first place that isn't passed yet."""
        self.waiting: list[WaitingSave] = []
        """Saves that the engine has taken, and that lookups don't find yet."""
        self.made: list[Checkpoint] = []
        """The checkpoints that it restored or made."""
        self.start = copy.position
        """The first position whose state may still be there."""
        self.num_taken = copy.position
        """How many of the sequence's tokens had slots when copies were last taken. Maintained only when debugging."""

    def plan(self, places: Iterable[int], every: int, num_tokens: int) -> None:
        """Set where to save. num_tokens: how many tokens the state is after."""
        self.places = sorted(places)
        self.every = every
        self.go_to(num_tokens)

    def add_place(self, position: int, num_tokens: int) -> None:
        """Save at `position` too, unless the state is already after that many tokens or more. O(places)."""
        if position not in self.places:
            self.places.insert(bisect_left(self.places, position), position)
            self.go_to(num_tokens)

    def go_to(self, num_tokens: int) -> None:
        """Set `next_place` for a state after `num_tokens` tokens. O(log places)."""
        self.next_place = self.first_after(num_tokens)

    def first_after(self, num_tokens: int) -> int:
        """Return the first place after `num_tokens` tokens; `NOWHERE` if there is none. O(log places)."""
        index = bisect_right(self.places, num_tokens)
        place = self.places[index] if index < len(self.places) else NOWHERE
        return min(place, (num_tokens // self.every + 1) * self.every) if self.every else place

    def is_likely_end(self, position: int) -> bool:
        """Whether a place is more than just a multiple of `every`. O(log places)."""
        index = bisect_left(self.places, position)
        return index < len(self.places) and self.places[index] == position

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return the blocks that the sequence owns for its state. O(saves that wait)."""
        tables = [self.restoring, *[save.blocks for save in self.waiting]]
        return tables if self.arriving is None else [*tables, self.arriving.blocks, self.arriving.fallback]


class States:
    """The slots of a manager, and what is to be copied since copies were last taken."""

    def __init__(self, num_slots: int, num_blocks: int, every: int, num_kept: int) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        """Blocks of a checkpoint."""
        self.every = every
        """As in `RecurrentState`; 0: save only at places of a sequence's own."""
        self.num_kept = num_kept
        """How many earlier states the engine keeps in a slot."""
        self.free_slots = [*range(num_slots)][::-1]
        """Those that no sequence has."""
        self.running: dict[Sequence, LiveState] = {}
        """The live states, by sequence."""
        self.pending: dict[PendingCopy, None] = {}
        """The copies to make before the step, in the order of the calls that asked for them. Each reads what the slots
        hold after the copies before it, so a slot may be given to another sequence even while copies still read it.
        """
        self.wanted: dict[Sequence, int] = {}
        """The sequences whose state is to be saved after the step, and at which position."""
        self.num_cleared = self.num_restored = self.num_forked = self.num_saved = 0
        self.num_without_room = self.num_present = self.num_taken_back = self.num_passed = 0

    def begin(self, sequence: Sequence, position: int, restoring: list[KVCacheBlock]) -> LiveState:
        """Give a sequence a slot with a checkpoint's state, or with an empty one. A slot must be free. O(blocks)."""
        return self._begin(sequence, _copy_into(self.free_slots.pop(), position, restoring), restoring, None)

    def begin_arriving(self, sequence: Sequence, arriving: ArrivingState) -> LiveState:
        """Give a sequence a slot whose state a load brings. A slot must be free. O(blocks)."""
        state = self.running[sequence] = LiveState(_copy_into(self.free_slots.pop(), arriving.end, arriving.blocks), [])
        state.arriving = arriving
        return state

    def fork(self, state: LiveState, child: Sequence, position: int) -> LiveState:
        """Give a sequence a slot with the same state. A slot must be free. O(blocks).

        If the state isn't in its slot yet, the copy that brings it there stays until the child's copy is made, even if
        the state's own sequence ends before that. The child also owns what that copy reads.
        """
        copy = StateCopy("fork", position, self.free_slots.pop(), state.slot)
        return self._begin(child, copy, [*state.restoring], state.origin)

    def restart(self, state: LiveState, position: int, restoring: list[KVCacheBlock]) -> None:
        """Bring another state into a slot. The blocks of its earlier origin must have been released. O(copies)."""
        self.drop_origin(state)
        state.restoring = restoring
        state.num_taken = state.start = position
        self._bring(state, _copy_into(state.slot, position, restoring), None)

    def end(self, sequence: Sequence, state: LiveState) -> None:
        """Give a slot back. O(1), and O(copies) if its origin isn't taken yet."""
        self.wanted.pop(sequence, None)
        self.drop_origin(state)
        del self.running[sequence]
        self.free_slots.append(state.slot)

    def drop_origin(self, state: LiveState) -> None:
        """Forget the pending copy to a slot, once no other copy reads what it brings. O(copies)."""
        origin, state.origin = state.origin, None
        if origin is not None:
            origin.state = None
        while origin is not None and origin.state is None and not origin.num_readers:
            del self.pending[origin]
            origin = origin.parent
            if origin is not None:
                origin.num_readers -= 1

    def take(self) -> list[StateCopy]:
        """Return the copies to make before the step, and forget them. The states own what they restore until then."""
        pending, self.pending = self.pending, {}
        for origin in pending:
            if origin.state is not None:
                origin.state.origin = None
        return [origin.copy for origin in pending]

    def _begin(
        self, sequence: Sequence, copy: StateCopy, restoring: list[KVCacheBlock], parent: PendingCopy | None
    ) -> LiveState:
        state = self.running[sequence] = LiveState(copy, restoring)
        self._bring(state, copy, parent)
        return state

    def _bring(self, state: LiveState, copy: StateCopy, parent: PendingCopy | None) -> None:
        origin = state.origin = PendingCopy(copy, parent)
        origin.state = state
        if parent is not None:
            parent.num_readers += 1
        self.pending[origin] = None

    def check(self) -> None:
        """Raise AssertionError unless each slot has one sequence or is free. O(slots)."""
        slots = sorted([*self.free_slots, *[state.slot for state in self.running.values()]])
        assert slots == [*range(self.num_slots)], f"slots: expected each once, got {slots}"
        for origin in self.pending:
            readers = [other for other in self.pending if other.parent is origin]
            assert origin.num_readers == len(readers), f"{origin.copy}: expected {len(readers)} readers"
            assert readers or origin.state is not None, f"{origin.copy}: of an ended sequence, for nobody"
            assert origin.state is None or origin.state.origin is origin, f"{origin.copy}: not its state's"
        for state in self.running.values():
            assert state.origin is None or state.origin in self.pending, f"slot {state.slot}: its copy is forgotten"
            assert state.origin is not None or not state.restoring, f"slot {state.slot}: reads blocks for nothing"
            assert state.origin is None or state.arriving is None, f"slot {state.slot}: is read before it is written"


def _copy_into(slot: int, position: int, restoring: list[KVCacheBlock]) -> StateCopy:
    if not restoring:
        return StateCopy("clear", position, slot)
    return StateCopy("restore", position, slot, -1, tuple([block.block_id for block in restoring]))
