"""The scheduler without a model: what it computes in each step, and what must hold in any history."""

import subprocess
import sys

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, answer_alone, make, run_any_step, step, unfinished_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import FullAttention, KVCacheManager, Sequence, SlidingWindow
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.errors import InvalidArgumentError

# --- single steps ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_decodes_go_first():
    scheduler, cache = make(20, max_num_batched_tokens=8), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 6)
    assert step(scheduler, cache) == [("a", 0, 6)]
    add(scheduler, "b", [1] * 20)
    assert step(scheduler, cache) == [("a", 6, 1), ("b", 0, 7)]
    assert step(scheduler, cache) == [("a", 7, 1), ("b", 7, 7)]
    assert step(scheduler, cache) == [("a", 8, 1), ("b", 14, 6)]
    assert step(scheduler, cache) == [("b", 20, 1)]


def test_requests_of_one_step_share_blocks():
    scheduler, cache = make(20, max_num_batched_tokens=100), FakeCache(BLOCK_SIZE)
    first, second = add(scheduler, "a", [0] * 9 + [1]), add(scheduler, "b", [0] * 9 + [2])
    assert step(scheduler, cache) == [("a", 0, 10), ("b", 8, 2)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.sequence.block_ids[:2] == second.sequence.block_ids[:2]


def test_a_full_hit_computes_one_token_and_writes_nothing():
    scheduler, cache = make(20), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 8)
    step(scheduler, cache)
    written = dict(cache.slots)
    request = add(scheduler, "b", [0] * 8, max_tokens=1)
    assert ("b", 7, 1) in step(scheduler, cache)
    assert {slot: cache.slots[slot] for slot in written} == written
    assert (request.num_cached_tokens, request.num_computed_tokens) == (7, 1)


def test_the_youngest_is_preempted_and_recomputed():
    scheduler, cache = make(4), FakeCache(BLOCK_SIZE)
    old, young = add(scheduler, "old", [0] * 7, max_tokens=9), add(scheduler, "young", [1] * 7, max_tokens=6)
    seen = []
    while scheduler.has_work:
        seen.append(step(scheduler, cache))
    assert (old.num_preemptions, old.num_computed_tokens) == (0, 7 + 8)
    assert young.num_preemptions == 1
    assert young.num_computed_tokens > 7 + 5
    assert old.output_token_ids == answer_alone((None, 0), [0] * 7, 9)
    assert young.output_token_ids == answer_alone((None, 0), [1] * 7, 6)


def test_no_one_is_admitted_in_a_step_that_took_blocks_away():
    scheduler, cache = make(6, max_num_batched_tokens=8, enable_caching=False), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 8, max_tokens=12)
    young = add(scheduler, "b", [1] * 8, max_tokens=12)
    while not young.num_preemptions:
        names = [name for name, _, _ in step(scheduler, cache)]
    assert names == ["a"]
    assert scheduler.manager.num_free_blocks == 2  # enough for the next chunk of b
    assert [name for name, _, _ in step(scheduler, cache)] == ["a", "b"]


def test_limits_are_kept_and_may_change():
    scheduler, cache = make(50, max_num_batched_tokens=4, max_num_seqs=2), FakeCache(BLOCK_SIZE)
    for name in "abc":
        add(scheduler, name, [0, 1])
    assert [name for name, _, _ in step(scheduler, cache)] == ["a", "b"]
    scheduler.limits = StepLimits(max_num_batched_tokens=8, max_num_seqs=3)
    assert [name for name, _, _ in step(scheduler, cache)] == ["a", "b", "c"]


def test_a_long_prompt_leaves_room_for_others_if_its_chunks_are_limited():
    scheduler, cache = make(50, max_num_chunk_tokens=5), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 12)
    add(scheduler, "b", [1] * 14)
    assert step(scheduler, cache) == [("a", 0, 5), ("b", 0, 5)]
    assert step(scheduler, cache) == [("a", 5, 5)]  # then they take turns
    assert step(scheduler, cache) == [("b", 5, 5)]
    assert step(scheduler, cache) == [("a", 10, 2)]
    assert step(scheduler, cache) == [("a", 12, 1), ("b", 10, 4)]


