"""`Engine(remember_next_token=True)`: a repeat's first token without a forward pass, and never another token."""

import random
import time
from dataclasses import replace

import pytest
import torch

from engine.small_models import EVEN, GEMMA3, QWEN3, WINDOW, random_tokens, random_weights
from engine.watched import Watch
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.errors import InvalidArgumentError

CONFIGS = {
    "one group": replace(EVEN, tie_word_embeddings=False),
    "windows": replace(GEMMA3, num_layers=6, windows=(WINDOW, WINDOW, None) * 2, tie_word_embeddings=False),
    "windows only": replace(QWEN3, windows=(WINDOW, WINDOW)),
}


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {name: LoadedModel(config, random_weights(config)) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def model(models):
    return models["one group"]


@pytest.fixture
def engine(model):
    with Engine(model, num_blocks=64, deterministic=True, remember_next_token=True) as made:
        yield made
        check_whole(made)
    assert made.manager.num_free_blocks == 64


def check_whole(engine):
    engine.manager.check()
    engine.scheduler.remembered.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks - engine.scheduler.remembered.num_blocks


def count_steps(engine):
    """A list that gets how many tokens each forward pass from now on computes."""
    counts, run = [], engine.runner.run

    def counted(chunks, *more):
        counts.append(sum(chunk.num_tokens for chunk in chunks))
        return run(chunks, *more)

    engine.runner.run = counted
    return counts


def ask(engine, prompt, **options):
    (completion,) = engine.generate([prompt], **{"max_tokens": 6, "ignore_eos": True, **options})
    return completion


def plain_answer(model, prompt, **options):
    return ask(Engine(model, num_blocks=64, deterministic=True), prompt, **options).token_ids


# --- what a repeat costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 64, 73])
def test_the_first_token_of_a_repeat_costs_no_forward_pass(engine, model, num_tokens):
    prompt = random_tokens(model.config, num_tokens, seed=num_tokens)
    expected = plain_answer(model, prompt)
    steps = count_steps(engine)
    assert ask(engine, prompt, max_tokens=1).token_ids == expected[:1]
    assert steps == [num_tokens]
    steps.clear()
    once = ask(engine, prompt, max_tokens=1)
    assert once.token_ids == expected[:1]
    assert steps == []
    assert (once.num_cached_tokens, once.num_computed_tokens, once.finish_reason) == (num_tokens, 0, "length")
    longer = ask(engine, prompt)
    assert longer.token_ids == expected
    assert steps == [1] * 5
    assert (longer.num_cached_tokens, longer.num_computed_tokens) == (num_tokens, 5)
    assert engine.scheduler.remembered.num_answers == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_behind_a_kept_prompt_have_the_same_bits(models, name):
    """Two and a half windows, with everything spoiled that a step must not read."""
    model = models[name]
    prompts = [random_tokens(model.config, number, seed=number) for number in (70, 64, 11)]
    fresh = Engine(model, num_blocks=100, deterministic=True, enable_prefix_caching=False)
    engine = Engine(model, num_blocks=100, deterministic=True, remember_next_token=True)
    expected, watch = Watch(fresh), Watch(engine)
    for prompt in prompts:
        wanted = ask(fresh, prompt).token_ids
        assert ask(engine, prompt, max_tokens=1).token_ids == wanted[:1]
        assert ask(engine, prompt).token_ids == ask(engine, prompt).token_ids == wanted
    assert engine.scheduler.remembered.num_answers == 6
    assert watch.logits.keys() == expected.logits.keys()
    for tokens, logits in expected.logits.items():
        assert torch.equal(watch.logits[tokens], logits)
    assert watch.num_spoiled_slots > 0
    check_whole(engine)


def test_the_token_comes_before_anything_is_computed(engine, model):
    """A step that gives remembered tokens computes nothing. The next one computes, even if it gives some too."""
    repeated, other = random_tokens(model.config, 40, seed=1), random_tokens(model.config, 40, seed=2)
    (first,) = ask(engine, repeated, max_tokens=1).token_ids
    (computes,) = engine.submit(other, max_tokens=6, ignore_eos=True)
    assert engine.step() == [computes]
    steps = count_steps(engine)
    (again,) = engine.submit(repeated, max_tokens=3, ignore_eos=True)
    assert engine.step() == [again]
    assert (steps, [piece.token_id for piece in again.pieces]) == ([], [first])
    assert again.pieces[0].completion is None
    (once,) = engine.submit(repeated, max_tokens=1)
    assert engine.step() == [once, computes, again]
    assert (steps, once.finish_reason) == ([2], "length")
    while engine.has_work:
        engine.step()
    assert computes.completion.token_ids == plain_answer(model, other)
    assert again.completion.token_ids == plain_answer(model, repeated, max_tokens=3)
    assert 0 < again.completion.ttft_s < time.perf_counter() - again.start_s


def test_an_answer_may_end_with_its_first_token(engine, model):
    prompt = random_tokens(model.config, 40, seed=1)
    (first, *_) = plain_answer(model, prompt)
    ask(engine, prompt)
    steps = count_steps(engine)
    stopped = ask(engine, prompt, stop_token_ids=[first])
    assert (stopped.token_ids, stopped.finish_reason, steps) == ([first], "stop", [])


def test_samples_that_are_one_and_streams_are_answered(engine, model):
    prompt = random_tokens(model.config, 40, seed=1)
    pieces = [[piece.token_id for piece in engine.stream([prompt], max_tokens=6, ignore_eos=True)] for _ in range(2)]
    assert pieces == [plain_answer(model, prompt)] * 2
    assert engine.scheduler.remembered.num_answers == 1


# --- what is never answered by it ------------------------------------------------------------------------------------

NOT_PLAIN = {
    "drawn": {"temperature": 1.0, "seed": 1},
    "several": {"n": 2},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 2.0},
    "log probabilities": {"logprobs": 2},
    "those of the prompt": {"prompt_logprobs": 0},
    "a least length": {"ignore_eos": False, "min_tokens": 2},
    "nothing wanted": {"max_tokens": 0, "ignore_eos": True},
}


