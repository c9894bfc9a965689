"""Tiny random models of mlx-lm: one of each kind of layers."""

from importlib import import_module
from typing import Any

import mlx.core as mx

VOCABULARY = 128

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, **_HEADS, "num_hidden_layers": 3, "tie_word_embeddings": False},
    "gemma3_text": {
        **_SMALL,
        **_HEADS,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
    "qwen3_next": {
        **_SMALL,
        **_HEADS,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0, 1, 2, 3],
        "moe_intermediate_size": 32,
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
        "full_attention_interval": 2,
    },
    "lfm2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "rope_theta": 10000.0,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.01, 10.0),
        "time_step_rank": "auto",
    },
    "deepseek_v3": {
        **_SMALL,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_routed_experts": None,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 2048,
    },
    "deepseek_v32": {
        **_SMALL,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_routed_experts": None,
        "first_k_dense_replace": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": None,
    },
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            **_SMALL,
            **_HEADS,
            "attention_bias": False,
            "attention_chunk_size": 24,
            "intermediate_size_mlp": 64,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "rope_theta": 1000.0,
            "use_qk_norm": True,
        }
    },
}

# Its layers have a class of their own, which is kept whole. It takes a second for 50 tokens, whatever its size.
KEPT_WHOLE: dict[str, dict[str, Any]] = {
    "deepseek_v41": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": (0, 2, 2, 2, 1, 1),
        "kv_source_layer_ids": (1, 4),
        "index_source_layer_ids": (1, 2, 4, 5),
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 3,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "hc_sinkhorn_iters": 2,
    },
}


def make_model(name: str, seed: int = 0) -> Any:
    """Return a model with random weights in float32. Equal seeds give equal weights."""
    mx.random.seed(seed)
    module = import_module(f"mlx_lm.models.{name}")
    arguments = module.ModelArgs.from_dict({"model_type": name, **{**CONFIGS, **KEPT_WHOLE}[name]})
    model = module.Model(arguments)
    model.eval()
    mx.eval(model.parameters())
    return model
