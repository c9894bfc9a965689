"""What hints can cost at most: time on the engine's thread, memory, and errors."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.hints_help import PROMPT, action, envelope, make, make_manager, run, say

from kvblocks import InvalidArgumentError, KVCacheManager


@pytest.mark.parametrize(
    ("max_tokens", "spans", "outcome"),
    [
        (40 + 40, [[0, 40, "a"]], "accepted"),
        (40 + 39, [[0, 40, "a"]], "rejected"),
        (40 + 40 + 8, [[0, 40, "a"], [3, 5, "b"]], "accepted"),  # two tokens of two blocks
        (40 + 40 + 7, [[0, 40, "a"], [3, 5, "b"]], "rejected"),
        (40 + 8, [[0, 1, "k" * 256]], "accepted"),  # a long key is written to each block, too
        (40 + 7, [[0, 1, "k" * 256]], "rejected"),
        (40 + 4, [[0, 1, "k" * 255]], "accepted"),
    ],
)
@pytest.mark.parametrize("kind", ["pin", "prefetch"])
def test_spans_count_the_blocks_that_they_touch(kind: str, max_tokens: int, spans: Any, outcome: str) -> None:
    manager = make_manager(64)
    run(manager, extra_keys=[tuple(span) for span in spans])
    answer = say(make(manager, max_tokens=max_tokens), kind, token_ids=PROMPT, extra_keys=spans)
    assert answer["outcome"] == outcome, answer
    if outcome == "rejected":
        assert "extra_keys: expected spans whose blocks have at most" in answer["reason"]


def test_prefixes_are_told_apart_by_the_spans_of_their_full_blocks() -> None:
    executor = make(max_pinned_blocks=64)
    long = [*PROMPT, 1, 2]
    assert say(executor, "pin", token_ids=long, extra_keys=[[30, 34, "b"], [2, 3, "a"], [40, 42, "tail"]])["pin_id"]
    for other in ([[2, 3, "a"]], [[2, 3, "a"], [30, 33, "b"]], [[2, 3, b"a"], [30, 34, "b"]]):
        assert say(executor, "release", token_ids=PROMPT, extra_keys=other)["outcome"] == "missing"
    same = say(executor, "release", token_ids=PROMPT, extra_keys=[[2, 3, "a"], [30, 34, "b"]])
    assert (same["outcome"], same["num_pins"]) == ("accepted", 1)


HUGE = pytest.param(10**400, id="10**400")


@pytest.mark.parametrize("kind", ["pin", "expire", "prefetch"])
@pytest.mark.parametrize("seconds", [HUGE, 1e308])
def test_more_seconds_than_a_float_holds_are_clipped(kind: str, seconds: float) -> None:
    executor = make()
    named = action("pin", {"token_ids": PROMPT, "ttl_s": 5}, "first")
    sent = envelope(named, action(kind, {"token_ids": PROMPT, "ttl_s": seconds}, "much"), action("retain", {}, "last"))
    first, much, last = executor.carry_out(sent, None, 1e308).answers
    assert (first.outcome, last.outcome) == ("deferred", "rejected")
    if kind == "prefetch":
        assert much.outcome == "missing"
    else:
        assert (much.outcome, much.numbers["ttl_s"]) == ("clipped", 3600.0)


@pytest.mark.parametrize("now", [HUGE, float("inf"), float("nan"), "1"])
def test_a_time_is_one_that_a_float_holds(now: Any) -> None:
    executor = make()
    with pytest.raises(InvalidArgumentError, match="now: expected a finite number"):
        executor.carry_out(envelope(action("pin", {"token_ids": PROMPT})), None, now)
    with pytest.raises(InvalidArgumentError, match="now: expected a finite number"):
        executor.step(now)
    assert executor.stats.num_pins == 0


NUMBERS = st.sampled_from([0, 1, 4, 8, -1, 10**400, -(10**400), 2**31, 2**32, 2**63, 2**64, 1e308, -0.0, 0.5])
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TOKENS = st.just(PROMPT) | st.just(PROMPT[:8]) | st.lists(NUMBERS, max_size=9)
SPANS = st.lists(st.tuples(NUMBERS, NUMBERS, st.text(max_size=2)).map(list) | PLAIN, max_size=3)
LIKELY = {
    "token_ids": TOKENS,
    "extra_keys": SPANS,
    "block_hashes": st.lists(NUMBERS | st.text("0af", max_size=8), max_size=3),
    "ttl_s": NUMBERS | st.just(10**400),
    "priority": NUMBERS,
    "pin_id": st.sampled_from(["hint-1", "hint-2"]),
    "action_id": st.sampled_from("ab"),
    "message_id": st.sampled_from("mn"),
    "cache_salt": st.none(),
    "lora_name": st.text(max_size=2),
    "odd": PLAIN,
}
KINDS = ["pin", "release", "expire", "prefetch", "retain", "kv.pin", "kv.fetch"]
ACTIONS = st.fixed_dictionaries(
    {
        "action_id": st.sampled_from("abc"),
        "action_type": st.sampled_from(KINDS),
        "action_version": st.just("1.0"),
        "payload": st.lists(st.sampled_from(sorted(LIKELY)), max_size=3, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: LIKELY[name] | PLAIN for name in names})
        ),
    }
)
ODD_ACTIONS = st.fixed_dictionaries({}, optional=dict.fromkeys(action("", {}), PLAIN))


@given(
    st.lists(ACTIONS | ODD_ACTIONS | PLAIN, max_size=4),
    st.sampled_from(["m", "n"]) | PLAIN,
    st.sampled_from(["0.1"] * 4 + [0.1, None]),
    PLAIN,
)
def test_any_json_is_answered_action_by_action_or_refused_as_a_whole(
    actions: list[Any], message_id: Any, version: Any, now: Any
) -> None:
    manager = KVCacheManager(16, 4, debug=True)
    run(manager)
    executor = make(manager)
    for time in (0.0, now):
        sent = {"protocol_version": version, "message_id": message_id, "actions": actions}
        before = executor.stats
        try:
            answers = executor.carry_out(sent, None, time)
        except InvalidArgumentError:
            assert executor.stats == before
            continue
        assert len(answers.answers) == len(actions)
        json.dumps(answers.to_dict()).encode()
    executor.close()
    assert manager.num_free_blocks == 16 and not manager.pins


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "payload",
    [
        {LONG: 1},
        dict.fromkeys([f"{LONG[:50]}{index}" for index in range(200)]),
        {"token_ids": LONG},
        {"token_ids": [LONG] * 8},
        {"token_ids": PROMPT, "priority": LONG},
        {"token_ids": PROMPT, "ttl_s": [LONG]},
        {"token_ids": PROMPT, "extra_keys": [[0, LONG, LONG]]},
        {"token_ids": PROMPT, "extra_keys": [LONG]},
        {"token_ids": PROMPT, "cache_salt": {LONG: LONG}},
        {"token_ids": PROMPT, "lora_name": "\ud800" + LONG},
        {"block_hashes": [LONG]},
        {"block_hashes": {LONG: 1}},
    ],
)
def test_no_answer_keeps_what_was_sent(payload: dict[str, Any]) -> None:
    executor = make()
    sent = envelope(action("pin", payload))
    (answer,) = executor.carry_out(sent, None, 0.0).answers
    assert answer.outcome == "rejected"
    assert len(json.dumps(answer.to_dict())) < 2000
    assert executor.carry_out(sent, None, 1.0).answers == (answer,)


def test_a_reason_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise InvalidArgumentError(LONG)

    executor = make()
    monkeypatch.setattr(executor, "_handler_of", refuse)
    assert say(executor, "pin")["reason"] == f"{LONG[:999]}…"
