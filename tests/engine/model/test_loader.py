"""A Hugging Face folder as a configuration and weights: which fields are read, and what is refused.

A field that is read wrongly or ignored gives a model that runs and answers wrongly.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.small_models import EVEN, ODD
from engine.small_models import GEMMA3 as GEMMA3_MODEL
from safetensors.torch import save_file

from kvblocks.core.kinds import FullAttention, SlidingWindow
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model import loader
from kvblocks.engine.model.architectures import GEMMA3 as GEMMA3_ARCHITECTURE
from kvblocks.engine.model.architectures import GEMMA3_WITH_IMAGES, LLAMA, QWEN3
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerAttention, Temperature
from kvblocks.engine.model.llama4 import Experts
from kvblocks.engine.model.loader import expected_shapes, load_weights
from kvblocks.engine.model.products import pack
from kvblocks.engine.model.rope_config import NO_ROTATION, RopeConfig

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
GEMMA3 = FIELDS | {"architectures": ["Gemma3ForCausalLM"]}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(FIELDS | changes))


def plain(weight):
    """The plain matrix that `pack` has packed."""
    return weight.to_dense() if weight.is_mkldnn else weight


def address(weight):
    return torch.ops.mkldnn.data_ptr(weight) if weight.is_mkldnn else weight.data_ptr()


def random_tensors(config):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}


class TestConfig:
    def test_fields(self, tmp_path):
        write_config(tmp_path)
        assert ModelConfig.from_folder(str(tmp_path)) == ModelConfig(
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=100,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            eos_token_ids=(2,),
        )

    def test_defaults(self, tmp_path):
        fields = {name: FIELDS[name] for name in FIELDS if name not in ("num_key_value_heads", "eos_token_id")}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        config = ModelConfig.from_folder(tmp_path)
        assert config.num_kv_heads == 4
        assert config.eos_token_ids == ()
        assert config.rope == RopeConfig("default", 10000.0)

    def test_the_original_context_of_llama3_scaling_defaults_to_the_context(self):
        config = ModelConfig.from_fields(FIELDS | {"rope_parameters": SCALED | {"rope_theta": 1e5}})
        assert config.rope == RopeConfig("llama3", 1e5, 8.0, 1.0, 4.0, 256)

    @pytest.mark.parametrize(
        ("generation", "expected"),
        [({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 6]}, (5, 6)), ({}, (2,)), ({"eos_token_id": None}, (2,))],
    )
    def test_eos_of_generation_config_takes_precedence(self, tmp_path, generation, expected):
        write_config(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"architectures": ["Qwen3MoeForCausalLM"]},
                r"\(LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3.*\), got Qwen3MoeForCausalLM",
            ),
            ({"architectures": None, "model_type": "gemma2"}, "got none .model_type 'gemma2'"),
            ({"architectures": 5}, "architectures to be a list of names, got 5"),
            ({"architectures": "LlamaForCausalLM"}, "architectures to be a list of names, got 'LlamaForCausalLM'"),
            ({"hidden_act": "gelu"}, "hidden_act 'silu', got 'gelu'"),
            ({"quantization_config": {"quant_method": "awq"}}, "floating point, got quantization_config .*awq"),
            ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_type \(default, linear, llama3\), got 'yarn'"),
            ({"rope_parameters": {"rope_type": "dynamic"}}, "got 'dynamic'"),
            ({"rope_scaling": {"type": "linear"}}, "factor to be a positive number, got None"),
            ({"rope_scaling": "linear"}, "to be an object, got 'linear'"),
            (
                {"rope_parameters": SCALED | {"low_freq_factor": "1"}},
                "low_freq_factor .* got '1'",
            ),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1.0.*got 0.5"),
            ({"hidden_size": None}, "hidden_size to be a positive integer, got None"),
            ({"num_hidden_layers": 0}, "num_hidden_layers to be a positive integer, got 0"),
            ({"vocab_size": 12.5}, "vocab_size to be a positive integer, got 12.5"),
            ({"num_attention_heads": True}, "num_attention_heads to be a positive integer, got True"),
            ({"num_key_value_heads": 3}, r"num_key_value_heads to divide num_attention_heads \(4\), got 3"),
            ({"head_dim": 7}, "even head_dim .* got 7"),
            ({"rms_norm_eps": -1}, "rms_norm_eps to be a positive number, got -1"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings to be true or false, got 'yes'"),
            ({"eos_token_id": "</s>"}, "eos_token_id to be a token id or a list of them, got '</s>'"),
        ],
    )
    def test_what_is_not_supported_or_not_sensible(self, tmp_path, changes, message):
        write_config(tmp_path, **changes)
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_folder(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_activation": "gelu"}, "hidden_activation 'gelu_pytorch_tanh', got 'gelu'"),
            ({"use_bidirectional_attention": True}, "causal attention, got use_bidirectional_attention true"),
            (
                {"layer_types": ["full_attention"]},
                "a list of 2, each full_attention or sliding_.* got .'full_attention'",
            ),
            ({"layer_types": ["full_attention", "chunked_attention"]}, "got .*'chunked_attention'"),
            ({"layer_types": 3}, "layer_types to be a list of 2, .* got 3"),
            ({"sliding_window": 0}, "sliding_window to be a positive integer, got 0"),
            ({"sliding_window_pattern": "6"}, "sliding_window_pattern to be a positive integer, got '6'"),
            ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar to be a positive number, got -1"),
            ({"final_logit_softcapping": 0}, "final_logit_softcapping to be a positive number, got 0"),
            ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "supported rope_type .* got 'yarn'"),
            ({"rope_parameters": {"sliding_attention": 3}}, "sliding_attention to be an object, got 3"),
        ],
    )
    def test_what_is_not_supported_or_not_sensible_with_windows(self, changes, message):
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_fields(GEMMA3 | changes)

    def test_defaults_of_gemma3(self):
        """The config.json of a model of images leaves out much of its text model."""
        text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
        text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
        config = ModelConfig.from_fields(fields)
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
        assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
        assert config.rope == RopeConfig("linear", 1e6, 8.0)
        assert config.local_rope == RopeConfig("default", 1e4)
        assert config.query_scale == 1 / 16
        assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)
        assert config.attention[5] == LayerAttention(1 / 16, FullAttention(1))
        assert config.attention[6] == LayerAttention(1 / 16, SlidingWindow(1, 1024))

    def test_defaults_of_llama4(self):
        config = ModelConfig.from_fields({"model_type": "llama4_text", "num_hidden_layers": 8, "moe_layers": None})
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (40, 8, 128, 202_048)
        assert config.chunk_sizes == (8192, 8192, 8192, None) * 2
        assert config.ropes == ((RopeConfig(theta=5e5),) * 3 + (NO_ROTATION,)) * 2
        assert [how.temperature for how in config.attention] == ([None] * 3 + [Temperature(8192, 0.1)]) * 2
        assert config.experts == Experts(frozenset(range(8)), num_experts=16, num_chosen=1, width=8192)
        assert (config.intermediate_size, config.norms_rotated, config.eos_token_ids) == (16_384, True, (2,))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer_types": ["sliding_attention"] * 48}, "each chunked_attention or full_attention, got .*sliding"),
            ({"layer_types": ["full_attention"]}, "layer_types to be a list of 48, .* got .'full_attention'"),
            ({"no_rope_layers": [1] * 47}, "no_rope_layers to be a list of 0 .* for each of 48 layers, got"),
            ({"no_rope_layers": [2] * 48}, "no_rope_layers to be a list of 0 .* got .2, 2"),
            ({"no_rope_layer_interval": 0}, "no_rope_layer_interval to be a positive integer, got 0"),
            ({"attention_chunk_size": 0}, "attention_chunk_size to be a positive integer, got 0"),
            ({"attn_scale": -1}, "attn_scale to be a positive number, got -1"),
            ({"moe_layers": [48]}, "moe_layers to be a list of layers from 0 to 47, got .48"),
            ({"moe_layers": "all"}, "moe_layers to be a list of layers .* got 'all'"),
            ({"num_experts_per_tok": 17}, r"num_experts_per_tok of at most num_local_experts \(16\), got 17"),
            ({"hidden_act": "gelu"}, "hidden_act 'silu', got 'gelu'"),
            ({"architectures": ["Llama4ForConditionalGeneration"]}, "supported .* got Llama4ForConditionalGeneration"),
        ],
    )
    def test_what_is_not_supported_or_not_sensible_in_llama4(self, changes, message):
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_fields({"model_type": "llama4_text"} | changes)

    @pytest.mark.parametrize(
        ("changes", "windows"),
        [
            ({}, ()),
            ({"sliding_window": 64}, ()),
            ({"use_sliding_window": True}, ()),
            ({"use_sliding_window": True, "sliding_window": 64}, ()),
            ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64)),
            ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64)),
            ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, ()),
        ],
    )
    def test_windows_of_qwen3(self, changes, windows):
        config = ModelConfig.from_fields(FIELDS | {"architectures": ["Qwen3ForCausalLM"]} | changes)
        assert config.windows == windows
        assert config.head_dim == 128

    @pytest.mark.parametrize(
        ("model_type", "architecture"), [("llama", LLAMA), ("qwen3", QWEN3), ("gemma3_text", GEMMA3_ARCHITECTURE)]
    )
    def test_the_model_type_says_it_where_architectures_are_missing(self, model_type, architecture):
        fields = FIELDS | {"architectures": None, "model_type": model_type}
        assert ModelConfig.from_fields(fields).architecture == architecture

    def test_no_folder(self, tmp_path):
        with pytest.raises(ModelError, match=r"model folder, got .*nowhere, which is not a folder"):
            ModelConfig.from_folder(tmp_path / "nowhere")

    def test_no_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"config.json in .*, got none"):
            ModelConfig.from_folder(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
    def test_not_json(self, tmp_path, text):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelError, match=r"expected .*JSON.*config.json"):
            ModelConfig.from_folder(tmp_path)


class TestWeights:
    def test_projections_are_stacked(self, tmp_path):
        tensors = random_tensors(ODD)
        save_file(tensors, tmp_path / "model.safetensors")
        weights = load_weights(str(tmp_path), ODD)
        prefix = "model.layers.1."
        parts = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(plain(weights.layers[1].qkv), torch.cat(parts))
        biases = [tensors[f"{prefix}mlp.{name}_proj.bias"] for name in ("gate", "up")]
        assert torch.equal(weights.layers[1].gate_up_bias, torch.cat(biases))
        assert torch.equal(plain(weights.layers[0].down), tensors["model.layers.0.mlp.down_proj.weight"])
        assert torch.equal(plain(weights.lm_head), tensors["lm_head.weight"])

    def test_norms_of_gemma3(self, tmp_path):
        tensors = random_tensors(GEMMA3_MODEL)
        save_file(tensors, tmp_path / "model.safetensors")
        layer = load_weights(tmp_path, GEMMA3_MODEL, dtype=torch.bfloat16).layers[2]
        prefix = "model.layers.2."
        assert torch.equal(layer.input_norm, 1 + tensors[prefix + "input_layernorm.weight"])
        assert torch.equal(layer.attention_output_norm, 1 + tensors[prefix + "post_attention_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, 1 + tensors[prefix + "pre_feedforward_layernorm.weight"])
        assert torch.equal(layer.mlp_output_norm, 1 + tensors[prefix + "post_feedforward_layernorm.weight"])
        heads = [1 + tensors[f"{prefix}self_attn.{name}_norm.weight"] for name in "qqqk"]
        assert torch.equal(layer.qk_norm, torch.stack(heads))

    @pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
    def test_the_text_part_of_a_model_of_images(self, tmp_path, prefix):
        config = replace(GEMMA3_MODEL, architecture=GEMMA3_WITH_IMAGES)
        tensors = random_tensors(config)
        stored = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        others = {"vision_tower.a": torch.zeros(1), "model.multi_modal_projector.b": torch.zeros(1)}
        save_file(stored | others, tmp_path / "model.safetensors")
        weights = load_weights(tmp_path, config)
        assert torch.equal(plain(weights.layers[3].down), tensors["model.layers.3.mlp.down_proj.weight"])
        with pytest.raises(ModelError, match=r"missing in all|expected no tensor"):
            load_weights(tmp_path, GEMMA3_MODEL)

    def test_tied_embeddings_are_one_tensor(self, tmp_path):
        # Some folders hold the tied head all the same.
        tensors = random_tensors(EVEN) | {"lm_head.weight": torch.zeros(1)}
        save_file(tensors, tmp_path / "model.safetensors")
        weights = load_weights(tmp_path, EVEN)
        every = torch.arange(EVEN.vocab_size)
        assert torch.equal(weights.embed(every), tensors["model.embed_tokens.weight"])
        assert torch.equal(plain(weights.lm_head), tensors["model.embed_tokens.weight"])
        assert address(weights.embedding) == address(weights.lm_head)
        assert weights.layers[0].qkv_bias is None

    def test_dtype(self, tmp_path):
        tensors = random_tensors(EVEN)
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        weights = load_weights(tmp_path, EVEN)
        assert weights.embedding.dtype == torch.float32
        assert torch.equal(weights.final_norm, tensors["model.norm.weight"].bfloat16().float())
        assert load_weights(tmp_path, EVEN, dtype=torch.float16).layers[0].qkv.dtype == torch.float16

    def test_weights_outlive_the_file(self, tmp_path):
        tensors = random_tensors(EVEN)
        save_file(tensors, tmp_path / "model.safetensors")
        weights = load_weights(tmp_path, EVEN)
        (tmp_path / "model.safetensors").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
        every = torch.arange(EVEN.vocab_size)
        assert torch.equal(weights.embed(every), tensors["model.embed_tokens.weight"])
        assert torch.equal(plain(weights.layers[0].down), tensors["model.layers.0.mlp.down_proj.weight"])

    @pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs to hear what of a file is in memory")
    def test_a_file_is_not_kept_in_memory_while_it_is_read(self, tmp_path, monkeypatch):
        config, path, found = replace(EVEN, num_layers=6, intermediate_size=4096), tmp_path / "model.safetensors", []
        save_file(random_tensors(config), path)

        def pack_and_look(matrix):
            parts = re.findall(f"{path}\n(?:.+\n)*?Rss: +([0-9]+) kB", Path("/proc/self/smaps").read_text())
            found.append(1024 * sum(map(int, parts)))
            return pack(matrix)

        monkeypatch.setattr(loader, "pack", pack_and_look)
        load_weights(tmp_path, config)
        assert 0 < max(found) < path.stat().st_size / 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model.norm.weight": None}, r"tensor model.norm.weight in the weights, got none \(1 missing in all\)"),
            ({"lm_head.weight": None, "model.layers.0.mlp.up_proj.bias": None}, r"\(2 missing in all\)"),
            ({"model.norm.weight": torch.zeros(53)}, r"model.norm.weight of shape \[52\], got \[53\]"),
            ({"lm_head.weight": torch.zeros(52, 131)}, r"lm_head.weight of shape \[131, 52\], got \[52, 131\]"),
            ({"model.norm.weight": torch.zeros(52, dtype=torch.int8)}, "model.norm.weight in floating point .* got I8"),
            (
                {"model.layers.2.mlp.up_proj.bias": torch.zeros(75)},
                "no tensor model.layers.2.mlp.up_proj.bias",
            ),
        ],
    )
    def test_tensors_that_do_not_fit(self, tmp_path, change, message):
        tensors = random_tensors(ODD) | change
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(present, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load_weights(tmp_path, ODD)

    def test_stored_rope_frequencies_are_ignored(self, tmp_path):
        tensors = random_tensors(EVEN) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert len(load_weights(tmp_path, EVEN).layers) == EVEN.num_layers

    def test_no_folder(self, tmp_path):
        with pytest.raises(ModelError, match="which is not a folder"):
            load_weights(tmp_path / "nowhere", EVEN)

    def test_no_weights(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"model.safetensors or model.safetensors.index.json in .*, got neither"):
            load_weights(tmp_path, EVEN)

    @pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 100])
    def test_broken_file(self, tmp_path, content):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"expected safetensors in .*model.safetensors, got"):
            load_weights(tmp_path, EVEN)

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (
                {"weight_map": {"model.norm.weight": "a.safetensors"}},
                "a.safetensors, which the index names",
            ),
            (
                {"weight_map": {"model.norm.weight": "../a.safetensors"}},
                "plain file names in .*, got '../a",
            ),
            ({"weight_map": ["a.safetensors"]}, "weight_map of tensor names to file names"),
            ({}, "weight_map of tensor names to file names in .*, got None"),
        ],
    )
    def test_broken_index(self, tmp_path, index, message):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=message):
            load_weights(tmp_path, EVEN)
