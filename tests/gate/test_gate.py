"""The session gate: each rule on its own, then its guarantees in generated worlds, then bad input."""

from typing import Any

import pytest
from gate.world import Agent, Turn, World
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.errors import InvalidArgumentError
from kvblocks.gate import Decision, SessionGate
from kvblocks.gate.pause_lengths import HOLDS_S, PauseLengths


def enter(gate: SessionGate, session: str, prompt: int, now: float = 0.0) -> str:
    """Let a session enter, whose request is named after it. There must be room."""
    assert not gate.ask(session, session, None, prompt, 0, now)
    assert session in gate.release(1, 0.001, now).admitted
    return session


def pause(gate: SessionGate, session: str, tokens: int, now: float, reason: str = "tool_use") -> None:
    gate.ended(session, tokens, reason, now)


def test_a_waiting_session_enters_if_all_footprints_fit_and_members_pass_at_once() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 500)
    enter(gate, "b", 450)
    assert gate.stats.num_member_tokens == 950
    assert not gate.ask("c", "c", None, 1, 0, 1.0)
    assert gate.release(2, 0.05, 1.0) == Decision((), (), None)
    pause(gate, "a", 400, 2.0)  # prompt and answer are fewer now
    assert gate.release(1, 0.05, 2.0).admitted == ("c",)
    assert gate.ask("a", "a", None, 420, 400, 3.0)
    assert gate.stats.num_member_tokens == 871
    assert gate.stats.num_waiting_requests == 0


def test_without_members_a_session_enters_however_large_it_is() -> None:
    gate = SessionGate(1000)
    assert not gate.ask("a", "a", None, 5000, 0, 0.0)
    assert gate.release(0, 0.001, 0.0).admitted == ("a",)
    pause(gate, "a", 5100, 1.0)
    assert gate.release(0, 0.001, 1.0).paused == ((None, "a"),)  # it outgrew the room


def test_requests_without_a_session_pass_and_count_while_they_run() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 500)
    assert gate.ask(1, None, None, 400, 0, 0.0)
    assert not gate.ask("b", "b", None, 100, 0, 0.0)
    assert gate.release(2, 0.001, 0.0).admitted == ()
    waits = gate.why("b")
    assert waits is not None
    assert (waits.reason, waits.num_missing_tokens) == ("room", 50)
    assert gate.ask(2, None, None, 10, 0, 0.5), "though others wait"
    gate.ended(2, 20, "stop", 0.5)
    gate.ended(1, 420, "stop", 1.0)
    assert gate.release(1, 0.001, 1.0).admitted == ("b",)


def test_of_a_session_that_runs_several_requests_the_longest_one_counts() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 500)
    assert gate.ask("a2", "a", None, 200, 0, 1.0)
    assert gate.stats.num_member_tokens == 500
    gate.ended("a2", 210, "stop", 2.0)
    assert gate.stats.num_member_tokens == 500
    gate.ended("a", 510, "stop", 3.0)
    assert gate.stats.num_member_tokens == 510


def test_a_prompt_may_have_no_tokens() -> None:
    gate = SessionGate(1000)
    assert gate.ask(1, None, None, 0, 0, 0.0)
    assert not gate.ask(2, "a", None, 0, 0, 0.0)
    assert gate.release(1, 0.05, 0.0).admitted == (2,)
    gate.ended(1, 0, "stop", 1.0)
    gate.ended(2, 0, "stop", 1.0)
    assert (gate.stats.num_member_tokens, gate.stats.num_other_tokens) == (0, 0)


def test_the_same_name_with_another_salt_is_another_session() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    assert not gate.ask("x", "a", "tenant", 100, 0, 0.0)
    assert gate.release(1, 0.001, 0.0).admitted == ()


def test_a_hold_is_learned_for_each_reason() -> None:
    lengths = PauseLengths()
    assert lengths.hold_s(50.0) == 15.0  # ten pauses of ten seconds
    assert lengths.hold_s(0.0) == 0.0
    for _ in range(200):
        lengths.begin()
        lengths.end(300.0)
    assert lengths.hold_s(50.0) == 0.0  # to wait would cost more than to compute again
    assert lengths.hold_s(5000.0) == 480.0
    for _ in range(2000):
        lengths.begin()  # none comes back
    assert lengths.hold_s(1000.0) == 0.0


def test_each_stop_reason_has_a_hold_of_its_own() -> None:
    gate, now = SessionGate(1000), 1.0
    enter(gate, "a", 900)
    gate.release(1, 0.05, now)  # the room costs 50 s
    for number in range(80):
        reason, gap_s = ("tool_use", 1.0) if number % 2 else ("stop", 300.0)
        pause(gate, "a", 900, now, reason)
        now += gap_s
        assert gate.ask("a", "a", None, 900, 900, now)
    assert (gate.hold_s("tool_use"), gate.hold_s("stop"), gate.hold_s("length")) == (15.0, 0.0, 15.0)


