"""A model's rotary frequencies, as config.json specifies them.

Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (older). A model may
have other frequencies for layers with windows: `rope_parameters` then holds an object for each kind of layer. The older
spelling of these is `rope_local_base_freq`, without scaling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.fields import read_number, read_size

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """How rotary frequencies are computed. `factor` and the fields after it are for scaled types, not for "default".

    rotated_share: the share of each head's elements, from the first on, that is rotated.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotated_share: float = 1.0

    def rotated_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated."""
        return int(head_dim * self.rotated_share)


NO_ROTATION = RopeConfig("none")
"""For layers without RoPE: all frequencies are 0, so a rotation changes no number."""


def read_ropes(
    fields: Mapping[str, Any], max_positions: int, *, rotates_parts: bool = False
) -> tuple[RopeConfig, RopeConfig]:
    """The frequencies of layers with full attention, and of layers with a window. In most models they are the same.

    rotates_parts: whether the architecture allows heads to be rotated only in part.
    Raises ModelError for a kind of scaling that is not supported, or values that make no sense.
    """
    parameters = _object(fields, "rope_parameters")
    by_layer = {
        name: _object(parameters, name) for name in ("full_attention", "sliding_attention") if name in parameters
    }
    scaling = by_layer.get("full_attention", {}) if by_layer else parameters or _object(fields, "rope_scaling")
    rope = _read_rope(scaling, fields, "rope_theta", max_positions)
    share = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if rotates_parts:
        _check_share(share)
        rope = replace(rope, rotated_share=float(share))
        return rope, rope
    if share != 1.0:
        raise ModelError(f"expected RoPE on whole heads (partial_rotary_factor 1.0), got {share!r}")
    if "sliding_attention" not in by_layer and "rope_local_base_freq" not in fields:
        return rope, rope
    return rope, _read_rope(by_layer.get("sliding_attention", {}), fields, "rope_local_base_freq", max_positions)


def _check_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"expected partial_rotary_factor above 0 and at most 1, got {share!r}")


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The JSON object in a field; a missing or null field is empty."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"expected {name} to be an object, got {value!r}")
    return value


def _read_rope(
    scaling: Mapping[str, Any], fields: Mapping[str, Any], theta_name: str, max_positions: int
) -> RopeConfig:
    """Read one object of parameters. If it has no `rope_theta`, `fields[theta_name]` is used."""
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"expected a supported rope_type ({', '.join(SUPPORTED_ROPE_TYPES)}), got {rope_type!r}")
    has_theta = scaling.get("rope_theta") is not None
    theta = read_number(scaling, "rope_theta") if has_theta else read_number(fields, theta_name, 10000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = read_number(scaling, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    return RopeConfig(
        "llama3",
        theta,
        factor,
        low_freq_factor=read_number(scaling, "low_freq_factor"),
        high_freq_factor=read_number(scaling, "high_freq_factor"),
        original_max_position_embeddings=read_size(scaling, "original_max_position_embeddings", max_positions),
    )
