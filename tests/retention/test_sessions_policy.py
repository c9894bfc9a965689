"""What `eviction="sessions"` keeps: by itself, in a manager, and on a made-up trace compared with LRU."""

import heapq
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import KVCacheManager, Sequence
from kvblocks.retention.policies.returns import Returns, Rhythm
from kvblocks.retention.policies.sessions import SessionsPolicy

BLOCK_SIZE = 4


class Chats:
    """A manager whose requests are lists of numbered blocks of a session. It is told when sessions pause."""

    def __init__(self, num_blocks: int, eviction: Any = "sessions") -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE, eviction=eviction)
        self.num_requests = 0

    def start(self, session: Any, blocks: list[int], salt: str | None = None) -> Sequence:
        self.num_requests += 1
        tokens = [number * BLOCK_SIZE + i for number in blocks for i in range(BLOCK_SIZE)]
        sequence = Sequence(self.num_requests, [*tokens, 10**9], session=session, salt=salt)  # and an unfilled block
        hit = self.manager.get_computed_blocks(sequence)
        assert self.manager.allocate_slots(sequence, hit=hit) is not None
        return sequence

    def run(self, session: Any, blocks: list[int], reason: str = "stop", salt: str | None = None) -> None:
        sequence = self.start(session, blocks, salt)
        self.manager.free(sequence)
        if session is not None:
            self.manager.sessions.pause(session, reason, salt)

    def num_cached(self, blocks: list[int], salt: str | None = None) -> int:
        tokens = [number * BLOCK_SIZE + i for number in blocks for i in range(BLOCK_SIZE)]
        return len(self.manager.get_computed_blocks(Sequence("probe", tokens, salt=salt)).blocks)

    def evict(self, num_blocks: int) -> None:
        """Evict so many cached blocks, and cache nothing instead."""
        num_empty = self.manager.inspect.count_empty_blocks(self.manager.num_blocks)
        filler = Sequence("filler", range(10**6, 10**6 + BLOCK_SIZE * (num_empty + num_blocks)))
        assert self.manager.allocate_slots(filler) is not None
        self.manager.abort(filler, 0)
        assert self.manager.stats.num_eviction_failures == 0
        self.manager.check()


