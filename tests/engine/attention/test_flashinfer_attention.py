"""attention="flashinfer", against a stand-in with the package's parameters, and the errors of wrong options."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch
from engine import fake_flashinfer
from engine.small_models import EVEN, converted, random_tokens, random_weights

from kvblocks.core.kinds import SlidingWindow
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels import oracle

pytest.importorskip("triton", reason="decodes are computed by Triton's kernels")

TINY = replace(
    EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, tie_word_embeddings=False, num_layers=2
)


def half_precision():
    """The model in bfloat16: the package takes nothing wider."""
    return LoadedModel(TINY, converted(random_weights(TINY), torch.bfloat16))


@pytest.fixture
def installed(monkeypatch):
    """A stand-in for the package, which runs on a CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    fake_flashinfer.PLANS.clear()


@pytest.mark.usefixtures("installed")
def test_the_same_tokens_as_through_torch():
    model = half_precision()
    shared = random_tokens(TINY, 20, seed=1)
    answers = []
    for attention in ("flashinfer", "torch"):
        engine = Engine(model, num_blocks=12, block_size=16, attention=attention)
        engine.limits = StepLimits(max_num_batched_tokens=16, max_num_seqs=4)
        engine.generate([shared], max_tokens=1, ignore_eos=True)
        completions = engine.generate([shared, [*shared[:17], 5, 6]], max_tokens=2, ignore_eos=True)
        answers.append([(c.token_ids, c.num_cached_tokens) for c in completions])
    assert answers[0] == answers[1]
    assert {cached for _, cached in answers[0]} == {16}
    # Chunks of a prompt, a plan of each for both layers, and single rows only where a prompt has no more.
    assert (16,) in [lengths for lengths, *_ in fake_flashinfer.PLANS]


MIXED = [SequenceRows([1], 30, [3, 0]), SequenceRows([1] * 7, 25, [4, 1]), SequenceRows([1] * 2, 0, [2])]


@pytest.mark.parametrize("rows", [MIXED, MIXED[1:]], ids=["behind a decode", "prompts"])
@pytest.mark.parametrize(
    "how", [LayerAttention(0.125), LayerAttention(0.3, SlidingWindow(1, 10)), LayerAttention(0.125, softcap=3.0)]
)
def test_what_the_package_is_given(rows, how):
    from kvblocks.engine.attention.flashinfer_attention import FlashInferAttention, PrefillPlanner

    cache = KVCache.allocate(TINY, 6, 16, dtype=torch.bfloat16)
    batch = StepBatch.build(rows, 16)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    planner = PrefillPlanner(fake_flashinfer.module())
    step = FlashInferAttention(planner=planner).begin(batch, cache)
    query = torch.randn(batch.num_tokens, 2, 64, generator=generator).bfloat16()
    for layer in (1, 0):
        tables = batch.block_tables[0]
        expected, _ = oracle.attention(
            *(query, cache.keys[layer], cache.values[layer], tables, batch.query_start, batch.seq_lens),
            scale=how.scale,
            window=how.kind.window_tokens,
            softcap=how.softcap,
        )
        got = step.attend(layer, query, how)
        assert torch.equal(got[-9:], expected[-9:].bfloat16())
        assert torch.allclose(got.double(), expected, atol=0.02)
    assert planner.num_plans == 1, "for all layers of a step that see alike"


def test_steps_that_may_be_graphs_are_not_planned():
    from kvblocks.engine.attention.flashinfer_attention import FlashInferAttention, PrefillPlanner

    cache = KVCache.allocate(TINY, 6, 16, dtype=torch.bfloat16)
    batch = StepBatch.build(MIXED, 16)
    unknown = replace(batch, shape=replace(batch.shape, lengths=None))
    planner = PrefillPlanner(fake_flashinfer.module())
    for each in (unknown, StepBatch.build(MIXED[:1], 16)):
        step = FlashInferAttention(planner=planner).begin(each, cache)
        step.attend(0, torch.zeros(each.num_tokens, 2, 64).bfloat16(), LayerAttention(0.125))
    assert planner.num_plans == 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 256}, "expected a block_size among 16, 32, 64, 128, got 256"),
        ({"deterministic": True}, "attention='flashinfer': expected deterministic=False, got True"),
        ({"kv_cache_dtype": "fp8"}, "attention='flashinfer': expected kv_cache_dtype='auto', got 8 bits"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(half_precision(), **{"num_blocks": 4, "block_size": 16, "attention": "flashinfer"} | changes)


@pytest.mark.usefixtures("installed")
def test_a_model_in_float32_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"expected dtype float16 or bfloat16, got torch\.float32"):
        Engine(LoadedModel(TINY, random_weights(TINY)), num_blocks=4, block_size=16, attention="flashinfer")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModelError, match=r"expected the package flashinfer-python, got: .*\[engine,gpu,flashinfer\]"):
        Engine(half_precision(), num_blocks=4, block_size=16, attention="flashinfer")


def test_the_stand_in_has_parameters_of_the_package():
    """Where it is installed: each parameter that the stand-in takes is there, with the same place or default."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed", exc_type=ImportError)
    theirs, ours = (package.BatchPrefillWithPagedKVCacheWrapper for package in (flashinfer, fake_flashinfer.module()))
    for name in ("__init__", "plan", "run"):
        known = inspect.signature(getattr(theirs, name)).parameters
        for parameter in inspect.signature(getattr(ours, name)).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                assert known[parameter.name].default == parameter.default, (name, parameter.name)
    names = list(inspect.signature(theirs.plan).parameters)[:9]
    assert names == list(inspect.signature(ours.plan).parameters)[:9], "those that are passed by place"
    assert "backend" in inspect.signature(theirs.__init__).parameters
