"""The architectures that the engine computes, and what all models of one have in common.

One decoder computes them all, from data: this module has what an architecture fixes, and `ModelConfig` what each
model's config.json says. config.json also says which architecture a folder holds, as for `transformers`' AutoModel.

From: Llama (Touvron et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025), Gemma 3 (Gemma Team 2025), Llama 4 (Meta
2025), LFM2 (Liquid AI 2025), Qwen3-Next and Qwen3.5 (Qwen Team 2025, 2026), Bamba (IBM 2024), Granite 4 (IBM 2025),
Kimi Linear (Kimi Team 2025).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvblocks.engine.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """What all models of an architecture have in common.

    name, model_type: as in config.json's "architectures" and "model_type". activation: the MLP's activation, which
    config.json has in the field `activation_field`. has_qk_norms: queries and keys are normed, head by head, before
    they are rotated. has_output_norms: the outputs of attention and MLP are normed before they are added.
    has_centered_norms: norm weights are stored minus 1, and applied before the result is rounded to the model's dtype.
    scales_embedding: embeddings are multiplied by the square root of hidden_size. defaults: values of fields that a
    config.json may leave out. prefixes: how tensor names may begin in a folder, and what each beginning is here.
    ignored_prefixes: how the names of tensors begin that text doesn't need. mlp_name: the name of an MLP's tensors.
    has_rotated_pairs: stored queries and keys are rotated in pairs of neighbors, (0, 1), (2, 3) and so on.
    rotates_parts: config.json may say that only a part of each head is rotated. has_output_gate: the attention's output
    is gated; the gates are stored behind each head's queries. has_fused_mlp: an MLP's gate and up projections are
    stored as one, and so are those of all experts. parts: for messages, what its models have in addition to Llama's
    parts. field_names, tensor_names: how a folder names config fields and parts of tensor names, and what they are
    called here. has_output_bias: where attention has biases, its output's projection has one, too. experts_name: the
    name of a layer's expert tensors; empty: `mlp_name`. shared_expert_name: the name of the expert that all rows share.
    expert_matrices: the names of the gate, up and down projections of the other experts.
    """

    name: str
    model_type: str
    activation: str = "silu"
    activation_field: str = "hidden_act"
    has_qk_norms: bool = False
    has_output_norms: bool = False
    has_centered_norms: bool = False
    scales_embedding: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prefixes: Mapping[str, str] = field(default_factory=dict, hash=False)
    ignored_prefixes: tuple[str, ...] = ()
    mlp_name: str = "mlp"
    has_rotated_pairs: bool = False
    rotates_parts: bool = False
    has_output_gate: bool = False
    has_fused_mlp: bool = False
    parts: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    tensor_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    has_output_bias: bool = True
    experts_name: str = ""
    shared_expert_name: str = "shared_expert"
    expert_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


LLAMA = Architecture("LlamaForCausalLM", "llama")
# A published config.json doesn't say that queries, keys and values have biases.
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    has_output_bias=False,
    defaults={"attention_bias": True, "max_position_embeddings": 32768},
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    parts="norms of queries and keys; windows",
    has_qk_norms=True,
    defaults={"head_dim": 128, "max_position_embeddings": 32768},
)
_GEMMA3_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "eos_token_id": 1,
}
GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    parts="layers with a window, and layers without",
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    has_qk_norms=True,
    has_output_norms=True,
    has_centered_norms=True,
    scales_embedding=True,
    defaults=_GEMMA3_DEFAULTS,
)
# A model of text and images. Only its text model is used, whose fields are in "text_config".
GEMMA3_WITH_IMAGES = replace(
    GEMMA3,
    name="Gemma3ForConditionalGeneration",
    parts="its text model",
    model_type="gemma3",
    prefixes={
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored_prefixes=tuple(
        prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
    ),
)
_LLAMA4_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "eos_token_id": 2,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
LLAMA4 = Architecture(
    "Llama4ForCausalLM",
    "llama4_text",
    parts="layers with chunks, layers without RoPE, experts",
    mlp_name="feed_forward",
    has_rotated_pairs=True,
    defaults=_LLAMA4_DEFAULTS,
)
LFM2 = Architecture(
    "Lfm2ForCausalLM",
    "lfm2",
    parts="states: short convolutions",
    has_qk_norms=True,
    defaults={
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "eos_token_id": 2,
    },
    field_names={
        "norm_eps": "rms_norm_eps",
        "block_ff_dim": "intermediate_size",
        "tie_embedding": "tie_word_embeddings",
    },
    tensor_names={
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.",
        ".self_attn.k_layernorm.": ".self_attn.k_norm.",
        "model.embedding_norm.": "model.norm.",
    },
)
QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    parts="states: gated delta nets; gated attention, experts",
    has_qk_norms=True,
    has_centered_norms=True,
    rotates_parts=True,
    has_output_gate=True,
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    ignored_prefixes=("mtp.",),  # predicts several tokens, which this engine doesn't use
)
_WITHOUT_EXPERTS = {
    name: value for name, value in QWEN3_NEXT.defaults.items() if "expert" not in name and "moe" not in name
}
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    parts="states: gated delta nets; gated attention",
    defaults=_WITHOUT_EXPERTS,
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={**QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
)
# Models of text and images. Only their text models are used.
_QWEN3_5_WITH_IMAGES: dict[str, Any] = {
    "parts": "its text model; states, as of the one without images",
    "prefixes": {"model.language_model.": "model."},
    "ignored_prefixes": ("mtp.", "model.visual."),
}
QWEN3_5_WITH_IMAGES = replace(
    QWEN3_5, name="Qwen3_5ForConditionalGeneration", model_type="qwen3_5", **_QWEN3_5_WITH_IMAGES
)
QWEN3_5_MOE_WITH_IMAGES = replace(
    QWEN3_5_MOE, name="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe", **_QWEN3_5_WITH_IMAGES
)
_MAMBA2_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "eos_token_id": 2,
}
BAMBA = Architecture(
    "BambaForCausalLM",
    "bamba",
    parts="states: Mamba2",
    rotates_parts=True,
    defaults={
        **_MAMBA2_DEFAULTS,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    tensor_names={
        ".feed_forward.": ".mlp.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        "model.final_layernorm.": "model.norm.",
    },
)
GRANITE4 = Architecture(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    parts="states: Mamba2; experts",
    has_fused_mlp=True,
    defaults={**_MAMBA2_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    tensor_names={".shared_mlp.input_linear.": ".mlp.gate_up_proj.", ".shared_mlp.output_linear.": ".mlp.down_proj."},
)
KIMI_LINEAR = Architecture(
    "KimiLinearForCausalLM",
    "kimi_linear",
    parts="states: Kimi delta attention; latent attention, experts",
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 163_586,
        "num_local_experts": 256,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "first_k_dense_replace": 1,
    },
    field_names={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    experts_name="block_sparse_moe",
    shared_expert_name="shared_experts",
    expert_matrices=("w1", "w3", "w2"),
)
SUPPORTED_ARCHITECTURES = (
    LLAMA,
    QWEN2,
    QWEN3,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    LLAMA4,
    LFM2,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_WITH_IMAGES,
    QWEN3_5_MOE_WITH_IMAGES,
    BAMBA,
    GRANITE4,
    KIMI_LINEAR,
)


def choose_architecture(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that config.json names. If it isn't supported, raises ModelError that lists those that are."""
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"expected architectures to be a list of names, got {names!r}")
    for architecture in SUPPORTED_ARCHITECTURES:
        if architecture.name in names or (not names and fields.get("model_type") == architecture.model_type):
            return architecture
    supported = ", ".join(architecture.name for architecture in SUPPORTED_ARCHITECTURES)
    got = ", ".join(names) or f"none (model_type {fields.get('model_type')!r})"
    raise ModelError(f"expected a supported architecture ({supported}), got {got}")