@given(st.lists(st.floats(0.0, 3000.0), max_size=50), st.integers(0, 20), st.floats(0.0, 1e5, allow_subnormal=False))
def test_the_hold_is_the_one_that_would_have_cost_least(pauses: list[float], num_open: int, cost_s: float) -> None:
    lengths = PauseLengths()
    for seconds in pauses:
        lengths.begin()
        lengths.end(seconds)
    for _ in range(num_open):
        lengths.begin()
    seen = [10.0] * 10 + pauses + [float("inf")] * num_open
    costs = {t: sum(s if s <= t else t + cost_s for s in seen) for t in HOLDS_S}
    assert costs[lengths.hold_s(cost_s)] <= min(costs.values()) * (1 + 1e-9) + 1e-6


def test_what_a_session_that_ended_did_says_nothing_about_pauses() -> None:
    lengths = PauseLengths()
    for _ in range(100):
        lengths.begin()
        lengths.end(None)
    assert lengths.hold_s(50.0) == 15.0
    assert lengths.num_open == 0
    gate = SessionGate(1000)
    for number in range(200):
        enter(gate, f"s{number}", 100, 400.0 * number)
        pause(gate, f"s{number}", 100, 400.0 * number)
        gate.release(0, 0.05, 400.0 * number + 300.0)  # the room costs 50 s
        gate.end_session(f"s{number}")
    assert gate.hold_s("tool_use") == 15.0


def test_pauses_of_long_ago_count_less() -> None:
    lengths = PauseLengths()
    for seconds in [2000.0] * 3000 + [30.0] * 3000:
        lengths.begin()
        lengths.end(seconds)
    assert lengths.hold_s(50.0) == 30.0  # of all 6,010 together it would be 0


def test_a_member_leaves_after_its_hold_if_anybody_waits() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    pause(gate, "a", 900, 100.0)
    assert not gate.ask("b", "b", None, 100, 0, 101.0)
    decision = gate.release(1, 0.05, 101.0)  # the room costs 50 s
    assert decision == Decision((), (), 115.0)
    decision = gate.release(1, 0.05, 115.0)
    assert decision == Decision(("b",), ((None, "a"),), None)
    assert gate.stats.num_left == {"hold": 1, "growth": 0, "turn": 0}


def test_nobody_leaves_while_nobody_waits_until_no_hold_is_that_long() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    pause(gate, "a", 900, 0.0)
    assert gate.release(0, 0.05, 900.0) == Decision((), (), None)
    assert gate.ask("a", "a", None, 910, 900, 950.0)
    pause(gate, "a", 910, 951.0)
    gate.release(0, 0.05, 5000.0)
    assert gate.members() == []


def test_members_that_outgrow_the_room_leave_in_their_pauses_the_longest_pause_first() -> None:
    gate = SessionGate(1000)
    for session in "abc":
        enter(gate, session, 300)
    pause(gate, "a", 300, 1.0)
    pause(gate, "b", 300, 2.0)
    assert gate.release(1, 0.001, 2.0).paused == ()
    assert gate.ask("c2", "c", None, 400, 300, 2.0)
    assert gate.stats.num_member_tokens == 1000, "all of the room, and more than a new one may fill"
    assert gate.release(2, 0.001, 2.0).paused == ()
    gate.ended("c2", 400, "tool_use", 2.5)
    pause(gate, "c", 700, 3.0)
    assert gate.release(0, 0.001, 3.0).paused == ((None, "a"), (None, "b"))
    assert not gate.ask("a", "a", None, 310, 300, 3.5)


def test_what_runs_is_never_touched() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 100)
    enter(gate, "b", 100)
    pause(gate, "a", 100, 1.0)
    assert gate.ask("a", "a", None, 2000, 100, 1.0)
    assert gate.release(2, 0.001, 1.0).paused == ()
    assert [key for key, _, _ in gate.members()] == [(None, "a"), (None, "b")]


