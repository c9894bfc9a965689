"""Chunks computed by layers: the same bits as whole steps, whatever runs in between and whoever dies."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from engine.small_models import BLOCK_SIZE, CONFIGS, EVEN, GEMMA3, random_tokens, random_weights, step
from engine.watched import Watch

from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.errors import ModelError
from kvblocks.engine.run.determinism import choose_determinism
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.rows import NATURAL, TILE16
from kvblocks.errors import InvalidArgumentError

TABLE, OTHER = list(range(10)), list(range(10, 20))


def build(config, strategy):
    weights = random_weights(config)
    return DecoderModel(
        config,
        weights,
        strategy={"natural": NATURAL, "tile16": TILE16}.get(strategy) or choose_determinism(config, weights),
    )


@pytest.mark.parametrize("strategy", ["natural", "chosen", "tile16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_cache_has_the_same_bits_as_after_a_whole_step(config, strategy):
    model, prompt = build(config, strategy), random_tokens(config, 150)
    whole, by_layers = (model.new_kv_cache(20, BLOCK_SIZE) for _ in range(2))
    chunk = SequenceRows(prompt[37:], 37, TABLE, wants_logits=False)
    for cache in (whole, by_layers):
        step(model, cache, SequenceRows(prompt[:37], 0, TABLE))
    step(model, whole, chunk)
    batch = StepBatch.build([chunk], BLOCK_SIZE)
    with torch.inference_mode():
        num_layers = 0
        for _ in model.by_layers(batch, by_layers):
            num_layers += 1
            step(model, by_layers, SequenceRows(prompt[: 20 * num_layers], 0, OTHER))  # somebody else's step
    assert num_layers == config.num_layers
    for ours, theirs in zip((*whole.keys, *whole.values), (*by_layers.keys, *by_layers.values), strict=True):
        assert torch.equal(ours[:10], theirs[:10])


def test_what_forward_refuses_is_refused_before_the_first_layer():
    model = build(EVEN, "natural")
    cache = model.new_kv_cache(4, BLOCK_SIZE)
    before = [tensor.clone() for tensor in cache.memory]
    with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 511, got 512"):
        next(model.by_layers(StepBatch.build([SequenceRows([512], 0, [0])], BLOCK_SIZE), cache))
    assert all(torch.equal(tensor, then) for tensor, then in zip(cache.memory, before, strict=True))


# --- in an engine ----------------------------------------------------------------------------------------------------

LIMITS = StepLimits(48, 4, 12)
"""With 4 layers a chunk has 48 tokens, and a slice is one layer."""


@pytest.fixture(scope="module", params=["full attention", "windows"])
def model(request):
    config = GEMMA3 if request.param == "windows" else replace(EVEN, num_layers=4)
    return LoadedModel(config, random_weights(config))


@pytest.fixture(scope="module")
def prompts(model):
    """Two long prompts that share 70 tokens, and two short ones."""
    shared = random_tokens(model.config, 70, seed=1)
    sizes = ((0, 150), (70, 90), (0, 9), (40, 5))
    return [shared[:num_shared] + random_tokens(model.config, own, seed=own) for num_shared, own in sizes]


def make(model, limits=LIMITS, **options):
    engine = Engine(model, **{"num_blocks": 200, "deterministic": True, **options})
    engine.limits = limits
    return engine


class Slices:
    """Counts an engine's slices, and raises `error` in the slice number `dies_in`, after its layers are computed."""

    def __init__(self, engine, dies_in=None, error=None):
        self.number, self.dies_in, self.error = 0, dies_in, error
        self._run = engine.runner.run
        engine.runner.run = self

    def __call__(self, chunks, *score):
        logits = self._run(chunks, *score)
        self.number += chunks[0].part is not None
        if self.number == self.dies_in and chunks[0].part is not None:
            raise self.error
        return logits


def answer(engine, prompts, **options):
    """Submit a prompt a step, the first ones first. Returns the completions; None for what failed."""
    waiting, generations = list(prompts), []
    while waiting or engine.has_work:
        if waiting:
            generations += engine.submit(waiting.pop(0), **{"max_tokens": 6, "ignore_eos": True, **options})
        engine.step()
        engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    return [generation.completion for generation in generations]


def finish(engine):
    while engine.has_work:
        engine.step()
        engine.manager.check()


def test_logits_have_the_same_bits_as_in_whole_steps(model, prompts):
    layered, whole = make(model), make(model, StepLimits(), enable_prefix_caching=False)
    ours, theirs, slices = Watch(layered), Watch(whole), Slices(layered)
    found, expected = answer(layered, prompts), whole.generate(prompts, max_tokens=6, ignore_eos=True)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert slices.number >= 4 * 5
    assert all(torch.equal(ours.logits[tokens], logits) for tokens, logits in theirs.logits.items())


