"""One run: a trace through a manager, on a modelled clock.

A request comes, waits until the manager has room for its prompt, and is admitted. It then holds its blocks for as long
as it ran according to the trace, and frees them. Requests are admitted in the order in which they come, so one that
doesn't fit holds up those after it. In a closed loop a session waits its think time after a request ends, and then
sends the next one.

The manager is the production one (`pools.ManagerPool`), or arrays that decide the same (`pools.ArrayRunPool`). Each
block of the trace is one token for it, whose id is the block's number, and its own blocks have one token each. Equal
numbers mean equal prefixes, so the manager finds exactly the hits that the trace has. Hits are counted in blocks. When
a whole prompt is cached, its last block also counts as hit, since an engine computes only the last token again, one of
about 512 in that block.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from kvblocks import Group, KVCacheManager, Tier
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.accounts import State, Timeline, count_waits
from kvblocks.replay.pools import ArrayRunPool, ManagerPool, SharedBlocks, has_own_blocks
from kvblocks.replay.result import Misses, Moment, Waits
from kvblocks.replay.trace import Numbers, Trace
from kvblocks.retention.policies import NAMED

DROPPING = "lru-drop"

POLICIES: dict[str, str | None] = {
    **{name: None if name == "lru" else name for name in NAMED},
    DROPPING: None,
}
"""The values of `Setup.policy`.

lru: the manager's own queue, which evicts exactly the blocks that its policy "lru" does. lru-drop: like lru, but blocks
that a session's next request no longer has are dropped at once, unless the last request of another live session has
them.
"""

END, ARRIVAL = 0, 1
"""The kinds of events of a request. At the same time, an END comes before an ARRIVAL."""

_EVERY = 64  # requests between two calls of `progress`


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a run.

    - groups: the groups of the model's layers, where a token stands for a block of the trace; None: one with full
      attention.
    - host_blocks: the blocks of a tier below the device; None: no tier.
    - is_closed: whether a session waits its think time after a request ends before it sends the next one.
    - never_waits: whether all requests are admitted when they come, so that their order is the same for all policies
      and sizes. A request that doesn't fit is served outside the pool: it reads what is cached when it comes, leaves as
      many of its leading blocks in the pool as fit, and holds none.
    - tells_ends: whether the manager is told when a session's last request has ended, which the trace knows but a
      server may not.
    """

    policy: str
    num_blocks: int
    host_blocks: int | None = None
    groups: tuple[Group, ...] | None = None
    is_closed: bool = False
    never_waits: bool = False
    tells_ends: bool = False


@dataclass(slots=True)
class Outcome:
    """The results of a run. order: the requests in the order of admission.

    hits: for each request of the trace, the blocks found on the device. loaded: those found in the host tier. misses,
    waits and moments: see `result`.
    """

    order: list[int]
    hits: Numbers
    loaded: Numbers
    misses: Misses
    waits: Waits
    moments: list[Moment]
    num_evicted: int
    num_policy_failures: int
    refused: list[int] = field(default_factory=list)


def make_manager(setup: Setup) -> KVCacheManager:
    """Make the manager for a run. Raises InvalidArgumentError."""
    if setup.policy not in POLICIES:
        raise InvalidArgumentError(f"policy: expected one of {', '.join(POLICIES)}, got {setup.policy}")
    options: dict[str, Any] = {"eviction": POLICIES[setup.policy]}
    if setup.host_blocks is not None:
        options["tiers"] = [Tier("host", setup.host_blocks, num_block_bytes=1)]
    if setup.groups is not None:
        return KVCacheManager(setup.num_blocks, groups=setup.groups, **options)
    return KVCacheManager(setup.num_blocks, 1, **options)


def can_use_arrays(trace: Trace, setup: Setup) -> bool:
    """Return whether arrays can replace the manager: with one group of layers, no tier, and no dropped blocks."""
    if setup.host_blocks is not None or setup.groups is not None or setup.policy not in (POLICIES.keys() - {DROPPING}):
        return False
    return has_own_blocks(trace)


def run(
    trace: Trace,
    arrivals: Numbers,
    thinks: Numbers,
    setup: Setup,
    progress: Callable[[int], object] = lambda _: None,
    manager: KVCacheManager | None = None,
) -> Outcome:
    """Run a trace. arrivals, thinks: the results of `arrival_times` and `think_times`.

    progress: called with the number of requests done. manager: an empty manager with blocks of one token, for example
    with your own policy; None: `make_manager(setup)`, or arrays in its place.
    A duration that the trace doesn't have is 0. O(references), and O(log requests) for each request.
    """
    place = None if manager is None else FleetMember(Agenda(), manager)
    return TraceRun(trace, arrivals, thinks, setup, place=place).run(progress)


