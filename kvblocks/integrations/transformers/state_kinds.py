"""The layers of transformers whose states kvblocks can keep, and the sizes of these states.

Such a layer accesses its state only through calls of transformers' `Cache` (`CACHE_CALLS`), can continue from a state
with any number of tokens, and keeps nothing else. `LayerStates` takes the place of that cache.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CACHE_CALLS = frozenset(
    {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state", "is_recording_past"}
)
"""The calls that a supported layer makes on its cache."""


@dataclass(frozen=True)
class StateShape:
    """A sequence's state in a layer, without a dimension for sequences.

    conv: the shape of the convolution's last inputs, [columns, kernel], in the model's dtype. matrices: the shape of
    the heads' matrices, in float32, or None in layers that are only a convolution.
    """

    conv: tuple[int, int]
    matrices: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class StateKind:
    """The kind of such layers that a model has.

    layer: the name of their class. argument: the name of their parameter for the cache. shape: computes the sizes of
    their state from the model's configuration.
    """

    layer: str
    argument: str
    shape: Callable[[Any], StateShape]


def _short_conv(config: Any) -> StateShape:
    return StateShape((config.hidden_size, config.conv_L_cache))


def _gated_delta(config: Any) -> StateShape:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    conv = (2 * keys + heads * value_dim, config.linear_conv_kernel_dim)
    return StateShape(conv, (heads, config.linear_key_head_dim, value_dim))


def _mamba2(config: Any) -> StateShape:
    width = int(config.mamba_expand * config.hidden_size)
    columns = width + 2 * config.mamba_n_groups * config.mamba_d_state
    return StateShape((columns, config.mamba_d_conv), (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state))


KINDS = {
    "lfm2": StateKind("Lfm2ShortConv", "past_key_values", _short_conv),
    "qwen3_next": StateKind("Qwen3NextGatedDeltaNet", "cache_params", _gated_delta),
    "qwen3_5_text": StateKind("Qwen3_5GatedDeltaNet", "cache_params", _gated_delta),
    "qwen3_5_moe_text": StateKind("Qwen3_5MoeGatedDeltaNet", "cache_params", _gated_delta),
    "granitemoehybrid": StateKind("GraniteMoeHybridMambaLayer", "cache_params", _mamba2),
    "bamba": StateKind("BambaMixer", "cache_params", _mamba2),
}
"""The supported models, by `model_type`."""


def state_types(config: Any) -> list[str]:
    """The sorted types of a configuration's layers that don't attend; empty for other objects. O(layers)."""
    kinds = getattr(config, "layer_types", None) or ()
    return sorted({str(kind) for kind in kinds if not str(kind).endswith("_attention") or kind == "linear_attention"})


def kind_of(config: Any) -> StateKind:
    """The kind of a configuration's layers. Raises KeyError if it isn't supported."""
    return KINDS[config.model_type]


def reason_against(config: Any) -> str | None:
    """Why a model whose layers keep states isn't supported, or None if it is. O(layers)."""
    kind = KINDS.get(getattr(config, "model_type", ""))
    if kind is None:
        return f"kvblocks knows the states of {', '.join(KINDS)}; `kvblocks serve` and `kvblocks.engine` serve others"
    others = {str(layer_type) for layer_type in config.layer_types} - {*state_types(config), "full_attention"}
    if others:
        return f"beside states it serves full attention alone, and not {' and '.join(sorted(others))}"
    if "full_attention" not in config.layer_types:
        return "prefixes are found by keys and values, and no layer has them"
    return _difference(config, kind)


def _difference(config: Any, kind: StateKind) -> str | None:
    """What a layer's code does that kvblocks doesn't know, or None."""
    module = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    layer = getattr(module, kind.layer, None)
    if layer is None:
        return f"this transformers has no {kind.layer}"
    source = inspect.getsource(layer.forward)
    parameters = re.search(r"\((.*?)\):", source, re.DOTALL)
    if parameters is None or not re.search(rf"\b{kind.argument}\b", parameters[1]):
        return f"{kind.layer}.forward has no parameter {kind.argument}"
    unknown = set(re.findall(rf"\b{kind.argument}\.(\w+)", source)) - CACHE_CALLS
    if unknown:
        return f"{kind.layer} of this transformers uses {' and '.join(sorted(unknown))} of its cache"
    return None
