"""Which layers of a hybrid model keep a state, and what their config.json says of them.

- LFM2: short convolutions, and attention.
- Bamba and Granite 4: Mamba2, and attention. Granite's attention mostly has no RoPE, and some of its models have
  experts.
- Kimi Linear: Kimi delta attention, and latent attention without RoPE. Most layers have experts.
- Qwen3-Next and Qwen3.5: three layers of gated delta nets for each layer of gated attention, whose output is multiplied
  by the sigmoid of a projection. Most of their models have experts.

The fields, their defaults and their meaning are those of `transformers`' configurations of these names.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.fields import read_flag, read_number, read_size
from kvblocks.engine.model.hybrid.gated_delta import GatedDelta
from kvblocks.engine.model.hybrid.kimi_delta import KimiDelta
from kvblocks.engine.model.hybrid.latent import LatentAttention
from kvblocks.engine.model.hybrid.mamba2 import Mamba2
from kvblocks.engine.model.hybrid.short_conv import ShortConv
from kvblocks.engine.model.llama4 import Experts

# What Kimi Linear's fields may say, but no published model does, and `transformers` doesn't compute or we don't.
_KIMI_FIXED = {
    "q_lora_rank": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
}


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


def read_bamba(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are Bamba's own, and its MLP's size. Raises ModelError."""
    attends = fields.get("attn_layer_indices")
    if not isinstance(attends, list) or any(not isinstance(layer, int) for layer in attends):
        raise ModelError(f"expected attn_layer_indices to be a list of layers, got {attends!r}")
    default = ["full_attention" if layer in attends else "linear_attention" for layer in range(num_layers)]
    types = _read_layer_types({}, num_layers, "linear_attention", default)
    return {"intermediate_size": read_size(fields, "intermediate_size"), "mixers": _mamba_layers(fields, types)}


def read_granite4(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are Granite 4's own, and its MLP's size. Raises ModelError."""
    names = {"mamba": "linear_attention", "attention": "full_attention"}  # older folders have these names
    types = fields.get("layer_types")
    if isinstance(types, list):
        fields = {**fields, "layer_types": [names.get(kind, kind) for kind in types]}
    types = _read_layer_types(fields, num_layers, "linear_attention", None)
    embedding = fields.get("position_embedding_type")
    if embedding not in (None, "nope", "rope"):
        raise ModelError(f"expected position_embedding_type 'rope', 'nope' or null, got {embedding!r}")
    experts, shared_width = None, read_size(fields, "shared_intermediate_size")
    if fields.get("num_local_experts"):
        num_experts, num_chosen = read_size(fields, "num_local_experts"), read_size(fields, "num_experts_per_tok")
        if num_chosen > num_experts:
            raise ModelError(
                f"expected num_experts_per_tok of at most num_local_experts ({num_experts}), got {num_chosen}"
            )
        experts = Experts(
            frozenset(range(num_layers)),
            num_experts,
            num_chosen,
            read_size(fields, "intermediate_size"),
            shared_width=shared_width,
            weighs_outputs=True,
            normalizes=True,
        )
    return {
        "intermediate_size": shared_width,
        "mixers": _mamba_layers(fields, types),
        "experts": experts,
        "unrotated_layers": frozenset() if embedding == "rope" else frozenset(range(num_layers)),
        "query_scale": read_number(fields, "attention_multiplier", 1.0),
        "embedding_scale": read_number(fields, "embedding_multiplier", 1.0),
        "residual_scale": read_number(fields, "residual_multiplier", 1.0),
        "logits_scale": 1 / read_number(fields, "logits_scaling", 1.0),
    }


def read_kimi_linear(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that are Kimi Linear's own, and its MLP's size. Raises ModelError."""
    num_heads = read_size(fields, "num_attention_heads")
    for name, value in (*_KIMI_FIXED.items(), ("num_key_value_heads", num_heads)):
        if fields.get(name, value) != value:
            raise ModelError(f"expected {name} {value!r}, got {fields[name]!r}")
    linear = fields.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ModelError(f"expected linear_attn_config to be an object, got {linear!r}")
    sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    sizes |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    own = {**fields, **{ours: linear[name] for name, ours in sizes.items() if linear.get(name) is not None}}
    types = _read_layer_types(fields, num_layers, "linear_attention", _kimi_layers(linear, num_layers))
    delta = KimiDelta(
        read_size(own, "linear_num_heads"),
        read_size(own, "linear_head_dim"),
        read_size(own, "linear_conv_kernel_dim"),
        read_number(fields, "rms_norm_eps"),
    )
    latent = LatentAttention(
        num_heads,
        read_size(fields, "kv_lora_rank"),
        read_size(fields, "qk_nope_head_dim"),
        read_size(fields, "qk_rope_head_dim"),
        read_size(fields, "v_head_dim"),
    )
    return {
        "intermediate_size": read_size(fields, "intermediate_size"),
        "num_kv_heads": 1,
        "head_dim": latent.entry_dim,
        "query_scale": latent.key_dim**-0.5,
        "unrotated_layers": frozenset(range(num_layers)),
        "mixers": tuple(delta if kind == "linear_attention" else None for kind in types),
        "latent": latent,
        "experts": _kimi_experts(fields, num_layers),
    }


def _kimi_layers(linear: Mapping[str, Any], num_layers: int) -> list[str]:
    """Each layer's kind: by two lists of numbers from 1, or every fourth layer attends, but for the first one."""
    attends, others = linear.get("full_attn_layers"), linear.get("kda_layers")
    if attends is None or others is None:
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(num_layers)]
    if not isinstance(attends, list) or not isinstance(others, list):
        raise ModelError(f"expected full_attn_layers and kda_layers to be lists, got {attends!r} and {others!r}")
    if sorted([*attends, *others]) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"expected full_attn_layers and kda_layers to have each number from 1 to {num_layers} once, got {attends}"
            f" and {others}"
        )
    return ["full_attention" if layer + 1 in attends else "linear_attention" for layer in range(num_layers)]


