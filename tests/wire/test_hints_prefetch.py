"""Prefetches: a tier's blocks come to the device before a request needs them, and block nobody."""

from typing import Any

import pytest
from wire.hints_help import PROMPT, action, envelope, holds, make, make_manager, run, say, settle, spill

from kvblocks import FullAttention, KVCacheManager, Sequence, SlidingWindow, Tier
from kvblocks.wire.hints import HintExecutor


def stored(num_blocks: int = 64, tokens: Any = PROMPT, **keys: Any) -> KVCacheManager:
    """A manager whose host tier has a prompt that the device no longer has. All else is empty."""
    manager = make_manager(num_blocks)
    run(manager, tokens=tokens, **keys)
    settle(manager)
    settle(manager)
    spill(manager)
    assert holds(manager, tokens, **keys) == 0
    return manager


def answers_of(executor: HintExecutor, now: float) -> list[tuple[str, str]]:
    return [(given.message_id, answer.outcome) for given in executor.step(now) for answer in given.answers]


def test_what_is_stored_is_loaded_whole() -> None:
    manager = stored()
    executor = make(manager, max_prefetch_share=0.5)
    answer = say(executor, "prefetch", token_ids=PROMPT)
    assert answer == {"outcome": "accepted", "reason": None, "num_blocks": 10, "num_loading_blocks": 10}
    assert (executor.stats.num_loading, executor.next_time) == (1, None)
    settle(manager)
    assert executor.step(1.0) == []
    assert (executor.stats.num_loading, executor.stats.num_loaded_blocks) == (0, 10)
    assert (holds(manager, PROMPT), manager.num_free_blocks) == (40, 64)
    assert say(executor, "prefetch", token_ids=PROMPT)["num_loading_blocks"] == 0


def test_keys_and_salts_are_the_prefixs() -> None:
    keys: dict[str, Any] = {"salt": "t", "lora": "ad", "extra_keys": [(2, 11, "image"), (30, 40, b"\xff")]}
    manager = stored(**keys)
    executor = make(manager, max_prefetch_share=0.5)
    named = {"lora_name": "ad", "extra_keys": [[2, 11, "image"], [30, 40, b"\xff"]]}
    assert say(executor, "prefetch", token_ids=PROMPT, **named)["outcome"] == "missing"
    assert say(executor, "prefetch", token_ids=PROMPT, tenant="t")["outcome"] == "missing"
    assert say(executor, "prefetch", token_ids=PROMPT, tenant="t", **named)["num_loading_blocks"] == 10
    settle(manager)
    executor.step(0.0)
    assert holds(manager, PROMPT, **keys) == 40


def test_a_span_that_is_cut_finds_no_more_than_there_is_room_for() -> None:
    keys: dict[str, Any] = {"extra_keys": [(2, 39, "image")]}
    manager = stored(64, **keys)
    executor = make(manager, max_prefetch_share=0.05)  # three blocks
    answer = say(executor, "prefetch", token_ids=PROMPT, extra_keys=[[2, 39, "image"]])
    assert (answer["outcome"], answer["num_loading_blocks"]) == ("clipped", 3)
    assert answer["reason"] == "there is room for 3 of 10 blocks"
    assert manager.num_free_blocks == 61
    settle(manager)
    executor.step(0.0)
    assert holds(manager, PROMPT, **keys) == 12


def test_a_cut_that_finds_something_else_behind_it_waits() -> None:
    """A span that is cut needs tokens behind it; another prompt may have those."""
    like = [*PROMPT[:12], *[PROMPT[12] ^ 1] * 28]
    keys: dict[str, Any] = {"extra_keys": [(2, 39, "image")]}
    manager = make_manager(64)
    for name, tokens in (("one", PROMPT), ("like", like)):
        run(manager, name, tokens, **keys)
        settle(manager)
        settle(manager)
    spill(manager)
    executor = make(manager, max_prefetch_share=0.05)
    answer = say(executor, "prefetch", token_ids=PROMPT, extra_keys=[[2, 39, "image"]])
    assert (answer["outcome"], manager.num_free_blocks) == ("deferred", 64)


def test_what_waits_keeps_no_more_tokens_than_the_pool_has_room_for() -> None:
    manager = stored(32)
    manager.allocate_slots(Sequence("running", range(500, 500 + 4 * 32)))
    executor = make(manager)
    assert say(executor, "prefetch", token_ids=[*PROMPT, *range(2000, 4000)])["outcome"] == "deferred"
    ((_, standing),) = executor._standing()  # noqa: SLF001
    assert (standing.prefix.num_blocks, len(standing.prefix.packed(32)[0])) == (32, 32 * 4 + 1)


