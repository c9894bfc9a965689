"""Which layers of a hybrid model keep a state, and what their config.json says of them.

- LFM2: short convolutions, and attention.
- Qwen3-Next and Qwen3.5: three layers of gated delta nets for each layer of gated attention, whose output is multiplied
  by the sigmoid of a projection. Most of their models have experts.

The fields, their defaults and their meaning are those of `transformers`' configurations of these names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.fields import read_flag, read_number, read_size
from kvblocks.engine.model.hybrid.gated_delta import GatedDelta
from kvblocks.engine.model.hybrid.short_conv import ShortConv
from kvblocks.engine.model.llama4 import Experts


def read_lfm2(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are LFM2's own, and its MLP's size. Raises ModelError."""
    conv = ShortConv(
        read_size(fields, "hidden_size"), read_size(fields, "conv_L_cache"), read_flag(fields, "conv_bias")
    )
    attends = fields.get("full_attn_idxs")
    default = None
    if isinstance(attends, list):
        default = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
    types = _read_layer_types(fields, num_layers, "conv", default)
    return {
        "intermediate_size": _mlp_size(fields),
        "mixers": tuple(conv if kind == "conv" else None for kind in types),
    }


def _mlp_size(fields: Mapping[str, Any]) -> int:
    """The MLP's size: two thirds of the given one, times a factor, rounded up; or the given one itself."""
    size = read_size(fields, "intermediate_size")
    if not read_flag(fields, "block_auto_adjust_ff_dim"):
        return size
    multiple = read_size(fields, "block_multiple_of")
    adjusted = int(read_number(fields, "block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-adjusted // multiple) * multiple


def read_qwen3_next(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are these models' own, and the MLP's size. Raises ModelError."""
    period = read_size(fields, "full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    types = _read_layer_types(fields, num_layers, "linear_attention", default)
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


def _read_layer_types(
    fields: Mapping[str, Any], num_layers: int, other: str, default: Sequence[str] | None
) -> Sequence[str]:
    """Each layer's kind: "full_attention" or `other`. default: if the field `layer_types` is missing.

    Raises ModelError for other kinds, and if no layer attends: prefixes are found by K and V.
    """
    kinds = ("full_attention", other)
    types = fields.get("layer_types") or default
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in kinds for kind in types):
        raise ModelError(f"expected layer_types to be a list of {num_layers}, each {' or '.join(kinds)}, got {types!r}")
    if "full_attention" not in types:
        raise ModelError("expected at least one layer with full attention in layer_types, got none")
    return types