def _kimi_experts(fields: Mapping[str, Any], num_layers: int) -> Experts | None:
    """The experts' layers are those that are "sparse" in `mlp_layer_types`, or all behind the first n."""
    types = fields.get("mlp_layer_types")
    if types is None:
        first = fields.get("first_k_dense_replace")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"expected first_k_dense_replace to be a number of layers, got {first!r}")
        types = ["dense" if layer < first else "sparse" for layer in range(num_layers)]
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise ModelError(f"expected mlp_layer_types to be a list of {num_layers}, each dense or sparse, got {types!r}")
    if "sparse" not in types:
        return None
    num_experts, num_chosen = read_size(fields, "num_local_experts"), read_size(fields, "num_experts_per_tok")
    num_groups, num_chosen_groups = read_size(fields, "n_group"), read_size(fields, "topk_group")
    if num_experts % num_groups or num_chosen_groups > num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise ModelError(
            f"expected num_expert_group to divide num_experts ({num_experts}) into groups of two or more, and"
            f" topk_group of at most as many; got {num_groups} and {num_chosen_groups}"
        )
    if num_chosen > num_experts // num_groups * num_chosen_groups:
        raise ModelError(
            f"expected num_experts_per_token of at most the experts of topk_group groups"
            f" ({num_experts // num_groups * num_chosen_groups}), got {num_chosen}"
        )
    width = read_size(fields, "moe_intermediate_size")
    return Experts(
        frozenset(layer for layer, kind in enumerate(types) if kind == "sparse"),
        num_experts,
        num_chosen,
        width,
        shared_width=width * read_size(fields, "n_shared_experts"),
        weighs_outputs=True,
        normalizes=read_flag(fields, "norm_topk_prob"),
        chooses_by_sigmoid=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=read_number(fields, "routed_scaling_factor"),
    )


def _mamba_layers(fields: Mapping[str, Any], types: Sequence[str]) -> tuple[Mamba2 | None, ...]:
    limit = fields.get("time_step_limit")
    if limit is not None and (
        len(limit) != 2 or limit[0] != 0 or limit[1] not in (math.inf, {"__float__": "Infinity"})
    ):
        raise ModelError(f"expected time_step_limit from 0 to infinity, got {limit!r}")
    width = read_size(fields, "mamba_expand") * read_size(fields, "hidden_size")
    num_heads, num_groups = read_size(fields, "mamba_n_heads"), read_size(fields, "mamba_n_groups")
    if width % num_heads or num_heads % num_groups:
        raise ModelError(
            f"expected mamba_n_heads to divide {width}, mamba_expand times hidden_size, and to be a multiple of"
            f" mamba_n_groups, got {num_heads} heads and {num_groups} groups"
        )
    mamba = Mamba2(
        num_heads,
        width // num_heads,
        read_size(fields, "mamba_d_state"),
        num_groups,
        read_size(fields, "mamba_d_conv"),
        read_number(fields, "rms_norm_eps", 1e-6),
        has_conv_bias=read_flag(fields, "mamba_conv_bias"),
        has_bias=read_flag(fields, "mamba_proj_bias"),
    )
    return tuple(mamba if kind == "linear_attention" else None for kind in types)


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
