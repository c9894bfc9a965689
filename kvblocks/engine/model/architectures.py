"""The architectures that the engine computes, and what all models of one have in common.

One decoder computes them all. They differ in data: this module has what an architecture fixes, `ModelConfig` has what
each model's config.json says. config.json also says which architecture a folder holds, as for `transformers`'
AutoModel.

From: Llama (Touvron et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025), Gemma 3 (Gemma Team 2025), Llama 4
(Meta 2025).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvblocks.engine.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """What all models of an architecture have in common.

    name, model_type: as in config.json's "architectures" and "model_type". activation: the MLP's, which config.json has
    in the field `activation_field`. has_qk_norms: queries and keys are normed, head by head, before they are rotated.
    has_output_norms: the outputs of attention and MLP are normed before they are added. has_centered_norms: norms'
    weights are stored less 1, and multiplied before the rounding to the model's dtype. scales_embedding: embeddings are
    multiplied by the square root of hidden_size. defaults: of fields that a config.json may leave out. prefixes: how
    the names of tensors may begin, and the beginnings that they stand for here. ignored_prefixes: of tensors that text
    doesn't need. mlp_name: of an MLP's tensors. has_rotated_pairs: stored queries and keys are
    rotated in pairs of neighbours, (0, 1), (2, 3) and so on. has_output_bias: where attention has biases, its output's
    projection has one, too.
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
    has_output_bias: bool = True


LLAMA = Architecture("LlamaForCausalLM", "llama")
# A published config.json doesn't say that queries, keys and values have biases.
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    has_output_bias=False,
    defaults={"attention_bias": True, "max_position_embeddings": 32768},
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM", "qwen3", has_qk_norms=True, defaults={"head_dim": 128, "max_position_embeddings": 32768}
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
    mlp_name="feed_forward",
    has_rotated_pairs=True,
    defaults=_LLAMA4_DEFAULTS,
)
SUPPORTED_ARCHITECTURES = (LLAMA, QWEN2, QWEN3, GEMMA3, GEMMA3_WITH_IMAGES, LLAMA4)


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
