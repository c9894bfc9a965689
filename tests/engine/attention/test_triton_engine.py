"""The engine through the Triton kernels, in their interpreter: the same greedy tokens as through torch."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.small_models import BLOCK_SIZE, EVEN, ODD, columns, converted, prefill, random_tokens, random_weights, step

from kvblocks.core.kinds import SlidingWindow
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.attention.attention import KVCache, TorchAttention
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.attention.cascade import CascadePlanner
from kvblocks.engine.attention.triton_attention import TritonAttention
from kvblocks.engine.model.architectures import QWEN3 as QWEN3_ARCHITECTURE
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.run import backends as backends_module
from kvblocks.engine.run import device_runner
from kvblocks.engine.run.decode_step import run_in_place
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import CascadeThreshold

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, test_engine_gpu.py does this natively"),
    # Triton 3.6's interpreter with numpy 2.3.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning:triton"),
]

# Untied: a random model with tied embeddings mostly repeats its last token.
TINY = replace(
    EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, tie_word_embeddings=False, num_layers=1
)
ANY_GROUP = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return LoadedModel(TINY, random_weights(TINY))


@pytest.fixture(scope="module")
def prompts():
    """Prompts that share 33 tokens (two blocks and one token), with some of their own; and the two blocks alone."""
    shared = random_tokens(TINY, 33, seed=1)
    return [*(shared + random_tokens(TINY, number, seed=number) for number in (2, 3, 4)), shared[:32]]


def make_engine(
    model, attention, *, limits=None, capture=None, threshold=None, num_blocks=64, block_size=16, **options
):
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, attention=attention, **options)
    if limits is not None:
        engine.limits = limits
    if attention == "triton" and (capture or threshold):
        full = [group.sees_all for group in engine.manager.groups].index(True)
        cascade = threshold and CascadePlanner(engine.manager.inspect.shared_prefixes, block_size, CPU, threshold, full)
        scales = engine.runner.kv_cache.scales
        ways = {"scales": scales, "capture": capture, "cascade": cascade}
        engine.runner = DeviceRunner(engine.runner.model, num_blocks, block_size, **ways)
    return engine


def answers(engine, prompts, *, rounds=1, **options):
    results = [engine.generate(prompts, **{"max_tokens": 5, "ignore_eos": True} | options) for _ in range(rounds)]
    engine.manager.check()
    return [[(c.token_ids, c.num_cached_tokens, c.num_computed_tokens) for c in completions] for completions in results]


def count_preemptions(scheduler):
    """Return a list that gets, after each schedule, the most preemptions that a request has had."""
    counts, schedule = [], scheduler.schedule

    def schedule_and_count():
        chunks = schedule()
        counts.append(max(request.num_preemptions for request in (*scheduler.waiting, *scheduler.running)))
        return chunks

    scheduler.schedule = schedule_and_count
    return counts


SCENARIOS = {  # what the engine is made with, and what it is asked
    "in chunks": ({"limits": StepLimits(max_num_batched_tokens=20, max_num_seqs=4)}, {}),
    "at once": ({}, {}),
    "cached": ({}, {"rounds": 2, "max_tokens": 3}),
    "without caching": ({"enable_prefix_caching": False}, {"max_tokens": 3}),
    "two samples of each": ({}, {"n": 2}),
    "blocks of 32": ({"block_size": 32}, {"max_tokens": 3}),
    "preempted": ({"num_blocks": 5}, {"max_tokens": 13}),
}


@pytest.mark.every(7)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_tokens_as_through_torch(model, prompts, scenario):
    making, asking = SCENARIOS[scenario]
    triton, plain = (make_engine(model, name, **making) for name in ("triton", "torch"))
    num_preemptions = count_preemptions(triton.scheduler)
    assert answers(triton, prompts, **asking) == answers(plain, prompts, **asking)
    assert isinstance(triton.runner, DeviceRunner)
    assert (max(num_preemptions) > 0) == (scenario == "preempted")


OTHER_WAYS = ({}, {"threshold": ANY_GROUP}, {"deterministic": True})


@pytest.mark.parametrize(
    "way", [{"capture": run_in_place}, *(pytest.param(way, marks=pytest.mark.exhaustive) for way in OTHER_WAYS)]
)
def test_keys_and_values_in_8_bits(model, prompts, way):
    triton, plain = (make_engine(model, name, kv_cache_dtype="fp8_e4m3", **way) for name in ("triton", "torch"))
    asked = {"rounds": 2, "n": 2, "max_tokens": 3}  # the second round hits what the first stored; samples fork
    assert answers(triton, prompts[:2], **asked) == answers(plain, prompts[:2], **asked)
    assert triton.runner.num_replays > 0 or "capture" not in way
    assert triton.runner.num_cascades > 0 or "threshold" not in way
    for name in ("keys", "values"):
        ours, theirs = (getattr(engine.runner.kv_cache, name)[0].view(torch.uint8) for engine in (triton, plain))
        assert torch.equal(ours, theirs) and ours.any()


@pytest.mark.exhaustive
def test_warming_up_changes_nothing_and_says_what_comes(model, prompts):
    triton = make_engine(model, "triton", capture=run_in_place, threshold=ANY_GROUP)
    triton.limits = StepLimits(max_num_batched_tokens=32, max_num_seqs=2)
    cache = [tensor.clone() for tensor in triton.runner.kv_cache.memory]
    told = []
    assert triton.warm_up(lambda *step: told.append(step)) == {}, "the interpreter compiles nothing"
    names = ["prompts", "short prompts", "decodes and prompts", "decodes of 1", "decodes of 2"]
    names += ["16 tokens of 4 prompts", "32 tokens of 4 prompts"]
    names += ["cascades", "cascades of 2", "copies"]
    assert told == [(name, done, len(names)) for done, name in enumerate(names)]
    assert triton.runner.num_replays == 2 + 1 and triton.runner.num_cascades == 0
    for tensor, before in zip(triton.runner.kv_cache.memory, cache, strict=True):
        assert torch.equal(tensor, before)
    assert answers(triton, prompts) == answers(make_engine(model, "torch"), prompts)


def test_warming_up_is_for_idle_engines_with_kernels(model, prompts):
    plain = make_engine(model, "torch")
    assert plain.warm_up() == {}
    with pytest.raises(InvalidArgumentError, match="on_step: expected a callable or None, got 3"):
        plain.warm_up(3)
    plain.submit(prompts[0])
    with pytest.raises(InvalidArgumentError, match="warm_up: expected an engine with nothing to do, got unfinished"):
        plain.warm_up()


def test_nothing_is_captured_again_for_as_many_sequences_as_were_warmed_up(model):
    captured = []

    def capture(step):
        captured.append(step.columns.shape[1])
        return lambda: torch.zeros(captured[-1], TINY.vocab_size)

    engine = make_engine(model, "triton", capture=capture, num_blocks=120)
    for name, run in engine.runner.warm_up_steps(70):  # more than a resident table has rows at first
        if name.startswith("decodes of"):
            run()
    assert captured == [1, 2, 4, 8, 16, 32, 64, 80]
    engine.limits = StepLimits(max_num_batched_tokens=100, max_num_seqs=70)
    engine.generate([[n] for n in range(70)], max_tokens=3, ignore_eos=True)
    assert len(captured) == 8 and engine.runner.num_replays == 8 + 3


@pytest.mark.every(4)
@pytest.mark.parametrize("way", ["in buckets", "in buckets, preempted", "cascade", "cascade, in buckets"])
def test_the_same_tokens_however_decode_steps_are_run(model, prompts, way):
    num_blocks = 6 if "preempted" in way else 64
    triton = make_engine(
        model,
        "triton",
        num_blocks=num_blocks,
        capture=run_in_place if "in buckets" in way else None,
        threshold=ANY_GROUP if "cascade" in way else None,
    )
    plain = make_engine(model, "torch", num_blocks=num_blocks)
    options = {"n": 2, "max_tokens": 6}
    assert answers(triton, prompts, **options) == answers(plain, prompts, **options)
    assert (triton.runner.num_replays > 0) == ("in buckets" in way)
    assert (triton.runner.num_cascades > 0) == ("cascade" in way)


# Three KV-cache groups: a block holds one layer's KV of one of them.
WINDOWED = replace(TINY, architecture=QWEN3_ARCHITECTURE, num_layers=3, windows=(20, None, 20), attention_softcap=4.0)


@pytest.mark.every(4)
@pytest.mark.parametrize("way", ["cascade, in buckets", "as it comes", "in buckets, preempted", "in chunks"])
def test_the_same_tokens_with_windows(prompts, way):
    model = LoadedModel(WINDOWED, random_weights(WINDOWED))
    options = {"num_blocks": 16 if "preempted" in way else 64}
    if way == "in chunks":
        options["limits"] = StepLimits(max_num_batched_tokens=20, max_num_seqs=4)
    ways = {
        "capture": run_in_place if "in buckets" in way else None,
        "threshold": ANY_GROUP if "cascade" in way else None,
    }
    triton, plain = make_engine(model, "triton", **options, **ways), make_engine(model, "torch", **options)
    assert len(triton.manager.groups) == triton.runner.model.num_groups == 3
    asked = {"rounds": 2, "max_tokens": 6 if "preempted" in way else 3}
    got = answers(triton, prompts, **asked)
    assert got == answers(plain, prompts, **asked)
    assert (triton.runner.num_cascades > 0) == ("cascade" in way)
    assert (triton.runner.num_replays > 0) == ("in buckets" in way)
    assert any(num_cached >= 32 for _, num_cached, _ in got[1])


def test_the_default_threshold_leaves_short_prefixes_alone(model, prompts):
    engine = make_engine(model, "triton")
    answers(engine, prompts, max_tokens=2)
    assert engine.runner.num_cascades == 0


def test_a_step_that_died_is_computed_again(model, prompts, monkeypatch):
    engine, plain = (make_engine(model, name, capture=run_in_place) for name in ("triton", "torch"))
    run, calls = engine.runner.run, []

    def fail_now_and_then(chunks):
        calls.append(len(chunks))
        logits = run(chunks)
        if len(calls) in (2, 5):
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(engine.runner, "run", fail_now_and_then)
    stream = engine.stream(prompts[:2], max_tokens=5, ignore_eos=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
        stream = engine.stream(prompts[:2], max_tokens=5, ignore_eos=True)
    tokens = [piece.completion.token_ids for piece in stream if piece.completion]
    expected = plain.generate(prompts[:2], max_tokens=5, ignore_eos=True)
    assert sorted(tokens) == sorted(completion.token_ids for completion in expected)


MIXED = (
    SequenceRows([5], 40, list(range(3))),
    SequenceRows([6], 17, list(range(3, 5))),
    SequenceRows([7] * 9, 11, list(range(5, 7))),
    SequenceRows([8], 20, list(range(7, 9))),
)


@dataclass(frozen=True)
class LayeredConfig(ModelConfig):
    """A model whose layers attend as given."""

    how: tuple[LayerAttention, ...] = ()

    @property
    def attention(self):
        return self.how


class Oracle(TorchAttention):
    """Torch attention with windows and softcaps: the kernels' oracle, row by row."""

    def begin(self, batch, kv_cache):
        return OracleStep(batch, kv_cache, super().begin(batch, kv_cache))