def span(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def test_what_the_next_request_lacks_goes_first() -> None:
    chats = Chats(20)
    chats.run("old", span(100, 4))
    chats.run("chat", span(0, 8))
    chats.run("chat", [*span(0, 5), *span(50, 2)])  # dropped thinking: 5, 6 and 7 are superseded
    assert chats.num_cached(span(0, 8)) == 8
    chats.evict(3)
    assert chats.num_cached(span(0, 8)) == 5
    assert chats.num_cached([*span(0, 5), *span(50, 2)]) == 7
    assert chats.num_cached(span(100, 4)) == 4


def test_a_compacted_history_goes_first() -> None:
    chats = Chats(30)
    chats.run("old", span(100, 4))
    chats.run("chat", span(0, 10))
    chats.run("chat", [0, 1, *span(50, 3)])
    chats.evict(8)
    assert chats.num_cached(span(0, 10)) == 2
    assert chats.num_cached([0, 1, *span(50, 3)]) == 5
    assert chats.num_cached(span(100, 4)) == 4


def test_a_sub_agent_supersedes_nothing() -> None:
    chats = Chats(30)
    chats.run("old", span(100, 4))
    chats.run("chat", span(0, 5))
    chats.run("chat", span(50, 5))
    chats.evict(4)
    assert [chats.num_cached(span(100, 4)), chats.num_cached(span(0, 5))] == [0, 5]
    chats.run("chat", span(0, 7))
    assert chats.num_cached(span(50, 5)) == 5
    assert chats.num_cached(span(0, 7)) == 7


def test_whether_histories_that_were_left_come_back_is_learned() -> None:
    made: list[Any] = []

    def make(cache: Any) -> SessionsPolicy:
        made.append(SessionsPolicy(cache))
        return made[-1]

    chats = Chats(80, make)
    for number in range(10):
        chats.run("chat", span(0, 10))
        chats.manager.now += 10
        chats.run("chat", [0, 1, *span(100 + 10 * number, 3)])
        chats.manager.now += 10
    assert chats.num_cached(span(0, 10)) == 10
    left = made[0]._left.returns  # noqa: SLF001
    assert left.worth(1.0, 100.0, left.rhythm(None, 0.0)) > 1.0


def test_what_ended_goes_first() -> None:
    chats = Chats(20)
    for name in ("a", "b", "c"):
        chats.run(name, span(ord(name) * 10, 4))
    chats.manager.sessions.end("b")
    chats.manager.sessions.end("b")
    chats.manager.sessions.end("never")
    chats.evict(4)
    assert [chats.num_cached(span(ord(name) * 10, 4)) for name in "abc"] == [4, 0, 4]


def test_what_ended_while_a_hold_had_it_goes_first() -> None:
    chats = Chats(20)
    chats.run("a", span(0, 4))
    sequence = chats.start("b", span(10, 4))
    hold = chats.manager.holds.read(sequence)
    chats.manager.free(sequence)
    chats.manager.sessions.end("b")
    chats.manager.holds.release(hold)
    chats.evict(4)
    assert [chats.num_cached(span(0, 4)), chats.num_cached(span(10, 4))] == [4, 0]


def test_one_that_comes_again_begins_anew() -> None:
    chats = Chats(20)
    chats.run("a", span(0, 4))
    chats.manager.sessions.end("a")
    chats.run("a", span(0, 4))
    chats.run("b", span(10, 4))
    chats.manager.sessions.end("b")
    chats.evict(4)
    assert [chats.num_cached(span(0, 4)), chats.num_cached(span(10, 4))] == [4, 0]


@pytest.mark.parametrize("other", ["another", None])
def test_what_another_one_has_stays(other: str | None) -> None:
    """Another session has it, or requests without a session do."""
    chats = Chats(20)
    chats.run("old", span(100, 4))
    chats.run(other, span(0, 4))
    chats.run("chat", span(0, 8))
    chats.manager.sessions.end("chat")
    chats.evict(4)
    assert [chats.num_cached(span(0, 8)), chats.num_cached(span(100, 4))] == [4, 4]
    chats.evict(2)
    assert [chats.num_cached(span(0, 8)), chats.num_cached(span(100, 4))] == [4, 2]
    if other is not None:
        chats.manager.sessions.end(other)
        chats.evict(4)
        assert [chats.num_cached(span(0, 8)), chats.num_cached(span(100, 4))] == [0, 2]


def test_what_many_have_is_nobody_s() -> None:
    chats = Chats(60)
    for number in range(20):
        chats.run(number, [*span(0, 3), 100 + number])
    for number in range(20):
        chats.manager.sessions.end(number)
    chats.evict(20)
    assert chats.num_cached(span(0, 3)) == 3
    chats.run("new", span(200, 3))
    chats.manager.sessions.end("new")
    chats.evict(3)
    assert [chats.num_cached(span(0, 3)), chats.num_cached(span(200, 3))] == [3, 0]


def test_equal_names_of_other_tenants_are_others() -> None:
    chats = Chats(20)
    chats.run("chat", span(0, 4), salt="one")
    chats.run("chat", span(0, 4), salt="other")
    chats.run("chat", span(0, 4))
    chats.manager.sessions.end("chat", salt="other")
    chats.evict(4)
    assert [chats.num_cached(span(0, 4), salt) for salt in ("one", "other", None)] == [4, 0, 4]


def learn(chats: Chats, num_rounds: int = 20) -> None:
    """Teach it that tools take 5 seconds, and people 500."""
    now = chats.manager.now
    for number in range(num_rounds):
        for reason, seconds in (("tool_use", 5), ("end_turn", 500)):
            chats.run(f"{reason} {number}", [1000 + number], reason)
            now += seconds
            chats.manager.now = now
            chats.run(f"{reason} {number}", [1000 + number], reason)
            chats.manager.sessions.end(f"{reason} {number}")
    chats.run("clock", [2000])  # the time for which things are kept is learned of victims
    chats.manager.now = now + 30
    chats.evict(chats.manager.num_free_blocks - chats.manager.inspect.count_empty_blocks(chats.manager.num_blocks))


def test_who_waits_for_a_tool_stays_longer_than_who_waits_for_a_person() -> None:
    chats = Chats(40)
    learn(chats)
    chats.run("tool", span(0, 4), "tool_use")
    chats.run("person", span(10, 4), "end_turn")  # the later one
    chats.evict(4)
    assert [chats.num_cached(span(0, 4)), chats.num_cached(span(10, 4))] == [4, 0]


def test_a_tool_that_should_have_come_back_long_ago_goes() -> None:
    chats = Chats(40)
    learn(chats)
    chats.run("tool", span(0, 4), "tool_use")
    chats.manager.now += 200
    chats.run("person", span(10, 4), "end_turn")
    chats.evict(4)
    assert [chats.num_cached(span(0, 4)), chats.num_cached(span(10, 4))] == [0, 4]


@pytest.mark.parametrize("times", [lambda i: 0, lambda i: -i, lambda i: 10**30 * i, lambda i: i / 1000])
def test_without_sessions_it_is_lru(times: Any) -> None:
    """Whatever the clock does, with prompts that share beginnings."""
    chosen = random.Random(3)
    one, other = Chats(30), Chats(30, eviction=None)
    for i in range(400):
        blocks = [0] * chosen.randint(0, 2) + [chosen.randint(1, 3) for _ in range(chosen.randint(1, 5))]
        for chats in (one, other):
            chats.manager.now = times(i)
            chats.run(None, blocks)
        assert one.manager.stats == other.manager.stats
    assert one.manager.stats.num_evicted_blocks > 100


def test_a_clock_that_stands_still_leaves_the_order_of_pausing() -> None:
    chats = Chats(21)
    for number in range(5):
        chats.run(number, span(10 * number, 4))
    chats.evict(8)
    assert [chats.num_cached(span(10 * number, 4)) for number in range(5)] == [0, 0, 4, 4, 4]


def test_sessions_that_never_come_back_are_forgotten() -> None:
    made: list[SessionsPolicy] = []

    def make(cache: Any) -> SessionsPolicy:
        made.append(SessionsPolicy(cache))
        return made[-1]

    chats = Chats(10, make)
    for number in range(1000):
        chats.manager.now = number
        chats.run(number, span(10 * number, 3), f"reason {number}")
        chats.manager.sessions.pause(f"unknown {number}", "stop")
    chats.manager.check()
    policy: Any = made[0]
    assert len(policy._sessions) <= 2 * 10 + 64 + 8  # noqa: SLF001
    assert len(policy._kinds) == 32  # noqa: SLF001
    assert len(policy._threads) <= 10  # noqa: SLF001
    assert sum(len(paused) for kind in policy._kinds.values() for paused in kind.paused.values()) <= 10  # noqa: SLF001


def test_a_block_that_two_threads_of_a_session_share_goes_with_the_last_of_them() -> None:
    """Evicted before the main thread: a sub-agent with its system prompt, and a session that waits for a person."""
    chats = Chats(40)
    learn(chats)
    main, sub = chats.start("chat", span(0, 8)), chats.start("chat", [*span(0, 2), *span(50, 4)])
    for sequence, reason in ((main, "tool_use"), (sub, "end_turn")):
        chats.manager.free(sequence)
        chats.manager.sessions.pause("chat", reason)
    chats.run("person", span(10, 4), "end_turn")
    chats.evict(8)
    assert [chats.num_cached(span(0, 8)), chats.num_cached([0, 1, 50]), chats.num_cached(span(10, 4))] == [8, 2, 0]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "free", "abort", "fork", "pause", "end", "time", "evict"]),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ACTIONS)
