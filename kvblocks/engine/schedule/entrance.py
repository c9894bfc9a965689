"""The entrance: where requests wait for the session gate, before they come into the scheduler's queue.

In the queue, a request that can't be admitted ends the admissions of a step. So requests that the gate holds back
aren't in the queue at all, and don't count in its order, for a salt's turn or as overtaken. Preempted requests are in
the queue already, and don't pass the gate again.

The gate sees all samples of a prompt as one request. It is asked when the scheduler makes a step, since only then the
clock (`manager.now`) is right and the lookup fresh. It is asked again only when something has changed, or at the time
that it named.
"""

from dataclasses import dataclass

from kvblocks import KVCacheManager
from kvblocks.engine.schedule.capacity import most_pool_tokens
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.request import Request
from kvblocks.gate import HOST_SHARE, NUM_LOOKED_UP, GateRounds, GateStats, SessionGate, SessionKey, Waiting


def make_gate(manager: KVCacheManager, num_step_tokens: int) -> SessionGate:
    """Return a gate whose room is the manager's pool plus half of its host tier."""
    num_tokens = most_pool_tokens(manager, num_step_tokens)
    num_host = sum([tier.num_blocks for tier in manager.tiers if tier.name == "host"])
    return SessionGate(num_tokens + int(HOST_SHARE * num_tokens * num_host / manager.num_blocks))


@dataclass(frozen=True, slots=True)
class EntranceView:
    """A snapshot of the gate after its last decision, at time `now`, for other threads.

    members: the admitted sessions, with their tokens, and since when they pause (None: they run). waiting: the first
    waiting sessions, in order.
    """

    now: float
    stats: GateStats
    members: tuple[tuple[SessionKey, int, float | None], ...]
    waiting: tuple[Waiting, ...]


@dataclass(eq=False, slots=True)
class _Prompt:
    """All samples of a prompt; the gate's id of them. first: the sample that waits for all."""

    first: Request
    num_left: int
    num_tokens: int
    was_asked: bool = False
    waits: bool = True


class Entrance:
    """The requests that wait for a gate.

    They come by `add` and leave by `let_in`, or by `note_end` if they end before that. rounds: the gate's rounds; None:
    there is no gate, and nothing waits here. held: the requests that wait here, in the order of arrival; read only.
    view: a snapshot of the gate. It is never changed, only replaced, so any thread may read it.
    """

    def __init__(self, gate: SessionGate | None, manager: KVCacheManager, lookups: Lookups) -> None:
        self.rounds = None if gate is None else GateRounds(gate)
        self.held: dict[Request, None] = {}
        self._manager = manager
        self._lookups = lookups
        self._prompts: dict[Request, _Prompt] = {}
        self._unasked: dict[_Prompt, None] = {}
        self.view = self._look()

    @property
    def gate(self) -> SessionGate | None:
        """The gate, or None. `recover` replaces it by a new one. O(1)."""
        return None if self.rounds is None else self.rounds.gate

    @property
    def wake_at(self) -> float | None:
        """When `let_in` may have something to do; None if only other requests can change that. O(1)."""
        return self.rounds.wake_at if self.rounds is not None and self.held else None

    def add(self, request: Request) -> bool:
        """Take a new request with its siblings. Returns False, with nothing changed, if there is no gate.

        O(samples).
        """
        if self.rounds is None:
            return False
        prompt = _Prompt(request, 1 + len(request.siblings), request.sequence.num_prompt_tokens)
        for sample in (request, *request.siblings):
            self._prompts[sample] = prompt
        self.held[request] = None
        self._unasked[prompt] = None
        self.rounds.note_change()
        return True

    def let_in(self, num_busy: int) -> list[Request]:
        """Return the requests that may enter the queue now, and stop holding them.

        If nobody has to wait, they come in the order of arrival, as without a gate. num_busy: how many requests run or
        are in the queue. O(1) if nothing has changed, else O(sessions) and lookups.
        """
        rounds, now = self.rounds, float(self._manager.now)
        if rounds is None or not rounds.is_due(num_busy, now):
            return []
        passing: list[_Prompt] = []
        for prompt in list(self._unasked):
            sequence, num_cached = prompt.first.sequence, self._count_cached(prompt)
            prompt.was_asked = True
            del self._unasked[prompt]
            num_tokens = sequence.num_prompt_tokens
            if rounds.gate.ask(prompt, sequence.session, sequence.salt, num_tokens, num_cached, now):
                passing.append(prompt)
        passing += rounds.decide(num_busy + len(passing), now, self._count_cached)
        if len(passing) == len(self.held):
            passing = [self._prompts[request] for request in self.held]
        for prompt in passing:
            prompt.waits = False
            del self.held[prompt.first]
        self.view = self._look()
        return [prompt.first for prompt in passing]

    def hand_over(self, request: Request) -> bool:
        """Let the next sample wait in the place of a request that has ended. Returns False if that isn't held.

        O(requests held).
        """
        if request not in self.held:
            return False
        heir = self._prompts[request].first = request.hand_over()
        self.held = {heir if each is request else each: None for each in self.held}
        self.note_end(request)
        return True

    def note_end(self, request: Request) -> None:
        """Note that a sample has ended, wherever it was. Once all samples have, the session pauses. O(1)."""
        prompt = self._prompts.pop(request, None)
        if prompt is None or self.rounds is None:  # there was no gate, or `recover` has replaced it
            return
        prompt.num_left -= 1
        prompt.num_tokens = max(prompt.num_tokens, request.sequence.num_tokens)
        if prompt.num_left:
            return
        gate = self.rounds.gate
        self.rounds.note_change()
        if not prompt.waits:
            gate.ended(prompt, prompt.num_tokens, request.pause_reason or "stop", float(self._manager.now))
            return
        del self.held[prompt.first]
        if prompt.was_asked:
            gate.cancel(prompt)
        else:
            del self._unasked[prompt]

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Note how long prompts' tokens took. O(1)."""
        if self.rounds is not None:
            self.rounds.note_computed(num_tokens, seconds)

    def recover(self) -> list[Request]:
        """Start over after an interruption, which may have left the gate in any state. Returns the held requests.

        These may enter the queue, and the new gate counts no request that is known now.
        """
        held, self.held = list(self.held), {}
        self._prompts, self._unasked = {}, {}
        if self.rounds is not None:
            self.rounds.restart()
            self.view = self._look()
        return held

    def _count_cached(self, prompt: _Prompt) -> int:
        return min(self._lookups.find(prompt.first).num_tokens, prompt.first.sequence.num_prompt_tokens)

    def _look(self) -> EntranceView | None:
        gate = self.gate
        if gate is None:
            return None
        waiting = [gate.why(prompt) for prompt in gate.waiting()[:NUM_LOOKED_UP]]
        return EntranceView(
            now=float(self._manager.now),
            stats=gate.stats,
            members=tuple(gate.members()),
            waiting=tuple([each for each in waiting if each is not None]),
        )
