"""Which layers of a hybrid model attend, as config.json says."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvblocks.engine.errors import ModelError


def read_layer_types(
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
