"""`ManagerStates`, which is `manager.states`: the calls about recurrent states."""

from typing import SupportsIndex, final

from kvblocks.arguments import Given, asked_once, check_count
from kvblocks.closed import Closed
from kvblocks.core.hit import CacheHit, check_start
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence, as_sequence
from kvblocks.core.state_copy import StateCopy
from kvblocks.core.states import RecurrentStates
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.stats import StateStats


@final
class ManagerStates(Closed):
    """The live states of a manager's sequences, and their checkpoints: `manager.states`.

    Made by a manager. Its calls raise InvalidArgumentError unless one of the manager's groups is a `RecurrentState`. As
    with the manager's own calls, one that raises has changed nothing.
    """

    def __init__(self, link: ManagerLink, states: RecurrentStates | None) -> None:
        """states: None if no group keeps a state."""
        self._link = link
        self._change = link.change
        self._states = states

    @property
    def num_slots(self) -> int:
        """How many sequences can have a live state at once. O(1)."""
        return self._read("num_slots").live.num_slots

    @property
    def num_free_slots(self) -> int:
        """How many more sequences can be started or forked. O(1)."""
        return len(self._read("num_free_slots").live.free_slots)

    @property
    def stats(self) -> StateStats:
        """Counters since the manager was made. O(1)."""
        states = self._read("stats").live
        return StateStats(
            num_cleared=states.num_cleared,
            num_restored=states.num_restored,
            num_forked=states.num_forked,
            num_saved=states.num_saved,
            num_without_room=states.num_without_room,
            num_present=states.num_present,
            num_taken_back=states.num_taken_back,
            num_passed=states.num_passed,
        )

    def next_cut(self, sequence: Given[Sequence], max_end: SupportsIndex, hit: Given[CacheHit] | None = None) -> int:
        """Return where a sequence's next chunk should end, at most `max_end`, so that its state can be saved there.

        max_end: where the scheduler would end the chunk, in tokens from the sequence's first one. hit: for a sequence
        without blocks, the hit that it will start with. For a sequence that starts with loads from tiers, call this
        once the loads have ended. A chunk that runs past such a place saves nothing there, and does no other harm.

        Changes nothing. Raises SequenceStateError and InvalidArgumentError. O(log places); O(places) for a sequence
        without blocks.
        """
        slots = self._get("next_cut")
        number = check_count("max_end", asked_once(max_end), 0)
        check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        found: CacheHit | None = hit  # type: ignore[assignment]
        if own.owner is not None:
            self._link.check_owned(own, "states.next_cut")
        if found is not None and (found.sequence is not own or own.owner is not None):
            raise SequenceStateError(f"states.next_cut: expected a hit of {own}, which has no blocks yet, got {found}")
        return slots.next_cut(own, number, found) if self._link.caches else number

    def mark(self, sequence: Given[Sequence], position: SupportsIndex) -> int:
        """Announce that a later prompt will probably diverge from this sequence at `position`, so that its state is
        saved there.

        For an engine that knows more than where prompts end: the end of a system prompt, for example, or of the user's
        last message. position: 1 to the number of known tokens. The mark stays with the sequence when it is freed, and
        its forks have it too. Nothing is saved at a place that the sequence has already passed.

        Returns the place, which is the position rounded down to `manager.alignment`; 0: there is none. Raises
        SequenceStateError (another manager's sequence) and InvalidArgumentError. O(marks).
        """
        slots = self._get("mark")
        given = asked_once(position)
        own = as_sequence("states.mark", sequence)
        number = check_count("position", given, 1, own.num_tokens)
        if own.owner is not None:
            self._link.check_owned(own, "states.mark")
        self._change.begin()
        place = slots.mark(own, number)
        self._link.end()
        return place

    def take_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Return the copies that the engine makes before a step, and those that it makes after it, and forget them.

        Call it once per step, after all calls that make room for the step's tokens. The first list brings states into
        slots, including the slot of every new sequence. The engine makes these copies in order, after those of
        `manager.take_copies` and before the step's forward pass. The second list saves states as they are after
        `position` tokens. The engine makes these copies in order, after the forward pass.

        Later sequences may start from the saved checkpoints from this call on, so the engine must run its steps in this
        order. If it doesn't, it must delay tokens (`delay_cache_blocks`). Checkpoints are then found once
        `cache_blocks` reports that their tokens are written. O(copies + blocks of checkpoints).
        """
        slots = self._get("take_copies")
        self._change.begin()
        copies = slots.take_copies()
        self._link.end()
        return copies

    def _get(self, call: str) -> RecurrentStates:
        """Return the slots. Raises CorruptStateError if a call was left half done."""
        self._change.check_whole()
        return self._read(call)

    def _read(self, call: str) -> RecurrentStates:
        """Return the slots, for numbers that another thread may ask for while the manager works."""
        if self._states is None:
            raise InvalidArgumentError(
                f"states.{call}: expected a manager with a RecurrentState among its groups, got none"
            )
        return self._states
