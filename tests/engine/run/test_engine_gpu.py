"""The engine on a CUDA device, natively: what other tests show of it in Triton's interpreter, and CUDA graphs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.small_models import EVEN, converted, random_tokens, random_weights

from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.cascade import CascadePlanner
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.kernels.table import CascadeThreshold

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that torch can use; without one, see test_triton_engine.py"
)

CONFIG = replace(EVEN, num_heads=8, num_kv_heads=2, tie_word_embeddings=False)


def load(dtype=torch.float32):
    return LoadedModel(CONFIG, converted(random_weights(CONFIG), torch.device("cuda"), dtype))


@pytest.fixture(scope="module")
def model():
    """In float32, whose products of matrices don't use fewer bits on the way."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return load()


@pytest.fixture(scope="module")
def prompts():
    shared = random_tokens(CONFIG, 200, seed=1)
    own = [shared + random_tokens(CONFIG, number, seed=number) for number in range(2, 20, 3)]
    return [*own, shared[:192], random_tokens(CONFIG, 7, seed=99)]


def answers(engine, prompts, *, rounds=1, **options):
    results = [engine.generate(prompts, **{"max_tokens": 20, "ignore_eos": True} | options) for _ in range(rounds)]
    return [[completion.token_ids for completion in completions] for completions in results]


@pytest.mark.parametrize(
    ("making", "asking"),
    [
        ({}, {}),
        ({"block_size": 64}, {"rounds": 2}),
        ({"num_blocks": 24}, {}),
        ({}, {"n": 3}),
        ({"cuda_graphs": False}, {}),
    ],
    ids=["plain", "cached", "preempted", "samples", "without graphs"],
)
def test_the_same_tokens_as_through_torch(model, prompts, making, asking):
    options = {"num_blocks": 400} | making
    engine, plain = (Engine(model, **options, attention=attention) for attention in ("auto", "torch"))
    for one in (engine, plain):
        one.limits = StepLimits(max_num_batched_tokens=300, max_num_seqs=32)
    assert answers(engine, prompts, **asking) == answers(plain, prompts, **asking)
    assert isinstance(engine.runner, DeviceRunner)
    assert (engine.runner.num_replays > 0) == making.get("cuda_graphs", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_replayed_steps_have_the_bits_of_steps_that_are_not(prompts, dtype):
    """Of eight requests that keep in step, which is a bucket: so the shapes are the same."""
    loaded = load(dtype)
    engines = [Engine(loaded, num_blocks=400, cuda_graphs=graphs) for graphs in (True, False)]
    for engine in engines:
        engine.limits = StepLimits(max_num_batched_tokens=4096, max_num_seqs=8)
    with_graphs, without = (answers(engine, prompts, rounds=2) for engine in engines)
    assert len(prompts) == 8
    assert with_graphs == without


def test_a_cascade_gives_the_same_tokens(model, prompts):
    engine, plain = (Engine(model, num_blocks=400, attention=attention) for attention in ("auto", "torch"))
    threshold = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)
    cascade = CascadePlanner(engine.manager.shared_prefixes, 16, engine.model.device, threshold)
    engine.runner = DeviceRunner(engine.runner.model, 400, 16, cascade=cascade)
    plain.generate(prompts[:1], max_tokens=1)
    engine.generate(prompts[:1], max_tokens=1)
    assert answers(engine, prompts) == answers(plain, prompts)
    assert engine.runner.num_cascades > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_and_uncached_give_the_same_tokens(prompts, dtype):
    loaded = load(dtype)
    try:
        engines = [
            Engine(loaded, num_blocks=400, deterministic=True, enable_prefix_caching=caching)
            for caching in (False, True)
        ]
    except ModelError as error:
        # Whether a row's product depends on the other rows is up to cuBLAS; the engine asks it, and refuses by name.
        pytest.skip(f"the mode is refused on this GPU, as it must be where products depend on the batch: {error}")
    cold, warm = engines
    expected = answers(cold, prompts)[0]
    assert answers(warm, prompts, rounds=2) == [expected] * 2
    warm.limits = StepLimits(max_num_batched_tokens=64, max_num_seqs=16)
    assert answers(warm, [[1, *prompt] for prompt in prompts]) == answers(cold, [[1, *prompt] for prompt in prompts])


def test_a_decode_step_waits_for_the_device_only_to_sample(model, prompts):
    engine = Engine(model, num_blocks=400)
    stream = engine.stream(prompts, max_tokens=30, ignore_eos=True)
    for _ in range(40):
        next(stream)  # graphs are captured
    run = engine.runner.run

    def run_without_waiting(chunks):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(chunks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.run = run_without_waiting
    for _ in range(80):
        next(stream)


def test_blocks_are_copied_by_the_kernel(model):
    engine = Engine(model, num_blocks=8)
    cache = engine.runner.kv_cache
    assert cache.copies_by_kernel
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    expected = [tensor[0].clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([(0, 1), (1, 2)])
    for tensor, block in zip((*cache.keys, *cache.values), expected, strict=True):
        assert torch.equal(tensor[2], block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_to_rows_and_back_on_a_stream_of_their_own(dtype):
    cache = KVCache.allocate(CONFIG, 40, 16, dtype=dtype, device="cuda")
    for part in cache.parts:
        part.copy_(torch.randn(part.shape))
    blocks = BlockBytes(cache)
    rows = blocks.new_rows(3)
    blocks.read([7, 0, 39], list(rows), blocks.mark())
    before = [part.clone() for part in cache.parts]
    blocks.write([1, 2, 3], list(rows), blocks.mark())
    for part, old in zip(cache.parts, before, strict=True):
        assert torch.equal(part[[1, 2, 3]], old[[7, 0, 39]])
        assert torch.equal(part[4:], old[4:])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_loaded_prefix_gives_the_tokens_of_a_computed_one(model, tmp_path, tier):
    prompt = random_tokens(CONFIG, 400, seed=5)
    below = {"host": {"host_cache": "64MiB"}, "disk": {"disk_cache": tmp_path / "kv", "disk_cache_size": "64MiB"}}[tier]
    with Engine(model, num_blocks=60, deterministic=True, **below) as engine:
        first = engine.generate([prompt], max_tokens=12, ignore_eos=True)[0]
        for seed in range(3):
            engine.generate([random_tokens(CONFIG, 600, seed=10 + seed)], max_tokens=1)
        again = engine.generate([prompt], max_tokens=12, ignore_eos=True)[0]
    assert again.num_loaded_tokens == {tier: 384}
    assert again.token_ids == first.token_ids