class OracleStep:
    def __init__(self, batch, kv_cache, plain):
        self.batch, self.kv_cache, self.store = batch, kv_cache, plain.store

    def attend(self, layer, query, how):
        from kvblocks.kernels import oracle

        tensors = (self.batch.block_tables[0], self.batch.query_start, self.batch.seq_lens)
        caches = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        options = {"scale": how.scale, "window": how.kind.window_tokens, "softcap": how.softcap}
        return oracle.attention(query, *caches, *tensors, **options)[0].to(query.dtype)


HOW = (LayerAttention(0.125), LayerAttention(0.2, SlidingWindow(1, 7)), LayerAttention(0.125, softcap=2.0))
LAYERED = LayeredConfig(**vars(TINY) | {"num_layers": len(HOW)}, how=HOW)


def logits_of(attention, rows, begin=None):
    """The logits of some rows in caches of random numbers. begin: replaces the attention's own `begin`."""
    model = DecoderModel(LAYERED, random_weights(LAYERED), attention=attention)
    cache = model.new_kv_cache(num_blocks=9, block_size=BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    batch = StepBatch.build(rows, BLOCK_SIZE)
    return model.compute(batch, (begin or attention.begin)(batch, cache))


@pytest.mark.every(3)
@pytest.mark.parametrize("rows", [MIXED, MIXED[:2], MIXED[2:]], ids=["mixed", "decodes", "no decode in front"])
def test_each_layer_attends_in_its_own_way(rows):
    expected = logits_of(Oracle(), rows)
    assert expected.shape == (len(rows), TINY.vocab_size)
    for attention in (TritonAttention(), TritonAttention(is_tiled=True)):
        torch.testing.assert_close(logits_of(attention, rows), expected, rtol=0, atol=2e-4)


def test_each_layer_attends_in_its_own_way_in_a_cascade():
    rows = [SequenceRows([5], 40, [0, 1, 2]), SequenceRows([6], 36, [0, 1, 3]), SequenceRows([7], 20, [4, 5])]
    runs = SharedRuns.build([([0, 1], 0, 2)], len(rows))
    attention = TritonAttention()

    def begin(batch, cache):
        return attention.begin_cascade(batch, cache, runs)

    torch.testing.assert_close(logits_of(attention, rows, begin), logits_of(Oracle(), rows), rtol=0, atol=2e-4)


def test_cascade_refuses_what_is_no_decode_step(model):
    engine = make_engine(model, "triton", threshold=ANY_GROUP)
    with pytest.raises(InvalidArgumentError, match="expected one row of each of 4 sequences"):
        TritonAttention().begin_cascade(StepBatch.build(MIXED, BLOCK_SIZE), engine.runner.kv_cache, None)


@pytest.fixture
def products_by_rows(monkeypatch):
    """Products that give a row the same bits at every index. A GPU's do, and the interpreter's (numpy's) don't."""
    import numpy as np

    monkeypatch.setattr(
        np, "matmul", lambda first, second, dtype: (first[:, :, None] * second[None]).sum(1, dtype=dtype)
    )


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_logits_have_the_same_bits_however_they_are_computed(model, dtype):
    engine = make_engine(replace(model, weights=converted(model.weights, dtype)), "triton", deterministic=True)
    computed = engine.runner.model
    assert computed.strategy.is_deterministic
    cache, prompt = computed.new_kv_cache(8, BLOCK_SIZE), random_tokens(TINY, 50, seed=3)
    full = prefill(computed, cache, prompt, [0, 1, 2, 3])
    assert torch.equal(prefill(computed, cache, prompt, [4, 5, 6, 7], cuts=(17, 49)), full)
    beside = SequenceRows(prompt[:5], 0, [6])
    alone = SequenceRows(prompt[49:], 49, [0, 1, 2, 3])
    assert torch.equal(step(computed, cache, beside, alone)[1], full)


@pytest.mark.usefixtures("products_by_rows")
def test_deterministic_cached_and_uncached_give_the_same_tokens(model, prompts):
    engines = [
        make_engine(model, "triton", deterministic=True, enable_prefix_caching=caching) for caching in (False, True)
    ]
    cold, warm = (answers(engine, prompts[:1], max_tokens=3, rounds=2)[1] for engine in engines)
    assert [tokens for tokens, *_ in cold] == [tokens for tokens, *_ in warm]
    assert [num_cached for _, num_cached, _ in warm] == [32]


def test_blocks_are_copied_by_the_kernel():
    generator = torch.Generator().manual_seed(0)
    caches = []
    for by_kernel in (False, True):
        generator.manual_seed(0)
        cache = replace(KVCache.allocate(TINY, 6, 16), copies_by_kernel=by_kernel)
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        cache.copy_blocks([(0, 1), (1, 2), (5, 0)])
        cache.copy_blocks([(2, 4)])
        caches.append(cache)
    for plain, copied in zip(*((*cache.keys, *cache.values) for cache in caches), strict=True):
        assert torch.equal(plain, copied)
        assert torch.equal(plain[1], plain[4])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (ODD, {}, r"expected a head_dim among 64, 128, 256, got 10; attention='torch' takes any"),
        (TINY, {"block_size": 8}, "expected a block_size among 16, 32, 64, 128, got 8"),
        (
            TINY,
            {"attention": "fast"},
            "attention: expected one of auto, triton, torch, flash-attn, flashinfer, got 'fast'",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_at_once(config, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(LoadedModel(config, random_weights(config)), **{"num_blocks": 4, "attention": "triton"} | options)


def test_a_missing_triton_is_named(model, monkeypatch):
    monkeypatch.setattr(backends_module, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"expected the package triton, got none: .*kvblocks\[engine,gpu\]"):
        Engine(model, num_blocks=4, attention="triton")


def test_on_a_cpu_triton_needs_its_interpreter():
    program = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import torch\n"
        "from kvblocks.engine.model.config import ModelConfig\n"
        "from kvblocks.engine.attention.triton_attention import check_supported\n"
        "config = ModelConfig(64, 64, 1, 1, 1, 64, 10, 10)\n"
        "check_supported(config, 16, torch.float32, torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert "expected a CUDA device, or TRITON_INTERPRET=1 in the environment" in done.stderr


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (SequenceRows([TINY.vocab_size], 0, [0]), "expected token ids from 0 to 95, got 96"),
        (SequenceRows([3, -1], 0, [0]), "expected token ids from 0 to 95, got -1"),
        (SequenceRows([3], 1024, [0]), "expected positions from 0 to 1023, got 1024"),
    ],
)
def test_a_step_that_the_model_cannot_compute_is_refused(model, chunk, message, monkeypatch):
    runner = make_engine(model, "triton").runner
    monkeypatch.setattr(device_runner, "columns_of", lambda rows, _: columns(rows))
    with pytest.raises(InvalidArgumentError, match=message):
        runner.run([chunk])
    assert runner.uploads.num_transfers == 0


def test_on_a_gpu_a_kernel_draws_tokens_and_is_compiled_by_the_warm_up(model, monkeypatch):
    """With a stand-in for the kernel, which gives each draw the token 7."""
    drawn = []

    def draw_sevens(logits, parameters):
        assert logits.shape[1] == TINY.vocab_size and logits.dtype == torch.float32
        drawn.append(len(parameters))
        return torch.tensor([[7.0, 0.0, 1.0]] * len(parameters), dtype=torch.float64)

    monkeypatch.setattr(backends_module, "draws_on", lambda _device: draw_sevens)
    engine = Engine(model, num_blocks=64, attention="triton", device="cpu")
    dict(engine.runner.warm_up_steps(1))["draws"]()
    assert drawn == [1]
    first, second = engine.generate([[1, 2], [3]], max_tokens=2, temperature=1.0, top_p=0.5, ignore_eos=True)
    assert first.token_ids == second.token_ids == [7, 7]
    assert sum(drawn) == 1 + 2 * 2
    with_logarithms = engine.generate([[1, 2]], max_tokens=2, logprobs=1, ignore_eos=True)[0]
    assert with_logarithms.token_ids != [7, 7]
    assert sum(drawn) == 1 + 2 * 2


def test_without_a_gpu_plain_torch_draws_tokens(model):
    assert Engine(model, num_blocks=64, attention="triton", device="cpu").runner.draw_tokens is None
    assert Engine(model, num_blocks=64, attention="torch", device="cpu").runner.draw_tokens is None


def test_the_kerneldraws_on_the_models_device_whichever_is_the_current_one(monkeypatch):
    current = ["cuda:0"]

    @contextmanager
    def entered(device):
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr("kvblocks.kernels.draw.draw_tokens", lambda *given: (current[-1], *given))
    draw = backends_module.draws_on(torch.device("cuda:1"))
    assert (draw(1, 2), current) == (("cuda:1", 1, 2), ["cuda:0"])
