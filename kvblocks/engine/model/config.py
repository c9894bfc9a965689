"""A model's configuration, read from the config.json of a Hugging Face folder.

Only fields that the forward pass and the scheduler need are kept. Models that this engine can't compute exactly
(another architecture, activation or RoPE scaling, quantized weights) are refused here, before any weight is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvblocks import kind_of_layers
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.architectures import (
    BAMBA,
    GRANITE4,
    KIMI_LINEAR,
    LFM2,
    LLAMA,
    LLAMA4,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WITH_IMAGES,
    QWEN3_5_WITH_IMAGES,
    QWEN3_NEXT,
    Architecture,
    choose_architecture,
)
from kvblocks.engine.model.fields import (
    read_eos_token_ids,
    read_flag,
    read_json,
    read_number,
    read_optional_number,
    read_size,
)
from kvblocks.engine.model.hybrid.latent import LatentAttention
from kvblocks.engine.model.hybrid.mixer import StateMixer
from kvblocks.engine.model.hybrid_config import (
    read_bamba,
    read_granite4,
    read_kimi_linear,
    read_lfm2,
    read_qwen3_next,
)
from kvblocks.engine.model.layer_attention import LayerAttention, Temperature
from kvblocks.engine.model.llama4 import Experts, read_llama4
from kvblocks.engine.model.rope_config import NO_ROTATION, RopeConfig, read_ropes

_LAYER_TYPES = ("full_attention", "sliding_attention")

# What reads the fields that only models of an architecture have. For others the MLP's size is all.
_OWN_FIELDS: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    LLAMA4.name: read_llama4,
    LFM2.name: read_lfm2,
    BAMBA.name: read_bamba,
    GRANITE4.name: read_granite4,
    KIMI_LINEAR.name: read_kimi_linear,
    QWEN3_NEXT.name: read_qwen3_next,
    QWEN3_5.name: read_qwen3_next,
    QWEN3_5_MOE.name: read_qwen3_next,
    QWEN3_5_WITH_IMAGES.name: read_qwen3_next,
    QWEN3_5_MOE_WITH_IMAGES.name: read_qwen3_next,
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Sizes are in elements.

    windows: for each layer, how many positions a row sees, its own included, or None for all up to its own. Empty if no
    layer has a window. local_rope: the RoPE frequencies of layers with a window; None: those of the other layers.
    query_scale: the factor of attention scores; None: 1 / sqrt(head_dim). attention_softcap, logits_softcap: the c in c
    * tanh(x / c), for scores and for logits; None: no softcap. `eos_token_ids` may be empty.

    chunk_sizes: for each layer, the size in tokens of the chunks that it attends in, or None. Empty if no layer has
    chunks. unrotated_layers: the layers without RoPE. temperature: how these layers scale their queries by position, or
    None. norms_rotated: whether queries and keys of the other layers are normed, without weights. experts: None in
    models without experts.

    mixers: for each layer, how it mixes the rows of a sequence if it keeps a state instead of K and V, or None if it
    attends. Empty if all layers attend.

    latent: latent attention without RoPE, in which the layers that attend keep one entry per token; the cache then has
    one head, whose head_dim elements are the entry. None: they keep K and V.

    embedding_scale, residual_scale, logits_scale: factors of the embeddings, of what a layer adds, and of the logits.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    architecture: Architecture = LLAMA
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    query_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    chunk_sizes: tuple[int | None, ...] = ()
    unrotated_layers: frozenset[int] = frozenset()
    temperature: Temperature | None = None
    norms_rotated: bool = False
    experts: Experts | None = None
    mixers: tuple[StateMixer | None, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    latent: LatentAttention | None = None

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep K and V. O(layers)."""
        return tuple(layer for layer in range(self.num_layers) if not self.mixers or self.mixers[layer] is None)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state instead of K and V. O(layers)."""
        return any(mixer is not None for mixer in self.mixers)

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """How each layer of `attending` attends. O(layers)."""
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        none = (None,) * self.num_layers
        parts = list(zip(self.windows or none, self.chunk_sizes or none, strict=True))
        return tuple(
            LayerAttention(
                scale,
                kind_of_layers(1, window, chunk_size),
                self.attention_softcap,
                temperature=self.temperature if layer in self.unrotated_layers else None,
            )
            for layer in self.attending
            for window, chunk_size in [parts[layer]]
        )

    @property
    def output_bias(self) -> bool:
        """Whether the projection of attention's output has a bias, and not only those of its input."""
        return self.attention_bias and self.architecture.has_output_bias

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The RoPE parameters of each layer of `attending`. O(layers)."""
        ropes = [self.rope if how.kind.sees_all else self.local_rope or self.rope for how in self.attention]
        by_layer = zip(self.attending, ropes, strict=True)
        return tuple(NO_ROTATION if layer in self.unrotated_layers else rope for layer, rope in by_layer)

    @property
    def needs_torch(self) -> str:
        """What only plain torch attention computes of this model, as a text for messages; empty if nothing."""
        parts = {
            "chunked attention": any(self.chunk_sizes),
            "layers without RoPE": bool(self.unrotated_layers),
            "experts": self.experts is not None,
            "recurrent states": self.has_states,
            "latent attention": self.latent is not None,
        }
        return " and ".join(name for name, has_part in parts.items() if has_part)

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
        """Make the configuration from config.json's fields. A given `eos_token_id` takes precedence over theirs.

        Raises ModelError if a field is missing or not a sensible value, or the model is of a kind not supported.
        """
        architecture = choose_architecture(fields)
        eos_token_id = fields.get("eos_token_id") if eos_token_id is None else eos_token_id
        fields = _text_fields(fields, architecture)
        _check_supported(fields, architecture)
        hidden_size, num_heads = read_size(fields, "hidden_size"), read_size(fields, "num_attention_heads")
        num_layers = read_size(fields, "num_hidden_layers")
        max_positions = read_size(fields, "max_position_embeddings", 2048)
        rope, local_rope = read_ropes(fields, max_positions, rotates_parts=architecture.rotates_parts)
        windows = _read_windows(fields, num_layers)
        query_scalar = read_optional_number(fields, "query_pre_attn_scalar")
        own: dict[str, Any] = {"query_scale": None if query_scalar is None else query_scalar**-0.5}
        own |= {"num_kv_heads": _read_kv_heads(fields, num_heads)}
        own |= {"head_dim": _read_head_dim(fields, hidden_size // num_heads)}
        own |= _OWN_FIELDS.get(architecture.name, _read_mlp_size)(fields, num_layers)
        return cls(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=read_size(fields, "vocab_size"),
            max_position_embeddings=max_positions,
            rms_norm_eps=read_number(fields, "rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=read_flag(fields, "tie_word_embeddings"),
            attention_bias=read_flag(fields, "attention_bias"),
            mlp_bias=read_flag(fields, "mlp_bias"),
            eos_token_ids=read_eos_token_ids(fields.get("eos_token_id") if eos_token_id is None else eos_token_id),
            architecture=architecture,
            windows=windows if any(windows) else (),
            local_rope=local_rope if any(windows) and local_rope != rope else None,
            attention_softcap=read_optional_number(fields, "attn_logit_softcapping"),
            logits_softcap=read_optional_number(fields, "final_logit_softcapping"),
            **own,
        )


def _read_mlp_size(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    del num_layers
    return {"intermediate_size": read_size(fields, "intermediate_size")}


def _text_fields(fields: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The text model's fields. Missing and null fields have the architecture's defaults."""
    text = fields.get("text_config", fields)
    if not isinstance(text, Mapping):
        raise ModelError(f"expected text_config to be an object, got {text!r}")
    quantized = {"quantization_config": fields.get("quantization_config")}  # a field of the whole model
    given = {name: value for name, value in (quantized | dict(text)).items() if value is not None}
    renamed = {ours: given[name] for name, ours in architecture.field_names.items() if name in given}
    return dict(architecture.defaults) | given | renamed