@pytest.mark.parametrize("how", NOT_PLAIN)
def test_other_settings_neither_keep_nor_get_a_token(engine, model, how):
    prompt = random_tokens(model.config, 40, seed=1)
    options = {"max_tokens": 4, "ignore_eos": True, **NOT_PLAIN[how]}
    expected = Engine(model, num_blocks=64, deterministic=True).generate([prompt], **options)
    engine.generate([prompt], **options)
    assert len(engine.scheduler.remembered) == 0
    ask(engine, prompt)
    assert len(engine.scheduler.remembered) == 1
    completions = engine.generate([prompt], **options)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert [c.logprobs for c in completions] == [c.logprobs for c in expected]
    assert engine.scheduler.remembered.num_answers == 0


def test_what_changes_nothing_is_plain(engine, model):
    """At temperature 0 seeds and limits on what is drawn don't count, and stop strings come after the token."""
    prompt = random_tokens(model.config, 40, seed=1)
    expected = ask(engine, prompt)
    assert ask(engine, prompt, seed=4, top_k=3, top_p=0.5, min_p=0.1).token_ids == expected.token_ids
    assert engine.scheduler.remembered.num_answers == 1


def test_salts_share_no_tokens(engine, model):
    prompt = random_tokens(model.config, 40, seed=1)
    for salt in ("a", "b", None):
        assert ask(engine, prompt, salt=salt).num_cached_tokens == 0
    assert engine.scheduler.remembered.num_answers == 0
    assert ask(engine, prompt, salt="a").num_cached_tokens == 40
    engine.forget_salt("a")
    assert len(engine.scheduler.remembered) == 2
    assert ask(engine, prompt, salt="a").num_cached_tokens == 0
    assert ask(engine, prompt, salt="b").num_cached_tokens == 40