def test_what_was_there_already_does_not_count_as_loaded() -> None:
    manager = stored()
    run(manager, tokens=PROMPT[:16])
    executor = make(manager, max_prefetch_share=0.5)
    assert say(executor, "prefetch", token_ids=PROMPT)["num_loading_blocks"] == 6
    settle(manager)
    executor.step(0.0)
    assert executor.stats.num_loaded_blocks == 6


def test_a_part_that_is_nowhere_is_clipped_off() -> None:
    manager = stored()
    answer = say(make(manager, max_prefetch_share=0.5), "prefetch", token_ids=[*PROMPT, *range(900, 908)])
    assert (answer["outcome"], answer["reason"]) == ("clipped", "10 of 12 blocks are known here")


def test_without_tiers_what_the_device_has_is_all() -> None:
    manager = KVCacheManager(16, 4, debug=True)
    executor = make(manager)
    assert say(executor, "prefetch", token_ids=PROMPT)["outcome"] == "missing"
    run(manager)
    assert say(executor, "prefetch", token_ids=PROMPT)["outcome"] == "accepted"
    digests = manager.inspect.block_hashes(Sequence("x", PROMPT))
    assert say(executor, "prefetch", block_hashes=digests)["num_blocks"] == 10


def test_what_a_pin_gave_up_is_brought_back_by_its_name() -> None:
    manager = make_manager(32)
    run(manager)
    settle(manager)
    settle(manager)
    executor = make(manager, 10, max_prefetch_share=0.5)
    pin_id = say(executor, "pin", token_ids=PROMPT)["pin_id"]
    spill(manager)
    (pin,) = manager.pins
    assert pin.num_held_blocks == 0
    assert say(executor, "prefetch", pin_id=pin_id)["num_loading_blocks"] == 10
    settle(manager)
    executor.step(0.0)
    assert pin.num_held_blocks == 10


def test_nothing_is_evicted_for_it_unless_that_is_allowed() -> None:
    for may_evict in (False, True):
        manager = stored(32)
        run(manager, tokens=range(500, 500 + 4 * 30))  # two blocks are left that hold nothing
        settle(manager)
        executor = make(manager, max_prefetch_share=0.5, may_evict=may_evict)
        answer = say(executor, "prefetch", token_ids=PROMPT)
        assert answer["num_loading_blocks"] == (10 if may_evict else 2)
        assert (holds(manager, range(500, 620)) == 120) is not may_evict


def test_where_there_is_no_room_it_waits_and_is_answered_later() -> None:
    manager = stored(32)
    running = Sequence("running", range(500, 500 + 4 * 28))
    manager.allocate_slots(running)
    executor = make(manager, max_prefetch_share=1.0, reserved_share=0.125)  # four blocks are left, and stay
    sent = envelope(action("prefetch", {"token_ids": PROMPT, "ttl_s": 9}))
    assert executor.carry_out(sent, None, 0.0).answers[0].outcome == "deferred"
    assert (answers_of(executor, 1.0), executor.stats.num_waiting, executor.next_time) == ([], 1, 9.0)
    manager.abort(running, 0)
    assert answers_of(executor, 2.0) == [("m", "accepted")]
    assert executor.stats.num_waiting == 0
    assert executor.carry_out(sent, None, 3.0).answers[0].outcome == "accepted"
    settle(manager)
    assert answers_of(executor, 9.0) == [] and holds(manager, PROMPT) == 40


@pytest.mark.parametrize("how", ["time", "release", "expire"])
def test_what_waits_ends_with_an_answer(how: str) -> None:
    manager = stored(32)
    manager.allocate_slots(Sequence("running", range(500, 500 + 4 * 32)))
    executor = make(manager, max_prefetch_share=1.0, reserved_share=0.0)
    executor.carry_out(envelope(action("prefetch", {"token_ids": PROMPT, "ttl_s": 9})), None, 0.0)
    if how != "time":
        assert say(executor, how, action_id="a", message_id="m")["num_prefetches"] == 1
    assert answers_of(executor, 9.0) == [("m", "rejected")]
    assert executor.stats.num_waiting == 0


