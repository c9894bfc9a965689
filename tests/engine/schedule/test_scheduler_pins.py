"""Pins that are never given up: the scheduler raises instead of waiting for ever, and goes on when they end."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, answer_alone, make, run_any_step, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import FullAttention, KVCacheManager, PoolExhaustedError, Sequence, SlidingWindow
from kvblocks.engine.schedule.capacity import check_oldest
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.errors import InvalidArgumentError


def make_pinning(num_blocks, **limits):
    return make(num_blocks, pin_budget=1.0, debug=True, **limits)


def state(scheduler):
    manager = scheduler.manager
    requests = [*scheduler.running, *scheduler.waiting]
    tables = [(r.sequence.block_ids[:], r.sequence.num_computed_tokens, r.num_preemptions) for r in requests]
    return requests, len(scheduler.running), tables, manager.num_free_blocks, manager.stats.num_cached_blocks


def compute(scheduler, cache, prompt):
    """Have a prompt cached."""
    add(scheduler, "setup", prompt, max_tokens=1)
    while scheduler.has_work:
        step(scheduler, cache)


def test_a_request_that_pins_leave_no_room_for_is_refused():
    scheduler, cache = make_pinning(8), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 12)
    pin = scheduler.manager.pins.pin([0] * 12, priority=100)
    add(scheduler, "fits", [1] * 18, max_tokens=3)  # 20 slots: the 5 blocks that are left
    with pytest.raises(
        PoolExhaustedError, match=r"at most 21 tokens while pins keep 3 of the pool's 8 blocks, got 22 \(a prompt of 18"
    ):
        add(scheduler, "does not", [1] * 18, max_tokens=4)
    assert len(scheduler.waiting) == 1
    add(scheduler, "shares", [*[0] * 12, *[1] * 18], max_tokens=3)  # 8 blocks, of which the pin has 3
    with pytest.raises(PoolExhaustedError, match="at most 29 tokens while pins keep 3"):
        add(scheduler, "shares less", [*[0] * 8, *[1] * 22], max_tokens=3)
    with pytest.raises(InvalidArgumentError, match="at most 33 tokens"):  # it never will
        add(scheduler, "too long", [*[0] * 12, *[1] * 18], max_tokens=4)
    scheduler.manager.pins.unpin(pin)
    add(scheduler, "shares less", [*[0] * 8, *[1] * 22], max_tokens=3)
    while scheduler.has_work:
        run_any_step(scheduler, cache)


@pytest.mark.parametrize("priority", [0, 50, 99])
def test_soft_pins_are_no_reason_to_refuse(priority):
    scheduler, cache = make_pinning(8), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 16)
    pin = scheduler.manager.pins.pin([0] * 16, priority=priority)
    request = add(scheduler, "a", [1] * 30, max_tokens=3)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert request.output_token_ids == answer_alone((None, 0), [1] * 30, 3)
    assert pin.num_held_blocks == 0


def test_a_step_raises_while_pins_keep_the_pool_from_the_waiting():
    scheduler, cache = make_pinning(8), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 20)
    request = add(scheduler, "a", [1] * 14, max_tokens=4)
    pin = scheduler.manager.pins.pin([0] * 20, priority=100)
    before = state(scheduler)
    for _ in range(2):
        with pytest.raises(
            PoolExhaustedError, match=r"expected 4 more blocks for Sequence\('a'.*priority 100 keep 5 of the pool's 8"
        ):
            scheduler.schedule()
        assert state(scheduler) == before
    refusal = scheduler.manager.last_refusal
    assert (refusal.num_blocks, refusal.num_kept_blocks, refusal.is_due_to_pins) == (4, 5, True)
    scheduler.manager.pins.unpin(pin)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert request.output_token_ids == answer_alone((None, 0), [1] * 14, 4)


def test_a_step_raises_while_pins_keep_the_pool_from_the_oldest():
    scheduler, cache = make_pinning(8), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 12)
    old, young = add(scheduler, "old", [1] * 12, max_tokens=12), add(scheduler, "young", [2] * 3, max_tokens=9)
    step(scheduler, cache)
    pin = scheduler.manager.pins.pin([0] * 12, priority=100)
    while old.sequence.num_computed_tokens < 20:
        run_any_step(scheduler, cache)
    assert (young.num_preemptions, list(scheduler.waiting)) == (1, [young])
    before = state(scheduler)
    with pytest.raises(
        PoolExhaustedError, match=r"expected 1 more block for Sequence\('old', 21.*keep 3 of the pool's 8"
    ):
        scheduler.schedule()
    assert state(scheduler) == before
    scheduler.manager.pins.unpin(pin)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert old.num_preemptions == 0
    assert old.output_token_ids == answer_alone((None, 0), [1] * 12, 12)
    assert young.output_token_ids == answer_alone((None, 0), [2] * 3, 9)


@pytest.mark.parametrize("pins_first", [True, False])
def test_nobody_is_preempted_for_one_who_cannot_go_on_anyway(pins_first):
    """The young request's blocks would not become free, since a pin holds them too, or takes them then."""
    scheduler, cache = make_pinning(8, max_num_chunk_tokens=4), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 8)
    old, young = add(scheduler, "old", [1] * 24, max_tokens=1), Request(Sequence("young", [2] * 4), 2)
    for _ in range(4):
        step(scheduler, cache)
    add(scheduler, "short", [3], max_tokens=1)
    step(scheduler, cache)  # old has given way, and doesn't in the next step
    scheduler.add(young)
    if pins_first:
        pins = [scheduler.manager.pins.pin(prefix, priority=100) for prefix in ([0] * 8, [2] * 4)]
    step(scheduler, cache)
    if not pins_first:
        pins = [scheduler.manager.pins.pin(prefix, priority=100) for prefix in ([0] * 8, [2] * 4)]
    assert scheduler.manager.num_free_blocks == 0  # 5 blocks of old's, and the pinned ones; one of them is young's
    before = state(scheduler)
    with pytest.raises(PoolExhaustedError, match="keep 3 of the pool's 8"):
        scheduler.schedule()
    assert state(scheduler) == before
    assert scheduler.running == [old, young]
    scheduler.manager.pins.unpin(pins[1])
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert young.num_preemptions == 1