def test_whatever_is_told_no_call_fails(actions: list[tuple[str, int, int]]) -> None:
    """Several allocated sequences of a session, equal names with other salts, unknown sessions, a second end."""
    chats = Chats(24)
    manager, running, salts = chats.manager, list[Sequence](), (None, None, "a", "b")
    for action, who, what in actions:
        salt, session = salts[who], (None, "x", "x", "y")[who]
        if action == "start" and len(running) < 3:
            running.append(chats.start(session, [what % 2, *span(10 * what, 1 + who)], salt))
        elif action in ("free", "abort") and running:
            sequence = running.pop(what % len(running))
            manager.free(sequence) if action == "free" else manager.abort(sequence, what)
        elif action == "fork" and 0 < len(running) < 3:
            running.append(
                manager.fork(running[what % len(running)], ("child", len(actions), chats.num_requests, what))
            )
            chats.num_requests += 1
        elif action == "pause":
            manager.sessions.pause(session or "nobody", ("stop", "tool_use")[what % 2], salt)
        elif action == "end":
            manager.sessions.end(session or "nobody", salt)
        elif action == "time":
            manager.now = (0, 5, -3, 2.5, 10**12, 7)[what]
        elif action == "evict" and manager.num_free_blocks > 5:
            chats.evict(min(what, manager.num_free_blocks - manager.inspect.count_empty_blocks(24)))
        manager.check()
    assert manager.stats.num_eviction_failures == 0