def test_a_stop_token_ends_a_request():
    scheduler, cache = make(10), FakeCache(BLOCK_SIZE)
    (first,) = answer_alone((None, 0), [0, 1], 1)
    request = add(scheduler, "a", [0, 1], stop_token_ids=frozenset({first}))
    step(scheduler, cache)
    assert (request.finish_reason, request.output_token_ids) == ("stop", [first])
    assert not scheduler.has_work
    assert scheduler.manager.num_free_blocks == 10


@pytest.mark.parametrize("is_running", [True, False])
def test_a_cancelled_request_is_gone(is_running):
    scheduler, cache = make(10), FakeCache(BLOCK_SIZE)
    request = add(scheduler, "a", [0, 1])
    if is_running:
        step(scheduler, cache)
    scheduler.cancel(request)
    assert not scheduler.has_work
    assert scheduler.manager.num_free_blocks == 10
    scheduler.cancel(request)  # nothing to do


def test_a_step_that_died_leaves_nothing_cached_and_loses_nothing():
    scheduler, cache = make(20, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    a, b = add(scheduler, "a", [0] * 9), add(scheduler, "b", [0] * 10)
    chunks = scheduler.schedule()
    assert chunks[1].start == 8  # b hit what a was to write
    scheduler.abort(chunks)
    scheduler.manager.check()
    assert list(scheduler.waiting) == [a, b]
    assert scheduler.manager.get_computed_blocks(Sequence("c", [0] * 9)).num_tokens == 0
    while scheduler.has_work:
        step(scheduler, cache)
    assert a.output_token_ids == answer_alone((None, 0), [0] * 9, 4)
    assert b.output_token_ids == answer_alone((None, 0), [0] * 10, 4)
    assert (a.num_cached_tokens, a.num_computed_tokens) == (0, 9 + 3)


# --- what can't be served --------------------------------------------------------------------------------------------


def test_what_just_fits_is_served_and_one_more_is_refused():
    scheduler, cache = make(3), FakeCache(BLOCK_SIZE)
    request = add(scheduler, "a", [0] * 7, max_tokens=6)  # 13 tokens, of which the last needs no slot
    while scheduler.has_work:
        step(scheduler, cache)
    assert len(request.output_token_ids) == 6
    with pytest.raises(InvalidArgumentError, match=r"at most 13 tokens.*3 blocks of 4.*got 14 \(a prompt of 7"):
        add(scheduler, "b", [0] * 7, max_tokens=7)
    assert not scheduler.has_work


def test_the_models_context_is_a_limit():
    scheduler = make(100, max_model_len=10)
    add(scheduler, "a", [0] * 5, max_tokens=5)
    with pytest.raises(InvalidArgumentError, match="at most 10 tokens, the model's context, got 11"):
        add(scheduler, "b", [0] * 5, max_tokens=6)
    assert len(scheduler.waiting) == 1


@pytest.mark.parametrize("max_tokens", [-1, 1.0, None, "4"])
def test_max_tokens_must_be_a_count(max_tokens):
    with pytest.raises(InvalidArgumentError, match="max_tokens: expected an int of at least 0, got"):
        Request(Sequence("a", [0]), max_tokens)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected an int of at least 64, got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs: expected an int of at least 1, got -1"),
        ({"max_num_seqs": 1.5}, "max_num_seqs: expected an int of at least 1, got 1.5"),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            "max_num_batched_tokens: expected an int of at least 9, got 8",
        ),
        ({"max_num_chunk_tokens": 0}, "max_num_chunk_tokens: expected an int of at least 1, got 0"),
        ({"wait_for_prefixes": 1}, "wait_for_prefixes: expected True or False, got 1"),
    ],
)
def test_limits_must_make_sense(limits, message):
    with pytest.raises(InvalidArgumentError, match=message):
        StepLimits(**limits)


