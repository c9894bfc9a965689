"""When a session gate is asked, and what it is told before: the rules that the engine, vLLM and `replay` share."""

from math import inf
from typing import Any

import pytest

from kvblocks import InvalidArgumentError
from kvblocks.gate import NUM_LOOKED_UP, GateRounds, SessionGate


def ask(rounds: GateRounds, request: int, num_tokens: int = 900, now: float = 0.0) -> bool:
    passes = rounds.gate.ask(request, f"session {request}", None, num_tokens, 0, now)
    rounds.note_change()
    return passes


@pytest.fixture
def rounds() -> GateRounds:
    """The rounds of a gate whose room the session of request 0 fills; requests 1 and 2 wait."""
    made = GateRounds(SessionGate(1000), seconds_per_token=1.0)
    assert not ask(made, 0)
    assert made.decide(0, 0.0, lambda _: 0) == [0]
    assert not ask(made, 1, now=1.0)
    assert not ask(made, 2, now=2.0)
    return made


def test_the_gate_learns_what_is_cached_now(rounds: GateRounds) -> None:
    """What is cached goes first: request 2, though it came later, and had nothing cached when it was asked about."""
    assert rounds.decide(1, 3.0, lambda request: 800 * (request == 2)) == []
    assert rounds.gate.waiting() == [2, 1]


def test_only_the_next_ones_are_looked_up(rounds: GateRounds) -> None:
    for request in range(3, NUM_LOOKED_UP + 10):
        ask(rounds, request, now=3.0)
    looked_up: list[int] = []
    rounds.decide(1, 4.0, lambda request: looked_up.append(request) or 0)
    assert looked_up == [*range(1, NUM_LOOKED_UP + 1)]


def test_a_round_is_due_only_when_it_may_change_something(rounds: GateRounds) -> None:
    assert rounds.wake_at == -inf
    assert rounds.is_due(1, 3.0)
    rounds.decide(1, 3.0, lambda _: 0)
    assert not rounds.is_due(1, 4.0)
    assert rounds.is_due(0, 4.0), "nothing is busy any more"
    rounds.gate.ended(0, 950, "tool_use", 5.0)
    rounds.note_change()
    assert rounds.is_due(1, 5.0)
    assert rounds.decide(0, 5.0, lambda _: 0) == []
    wake_at = rounds.wake_at
    assert wake_at is not None
    assert not rounds.is_due(0, wake_at - 0.5)
    assert rounds.is_due(0, wake_at)
    assert rounds.decide(0, wake_at, lambda _: 0) == [1]
    assert not rounds.is_due(1, wake_at), "what was just admitted is busy"


def test_the_mean_of_seconds_follows_slowly() -> None:
    rounds = GateRounds(SessionGate(1000))
    rounds.note_computed(100, 5.0)
    assert rounds.seconds_per_token == 0.05
    rounds.note_computed(100, 15.0)
    assert rounds.seconds_per_token == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1.0), "num_tokens"),
        ((1.5, 1.0), "num_tokens"),
        ((1, -1.0), "seconds"),
        ((1, float("inf")), "seconds"),
        ((1, "long"), "seconds"),
    ],
)
def test_a_time_that_is_none_changes_no_mean(arguments: tuple[Any, Any], name: str) -> None:
    rounds = GateRounds(SessionGate(1000), seconds_per_token=0.5)
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected"):
        rounds.note_computed(*arguments)
    assert rounds.seconds_per_token == 0.5


def test_after_a_restart_nobody_is_known(rounds: GateRounds) -> None:
    old = rounds.gate
    rounds.restart()
    assert rounds.gate is not old and rounds.gate.num_tokens == 1000
    assert rounds.gate.waiting() == [] and rounds.wake_at is None
    assert not ask(rounds, 1, now=9.0)
    assert rounds.decide(0, 9.0, lambda _: 0) == [1]


def test_after_a_restart_the_settings_are_the_same() -> None:
    rounds = GateRounds(SessionGate(1000, fill=0.5, max_overtakes=3, turn_s=60.0))
    rounds.restart()
    made = rounds.gate
    assert (made.num_tokens, made.fill, made.max_overtakes, made.turn_s) == (1000, 0.5, 3, 60.0)