def test_a_reset_ends_it(engine, model):
    prompt = random_tokens(model.config, 9, seed=1)
    ask(engine, prompt)
    engine.manager.reset_prefix_cache()
    assert engine.step() == []
    assert engine.manager.num_free_blocks == 64
    assert ask(engine, prompt).num_cached_tokens == 0


def test_a_step_with_nan_leaves_nothing(engine, model):
    prompts = [random_tokens(model.config, 20, seed=seed) for seed in range(3)]
    ask(engine, prompts[0])
    run = engine.runner.run

    def broken(chunks, *more):
        logits = run(chunks, *more).clone()
        logits[0] = torch.nan
        return logits

    engine.runner.run = broken
    (bad,), (good,) = engine.submit(prompts[1], max_tokens=2), engine.submit(prompts[2], max_tokens=2)
    engine.step()
    engine.runner.run = run
    while engine.has_work:
        engine.step()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert len(engine.scheduler.remembered) == 0
    assert [ask(engine, prompt).num_cached_tokens for prompt in prompts] == [0, 0, 0]


def test_an_interrupted_start_holds_nothing(engine, model, monkeypatch):
    """Ctrl-C between the fork and the request that was to get it. The next step begins again."""
    prompt = random_tokens(model.config, 9, seed=1)
    expected = plain_answer(model, prompt)
    ask(engine, prompt, max_tokens=1)
    (again,) = engine.submit(prompt, max_tokens=6, ignore_eos=True)
    engine.step()
    fork = engine.scheduler.remembered.fork

    def interrupted(*how):
        assert fork(*how) is not None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.remembered, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_work:
        engine.step()
    assert again.completion.token_ids == expected


def test_an_engine_without_prefix_caching_can_not(model):
    with pytest.raises(InvalidArgumentError, match="remember_next_token: expected False with enable_prefix_caching"):
        Engine(model, num_blocks=8, remember_next_token=True, enable_prefix_caching=False)
    with pytest.raises(InvalidArgumentError, match="remember_next_token: expected True or False, got 1"):
        Engine(model, num_blocks=8, remember_next_token=1)
    assert Engine(model, num_blocks=8).scheduler.remembered is None


# --- any schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pool", [1.0, 1.4, 4.0])
def test_any_schedule_gives_what_an_engine_without_it_gives(models, name, pool):
    """Prompts that come again and again while others run, in pools down to what one request needs."""
    model = models[name]
    draw = random.Random(f"{name} {pool}")
    shared = random_tokens(model.config, 40, seed=1)
    prompts = [shared[: draw.choice([3, 16, 24, 32, 40])] + random_tokens(model.config, n, seed=n) for n in range(6)]
    fresh = Engine(model, num_blocks=200, deterministic=True, enable_prefix_caching=False)
    expected = [ask(fresh, prompt, max_tokens=8).token_ids for prompt in prompts]
    least = sum(fresh.plan.blocks_of_sequence(45 + 7, 24))
    engine = Engine(model, num_blocks=int(least * pool), deterministic=True, remember_next_token=True)
    engine.scheduler.remembered.max_blocks = engine.manager.num_blocks  # more than an engine would keep
    engine.limits = StepLimits(24, 4, draw.choice([None, 7]))
    asked = []
    for _ in range(40):
        which, most = draw.randrange(len(prompts)), draw.randrange(1, 9)
        (generation,) = engine.submit(prompts[which], max_tokens=most, ignore_eos=True)
        asked.append((generation, expected[which][:most]))
        for _ in range(draw.choice([0, 0, 1, 3])):
            engine.step()
    while engine.has_work:
        engine.step()
    for generation, tokens in asked:
        assert generation.completion.token_ids == tokens
        assert [piece.token_id for piece in generation.pieces] == tokens
    assert engine.scheduler.remembered.num_answers > 0
    check_whole(engine)
    engine.close()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
