"""A gate for sessions: it admits as many agents at once as the cache can remember.

An agent's next request begins with all tokens of its last one. If the sessions that take turns are together larger than
the pool, each session's prefix is evicted before its next turn, whatever the eviction policy, and every turn computes
the whole prompt again. The gate therefore lets only as many sessions take turns as have room for their prompts. Others
wait, and once they are let in, they find their prefixes for many turns.

1. *Footprint.* A session counts with the tokens of its last prompt and answer. Requests of *members* pass at once. So
   do requests without a session, which count while they run.
2. *Room.* A waiting session becomes a member if all that counts, with its own footprint, is at most `fill` of the room,
   or if there is no member.
3. *Hold.* A member that pauses keeps its place for a time that is learned from earlier pauses with the same stop reason
   (`PauseLengths`). Then it leaves, if anybody waits.
4. *Growth.* If what counts outgrows the room, pausing members leave, those that have paused longest first. A running
   request is never touched.
5. *Order.* Sessions with at least half of their prompt cached come first, then the order of arrival decides. A session
   that was overtaken `max_overtakes` times is next: nobody enters before it, but it doesn't enter without room either.
   After its turn (7) a session comes back in the order of arrival.
6. *Patience.* If nothing is busy for a quarter of the time that the next session's prompt takes to compute, the session
   enters.
7. *Turn.* A member that has had its place for `turn_s` seconds leaves at its next pause, if others wait. New requests
   that it sends before that pause wait too.

The gate never refuses a request. With rules 5 and 7 nobody starves: if requests end, all that wait are admitted. It
needs no thread, no clock and no manager: the caller tells it the time, and asks again when the answer may have changed.
Holding a place by ski rental is also what Continuum does for the KV of tool calls (H. Li et al., 2025); the rest was
found in simulations with recorded sessions of a coding agent (docs/gate.md).
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf
from sys import float_info
from typing import Final, Literal, SupportsFloat, SupportsIndex

from kvblocks.arguments import Text, check_count, check_id, check_name, check_number, check_share, plain_text, wrong
from kvblocks.gate.pause_lengths import MOST_S, PauseLengths

PATIENCE: Final = 0.25
"""How long the gate lets everything be idle, as a share of the time to compute the next session's prompt."""

HOST_SHARE: Final = 0.5
"""The share of a host tier that counts as room. With all of it, loads would take the time that hits save."""

MOST_NUMBER: Final = float_info.max  # an int may be larger

_MAX_REASONS = 32  # stop reasons beyond so many are learned together

SessionKey = tuple[str | None, Hashable]
"""A session: the salt of its requests, and its name."""

