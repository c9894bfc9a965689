"""The tokens equal those of transformers' own cache, for all layers, pools and ways of caching."""

import pytest
import transformers
from transformers.generation.continuous_batching import model_runner
from transformers.generation.continuous_batching.requests import RequestStatus

from integrations.transformers.batching import (
    PAGE,
    check_all_given_back,
    generate,
    kvblocks_installed,
    make_model,
    make_prompts,
    plain_answer,
)
from integrations.transformers.driver import Driver, async_on_cpu

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": (None, None),
    "mixed": ((FULL, SLIDING, SLIDING), 20),
    "uneven": (
        (FULL, FULL, FULL, SLIDING, SLIDING),
        16,
    ),  # sectors of 2 and of 3 pages, of which one doesn't divide the other
    "sliding": ((SLIDING, SLIDING), 11),
}
POOLS = (60, 20)


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    layer_types, window = LAYERS[request.param]
    return make_model(layer_types, window)


def is_sound(model):
    """Whether transformers' own cache is right. In 5.15 windows that have been passed are read at wrong places."""
    return not transformers.__version__.startswith("5.15.") or not getattr(model.config, "use_sliding_window", False)


@pytest.mark.every(2)
def test_tokens_are_those_of_transformers_own_cache(model, monkeypatch):
    prompts = make_prompts(1, 8)
    expected = {f"req_{number}": plain_answer(model, prompt, 12) for number, prompt in enumerate(prompts)}
    assert (generate(model, prompts, 400, monkeypatch).tokens == expected) is is_sound(model)
    with kvblocks_installed():
        run = generate(model, prompts, 60, monkeypatch)
        assert run.tokens == expected
        check_all_given_back(run.cache)
    for num_blocks in POOLS:
        for commit in ("early", "late"):
            with kvblocks_installed(commit):
                driver = Driver(model, num_blocks)
                for number, prompt in enumerate(prompts):
                    driver.add(f"req_{number}", prompt, 12)
                assert driver.finish() == expected, (num_blocks, commit)
            assert driver.cache.manager.stats.num_hit_tokens > 0
            check_all_given_back(driver.cache)


@pytest.mark.every(3)
def test_tokens_are_the_same_with_asynchronous_batching(model, monkeypatch):
    prompts = make_prompts(2, 8)
    with async_on_cpu(monkeypatch):
        expected = {str(n): plain_answer(model, prompt, 6 + n % 7) for n, prompt in enumerate(prompts)}
        assert (answer(Driver(model, 400), prompts) == expected) is is_sound(model)
        with kvblocks_installed():
            for num_blocks in (400, 20):
                driver = Driver(model, num_blocks, use_async_batching=True)
                assert driver.cache.is_late
                assert answer(driver, prompts) == expected
                check_all_given_back(driver.cache)
                assert driver.cache.manager.stats.num_hit_tokens > 0 or num_blocks == 400


def answer(driver, prompts):
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, 6 + number % 7)
    return driver.finish()


@pytest.mark.parametrize(
    "more", [{"scheduler_type": "prefill_first"}, {"max_batch_tokens": 24}, {"safety_margin": 0.0}]
)
def test_the_schedulers_options(llama, monkeypatch, more):
    prompts = make_prompts(3, 10)
    expected = generate(llama, prompts, 400, monkeypatch).tokens
    with kvblocks_installed():
        run = generate(llama, prompts, 24, monkeypatch, **more)
    assert run.tokens == expected
    check_all_given_back(run.cache)


def test_without_block_sharing_nothing_is_cached(llama, monkeypatch):
    prompts = make_prompts(4, 6)
    expected = generate(llama, prompts, 400, monkeypatch).tokens
    with kvblocks_installed(), async_on_cpu(monkeypatch):
        run = generate(llama, prompts, 30, monkeypatch, allow_block_sharing=False)
        driver = Driver(llama, 30, allow_block_sharing=False, use_async_batching=True)
        for number, prompt in enumerate(prompts):
            driver.add(f"req_{number}", prompt, 12)
        assert driver.finish() == expected
    assert run.tokens == expected
    assert run.cache.manager.stats.num_cached_blocks == 0
    check_all_given_back(run.cache)
    check_all_given_back(driver.cache)


def test_equal_prompts_of_one_step_are_computed_once(llama, monkeypatch):
    prompts = [[7] * 50 + [1], [7] * 50 + [1]]
    own = generate(llama, prompts, 100, monkeypatch, new=2)
    with kvblocks_installed():
        early = generate(llama, prompts, 100, monkeypatch, new=2)
    with kvblocks_installed("late"):
        late = generate(llama, prompts, 100, monkeypatch, new=2)
    assert own.tokens == early.tokens == late.tokens
    assert (own.num_computed, early.num_computed, late.num_computed) == (104, 56, 104)


def test_a_prompt_that_warms_up_is_not_found(llama, monkeypatch):
    zeros = [0] * 40
    expected = generate(llama, [zeros], 100, monkeypatch, new=8).tokens["req_0"]
    with kvblocks_installed():
        driver = Driver(llama, 100)
        for num_tokens, num_past in ((40, 0), (24, 16), (1, PAGE)):
            status = RequestStatus.PREFILLING if num_tokens > 1 else RequestStatus.DECODING
            states = model_runner.create_warmup_future_states(2, status, num_tokens, num_past, driver.cache)
            assert len(states) == 2
            processor = driver.processor
            processor.inputs_and_outputs.prepare_batch_tensors(
                states, processor.logit_processor, False, 2 * num_tokens, 2 * num_past, False
            )
            for future in states:
                driver.cache.free_blocks(future.state.request_id)
        assert driver.cache.manager.stats.num_cached_blocks == 0
        driver.add("zeros", zeros)
        assert driver.finish()["zeros"] == expected
    assert driver.cache.manager.stats.num_hit_tokens == 0


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_as_with_its_own_cache(smollm2_folder, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    system = "You are a patient teacher of geography. Answer in one short sentence, and name the country first. "
    questions = ["What is the capital of France?", "Which river flows through Cairo?", "Where is Mount Fuji?"]
    prompts = [tokenizer(system + question).input_ids for question in (*questions, questions[0])]
    expected = generate(model, prompts, 100, monkeypatch, new=16)
    for commit in ("early", "late"):
        with kvblocks_installed(commit):
            run = generate(model, prompts, 30, monkeypatch, new=16)
        assert run.tokens == expected.tokens
        assert run.num_computed < expected.num_computed if commit == "early" else True
        check_all_given_back(run.cache)
