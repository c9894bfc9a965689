"""The engine on a CUDA device: what other tests check in Triton's interpreter, and CUDA graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.sampling.plain import sample, uniform
from engine.small_models import EVEN, converted, random_tokens, random_weights

from kvblocks import Sequence
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits, TierOptions
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.cascade import CascadePlanner
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.engine.sampling.batch_sampler import BatchSampler, enqueue, group_draws
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Sampler
from kvblocks.engine.sampling.workspace import Workspace
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
    """In float32, with matrix products that use all its bits."""
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
    """Eight requests fill a bucket of decodes, so the shapes are the same with and without graphs.

    Nothing is cached, since short suffixes are padded in graphs. All prompts together are too long for one.
    """
    loaded = load(dtype)
    engines = [
        Engine(loaded, num_blocks=400, cuda_graphs=graphs, enable_prefix_caching=False) for graphs in (True, False)
    ]
    for engine in engines:
        engine.limits = StepLimits(max_num_batched_tokens=4096, max_num_seqs=8)
    with_graphs, without = (answers(engine, prompts, rounds=2) for engine in engines)
    assert len(prompts) == 8
    assert with_graphs == without


def test_flash_attn_gives_the_same_tokens_where_it_is_installed(prompts):
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    loaded = load(torch.bfloat16)
    engine = Engine(loaded, num_blocks=20, block_size=256, attention="flash-attn")
    plain = Engine(loaded, num_blocks=20, block_size=256, attention="torch")
    # Roundings differ, so a random model's tokens soon differ too. Only the first ones are compared.
    assert answers(engine, prompts, max_tokens=1) == answers(plain, prompts, max_tokens=1)


def test_nothing_is_compiled_after_a_warm_up(prompts):
    from kvblocks.engine.attention.triton_attention import watch_compiling

    engine = Engine(load(torch.bfloat16), num_blocks=400)
    engine.limits = StepLimits(max_num_batched_tokens=300, max_num_seqs=32)
    told = []
    assert engine.warm_up(lambda *step: told.append(step))
    with watch_compiling() as compiled:
        answers(engine, prompts)
    assert compiled == {} and len(told) > 5


def test_a_cascade_gives_the_same_tokens(model, prompts):
    engine, plain = (Engine(model, num_blocks=400, attention=attention) for attention in ("auto", "torch"))
    threshold = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)
    cascade = CascadePlanner(engine.manager.inspect.shared_prefixes, 16, engine.model.device, threshold)
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
        # With cuBLAS a row's product may depend on the other rows. The engine checks that, and refuses by name.
        pytest.skip(f"the mode is refused on this GPU, as it must be where products depend on the batch: {error}")
    cold, warm = engines
    expected = answers(cold, prompts)[0]
    assert answers(warm, prompts, rounds=2) == [expected] * 2
    warm.limits = StepLimits(max_num_batched_tokens=64, max_num_seqs=16)
    assert answers(warm, [[1, *prompt] for prompt in prompts]) == answers(cold, [[1, *prompt] for prompt in prompts])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}], ids=["greedy", "top_p"])
def test_steps_that_overlap_give_the_same_tokens(model, prompts, options):
    """Nothing is cached, and all requests decode in the same steps, so that all shapes are the same."""
    engine = Engine(model, num_blocks=400, enable_prefix_caching=False)
    assert engine.stepper.overlaps
    with_overlap = answers(engine, prompts, max_tokens=60, **options)
    engine.stepper.overlaps = False
    assert answers(engine, prompts, max_tokens=60, **options) == with_overlap
    # Requests that end at other times change the batch, and on a GPU the bits. So only what must hold is asked for.
    engine.stepper.overlaps = True
    stops = sorted({answer[len(answer) // 2] for answer in with_overlap[0]})
    for one in engine.generate(prompts, max_tokens=60, ignore_eos=True, stop_token_ids=stops, **options):
        ends = [place for place, token in enumerate(one.token_ids) if token in stops]
        assert ends == ([len(one.token_ids) - 1] if one.finish_reason == "stop" else [])
    engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks


def test_a_decode_step_waits_for_the_device_only_to_sample(model, prompts):
    engine = Engine(model, num_blocks=400)
    stream = engine.stream(prompts, max_tokens=30, ignore_eos=True)
    for _ in range(40):
        next(stream)  # graphs are captured
    run = engine.runner.run

    def run_without_waiting(*given):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.run = run_without_waiting
    for _ in range(80):
        next(stream)


def every_kind_of_draw():
    """Draws of all kinds, of which none is drawn twice."""
    asked = [
        {},
        {"logprobs": 5},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.01, "logprobs": 0},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 20},
    ]
    sequence = Sequence("one", random_tokens(CONFIG, 30, seed=3))
    sequence.append_tokens(random_tokens(CONFIG, 9, seed=4))
    samplers = [Sampler(SamplingParams(**options), seed) for seed, options in enumerate(asked * 8)]
    return [[(sampler.next_draw(sequence, 9), uniform(sampler.seed, 9))] for sampler in samplers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_without_waiting_for_the_device(dtype):
    draws = every_kind_of_draw()
    steep = -1.5 * torch.arange(1.0, 50_001).log()
    rows = torch.stack(
        [steep[torch.randperm(50_000, generator=torch.Generator().manual_seed(row))] for row in range(48)]
    )
    logits = rows.to("cuda", dtype)
    sample(BatchSampler(), logits, draws)  # kernels are loaded
    groups = group_draws([one for ((one, _),) in draws], range(len(draws)), logits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = enqueue(logits, groups, np.full(len(draws), 0.5), Workspace())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results.device.type == "cuda"


def test_draws_are_the_same_in_any_batch_on_the_device_and_those_of_a_cpu():
    """A draw differs from a CPU's only if it falls between two tokens within the rounding of `exp`. None does here."""
    draws = every_kind_of_draw()
    logits = torch.randn(48, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    sampler = BatchSampler()
    together = sample(sampler, logits.cuda(), draws)
    assert together == [
        sample(sampler, row.cuda().unsqueeze(0), [own])[0] for row, own in zip(logits, draws, strict=True)
    ]
    expected = sample(BatchSampler(), logits, draws)
    assert [drawn.token_id for drawn in together] == [drawn.token_id for drawn in expected]
    for drawn, other in zip(together, expected, strict=True):
        assert (drawn.logprobs is None) == (other.logprobs is None)
        if drawn.logprobs is not None:
            assert abs(drawn.logprobs.logprob - other.logprobs.logprob) < 1e-4
            assert [token for token, _ in drawn.logprobs.top] == [token for token, _ in other.logprobs.top]


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
    below = {"host": "host:64MiB", "disk": TierOptions(f"disk:{tmp_path / 'kv'}", "64MiB")}[tier]
    with Engine(model, num_blocks=60, deterministic=True, tiers=[below]) as engine:
        first = engine.generate([prompt], max_tokens=12, ignore_eos=True)[0]
        for seed in range(6):  # enough to evict the prompt from the device
            engine.generate([random_tokens(CONFIG, 600, seed=10 + seed)], max_tokens=1)
        again = engine.generate([prompt], max_tokens=12, ignore_eos=True)[0]
    assert again.num_loaded_tokens.get(tier, 0) > 100
    assert again.token_ids == first.token_ids
