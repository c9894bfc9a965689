"""The watermark: admission leaves room to grow, counts only what isn't cached, and never blocks an empty pool."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step

from kvblocks.engine.schedule.step import StepLimits
from kvblocks.errors import InvalidArgumentError


def run_all(scheduler, cache):
    """How many steps it takes until there is no work."""
    num_steps = 0
    while scheduler.has_work:
        run_any_step(scheduler, cache)
        num_steps += 1
        assert num_steps < 5000
    return num_steps


def names(scheduler):
    return [request.sequence.sequence_id for request in scheduler.running]


# --- room to grow ----------------------------------------------------------------------------------------------------


def thrash(watermark):
    """Run 24 requests that grow from 8 to 40 tokens; four of 40 fit. Returns preemptions, recomputed tokens, steps."""
    scheduler = make(40, max_num_batched_tokens=64, max_num_seqs=24, enable_caching=False, watermark=watermark)
    cache = FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, name, [name % 3] * 8, max_tokens=33) for name in range(24)]
    num_steps = run_all(scheduler, cache)
    for name, request in enumerate(requests):
        assert request.output_token_ids == answer_alone((None, 0), [name % 3] * 8, 33)
    num_recomputed = sum(request.num_computed_tokens for request in requests) - 24 * 40
    return sum(request.num_preemptions for request in requests), num_recomputed, num_steps


def test_a_watermark_keeps_a_full_pool_from_thrashing():
    """Measured: 38 preemptions and 565 tokens recomputed without, 22 and 353 with a tenth, 16 and 285 with a quarter.

    It takes 145, 148 and 161 steps.
    """
    without, tenth, quarter = thrash(0.0), thrash(0.1), thrash(0.25)
    assert quarter[0] < tenth[0] < 0.7 * without[0]
    assert quarter[1] < tenth[1] < 0.7 * without[1]
    assert tenth[2] < 1.05 * without[2]
    assert quarter[2] < 1.2 * without[2]


def test_admission_leaves_the_share_free():
    scheduler, cache = make(20, watermark=0.25, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 40, max_tokens=2)  # 10 blocks
    add(scheduler, "b", [1] * 20, max_tokens=2)  # 5 blocks, which leave 5
    add(scheduler, "c", [2], max_tokens=2)
    step(scheduler, cache)
    assert names(scheduler) == ["a", "b"]
    assert scheduler.manager.num_free_blocks == 5


def test_one_block_more_is_refused_while_others_run():
    scheduler, cache = make(20, watermark=0.25, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 40, max_tokens=3)
    add(scheduler, "b", [1] * 21, max_tokens=3)
    step(scheduler, cache)
    assert names(scheduler) == ["a"]
    run_all(scheduler, cache)


def test_a_share_is_rounded_down_and_means_nothing_below_a_block():
    scheduler, cache = make(20, watermark=0.049, max_num_batched_tokens=100), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 40)
    add(scheduler, "b", [1] * 40)
    step(scheduler, cache)
    assert names(scheduler) == ["a", "b"]
    assert scheduler.manager.num_free_blocks == 0
    run_all(scheduler, cache)


def test_the_whole_prompt_counts_not_its_first_chunk():
    scheduler = make(20, watermark=0.25, max_num_batched_tokens=16, max_num_chunk_tokens=8)
    cache = FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 44, max_tokens=2)  # 11 blocks, of which a step takes 2
    add(scheduler, "b", [1] * 20, max_tokens=2)
    for _ in range(3):
        step(scheduler, cache)
        assert names(scheduler) == ["a"]
    run_all(scheduler, cache)


def test_samples_count_a_block_each():
    for num_samples, expected in ((2, [0, 1]), (3, [0])):
        scheduler, cache = make(20, watermark=0.25, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
        add_samples(scheduler, 0, [0] * 36, 1, max_tokens=2)
        add_samples(scheduler, 1, [1] * 20, num_samples, max_tokens=2)
        step(scheduler, cache)
        assert sorted({name for name, _ in names(scheduler)}) == expected
        run_all(scheduler, cache)


@pytest.mark.parametrize("watermark", [0.5, 0.99])
def test_the_only_request_is_never_held_back(watermark):
    scheduler, cache = make(10, watermark=watermark, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, name, [name] * 36, max_tokens=5) for name in range(3)]  # the whole pool each
    while scheduler.has_work:
        run_any_step(scheduler, cache)
        assert len(scheduler.running) <= 1
    assert all(request.finish_reason == "length" and not request.num_preemptions for request in requests)


# --- what is cached costs nothing ------------------------------------------------------------------------------------


def test_what_others_hold_costs_nothing():
    """b needs more blocks than are free, but shares all except one with a."""
    scheduler, cache = make(12, watermark=0.1, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 32, max_tokens=8)
    step(scheduler, cache)
    add(scheduler, "b", [*[0] * 32, 1], max_tokens=2)
    assert step(scheduler, cache) == [("a", 32, 1), ("b", 32, 1)]


def test_what_is_cached_and_free_costs_what_it_holds():
    """A hit takes its free blocks out of the free queue. So it leaves no more blocks free than computing the prompt."""
    for watermark, expected in ((0.25, ["a", "b"]), (0.35, ["a"])):
        scheduler = make(20, watermark=watermark, max_num_batched_tokens=64)
        cache = FakeCache(BLOCK_SIZE)
        add(scheduler, "setup", [1] * 32, max_tokens=1)
        run_all(scheduler, cache)
        add(scheduler, "a", [0] * 24, max_tokens=9)
        add(scheduler, "b", [1] * 32, max_tokens=9)  # 8 blocks of the 14 that a leaves
        step(scheduler, cache)
        assert names(scheduler) == expected


@pytest.mark.parametrize("watermark", [0.0, 0.2])
@pytest.mark.parametrize("num_hit_blocks", [0, 3, 9])
def test_a_pool_whose_free_blocks_are_all_cached_is_an_empty_one(num_hit_blocks, watermark):
    """A request hits some of them and evicts the others, though it needs the whole pool."""
    scheduler, cache = make(10, watermark=watermark, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    add(scheduler, "setup", [0] * 40, max_tokens=1)
    run_all(scheduler, cache)
    manager = scheduler.manager
    assert manager.stats.num_cached_blocks == manager.num_free_blocks == 10
    prompt = [0] * (4 * num_hit_blocks) + [1] * (36 - 4 * num_hit_blocks)
    request = add(scheduler, "a", prompt, max_tokens=5)
    assert step(scheduler, cache) == [("a", min(4 * num_hit_blocks, 35), max(1, 36 - 4 * num_hit_blocks))]
    run_all(scheduler, cache)
    assert request.output_token_ids == answer_alone((None, 0), prompt, 5)
    assert not request.num_preemptions


@pytest.mark.parametrize("watermark", [0.0, 0.1, 0.3, 0.9])
def test_two_that_hit_all_that_is_free_do_not_block_each_other(watermark):
    """Both prompts are cached, and together they need the whole pool and more."""
    scheduler, cache = make(10, watermark=watermark, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    prompts = [[0] * 20, [1] * 20]
    for prompt in prompts:
        add(scheduler, "setup", prompt, max_tokens=1)
        run_all(scheduler, cache)
    assert scheduler.manager.stats.num_cached_blocks == 10
    requests = [add(scheduler, name, prompt, max_tokens=12) for name, prompt in enumerate(prompts)]
    run_all(scheduler, cache)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == answer_alone((None, 0), prompt, 12)


def test_soft_pins_are_left_alone_while_others_run_and_given_up_for_the_only_one():
    scheduler, cache = make(20, watermark=0.1, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    add(scheduler, "setup", [0] * 40, max_tokens=1)
    run_all(scheduler, cache)
    pin = scheduler.manager.pins.pin([0] * 40, priority=10)
    add(scheduler, "a", [1] * 16, max_tokens=6)
    add(scheduler, "b", [2] * 24, max_tokens=3)
    step(scheduler, cache)
    assert (names(scheduler), pin.num_held_blocks) == (["a"], 10)
    add(scheduler, "c", [3] * 60, max_tokens=1)
    run_all(scheduler, cache)
    assert pin.num_held_blocks == 5  # c needed 15 blocks


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watermark", [1, 1.0, -0.01, float("nan"), None, "0.1", True])
def test_a_watermark_must_be_a_share(watermark):
    with pytest.raises(InvalidArgumentError, match=r"watermark: expected a share from 0.0 to below 1.0, got"):
        StepLimits(watermark=watermark)
