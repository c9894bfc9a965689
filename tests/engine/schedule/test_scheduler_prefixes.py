"""Prefixes that are being computed: a request that begins with one waits for it, and none waits for ever."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import KVCacheManager, Sequence
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.schedules import SCHEDULES, make_order


def run_all(scheduler, cache):
    """Names of each step's chunks."""
    names = []
    while scheduler.has_work:
        names.append([name for name, _, _ in step(scheduler, cache)])
    return names


@pytest.mark.parametrize("chunk", [None, 3, 10, 16])
@pytest.mark.parametrize("max_num_batched_tokens", [10, 64, 1000])
@pytest.mark.parametrize(("length", "rest"), [(50, 2), (48, 1)])  # one token at least has to be computed
def test_eight_equal_prompts_compute_their_prefix_once(max_num_batched_tokens, chunk, length, rest):
    scheduler = make(100, max_num_batched_tokens=max_num_batched_tokens, max_num_chunk_tokens=chunk)
    cache = FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, name, [0] * length, max_tokens=3) for name in "abcdefgh"]
    run_all(scheduler, cache)
    assert requests[0].num_computed_tokens == length + 2
    assert [request.num_computed_tokens for request in requests[1:]] == [rest + 2] * 7
    assert [request.num_cached_tokens for request in requests[1:]] == [length - rest] * 7
    assert all(request.output_token_ids == answer_alone((None, 0), [0] * length, 3) for request in requests)


def test_without_waiting_every_one_computes_what_the_others_compute_too():
    limits = {"max_num_batched_tokens": 64, "max_num_chunk_tokens": 8, "max_num_partial_prefills": 9}
    scheduler = make(200, wait_for_prefixes=False, **limits)
    cache = FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, name, [0] * 50, max_tokens=3) for name in "abcdefgh"]
    run_all(scheduler, cache)
    # Each hits the chunk of the one before it in the first step, and is one chunk ahead of it then.
    assert [request.num_cached_tokens for request in requests] == [0, 8, 16, 24, 32, 40, 48, 48]
    assert sum(request.num_computed_tokens for request in requests) > 50 + 7 * 2 + 8 * 2


def test_others_pass_and_the_order_is_kept_otherwise():
    scheduler = make(100, max_num_batched_tokens=14, max_num_chunk_tokens=8)
    cache, long = FakeCache(BLOCK_SIZE), [0] * 24
    for name, prompt in (("a", [*long, 1]), ("b", [*long, 2]), ("c", [1] * 3), ("d", [*long, 0]), ("e", [2] * 5)):
        add(scheduler, name, prompt)
    assert step(scheduler, cache) == [("a", 0, 8), ("c", 0, 3), ("e", 0, 3)]
    assert [request.sequence.sequence_id for request in scheduler.waiting] == ["b", "d"]
    assert step(scheduler, cache) == [("c", 3, 1), ("e", 3, 2), ("a", 8, 8)]
    assert step(scheduler, cache) == [("c", 4, 1), ("e", 5, 1), ("a", 16, 8), ("b", 24, 1), ("d", 24, 1)]
    assert step(scheduler, cache)[0] == ("a", 24, 1)


def test_who_waited_comes_before_those_who_could_have_passed():
    scheduler = make(8, max_num_batched_tokens=14, max_num_chunk_tokens=8)
    cache = FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 20, max_tokens=1)
    add(scheduler, "b", [*[0] * 20, 1, 1, 1, 1])
    assert step(scheduler, cache) == [("a", 0, 8)]
    add(scheduler, "c", [1] * 8, max_tokens=3)
    assert step(scheduler, cache) == [("c", 0, 8)]  # a gives way
    assert step(scheduler, cache) == [("a", 8, 8), ("c", 8, 1)]
    add(scheduler, "d", [2])
    # Now a's end is computed, and b has its prefix; but the pool has no block for it, and so nobody passes it.
    assert step(scheduler, cache) == [("a", 16, 4), ("c", 9, 1)]
    assert [request.sequence.sequence_id for request in scheduler.waiting] == ["b", "d"]


