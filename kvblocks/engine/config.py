"""A Llama model's configuration, read from the config.json of a Hugging Face folder.

Only what the forward pass and the scheduler need is kept. What this engine cannot compute faithfully (another
architecture, activation or RoPE scaling, quantised weights) is refused by name here, before any weight is read.

Both spellings of RoPE's parameters are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`
(older).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvblocks.engine.errors import ModelError
from kvblocks.engine.layer_attention import LayerAttention

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """How rotary frequencies are made. `factor` and what follows belong to scaled types and are unused by "default"."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama model. `eos_token_ids` may be empty; sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """How each layer attends. O(layers)."""
        return (LayerAttention(scale=self.head_dim**-0.5),) * self.num_layers

    @classmethod
    def from_folder(cls, path: str | Path) -> "ModelConfig":
        """Read config.json, and generation_config.json if there is one: its eos_token_id then takes precedence.

        Raises ModelError if the folder or config.json is missing or broken, or the model is of a kind not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"expected a Hugging Face model folder, got {folder}, which is not a folder")
        if not (folder / "config.json").is_file():
            raise ModelError(f"expected a config.json in {folder}, got none")
        fields = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_fields(fields, eos_token_id=eos)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, eos_token_id: Any = None) -> "ModelConfig":
        """Make the configuration of what config.json holds; an `eos_token_id` takes precedence over the one in it.

        Raises ModelError if a field is missing or not a sensible value, or the model is of a kind not supported.
        """
        _check_supported(fields)
        hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_attention_heads")
        num_kv_heads = _size(fields, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"expected num_key_value_heads to divide num_attention_heads ({num_heads}), got {num_kv_heads}"
            )
        head_dim = _size(fields, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ModelError(f"expected an even head_dim (RoPE turns pairs), got {head_dim}")
        max_positions = _size(fields, "max_position_embeddings", 2048)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=_size(fields, "intermediate_size"),
            num_layers=_size(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_size(fields, "vocab_size"),
            max_position_embeddings=max_positions,
            rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
            rope=_read_rope(fields, max_positions),
            tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
            attention_bias=_flag(fields, "attention_bias"),
            mlp_bias=_flag(fields, "mlp_bias"),
            eos_token_ids=_token_ids(fields.get("eos_token_id") if eos_token_id is None else eos_token_id),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises ModelError if it can't be read or holds something else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"expected JSON in {path}, got: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"expected a JSON object in {path}, got a {type(fields).__name__}")
    return fields


def _check_supported(fields: Mapping[str, Any]) -> None:
    architectures = fields.get("architectures") or (["LlamaForCausalLM"] if fields.get("model_type") == "llama" else [])
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        got = ", ".join(map(str, architectures)) or f"none (model_type {fields.get('model_type')!r})"
        raise ModelError(f"expected a supported architecture ({', '.join(SUPPORTED_ARCHITECTURES)}), got {got}")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"expected hidden_act 'silu', got {activation!r}")
    if fields.get("quantization_config") is not None:
        raise ModelError(
            f"expected weights in floating point, got quantization_config {fields['quantization_config']!r}"
        )


def _read_rope(fields: Mapping[str, Any], max_positions: int) -> RopeConfig:
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"expected rope_parameters or rope_scaling to be an object, got {scaling!r}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"expected a supported rope_type ({', '.join(SUPPORTED_ROPE_TYPES)}), got {rope_type!r}")
    partial = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"expected RoPE on whole heads (partial_rotary_factor 1.0), got {partial!r}")
    theta = _number(scaling if "rope_theta" in scaling else fields, "rope_theta", 10000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = _number(scaling, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    return RopeConfig(
        "llama3",
        theta,
        factor,
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_position_embeddings=_size(scaling, "original_max_position_embeddings", max_positions),
    )


def _size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; a missing or null field is `default`."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"expected {name} to be a positive integer, got {value!r}")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; a missing or null field is `default`."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"expected {name} to be a positive number, got {value!r}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"expected {name} to be true or false, got {value!r}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them, or null, as a tuple."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values):
        raise ModelError(f"expected eos_token_id to be a token id or a list of them, got {value!r}")
    return tuple(values)