class Agenda:
    """Future events: arrivals and ends of requests. Runs that share an agenda share a clock."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, int]] = []  # when, which kind, number, request
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._events)

    def push(self, when: float, kind: int, request: int) -> None:
        """Add an event: an ARRIVAL or an END. O(log events)."""
        heapq.heappush(self._events, (when, kind, next(self._numbers), request))

    def pop(self) -> tuple[float, int, int]:
        """Remove and return the next event: its time, its kind, and its request. O(log events)."""
        when, kind, _, request = heapq.heappop(self._events)
        return when, kind, request


@dataclass(frozen=True, slots=True)
class FleetMember:
    """What one of several runs on one clock needs. agenda: shared by all of them. manager: this run's own.

    store: shared by all of them, or None. With a store, the manager has one tier, named STORE, which is shared.
    """

    agenda: Agenda
    manager: KVCacheManager
    store: SharedBlocks | None = None


class TraceRun:
    """The state of a run: one manager, and all requests of a trace, or those that come to this member of a fleet."""

    def __init__(
        self, trace: Trace, arrivals: Numbers, thinks: Numbers, setup: Setup, *, place: FleetMember | None = None
    ) -> None:
        self.trace, self.setup = trace, setup
        if place is None and can_use_arrays(trace, setup):
            self.pool: ManagerPool | ArrayRunPool = ArrayRunPool(trace, setup.num_blocks, POLICIES[setup.policy])
        else:
            manager, store = (make_manager(setup), None) if place is None else (place.manager, place.store)
            self.pool = ManagerPool(trace, setup.num_blocks, manager, store)
        self.arrivals: list[float] = arrivals.tolist()
        self.thinks: list[float] = thinks.tolist()
        self.durations: list[float] = np.nan_to_num(trace.durations, nan=0.0).tolist()
        self.sessions: list[int] = trace.sessions.tolist()
        self.followers = followers(trace)
        self.names = trace.session_names
        self.salts = trace.tenants if any(tenant is not None for tenant in trace.tenants) else None
        self.drops = Drops(trace) if setup.policy == DROPPING else None
        self.now = 0.0
        self.agenda = Agenda() if place is None else place.agenda
        self.num_done = 0
        self.waiting: deque[tuple[int, float]] = deque()
        self.running: set[int] = set()  # those that hold blocks
        self.unfinished = Counter(self.sessions)
        self.live: set[int] = set()
        self.order: list[int] = []
        self.refused: list[int] = []
        self.waits: list[float] = []
        self.hits = np.zeros(trace.num_requests, np.int64)
        self.loaded = np.zeros(trace.num_requests, np.int64)

        self.timeline = Timeline(
            min(self.arrivals, default=0.0), max(map(sum, zip(self.arrivals, self.durations, strict=True)), default=0.0)
        )

    @property
    def manager(self) -> KVCacheManager:
        """The manager of a `FleetMember`."""
        assert isinstance(self.pool, ManagerPool), "a run of its own may use arrays"
        return self.pool.manager

    def run(self, progress: Callable[[int], object]) -> Outcome:
        """Run all requests."""
        push_arrivals(self.agenda, self.arrivals, {*self.followers.values()} if self.setup.is_closed else ())
        while self.agenda:
            num_done = self.num_done
            self.happen(*self.agenda.pop())
            if self.num_done // _EVERY > num_done // _EVERY:
                progress(self.num_done)
        progress(self.num_done)
        return self.outcome()

    def happen(self, when: float, kind: int, request: int) -> None:
        """Handle a request's arrival or end, then admit all requests for which there is room."""
        if when > self.timeline.next_s:
            self.timeline.note(self.state(), when)
        self.now = when
        self.pool.set_time(when)
        if kind == END:
            self.end(request)
        else:
            self.arrive(request)
        while self.waiting and self.admit(*self.waiting[0]):
            self.waiting.popleft()
            self.num_done += 1

    def outcome(self) -> Outcome:
        """Return the results."""
        num_evicted, num_failures = self.pool.counts()
        return Outcome(
            order=self.order,
            hits=self.hits,
            loaded=self.loaded,
            misses=self.pool.accounts.misses(),
            waits=count_waits(self.waits, len(self.refused)),
            moments=self.timeline.end(self.state(), self.now),
            num_evicted=num_evicted,
            num_policy_failures=num_failures,
            refused=self.refused,
        )

    def arrive(self, request: int) -> None:
        """Queue a request, or refuse it if it is larger than the pool."""
        self.live.add(self.sessions[request])
        path = self.trace.blocks_of(request)
        if len(path) > self.setup.num_blocks and not self.setup.never_waits:
            self.refuse(request, path)
        else:
            self.waiting.append((request, self.now))

    def state(self) -> State:
        """Return the current state of the run."""
        num_held, num_cached = self.pool.levels()
        return State(
            live_sessions=len(self.live),
            running_requests=len(self.running),
            waiting_requests=len(self.waiting),
            held_blocks=num_held,
            cached_blocks=num_cached,
            used_blocks=self.pool.accounts.num_used_blocks(),
        )

    def admit(self, request: int, came_s: float) -> bool:
        """Admit a request, or refuse it for good. Returns False if it has to wait."""
        path = self.trace.blocks_of(request)
        session = self.sessions[request]
        salt = None if self.salts is None else self.salts[session]
        hold_s = self.durations[request]
        if self.setup.never_waits and len(path):
            whole, path = path, self.pool.cut(path, salt)
            if len(path) < len(whole):
                self.pool.accounts.note_refused(whole[len(path) :])
                hold_s = 0.0
        if len(path):
            found = self.pool.take(request, path, salt, self.now)
            if found is None:
                if self.running:
                    return False
                self.refuse(request, path)  # nothing else runs, and still there is no room
                return True
            self.hits[request], self.loaded[request] = found
            self.timeline.add(len(path), sum(found))
            self.running.add(request)
            if self.drops is not None:
                assert isinstance(self.pool, ManagerPool), "arrays drop nothing"
                self.pool.drop(self.drops.superseded(session, path))
        self.order.append(request)
        self.waits.append(self.now - came_s)
        self.agenda.push(self.now + hold_s, END, request)
        return True

    def refuse(self, request: int, path: Numbers) -> None:
        """Refuse a request that is larger than the pool."""
        self.refused.append(request)
        self.pool.accounts.note_refused(path)
        self.timeline.add(len(path), 0)
        self.finish(request)

    def end(self, request: int) -> None:
        """End a request."""
        if request in self.running:
            self.running.discard(request)
            self.pool.free(request)
        self.finish(request)

    def finish(self, request: int) -> None:
        """Count a request that ended, and schedule the next one of its session."""
        session = self.sessions[request]
        self.unfinished[session] -= 1
        self.tell(request, session, has_ended=not self.unfinished[session])
        if not self.unfinished[session]:
            self.live.discard(session)
        follower = self.followers.get(request)
        if self.setup.is_closed and follower is not None:
            self.agenda.push(self.now + self.thinks[follower], ARRIVAL, follower)

    def tell(self, request: int, session: int, *, has_ended: bool) -> None:
        """Tell the cache that a session has ended, or that it pauses and why."""
        if self.names[session] is None:
            return
        salt = None if self.salts is None else self.salts[session]
        if has_ended and self.setup.tells_ends:
            self.pool.end(session, salt)
        elif self.trace.stops[request]:
            self.pool.pause(session, salt, self.trace.stops[request])


