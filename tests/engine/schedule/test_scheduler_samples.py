"""Several samples of one prompt: computed once, held once, and requests of their own from then on."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step

from kvblocks import Sequence, SequenceStateError
from kvblocks.engine.schedule.request import Request
from kvblocks.errors import InvalidArgumentError


def run_all(scheduler, cache):
    while scheduler.has_work:
        run_any_step(scheduler, cache)


def check_answers(samples, prompt, max_tokens=4):
    for number, request in enumerate(samples):
        assert request.output_token_ids == answer_alone((None, number), prompt, max_tokens)


def test_four_samples_hold_the_prompt_once():
    scheduler, cache = make(40, max_num_batched_tokens=100), FakeCache(BLOCK_SIZE)
    prompt = [0] * 10  # two full blocks and a half
    samples = add_samples(scheduler, "a", prompt, 4)
    assert list(scheduler.waiting) == samples[:1]
    assert step(scheduler, cache) == [(("a", 0), 0, 10)]
    assert scheduler.running == samples
    assert 40 - scheduler.manager.num_free_blocks == 3
    assert step(scheduler, cache) == [(("a", number), 10, 1) for number in range(4)]
    assert 40 - scheduler.manager.num_free_blocks == 2 + 4  # the full blocks, and each sample's own tail
    assert cache.num_copied_blocks == 3  # the last one may keep the original
    assert len({tuple(request.sequence.block_ids[:2]) for request in samples}) == 1
    run_all(scheduler, cache)
    check_answers(samples, prompt)
    assert cache.num_copied_blocks == 3
    assert [(r.num_cached_tokens, r.num_computed_tokens) for r in samples] == [(0, 10 + 3), *[(10, 3)] * 3]


def test_a_prompt_of_full_blocks_needs_no_copy():
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 8, 3)
    run_all(scheduler, cache)
    check_answers(samples, [0] * 8)
    assert cache.num_copied_blocks == 0


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_long_prompt_is_computed_in_chunks_and_then_forked(enable_caching):
    scheduler = make(40, max_num_batched_tokens=8, enable_caching=enable_caching)
    cache, prompt = FakeCache(BLOCK_SIZE), [0] * 21
    samples = add_samples(scheduler, "a", prompt, 3)
    assert [step(scheduler, cache) for _ in range(3)] == [[(("a", 0), 0, 8)], [(("a", 0), 8, 8)], [(("a", 0), 16, 5)]]
    run_all(scheduler, cache)
    check_answers(samples, prompt)
    assert sum(request.num_computed_tokens for request in samples) == 21 + 3 * 3


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_more_samples_than_may_run_wait_with_their_first_token(max_num_seqs):
    scheduler, cache = make(40, max_num_seqs=max_num_seqs), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 10, 5)
    later = add(scheduler, "b", [1] * 3)
    step(scheduler, cache)
    assert scheduler.running == samples[:max_num_seqs]
    assert list(scheduler.waiting) == [*samples[max_num_seqs:], later]
    assert [len(request.output_token_ids) for request in samples] == [1] * 5
    run_all(scheduler, cache)
    check_answers(samples, [0] * 10)
    for request in samples[max_num_seqs:]:  # full blocks come from the cache; the rest of the prompt is computed again
        assert (request.num_cached_tokens, request.num_computed_tokens) == (8, 2 + 3)


def test_nobody_who_came_later_takes_the_place_of_a_sample():
    scheduler, cache = make(40, max_num_batched_tokens=8, max_num_seqs=4), FakeCache(BLOCK_SIZE)
    add_samples(scheduler, "a", [0] * 10, 3)
    for name in "bc":
        add(scheduler, name, [1])
    step(scheduler, cache)
    assert [name for name, _, _ in step(scheduler, cache)] == ["b"]  # a gives way
    assert [name for name, _, _ in step(scheduler, cache)] == [("a", 0), "b"]
    assert [name for name, _, _ in step(scheduler, cache)] == [("a", 0), ("a", 1), ("a", 2), "b"]


def test_samples_run_behind_their_first_one_and_before_those_who_came_later():
    scheduler, cache = make(40, max_num_batched_tokens=30), FakeCache(BLOCK_SIZE)
    first, second = add_samples(scheduler, "a", [0] * 10, 2), add_samples(scheduler, "b", [1] * 10, 2)
    step(scheduler, cache)
    assert scheduler.running == [*first, *second]


def test_samples_that_the_pool_cannot_hold_are_preempted_and_recomputed():
    scheduler, cache = make(6), FakeCache(BLOCK_SIZE)
    prompt = [0] * 9
    samples = add_samples(scheduler, "a", prompt, 4, max_tokens=12)  # 5 blocks each
    run_all(scheduler, cache)
    check_answers(samples, prompt, 12)
    assert samples[0].num_preemptions == 0
    assert all(request.num_preemptions for request in samples[1:])


def test_samples_finish_each_by_itself():
    prompt, answers = [0] * 10, [answer_alone((None, number), [0] * 10, 6) for number in range(6)]
    stop = answers[0][0]  # which ends the first one at once, while others go on
    assert any(answer[0] != stop for answer in answers)
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", prompt, 6, max_tokens=6, stop_token_ids=frozenset({stop}))
    step(scheduler, cache)
    assert samples[0].finish_reason == "stop"
    assert scheduler.running == [request for request in samples if request.finish_reason is None] != []
    run_all(scheduler, cache)
    for request, answer in zip(samples, answers, strict=True):
        assert request.output_token_ids == (answer[: answer.index(stop) + 1] if stop in answer else answer)
        assert request.finish_reason == ("stop" if stop in answer else "length")
    assert scheduler.manager.num_free_blocks == 40


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_one_token_for_each_sample_is_one_step(max_num_seqs):
    scheduler, cache = make(3, max_num_seqs=max_num_seqs), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 12, 5, max_tokens=1)
    step(scheduler, cache)
    assert not scheduler.has_work
    check_answers(samples, [0] * 12, 1)
    assert [(r.num_cached_tokens, r.num_computed_tokens) for r in samples] == [(0, 12), *[(12, 0)] * 4]


# --- cancelled, and steps that die -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_cancelled_sample_leaves_the_others_alone(num_steps, which):
    """Before the prompt is begun, in the middle of it, and after the fork."""
    scheduler, cache = make(40, max_num_batched_tokens=10), FakeCache(BLOCK_SIZE)
    prompt = [0] * 18
    samples = add_samples(scheduler, "a", prompt, 3)
    for _ in range(num_steps):
        step(scheduler, cache)
    scheduler.cancel(samples[which])
    scheduler.manager.check()
    run_all(scheduler, cache)
    assert scheduler.manager.num_free_blocks == 40
    left = [number for number in range(3) if number != which]
    for number in left:
        assert samples[number].output_token_ids == answer_alone((None, number), prompt, 4)
    assert samples[which].finish_reason == "cancelled"
    costs = [(samples[number].num_cached_tokens, samples[number].num_computed_tokens) for number in left]
    assert costs == [(0, 18 + 3) if (which, num_steps) != (0, 2) else (18, 3), (18, 3)]


def test_the_next_sample_takes_the_place_of_a_cancelled_one():
    scheduler, cache = make(40, max_num_batched_tokens=16, max_num_chunk_tokens=8), FakeCache(BLOCK_SIZE)
    first, second = add_samples(scheduler, "a", [0] * 18, 2), add_samples(scheduler, "b", [1] * 18, 2)
    waiting = add_samples(scheduler, "c", [0, 2], 2), add(scheduler, "d", [1, 2])
    assert step(scheduler, cache) == [(("a", 0), 0, 8), (("b", 0), 0, 8)]
    for samples in (first, waiting[0]):
        scheduler.cancel(samples[0])
    assert scheduler.running == [first[1], second[0]]
    assert list(scheduler.waiting) == [waiting[0][1], waiting[1]]
    assert step(scheduler, cache) == [(("c", 1), 0, 2), ("d", 0, 2)]  # a and b give way
    assert step(scheduler, cache) == [(("a", 1), 8, 8), (("c", 1), 2, 1), ("d", 2, 1)]


def test_all_samples_of_a_prompt_are_cancelled_one_after_another():
    scheduler, cache = make(40, max_num_batched_tokens=10), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 18, 3)
    step(scheduler, cache)
    for request in samples:
        assert scheduler.has_work
        scheduler.cancel(request)
        scheduler.manager.check()
    assert not scheduler.has_work
    assert scheduler.manager.num_free_blocks == 40


@pytest.mark.parametrize("dying_step", [0, 1, 2])
def test_a_step_that_died_before_or_after_the_fork_loses_nothing(dying_step):
    scheduler, cache = make(40, max_num_batched_tokens=10), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 18, 3)
    for index in range(dying_step + 1):
        run_any_step(scheduler, cache, dies=index == dying_step)
    assert list(scheduler.waiting) == (samples if dying_step == 2 else samples[:1])
    run_all(scheduler, cache)
    check_answers(samples, [0] * 18)


def test_copies_of_a_step_that_died_are_forgotten():
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    add_samples(scheduler, "a", [0] * 6, 2)
    step(scheduler, cache)
    chunks = scheduler.schedule()
    assert [len(chunk.copies) for chunk in chunks] == [1, 0]
    scheduler.abort(chunks)
    assert scheduler.manager.take_copies() == []
    assert [chunk.copies for chunk in scheduler.schedule()] == [(), ()]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_sample_is_added_before_anything_is_generated():
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    request = add(scheduler, "a", [0] * 6)
    step(scheduler, cache)
    with pytest.raises(SequenceStateError, match=r"add_sample: expected .* generated nothing, got 1 tokens"):
        request.add_sample("b")
    assert request.siblings == []


def test_samples_are_refused_if_one_alone_could_not_finish():
    scheduler = make(3)
    request = Request(Sequence("a", [0] * 12), 2)
    request.add_sample("b")
    with pytest.raises(InvalidArgumentError, match="at most 13 tokens"):
        scheduler.add(request)
    assert not scheduler.has_work


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_step_is_completed_with_a_token_for_each_sample(num_tokens):
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 6, 2)
    chunks = scheduler.schedule()
    with pytest.raises(InvalidArgumentError, match=f"complete: expected 2 sampled tokens, got {num_tokens}"):
        scheduler.complete(chunks, [0] * num_tokens)
    scheduler.complete(chunks, cache.run(chunks))
    run_all(scheduler, cache)
    check_answers(samples, [0] * 6)