def test_a_young_one_that_pins_leave_no_room_for_waits_as_long_as_the_oldest_goes_on():
    scheduler, cache = make_pinning(8, max_num_chunk_tokens=12), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [0] * 16)
    old, young = add(scheduler, "old", [1] * 3, max_tokens=6), add(scheduler, "young", [2] * 24, max_tokens=1)
    assert step(scheduler, cache) == [("old", 0, 3), ("young", 0, 12)]
    pin = scheduler.manager.pins.pin([0] * 16, priority=100)
    while not old.finish_reason:
        run_any_step(scheduler, cache)
    assert young.num_preemptions
    with pytest.raises(PoolExhaustedError):
        scheduler.schedule()
    scheduler.manager.pins.unpin(pin)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert old.output_token_ids == answer_alone((None, 0), [1] * 3, 6)
    assert young.output_token_ids == answer_alone((None, 0), [2] * 24, 1)


def test_room_for_the_next_chunk_is_enough_to_go_on():
    """The oldest goes on even if it would need more blocks to start anew, as another computed more of its prompt."""
    scheduler = make_pinning(6, max_num_chunk_tokens=12, wait_for_prefixes=False)
    cache = FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [1] * 8)
    old, ahead = add(scheduler, "old", [0] * 20, max_tokens=1), add(scheduler, "ahead", [0] * 20, max_tokens=1)
    assert step(scheduler, cache) == [("old", 0, 12), ("ahead", 12, 4)]
    scheduler.limits = StepLimits(16, 8, 4)
    pin = scheduler.manager.pins.pin([1] * 8, priority=100)
    assert step(scheduler, cache) == [("old", 12, 4)]
    assert ahead.num_preemptions == 1
    with pytest.raises(PoolExhaustedError):
        scheduler.schedule()
    scheduler.manager.pins.unpin(pin)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert old.num_preemptions == 0


def test_the_oldest_does_not_start_anew_only_to_stand_there_again():
    scheduler, cache = make_pinning(7, max_num_chunk_tokens=12), FakeCache(BLOCK_SIZE)
    old = add(scheduler, "old", [0] * 12, max_tokens=9)
    step(scheduler, cache)
    scheduler.manager.reset_prefix_cache()  # nothing of old's is cached, so it would begin with its first token
    add(scheduler, "other", [1] * 12, max_tokens=1)
    step(scheduler, cache)
    scheduler.manager.pins.pin([1] * 12, priority=100)
    while old.sequence.num_computed_tokens < 16:
        step(scheduler, cache)
    before = state(scheduler)
    with pytest.raises(PoolExhaustedError, match="keep 3 of the pool's 7"):
        scheduler.schedule()
    assert state(scheduler) == before


def test_starting_anew_needs_room_for_its_first_chunk():
    manager = KVCacheManager(5, BLOCK_SIZE, pin_budget=1.0)
    old = Request(Sequence("old", [0] * 20), 1)
    manager.allocate_slots(old.sequence, 4)
    manager.reset_prefix_cache()
    manager.allocate_slots(other := Sequence("other", [1] * 4))
    manager.free(other)
    manager.allocate_slots(Sequence("ahead", [0] * 12))
    for prefix in ([1] * 4, [0] * 4):
        manager.pins.pin(prefix, priority=100)
    assert manager.allocate_slots(old.sequence, 12) is None
    # Anew it has 12 tokens, and pins keep one block from it. Its next chunk is as long as the step allows.
    check_oldest(manager, old, 16, 4)
    with pytest.raises(PoolExhaustedError, match=r"expected 3 more blocks .*keep 2 of the pool's 5"):
        check_oldest(manager, old, 16, 8)