class Drops:
    """The blocks of each session's last request, and for each block, how many live sessions' last requests have it."""

    def __init__(self, trace: Trace) -> None:
        self._last: dict[int, Numbers] = {}
        self._users = np.zeros(trace.num_unique_blocks, np.int64)

    def superseded(self, session: int, path: Numbers) -> Numbers:
        """Record a session's request. Returns the blocks that neither it nor another session has any more."""
        before = self._last.get(session, path[:0])
        num_shared = num_common(before, path)
        self._last[session] = path
        self._users[path[num_shared:]] += 1
        gone = before[num_shared:]
        self._users[gone] -= 1
        unused: Numbers = gone[self._users[gone] == 0]
        return unused


def push_arrivals(agenda: Agenda, arrivals: list[float], left_out: Collection[int] = ()) -> None:
    """Add the arrivals of all requests, in order, except those in `left_out`, which come when another request ends."""
    coming = [request for request in range(len(arrivals)) if request not in left_out]
    for request in sorted(coming, key=lambda request: (arrivals[request], request)):
        agenda.push(arrivals[request], ARRIVAL, request)


def num_common(one: Numbers, other: Numbers) -> int:
    """Return how many leading blocks two prompts have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def followers(trace: Trace) -> dict[int, int]:
    """Return, for each request that has one, the next request of the same session."""
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    for request, session in enumerate(trace.sessions.tolist()):
        if session in last:
            found[last[session]] = request
        last[session] = request
    return found
