"""The key-value pairs of a GGUF file, and what config.json would say of the same model.

The format is described in ggml's docs/gguf.md. The keys of each architecture are those that llama.cpp's converter
writes.
"""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvblocks.engine.errors import ModelError

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_GEMMA3_27B_LAYERS = 62
_CONTROL = int(gguf.TokenType.CONTROL)
_END_TEXTS = frozenset({"<|eot_id|>", "<|im_end|>", "<end_of_turn>"})
"""Special tokens that end a turn. Older files name only one end token, the one that ends a text."""


class Metadata:
    """The pairs of an open file. Reading changes nothing."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self._read: dict[str, Any] = {}  # a list of 250,000 tokens takes a second to read

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return key in self._reader.fields

    def value(self, key: str) -> Any:
        """The value of a key. Raises ModelError if there is none. O(its length)."""
        if key not in self._read:
            field = self._reader.fields.get(key)
            if field is None:
                raise ModelError(f"expected the GGUF file to have {key!r}, got none")
            self._read[key] = field.contents()
        return self._read[key]

    def flag(self, key: str, *, default: bool) -> bool:
        """The value of a boolean key, or `default` if there is none."""
        return bool(self.optional(key, default))

    def optional(self, key: str, default: Any) -> Any:
        """The value of a key, or `default` if there is none."""
        return self.value(key) if self.has(key) else default

    def number(self, key: str, default: int | None = None) -> int:
        """One integer. Raises ModelError for a list (a value per layer), and for a missing key without a default."""
        value = self.value(key) if default is None else self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"expected one integer as {key} in the GGUF file, got {value!r:.100}")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """One float, as the shortest decimal with the same float32: 1e-05 where the file has 9.999999747378752e-06."""
        value = self.value(key) if default is None else self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"expected a number as {key} in the GGUF file, got {value!r:.100}")
        return float(str(np.float32(value)))


def config_fields(
    metadata: Metadata, vocab_size: int, *, is_tied: bool, rope_factors: Callable[[], NDArray[np.float32]] | None
) -> dict[str, Any]:
    """The fields that this model's config.json would have.

    vocab_size: the rows of the embedding. is_tied: whether the embedding is also the output projection. rope_factors:
    reads the file's divisors of rotary frequencies, [head_dim / 2]; None: it has none. Raises ModelError for what is
    missing or not supported.
    """
    name = metadata.value("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"expected a GGUF file with general.architecture {', '.join(_ARCHITECTURES)}, got {name!r}: "
            "convert the original model's folder instead if kvblocks runs its architecture"
        )
    if metadata.number(f"{name}.expert_count", 0):
        raise ModelError(f"expected a GGUF file of a dense model, got one with {name}.expert_count")
    architecture, model_type = _ARCHITECTURES[name]
    num_heads, hidden_size = (
        metadata.number(f"{name}.attention.head_count"),
        metadata.number(f"{name}.embedding_length"),
    )
    head_dim = metadata.number(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.number(f"{name}.{key}", head_dim) != head_dim:
            got = metadata.value(f"{name}.{key}")
            raise ModelError(f"expected a GGUF file with {name}.{key} = {head_dim} (the head's size), got {got!r}")
    fields = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.number(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number(f"{name}.context_length"),
        "rope_theta": metadata.decimal(f"{name}.rope.freq_base", 1e6 if name == "gemma3" else 10000.0),
        "rms_norm_eps": metadata.decimal(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
        **_special_ids(metadata),
    }
    scaling = _rope_scaling(metadata, name, fields, rope_factors)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    if name == "gemma3":
        return fields | _gemma3_fields(metadata, fields)
    attention_bias = {} if name == "qwen2" else {"attention_bias": False}
    return fields | {"hidden_act": "silu", "mlp_bias": False} | attention_bias


def _special_ids(metadata: Metadata) -> dict[str, Any]:
    """The tokens that begin, end and pad a text. Any of the ends ends an answer; one alone is a number."""
    eos = metadata.number("tokenizer.ggml.eos_token_id")
    texts, types = metadata.value("tokenizer.ggml.tokens"), metadata.optional("tokenizer.ggml.token_type", [])
    ends = [eos, metadata.number("tokenizer.ggml.eot_token_id", eos)]
    ends += [index for index, kind in enumerate(types) if kind == _CONTROL and texts[index] in _END_TEXTS]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": metadata.number("tokenizer.ggml.bos_token_id", eos),
        "eos_token_id": ends if len(ends) > 1 else eos,
        "pad_token_id": metadata.number("tokenizer.ggml.padding_token_id", 0),
    }


def _rope_scaling(
    metadata: Metadata, name: str, fields: dict[str, Any], rope_factors: Callable[[], NDArray[np.float32]] | None
) -> dict[str, Any] | None:
    kind = metadata.optional(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.decimal(f"{name}.rope.scaling.factor")}
    if kind != "none":
        raise ModelError(f"expected a GGUF file with {name}.rope.scaling.type none or linear, got {kind!r}")
    return None if rope_factors is None else _llama3_scaling(fields, rope_factors())


def _llama3_scaling(fields: dict[str, Any], factors: NDArray[np.float32]) -> dict[str, Any]:
    """Llama 3's scaling. A file has its results only: each frequency's divisor, of which the largest is the factor.

    The other three numbers are the same in all of Meta's models. The divisors are computed with these and compared.
    Raises ModelError if they are others.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max(initial=1.0))
    frequencies = fields["rope_theta"] ** (-np.arange(0, fields["head_dim"], 2, dtype=np.float64) / fields["head_dim"])
    share = np.clip((original * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - share) / factor + share)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError("expected rope_freqs.weight of the GGUF file to be Llama 3's scaling, got other numbers")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _gemma3_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has. A file doesn't have the scale of queries: llama.cpp goes by the number of layers, too."""
    is_27b = fields["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.number("gemma3.attention.sliding_window"),
        "sliding_window_pattern": metadata.number("gemma3.attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.decimal("gemma3.rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.has(f"gemma3.{key}"):
            own[key] = metadata.decimal(f"gemma3.{key}")
    return own