def test_a_second_turn_hits_what_was_computed_by_layers(model, prompts):
    engine = make(model)
    answer(engine, prompts[:1])
    slices = Slices(engine)
    (again,) = answer(engine, prompts[:1])
    assert again.num_cached_tokens == 144 and slices.number == 0


@pytest.mark.parametrize(
    "options", [{"n": 3, "temperature": 1.5, "seed": 3}, {"max_tokens": 0}, {"prompt_logprobs": 1}]
)
def test_samples_warm_prompts_and_scores(model, prompts, options):
    engine = make(model)
    slices = Slices(engine)
    found = answer(engine, prompts, **options)
    expected = [one for prompt in prompts for one in answer(make(model, StepLimits()), [prompt], **options)]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert (slices.number == 0) == ("prompt_logprobs" in options)


@pytest.mark.every(4)
@pytest.mark.parametrize("dies_in", range(1, 10))
def test_a_slice_that_dies_ends_its_own_generation_only(model, prompts, dies_in):
    expected = answer(make(model), prompts)
    engine = make(model)
    Slices(engine, dies_in, RuntimeError("of a layer"))
    found = answer(engine, prompts)
    failed = [number for number, completion in enumerate(found) if completion is None]
    assert len(failed) == 1 and failed[0] < 2
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert number in failed or ours.token_ids == theirs.token_ids
    assert [one.token_ids for one in answer(engine, prompts)] == [one.token_ids for one in expected]


@pytest.mark.every(4)
@pytest.mark.parametrize("dies_in", range(1, 10))
def test_an_interrupted_slice_is_undone_and_computed_again(model, prompts, dies_in):
    expected = answer(make(model), prompts)
    engine = make(model)
    Slices(engine, dies_in, KeyboardInterrupt())
    generations = list(chain.from_iterable(engine.submit(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert (engine.scheduler.running, engine.scheduler.long_prompts.open) == ([], None)
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    finish(engine)
    assert [one.completion.token_ids for one in generations] == [one.token_ids for one in expected]


def test_the_first_slice_copies_the_block_that_somebody_else_holds_too(model, prompts):
    """The chunk begins in the middle of a block. A child of the prompt's beginning must keep what is in it."""
    fresh = make(model)
    expected = Watch(fresh)
    answer(fresh, prompts[:1])
    engine = make(model)
    watch, slices, (generation,) = (
        Watch(engine),
        Slices(engine),
        engine.submit(prompts[0], max_tokens=6, ignore_eos=True),
    )
    engine.step()
    sequence, kv_cache = engine.scheduler.running[0].sequence, engine.runner.kv_cache
    child = engine.manager.fork(sequence, "child")
    shared = [block_id for group in range(len(engine.manager.groups)) for block_id in child.group_block_ids(group)]
    before = [part[shared] for part in kv_cache.parts]
    finish(engine)
    assert generation.completion is not None and slices.number > 0
    assert watch.logits.keys() == expected.logits.keys()
    assert all(torch.equal(watch.logits[tokens], logits) for tokens, logits in expected.logits.items())
    assert all(torch.equal(part[shared], then) for part, then in zip(kv_cache.parts, before, strict=True))
    engine.manager.free(child)


def test_another_number_of_threads_is_refused_in_the_middle_of_a_chunk(model, prompts):
    engine = make(model)
    if engine.runner.model.strategy.num_threads is None:
        pytest.skip("this strategy holds for any number of threads")
    (generation,) = engine.submit(prompts[0])
    while engine.scheduler.long_prompts.open is None:
        engine.step()
    torch.set_num_threads(2)  # conftest takes it back
    engine.step()
    assert isinstance(generation.error, ModelError)


def test_a_device_runner_computes_whole_chunks(model, prompts):
    engine = make(model, deterministic=False)
    runner = DeviceRunner(engine.runner.model, 200, 16)
    assert (engine.runner.num_slice_layers, runner.num_slice_layers) == (4, 1)


def test_host_memory_gets_what_was_computed_by_layers_and_gives_it_back(model, prompts):
    expected = answer(make(model), prompts[:1])
    with make(model, num_blocks=50, tiers=["host:64MiB"]) as engine:
        answer(engine, prompts[:1])
        for seed in range(8):  # evict it from the device
            answer(engine, [random_tokens(model.config, 150, seed=900 + seed)])
        slices = Slices(engine)
        (again,) = answer(engine, prompts[:1])
        assert again.token_ids == expected[0].token_ids
        assert sum(again.num_loaded_tokens.values()) == 144 and slices.number == 0
