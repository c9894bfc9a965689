"""Logits equal those of `transformers`, on small random models of every kind that the engine supports.

Tolerance: both compute in float32, and may add the same terms in another order. Rounding then differs by about 1e-7
of the largest terms; 5e-6 of the largest logit allows for its growth through the layers, and is far below what any
mistake in a formula does. On x86 with AVX-512 and one thread the logits were in fact equal to the last bit in
prefill.
"""

import json

import pytest
import torch
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM

from engine.small_models import prefill, random_tokens, step
from kvblocks.engine.batch import SequenceRows
from kvblocks.engine.config import ModelConfig
from kvblocks.engine.determinism import choose_determinism
from kvblocks.engine.loader import load_weights
from kvblocks.engine.model import DecoderModel
from kvblocks.engine.rows import NATURAL, TILE16
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
}


def build(folder, fields):
    """Save a random model of transformers' in `folder` and return it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(TransformersConfig(**BASE | fields)).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, weights.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A model of transformers', and ours of the folder that it saved."""
    folder = tmp_path_factory.mktemp("model")
    reference = build(folder, KINDS[request.param])
    config = ModelConfig.from_folder(folder)
    return reference, DecoderModel(config, load_weights(folder, config))


def reference_logits(reference, token_ids):
    """float32 [num_tokens, vocab]."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float()


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


class TestBounds:
    """What no sequence may ask for is refused before anything is written."""

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
