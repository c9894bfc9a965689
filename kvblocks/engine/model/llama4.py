"""What config.json says of a Llama 4 text model that no other model has.

Three of four layers attend within chunks of the context and rotate their heads. The others see everything, without
RoPE, and may have a temperature. Some or all layers have experts in the place of an MLP.

The fields, their defaults and their meaning are those of `transformers`' Llama4TextConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.fields import read_flag, read_number, read_size
from kvblocks.engine.model.layer_attention import Temperature

_LAYER_TYPES = ("chunked_attention", "full_attention")


@dataclass(frozen=True)
class Experts:
    """Which layers have experts, how many, and how many of them a row chooses. width: the MLP width of each expert.

    shared_width: the width of the expert that all rows share; None: as the others. weighs_outputs: experts' outputs are
    weighted by the softmax of the router's logits; if False, their inputs are weighted by a sigmoid. normalizes: the
    weights of the chosen experts are divided by their sum. has_shared_gate: the shared expert's output is multiplied by
    the sigmoid of a logit, which is the router's last row.

    chooses_by_sigmoid: the weight of an output is the sigmoid of its logit. A row then ranks experts by weight plus a
    bias per expert. Only the best num_chosen_groups of num_groups groups count, where a group's rank is the sum of its
    two best experts. scale: a factor of the weights.
    """

    layers: frozenset[int]
    num_experts: int
    num_chosen: int
    width: int
    shared_width: int | None = None
    weighs_outputs: bool = False
    normalizes: bool = False
    has_shared_gate: bool = False
    chooses_by_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0


def read_llama4(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that only Llama 4 has, and its MLP's size. Raises ModelError."""
    unrotated = _read_unrotated(fields, num_layers)
    types = fields.get("layer_types") or [_LAYER_TYPES[layer in unrotated] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ModelError(
            f"expected layer_types to be a list of {num_layers}, each {' or '.join(_LAYER_TYPES)}, got {types!r}"
        )
    chunk_size = read_size(fields, "attention_chunk_size")
    has_temperature = read_flag(fields, "attn_temperature_tuning")
    experts = _read_experts(fields, num_layers)
    return {
        "intermediate_size": read_size(fields, "intermediate_size_mlp"),
        "chunk_sizes": tuple(chunk_size if kind == "chunked_attention" else None for kind in types),
        "unrotated_layers": unrotated,
        "temperature": Temperature(read_size(fields, "floor_scale"), read_number(fields, "attn_scale"))
        if has_temperature
        else None,
        "norms_rotated": read_flag(fields, "use_qk_norm"),
        "experts": experts if experts.layers else None,
    }


def _read_unrotated(fields: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """The layers without RoPE: those with a 0 in `no_rope_layers`, or every n-th layer."""
    given = fields.get("no_rope_layers")
    if not given:
        interval = read_size(fields, "no_rope_layer_interval")
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    if not isinstance(given, list) or len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        raise ModelError(
            f"expected no_rope_layers to be a list of 0 (without RoPE) or 1 for each of {num_layers} layers, got"
            f" {given!r}"
        )
    return frozenset(layer for layer in range(num_layers) if not given[layer])


def _read_experts(fields: Mapping[str, Any], num_layers: int) -> Experts:
    """The experts' layers are those in `moe_layers`, or every n-th layer."""
    layers = fields.get("moe_layers")
    if layers is None:
        step = read_size(fields, "interleave_moe_layer_step")
        layers = list(range(step - 1, num_layers, step))
    if not isinstance(layers, list) or any(
        not isinstance(layer, int) or not 0 <= layer < num_layers for layer in layers
    ):
        raise ModelError(f"expected moe_layers to be a list of layers from 0 to {num_layers - 1}, got {layers!r}")
    num_experts, num_chosen = read_size(fields, "num_local_experts"), read_size(fields, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"expected num_experts_per_tok of at most num_local_experts ({num_experts}), got {num_chosen}")
    return Experts(frozenset(layers), num_experts, num_chosen, read_size(fields, "intermediate_size"))