def test_so_many_wait() -> None:
    manager = stored(32)
    manager.allocate_slots(Sequence("running", range(500, 500 + 4 * 32)))
    executor = make(manager, max_deferred=2)
    told = [say(executor, "prefetch", token_ids=PROMPT)["outcome"] for _ in range(3)]
    assert told == ["deferred", "deferred", "rejected"]
    assert say(executor, "prefetch", token_ids=PROMPT, tenant="t")["outcome"] == "missing"


def test_so_many_load() -> None:
    prompts = [list(range(start, start + 8)) for start in (100, 200, 300)]
    manager = make_manager(64)
    for tokens in prompts:
        run(manager, tokens=tokens)
    settle(manager)
    settle(manager)
    spill(manager)
    executor = make(manager, max_deferred=2, max_prefetch_share=1.0)
    answers = [say(executor, "prefetch", token_ids=tokens) for tokens in prompts]
    assert [answer["outcome"] for answer in answers] == ["accepted", "accepted", "rejected"]
    assert answers[2]["reason"] == "expected at most 2 prefetches that wait or load"
    assert (executor.stats.num_loading, manager.num_free_blocks) == (2, 60)  # nothing began for the third
    settle(manager)
    executor.step(1.0)
    assert say(executor, "prefetch", token_ids=prompts[2])["num_loading_blocks"] == 2


def test_what_somebody_else_brings_is_waited_for() -> None:
    manager = stored()
    executor = make(manager, max_prefetch_share=0.5)
    assert say(executor, "prefetch", token_ids=PROMPT)["outcome"] == "accepted"
    assert say(executor, "prefetch", token_ids=PROMPT)["outcome"] == "deferred"
    assert executor.step(0.0) == []
    settle(manager)
    (later,) = executor.step(0.0)
    assert later.answers[0].numbers == {"num_blocks": 10, "num_loading_blocks": 0}
    assert executor.stats.num_loaded_blocks == 10


def test_a_request_hits_what_is_loading() -> None:
    manager = stored()
    executor = make(manager, max_prefetch_share=0.5)
    say(executor, "prefetch", token_ids=PROMPT)
    assert manager.get_computed_blocks(Sequence("request", [*PROMPT, 5])).pending_tokens == 40


def test_after_a_refused_call_nothing_begins_in_the_next_step() -> None:
    manager = stored(32)
    running = Sequence("running", range(500, 500 + 4 * 32))
    manager.allocate_slots(running)
    executor = make(manager, max_prefetch_share=0.5)
    say(executor, "prefetch", token_ids=PROMPT)
    assert manager.allocate_slots(Sequence("refused", range(300, 310))) is None
    manager.abort(running, 0)
    assert (executor.step(0.0), executor.stats.num_loading) == ([], 0)
    assert len(executor.step(0.0)) == 1 and executor.stats.num_loading == 1


def test_all_loads_together_keep_to_their_share() -> None:
    manager = make_manager(64)
    for start in (0, 100, 200):
        run(manager, str(start), range(start, start + 24))
        settle(manager)
    spill(manager)
    executor = make(manager, max_prefetch_share=0.125)
    told = [say(executor, "prefetch", token_ids=list(range(start, start + 24))) for start in (0, 100, 200)]
    assert [(one["outcome"], one.get("num_loading_blocks")) for one in told] == [
        ("accepted", 6), ("clipped", 2), ("deferred", None),
    ]  # fmt: skip


def test_a_load_that_fails_leaves_what_arrived_and_is_counted() -> None:
    manager = KVCacheManager(64, 4, tiers=[Tier("host", 64, 100, max_transfer_blocks=4)], debug=True)
    run(manager)
    settle(manager)
    settle(manager)
    spill(manager)
    executor = make(manager, max_prefetch_share=0.5)
    say(executor, "prefetch", token_ids=PROMPT)
    for number, transfer in enumerate(manager.tiers.take_transfers()):
        manager.tiers.complete(transfer, ok=number != 1)
    executor.step(0.0)
    stats = executor.stats
    assert (stats.num_failed_prefetches, stats.num_loaded_blocks, stats.num_loading) == (1, 4, 0)
    assert (holds(manager, PROMPT), manager.num_free_blocks) == (16, 64)


@pytest.mark.parametrize("how", ["release", "close"])
def test_a_load_is_given_up_while_its_transfer_runs(how: str) -> None:
    manager = stored()
    executor = make(manager, max_prefetch_share=0.5)
    say(executor, "prefetch", token_ids=PROMPT)
    (transfer,) = manager.tiers.take_transfers()
    if how == "close":
        executor.close()
    else:
        assert say(executor, "release", token_ids=PROMPT)["num_prefetches"] == 1
        assert executor.step(0.0) == []  # it was answered
    assert manager.num_free_blocks == 54  # its transfer writes there still
    manager.tiers.complete(transfer, ok=True)
    assert (manager.num_free_blocks, holds(manager, PROMPT)) == (64, 0)
    manager.check()