def test_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import kvblocks.engine.schedule.scheduler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- any history -----------------------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(0, 12),
            "salt": st.sampled_from([None, None, None, "other"]),
            "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=24)
            | st.integers(1, 24).map(lambda size: [0] * size),
            "max_tokens": st.integers(1, 12),
            "stops": st.booleans(),
            "num_samples": st.sampled_from([1, 1, 1, 2, 3, 7]),
        }
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(9, 16),  # 35 tokens need 9 blocks, so anything fits alone and little fits together
    limits=st.builds(
        StepLimits, st.integers(6, 24), st.integers(1, 6), st.sampled_from([None, None, 1, 3, 5]), st.booleans()
    )
    | st.just(StepLimits(1, 1)),
    caching=st.sampled_from(["on", "on", "on", "few digests", "off"]),
    dying_steps=st.sets(st.integers(0, 30), max_size=4),
    cancels=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4),
)
def test_any_history(arrivals, num_blocks, limits, caching, dying_steps, cancels):
    hash_algorithm = (lambda text: bytes([sum(text) % 8])) if caching == "few digests" else "xxh3_128"
    manager = KVCacheManager(
        num_blocks, BLOCK_SIZE, hash_algorithm=hash_algorithm, enable_caching=caching != "off", enable_events=True
    )
    scheduler, cache = Scheduler(manager, 1000, limits), FakeCache(BLOCK_SIZE)
    stop_token_ids = frozenset({0})
    requests, cancelled, num_steps = [], set(), 0
    pending = sorted(enumerate(arrivals), key=lambda arrival: arrival[1]["step"])
    while pending or scheduler.has_work:
        while pending and (pending[0][1]["step"] <= num_steps or not scheduler.has_work):
            index, arrival = pending.pop(0)
            sequence = Sequence((index, 0), arrival["prompt"], salt=arrival["salt"])
            request = Request(sequence, arrival["max_tokens"], stop_token_ids if arrival["stops"] else frozenset())
            samples = [request.add_sample((index, number)) for number in range(1, arrival["num_samples"])]
            scheduler.add(request)
            requests += [(sample, arrival) for sample in (request, *samples)]
        for at, which in cancels:
            unfinished = unfinished_requests(scheduler)
            if at == num_steps and unfinished:
                cancelled.add(unfinished[which % len(unfinished)])
                scheduler.cancel(unfinished[which % len(unfinished)])
                manager.check()
        if scheduler.has_work:
            run_any_step(scheduler, cache, dies=num_steps in dying_steps)
            manager.take_events()
        num_steps += 1
        assert num_steps < 3000
    assert manager.num_free_blocks == num_blocks
    for request, arrival in requests:
        if request in cancelled:
            continue
        prompt, stops = arrival["prompt"], stop_token_ids if arrival["stops"] else frozenset()
        number = request.sequence.sequence_id[1]
        expected = answer_alone((arrival["salt"], number), prompt, arrival["max_tokens"], stops)
        assert request.output_token_ids == expected
        # A preempted request may hit more when it starts again. That isn't counted here.
        assert request.num_cached_tokens < len(prompt) + (number > 0)
        assert request.finish_reason == ("stop" if expected[-1] in stops else "length")
        if not request.num_preemptions and not dying_steps:
            assert request.num_computed_tokens + request.num_cached_tokens == len(prompt) + len(expected) - 1


def test_larger_limits_do_not_stall_what_was_queued_for_smaller_steps():
    manager = KVCacheManager(20, groups=[FullAttention(16), SlidingWindow(16, 16)])
    scheduler = Scheduler(manager, 1000, StepLimits(16, 4))
    request = Request(Sequence("r", range(240)), 5)
    scheduler.add(request)
    scheduler.limits = StepLimits()
    while scheduler.has_work:
        chunks = scheduler.schedule()
        scheduler.complete(chunks, [7 for chunk in chunks for _ in chunk.sampled_requests])
    assert request.finish_reason == "length"
