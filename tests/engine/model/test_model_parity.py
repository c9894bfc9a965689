"""Logits equal those of `transformers`, on small random models of every kind that the engine supports.

Tolerance: both compute in float32, and may add the same terms in another order. Rounding then differs by about 1e-7
of the largest terms; 5e-6 of the largest logit allows for its growth through the layers, and is far below what any
mistake in a formula does. The most that was seen on x86 with AVX-512 and one thread is 1.4e-6.
"""

import json

import pytest
import torch
from engine.small_models import prefill, random_tokens, step
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
)

from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.loader import load_weights
from kvblocks.engine.run.determinism import choose_determinism
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.rows import NATURAL, TILE16
from kvblocks.errors import InvalidArgumentError

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}
# Contexts in the tests are several times the window, and the window is a multiple of no block or tile size.
QWEN3 = {"head_dim": 24}
GEMMA3 = {"num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 27}
LLAMA4 = {"num_hidden_layers": 5, "head_dim": 24, "intermediate_size_mlp": 75, "attention_chunk_size": 27}
LLAMA4 |= {"num_local_experts": 3, "interleave_moe_layer_step": 2, "floor_scale": 20, "attn_scale": 0.5}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "grouped heads": {},
    "one K and V head": {"num_key_value_heads": 1},
    "as many K and V heads": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim of its own": {"head_dim": 24},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3},
    "odd sizes": {"hidden_size": 52, "intermediate_size": 75, "head_dim": 10, "vocab_size": 131},
    "qwen2": {},
    "qwen2, tied, windows": {"tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": 27, "max_window_layers": 1},
    "qwen3": QWEN3,
    "qwen3, tied, biases": QWEN3 | {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3, windows": QWEN3 | {"use_sliding_window": True, "sliding_window": 27, "max_window_layers": 1},
    "gemma3": GEMMA3,
    "gemma3, one K and V head": GEMMA3 | {"num_key_value_heads": 1, "head_dim": 32},
    "gemma3, softcaps": GEMMA3 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3, ropes": GEMMA3 | {"rope_parameters": GEMMA3_ROPES},
    "gemma3, layer types": GEMMA3
    | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gemma3, biases, odd sizes, own head": GEMMA3
    | {"hidden_size": 52, "intermediate_size": 75, "vocab_size": 131, "attention_bias": True}
    | {"tie_word_embeddings": False},
    "llama4": LLAMA4,
    "llama4, experts everywhere, two of them": LLAMA4
    | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2, "use_qk_norm": False, "tie_word_embeddings": True},
    "llama4, no experts, biases, own layers": LLAMA4
    | {"moe_layers": [], "attention_bias": True, "attn_temperature_tuning": False, "attention_chunk_size": 48}
    | {"no_rope_layers": [0, 1, 1, 0, 1, 1], "rope_parameters": LLAMA3}
    | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"] + ["full_attention"] * 2},
}
ARCHITECTURES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig),
}


def build(folder, fields, architecture="llama"):
    """Save a random model of transformers' in `folder` and return it."""
    model_type, config_type = ARCHITECTURES.get(architecture, (LlamaForCausalLM, LlamaConfig))
    return save_random(folder, model_type(config_type(**BASE | fields)))


