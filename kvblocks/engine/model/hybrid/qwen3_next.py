"""Qwen3-Next and Qwen3.5 (Qwen Team 2025, 2026): three layers of gated delta nets for each layer of gated attention.

An attention layer's output is multiplied by the sigmoid of a gate, which is a projection as queries are. Only a part
of each head is rotated. The fields, their defaults and their meaning are those of `transformers`' Qwen3NextConfig,
Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
"""

from collections.abc import Mapping
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.fields import read_flag, read_number, read_size
from kvblocks.engine.model.hybrid.gated_delta import GatedDelta
from kvblocks.engine.model.hybrid.layer_types import read_layer_types
from kvblocks.engine.model.llama4 import Experts


def read_qwen3_next(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are these models' own, and the MLP's size. Raises ModelError."""
    period = read_size(fields, "full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    types = read_layer_types(fields, num_layers, "linear_attention", default)
    delta = _read_delta(fields)
    experts = _read_experts(fields, num_layers)
    return {
        # Without a layer that has an MLP, the field may be missing.
        "intermediate_size": read_size(fields, "intermediate_size", None if experts is None else experts.width),
        "mixers": tuple(delta if kind == "linear_attention" else None for kind in types),
        "experts": experts,
    }


def _read_delta(fields: Mapping[str, Any]) -> GatedDelta:
    num_keys, num_values = read_size(fields, "linear_num_key_heads"), read_size(fields, "linear_num_value_heads")
    if num_values % num_keys:
        raise ModelError(
            f"expected linear_num_key_heads to divide linear_num_value_heads ({num_values}), got {num_keys}"
        )
    return GatedDelta(
        num_keys,
        num_values,
        read_size(fields, "linear_key_head_dim"),
        read_size(fields, "linear_value_head_dim"),
        read_size(fields, "linear_conv_kernel_dim"),
        read_number(fields, "rms_norm_eps", 1e-6),
        is_interleaved=fields.get("model_type") == "qwen3_next",
    )


def _read_experts(fields: Mapping[str, Any], num_layers: int) -> Experts | None:
    """The experts' layers are all, or every n-th layer, but for those that `mlp_only_layers` names."""
    if not fields.get("num_experts"):
        return None
    step, without = read_size(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(layer, int) for layer in without):
        raise ModelError(f"expected mlp_only_layers to be a list of layers, got {without!r}")
    layers = frozenset(layer for layer in range(step - 1, num_layers, step) if layer not in without)
    num_experts, num_chosen = read_size(fields, "num_experts"), read_size(fields, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"expected num_experts_per_tok of at most num_experts ({num_experts}), got {num_chosen}")
    return Experts(
        layers,
        num_experts,
        num_chosen,
        read_size(fields, "moe_intermediate_size"),
        shared_width=read_size(fields, "shared_expert_intermediate_size"),
        weighs_outputs=True,
        normalizes=read_flag({"norm_topk_prob": True, **fields}, "norm_topk_prob"),
        has_shared_gate=True,
    )
