"""Tiny random models whose layers keep states, as `batching.make_model` has them."""

import torch
import transformers

from integrations.transformers.batching import IS_GROUPED, SIZES
from kvblocks.integrations.transformers.state_kinds import reason_against

_SIZES = SIZES | {"pad_token_id": None, "tie_word_embeddings": False}
_DELTA = _SIZES | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_chunk_size": 16}
# By a model's name in transformers: the fields of its configuration.
FIELDS = {
    "Lfm2": _SIZES
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 8,
    },
    "Qwen3Next": _DELTA | _EXPERTS,
    "Qwen3_5Text": _DELTA,
    "Qwen3_5MoeText": _DELTA | _EXPERTS,
    "GraniteMoeHybrid": _SIZES
    | _MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
    },
    "Bamba": _SIZES | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
}


def make_hybrid(name):
    """A model by its name in transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FIELDS[name])
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()


def is_served():
    """Whether this transformers' layers read their cache as kvblocks knows it: those of 5.21 and newer do."""
    return not IS_GROUPED and reason_against(make_hybrid("Lfm2").config) is None