def test_a_reset_while_it_loads_harms_nothing() -> None:
    manager = stored()
    executor = make(manager, max_prefetch_share=0.5)
    say(executor, "prefetch", token_ids=PROMPT)
    manager.reset_prefix_cache()
    settle(manager)
    executor.step(0.0)
    assert (holds(manager, PROMPT), manager.num_free_blocks, executor.stats.num_loading) == (0, 64, 0)


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_windows(share: float) -> None:
    groups = [FullAttention(4), SlidingWindow(4, 9)]
    manager = KVCacheManager(64, groups=groups, tiers=[Tier("host", 128, 100, window_store_tokens=4)], debug=True)
    run(manager)
    for _ in range(4):
        settle(manager)
    spill_groups(manager)
    assert holds(manager, PROMPT) == 0
    executor = make(manager, max_prefetch_share=share)
    num_blocks = 10 if share == 0.5 else 6  # nine blocks: three for what a token sees in a window
    assert say(executor, "prefetch", token_ids=PROMPT)["num_loading_blocks"] == num_blocks
    (load,) = executor._prefetches.loads  # noqa: SLF001
    assert 64 - manager.num_free_blocks <= load.num_held_blocks <= 64 * share
    settle(manager)
    executor.step(0.0)
    assert (holds(manager, PROMPT), manager.num_free_blocks) == (4 * num_blocks, 64)


def test_a_window_that_the_device_lacks_is_counted() -> None:
    """All of the prompt is on the device but for the window behind its first part."""
    groups = [FullAttention(4), SlidingWindow(4, 17)]
    manager = KVCacheManager(96, groups=groups, tiers=[Tier("host", 256, 100, window_store_tokens=4)], debug=True)
    run(manager)
    for _ in range(4):
        settle(manager)
    spill_groups(manager)
    executor = make(manager, max_prefetch_share=0.3, reserved_share=0.0)
    for end in range(8, 41, 8):
        free, held = manager.num_free_blocks, executor._prefetches._num_held  # noqa: SLF001
        say(executor, "prefetch", token_ids=PROMPT[:end])
        assert free - manager.num_free_blocks <= executor._prefetches._num_held - held  # noqa: SLF001
        settle(manager)
        executor.step(0.0)
    assert holds(manager, PROMPT) == 40


def spill_groups(manager: KVCacheManager) -> None:
    crowd = Sequence("crowd", range(1000, 1000 + 2 * manager.num_blocks))
    assert manager.allocate_slots(crowd) is not None
    manager.abort(crowd, 0)


def test_count_empty_blocks() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    assert [manager.inspect.count_empty_blocks(number) for number in (0, 3, 8, 99)] == [0, 3, 8, 8]
    run(manager, tokens=range(20))
    assert manager.inspect.count_empty_blocks(8) == 3
    manager.reset_prefix_cache()
    assert manager.inspect.count_empty_blocks(8) == 8


def test_hashes_that_a_prefetch_evicted_are_missing_in_the_same_envelope() -> None:
    """An earlier action looked up hashes. That must not hide that the prefetch evicted them."""
    manager = stored(32)
    other = list(range(1000, 1000 + 4 * 32))
    run(manager, "other", other)
    hashes = [digest.hex() for digest in manager.inspect.block_hashes(Sequence("x", other))]
    executor = make(manager, 32, max_prefetch_share=1.0, reserved_share=0.0, may_evict=True)
    pinned = {"block_hashes": hashes[:1]}
    sent = envelope(
        action("pin", pinned, "first"),
        action("release", {"action_id": "first"}, "release"),
        action("prefetch", {"token_ids": PROMPT}, "prefetch"),
        action("pin", {"block_hashes": hashes[-1:]}, "gone"),
        action("pin", {"block_hashes": hashes}, "part"),
    )
    answers = executor.carry_out(sent, None, 0.0).answers
    assert [answer.outcome for answer in answers] == ["accepted", "accepted", "accepted", "missing", "clipped"]
    assert answers[2].numbers["num_loading_blocks"] == 10
    assert answers[4].numbers["num_held_blocks"] == 16  # the budget of all pins
