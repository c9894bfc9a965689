"""Hints carried out: what each action does, its answer, its limits, and that it is done once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.hints_help import PROMPT, action, envelope, holds, make, make_manager, run, say, spill

from kvblocks import InvalidArgumentError, KVBlocksError, KVCacheManager, Sequence
from kvblocks.wire.hints import HintExecutor, HintLimits, HintStats

KEYS: dict[str, Any] = {"lora": "ad", "extra_keys": [(2, 11, "image"), (30, 43, b"\x01\xff")]}
KEYED = {"lora_name": "ad", "extra_keys": [[2, 11, "image"], [30, 43, b"\x01\xff"]]}
LONG = list(range(44))


# Pins.


def test_a_pin_keeps_what_would_be_evicted() -> None:
    manager = make_manager(64)
    run(manager)
    answer = say(make(manager), "pin", token_ids=PROMPT, ttl_s=9)
    assert answer == {
        "outcome": "accepted", "reason": None, "pin_id": "hint-1",
        "num_blocks": 10, "num_held_blocks": 10, "ttl_s": 9.0,
    }  # fmt: skip
    crowd = Sequence("crowd", range(1000, 1000 + 4 * 54))
    assert manager.allocate_slots(crowd) is not None
    manager.abort(crowd, 0)
    assert holds(manager, PROMPT) == 40


def test_what_is_not_cached_yet_is_deferred_and_answered_when_it_is() -> None:
    manager = make_manager(64)
    executor = make(manager)
    sent = envelope(action("pin", {"token_ids": PROMPT}))
    (first,) = executor.carry_out(sent, None, 0.0).answers
    assert (first.outcome, first.numbers["num_held_blocks"]) == ("deferred", 0)
    assert executor.step(1.0) == []
    run(manager, tokens=PROMPT[:24])
    assert executor.step(2.0) == []
    run(manager)
    (later,) = executor.step(3.0)
    assert (later.tenant, later.message_id, later.answers[0].outcome) == (None, "m", "accepted")
    assert later.answers[0].numbers["num_held_blocks"] == 10
    assert executor.carry_out(sent, None, 4.0).answers == later.answers  # asked again, that is the answer
    assert executor.step(5.0) == [] and len(manager.pins) == 1


def test_a_deferred_pin_that_ends_before_is_answered_too() -> None:
    executor = make()
    assert say(executor, "pin", token_ids=PROMPT, ttl_s=5)["outcome"] == "deferred"
    assert executor.next_time == 5.0
    (later,) = executor.step(5.0)
    assert (later.answers[0].outcome, executor.next_time) == ("missing", None)


def test_a_pin_longer_than_the_budget_is_clipped_and_one_without_any_left_is_rejected() -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 12)
    assert say(executor, "pin", token_ids=PROMPT)["outcome"] == "accepted"
    clipped = say(executor, "pin", token_ids=PROMPT)
    assert (clipped["outcome"], clipped["num_blocks"]) == ("clipped", 2)
    assert "2 of 10 blocks" in clipped["reason"]
    refused = say(executor, "pin", token_ids=PROMPT)
    assert refused["outcome"] == "rejected" and "budget" in refused["reason"]
    assert say(executor, "pin", token_ids=PROMPT, tenant="other")["outcome"] == "deferred"  # that one has its own


def test_all_pins_together_keep_to_the_managers_budget() -> None:
    manager = KVCacheManager(64, 4, pin_budget=0.25, debug=True)
    executor = make(manager, 12)
    assert manager.pins.max_blocks == 16
    assert [say(executor, "pin", token_ids=PROMPT, tenant=name).get("num_blocks") for name in "abc"] == [10, 6, None]


def test_budgets_of_tenants() -> None:
    executor = HintExecutor(make_manager(64), max_pinned_blocks=2, budgets={"big": 5, None: 0})
    told = [say(executor, "pin", token_ids=PROMPT, tenant=name).get("num_blocks") for name in ("big", "x", None)]
    assert told == [5, 2, None]


def test_windows_count_towards_a_budget() -> None:
    from kvblocks import FullAttention, SlidingWindow

    manager = KVCacheManager(64, groups=[FullAttention(4), SlidingWindow(4, 9)], debug=True)
    run(manager)
    executor = make(manager, 8)
    answer = say(executor, "pin", token_ids=PROMPT)
    assert (answer["outcome"], next(iter(manager.pins)).num_wanted_blocks) == ("clipped", 8)
    assert answer["num_blocks"] < 8 and len(manager.pins) == 1
    tight = KVCacheManager(64, groups=[FullAttention(4), SlidingWindow(4, 9)], pin_budget=0.1, debug=True)
    assert say(make(tight, 20), "pin", token_ids=PROMPT)["outcome"] == "clipped"
    assert 0 < next(iter(tight.pins)).num_wanted_blocks <= 6


@pytest.mark.parametrize(("given", "told"), [({"priority": 100}, "priority 99"), ({"ttl_s": 7200}, "3600 s")])
def test_more_than_is_allowed_is_clipped(given: dict[str, Any], told: str) -> None:
    executor = make()
    answer = say(executor, "pin", token_ids=PROMPT, **given)
    assert answer["outcome"] == "clipped" and told in answer["reason"]
    assert executor.next_time == 3600.0


def test_no_pin_of_a_hint_keeps_a_request_out() -> None:
    manager = KVCacheManager(16, 4, pin_budget=1.0, debug=True)
    run(manager, tokens=range(64))
    executor = make(manager, 16)
    assert say(executor, "pin", token_ids=list(range(64)), priority=100)["num_held_blocks"] == 16
    assert manager.allocate_slots(Sequence("all", range(100, 164))) is not None


def test_retaining_waits_for_sessions() -> None:
    answer = say(make(), "retain", token_ids=PROMPT)
    assert answer["outcome"] == "rejected" and "sessions" in answer["reason"]


# Names.


def test_a_prefix_is_named_by_tokens_and_keys() -> None:
    manager = make_manager(128)
    run(manager, tokens=LONG, salt="t", **KEYS)
    executor = make(manager, 100)
    assert say(executor, "pin", tenant="t", token_ids=LONG, **KEYED)["outcome"] == "accepted"
    assert say(executor, "pin", tenant="t", token_ids=LONG, cache_salt="t", **KEYED)["outcome"] == "accepted"
    assert say(executor, "pin", tenant="t", token_ids=LONG)["num_held_blocks"] == 0
    assert say(executor, "pin", tenant="t", token_ids=LONG, **{**KEYED, "lora_name": "b"})["num_held_blocks"] == 0


@pytest.mark.parametrize("kind", ["text", "bytes", "unsigned", "signed"])
def test_a_prefix_is_named_by_hashes(kind: str) -> None:
    manager = make_manager(64)
    run(manager, tokens=LONG, salt="t", **KEYS)
    digests = manager.inspect.block_hashes(Sequence("x", LONG, salt="t", **KEYS))
    low = [int.from_bytes(digest[-8:], "big") for digest in digests]
    names: dict[str, list[Any]] = {
        "text": [digest.hex() for digest in digests],
        "bytes": digests,
        "unsigned": low,
        "signed": [number - 2**64 * (number >= 2**63) for number in low],
    }
    executor = make(manager, 100)
    assert say(executor, "pin", tenant="t", block_hashes=names[kind])["num_held_blocks"] == 11
    assert say(executor, "pin", tenant="t", block_hashes=names[kind][3:4])["num_held_blocks"] == 4
    (whole, part) = manager.pins
    assert whole.sequence.token_ids()[:44] == LONG and part.sequence.token_ids()[:16] == LONG[:16]
    assert say(executor, "release", tenant="t", token_ids=LONG, lora_name="ad")["outcome"] == "missing"
    assert say(executor, "release", tenant="t", token_ids=LONG, **KEYED) == {
        "outcome": "accepted", "reason": None, "num_pins": 1, "num_prefetches": 0,
    }  # fmt: skip
    unknown = [names[kind][0], names[kind][1], b"\0" * len(digests[0])]
    clipped = say(executor, "pin", tenant="t", block_hashes=unknown)
    assert (clipped["outcome"], clipped["num_blocks"]) == ("clipped", 2)
    assert say(executor, "pin", tenant="t", block_hashes=unknown[2:])["outcome"] == "missing"


def test_hashes_are_of_one_prefix_and_of_one_block_each() -> None:
    manager = KVCacheManager(64, 4, hash_algorithm=lambda preimage: bytes([sum(preimage) % 2]) * 8)
    run(manager)
    answer = say(make(manager), "pin", block_hashes=[0])
    assert answer["outcome"] == "rejected" and "two share" in answer["reason"]
    manager = make_manager(64)
    run(manager)
    run(manager, tokens=range(100, 140))
    hashes = [manager.inspect.block_hashes(Sequence("x", range(start, start + 40)))[-1] for start in (0, 100)]
    answer = say(make(manager), "pin", block_hashes=hashes)
    assert answer["outcome"] == "rejected" and "one prefix" in answer["reason"]


def test_what_was_cached_before_a_reset_has_no_name() -> None:
    manager = make_manager(64)
    run(manager)
    digests = manager.inspect.block_hashes(Sequence("x", PROMPT))
    manager.reset_prefix_cache()
    assert say(make(manager), "pin", block_hashes=digests)["outcome"] == "missing"


def test_nothing_of_another_tenant_is_known() -> None:
    manager = make_manager(64)
    run(manager, salt="ann")
    digests = [digest.hex() for digest in manager.inspect.block_hashes(Sequence("x", PROMPT, salt="ann"))]
    executor = make(manager, 100)
    assert say(executor, "pin", tenant="ann", token_ids=PROMPT)["pin_id"] == "hint-1"
    for tenant in (None, "bob"):
        for kind in ("pin", "prefetch", "release", "expire"):
            for name in ({"token_ids": PROMPT, "cache_salt": "ann"}, {"block_hashes": digests}):
                answer = say(executor, kind, tenant=tenant, **name)
                unknown = say(executor, kind, tenant=tenant, **{**name, "cache_salt": "nobody"})
                assert answer["outcome"] == "missing"
                if "token_ids" in name:
                    assert answer == unknown
        for name in ({"pin_id": "hint-1"}, {"action_id": "a"}):
            assert say(executor, "release", tenant=tenant, **name)["outcome"] == "missing"
    assert say(executor, "pin", tenant="bob", token_ids=PROMPT, cache_salt=None)["outcome"] == "missing"
    assert [pin.num_held_blocks for pin in manager.pins] == [10]


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("pin", {}, "expected either token_ids or block_hashes, got []"),
        ("pin", {"token_ids": PROMPT, "block_hashes": [1]}, "expected either token_ids or block_hashes"),
        ("pin", {"block_hashes": [1], "lora_name": "x"}, "expected block_hashes without ['lora_name']"),
        ("pin", {"token_ids": PROMPT, "ttl": 3}, "payload: expected fields of"),
        ("pin", {"token_ids": PROMPT, "ttl_s": 0}, "ttl_s: expected a number of seconds, more than 0, got 0"),
        ("pin", {"token_ids": PROMPT, "ttl_s": -1}, "ttl_s: expected a number of seconds, at least 0, got -1"),
        ("pin", {"token_ids": PROMPT, "ttl_s": float("nan")}, "ttl_s: expected a number of seconds, got nan"),
        (
            "pin",
            {"token_ids": PROMPT, "ttl_s": float("inf")},
            "ttl_s: expected a number of seconds, at least 0, got inf",
        ),
        ("pin", {"token_ids": PROMPT, "ttl_s": "9"}, "ttl_s: expected a number of seconds, got '9'"),
        ("pin", {"token_ids": PROMPT, "priority": 101}, "priority: expected an int from 0 to 100, got 101"),
        ("pin", {"token_ids": PROMPT, "priority": True}, "priority: expected an int from 0 to 100, got True"),
        ("pin", {"token_ids": [1, 2, 3]}, "expected at least one full block of 4 tokens, got 3 tokens"),
        ("pin", {"token_ids": []}, "expected at least one, got none"),
        ("pin", {"token_ids": [-1] * 8}, "token ids: expected"),
        ("pin", {"token_ids": ["a"] * 8}, "token ids: expected"),
        ("pin", {"token_ids": "abc"}, "token_ids: expected a list of token ids, got 'abc'"),
        ("pin", {"token_ids": [1] * 51}, "token_ids: expected at most 50 more, got 51"),
        ("pin", {"token_ids": PROMPT, "cache_salt": 7}, "cache_salt: expected a non-empty str or None, got 7"),
        ("pin", {"token_ids": PROMPT, "lora_name": ""}, "lora_name: expected a non-empty str or None, got ''"),
        ("pin", {"token_ids": PROMPT, "extra_keys": 7}, "extra_keys: expected a list of [start, end, key], got 7"),
        ("pin", {"token_ids": PROMPT, "extra_keys": [[0, 99, "k"]]}, "extra_keys: end: expected an int from 1 to 40"),
        ("pin", {"block_hashes": []}, "block_hashes: expected at least one, got none"),
        ("pin", {"block_hashes": 7}, "block_hashes: expected a list of hashes, got 7"),
        ("pin", {"block_hashes": ["xyz"]}, "block_hashes: expected hexadecimal digits, got 'xyz'"),
        ("pin", {"block_hashes": [2**64]}, "block_hashes: expected an integer of 64 bits"),
        ("pin", {"block_hashes": [None]}, "block_hashes: expected an integer of 64 bits"),
        ("pin", {"token_ids": {1, 2}}, "payload: expected plain values, as JSON has them"),
        ("pin", {"pin_id": "hint-1"}, "payload: expected fields of"),
        ("release", {}, "expected either token_ids or block_hashes"),
        ("release", {"message_id": "m"}, "expected a pin_id, an action_id or a prefix, got ['message_id']"),
        ("release", {"pin_id": "x", "token_ids": PROMPT}, "expected a pin_id, an action_id or a prefix"),
        ("release", {"pin_id": "x", "action_id": "y"}, "expected a pin_id, an action_id or a prefix"),
        ("release", {"pin_id": "x", "ttl_s": 1}, "payload: expected fields of"),
        ("expire", {"pin_id": "hint-1", "ttl_s": -1}, "ttl_s: expected a number of seconds, at least 0"),
        ("prefetch", {"token_ids": PROMPT, "priority": 1}, "payload: expected fields of"),
        ("prefetch", {"token_ids": PROMPT, "ttl_s": 0}, "ttl_s: expected a number of seconds, more than 0"),
        ("kv.fetch", {}, "action_type: expected one of"),
        ("share", {}, "action_type: expected one of"),
    ],
)
def test_what_is_wrong_with_an_action_is_said_and_the_others_are_carried_out(
    kind: str, payload: dict[str, Any], reason: str
) -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 32, max_tokens=100)
    sent = envelope(
        action("pin", {"token_ids": PROMPT, "ttl_s": 5}, "first"),
        action(kind, payload, "bad"),
        action("pin", {"token_ids": [*range(10)]}, "last"),
    )
    if "at most 50" in reason:
        sent["actions"][0]["payload"]["token_ids"] = PROMPT + [0] * 10
    first, bad, last = executor.carry_out(sent, None, 0.0).answers
    assert (bad.action.action_id, bad.outcome) == ("bad", "rejected")
    assert reason in (bad.reason or ""), bad.reason
    assert first.outcome in ("accepted", "deferred") and last.numbers["num_held_blocks"] == 2
    assert len(manager.pins) == 2


def test_another_version_of_an_action_is_rejected() -> None:
    sent = {**action("pin", {"token_ids": PROMPT}), "action_version": "2.0"}
    (answer,) = make().carry_out(envelope(sent), None, 0.0).answers
    assert (answer.outcome, answer.reason) == ("rejected", "action_version: expected '1.0', got '2.0'")


# Release and expire.


@pytest.mark.parametrize("name", ["pin_id", "action", "message", "prefix"])
def test_what_was_pinned_is_released(name: str) -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 100)
    sent = [action("pin", {"token_ids": PROMPT}, "one"), action("pin", {"token_ids": PROMPT[:20]}, "two")]
    executor.carry_out(envelope(*sent, message_id="before"), None, 0.0)
    names: dict[str, dict[str, Any]] = {
        "pin_id": {"pin_id": "hint-1"},
        "action": {"action_id": "one"},
        "message": {"action_id": "one", "message_id": "before"},
        "prefix": {"token_ids": [*PROMPT, 1, 2]},  # full blocks count
    }
    assert say(executor, "release", action_id="one", message_id="another")["outcome"] == "missing"
    assert say(executor, "release", token_ids=PROMPT[:36])["outcome"] == "missing"
    assert say(executor, "release", **names[name])["num_pins"] == 1
    assert [pin.num_blocks for pin in manager.pins] == [5]
    assert say(executor, "release", **names[name])["outcome"] == "missing"
    assert holds(manager, PROMPT) == 40


def test_a_pin_ends_when_expire_says() -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 100)
    for number in range(3):
        assert say(executor, "pin", token_ids=PROMPT, ttl_s=10)["pin_id"] == f"hint-{number + 1}"
    assert say(executor, "expire", pin_id="hint-1", ttl_s=20, now=5.0)["ttl_s"] == 20.0
    assert say(executor, "expire", pin_id="hint-2", now=5.0)["num_pins"] == 1
    clipped = say(executor, "expire", pin_id="hint-3", ttl_s=1e9, now=5.0)
    assert (clipped["outcome"], clipped["ttl_s"]) == ("clipped", 3600.0)
    assert len(manager.pins) == 2
    executor.step(24.9)
    assert (len(manager.pins), executor.next_time) == (2, 25.0)
    executor.step(25.0)
    assert (len(manager.pins), executor.next_time) == (1, 3605.0)


def test_a_pin_that_somebody_else_ended_is_forgotten() -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager)
    say(executor, "pin", token_ids=PROMPT)
    manager.pins.unpin(next(iter(manager.pins)))
    assert executor.step(0.0) == [] and executor.stats.num_pins == 0
    assert say(executor, "release", pin_id="hint-1")["outcome"] == "missing"


# Once, and bounded.


def test_what_comes_again_is_answered_as_before_and_done_once() -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 100)
    sent = envelope(action("pin", {"token_ids": PROMPT}), action("pin", {"token_ids": PROMPT}, "b"))
    first = executor.carry_out(sent, None, 0.0)
    assert executor.carry_out(sent, None, 1.0) == first
    reordered = envelope(*[dict(reversed(one.items())) for one in sent["actions"]])
    assert executor.carry_out(reordered, None, 1.0) == first
    assert (len(manager.pins), executor.stats.num_repeated) == (2, 4)
    other = executor.carry_out(envelope(action("pin", {"token_ids": PROMPT[:20]})), None, 1.0)
    assert other.answers[0].outcome == "rejected" and "another action_id" in (other.answers[0].reason or "")
    assert executor.carry_out(sent, None, 1.0) == first  # that one didn't take its place
    assert len(executor.carry_out(sent, "tenant", 1.0).answers) == 2 and len(manager.pins) == 4  # another one's ids


def test_so_many_answers_are_kept() -> None:
    manager = make_manager(64)
    executor = make(manager, 100, max_remembered=2)
    sent = [envelope(action("pin", {"token_ids": PROMPT}), message_id=f"{number}") for number in range(3)]
    for one in sent:
        executor.carry_out(one, None, 0.0)
    for one in sent[1:]:
        executor.carry_out(one, None, 0.0)
    assert len(manager.pins) == 3
    executor.carry_out(sent[0], None, 0.0)
    assert len(manager.pins) == 4  # it was forgotten


def test_so_many_pins_stand() -> None:
    executor = make(None, 100, max_pins=2)
    told = [say(executor, "pin", token_ids=PROMPT[:8])["outcome"] for _ in range(3)]
    assert told == ["deferred", "deferred", "rejected"]


def test_so_many_tenants_are_known() -> None:
    executor = make(None, 100, max_tenants=2)
    assert say(executor, "pin", token_ids=PROMPT, tenant="a", ttl_s=5)["outcome"] == "deferred"
    assert say(executor, "retain", tenant="b")["outcome"] == "rejected"
    assert say(executor, "pin", token_ids=PROMPT, tenant="c")["outcome"] == "deferred"  # b has nothing that stands
    refused = say(executor, "pin", token_ids=PROMPT, tenant="b")
    assert refused["outcome"] == "rejected" and "at most 2 tenants" in refused["reason"]
    assert say(executor, "pin", token_ids=PROMPT, tenant="b", now=5.0)["outcome"] == "deferred"  # a's is over


def test_later_answers_that_nobody_fetches_are_counted() -> None:
    executor = make(None, 100, max_remembered=1)
    for number in range(3):
        say(executor, "pin", token_ids=PROMPT[: 8 + 4 * number], ttl_s=5)
    assert len(executor.step(5.0)) == 1
    assert executor.stats.num_dropped_answers == 2
    assert executor.stats.num_answers == {"deferred": 3, "missing": 3}


def test_what_is_no_envelope_changes_nothing() -> None:
    manager = make_manager(64)
    executor = make(manager, max_actions=1)
    good = action("pin", {"token_ids": PROMPT})
    for bad in (None, envelope(good, good), {**envelope(good), "protocol_version": "9"}):
        with pytest.raises(InvalidArgumentError):
            executor.carry_out(bad, None, 0.0)
    for now in (None, float("nan"), float("inf"), "1"):
        with pytest.raises(InvalidArgumentError, match="now: expected a finite number"):
            executor.carry_out(envelope(good), None, now)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="now: expected a finite number"):
            executor.step(now)  # type: ignore[arg-type]
    for tenant in ("", 7):
        with pytest.raises(InvalidArgumentError, match="tenant: expected a non-empty str or None"):
            executor.carry_out(envelope(good), tenant, 0.0)  # type: ignore[arg-type]
    assert list(manager.pins) == [] and executor.stats == HintStats()


def test_a_closed_one_has_let_go_of_all() -> None:
    manager = make_manager(64)
    run(manager)
    executor = make(manager, 100)
    say(executor, "pin", token_ids=PROMPT)
    say(executor, "pin", token_ids=PROMPT, tenant="t")
    executor.close()
    executor.close()
    assert (list(manager.pins), manager.num_free_blocks) == ([], 64)
    for call in (lambda: executor.step(0.0), lambda: say(executor, "retain")):
        with pytest.raises(KVBlocksError, match="expected an executor that isn't closed"):
            call()


def test_what_a_tenant_sent_is_forgotten() -> None:
    manager = make_manager(64)
    run(manager, salt="t")
    executor = make(manager, 100)
    sent = envelope(action("pin", {"token_ids": PROMPT}), action("pin", {"token_ids": [9] * 8}, "b"))
    say(executor, "pin", token_ids=PROMPT, tenant="u")
    assert [one.outcome for one in executor.carry_out(sent, "t", 0.0).answers] == ["accepted", "deferred"]
    say(executor, "pin", token_ids=[8] * 8, tenant="t", ttl_s=5)
    executor.carry_out(envelope(message_id="later"), "t", 5.0)  # that one is over, and its answer waits
    told = executor.stats.num_answers
    executor.forget("t")
    executor.forget("nobody")
    assert executor.stats.num_answers == told
    assert [pin.sequence.salt for pin in manager.pins] == ["u"]
    assert executor.step(9999.0)[0].tenant == "u"
    executor.carry_out(sent, "t", 9999.0)
    assert len(manager.pins) == 2  # it is new again
    with pytest.raises(InvalidArgumentError, match="tenant: expected"):
        executor.forget("")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_pinned_blocks": -1}, "max_pinned_blocks: expected an int of at least 0"),
        ({"max_pinned_blocks": 1, "budgets": {"": 1}}, "budgets: expected a non-empty str"),
        ({"max_pinned_blocks": 1, "budgets": {"a": -1}}, "budgets: expected an int"),
        ({"max_pinned_blocks": 1, "limits": 7}, "limits: expected a HintLimits or None, got 7"),
    ],
)
def test_bad_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        HintExecutor(make_manager(8), **options)
    with pytest.raises(InvalidArgumentError, match="manager: expected a KVCacheManager, got None"):
        HintExecutor(None, max_pinned_blocks=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_actions", 0), ("max_tokens", True), ("max_priority", 100), ("max_ttl_s", 0), ("max_ttl_s", float("inf")),
        pytest.param("max_ttl_s", 10**400, id="huge"),
        ("max_prefetch_share", 1.5), ("reserved_share", float("nan")), ("may_evict", 1), ("max_pins", "7"),
    ],
)  # fmt: skip
def test_bad_limits(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
        HintLimits(**{name: value})


@given(st.data())
def test_any_payload_is_answered(data: st.DataObject) -> None:
    odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
    some = (
        odd
        | st.lists(odd | st.lists(odd, max_size=3), max_size=6)
        | st.dictionaries(st.text(max_size=3), odd, max_size=2)
    )
    fields = [
        "token_ids",
        "block_hashes",
        "cache_salt",
        "lora_name",
        "extra_keys",
        "ttl_s",
        "priority",
        "pin_id",
        "action_id",
    ]
    payload = data.draw(st.dictionaries(st.sampled_from(fields), some, max_size=4))
    if data.draw(st.booleans()):
        payload["token_ids"] = PROMPT
    kind = data.draw(st.sampled_from(["pin", "release", "expire", "prefetch"]))
    manager = KVCacheManager(16, 4, debug=True)
    run(manager)
    executor = make(manager)
    assert say(executor, kind, **payload)["outcome"] in {"accepted", "clipped", "deferred", "rejected", "missing"}
    executor.close()
    assert manager.num_free_blocks == 16
    spill(manager)


def test_without_a_cache_pins_are_rejected() -> None:
    executor = make(KVCacheManager(16, 4, enable_caching=False))
    answer = say(executor, "pin", token_ids=PROMPT)
    assert answer["outcome"] == "rejected" and "enable_caching=True" in answer["reason"]
    assert say(executor, "prefetch", token_ids=PROMPT)["outcome"] == "missing"


def test_what_the_callers_own_hash_function_raises_comes_out_and_what_was_done_is_not_done_again() -> None:
    def sometimes(preimage: bytes) -> bytes:
        if is_broken:
            raise RuntimeError("mine")
        return bytes(8)

    is_broken = False
    manager = KVCacheManager(64, 4, hash_algorithm=sometimes, debug=True)
    run(manager)
    executor = make(manager)
    sent = envelope(action("pin", {"token_ids": PROMPT[:8]}), action("pin", {"block_hashes": ["00" * 8]}, "b"))
    is_broken = True
    with pytest.raises(RuntimeError, match="mine"):
        executor.carry_out(sent, None, 0.0)
    is_broken = False
    assert [one.outcome for one in executor.carry_out(sent, None, 0.0).answers] == ["accepted", "rejected"]
    assert len(manager.pins) == 1
