"""What limits the entry to a server's queue in a `ServedRun`: nothing, a cap on sessions, or the session gate."""

from collections import deque
from collections.abc import Callable

from kvblocks.arguments import check_count, wrong
from kvblocks.gate import GateRounds, SessionGate

NONE, GATE, INFINITE, CAP = "none", "gate", "infinite", "cap"
"""The names of entrances. INFINITE is like NONE, with a pool for all blocks of the trace. "cap 8" admits 8 sessions."""


class Open:
    """Lets everybody in. wake_at: when `let_in` may have something to do even if nothing happens before."""

    wake_at: float | None = None

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits here."""
        return False

    @property
    def num_left(self) -> int:
        """How often a session lost its place in a pause."""
        return 0

    def ask(self, request: int, session: int | None, tokens: tuple[int, int], now: float) -> bool:  # noqa: ARG002
        """Return whether a request may enter the queue.

        tokens: how many its prompt has, and how many of them are cached. session: its session, or None.
        """
        return True

    def let_in(self, num_busy: int, now: float, find: Callable[[int], int]) -> list[int]:  # noqa: ARG002
        """Return the requests that may enter now. find: returns how many tokens of a request are cached."""
        return []

    def ended(self, request: int, num_tokens: int, reason: str, now: float) -> None:
        """Note that a request has ended."""

    def end_session(self, session: int) -> None:
        """Note that a session's last request has ended. The gate isn't told, since a server doesn't know it, either."""


class Cap(Open):
    """Lets at most `most` sessions in, in the order of arrival, each until its last request has ended."""

    def __init__(self, most: int) -> None:
        self._most = check_count("cap", most, 1)
        self._inside: set[int] = set()
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits here."""
        return bool(self._waiting)

    def ask(self, request: int, session: int | None, tokens: tuple[int, int], now: float) -> bool:  # noqa: ARG002
        """Return whether the session is inside; requests without a session always pass."""
        if session is None or session in self._inside:
            return True
        self._waiting.append((request, session))
        return False

    def let_in(self, num_busy: int, now: float, find: Callable[[int], int]) -> list[int]:  # noqa: ARG002
        """Let in sessions for which there is a place."""
        admitted = []
        while self._waiting and len(self._inside) < self._most:
            request, session = self._waiting.popleft()
            self._inside.add(session)
            admitted.append(request)
        return admitted

    def end_session(self, session: int) -> None:
        """Free the place of a session. Unlike a server, the cap knows when a session ends."""
        self._inside.discard(session)


class GateEntrance(Open):
    """The session gate, used as the engine uses it."""

    def __init__(self, num_tokens: int, seconds_per_token: float) -> None:
        self.gate = SessionGate(num_tokens)
        self._rounds = GateRounds(self.gate, seconds_per_token)

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits here."""
        return self.gate.stats.num_waiting_requests > 0

    @property
    def num_left(self) -> int:
        """How often a session lost its place in a pause."""
        return sum(self.gate.stats.num_left.values())

    def ask(self, request: int, session: int | None, tokens: tuple[int, int], now: float) -> bool:
        """Ask the gate."""
        self._rounds.note_change()
        return self.gate.ask(request, session, None, *tokens, now)

    def let_in(self, num_busy: int, now: float, find: Callable[[int], int]) -> list[int]:
        """Tell the gate how much of the waiting requests is cached, and let it decide."""
        if not self._rounds.is_due(num_busy, now):
            return []
        admitted = self._rounds.decide(num_busy, now, find)
        self.wake_at = self._rounds.wake_at
        return admitted

    def ended(self, request: int, num_tokens: int, reason: str, now: float) -> None:
        """Tell the gate."""
        self._rounds.note_change()
        self.gate.ended(request, num_tokens, reason, now)


def make_entrance(name: str, num_tokens: int, seconds_per_token: float) -> Open:
    """Make an entrance by its name. num_tokens: the room of the pool. Raises InvalidArgumentError."""
    if name == GATE:
        return GateEntrance(num_tokens, seconds_per_token)
    kind, _, number = name.partition(" ")
    if kind == CAP and number.isdecimal():
        return Cap(int(number))
    if name not in (NONE, INFINITE):
        raise wrong("entrance", f"{NONE}, {GATE}, {INFINITE} or '{CAP} 8'", name)
    return Open()