def test_cached_sessions_come_first_but_nobody_is_overtaken_too_often() -> None:
    gate = SessionGate(1000, max_overtakes=2)
    enter(gate, "first", 900)
    assert not gate.ask("cold", "cold", None, 100, 49, 0.0)
    for number in range(3):
        assert not gate.ask(f"warm {number}", f"warm {number}", None, 10, 5, 0.0)
    assert gate.waiting() == ["warm 0", "warm 1", "warm 2", "cold"]
    cold = gate.why("cold")
    assert cold is not None and cold.num_ahead == 3, "though it came first"
    assert gate.release(1, 0.001, 0.0).admitted == ("warm 0", "warm 1")
    assert gate.waiting() == ["cold", "warm 2"]  # there would be room for warm 2
    waits = gate.why("warm 2")
    assert waits is not None
    assert (waits.reason, waits.num_ahead) == ("behind", 1)


def test_a_session_that_waits_again_may_be_overtaken_as_often_as_before() -> None:
    gate = SessionGate(1000, max_overtakes=1, turn_s=100.0)
    enter(gate, "first", 900)
    gate.ask("cold", "cold", None, 100, 0, 0.0)
    gate.ask("warm", "warm", None, 10, 10, 0.0)
    gate.release(1, 0.001, 0.0)
    assert gate.waiting() == ["cold"]  # overtaken once
    pause(gate, "first", 900, 1.0)
    assert gate.release(0, 0.001, 50.0).admitted == ("cold",)
    gate.ended("cold", 990, "stop", 51.0)
    gate.ask("large", "large", None, 500, 0, 52.0)
    gate.release(1, 0.001, 52.0)  # "cold" has no place any more: it outgrew the room
    gate.ask("cold", "cold", None, 990, 0, 52.0)
    gate.ask("warm 2", "warm 2", None, 20, 20, 52.0)
    assert gate.waiting().index("warm 2") < gate.waiting().index("cold")


def test_a_session_comes_back_in_the_order_of_arrival_after_its_turn() -> None:
    gate = SessionGate(1000, turn_s=100.0)
    enter(gate, "a", 900)
    pause(gate, "a", 900, 99.0)
    gate.ask("b", "b", None, 400, 0, 99.5)
    gate.ask("c", "c", None, 700, 0, 99.6)
    assert gate.release(1, 1.0, 100.0).admitted == ("b",)
    assert not gate.ask("a", "a", None, 900, 900, 100.5)
    assert gate.waiting() == ["c", "a"], "it is cached, but had its turn"


def test_a_call_of_release_that_changes_nothing_may_come_again() -> None:
    gate = SessionGate(1000, max_overtakes=2)
    enter(gate, "a", 900)
    gate.ask("cold", "cold", None, 100, 0, 0.0)
    gate.ask("warm", "warm", None, 90, 90, 0.0)
    before = gate.stats, gate.members(), gate.waiting()
    for _ in range(20):
        assert gate.release(1, 0.05, 1.0) == Decision((), (), None)
        assert (gate.stats, gate.members(), gate.waiting()) == before


def test_a_waiting_request_whose_prefix_was_evicted_loses_its_place_in_front() -> None:
    gate = SessionGate(1000)
    enter(gate, "first", 900)
    gate.ask("cold", "cold", None, 100, 0, 0.0)
    gate.ask("warm", "warm", None, 100, 100, 0.0)
    assert gate.waiting() == ["warm", "cold"]
    gate.note_cached("warm", 10)
    assert gate.waiting() == ["cold", "warm"]


def test_if_nothing_is_busy_the_next_one_enters_after_a_quarter_of_its_prefill() -> None:
    gate = SessionGate(1000, turn_s=1e6)
    enter(gate, "a", 900)
    pause(gate, "a", 900, 0.0)
    gate.ask("b", "b", None, 400, 80, 0.0)
    assert gate.release(0, 0.1, 1.0).wake_at == 9.0
    waits = gate.why("b")
    assert waits is not None
    assert (waits.reason, waits.until, waits.num_missing_tokens) == ("idle", 9.0, 350)
    assert gate.release(1, 0.1, 5.0).wake_at == 15.0  # something is busy: only the hold's end matters
    waits = gate.why("b")
    assert waits is not None
    assert waits.reason == "room"
    assert gate.release(0, 0.1, 6.0).wake_at == 14.0
    assert gate.release(0, 0.1, 14.0) == Decision(("b",), ((None, "a"),), None)
    assert gate.stats.num_idle_entries == 1


def test_a_member_past_its_turn_leaves_at_its_next_pause_if_others_wait() -> None:
    gate = SessionGate(1000, turn_s=100.0)
    enter(gate, "a", 900)
    gate.ask("b", "b", None, 400, 80, 0.0)
    pause(gate, "a", 900, 99.0)
    assert gate.release(1, 1.0, 99.0).paused == ()
    assert gate.ask("a", "a", None, 900, 900, 99.5)
    pause(gate, "a", 900, 100.0)
    assert gate.release(0, 1.0, 100.0) == Decision(("b",), ((None, "a"),), None)