def test_a_shared_beginning_of_less_than_a_block_is_not_waited_for():
    scheduler, cache = make(100, max_num_chunk_tokens=8), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 30)
    add(scheduler, "b", [*[0] * 11, 1])
    assert step(scheduler, cache) == [("a", 0, 8), ("b", 8, 4)]


def test_who_computes_is_preempted_and_the_waiting_go_on():
    scheduler = make(9, max_num_batched_tokens=12, max_num_seqs=3, max_num_chunk_tokens=3)
    cache = FakeCache(BLOCK_SIZE)
    old = add(scheduler, "old", [1] * 8, max_tokens=24)
    requests = [add(scheduler, name, [0] * 20, max_tokens=4) for name in "ab"]
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert old.num_preemptions == 0
    assert requests[0].num_preemptions
    for request in requests:
        assert request.output_token_ids == answer_alone((None, 0), [0] * 20, 4)


def test_who_computes_is_cancelled_and_the_next_one_takes_over():
    scheduler, cache = make(100, max_num_chunk_tokens=8), FakeCache(BLOCK_SIZE)
    first, second = add(scheduler, "a", [0] * 30), add(scheduler, "b", [0] * 30)
    step(scheduler, cache)
    scheduler.cancel(first)
    assert step(scheduler, cache) == [("b", 8, 8)]
    run_all(scheduler, cache)
    assert second.num_computed_tokens == 30 - 8 + 3


def test_no_more_are_passed_over_than_could_run():
    scheduler, cache = make(100, max_num_chunk_tokens=8, max_num_seqs=3), FakeCache(BLOCK_SIZE)
    for name in "abcd":
        add(scheduler, name, [0] * 17)
    add(scheduler, "e", [1])
    assert step(scheduler, cache) == [("a", 0, 8)]
    scheduler.limits = StepLimits(16, 4, 8)
    assert step(scheduler, cache) == [("e", 0, 1)]  # a gives way
    assert step(scheduler, cache) == [("a", 8, 8), ("e", 1, 1), ("b", 16, 1), ("c", 16, 1)]


# --- any group of prompts --------------------------------------------------------------------------------------------


def num_tokens_once(prompts):
    """How many tokens must be computed for prompts that arrive together, if what they share is computed once."""
    cached, total = set(), 0
    for prompt in prompts:
        num_cached = 0
        while tuple(prompt[: num_cached + BLOCK_SIZE]) in cached and num_cached + BLOCK_SIZE <= len(prompt):
            num_cached += BLOCK_SIZE
        total += max(1, len(prompt) - num_cached)
        cached.update(tuple(prompt[:end]) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE))
    return total


# Of tokens that are never generated: what is computed can then be told from the prompts alone.
PROMPTS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(8, 9), max_size=9)).map(lambda pair: [7] * pair[0] + pair[1]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    prompts=PROMPTS,
    limits=st.builds(StepLimits, st.integers(8, 40), st.integers(1, 8), st.none() | st.integers(1, 12)),
    max_tokens=st.integers(1, 3),
)
def test_whatever_prompts_share_is_computed_once(prompts, limits, max_tokens):
    """There is room in the pool. A request that waits for a prefix waits for a running request."""
    scheduler, cache = Scheduler(KVCacheManager(200, BLOCK_SIZE), 1000, limits), FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, name, prompt, max_tokens) for name, prompt in enumerate(prompts)]
    while scheduler.has_work:
        run_any_step(scheduler, cache)
        running = {request.sequence for request in scheduler.running}
        for request in scheduler.waiting:
            hit = scheduler.manager.get_computed_blocks(request.sequence)
            assert hit.pending_sequence is None or hit.pending_sequence in running
    assert sum(r.num_cached_tokens + r.num_computed_tokens - max_tokens + 1 for r in requests) == sum(map(len, prompts))
    computed = sum(request.num_computed_tokens - (max_tokens - 1) for request in requests)
    assert computed == num_tokens_once(prompts)