Reason = Literal["next", "room", "idle", "behind", "turn"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate decided.

    admitted: requests that waited, in the order in which to admit them. paused: members that left. wake_at: when to
    call `release` again if nothing else happens; None: nothing depends on time.
    """

    admitted: tuple[Hashable, ...]
    paused: tuple[SessionKey, ...]
    wake_at: float | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request waits.

    reason is one of:

    - "next": it enters with the next call of `release`.
    - "room": it is the next one, but num_missing_tokens tokens of room are missing.
    - "idle": the same, but nothing is busy, so it enters at `until` in any case.
    - "behind": num_ahead sessions are before it.
    - "turn": the turn of its session is over, and ends with the requests that run.
    """

    reason: Reason
    num_missing_tokens: int
    num_ahead: int
    until: float | None
    session: SessionKey
    asked_at: float


@dataclass(frozen=True, slots=True)
class GateStats:
    """The gate's numbers.

    num_left: by rule ("hold", "growth", "turn"), how often members left. num_idle_entries: how many of the num_entries
    entered without room because nothing was busy.
    """

    num_room_tokens: int
    num_member_tokens: int
    num_other_tokens: int
    num_members: int
    num_waiting_sessions: int
    num_waiting_requests: int
    num_entries: int
    num_idle_entries: int
    num_left: dict[str, int]


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that was asked about and hasn't ended. session: None if it has none."""

    session: "_Session | None"
    prompt_tokens: int
    cached_tokens: int
    asked_at: float


class _Session:
    """A session that is a member, waits, or pauses for the time of any hold."""

    __slots__ = (
        "entered_at",
        "footprint",
        "had_turn",
        "has_ended",
        "is_member",
        "key",
        "num_overtakes",
        "paused_at",
        "reason",
        "running",
        "waiting",
    )

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.footprint = 0
        self.is_member = False
        self.entered_at = 0.0
        self.paused_at: float | None = None
        self.reason = ""
        self.has_ended = False  # the caller said so while a request was running
        self.had_turn = False  # since it entered last: it left by rule 7
        self.num_overtakes = 0
        self.running: set[Hashable] = set()
        self.waiting: dict[Hashable, _Asked] = {}


class SessionGate:
    """Decides whose requests an engine may begin. Not thread-safe.

    num_tokens: the room, in tokens of KV: those of the device, and half of those of a host tier. fill: the share of the
    room that may be taken when a session has entered. max_overtakes: how many sessions that came later may enter before
    another one. turn_s: seconds after which a member gives its place to others.

    All times are in seconds, on a clock of the caller's. If that clock goes back, it counts as standing still. A call
    costs O(1) unless its docstring says otherwise. Bad arguments raise InvalidArgumentError, with nothing changed.
    """

    def __init__(
        self,
        num_tokens: SupportsIndex,
        *,
        fill: SupportsFloat = 0.95,
        max_overtakes: SupportsIndex = 16,
        turn_s: SupportsFloat = 3600.0,
    ) -> None:
        self.num_tokens = check_count("num_tokens", num_tokens, 1)
        self.fill = check_share("fill", fill, "a share above 0.0, up to 1.0")
        if not self.fill:
            raise wrong("fill", "a share above 0.0, up to 1.0", fill)
        self.max_overtakes = check_count("max_overtakes", max_overtakes, 0)
        turn = check_number("turn_s", turn_s, "a number above 0")
        if turn <= 0:
            raise wrong("turn_s", "a number above 0", turn_s)
        self.turn_s = float(turn) if turn <= MOST_NUMBER else inf
        self._now = -inf
        self._requests: dict[Hashable, _Asked] = {}
        self._sessions: dict[SessionKey, _Session] = {}
        self._members: dict[_Session, None] = {}
        self._waiting: dict[_Session, None] = {}  # in the order of arrival
        self._paused: dict[_Session, None] = {}  # members and others, whoever has paused longest first
        self._lengths: dict[str, PauseLengths] = {}
        self._rest = PauseLengths()
        self._member_tokens = 0
        self._other_tokens = 0
        self._idle_since: float | None = None
        self._seconds_per_token = 0.0
        self._num_entries = self._num_idle_entries = 0
        self._num_left = {"hold": 0, "growth": 0, "turn": 0}

    def ask(
        self,
        request_id: Hashable,
        session: Hashable,
        salt: Text | None,
        prompt_tokens: SupportsIndex,
        cached_tokens: SupportsIndex,
        now: SupportsFloat,
    ) -> bool:
        """Ask whether a new request may begin. False: it waits until a `release` admits it.

        request_id: unique among requests that haven't ended. session: that of the request; None: it has none. The same
        name with another salt is another session. prompt_tokens: 0 or more. cached_tokens: how many of the prompt's
        tokens need no computing. A session that asks again ends its pause.
        """
        check_id("request_id", request_id)
        if request_id in self._requests:
            raise wrong("request_id", "one that no unfinished request has", request_id)
        check_id("session", session)
        tenant = check_name("salt", salt)
        prompt = check_count("prompt_tokens", prompt_tokens, 0)
        cached = check_count("cached_tokens", cached_tokens, 0, prompt)
        self._advance(now)
        if session is None:
            self._requests[request_id] = _Asked(None, prompt, cached, self._now)
            self._other_tokens += prompt
            self._idle_since = None
            return True
        found = self._sessions.get((tenant, session))
        if found is None:
            found = self._sessions[tenant, session] = _Session((tenant, session))
        found.has_ended = False
        asked = self._requests[request_id] = _Asked(found, prompt, cached, self._now)
        self._end_pause(found, self._now)
        if found.is_member and not found.running and self._waiting and self._is_past_turn(found):
            self._leave(found, "turn")
        if found.is_member and not found.waiting and not (self._waiting and self._is_past_turn(found)):
            self._set_footprint(found, max(prompt, found.footprint) if found.running else prompt)
            found.running.add(request_id)
            self._idle_since = None
            return True
        found.waiting[request_id] = asked
        if not found.is_member:
            self._queue(found)
        return False

    def note_cached(self, request_id: Hashable, cached_tokens: SupportsIndex) -> None:
        """Report how many tokens of a waiting request are cached now, if that has changed since `ask`."""
        asked = self._find(request_id)
        asked.cached_tokens = check_count("cached_tokens", cached_tokens, 0, asked.prompt_tokens)

    def release(self, num_busy: SupportsIndex, seconds_per_token: SupportsFloat, now: SupportsFloat) -> Decision:
        """Admit those who may enter. Call it after `ask`, after a request has ended or was cancelled, and at wake_at.

        num_busy: how many admitted requests haven't ended, whether the engine computes them now or not.
        seconds_per_token: how long computing one token of a prompt takes. O(1) if nobody waits, otherwise O(sessions).
        """
        busy = check_count("num_busy", num_busy, 0)
        per_token = check_number("seconds_per_token", seconds_per_token, "a number of at least 0")
        if not 0 <= per_token <= MOST_NUMBER:
            raise wrong("seconds_per_token", "a number of at least 0", seconds_per_token)
        self._advance(now)
        self._seconds_per_token = float(per_token)
        paused: list[SessionKey] = []
        if self._num_counted > self.num_tokens:
            paused += self._shrink()
        wake_at = None
        if self._waiting:
            wake_at = self._expire(paused)
        if busy or not self._waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now
        admitted: list[Hashable] = []
        while self._waiting:
            session = self._next()
            if not self._has_room(session):
                enters_at = self._enters_at(session)
                if enters_at is None:
                    break
                if self._now < enters_at:
                    wake_at = enters_at if wake_at is None else min(wake_at, enters_at)
                    break
                self._num_idle_entries += 1
            admitted += self._enter(session)
            if self._num_counted > self._most_tokens:  # it entered because all was idle
                paused += self._shrink()
        if not self._waiting:
            wake_at = None
        return Decision(tuple(admitted), tuple(paused), wake_at)

    def ended(self, request_id: Hashable, num_tokens: SupportsIndex, reason: Text, now: SupportsFloat) -> None:
        """Report that an admitted request has ended. Its session pauses, unless more of its requests run.

        num_tokens: those of its prompt and answer. reason: its stop reason, any non-empty str.
        """
        asked = self._find(request_id)
        session = asked.session
        if session is not None and request_id in session.waiting:
            raise wrong("request_id", "one that was admitted (else cancel it)", request_id)
        number = check_count("num_tokens", num_tokens, 0)
        why = check_name("reason", reason)
        if why is None:
            raise wrong("reason", "a non-empty str", reason)
        self._advance(now)
        self._idle_since = None
        del self._requests[request_id]
        if session is None:
            self._other_tokens -= asked.prompt_tokens
            return
        session.running.discard(request_id)
        self._set_footprint(session, max(number, session.footprint) if session.running else number)
        if session.running:
            return
        if session.waiting:  # its turn is over
            self._leave(session, "turn")
            self._queue(session)
        elif session.has_ended:
            self._forget(session)
        else:
            session.paused_at, session.reason = self._now, plain_text(why)
            self._lengths_of(session.reason).begin()
            self._paused[session] = None

    def cancel(self, request_id: Hashable) -> None:
        """Withdraw a request that waits."""
        asked = self._find(request_id)
        session = asked.session
        if session is None or request_id not in session.waiting:
            raise wrong("request_id", "one that waits (one that was admitted has to end)", request_id)
        del self._requests[request_id]
        del session.waiting[request_id]
        if session.is_member:
            return
        if session.waiting:
            self._queue(session)
        else:
            del self._waiting[session]
            self._forget(session)

    def end_session(self, session: Hashable, salt: Text | None = None) -> None:
        """Report that a session, known or not, will have no more requests. Those that run or wait go on.

        If another request comes, the session begins again.
        """
        check_id("session", session)
        found = self._sessions.get((check_name("salt", salt), session))
        if found is None:
            return
        if found.running or found.waiting:
            found.has_ended = True
        else:
            self._end_pause(found, None)
            self._forget(found)

    def why(self, request_id: Hashable) -> Waiting | None:
        """Return why a request waits; None if it was admitted. O(sessions that wait)."""
        asked = self._find(request_id)
        session = asked.session
        if session is None or request_id not in session.waiting:
            return None
        if session.is_member:
            return Waiting("turn", 0, 0, None, session.key, asked.asked_at)
        missing = 0 if self._has_room(session) else self._num_counted + session.footprint - self._most_tokens
        num_ahead = next(number for number, each in enumerate(self._order()) if each is session)
        if num_ahead:
            return Waiting("behind", missing, num_ahead, None, session.key, asked.asked_at)
        enters_at = self._enters_at(session) if missing else None
        reason: Reason = "idle" if enters_at is not None else "room" if missing else "next"
        return Waiting(reason, missing, 0, enters_at, session.key, asked.asked_at)

    def members(self) -> list[tuple[SessionKey, int, float | None]]:
        """Return the members: key, footprint in tokens, and since when they pause (None: they run). O(members)."""
        return [(session.key, session.footprint, session.paused_at) for session in self._members]

    def waiting(self) -> list[Hashable]:
        """Return the requests that wait, in the order in which their sessions would enter now. O(requests)."""
        sessions = [*self._order(), *[each for each in self._members if each.waiting]]
        return [request_id for session in sessions for request_id in session.waiting]

    def hold_s(self, reason: Text) -> float:
        """Return for how many seconds a member keeps its place after this stop reason. O(1)."""
        return self._lengths_of(str(reason), adds=False).hold_s(self.num_tokens * self._seconds_per_token)

    @property
    def stats(self) -> GateStats:
        """The gate's numbers now. O(members and sessions that wait)."""
        return GateStats(
            num_room_tokens=self.num_tokens,
            num_member_tokens=self._member_tokens,
            num_other_tokens=self._other_tokens,
            num_members=len(self._members),
            num_waiting_sessions=len(self._waiting),
            num_waiting_requests=sum([len(each.waiting) for each in (*self._waiting, *self._members)]),
            num_entries=self._num_entries,
            num_idle_entries=self._num_idle_entries,
            num_left=dict(self._num_left),
        )

    # Who is next, and whether there is room.

    @property
    def _num_counted(self) -> int:
        return self._member_tokens + self._other_tokens

    @property
    def _most_tokens(self) -> int:
        return int(self.fill * self.num_tokens)

    def _has_room(self, session: _Session) -> bool:
        return not self._members or self._num_counted + session.footprint <= self._most_tokens

    def _enters_at(self, session: _Session) -> float | None:
        """When a session enters if all stays idle; None if something is busy."""
        if self._idle_since is None:
            return None
        first = next(iter(session.waiting.values()))
        return self._idle_since + PATIENCE * (first.prompt_tokens - first.cached_tokens) * self._seconds_per_token

    def _next(self) -> _Session:
        return next(self._order())

    def _order(self) -> Iterator[_Session]:
        """Yield the waiting sessions: overdue ones, those with cached prompts, then others; each in arrival order."""
        overdue = [session for session in self._waiting if session.num_overtakes >= self.max_overtakes]
        yield from overdue
        others = [session for session in self._waiting if session.num_overtakes < self.max_overtakes]
        yield from [session for session in others if _is_cached(session)]
        yield from [session for session in others if not _is_cached(session)]

    # Who waits, who enters, and who leaves.

    def _queue(self, session: _Session) -> None:
        """Make a session wait, with its requests. If it waits already, it keeps its place."""
        session.footprint = max([each.prompt_tokens for each in session.waiting.values()])
        self._waiting.setdefault(session)

    def _enter(self, session: _Session) -> list[Hashable]:
        """Make a waiting session a member. Returns its requests."""
        for older in self._waiting:
            if older is session:
                break
            older.num_overtakes += 1
        del self._waiting[session]
        session.num_overtakes = 0
        session.running.update(session.waiting)
        admitted = list(session.waiting)
        session.waiting.clear()
        session.is_member, session.had_turn, session.entered_at = True, False, self._now
        self._members[session] = None
        self._member_tokens += session.footprint
        self._num_entries += 1
        self._idle_since = None
        return admitted

    def _leave(self, session: _Session, rule: str) -> None:
        """End the membership of a member that runs nothing."""
        session.is_member, session.had_turn = False, rule == "turn"
        del self._members[session]
        self._member_tokens -= session.footprint
        self._num_left[rule] += 1

    def _shrink(self) -> list[SessionKey]:
        """Make pausing members leave, those that have paused longest first, until the rest fits. Returns them."""
        left: list[SessionKey] = []
        for session in [each for each in self._paused if each.is_member]:
            if self._num_counted <= self._most_tokens:
                break
            self._leave(session, "growth")
            left.append(session.key)
        return left

    def _expire(self, left: list[SessionKey]) -> float | None:
        """Make members leave whose hold or turn is over, and add them to `left`. Returns when the next one is over."""
        holds: dict[str, float] = {}
        next_end = None
        for session in [each for each in self._paused if each.is_member]:
            assert session.paused_at is not None, "it pauses"
            hold_s = holds.get(session.reason)
            if hold_s is None:
                hold_s = holds[session.reason] = self.hold_s(session.reason)
            over_at, turn_at = session.paused_at + hold_s, session.entered_at + self.turn_s
            if self._now >= over_at or self._now >= turn_at:
                self._leave(session, "hold" if self._now >= over_at else "turn")
                left.append(session.key)
            else:
                end = min(over_at, turn_at)
                next_end = end if next_end is None else min(next_end, end)
        return next_end

    def _set_footprint(self, session: _Session, num_tokens: int) -> None:
        if session.is_member:
            self._member_tokens += num_tokens - session.footprint
        session.footprint = num_tokens

    def _is_past_turn(self, session: _Session) -> bool:
        return self._now >= session.entered_at + self.turn_s

    # Pauses.

    def _advance(self, now: SupportsFloat) -> None:
        """Set the clock, and forget sessions that have paused for longer than any hold. O(1), spread over all calls."""
        time = check_number("now", now, "a finite number")
        if not -MOST_NUMBER <= time <= MOST_NUMBER:
            raise wrong("now", "a finite number", now)
        self._now = max(self._now, float(time))
        while self._paused:
            session = next(iter(self._paused))
            if session.paused_at is None or self._now - session.paused_at <= MOST_S:
                return
            self._end_pause(session, self._now)
            self._forget(session)

    def _end_pause(self, session: _Session, now: float | None) -> None:
        """End a session's pause, if it pauses, and learn from it. now: None if the session will not come back."""
        if session.paused_at is not None:
            lasted_s = None if now is None else max(0.0, now - session.paused_at)
            self._lengths_of(session.reason).end(lasted_s)
            session.paused_at = None
            del self._paused[session]

    def _forget(self, session: _Session) -> None:
        """Forget a session that neither runs nor waits nor pauses. If it was a member, its hold was over."""
        if session.is_member:
            self._leave(session, "hold")
        del self._sessions[session.key]

    def _lengths_of(self, reason: str, *, adds: bool = True) -> PauseLengths:
        found = self._lengths.get(reason)
        if found is None:
            if len(self._lengths) >= _MAX_REASONS:
                return self._rest
            found = PauseLengths()
            if adds:
                self._lengths[reason] = found
        return found

    def _find(self, request_id: Hashable) -> _Asked:
        check_id("request_id", request_id)
        asked = self._requests.get(request_id)
        if asked is None:
            raise wrong("request_id", "one that was asked about and hasn't ended", request_id)
        return asked


def _is_cached(session: _Session) -> bool:
    """Whether a session goes before others, because at least half of its prompt is cached."""
    first = next(iter(session.waiting.values()))
    return not session.had_turn and 2 * first.cached_tokens >= first.prompt_tokens