def test_requests_that_a_session_sends_after_its_turn_wait_so_that_it_pauses() -> None:
    gate = SessionGate(1000, turn_s=100.0)
    enter(gate, "a", 900)
    assert gate.ask("a2", "a", None, 900, 900, 50.0)  # beside the first one
    gate.ended("a", 900, "stop", 60.0)
    assert gate.ask("a3", "a", None, 900, 900, 100.0)  # nobody waits
    gate.ask("b", "b", None, 400, 80, 101.0)
    assert not gate.ask("a4", "a", None, 900, 900, 102.0)
    waits = gate.why("a4")
    assert waits is not None
    assert waits.reason == "turn"
    gate.ended("a2", 900, "stop", 103.0)
    assert gate.release(1, 1.0, 103.0).admitted == ()
    gate.ended("a3", 900, "stop", 104.0)
    assert gate.release(0, 1.0, 104.0).admitted == ("b",)
    assert gate.waiting() == ["a4"]


def test_a_session_waits_with_all_its_requests_and_enters_with_them() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    gate.ask("b1", "b", None, 50, 0, 0.0)
    gate.ask("b2", "b", None, 70, 0, 0.0)
    gate.ask("c", "c", None, 500, 0, 0.0)
    gate.ask("b3", "b", None, 60, 0, 0.0)
    assert gate.waiting() == ["b1", "b2", "b3", "c"]
    gate.cancel("b2")
    gate.ended("a", 890, "stop", 1.0)
    assert gate.release(0, 0.05, 1.0).admitted == ("b1", "b3")
    assert gate.stats.num_member_tokens == 950


def test_a_session_that_ended_gives_its_place_up() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    gate.ask("b", "b", None, 400, 0, 0.0)
    gate.end_session("a")  # its request goes on
    gate.end_session("nobody")
    assert gate.release(1, 0.05, 0.0).admitted == ()
    gate.ended("a", 900, "stop", 1.0)
    assert gate.release(0, 0.05, 1.0).admitted == ("b",)
    gate.ended("b", 400, "stop", 2.0)
    gate.end_session("b")
    assert gate.members() == []


def test_a_session_that_ended_and_asks_again_has_begun_again() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 500)
    gate.end_session("a")
    assert gate.ask("a2", "a", None, 400, 0, 1.0)
    gate.ended("a", 510, "stop", 2.0)
    gate.ended("a2", 410, "stop", 3.0)
    assert gate.members() == [((None, "a"), 410, 3.0)]
    assert gate.ask("a3", "a", None, 420, 410, 4.0)


def test_a_cancelled_request_waits_no_more() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900)
    gate.ask("b", "b", None, 400, 0, 0.0)
    gate.cancel("b")
    assert gate.stats.num_waiting_requests == 0
    assert gate.release(1, 0.001, 1.0) == Decision((), (), None)
    assert not gate.ask("b", "b", None, 400, 0, 2.0)  # its id is free again


def test_the_clock_never_goes_back() -> None:
    gate = SessionGate(1000)
    enter(gate, "a", 900, now=100.0)
    pause(gate, "a", 900, 50.0)
    gate.ask("b", "b", None, 100, 0, 20.0)
    assert gate.release(1, 0.05, 0.0).wake_at == 115.0


def test_no_state_is_left_of_sessions_that_stay_away() -> None:
    gate = SessionGate(10_000)
    for number in range(200):
        name = f"s{number}"
        gate.ask(name, name, None, 100, 0, number * 10.0)
        gate.release(0, 0.001, number * 10.0)
        gate.ended(name, 100, f"reason {number}", number * 10.0 + 1.0)
    assert not gate._requests  # noqa: SLF001
    assert len(gate._sessions) <= 98  # noqa: SLF001  # those of the last 960 s
    assert len(gate._lengths) == 32  # noqa: SLF001


seconds = st.floats(0.0, 200.0, allow_subnormal=False).map(lambda number: round(number, 2))
turns = st.builds(
    Turn, st.integers(0, 900), st.integers(0, 100), seconds, seconds, st.sampled_from(["tool_use", "stop"])
)
agents = st.builds(
    Agent, st.lists(turns, min_size=1, max_size=5), seconds, is_parallel=st.booleans(), ends=st.booleans()
)
worlds = st.lists(agents, min_size=1, max_size=10)
gates = st.builds(
    SessionGate,
    st.integers(100, 3000),
    fill=st.sampled_from([0.3, 0.95, 1.0]),
    max_overtakes=st.integers(0, 4),
    turn_s=st.sampled_from([0.5, 30.0, 3600.0]),
)