def test_the_oldest_starts_anew_where_that_lets_it_share_what_a_pin_keeps():
    scheduler, cache = make_pinning(7, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    prompt = [0] * 12
    old = add(scheduler, "old", prompt, max_tokens=9)  # 5 blocks
    step(scheduler, cache)
    scheduler.manager.reset_prefix_cache()  # old caches nothing from here on
    child = add(scheduler, "child", prompt, max_tokens=1)
    assert step(scheduler, cache) == [("old", 12, 1), ("child", 0, 12)]
    assert child.finish_reason == "length"
    scheduler.manager.pins.pin(prompt, priority=100)  # child's 3 blocks, beside old's 4
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert old.num_preemptions == 1
    assert old.output_token_ids == answer_alone((None, 0), prompt, 9)


# --- any history -----------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.just("add"), st.integers(1, 16), st.integers(0, 2), st.integers(1, 8))
    | st.tuples(st.just("pin"), st.integers(4, 16), st.integers(0, 2), st.sampled_from([100, 100, 50]))
    | st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
    min_size=3,
    max_size=25,
)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(6, 12),
    limits=st.builds(StepLimits, st.integers(4, 20), st.integers(1, 4), st.sampled_from([None, 3])),
    resets=st.booleans(),
)
def test_every_step_makes_progress_or_says_that_pins_forbid_it(actions, num_blocks, limits, resets):
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, pin_budget=0.8)
    scheduler, cache, requests = Scheduler(manager, 1000, limits), FakeCache(BLOCK_SIZE), []
    for kind, size, token, number in actions:
        prompt = [*[0] * (size // 2), *[token] * (size - size // 2)]
        if kind == "add":
            try:
                requests.append(add(scheduler, len(requests), prompt, number))
            except PoolExhaustedError:
                assert manager.pins
        elif kind == "pin" and manager.num_blocks * 0.8 >= sum(p.num_blocks for p in manager.pins) + size // 4:
            manager.pins.pin(prompt, priority=number)
        elif kind == "step":
            for _ in range(size if scheduler.has_work else 0):
                if not step_or_unpin(scheduler, cache):
                    break
            if resets and size == 1:
                manager.reset_prefix_cache()
    num_steps = 0
    while scheduler.has_work:
        step_or_unpin(scheduler, cache)
        num_steps += 1
        assert num_steps < 1000
    for request in requests:
        prompt = request.sequence.token_ids(0, request.sequence.num_prompt_tokens)
        assert request.output_token_ids == answer_alone((None, 0), prompt, request.max_tokens)


def step_or_unpin(scheduler, cache):
    """A step, if there is work; if pins stand in its way nothing has changed, and one of them ends."""
    if not scheduler.has_work:
        return False
    before = state(scheduler)
    try:
        run_any_step(scheduler, cache)
    except PoolExhaustedError:
        hard = [pin for pin in scheduler.manager.pins if 100 in pin.priorities and pin.num_held_blocks]
        assert hard
        assert state(scheduler) == before
        scheduler.manager.check()
        scheduler.manager.pins.unpin(hard[-1])
        return False
    return True


def computed(manager, tokens, chunk=64):
    """Compute and free a sequence, in chunks."""
    sequence = Sequence(("computed", tokens[0]), tokens)
    while sequence.num_computed_tokens < sequence.num_tokens:
        manager.allocate_slots(sequence, min(chunk, sequence.num_tokens - sequence.num_computed_tokens))
    manager.free(sequence)


def test_what_a_pin_keeps_counts_though_a_window_lets_nobody_hit_it():
    manager = KVCacheManager(40, groups=[FullAttention(16), SlidingWindow(16, 40)], debug=True)
    computed(manager, range(320))
    computed(manager, range(9000, 9064))  # takes what left the window
    pin = manager.pins.pin(range(160), priority=100)
    assert (len(pin.blocks), pin.attached_blocks, manager.get_computed_blocks(pin.sequence).num_tokens) == (10, [], 0)
    scheduler = Scheduler(manager, 10_000, StepLimits(64, 8))
    assert scheduler.max_request_tokens == 353  # 22 blocks, and 8 of the window
    with pytest.raises(PoolExhaustedError, match="while pins keep 10 of the pool's 40"):
        scheduler.add(Request(Sequence("r", range(5000, 5400)), 40))


def test_a_pin_keeps_no_more_than_its_windows_where_there_are_only_windows():
    manager = KVCacheManager(20, groups=[SlidingWindow(16, 40)], debug=True)
    computed(manager, range(320))
    manager.pins.pin(range(320), priority=100)
    scheduler = Scheduler(manager, 10_000, StepLimits(64, 8))
    assert scheduler.max_request_tokens == 10_000
    scheduler.add(Request(Sequence("r", range(7000, 7010)), 5))