def test_samples_and_equal_prompts_together():
    scheduler, cache = make(100, max_num_chunk_tokens=7), FakeCache(BLOCK_SIZE)
    samples, single = add_samples(scheduler, "a", [0] * 38, 4), Request(Sequence("b", [0] * 38), 4)
    scheduler.add(single)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert sum(request.num_computed_tokens for request in samples) == 38 + 4 * 3
    assert (single.num_cached_tokens, single.num_computed_tokens) == (36, 2 + 3)


# --- one lookup for all who ask --------------------------------------------------------------------------------------


def count_lookups(monkeypatch, scheduler):
    calls = []
    look_up = scheduler.manager.get_computed_blocks

    def counted(sequence):
        calls.append(sequence)
        return look_up(sequence)

    monkeypatch.setattr(scheduler.manager, "get_computed_blocks", counted)
    return calls


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_that_was_looked_up_when_it_came_is_not_looked_up_again(schedule, monkeypatch):
    scheduler, cache = make(100, order=make_order(schedule)), FakeCache(BLOCK_SIZE)
    add(scheduler, "before", [0] * 12, max_tokens=1)
    run_all(scheduler, cache)
    calls = count_lookups(monkeypatch, scheduler)
    requests = [add(scheduler, name, [0] * 12 + [number]) for number, name in enumerate("ab")]
    hit = scheduler.lookups.find(requests[0])
    assert (hit.num_tokens, len(calls)) == (12, 1)
    assert [chunk.request for chunk in scheduler.schedule()] == requests
    assert requests[0].num_cached_tokens == 12
    # The first one got slots, which may have cached more, so the other is looked up when it is its turn.
    assert calls.count(requests[0].sequence) == 1
    assert calls.count(requests[1].sequence) == (2 if schedule == "longest-prefix" else 1)


def test_what_was_computed_since_a_lookup_is_hit():
    scheduler, cache = make(100, max_num_seqs=1), FakeCache(BLOCK_SIZE)
    first, second = add(scheduler, "first", [0] * 12, max_tokens=1), add(scheduler, "second", [0] * 13)
    assert scheduler.lookups.find(second).num_tokens == 0
    step(scheduler, cache)
    assert first.finish_reason == "length"
    assert scheduler.lookups.find(second).num_tokens == 12
    run_all(scheduler, cache)
    assert second.num_cached_tokens == 12


def test_what_was_generated_since_a_lookup_is_hit():
    """A block that was there already got full, so nothing was taken from the pool."""
    scheduler, cache = make(100, max_num_seqs=1), FakeCache(BLOCK_SIZE)
    answer = answer_alone((None, 0), [0] * 6, 3)
    add(scheduler, "first", [0] * 6, max_tokens=3)
    second = add(scheduler, "second", [0] * 6 + answer[:2] + [1])
    step(scheduler, cache)
    step(scheduler, cache)
    assert scheduler.lookups.find(second).num_tokens == 4
    num_taken = scheduler.manager.stats.num_taken_blocks
    assert step(scheduler, cache) == [("first", 7, 1)]
    assert scheduler.manager.stats.num_taken_blocks == num_taken
    run_all(scheduler, cache)
    assert second.num_cached_tokens == 8


@pytest.mark.parametrize("watermark", [0.0, 0.5])
def test_what_a_reset_took_since_a_lookup_is_not_hit(watermark):
    scheduler, cache = make(20, watermark=watermark), FakeCache(BLOCK_SIZE)
    add(scheduler, "before", [0] * 12, max_tokens=1)
    run_all(scheduler, cache)
    request = add(scheduler, "request", [0] * 13)
    assert scheduler.lookups.find(request).num_tokens == 12
    scheduler.manager.reset_prefix_cache()
    assert step(scheduler, cache) == [("request", 0, 13)]
    assert request.num_cached_tokens == 0
    run_all(scheduler, cache)
    assert request.output_token_ids == answer_alone((None, 0), [0] * 13, 4)
