"""Long prompts share steps with others: who gets which step, who passes whom, and what it costs at most."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, answer_alone, make, run_any_step, step

from kvblocks import Sequence
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.errors import InvalidArgumentError


def add_of(scheduler, salt, name, prompt, max_tokens=1):
    request = Request(Sequence(name, prompt, salt=salt), max_tokens)
    scheduler.add(request)
    return request


def queue_of(scheduler):
    return [request.sequence.sequence_id for request in scheduler.waiting]


def finish(scheduler, cache):
    while scheduler.has_work:
        run_any_step(scheduler, cache)


# --- a step with a new request computes no part of a long prompt -----------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_short_prompt_does_not_wait_for_a_long_one(chunk):
    scheduler = make(80, max_num_batched_tokens=8, max_num_seqs=4, max_num_chunk_tokens=chunk)
    cache, most = FakeCache(BLOCK_SIZE), chunk or 8
    add(scheduler, "long", [0] * 60)
    assert step(scheduler, cache) == [("long", 0, most)]
    add(scheduler, "short", [1] * 3, max_tokens=1)
    assert step(scheduler, cache) == [("short", 0, 3)]  # the long one gave way
    assert step(scheduler, cache) == [("long", most, most)]


def test_a_long_prompt_gives_way_in_every_other_step_at_most():
    scheduler, cache = make(80, max_num_batched_tokens=12, max_num_chunk_tokens=4), FakeCache(BLOCK_SIZE)
    long = add(scheduler, "long", [0] * 60)
    step(scheduler, cache)
    for number in range(20):
        add(scheduler, number, [1, number], max_tokens=1)
        names = [name for name, _, _ in step(scheduler, cache)]
        assert names == ([number] if number % 2 == 0 else ["long", number])
    assert long.num_computed_tokens == 4 + 10 * 4


def test_a_cached_prefix_makes_a_long_prompt_short():
    scheduler = make(80, max_num_chunk_tokens=4, max_num_partial_prefills=1)
    cache, history = FakeCache(BLOCK_SIZE), [5] * 24
    add(scheduler, "before", history, max_tokens=1)
    finish(scheduler, cache)
    add(scheduler, "long", [0] * 60)
    step(scheduler, cache)
    add(scheduler, "turn", [*history, 1, 2])
    add(scheduler, "cold", [6] * 24)
    assert step(scheduler, cache) == [("turn", 24, 2)]


def test_nobody_gives_way_to_a_request_that_is_refused():
    scheduler, cache = make(20, max_num_chunk_tokens=4, watermark=0.05), FakeCache(BLOCK_SIZE)
    add(scheduler, "long", [0] * 60)
    step(scheduler, cache)
    add(scheduler, "short", [1] * 24)  # the pool has no room for it beside the rest of the long prompt
    for start in range(4, 40, 4):
        assert step(scheduler, cache) == [("long", start, 4)]


def test_decodes_go_on_in_steps_that_give_way():
    scheduler, cache = make(80, max_num_chunk_tokens=4), FakeCache(BLOCK_SIZE)
    add(scheduler, "old", [2] * 3, max_tokens=9)
    step(scheduler, cache)
    add(scheduler, "long", [0] * 60)
    assert step(scheduler, cache) == [("old", 3, 1), ("long", 0, 4)]
    add(scheduler, "short", [1] * 3)
    assert step(scheduler, cache) == [("old", 4, 1), ("short", 0, 3)]
    assert step(scheduler, cache) == [("old", 5, 1), ("long", 4, 4), ("short", 3, 1)]


# --- long prompts among each other -----------------------------------------------------------------------------------


def test_running_long_prompts_take_turns_and_others_wait():
    limits = {"max_num_chunk_tokens": 4, "max_num_batched_tokens": 32, "max_num_partial_prefills": 3}
    scheduler, cache = make(80, **limits), FakeCache(BLOCK_SIZE)
    for first, (salt, name) in enumerate((("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"))):
        add_of(scheduler, salt, name, [first, *[0] * 11])
    # Of three places, a salt gets two. b comes in the first round, before the second request of a.
    assert [name for name, _, _ in step(scheduler, cache)] == ["a1", "b1", "a2"]
    assert queue_of(scheduler) == ["a3"]
    names = [[name for name, _, _ in step(scheduler, cache)] for _ in range(8)]
    assert names == [["a1"], ["b1"], ["a2"], ["a1", "a3"], ["b1"], ["a2"], ["a3"], ["a3"]]


def test_one_salt_leaves_a_place_to_others():
    limits = {"max_num_chunk_tokens": 4, "max_num_batched_tokens": 32, "max_num_partial_prefills": 2}
    scheduler, cache = make(80, **limits), FakeCache(BLOCK_SIZE)
    for first, name in enumerate(("a1", "a2")):
        add_of(scheduler, "a", name, [first, *[1] * 30])
    step(scheduler, cache)
    add_of(scheduler, "b", "b1", [0] * 30)
    add_of(scheduler, "c", "c1", [0] * 30)
    assert step(scheduler, cache) == [("b1", 0, 4)]
    assert queue_of(scheduler) == ["a2", "c1"]
    assert step(scheduler, cache) == [("a1", 4, 4)]
    finish(scheduler, cache)


def test_a_pool_without_room_computes_the_oldest_first():
    """Two long prompts, as large as the pool together: the older one advances in every step, and the other loses."""
    limits = {"max_num_chunk_tokens": 4, "max_num_batched_tokens": 32, "watermark": 0.0, "enable_caching": False}
    scheduler, cache = make(10, **limits), FakeCache(BLOCK_SIZE)
    old, young = add(scheduler, "old", [0] * 36, max_tokens=2), add(scheduler, "young", [1] * 36, max_tokens=2)
    finish(scheduler, cache)
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
    assert young.output_token_ids == answer_alone((None, 0), [1] * 36, 2)


@pytest.mark.parametrize("number", [0, -1, True, 1.5, None])
def test_a_number_of_places_must_make_sense(number):
    with pytest.raises(InvalidArgumentError, match="max_num_partial_prefills: expected an int of at least 1, got"):
        StepLimits(max_num_partial_prefills=number)


# --- tenants take turns ----------------------------------------------------------------------------------------------


def test_a_newcomer_waits_for_one_request_of_each_tenant():
    scheduler, cache = make(80, max_num_seqs=1), FakeCache(BLOCK_SIZE)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        add_of(scheduler, "a", name, [1])
    step(scheduler, cache)
    add_of(scheduler, "b", "b1", [1])
    add_of(scheduler, None, "c1", [1])
    add_of(scheduler, "b", "b2", [1])
    assert queue_of(scheduler) == ["a2", "b1", "c1", "a3", "b2", "a4", "a5"]
    step(scheduler, cache)
    add_of(scheduler, "d", "d1", [1])  # the round of b1 has begun
    assert queue_of(scheduler) == ["b1", "c1", "a3", "b2", "d1", "a4", "a5"]


def test_whoever_cancels_loses_no_turn():
    scheduler, cache = make(80, max_num_seqs=1), FakeCache(BLOCK_SIZE)
    requests = [add_of(scheduler, "a", number, [1]) for number in range(9)]
    add_of(scheduler, "b", "b1", [1])
    step(scheduler, cache)
    for request in requests[1:]:
        scheduler.cancel(request)
    add_of(scheduler, "a", "again", [1])
    add_of(scheduler, "c", "c1", [1])
    assert queue_of(scheduler) == ["b1", "again", "c1"]


def test_new_salts_do_not_starve_an_old_one():
    """In each step one request comes under a salt of its own, and one is admitted. The queue stays as long as it is."""
    scheduler, cache = make(80, max_num_seqs=1), FakeCache(BLOCK_SIZE)
    old = [add_of(scheduler, "old", number, [1]) for number in range(6)]
    num_steps = 0
    while old[-1].finish_reason is None:
        add_of(scheduler, f"new {num_steps}", f"new {num_steps}", [1])
        step(scheduler, cache)
        num_steps += 1
        assert num_steps <= 6 * 6  # a round is never longer than the queue
    finish(scheduler, cache)


def test_a_preempted_request_stays_in_front():
    scheduler, cache = make(4), FakeCache(BLOCK_SIZE)
    add_of(scheduler, "a", "old", [0] * 7, max_tokens=9)
    young = add_of(scheduler, "b", "young", [1] * 7, max_tokens=6)
    while not young.num_preemptions:
        step(scheduler, cache)
    add_of(scheduler, "c", "new", [1])
    assert queue_of(scheduler) == ["young", "new"]
    finish(scheduler, cache)
