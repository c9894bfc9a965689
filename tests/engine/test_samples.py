"""Several samples of a prompt from the engine: the same bits as one by one, for the prompt's price once."""

from dataclasses import replace

import pytest
import torch

from engine.small_models import EVEN, ODD, random_tokens, random_weights
from kvblocks import PoolExhaustedError
from kvblocks.cli import app as cli
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.sampling.random_numbers import sample_seed
from kvblocks.errors import InvalidArgumentError

CONFIGS = {"odd": ODD, "even": replace(EVEN, tie_word_embeddings=False)}
NUM_SAMPLES = 4
OPTIONS = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return LoadedModel(CONFIGS[request.param], random_weights(CONFIGS[request.param]))


@pytest.fixture(scope="module")
def prompts(model):
    """Prompts: one ends within a block, one ends with a block, and one shares most of the first."""
    tokens = random_tokens(model.config, 70, seed=1)
    return [tokens, random_tokens(model.config, 32, seed=2), [*tokens[:66], 1, 2, 3]]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each sample of each prompt as a call of its own, without caching."""
    torch.set_num_threads(1)
    engine = Engine(model, num_blocks=64, enable_prefix_caching=False, deterministic=True)
    return [
        engine.generate([prompt], seed=sample_seed(5, number), **OPTIONS)[0].token_ids
        for prompt in prompts
        for number in range(NUM_SAMPLES)
    ]


WAYS = {
    "as it comes": {},
    "without caching": {"enable_prefix_caching": False},
    "in chunks": {"limits": StepLimits(13, 12)},
    "in small chunks": {"limits": StepLimits(40, 12, 7)},
    "more samples than may run": {"limits": StepLimits(64, 3)},
    "one at a time": {"limits": StepLimits(13, 1)},
    "more than the pool holds": {"num_blocks": 8},
    "more than the pool holds, without caching": {"num_blocks": 8, "enable_prefix_caching": False},
    "in small blocks": {"block_size": 4, "num_blocks": 256},
    "in large blocks": {"block_size": 64, "num_blocks": 16},
}


@pytest.mark.parametrize("way", WAYS)
def test_samples_are_what_single_calls_give(model, prompts, alone, way):
    options = dict(WAYS[way])
    limits = options.pop("limits", StepLimits())
    engine = Engine(model, deterministic=True, **{"num_blocks": 64, **options})
    engine.limits = limits
    completions = engine.generate(prompts, n=NUM_SAMPLES, seed=5, **OPTIONS)
    assert [completion.token_ids for completion in completions] == alone
    assert len({tuple(token_ids) for token_ids in alone}) == len(alone)
    engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert not engine.scheduler.has_work


def test_the_prompt_is_computed_and_held_once(model, prompts):
    engine = Engine(model, num_blocks=64)
    stream = engine.stream(prompts[:1], n=4, max_tokens=6, ignore_eos=True, temperature=1.0, seed=1)
    next(stream)  # the prompt has been computed, and the first tokens sampled
    assert 64 - engine.manager.num_free_blocks == 5  # 70 tokens
    for _ in range(3):
        engine.step()
    assert 64 - engine.manager.num_free_blocks == 4 + 4  # its full blocks, and a tail for each
    completions = [piece.completion for piece in stream if piece.completion]
    assert [completion.num_computed_tokens for completion in completions] == [70 + 5, 5, 5, 5]
    assert [completion.num_cached_tokens for completion in completions] == [0, 70, 70, 70]
    assert all(completion.ttft_s > 0 for completion in completions)


def test_pieces_say_whose_they_are(model, prompts):
    options = {"n": 3, "max_tokens": 5, "temperature": 1.0, "seed": 2}
    engine = Engine(model, num_blocks=64, deterministic=True)
    pieces = list(engine.stream(prompts[:2], **options))
    completions = engine.generate(prompts[:2], **options)
    assert len(completions) == 6
    for index, completion in enumerate(completions):
        own = [piece for piece in pieces if (piece.prompt_index, piece.sample_index) == divmod(index, 3)]
        assert [piece.token_id for piece in own] == completion.token_ids
        assert own[-1].completion.token_ids == completion.token_ids


def test_greedy_samples_are_equal(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    (single,) = engine.generate(prompts[:1], max_tokens=8)
    assert [c.token_ids for c in engine.generate(prompts[:1], n=3, max_tokens=8)] == [single.token_ids] * 3


def test_samples_stop_each_by_itself(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    free = engine.generate(prompts[:1], n=4, seed=5, **OPTIONS)
    stop = free[1].token_ids[0]  # ends the second sample in the step that computes the prompt
    stopping = LoadedModel(replace(model.config, eos_token_ids=(stop,)), model.weights)
    engine = Engine(stopping, num_blocks=64, deterministic=True)
    completions = engine.generate(prompts[:1], n=4, seed=5, **{**OPTIONS, "ignore_eos": False})
    assert completions[1].token_ids == [stop]
    for completion, whole in zip(completions, free, strict=True):
        end = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else None
        assert completion.token_ids == whole.token_ids[:end]
        assert completion.finish_reason == ("length" if end is None else "stop")


@pytest.mark.parametrize("num_pieces", [1, 6])
def test_closing_a_stream_drops_all_its_samples(model, prompts, num_pieces):
    engine = Engine(model, num_blocks=64)
    engine.limits = StepLimits(16, 8)
    stream = engine.stream([prompts[1], prompts[0]], n=3, max_tokens=8, ignore_eos=True)
    for _ in range(num_pieces):  # the second prompt's samples aren't there yet, or not forked
        next(stream)
    stream.close()
    engine.manager.check()
    assert engine.manager.num_free_blocks == 64
    assert not engine.scheduler.has_work


def test_a_step_that_died_can_be_tried_again(model, prompts, alone):
    engine = Engine(model, num_blocks=64, deterministic=True)
    stream = engine.stream(prompts[:1], n=4, seed=5, **OPTIONS)
    run, tokens = engine.runner.run, {}
    for num_steps in range(3):  # the prompt's, the one that copies, and the one after it
        engine.runner.run = lambda chunks: torch.full((len(chunks), model.config.vocab_size), torch.nan)
        if num_steps:
            with pytest.raises(ModelError, match="got NaN"):
                engine.step()
        engine.runner.run = run
        piece = next(stream)
        tokens.setdefault(piece.sample_index, []).append(piece.token_id)
    for piece in stream:
        tokens.setdefault(piece.sample_index, []).append(piece.token_id)
    assert [tokens[number] for number in range(4)] == alone[:4]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None])
def test_the_number_of_samples_is_checked(model, n):
    engine = Engine(model, num_blocks=8)
    with pytest.raises(InvalidArgumentError, match="n: expected an int of at least 1, got"):
        engine.generate([[1]], n=n)
    assert not engine.scheduler.has_work


def test_equal_prompts_that_arrive_together_compute_their_prefix_once(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    engine.limits = StepLimits(32, 8, 16)  # five chunks
    completions = engine.generate([prompts[0]] * 8, max_tokens=3, ignore_eos=True)
    assert [c.num_computed_tokens for c in completions] == [70 + 2, *[6 + 2] * 7]
    assert len({tuple(c.token_ids) for c in completions}) == 1


def test_pins_that_leave_no_room_are_named_and_cost_nothing(model, prompts):
    engine = Engine(model, num_blocks=8)
    engine.generate([prompts[0]], max_tokens=1)
    pin = engine.manager.pins.pin(prompts[0], priority=100)  # 4 blocks
    with pytest.raises(PoolExhaustedError, match=r"prompts\[1\]: expected at most 65 tokens while pins keep 4"):
        engine.generate([prompts[0], prompts[1]], n=2, max_tokens=40)
    assert engine.manager.num_free_blocks == 4
    engine.manager.pins.unpin(pin)
    assert len(engine.generate([prompts[0], prompts[1]], n=2, max_tokens=40)) == 4


# --- what a request may ask for ---------------------------------------------------------------------------------------

MIXTURE = [
    {},
    {"temperature": 1.5, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.001, "seed": 6, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5, "seed": 7, "n": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 0},
]


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_requests_of_all_kinds_get_together_what_each_gets_alone(model, prompts, num_blocks):
    """Also with preemptions, and with cached prompts."""
    engine = Engine(model, num_blocks=64, deterministic=True, enable_prefix_caching=False)
    alone = [engine.generate(prompts[:1], max_tokens=20, ignore_eos=True, **options) for options in MIXTURE]
    crowded = Engine(model, num_blocks=num_blocks, deterministic=True)
    for _ in range(2):
        together = [crowded.submit(prompts[0], max_tokens=20, ignore_eos=True, **options) for options in MIXTURE]
        while crowded.has_work:
            crowded.step()
        for expected, generations in zip(alone, together, strict=True):
            completions = [generation.completion for generation in generations]
            assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
            assert [c.logprobs for c in completions] == [c.logprobs for c in expected]
    if num_blocks == 12:
        assert sum(g.request.num_preemptions for generations in together for g in generations) > 0


def test_penalties_keep_tokens_from_coming_again(model, prompts):
    engine = Engine(model, num_blocks=64)
    options = {"max_tokens": 40, "ignore_eos": True}
    plain, present, repeated = (
        engine.generate(prompts[:1], **options, **penalty)[0].token_ids
        for penalty in ({}, {"presence_penalty": 1e6}, {"repetition_penalty": 1e6, "presence_penalty": 1e-9})
    )
    assert len(set(plain)) < 40
    assert len(set(present)) == 40
    assert present[0] == plain[0]
    assert set(repeated).isdisjoint(prompts[0])


def test_logarithms_come_with_pieces_and_completions(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    pieces = list(engine.stream(prompts[:2], max_tokens=5, ignore_eos=True, logprobs=3))
    completions = engine.generate(prompts[:2], max_tokens=5, ignore_eos=True, logprobs=3)
    for index, completion in enumerate(completions):
        own = [piece for piece in pieces if piece.prompt_index == index]
        assert [piece.logprobs for piece in own] == completion.logprobs == own[-1].completion.logprobs
        assert [logprobs.top[0][0] for logprobs in completion.logprobs] == completion.token_ids
        assert [logprobs.top[0][1] for logprobs in completion.logprobs] == [lp.logprob for lp in completion.logprobs]
        assert all(len(logprobs.top) == 3 for logprobs in completion.logprobs)
    (without,) = engine.generate(prompts[:1], max_tokens=5, ignore_eos=True)
    assert without.logprobs is None
    assert engine.generate(prompts[:1], max_tokens=0, logprobs=1)[0].logprobs == []


def test_the_engine_counts_what_it_drew(model, prompts):
    engine = Engine(model, num_blocks=64)
    engine.generate(prompts, max_tokens=4, ignore_eos=True, temperature=1.0, top_p=0.5, n=2)
    assert engine.sampling.num_draws == len(prompts) * 4 * 2
    assert 0 <= engine.sampling.num_sorted <= engine.sampling.num_draws


# --- around it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_id", [-1, 4])
def test_copies_are_checked_before_any_is_made(block_id):
    cache = KVCache.allocate(ODD, num_blocks=4, block_size=2)
    cache.keys[0].copy_(torch.arange(4.0).view(4, 1, 1, 1).expand_as(cache.keys[0]))
    before = cache.keys[0].clone()
    with pytest.raises(InvalidArgumentError, match=f"copy_blocks: expected block ids from 0 to 3, got {block_id}"):
        cache.copy_blocks([(1, 0), (2, block_id)])
    assert torch.equal(cache.keys[0], before)
    cache.copy_blocks([])
    assert torch.equal(cache.keys[0], before)


def test_copies_are_made_in_all_layers_of_keys_and_values():
    cache = KVCache.allocate(ODD, num_blocks=4, block_size=2)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    first = [tensor[0].clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([(0, 1), (1, 3)])
    for tensor, block in zip((*cache.keys, *cache.values), first, strict=True):
        assert torch.equal(tensor[1], block)
        assert torch.equal(tensor[3], block)


def test_the_command_prints_all_answers(tiny_folder, capsys):
    arguments = [
        "generate",
        "hello",
        "--model",
        str(tiny_folder),
        "--max-tokens",
        "6",
        "--temperature",
        "1",
        "--seed",
        "3",
    ]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    single = capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        cli.main([*arguments, "--n", "3"])
    assert not raised.value.code
    output = capsys.readouterr().out
    assert output.startswith(f"[1/3]\n{single}[2/3]\n")
    assert "\n[3/3]\n" in output
