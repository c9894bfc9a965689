"""Small random models with recurrent states, as folders in Hugging Face's format: shared by the engine's tests."""

import json

import torch
from safetensors.torch import save_file

from kvblocks.engine import LoadedModel
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.loader import expected_shapes

_BASE = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
_DELTA = _BASE | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16}
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
# The fields of config.json of a small model, by its model_type.
FIELDS = {
    "lfm2": _BASE
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 8,
    },
    "bamba": _BASE
    | _MAMBA
    | {"architectures": ["BambaForCausalLM"], "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2},
    "granitemoehybrid": _BASE
    | _MAMBA
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "qwen3_next": _DELTA | _EXPERTS | {"architectures": ["Qwen3NextForCausalLM"]},
    "kimi_linear": _BASE
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "num_key_value_heads": 2,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "q_lora_rank": None,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_expert_group": 3,
        "topk_group": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 20,
        "model_max_length": 1024,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
    },
    "qwen3_5_text": _DELTA | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"]},
}


def save_tiny(folder, model_type, *, num_files=1, seed=0, **fields):
    """Write a random model to `folder`, in so many files."""
    fields = FIELDS[model_type] | {"model_type": model_type} | fields
    (folder / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_folder(folder)
    generator = torch.Generator().manual_seed(seed)
    ours = {name: theirs for theirs, name in config.architecture.tensor_names.items()}
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 5)
        if "embed_tokens" in name:  # of the size of what layers add, so that rounding errors stay small
            values *= shape[-1] ** 0.5
        is_centred = config.architecture.has_centered_norms and "linear_attn" not in name
        if "norm" in name and not is_centred:
            values += 1
        for part, theirs in ours.items():
            name = name.replace(part, theirs)  # noqa: PLW2901
        tensors[name] = values
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {name: f"model-{number % num_files:05}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        own = {name: values for name, values in tensors.items() if places[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_tiny(folder, model_type, **options):
    """As `save_tiny`, and load it."""
    return LoadedModel.load(save_tiny(folder, model_type, **options))