@given(gates, worlds, st.sampled_from([0.0, 0.001, 0.1]), st.integers(2, 6))
def test_guarantees_hold_in_any_world(
    gate: SessionGate, world: list[Agent], seconds_per_token: float, every: int
) -> None:
    for number, agent in enumerate(world):
        agent.session = (
            None if number % every == every - 1 else f"session {number // 2 if agent.is_parallel else number}"
        )
    World(gate, world, seconds_per_token).run()


def test_nobody_starves_behind_members_that_never_pause_for_long() -> None:
    busy = [Agent([Turn(400, 0, 1.0, 0.1)] * 400, session=f"busy {number}") for number in range(2)]
    large = Agent([Turn(5000, 0, 1.0)], starts_s=5.0, session="large")
    world = World(SessionGate(1000, turn_s=100.0), [*busy, large], seconds_per_token=0.1)  # so that holds are long
    world.run()
    assert world.waits_s[2, 0] < 110.0


def test_nobody_starves_behind_requests_without_a_session() -> None:
    stream = Agent([Turn(900, 0, 2.0, 1.0)] * 200, is_parallel=True)
    large = Agent([Turn(500, 0, 1.0)], starts_s=5.0, session="large")
    member = Agent([Turn(50, 0, 1.0, 0.1)] * 200, session="small")
    world = World(SessionGate(1000, turn_s=100.0), [stream, large, member], seconds_per_token=0.1)
    world.run()
    assert world.waits_s[1, 0] < 110.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "num_tokens"),
        ((1.5,), "num_tokens"),
        ((10, {"fill": 0.0}), "fill"),
        ((10, {"fill": 1.5}), "fill"),
        ((10, {"max_overtakes": -1}), "max_overtakes"),
        ((10, {"turn_s": 0}), "turn_s"),
        ((10, {"turn_s": float("nan")}), "turn_s"),
    ],
)
def test_a_gate_says_what_is_wrong(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
        SessionGate(arguments[0], **(arguments[1] if len(arguments) > 1 else {}))


def test_a_turn_may_last_for_ever() -> None:
    """An int may be larger than any float."""
    assert [SessionGate(10, turn_s=turn_s).turn_s for turn_s in (float("inf"), 10**400)] == [float("inf")] * 2


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        ("ask", ([], "s", None, 1, 0, 0.0), "request_id"),
        ("ask", ("runs", "s", None, 1, 0, 0.0), "request_id"),
        ("ask", ("new", [], None, 1, 0, 0.0), "session"),
        ("ask", ("new", "s", "", 1, 0, 0.0), "salt"),
        ("ask", ("new", "s", None, -1, 0, 0.0), "prompt_tokens"),
        ("ask", ("new", "s", None, 5, 6, 0.0), "cached_tokens"),
        ("ask", ("new", "s", None, 5, 5, "soon"), "now"),
        ("ask", ("new", "s", None, 5, 5, float("inf")), "now"),
        ("ask", ("new", "s", None, 5, 5, 10**400), "now"),
        ("note_cached", ("nobody", 0), "request_id"),
        ("note_cached", ("waits", 901), "cached_tokens"),
        ("release", (-1, 0.0, 0.0), "num_busy"),
        ("release", (0, -1.0, 0.0), "seconds_per_token"),
        ("release", (0, float("nan"), 0.0), "seconds_per_token"),
        ("release", (0, 10**400, 0.0), "seconds_per_token"),
        ("release", (0, 0.0, None), "now"),
        ("ended", ("waits", 1, "stop", 0.0), "request_id"),
        ("ended", ("runs", -1, "stop", 0.0), "num_tokens"),
        ("ended", ("runs", 1, "", 0.0), "reason"),
        ("ended", ("runs", 1, None, 0.0), "reason"),
        ("ended", ("runs", 1, "stop", "now"), "now"),
        ("cancel", ("runs",), "request_id"),
        ("cancel", ("nobody",), "request_id"),
        ("end_session", ([],), "session"),
        ("end_session", ("s", ""), "salt"),
        ("why", ("nobody",), "request_id"),
    ],
)
def test_a_call_that_raises_has_changed_nothing(call: str, arguments: tuple[Any, ...], name: str) -> None:
    gate = SessionGate(1000)
    enter(gate, "runs", 900)
    gate.ask("waits", "waits", None, 900, 900, 1.0)
    before = gate.stats, gate.members(), gate.waiting(), gate.why("waits"), gate.release(1, 0.05, 1.0)
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
        getattr(gate, call)(*arguments)
    assert before == (gate.stats, gate.members(), gate.waiting(), gate.why("waits"), gate.release(1, 0.05, 1.0))