def _check_supported(fields: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise ModelError for options that change the result and that this engine doesn't compute."""
    name = architecture.activation_field
    activation = fields.get(name, architecture.activation)
    if activation != architecture.activation:
        raise ModelError(f"expected {name} {architecture.activation!r}, got {activation!r}")
    if "quantization_config" in fields:
        raise ModelError(
            f"expected weights in floating point, got quantization_config {fields['quantization_config']!r}"
        )
    if read_flag(fields, "use_bidirectional_attention"):
        raise ModelError("expected causal attention, got use_bidirectional_attention true")


def _read_kv_heads(fields: Mapping[str, Any], num_heads: int) -> int:
    num_kv_heads = read_size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"expected num_key_value_heads to divide num_attention_heads ({num_heads}), got {num_kv_heads}"
        )
    return num_kv_heads


def _read_head_dim(fields: Mapping[str, Any], default: int) -> int:
    head_dim = read_size(fields, "head_dim", default)
    if head_dim % 2:
        raise ModelError(f"expected an even head_dim (RoPE rotates pairs), got {head_dim}")
    return head_dim


def _read_windows(fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Layers without one: by `layer_types`, or every n-th layer, or the first n layers."""
    if not read_flag(fields, "use_sliding_window") or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = read_size(fields, "sliding_window")
    types = fields.get("layer_types")
    if types is None and fields.get("sliding_window_pattern") is not None:
        pattern = read_size(fields, "sliding_window_pattern")
        types = [_LAYER_TYPES[(index + 1) % pattern != 0] for index in range(num_layers)]
    elif types is None:
        num_full = 0 if fields.get("max_window_layers") == 0 else read_size(fields, "max_window_layers", 28)
        types = [_LAYER_TYPES[index >= num_full] for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ModelError(
            f"expected layer_types to be a list of {num_layers}, each {' or '.join(_LAYER_TYPES)}, got {types!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
