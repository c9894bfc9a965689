"""Models with windows or chunks: the same answers, to the last bit, however computed; what was passed is given back.

Contexts are six times the window, or the chunk. While a step runs, every slot that no row of it sees is NaN: blocks
that have left a window, blocks of other sequences, blocks that are merely cached.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.small_models import GEMMA3, LLAMA4, ODD, QWEN3, WINDOW, random_tokens, random_weights
from engine.watched import Watch
from kvblocks import FullAttention, PoolExhaustedError, SlidingWindow
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.run.backends import plan_cache
from kvblocks.engine.sampling.random_numbers import sample_seed
from kvblocks.errors import InvalidArgumentError

CONFIGS = {
    # Three groups of two layers: a block has room for two, and no group has fewer.
    "gemma3": replace(GEMMA3, num_layers=6, windows=(WINDOW, WINDOW, None) * 2, tie_word_embeddings=False),
    "qwen3": QWEN3,
    "windows only": replace(QWEN3, windows=(WINDOW, WINDOW)),
    "llama4": LLAMA4,
    "two windows": replace(QWEN3, num_layers=3, windows=(5, None, WINDOW)),
}
MAX_TOKENS = 12


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return LoadedModel(CONFIGS[request.param], random_weights(CONFIGS[request.param]))


@pytest.fixture(scope="module")
def gemma():
    return LoadedModel(CONFIGS["gemma3"], random_weights(CONFIGS["gemma3"]))


@pytest.fixture(scope="module")
def prompts(model):
    """150 shared tokens and 5 of its own each; one that is shared wholly; and one of nine whole blocks, twice."""
    return make_prompts(model)


def make_prompts(model):
    shared = random_tokens(model.config, 150, seed=1)
    own = [shared + random_tokens(model.config, 5, seed=seed) for seed in range(2, 4)]
    return [*own, shared, shared[:144], shared[:144]]


def generate(model, prompts, *, limits=None, num_blocks=200, one_by_one=False, **options):
    """Completions and watch of a new engine."""
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, **options)
    watch = Watch(engine)
    if limits is not None:
        engine.limits = limits
    if one_by_one:
        completions = [engine.generate([prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]
    else:
        completions = engine.generate(prompts, max_tokens=MAX_TOKENS)
    engine.manager.check()
    assert engine.manager.num_free_blocks == num_blocks
    return completions, watch


@pytest.fixture(scope="module")
def alone(model, prompts):
    """What every other way must give: one after another, whole prompts, no caching, room for everything."""
    torch.set_num_threads(1)
    return generate(model, prompts, one_by_one=True, enable_prefix_caching=False)


WAYS = {
    "batched": {"enable_prefix_caching": False},
    "cached, one after another": {"one_by_one": True},
    "cached and batched": {},
    "chunked": {"enable_prefix_caching": False, "limits": StepLimits(45, 4)},
    "cached and chunked": {"limits": StepLimits(45, 4)},
    "preempted": {"enable_prefix_caching": False, "scarce": 1.5, "limits": StepLimits(60, 4)},
    "cached and preempted": {"scarce": 1.2, "limits": StepLimits(60, 4)},
    "cached, alone in the pool": {"scarce": 1.0, "limits": StepLimits(40, 2)},
    "cached in small blocks": {"block_size": 4, "num_blocks": 600},
    "cached in blocks larger than the window": {"block_size": 32},
}


def scarce_blocks(model, share, limits):
    """A pool for `share` times what the longest request needs."""
    blocks = plan_cache(model.config, 16, torch.float32).blocks_of_sequence(
        155 + MAX_TOKENS - 1, limits.max_num_batched_tokens
    )
    return int(sum(blocks) * share)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(model, prompts, alone, way):
    expected, expected_watch = alone
    options = dict(WAYS[way])
    if "scarce" in options:
        options["num_blocks"] = scarce_blocks(model, options.pop("scarce"), options["limits"])
    completions, watch = generate(model, prompts, **options)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert watch.logits.keys() == expected_watch.logits.keys()
    for tokens, logits in expected_watch.logits.items():
        assert torch.equal(watch.logits[tokens], logits)
    assert watch.num_spoiled_slots > 0
    if way == "cached, one after another":
        assert [c.num_cached_tokens for c in completions] == [0, 144, 144, 143, 143]


def test_windows_need_less_of_the_pool(gemma):
    """The pool of the test above would be too small if no layer had a window."""
    limits = WAYS["cached, alone in the pool"]["limits"]
    num_tokens = 155 + MAX_TOKENS - 1
    everything = replace(gemma.config, windows=())
    whole = plan_cache(everything, 16, torch.float32)
    ours = plan_cache(gemma.config, 16, torch.float32)
    assert sum(whole.blocks_of_sequence(num_tokens)) * whole.block_bytes > 1.4 * (
        scarce_blocks(gemma, 1.0, limits) * ours.block_bytes
    )
    assert ours.groups == (SlidingWindow(16, WINDOW), SlidingWindow(16, WINDOW), FullAttention(16))
    assert ours.padding == 0.0


def test_a_chat_hits_all_that_it_said_before(model):
    engine = Engine(model, num_blocks=200, deterministic=True)
    watch = Watch(engine)
    said = random_tokens(model.config, 100)
    for turn in range(4):
        (completion,) = engine.generate([said], max_tokens=40, ignore_eos=True)
        cached = 0 if turn == 0 else (len(said) - 11) // 16 * 16
        assert completion.num_cached_tokens == cached
        said = said + completion.token_ids + random_tokens(model.config, 11, seed=turn)
    fresh = Watch(Engine(model, num_blocks=200, deterministic=True, enable_prefix_caching=False))
    fresh.engine.generate([said], max_tokens=1)
    engine.generate([said], max_tokens=1)
    assert torch.equal(watch.logits[tuple(said)], fresh.logits[tuple(said)])


def test_a_prompt_that_parts_behind_what_a_window_has_lost(gemma):
    """Full attention has 96 tokens cached, but the small pool kept none of the blocks that the windows need there."""
    prompt = random_tokens(gemma.config, 220)
    other = prompt[:96] + random_tokens(gemma.config, 30, seed=1)
    num_blocks = scarce_blocks(gemma, 1.0, StepLimits(16, 4)) + 7
    engine = Engine(gemma, num_blocks=num_blocks, deterministic=True)
    engine.limits = StepLimits(16, 4)
    watch = Watch(engine)
    engine.generate([prompt], max_tokens=4)
    (completion,) = engine.generate([other], max_tokens=4)
    hits = completion.num_cached_tokens
    fresh = Watch(Engine(gemma, num_blocks=200, deterministic=True, enable_prefix_caching=False))
    fresh.engine.generate([other], max_tokens=4)
    for tokens, logits in fresh.logits.items():
        assert torch.equal(watch.logits[tokens], logits)
    assert hits < 96
    large = Engine(gemma, num_blocks=200, deterministic=True)
    large.generate([prompt], max_tokens=4)
    assert large.generate([other], max_tokens=4)[0].num_cached_tokens == 96


def test_samples_share_a_prompt_and_part_from_it(model):
    engine = Engine(model, num_blocks=200, deterministic=True)
    Watch(engine)
    prompt = random_tokens(model.config, 151)
    samples = engine.generate([prompt], n=4, temperature=1.5, seed=7, max_tokens=50, ignore_eos=True)
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    for number, sample in enumerate(samples):
        seed = sample_seed(7, number)
        alone = Engine(model, num_blocks=200, deterministic=True)
        (expected,) = alone.generate([prompt], temperature=1.5, seed=seed, max_tokens=50, ignore_eos=True)
        assert sample.token_ids == expected.token_ids


@st.composite
def histories(draw):
    """Prompts that share beginnings of any length, and how an engine runs them."""
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 190), st.integers(0, 40)), min_size=2, max_size=6)
    )
    limits = StepLimits(draw(st.integers(4, 70)), 4, max_num_chunk_tokens=draw(st.none() | st.integers(1, 40)))
    return lengths, limits, draw(st.sampled_from([4, 16])), draw(st.floats(1.0, 2.5)), draw(st.integers(1, 6))


@settings(max_examples=12)
@given(history=histories())
def test_any_history_gives_the_same_bits(model, history):
    lengths, limits, block_size, share, num_at_once = history
    stems = [random_tokens(model.config, 190, seed=seed) for seed in range(3)]
    prompts = [
        stems[stem][:shared] + random_tokens(model.config, own, seed=50 + index)
        for index, (stem, shared, own) in enumerate(lengths)
    ]
    plan = plan_cache(model.config, block_size, torch.float32)
    longest = max(map(len, prompts)) + MAX_TOKENS
    num_blocks = int(sum(plan.blocks_of_sequence(longest, limits.max_num_batched_tokens)) * share)
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, deterministic=True)
    engine.limits = limits
    watch, oracle = Watch(engine), Watch(Engine(model, num_blocks=300, deterministic=True, enable_prefix_caching=False))
    for first in range(0, len(prompts), num_at_once):
        some = prompts[first : first + num_at_once]
        completions = engine.generate(some, max_tokens=MAX_TOKENS)
        expected = oracle.engine.generate(some, max_tokens=MAX_TOKENS)
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for tokens, logits in oracle.logits.items():
        assert torch.equal(watch.logits[tokens], logits)


class TestMemory:
    """How large the pool is."""

    def test_in_bytes(self, gemma):
        block_bytes = 2 * 2 * 16 * gemma.config.num_kv_heads * gemma.config.head_dim * 4  # two layers, K and V
        engine = Engine(gemma, kv_cache_memory=10 * block_bytes + 1)
        assert engine.manager.num_blocks == engine.runner.kv_cache.num_blocks == engine.plan.num_blocks == 10
        assert engine.runner.kv_cache.num_bytes == 10 * block_bytes == 10 * engine.plan.block_bytes

    def test_as_text_and_as_a_share_of_what_is_free(self, gemma, monkeypatch):
        assert Engine(gemma, kv_cache_memory="1MiB").plan.num_bytes == 2**20
        monkeypatch.setattr("kvblocks.engine.run.memory.free_memory", lambda device: 3_000_000)
        assert Engine(gemma, kv_cache_memory=0.5).plan.num_bytes == 1_500_000

    def test_a_number_of_blocks(self, gemma):
        engine = Engine(gemma, num_blocks=7)
        assert engine.plan.num_blocks == engine.manager.num_blocks == 7
        assert engine.plan.num_bytes == engine.runner.kv_cache.num_bytes

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"kv_cache_memory": 3},
                "kv_cache_memory: expected at least 12288 bytes, 3 blocks .one for each group of layers.",
            ),
            ({"kv_cache_memory": 2.0}, "kv_cache_memory: expected bytes .* got 2.0"),
            ({"kv_cache_memory": 10**6, "num_blocks": 5}, "num_blocks or kv_cache_memory, got both: 5 and 1000000"),
            ({"num_blocks": 0}, "num_blocks: expected .* got 0"),
            ({"block_size": 0}, "block_size: expected .* got 0"),
            ({"num_blocks": 10**9}, "num_blocks: expected a KV cache within the .* free, got 1000000000 blocks"),
            (
                {"num_blocks": 2**62},
                "num_blocks: expected a KV cache within the .* free, got 4611686018427387904 blocks",
            ),
            (
                {"kv_cache_memory": "900TB"},
                "kv_cache_memory: expected a KV cache within the .* of host memory that are",
            ),
            ({"kv_cache_memory": 10**18}, "kv_cache_memory: expected a KV cache within the .* of host memory that are"),
        ],
    )
    def test_what_cannot_be(self, gemma, options, message, monkeypatch):
        monkeypatch.setattr("kvblocks.engine.engine.KVCacheManager", None)  # nothing is made before
        with pytest.raises(InvalidArgumentError, match=message):
            Engine(gemma, **options)

    def test_a_request_that_can_never_fit_is_refused(self, gemma):
        plan = plan_cache(gemma.config, 16, torch.float32)
        num_blocks = sum(plan.blocks_of_sequence(100, 512))
        engine = Engine(gemma, num_blocks=num_blocks)
        prompt = random_tokens(gemma.config, 100)
        assert len(engine.generate([prompt], max_tokens=1)) == 1
        with pytest.raises(InvalidArgumentError, match=r"expected at most 113 tokens, what the pool's .* can serve"):
            engine.generate([prompt], max_tokens=14)
        assert len(engine.generate([prompt], max_tokens=13)) == 1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_pinned_tokens", [0, 32])
def test_the_longest_request_is_what_all_groups_hold(name, num_pinned_tokens):
    model = LoadedModel(CONFIGS[name], random_weights(CONFIGS[name]))
    engine = Engine(model, num_blocks=17)
    engine.limits = StepLimits(16, 4)
    if num_pinned_tokens:
        pinned = random_tokens(model.config, num_pinned_tokens, seed=9)
        engine.generate([pinned], max_tokens=1)
        engine.manager.pins.pin(pinned, priority=100)
    most = engine.scheduler.max_request_tokens
    prompt = random_tokens(model.config, most - 1)
    assert len(engine.generate([prompt], max_tokens=1)) == 1
    if most < model.config.max_position_embeddings:
        with pytest.raises((InvalidArgumentError, PoolExhaustedError), match=f"expected at most {most} tokens"):
            engine.generate([prompt], max_tokens=2)
    assert (most == model.config.max_position_embeddings) == (name == "windows only")


def test_models_without_windows_have_one_group():
    engine = Engine(LoadedModel(ODD, random_weights(ODD)), num_blocks=9)
    assert engine.manager.groups == (FullAttention(16),)
    assert engine.plan.layer_groups == ((0, 0), (0, 1))
    assert engine.runner.model.num_groups == 1


def test_a_context_longer_than_the_pool_where_block_tables_stay_on_the_device():
    pytest.importorskip("triton", reason="triton is not installed")
    from kvblocks.engine.run.device_runner import DeviceRunner

    model = LoadedModel(CONFIGS["windows only"], random_weights(CONFIGS["windows only"]))
    completions = []
    for is_resident in (False, True):
        engine = Engine(model, num_blocks=17)
        engine.limits = StepLimits(64, 4)
        if is_resident:
            engine.runner = DeviceRunner(engine.runner.model, 17, 16)
        completions += engine.generate([random_tokens(model.config, 400)], max_tokens=3)
    assert completions[0].token_ids == completions[1].token_ids