def save_random(folder, model):
    torch.manual_seed(0)
    norm = 0.0 if "gemma" in model.config.model_type else 1.0  # Gemma adds 1 to what is stored
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(norm if "norm" in name else 0.0, weights.shape[-1] ** -0.5)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the others can't
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A model of transformers, and our model of the folder that it saved."""
    folder = tmp_path_factory.mktemp("model")
    reference = build(folder, KINDS[request.param], request.param.partition(",")[0])
    config = ModelConfig.from_folder(folder)
    return reference, DecoderModel(config, load_weights(folder, config))


def reference_logits(reference, token_ids):
    """float32 [num_tokens, vocab]."""
    # transformers' Gemma 3 ignores attn_logit_softcapping of the configuration, but not as an argument.
    softcap = getattr(reference.config.get_text_config(), "attn_logit_softcapping", None)
    options = {} if softcap is None else {"softcap": softcap}
    with torch.inference_mode():
        return reference(torch.tensor([token_ids]), **options).logits[0].float()


def assert_same(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


def test_prefill(pair):
    reference, model = pair
    cache = model.new_kv_cache(num_blocks=20, block_size=16)
    for num_tokens in (1, 2, 17, 200, 320):
        tokens = random_tokens(model.config, num_tokens)
        assert_same(prefill(model, cache, tokens, list(range(20))), reference_logits(reference, tokens)[-1])


def test_chunked_prefill_and_decode(pair):
    reference, model = pair
    cache = model.new_kv_cache(num_blocks=20, block_size=8)
    tokens = random_tokens(model.config, 90)
    expected = reference_logits(reference, tokens)
    table = [11, 3, 7, 0, 19, 5, 2, 13, 17, 1, 4, 6]
    assert_same(prefill(model, cache, tokens[:70], table, cuts=(13, 40)), expected[69])
    for position in range(70, 90):
        logits = step(model, cache, SequenceRows(tokens[position : position + 1], position, table))
        assert_same(logits[0], expected[position])


def test_ragged_batch(pair):
    reference, model = pair
    cache = model.new_kv_cache(num_blocks=40, block_size=16)
    prompts = [random_tokens(model.config, length, seed) for seed, length in enumerate((150, 33, 64, 48, 5))]
    tables = [[0, 2, 4, 6, 8, 10, 12, 14, 16, 18], [1, 3, 5], [7, 9, 11, 13], [15, 17, 19], [20]]
    cached = [0, 32, 63, 47, 0]
    for prompt, table, num_cached in zip(prompts, tables, cached, strict=True):
        if num_cached:
            prefill(model, cache, prompt[:num_cached], table)
    rows = [SequenceRows(p[n:], n, t) for p, t, n in zip(prompts, tables, cached, strict=True)]
    logits = step(model, cache, *rows)
    assert_same(logits, torch.stack([reference_logits(reference, prompt)[-1] for prompt in prompts]))


@pytest.mark.parametrize("strategy", ["chosen", "tile16"])
def test_deterministic_strategies(pair, strategy):
    reference, natural = pair
    choice = choose_determinism(natural.config, natural.weights) if strategy == "chosen" else TILE16
    model = DecoderModel(natural.config, natural.weights, strategy=choice)
    cache = model.new_kv_cache(num_blocks=20, block_size=16)
    tokens = random_tokens(model.config, 170)
    expected = reference_logits(reference, tokens)
    assert_same(prefill(model, cache, tokens[:-1], list(range(20)), cuts=(80,)), expected[-2])
    assert_same(step(model, cache, SequenceRows(tokens[-1:], 169, list(range(20))))[0], expected[-1])


def test_sharded_weights(tmp_path):
    reference = build(tmp_path / "whole", {})
    reference.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    config = ModelConfig.from_folder(tmp_path / "shards")
    model = DecoderModel(config, load_weights(tmp_path / "shards", config))
    cache = model.new_kv_cache(num_blocks=4, block_size=16)
    tokens = random_tokens(config, 40)
    assert_same(prefill(model, cache, tokens, [0, 1, 2]), reference_logits(reference, tokens)[-1])


@pytest.mark.parametrize("kind", ["rope theta", "rope linear", "rope llama3"])
def test_older_spelling_of_rope(tmp_path, kind):
    build(tmp_path, KINDS[kind])
    newer = ModelConfig.from_folder(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    parameters = fields.pop("rope_parameters")
    fields["rope_theta"] = parameters.pop("rope_theta")
    fields["rope_scaling"] = parameters if kind != "rope theta" else None
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelConfig.from_folder(tmp_path) == newer
    if kind == "rope linear":
        fields["rope_scaling"] = {"type": "linear", "factor": 4.0}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert ModelConfig.from_folder(tmp_path) == newer


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_older_spelling_of_two_ropes(tmp_path, scaling):
    newer = GEMMA3_ROPES | ({} if scaling else {"full_attention": {"rope_type": "default", "rope_theta": 500000.0}})
    build(tmp_path, GEMMA3 | {"rope_parameters": newer}, "gemma3")
    config = ModelConfig.from_folder(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rope_parameters"], fields["layer_types"]
    fields |= {"rope_theta": 500000.0, "rope_local_base_freq": 777.0, "rope_scaling": scaling}
    fields |= {"sliding_window_pattern": 6}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelConfig.from_folder(tmp_path) == config
    assert len(set(config.ropes)) == 2


def test_the_text_part_of_a_model_of_images(tmp_path):
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    whole = Gemma3Config(text_config=Gemma3TextConfig(**BASE | GEMMA3), vision_config=vision)
    reference = save_random(tmp_path, Gemma3ForConditionalGeneration(whole))
    config = ModelConfig.from_folder(tmp_path)
    model = DecoderModel(config, load_weights(tmp_path, config))
    cache = model.new_kv_cache(num_blocks=8, block_size=16)
    tokens = random_tokens(config, 120)
    assert_same(prefill(model, cache, tokens, list(range(8))), reference_logits(reference, tokens)[-1])


@pytest.mark.parametrize("kind", ["odd sizes", "gemma3, biases, odd sizes, own head"])
def test_bfloat16_rounds_where_transformers_does(tmp_path, kind):
    """The embedding's factor and the norms, to the last bit: layers that add nothing leave these alone."""
    reference = build(tmp_path, KINDS[kind], kind.partition(",")[0]).to(torch.bfloat16)
    with torch.no_grad():
        for name, weights in reference.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weights.zero_()
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    model = DecoderModel(config, load_weights(tmp_path, config, dtype=torch.bfloat16))
    cache = model.new_kv_cache(num_blocks=1, block_size=16)
    for token in random_tokens(config, 10):
        logits = step(model, cache, SequenceRows([token], 0, [0]))
        assert torch.equal(logits, reference_logits(reference, [token]))


