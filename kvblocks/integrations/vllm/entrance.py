"""Where requests wait for a session gate, before they enter the waiting queue of vLLM's scheduler.

vLLM's scheduler stops admitting at the first request that it can't admit. So a request that the gate holds back must
not be in that queue. It is in `SchedulerEntrance.held` instead, and vLLM sees it only in `requests`, where it can be
aborted. Preempted requests are in vLLM's queue already, and don't pass the gate again.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from kvblocks import InvalidArgumentError
from kvblocks.gate import GateRounds, SessionGate

OPTION = "kvblocks_session_gate"
"""The gate's name in --additional-config."""


def gate_option(config: Any) -> int | None:
    """Return a VllmConfig's gate: its room in tokens, 0 for as much as the pool, or None for no gate.

    Raises InvalidArgumentError.
    """
    options = config.additional_config
    value = options.get(OPTION, False) if isinstance(options, dict) else False
    if value is False or value is None:
        return None
    is_room = isinstance(value, int) and value >= 1  # True is an int, too
    if not is_room:
        raise InvalidArgumentError(f"{OPTION}: expected true, false or a number of tokens, got {value!r}")
    if not config.cache_config.enable_prefix_caching:
        raise InvalidArgumentError(f"{OPTION}: expected prefix caching, got --no-enable-prefix-caching")
    return 0 if value is True else int(value)


class SchedulerEntrance:
    """The requests that wait for a gate, by id, and what the gate is told about the others.

    held: the requests that wait here, in the order of arrival; read only. gate: `gate.why(request_id)` says why one
    waits. rounds: the gate's rounds. find_cached: returns how many tokens of a request's prompt are cached.
    min_step_tokens: a step's time counts only if it computes at least this many prompt tokens. clock: returns seconds.
    """

    def __init__(
        self,
        gate: SessionGate,
        find_cached: Callable[[Any], int],
        min_step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.gate = gate
        self.rounds = GateRounds(gate)
        self.held: dict[str, Any] = {}
        self._find_cached = find_cached
        self.min_step_tokens = min_step_tokens
        self.clock = clock
        self._unasked: dict[str, None] = {}
        self._admitted: set[str] = set()
        self._begun: deque[tuple[Any, float]] = deque()
        self._step_ended = float("-inf")

    def holds(self, request: Any) -> bool:
        """Take a request that would enter the queue. Returns False if the gate has already admitted it (a later turn).

        The gate is asked when the scheduler makes a step. O(1).
        """
        name = request.request_id
        if name in self._admitted:
            return False
        self.held[name] = request
        self._unasked[name] = None
        self.rounds.note_change()
        return True

    def let_in(self, num_busy: int) -> list[Any]:
        """Return the requests that may enter the queue now, and stop holding them.

        If nobody has to wait, they come in the order of arrival, as without a gate. num_busy: how many requests run or
        are in the queue. O(1) if nothing has changed, else O(sessions) and lookups.
        """
        now = self.clock()
        if not self.rounds.is_due(num_busy, now):
            return []
        passing = [name for name in self._unasked if self._ask(self.held[name], now)]
        self._unasked.clear()
        count_cached = lambda name: self._count_cached(self.held[name])  # noqa: E731
        passing += self.rounds.decide(num_busy + len(passing), now, count_cached)
        if len(passing) == len(self.held):
            passing = list(self.held)
        self._admitted.update(passing)
        return [self.held.pop(name) for name in passing]

    def _ask(self, request: Any, now: float) -> bool:
        """Ask the gate about a request.

        One that gets its prompt in turns (`resumable`) counts as one without a session: the gate knows its first turn.
        """
        session = None if request.resumable else request.session_id or None
        num_cached = self._count_cached(request)
        num_tokens, salt = request.num_prompt_tokens, request.cache_salt or None
        return self.gate.ask(request.request_id, session, salt, num_tokens, num_cached, now)

    def _count_cached(self, request: Any) -> int:
        return min(self._find_cached(request), int(request.num_prompt_tokens))

    def note_end(self, request: Any) -> None:
        """Note that a request has finished or was aborted, wherever it was. O(1)."""
        name = request.request_id
        if name in self._admitted:
            self._admitted.discard(name)
            reason = request.get_finished_reason()
            self.gate.ended(name, request.num_tokens, "stop" if reason is None else str(reason), self.clock())
        elif self.held.pop(name, None) is not None:
            if name in self._unasked:
                del self._unasked[name]
            else:
                self.gate.cancel(name)
        self.rounds.note_change()

    def note_begun(self, step: Any) -> None:
        """Note that the computation of a step (a SchedulerOutput) begins. O(1)."""
        self._begun.append((step, self.clock()))

    def note_done(self, step: Any) -> None:
        """Note that a step was computed. The gate learns from it how long prompts take. O(requests of the step).

        Steps may overlap. A step's time counts from its beginning, or from the end of the previous one if that is
        later.
        """
        began = None
        while self._begun and began is None:
            other, when = self._begun.popleft()
            began = when if other is step else None
        now = self.clock()
        num_decoded = 1 + max([len(drafts) for drafts in step.scheduled_spec_decode_tokens.values()], default=0)
        num_tokens = sum([number for number in step.num_scheduled_tokens.values() if number > num_decoded])
        if began is not None and num_tokens >= self.min_step_tokens:
            self.rounds.note_computed(num_tokens, now - max(began, self._step_ended))
        self._step_ended = now