def test_worth_is_what_was_seen() -> None:
    returns = Returns(0.0)
    own = Rhythm()
    for seconds in [8.0] * 80 + [1024.0] * 20:
        returns.num_open += 1
        returns.learn(seconds, 0.0, 3.0, None)
        returns.close()
    assert returns.rhythm(None, 0.0) == pytest.approx(4.5, abs=0.3)
    assert returns.worth(1.0, 10_000.0, 3.0) > 10  # most end at the very beginning of that time
    assert returns.worth(100.0, 100.0, 3.0) == pytest.approx(0.0, abs=0.02)
    assert returns.worth(100.0, 2_000.0, 3.0) == pytest.approx(1.0 / 0.6, abs=0.2)  # all end about half-way
    returns.num_open = 20.0  # as many never came back
    assert returns.worth(100.0, 2_000.0, 3.0) == pytest.approx(0.5 / 0.8, abs=0.1)
    for _ in range(30):
        returns.learn(1024.0, 0.0, 3.0, own)
    assert returns.rhythm(own, 0.0) > returns.rhythm(None, 0.0)
    for _ in range(30):  # the last pauses matter, not the many before
        returns.learn(1.0, 0.0, 3.0, own)
    assert returns.rhythm(own, 0.0) < returns.rhythm(None, 0.0)
    nothing = Returns(1.0)
    assert nothing.worth(1.0, 1.0, 0.0) > nothing.worth(10.0, 1.0, 0.0) > 0  # by recency


def test_how_long_a_request_ran_says_how_long_the_pause_is() -> None:
    returns = Returns(0.0)
    for took, length in [(2.0, 4.0), (8.0, 16.0)] * 5000:
        returns.learn(length, took, 3.0, None)
    assert returns.rhythm(None, 4.0) == returns.rhythm(None, 0.0) == 3.0
    assert (returns.rhythm(None, 2.0), returns.rhythm(None, 8.0)) == (2.0, 4.0)
    unrelated = Returns(0.0)
    for took, length in [(2.0, 4.0), (8.0, 16.0), (2.0, 16.0), (8.0, 4.0)] * 50:
        unrelated.learn(length, took, 3.0, None)
    assert unrelated.rhythm(None, 2.0) == unrelated.rhythm(None, 8.0) == 3.0