class TestBounds:
    """A wrong batch is refused before anything is written."""

    @pytest.fixture
    def model(self, tmp_path):
        build(tmp_path, {"max_position_embeddings": 40})
        config = ModelConfig.from_folder(tmp_path)
        return DecoderModel(config, load_weights(tmp_path, config), strategy=NATURAL)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (SequenceRows([5, 300], 0, [0]), "token ids from 0 to 299, got 300"),
            (SequenceRows([5, -1], 0, [0]), "token ids from 0 to 299, got -1"),
            (SequenceRows([5, 6], 39, [0, 1, 2]), "positions from 0 to 39, got 40"),
            (SequenceRows([5], 16, [0, 4]), "block ids from 0 to 3, got 4"),
        ],
    )
    def test_refused(self, model, rows, message):
        cache = model.new_kv_cache(num_blocks=4, block_size=16)
        with pytest.raises(InvalidArgumentError, match=message):
            step(model, cache, rows)
        assert not any(bool(tensor.any()) for tensor in (*cache.keys, *cache.values))

    def test_no_logits_wanted(self, model):
        cache = model.new_kv_cache(num_blocks=4, block_size=16)
        assert step(model, cache, SequenceRows([5], 0, [0], wants_logits=False)).shape == (0, 300)
        assert bool(cache.keys[0].any())

    @pytest.mark.parametrize("sizes", [(0, 16), (4, 0), (-1, 16)])
    def test_cache_sizes(self, model, sizes):
        with pytest.raises(InvalidArgumentError, match="at least 1, got"):
            model.new_kv_cache(*sizes)


@pytest.mark.slow
@pytest.mark.model
def test_smollm2(smollm2_folder):
    """The real model, as transformers loads it from the same folder: prefill, chunked prefill, decode."""
    reference = LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    config = ModelConfig.from_folder(smollm2_folder)
    tokens = random_tokens(config, 150)
    expected = reference_logits(reference, tokens)
    del reference
    model = DecoderModel(config, load_weights(smollm2_folder, config))
    cache = model.new_kv_cache(num_blocks=10, block_size=16)
    table = [7, 1, 9, 3, 5, 0, 2, 8, 4, 6]
    assert_same(prefill(model, cache, tokens[:149], table), expected[148])
    assert_same(prefill(model, cache, tokens[:149], table, cuts=(96,)), expected[148])
    assert_same(step(model, cache, SequenceRows(tokens[149:], 149, table))[0], expected[149])
