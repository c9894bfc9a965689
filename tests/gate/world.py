"""A world of agents before a `SessionGate`: events in the order of time, and the guarantees, checked at each event."""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvblocks.gate import GateStats, SessionGate


@dataclass
class Turn:
    """A request, and the pause before it."""

    prompt_tokens: int
    answer_tokens: int
    runs_s: float
    pause_s: float = 0.0
    reason: str = "tool_use"


@dataclass
class Agent:
    """A session, or requests without one. is_parallel: its requests don't wait for each other's end."""

    turns: list[Turn]
    starts_s: float = 0.0
    session: Hashable | None = None
    is_parallel: bool = False
    ends: bool = False


@dataclass
class World:
    """Runs agents. Of a session's prompt the first `kept` are cached if it was a member all the time since its last."""

    gate: SessionGate
    agents: list[Agent]
    seconds_per_token: float = 0.001
    now: float = 0.0
    finished: list[tuple[int, int]] = field(default_factory=list)
    waits_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self) -> None:
        """Run until nothing is left to happen. Then all requests must have finished."""
        self.events: list[tuple[float, int, str, tuple[int, int]]] = []
        self.asked: dict[tuple[int, int], float] = {}
        self.uncached: dict[tuple[int, int], int] = {}
        self.running: set[tuple[int, int]] = set()
        self.arrived: list[Hashable] = []  # sessions that wait, in the order in which they came
        self.overtaken: dict[Hashable, int] = {}
        self.idle_since: float | None = None
        for index, agent in enumerate(self.agents):
            when = agent.starts_s
            self.push(when, "ask", (index, 0))
            for number, turn in enumerate(agent.turns[1:] if agent.is_parallel else ()):
                when += turn.pause_s
                self.push(when, "ask", (index, number + 1))
        while self.events:
            self.now, _, kind, request = heapq.heappop(self.events)
            self.check_idle()
            if kind == "ask":
                self.ask(request)
            elif kind == "end":
                self.end(request)
            self.release()
        wanted = {(index, number) for index, agent in enumerate(self.agents) for number in range(len(agent.turns))}
        assert set(self.finished) == wanted, "a request was refused or starved"
        assert len(self.finished) == len(wanted), "a request was admitted twice"
        assert self.gate.stats.num_other_tokens == self.gate.stats.num_waiting_requests == 0

    def push(self, when: float, kind: str, request: tuple[int, int]) -> None:
        heapq.heappush(self.events, (when, len(self.events), kind, request))

    def ask(self, request: tuple[int, int]) -> None:
        agent, turn = self.agents[request[0]], self.agents[request[0]].turns[request[1]]
        is_member = any(key == (None, agent.session) for key, _, _ in self.gate.members())
        cached = turn.prompt_tokens * (3 if is_member or request[0] % 3 == 0 else 0) // 4
        self.asked[request], self.uncached[request] = self.now, turn.prompt_tokens - cached
        if self.gate.ask(request, agent.session, None, turn.prompt_tokens, cached, self.now):
            assert agent.session is None or is_member, "only members and requests without a session pass"
            self.admit(request)
        elif agent.session not in self.arrived and not self.is_parked(agent):
            self.arrived.append(agent.session)
            self.overtaken[agent.session] = 0

    def is_parked(self, agent: Agent) -> bool:
        return any(key == (None, agent.session) for key, _, _ in self.gate.members())

    def admit(self, request: tuple[int, int]) -> None:
        self.waits_s[request] = self.now - self.asked[request]
        self.running.add(request)
        self.push(self.now + self.agents[request[0]].turns[request[1]].runs_s, "end", request)

    def end(self, request: tuple[int, int]) -> None:
        agent, turn = self.agents[request[0]], self.agents[request[0]].turns[request[1]]
        self.running.remove(request)
        self.finished.append(request)
        self.gate.ended(request, turn.prompt_tokens + turn.answer_tokens, turn.reason, self.now)
        waiting: list[Any] = self.gate.waiting()
        still_waits = [each for each in waiting if each[0] == request[0]]
        if still_waits and not self.is_parked(agent) and agent.session not in self.arrived:
            self.arrived.append(agent.session)  # its turn is over
            self.overtaken[agent.session] = 0
        following = request[1] + 1
        if agent.is_parallel:
            return
        if following < len(agent.turns):
            self.push(self.now + agent.turns[following].pause_s, "ask", (request[0], following))
        elif agent.ends and agent.session is not None:
            self.gate.end_session(agent.session)

    def release(self) -> None:
        before = self.gate.stats
        decision = self.gate.release(len(self.running), self.seconds_per_token, self.now)
        admitted: tuple[Any, ...] = decision.admitted
        for request in admitted:
            session = self.agents[request[0]].session
            if session in self.arrived:
                place = self.arrived.index(session)
                for older in self.arrived[:place]:
                    self.overtaken[older] += 1
                    assert self.overtaken[older] <= self.gate.max_overtakes, "too many entered before it"
                del self.arrived[place]
            self.admit(request)
        self.check_again()
        self.check_room(before)
        waiting: list[Any] = self.gate.waiting()
        assert all(self.gate.why(request) is not None for request in waiting[:3])
        assert all(self.gate.why(request) is None for request in [*self.running][:3])
        assert sum(footprint for _, footprint, _ in self.gate.members()) == self.gate.stats.num_member_tokens
        if waiting and not self.running:
            assert decision.wake_at is not None, "nothing would ever wake it"
            self.idle_since = self.now if self.idle_since is None else self.idle_since
            self.patience_s = 0.25 * self.uncached[waiting[0]] * self.seconds_per_token
        else:
            self.idle_since = None
        if decision.wake_at is not None:
            assert decision.wake_at > self.now, "it would be asked again and again"
            self.push(decision.wake_at, "wake", (-1, -1))

    def check_again(self) -> None:
        """The same call once more changes nothing."""
        before = self.gate.stats, self.gate.members(), self.gate.waiting()
        again = self.gate.release(len(self.running), self.seconds_per_token, self.now)
        assert again.admitted == again.paused == ()
        assert (self.gate.stats, self.gate.members(), self.gate.waiting()) == before

    def check_room(self, before: GateStats) -> None:
        """Who entered has room, unless nothing was busy. What runs is inside. If it is too much, nobody else is."""
        stats = self.gate.stats
        num_counted = stats.num_member_tokens + stats.num_other_tokens
        if stats.num_entries > before.num_entries and stats.num_idle_entries == before.num_idle_entries:
            assert num_counted <= self.gate.fill * self.gate.num_tokens or stats.num_members == 1, "one has no room"
        members = self.gate.members()
        inside = {session for (_, session), _, _ in members}
        assert {self.agents[number].session for number, _ in self.running} - {None} <= inside, "one that runs has left"
        if num_counted > self.gate.num_tokens:
            assert all(paused_at is None for _, _, paused_at in members), "one pauses inside, and there is no room"

    def check_idle(self) -> None:
        if self.idle_since is not None:
            assert self.now - self.idle_since <= self.patience_s + 1e-6, "idle for too long while sessions wait"
