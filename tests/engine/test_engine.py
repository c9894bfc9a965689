"""The engine on small random models: the same answers, to the last bit, however computed; and clear errors."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from engine.small_models import EVEN, ODD, random_tokens, random_weights
from kvblocks import InvalidTokensError, KVBlocksError
from kvblocks.engine import Completion, Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.model.loader import expected_shapes
from kvblocks.engine.run import cache_size
from kvblocks.errors import InvalidArgumentError

# Untied: a random model with tied embeddings mostly repeats its last token.
CONFIGS = {"odd": ODD, "even": replace(EVEN, tie_word_embeddings=False)}
MAX_TOKENS = 20


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return LoadedModel(CONFIGS[request.param], random_weights(CONFIGS[request.param]))


@pytest.fixture(scope="module")
def prompts(model):
    """97 shared tokens and 5 of its own each; one that is shared wholly; and one of two whole blocks, twice."""
    shared = random_tokens(model.config, 97, seed=1)
    own = [shared + random_tokens(model.config, 5, seed=seed) for seed in range(2, 5)]
    return [*own, shared, shared[:32], shared[:32]]


class Recorder:
    """Keeps the logits that the engine samples from: by sequence, one row for each token sampled."""

    def __init__(self, engine):
        self.logits = {}
        run = engine.runner.run

        def run_and_record(chunks):
            logits = run(chunks)
            sampling = [chunk for chunk in chunks if chunk.samples]
            for chunk, row in zip(sampling, logits, strict=True):
                self.logits.setdefault(tuple(chunk.request.sequence.token_ids()), row.clone())
            engine.manager.check()
            return logits

        engine.runner.run = run_and_record


def generate(model, prompts, *, limits=None, num_blocks=100, one_by_one=False, **options):
    """Completions and recorder of a new engine."""
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, **options)
    recorder = Recorder(engine)
    if limits is not None:
        engine.limits = limits
    if one_by_one:
        completions = [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]
    else:
        completions = engine.generate(prompts, max_tokens=MAX_TOKENS)
    engine.manager.check()
    assert engine.manager.num_free_blocks == num_blocks
    return completions, recorder


@pytest.fixture(scope="module")
def alone(model, prompts):
    """The expected answers: one after another, whole prompts, no caching, room for everything."""
    torch.set_num_threads(1)
    return generate(model, prompts, one_by_one=True, enable_prefix_caching=False)


WAYS = {
    "batched": {"enable_prefix_caching": False},
    "cached, one after another": {"one_by_one": True},
    "cached and batched": {},
    "chunked": {"enable_prefix_caching": False, "limits": StepLimits(13, 4)},
    "cached and chunked": {"limits": StepLimits(13, 4)},
    "preempted": {"enable_prefix_caching": False, "num_blocks": 11},
    "cached and preempted": {"num_blocks": 11},
    "cached, chunked and preempted": {"num_blocks": 9, "limits": StepLimits(21, 6)},
    "cached in small blocks": {"block_size": 4, "num_blocks": 200},
    "cached in large blocks": {"block_size": 32},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(model, prompts, alone, way):
    expected, expected_logits = alone
    completions, recorder = generate(model, prompts, **WAYS[way])
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert recorder.logits.keys() == expected_logits.logits.keys()
    for tokens, logits in expected_logits.logits.items():
        assert torch.equal(recorder.logits[tokens], logits)
    computed = sum(c.num_computed_tokens for c in completions)
    without = sum(c.num_computed_tokens for c in expected)
    assert computed > without if way == "preempted" else computed < without if "cached" in way else computed == without


def test_without_determinism_the_logits_are_nearly_the_same(model, prompts):
    """Random weights give logits with clear winners, so that the tokens are the same too."""
    first = Engine(model, num_blocks=100, enable_prefix_caching=False).generate(prompts[:3], max_tokens=4)
    second = Engine(model, num_blocks=100).generate(prompts[:3], max_tokens=4)
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert second[1].num_cached_tokens == 96


def check_the_exact_case(model, shared, own):
    """97 shared tokens and 5 of its own, blocks of 16, 20 generated: 102 + 19 computed without caching, 6 + 19 with."""
    cold = Engine(model, num_blocks=64, enable_prefix_caching=False, deterministic=True)
    warm = Engine(model, num_blocks=64, deterministic=True)
    recorders = Recorder(cold), Recorder(warm)
    warm.generate([shared + own[::-1]], max_tokens=1)
    results = [engine.generate([shared + own], max_tokens=20, ignore_eos=True)[0] for engine in (cold, warm)]
    assert [(r.num_prompt_tokens, r.num_cached_tokens, r.num_computed_tokens) for r in results] == [
        (102, 0, 121),
        (102, 96, 25),
    ]
    assert [engine.num_steps for engine in (cold, warm)] == [20, 21]  # a token each, and the warm one's first prompt
    assert results[0].token_ids == results[1].token_ids
    assert (results[0].text, len(results[0].token_ids)) == (results[1].text, 20)
    assert len(recorders[0].logits) == 20
    for tokens, logits in recorders[0].logits.items():
        assert torch.equal(recorders[1].logits[tokens], logits)


def test_the_exact_case(model):
    check_the_exact_case(model, random_tokens(model.config, 97), [1, 2, 3, 4, 5])


@pytest.mark.slow
@pytest.mark.model
def test_the_exact_case_on_a_real_model(smollm2_folder):
    model = LoadedModel.load(smollm2_folder)
    text = model.tokenizer.encode("The block manager computes what prompts share once, and keeps it. " * 20)
    check_the_exact_case(model, text[:97], model.tokenizer.encode(" So what does it cost?")[:5])


# --- stopping, streaming, sampling -----------------------------------------------------------------------------------


@pytest.fixture
def engine(model):
    return Engine(model, num_blocks=64)


def test_a_stop_token_ends_the_answer_unless_ignored(model, prompts):
    free = Engine(model, num_blocks=64).generate(prompts[:1], max_tokens=8)[0]
    assert free.finish_reason == "length"
    stop = free.token_ids[3]
    stopping = LoadedModel(replace(model.config, eos_token_ids=(stop,)), model.weights)
    engine = Engine(stopping, num_blocks=64)
    stopped = engine.generate(prompts[:1], max_tokens=8)[0]
    end = free.token_ids.index(stop) + 1
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[:end])
    assert engine.generate(prompts[:1], max_tokens=8, ignore_eos=True)[0].token_ids == free.token_ids


def test_pieces_are_the_completion(engine, prompts):
    pieces = list(engine.stream(prompts, max_tokens=5))
    completions = engine.generate(prompts, max_tokens=5)
    for index, completion in enumerate(completions):
        own = [piece for piece in pieces if piece.prompt_index == index]
        assert [piece.token_id for piece in own] == completion.token_ids
        assert [piece.completion is None for piece in own] == [True] * 4 + [False]
        assert own[-1].completion.ttft_s > 0


def test_a_stream_loses_nothing_if_another_takes_steps_between_its_pieces(engine, prompts):
    expected = engine.generate(prompts[:2], max_tokens=4)
    slow, quick = engine.stream(prompts[:2], max_tokens=4), engine.stream(prompts[2:3], max_tokens=6)
    pieces = [next(slow), next(slow)]  # the first tokens of both answers
    assert len(list(quick)) == 6
    pieces += slow
    for number, answer in enumerate(expected):
        assert [piece.token_id for piece in pieces if piece.prompt_index == number] == answer.token_ids


def test_closing_a_stream_drops_its_requests_and_no_others(engine, prompts):
    expected = engine.generate(prompts[1:2], max_tokens=6)[0].token_ids
    dropped, kept = engine.stream(prompts[:1], max_tokens=6), engine.stream(prompts[1:2], max_tokens=6)
    tokens = [next(kept).token_id]
    next(dropped)
    dropped.close()
    tokens += [piece.token_id for piece in kept]
    assert tokens == expected
    assert not engine.scheduler.has_work
    assert engine.manager.num_free_blocks == 64


def test_the_text_is_decoded_as_it_comes(tiny_folder):
    engine = Engine(tiny_folder, num_blocks=64)
    pieces = list(engine.stream(["hello", "in the"], max_tokens=12, ignore_eos=True))
    for index in (0, 1):
        own = [piece for piece in pieces if piece.prompt_index == index]
        text = engine.model.tokenizer.decode([piece.token_id for piece in own])
        assert "".join(piece.text for piece in own) == own[-1].completion.text == text


def test_samples_depend_on_the_seed_only(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    options = {"max_tokens": 12, "temperature": 1.0}
    batch = engine.generate(prompts, seed=7, **options)
    for prompt, completion in zip(prompts, batch, strict=True):
        assert engine.generate([prompt], seed=7, **options)[0].token_ids == completion.token_ids
    assert batch[4].token_ids == batch[5].token_ids  # the same prompt
    assert engine.generate(prompts[:1], seed=8, **options)[0].token_ids != batch[0].token_ids
    unseeded = [engine.generate(prompts[:1], **options)[0].token_ids for _ in range(3)]
    assert unseeded[0] != unseeded[1] or unseeded[1] != unseeded[2]


def test_samples_survive_preemption(model, prompts):
    options = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 3}
    roomy, tight = (Engine(model, num_blocks=number, deterministic=True) for number in (100, 11))
    expected = roomy.generate(prompts, **options)
    completions = tight.generate(prompts, **options)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert sum(c.num_computed_tokens for c in completions) > sum(c.num_computed_tokens for c in expected)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_step_that_dies_takes_nothing_with_it(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    expected = [c.token_ids for c in engine.generate(prompts, max_tokens=6)]
    engine.manager.reset_prefix_cache()
    run = engine.runner.run

    def die(chunks):
        for tensor in (*engine.runner.kv_cache.keys, *engine.runner.kv_cache.values):
            tensor.fill_(torch.nan)
        raise ModelError("the device is on fire")

    num_steps, engine.runner.run = engine.num_steps, die
    with pytest.raises(ModelError, match="on fire"):
        engine.generate(prompts, max_tokens=6)
    assert engine.num_steps == num_steps > 0
    engine.manager.check()
    assert engine.manager.num_free_blocks == 64
    assert engine.manager.stats.num_cached_blocks == 0
    assert not engine.scheduler.has_work
    engine.runner.run = run
    assert [c.token_ids for c in engine.generate(prompts, max_tokens=6)] == expected


def test_requests_of_a_step_that_died_can_be_tried_again(model, prompts):
    engine = Engine(model, num_blocks=64, deterministic=True)
    expected = engine.generate(prompts[:2], max_tokens=6)
    engine.manager.reset_prefix_cache()
    stream = engine.stream(prompts[:2], max_tokens=6)
    pieces = [next(stream)]
    run = engine.runner.run
    engine.runner.run = lambda chunks: torch.full((len(chunks), model.config.vocab_size), torch.nan)
    with pytest.raises(ModelError, match="expected logits that are numbers, got NaN"):
        engine.step()
    engine.runner.run = run
    pieces += stream
    assert [p.completion.token_ids for p in pieces if p.completion] == [c.token_ids for c in expected]


def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_computed(model):
    engine = Engine(model, num_blocks=4)
    with pytest.raises(
        InvalidArgumentError, match=r"prompts\[1\]: expected at most 65 tokens.*got 66 \(a prompt of 60"
    ):
        engine.generate([[1, 2, 3], [1] * 60], max_tokens=6)
    assert engine.manager.stats.num_queries == 0
    with pytest.raises(InvalidArgumentError, match="the model's context"):
        Engine(model, num_blocks=1000).generate([[1] * 1000], max_tokens=100)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("text", {}, InvalidArgumentError, "prompts: expected a list of prompts, got str"),
        (7, {}, InvalidArgumentError, "prompts: expected a list of prompts, got int"),
        ([[]], {}, InvalidTokensError, r"prompts\[0\]: token ids: expected at least one, got none"),
        ([1, 2], {}, InvalidTokensError, r"prompts\[0\]: token ids: expected an iterable or buffer, got int"),
        ([[1], [1, -2]], {}, InvalidTokensError, r"prompts\[1\]: token ids: expected 0 to 4294967295, got -2"),
        ([[1, "a"]], {}, InvalidTokensError, "expected integers, got str 'a' at position 1"),
        ([[1, 9999]], {}, InvalidTokensError, r"prompts\[0\]: expected token ids below \d+.*got 9999"),
        (["text"], {}, ModelError, r"prompts\[0\]: expected token ids, .* no tokenizer.json; got text"),
        ([[1]], {"max_tokens": -1}, InvalidArgumentError, "max_tokens: expected an int of at least 0, got -1"),
        ([[1]], {"max_tokens": 0, "n": 2}, InvalidArgumentError, "n: expected 1 with max_tokens 0, .* got 2"),
        ([[1]], {"temperature": -0.5}, InvalidArgumentError, "temperature: expected a number of at least 0, got -0.5"),
        ([[1]], {"temperature": float("nan")}, InvalidArgumentError, "temperature: .* got nan"),
        ([[1]], {"temperature": "hot"}, InvalidArgumentError, "temperature: .* got 'hot'"),
        ([[1]], {"seed": -1}, InvalidArgumentError, "seed: expected None or an int from 0"),
        ([[1]], {"seed": 1.5}, InvalidArgumentError, "seed: .* got 1.5"),
    ],
)
def test_bad_input_is_refused(engine, prompts, options, error, message):
    with pytest.raises(error, match=message):
        engine.generate(prompts, **options)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"device": "meta"}, "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 'meta'"),
        ({"device": 3.5}, "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 3.5"),
        ({"device": "cuda:99"}, "device: expected one of .* CUDA devices, got 'cuda:99'"),
        ({"num_blocks": 0}, "num_blocks: expected an int of at least 1, got 0"),
        ({"block_size": 0}, "block_size: expected an int of at least 1, got 0"),
        ({"block_size": "16"}, "block_size: expected an int of at least 1, got '16'"),
    ],
)
def test_bad_options_are_refused(model, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(model, **options)


def test_limits_are_checked(engine):
    with pytest.raises(InvalidArgumentError, match="limits: expected StepLimits, got 5"):
        engine.limits = 5


@pytest.mark.parametrize("name", ["gpt-5", "/no/such/folder", "", 7])
def test_a_model_that_is_not_there_is_refused(name):
    with pytest.raises(
        KVBlocksError, match=r"expected .*(a known model \(smollm2\)|the name of a model or a folder).*got"
    ):
        Engine(name)


def test_no_prompts_are_no_completions(engine):
    assert engine.generate([]) == []


# --- around it -------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_and_a_tokenizer_is_optional(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = LoadedModel.load(tiny_folder)
    weights = {name: torch.zeros(shape) for name, shape in expected_shapes(loaded.config).items()}
    save_file(weights, tmp_path / "model.safetensors")
    engine = Engine(str(tmp_path), num_blocks=8)
    (completion,) = engine.generate([[1, 2, 3]], max_tokens=2)
    assert (completion.text, completion.token_ids) == ("", [0, 0])  # all logits are equal: the first token wins
    assert isinstance(completion, Completion)


def test_the_default_cache_is_as_large_as_documented(model, monkeypatch):
    config = model.config
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 16 * 4
    monkeypatch.setattr(cache_size, "DEFAULT_KV_CACHE_BYTES", 10 * block_bytes + 5)
    engine = Engine(model)
    assert engine.manager.num_blocks == 10
    assert engine.runner.kv_cache.num_bytes == 10 * block_bytes


def test_engines_share_a_model(model):
    first, second = Engine(model, num_blocks=8), Engine(model, num_blocks=8, device="cpu")
    assert first.runner.model.weights is second.runner.model.weights
    assert first.runner.kv_cache is not second.runner.kv_cache


def test_the_package_exports_lazily():
    import kvblocks.engine

    with pytest.raises(AttributeError, match="has no attribute 'Enginge'"):
        _ = kvblocks.engine.Enginge


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "fast"}, "attention: expected one of auto, triton, torch, flash-attn, flashinfer, got 'fast'"),
        ({"attention": 5}, "attention: expected one of"),
        ({"attention": "flash-attn", "device": "cpu"}, "attention='flash-attn': expected a CUDA device"),
        ({"attention": "flash-attn", "deterministic": True}, "expected deterministic=False, got True"),
        ({"attention": "flash-attn", "kv_cache_dtype": "fp8"}, "expected kv_cache_dtype='auto', got 8 bits"),
        ({"eviction": "nonsense"}, "eviction: expected None, 'lru'"),
        ({"eviction": 5}, "eviction: expected None, 'lru'"),
        ({"schedule": "random"}, "schedule: expected one of"),
        ({"device": "tpu"}, "device: expected 'auto', 'cpu'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_weights_are_loaded(options, message, monkeypatch):
    monkeypatch.setattr(LoadedModel, "load", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidArgumentError, match=message):
        Engine("some-folder", **options)
