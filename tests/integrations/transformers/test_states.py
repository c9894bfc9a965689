"""Models whose layers keep states: every token is as likely as a plain forward pass of the same model says."""

import random
import threading

import pytest
import torch

from integrations.transformers.batching import (
    PAGE,
    check_all_given_back,
    generate,
    make_prompts,
    plain_answer,
    plain_logits,
)
from integrations.transformers.driver import Driver
from integrations.transformers.hybrids import FIELDS, is_served, make_hybrid
from kvblocks import InvalidArgumentError, KVCacheManager, UnsupportedEngineError
from kvblocks.integrations.transformers import install, state_kinds, state_slots, uninstall

pytestmark = pytest.mark.skipif(not is_served(), reason="transformers up to 5.20")

QUICK = "Lfm2"


@pytest.fixture(scope="module", params=FIELDS)
def model(request):
    return make_hybrid(request.param)


@pytest.fixture(scope="module")
def lfm2():
    return make_hybrid(QUICK)


@pytest.fixture(scope="module")
def delta():
    return make_hybrid("Qwen3_5Text")


@pytest.fixture
def installed():
    """`install`, undone behind the test."""
    yield install
    uninstall()


@torch.no_grad()
def check_logprobs(model, driver):
    """What was sampled is as likely as a plain forward pass says, of all that came before it."""
    assert driver.logprobs
    for request_id, (prompt, generated, logprobs) in driver.logprobs.items():
        logits = plain_logits(model, prompt + generated)[len(prompt) - 1 : -1]
        chosen = logits.float().log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert len(logprobs) == len(generated)
        assert torch.allclose(chosen, torch.tensor(logprobs), atol=2e-3), request_id


def make_driver(model, num_blocks, **more):
    return Driver(model, num_blocks, return_logprobs=True, **more)


@pytest.mark.every(3)
def test_tokens_are_those_of_a_plain_forward_pass(model, installed, monkeypatch):
    prompts = make_prompts(1, 4)
    expected = {f"req_{number}": plain_answer(model, prompt, 6) for number, prompt in enumerate(prompts)}
    installed(debug=True)
    run = generate(model, prompts, 200, monkeypatch, new=6)
    assert run.tokens == expected
    check_all_given_back(run.cache)
    assert run.cache.manager.states.stats.num_saved > 0
    later = Driver(model, 60, max_batch_tokens=24)
    for number, prompt in enumerate(prompts):
        later.add(f"req_{number}", prompt, 6)
        later.finish()
    assert later.answers == expected
    assert later.cache.manager.states.stats.num_restored > 0
    assert later.cache.manager.stats.num_hit_tokens > 0
    check_all_given_back(later.cache)


def test_a_chat_computes_no_more_than_its_new_tokens(lfm2, installed):
    """The second turn goes on near the first prompt's end, the third prompt where it parts from the others."""
    installed(debug=True)
    driver = Driver(lfm2, 100)
    shared = make_prompts(3, 1)[0][:40]
    driver.add("first", [*shared, 1, 2, 3], 4)
    driver.finish()
    assert driver.num_computed == 43 + 3
    driver.add("next turn", [*shared, 1, 2, 3, *driver.answers["first"], 5, 6], 1)
    driver.finish()
    assert driver.num_computed == 46 + 49 - 40
    for name, start in (("parts", 0), ("parts again", 24)):
        before = driver.num_computed
        prompt = [*shared[:28], 9, *make_prompts(name, 1)[0][:12]]
        driver.add(name, prompt, 1)
        driver.finish()
        assert driver.num_computed - before == len(prompt) - start
    check_all_given_back(driver.cache)


def sampled_prompts(seed, num_requests):
    """Prompts for several samples. Of which one token alone isn't cached, transformers makes a step without tokens."""
    return [prompt for prompt in make_prompts(seed, num_requests) if len(prompt) % PAGE != 1]


def test_samples_share_a_prompt_and_its_state(delta, installed):
    installed(debug=True, num_state_slots=12)
    driver = make_driver(delta, 100, samples=3, do_sample=True)
    prompts = sampled_prompts(5, 2)
    for number, prompt in enumerate([*prompts, [7] * PAGE, [7] * (PAGE + 2)]):
        driver.add(str(number), prompt, 6)
    answers = driver.finish()
    assert len(answers) == 3 * (len(prompts) + 2)
    assert driver.cache.manager.states.stats.num_forked > 0
    check_logprobs(delta, driver)
    check_all_given_back(driver.cache)


def test_requests_beyond_the_slots_wait(lfm2, installed):
    installed(debug=True, num_state_slots=2)
    driver = make_driver(lfm2, 200, samples=3, do_sample=True)
    prompts = sampled_prompts(6, 3)
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt)
    most = 0
    while driver.step():
        most = max(most, len(driver.cache.records))
    assert most == 2
    assert len(driver.finish()) == 3 * len(prompts)
    check_logprobs(lfm2, driver)
    check_all_given_back(driver.cache)


class Dying:
    """Lets a model's steps die: behind the layer of this number, or behind all of them."""

    def __init__(self, model):
        self.where = None
        layers = [*model.model.layers, model.lm_head]
        self.handles = [
            layer.register_forward_hook(lambda *_, number=number: self._die(number))
            for number, layer in enumerate(layers)
        ]
        self.num_places = len(layers)

    def _die(self, number):
        if number == self.where:
            raise RuntimeError("the step died")