def test_requests_are_timed() -> None:
    made: list[Any] = []

    def make(cache: Any) -> SessionsPolicy:
        made.append(SessionsPolicy(cache))
        return made[-1]

    chats = Chats(200, make)

    def run(name: str, took: float) -> float:
        """Return for how long the policy expects the session to pause, as a logarithm."""
        sequence = chats.start(name, span(100 * len(name), 4))
        chats.manager.now += took
        chats.manager.free(sequence)
        chats.manager.sessions.pause(name, "stop")
        return made[0]._sessions[None, name].last.rhythm  # type: ignore[no-any-return]  # noqa: SLF001

    for _ in range(30):
        for took in (2.0, 32.0):
            run("chat", took)
            chats.manager.now += 2 * took
    assert run("short", 2.0) + 2 < run("longer", 32.0)


def test_old_pauses_count_for_less_and_less() -> None:
    returns = Returns(0.0)
    returns.num_open = 64.0
    for _ in range(10_000):
        returns.learn(2.0, 0.0, 1.0, None)
    before = returns.worth(1.0, 10.0, 1.0)
    for _ in range(10_000):
        returns.learn(1024.0, 0.0, 1.0, None)
    assert returns.worth(1.0, 10.0, 1.0) < before / 4
    assert returns.num_open < 1


def hit_rate(eviction: str, num_blocks: int) -> float:
    """Of 60 sessions of about 30 requests: most pauses are short, one in four is long; histories grow."""
    chosen = random.Random(5)
    events: list[tuple[float, int, int, list[int], str]] = []
    start = 0.0
    for session in range(60):
        start += chosen.expovariate(1 / 40)
        time, base = start, session * 1000
        length = chosen.randint(4, 10)
        for _ in range(chosen.randint(10, 50)):
            waits = chosen.random() < 1 / 4
            length += chosen.randint(0, 2)
            events.append((time, session, 0, span(base, length), "end_turn" if waits else "tool_use"))
            time += chosen.lognormvariate(6.5 if waits else 2.0, 0.8) + 2
    chats = Chats(num_blocks, eviction)
    running: list[tuple[float, int, Sequence, int, str]] = []
    for number, (time, session, _, blocks, reason) in enumerate(sorted(events)):
        while running and running[0][0] <= time:
            end, _, sequence, whose, why = heapq.heappop(running)
            chats.manager.now = end
            chats.manager.free(sequence)
            chats.manager.sessions.pause(whose, why)
        chats.manager.now = time
        heapq.heappush(running, (time + 2, number, chats.start(session, blocks), session, reason))
    stats = chats.manager.stats
    assert stats.num_eviction_failures == 0
    return stats.num_hit_tokens / stats.num_queried_tokens


def test_it_beats_lru_where_the_pool_is_short() -> None:
    """The trace is the same each time, so the numbers are, too."""
    assert hit_rate("sessions", 400) > hit_rate("lru", 400) + 0.02
    assert hit_rate("sessions", 160) > hit_rate("lru", 160) + 0.01
    assert hit_rate("sessions", 3000) >= hit_rate("lru", 3000)


def test_a_session_whose_blocks_are_gone_keeps_no_threads() -> None:
    """All requests have one session name, as with a careless client: the memory is bounded by the pool."""
    chooser, chats = random.Random(0), Chats(50)
    made: list[Any] = [chats.manager._eviction._main._free.__self__]  # type: ignore[union-attr]  # noqa: SLF001
    history, running = [7], []
    for number in range(3000):
        chats.manager.now = float(number)
        kept = history[: chooser.randrange(len(history))] if chooser.random() < 0.1 else history
        history = [*kept, *[chooser.randrange(10**6) for _ in range(chooser.randrange(4))]][-20:] or [7]
        running.append(chats.start("everybody" if chooser.random() < 0.9 else None, history))
        while len(running) > 1 or (running and chooser.random() < 0.6):
            chats.manager.free(running.pop(chooser.randrange(len(running))))
            if chooser.random() < 0.8:
                chats.manager.sessions.pause("everybody", "stop")
    (session,) = made[0]._sessions.values()  # noqa: SLF001
    assert len(session.threads) <= 50 and len(session.waiting) <= 50
