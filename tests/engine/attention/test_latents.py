"""Latent attention: its two forms against the plain formula, what the cache keeps, and what is refused."""

import pytest
import torch
from engine.hybrid_models import FIELDS, load_tiny
from engine.small_models import random_tokens

from kvblocks.engine import Engine
from kvblocks.engine.attention import latents
from kvblocks.engine.attention.attention import KVCache, LatentStep, TorchAttention
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.hybrid.latent import LatentAttention, LatentHeads
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.run.backends import plan_cache
from kvblocks.errors import InvalidArgumentError

SIZES = LatentAttention(num_heads=3, rank=12, own_dim=8, shared_dim=4, value_dim=6)
SCALE = SIZES.key_dim**-0.5
BLOCK_SIZE = 16
CONFIG = ModelConfig.from_fields(FIELDS["kimi_linear"] | {"model_type": "kimi_linear"})


# The fields of Kimi-Linear-48B-A3B's config.json.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 27) if number % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163_840,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("model"), "kimi_linear")


@pytest.fixture
def heads():
    generator = torch.Generator().manual_seed(1)
    norm, expansion = torch.ones(12), torch.randn(3, 8 + 6, 12, generator=generator)
    return LatentHeads(SIZES, norm, expansion)


def plain(query, context, heads, start):
    """Each row on its own: keys and values of every head, scores, softmax."""
    key_matrix, value_matrix = heads.expansion.split_with_sizes([SIZES.own_dim, SIZES.value_dim], 1)
    latent, shared = context.double().split_with_sizes([SIZES.rank, SIZES.shared_dim], 1)
    rows = []
    for number, row in enumerate(query.double()):
        seen = slice(0, start + number + 1)
        outputs = []
        for head in range(SIZES.num_heads):
            key = torch.cat([latent[seen] @ key_matrix[head].double().T, shared[seen]], 1)
            weights = (key @ row[head] * SCALE).softmax(0)
            outputs.append(weights @ (latent[seen] @ value_matrix[head].double().T))
        rows.append(torch.stack(outputs))
    return torch.stack(rows).float()


@pytest.mark.parametrize("elements", [latents.EXPANDED_ELEMENTS, 3000, 1])
def test_a_step_of_prompts_chunks_and_decodes(heads, elements, monkeypatch):
    """Each is in the form that takes less work. Heads are expanded together, or some after the other."""
    monkeypatch.setattr(latents, "EXPANDED_ELEMENTS", elements)
    cache = KVCache.allocate(CONFIG, 40, BLOCK_SIZE)
    cache.memory[0].fill_(torch.nan)
    generator = torch.Generator().manual_seed(2)
    spans = [(0, 50), (33, 34), (20, 24), (40, 90), (70, 71), (0, 3)]  # start and end of the step's rows
    assert [SIZES.expands(end - start) for start, end in spans] == [True, False, False, True, False, False]
    contexts = [torch.randn(end, SIZES.entry_dim, generator=generator) for _, end in spans]
    tables, sequences = iter(torch.randperm(40, generator=generator).tolist()), []
    for (start, end), context in zip(spans, contexts, strict=True):
        table = [next(tables) for _ in range(-(-end // BLOCK_SIZE))]
        for position, entry in enumerate(context):
            cache.keys[0][table[position // BLOCK_SIZE], position % BLOCK_SIZE, 0] = entry
        sequences.append(SequenceRows([1] * (end - start), start, table))
    batch = StepBatch.build(sequences, BLOCK_SIZE)
    query = torch.randn(batch.num_tokens, SIZES.num_heads, SIZES.key_dim, generator=generator)
    step = TorchAttention().begin(batch, cache)
    assert isinstance(step, LatentStep)
    output = step.attend_latents(0, query, LayerAttention(SCALE), heads)
    expected = [
        plain(rows, context, heads, start)
        for rows, context, (start, _) in zip(
            query.split([end - start for start, end in spans]), contexts, spans, strict=True
        )
    ]
    torch.testing.assert_close(output, torch.cat(expected), rtol=0, atol=1e-5)


class TestCache:
    """A layer keeps one tensor, with one entry a token."""

    def test_keys_and_values_are_one_tensor(self):
        cache = KVCache.allocate(CONFIG, 5, BLOCK_SIZE)
        assert CONFIG.latent is not None
        assert [key.shape for key in cache.keys] == [(5, BLOCK_SIZE, 1, CONFIG.latent.entry_dim)]
        assert [key.data_ptr() for key in cache.keys] == [value.data_ptr() for value in cache.values]
        assert cache.num_block_bytes == BLOCK_SIZE * 16 * 4
        assert len(cache.parts) == 1

    def test_on_another_device_they_are_too(self):
        cache = KVCache.allocate(CONFIG, 5, BLOCK_SIZE, device="meta")
        assert (len(cache.parts), cache.num_bytes) == (1, 5 * BLOCK_SIZE * 16 * 4)

    def test_the_plan_counts_entries(self, model):
        """The engine's pool and the plan, which says how many tokens a budget holds, have the same bytes."""
        engine = Engine(model, num_blocks=20)
        assert engine.plan.block_bytes == engine.runner.kv_cache.num_block_bytes == BLOCK_SIZE * 16 * 4

    def test_a_published_shape(self):
        """27 layers, 7 of which attend: 576 elements a token in each of them, and no copy a head."""
        config = ModelConfig.from_fields(PUBLISHED)
        plan = plan_cache(config, 64, torch.bfloat16)
        assert plan.block_bytes == 64 * 7 * 576 * 2
        matrices, convolutions = 32 * 128 * 128 * 4, 3 * 3 * 4096 * 2
        assert plan.state_bytes == 20 * (matrices + convolutions)
        assert config.experts is not None
        assert (config.experts.num_experts, config.experts.num_chosen, len(config.experts.layers)) == (256, 8, 26)
        assert config.latent is not None
        assert [config.latent.expands(rows) for rows in (1, 170, 171)] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='fp8_e4m3': expected 'auto' for KimiLinearForCausalLM"),
        ({"attention": "triton"}, "latent attention, which only attention='torch' computes"),
    ],
)
def test_what_cannot_be(model, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(model, num_blocks=20, **options)


def test_a_long_chunk_behind_a_hit_is_expanded_and_gives_the_same_tokens(model, monkeypatch):
    """Without `deterministic` the forms differ in the last bits only."""
    prompt, forms = random_tokens(model.config, 90), []
    expands = LatentAttention.expands
    monkeypatch.setattr(LatentAttention, "expands", lambda self, rows: forms.append(expands(self, rows)) or forms[-1])
    engine = Engine(model, num_blocks=60)
    first = engine.generate([prompt], max_tokens=5, ignore_eos=True)[0]
    longer = prompt + random_tokens(model.config, 30, seed=4)
    second = engine.generate([longer], max_tokens=5, ignore_eos=True)[0]
    assert second.num_cached_tokens == 80
    assert True in forms
    alone = Engine(model, num_blocks=60, deterministic=True, enable_prefix_caching=False)
    expected = alone.generate([prompt, longer], max_tokens=5, ignore_eos=True)
    assert [first.token_ids, second.token_ids] == [completion.token_ids for completion in expected]