@pytest.fixture
def dying(request):
    """Makes a model's steps die."""
    made = []
    yield lambda model: made.append(Dying(model)) or made[-1]
    for handle in made[-1].handles:
        handle.remove()


def run_history(model, dying, seed, num_steps=30):
    """Requests come and are cancelled, and steps die, at random; returns the driver when all is done."""
    source = random.Random(seed)
    config = {"max_batch_tokens": source.choice((7, 16, 40, 96))}
    config["scheduler_type"] = source.choice(("fifo", "prefill_first"))
    samples = source.choice((1, 1, 3))
    install(debug=True, commit=source.choice(("early", "late")), num_state_slots=source.choice((None, 1, 3)))
    driver = make_driver(model, source.choice((24, 40, 90)), samples=samples, do_sample=True, **config)
    prompts, number = make_prompts(seed, 10) if samples == 1 else sampled_prompts(seed, 10), 0
    for _ in range(num_steps):
        for _ in range(source.choice((0, 0, 1, 3))):
            driver.add(str(number), source.choice(prompts), source.randint(1, 16))
            number += 1
        if number and source.random() < 0.1:
            driver.cancel(str(source.randrange(number)))
        dying.where = source.randrange(dying.num_places) if source.random() < 0.05 else None
        try:
            driver.step(die=source.random() < 0.02)
        except RuntimeError as error:
            assert "died" in str(error)  # noqa: PT017
            driver.fail()
        driver.cache.manager.check()
    dying.where = None
    driver.finish()
    return driver


@pytest.mark.every(12)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_history(model, installed, dying, seed):
    driver = run_history(model, dying(model), seed)
    check_logprobs(model, driver)
    check_all_given_back(driver.cache)


def skipping(kind):
    """`ModelStates.copy`, without the copies of a kind."""
    copy = state_slots.ModelStates.copy
    return lambda slots, copies: copy(slots, [one for one in copies if one.kind != kind])


@pytest.mark.parametrize("kind", ["clear", "fork", "restore", "save"])
def test_a_mutant_without_some_copies_is_found(delta, installed, monkeypatch, kind):
    installed(debug=True, num_state_slots=4 if kind == "clear" else None)
    monkeypatch.setattr(state_slots.ModelStates, "copy", skipping(kind))
    driver = make_driver(delta, 100, samples=2, do_sample=True)
    for _ in range(2):
        for number, prompt in enumerate(make_prompts(7, 4)):
            driver.add(str(number), prompt)
        driver.finish()
    with pytest.raises(AssertionError):
        check_logprobs(delta, driver)


def test_a_mutant_that_keeps_what_a_dead_step_left_is_found(delta, installed, dying, monkeypatch):
    installed(debug=True)
    driver, deaths, prompt = make_driver(delta, 100), dying(delta), make_prompts(8, 1)[0]
    monkeypatch.setattr(KVCacheManager, "abort", lambda manager, sequence, _: manager.free(sequence))
    driver.add("dies", prompt)
    deaths.where = 1
    with pytest.raises(RuntimeError, match="died"):
        driver.step()
    driver.fail()
    deaths.where = None
    driver.add("hits", prompt)
    driver.finish()
    with pytest.raises(AssertionError):
        check_logprobs(delta, driver)


class TestRefused:
    """What can't be served, by name."""

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"model_type": "kimi_linear"}, "kimi_linear, .* have conv: kvblocks knows the states of lfm2, qwen3_next"),
            ({"layer_types": ["conv"] * 4}, "no layer has them"),
            ({"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}, "and not sliding_attention"),
        ],
    )
    def test_models(self, lfm2, installed, monkeypatch, fields, reason):
        for name, value in fields.items():
            monkeypatch.setattr(lfm2.config, name, value)
        installed()
        with pytest.raises(UnsupportedEngineError, match=reason):
            Driver(lfm2, 50)

    @pytest.mark.parametrize("option", [{"use_async_batching": True}, {"use_cuda_graph": True}])
    def test_steps_that_are_not_prepared_one_by_one(self, lfm2, installed, option):
        installed()
        with pytest.raises(UnsupportedEngineError, match=f"{next(iter(option))}=True: .* step by step"):
            Driver(lfm2, 50, **option)

    def test_a_layer_that_asks_its_cache_for_more(self, lfm2, installed, monkeypatch):
        monkeypatch.setattr(state_kinds, "CACHE_CALLS", state_kinds.CACHE_CALLS - {"update_conv_state"})
        installed()
        with pytest.raises(UnsupportedEngineError, match=r"Lfm2ShortConv .* uses update_conv_state of its cache"):
            Driver(lfm2, 50)

    def test_no_slots(self):
        with pytest.raises(InvalidArgumentError, match="num_state_slots: expected at least 1, got 0"):
            install(num_state_slots=0)


def test_the_model_is_as_before(lfm2, installed):
    """Between steps, and for others who call it, the layers are transformers' own."""
    installed()
    driver = Driver(lfm2, 50)
    driver.add("0", make_prompts(9, 1)[0])
    driver.step()
    assert all("forward" not in vars(module) for module in lfm2.modules())
    tokens = make_prompts(10, 1)[0]
    expected, found = plain_logits(lfm2, tokens), []
    with driver.cache.state_slots.step(lfm2):
        other = threading.Thread(target=lambda: found.append(plain_logits(lfm2, tokens)))
        other.start()
        other.join(60)
    assert torch.equal(found[0], expected)
