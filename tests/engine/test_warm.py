"""Prompts that are computed and cached, without generating anything."""

from dataclasses import replace

import pytest
import torch

from engine.small_models import EVEN, GEMMA3, random_tokens, random_weights
from kvblocks import KVCacheManager, Sequence
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.errors import InvalidArgumentError, SequenceStateError


def load(config):
    torch.set_num_threads(1)
    return LoadedModel(
        replace(config, tie_word_embeddings=False), random_weights(replace(config, tie_word_embeddings=False))
    )


@pytest.fixture(scope="module")
def model():
    return load(EVEN)


@pytest.mark.parametrize("config", [EVEN, GEMMA3], ids=["full", "windows"])
def test_what_is_warmed_is_hit_and_answered_alike(config):
    model = load(config)
    prompt = random_tokens(model.config, 80, seed=1)
    cold = Engine(model, num_blocks=200, deterministic=True).generate([prompt], max_tokens=6)[0]
    engine = Engine(model, num_blocks=200, deterministic=True)
    (warmed,) = engine.warm([prompt])
    assert (warmed.token_ids, warmed.text, warmed.finish_reason) == ([], "", "length")
    assert (warmed.num_cached_tokens, warmed.num_computed_tokens, warmed.num_prompt_tokens) == (0, 80, 80)
    assert warmed.ttft_s > 0
    assert engine.manager.num_free_blocks == 200
    (answer,) = engine.generate([prompt], max_tokens=6)
    assert answer.token_ids == cold.token_ids
    assert answer.num_cached_tokens == 79


def test_all_full_blocks_are_cached_the_last_one_too(model):
    engine = Engine(model, num_blocks=64)
    prompts = [random_tokens(model.config, length, seed=length) for length in (64, 63, 5)]
    assert [completion.num_computed_tokens for completion in engine.warm(prompts)] == [64, 63, 5]
    longer = [prompt + [1] * 20 for prompt in prompts]
    assert [completion.num_cached_tokens for completion in engine.warm(longer)] == [64, 48, 0]


def test_what_is_there_is_not_computed_again_and_prompts_share(model):
    engine = Engine(model, num_blocks=64)
    shared = random_tokens(model.config, 48, seed=1)
    first, second = engine.warm([[*shared, 1, 2], [*shared, 3, 4]], salt="a")
    assert [first.num_computed_tokens, second.num_computed_tokens] == [50, 2]
    assert engine.warm([[*shared, 1, 2]], salt="a")[0].num_computed_tokens == 2
    assert engine.warm([[*shared, 1, 2]], salt="b")[0].num_computed_tokens == 50


def test_in_chunks_beside_answers_and_under_pressure(model):
    """With a pool in which requests preempt each other."""
    prompts = [random_tokens(model.config, 70, seed=seed) for seed in range(4)]
    expected = [c.token_ids for c in Engine(model, num_blocks=64, deterministic=True).generate(prompts, max_tokens=30)]
    engine = Engine(model, num_blocks=9, deterministic=True)
    engine.limits = StepLimits(24, 4, watermark=0.0)
    generations = []
    for prompt in prompts:
        generations += engine.submit(prompt, max_tokens=30) + engine.submit([*prompt, 3], max_tokens=0)
    while engine.has_work:
        engine.step()
        engine.manager.check()
    assert [generation.completion.token_ids for generation in generations[::2]] == expected
    for generation in generations[1::2]:
        assert (generation.completion.token_ids, list(generation.pieces)) == ([], [])
        assert generation.completion.num_computed_tokens > 0
    assert engine.manager.num_free_blocks == 9


def test_a_step_says_who_ended_and_a_cancelled_one_has_no_completion(model):
    engine = Engine(model, num_blocks=64)
    engine.limits = StepLimits(16, 4)
    (generation,) = engine.submit([5] * 40, max_tokens=0)
    assert (engine.step(), engine.step(), engine.step()) == ([], [], [generation])
    assert generation.finish_reason == "length"
    (other,) = engine.submit([6] * 40, max_tokens=0)
    engine.step()
    engine.cancel(other)
    assert (other.finish_reason, other.completion) == ("cancelled", None)
    assert not engine.has_work


def test_a_stream_of_nothing_ends_when_the_prompt_is_computed(model):
    engine = Engine(model, num_blocks=64)
    assert list(engine.stream([[5] * 40], max_tokens=0)) == []
    assert engine.warm([[5] * 40])[0].num_cached_tokens == 32


def test_it_needs_slots_for_all_of_its_tokens():
    scheduler = Scheduler(KVCacheManager(4, 4), 100)
    scheduler.check_fits(Request(Sequence("a", [0] * 16), 0))
    scheduler.check_fits(Request(Sequence("a", [0] * 16), 1))
    with pytest.raises(InvalidArgumentError, match=r"at most 16 tokens, what the pool's 4 blocks .* got 17"):
        scheduler.check_fits(Request(Sequence("a", [0] * 17), 0))


def test_it_has_no_samples():
    with pytest.raises(SequenceStateError, match="add_sample: expected a request that is to generate tokens"):
        Request(Sequence("a", [0]), 0).add_sample("b")
