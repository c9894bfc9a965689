"""The tensors of a GGUF file under the names of a Hugging Face folder, with the values that the folder would have.

- A quantized tensor has the exact values of the file's own dequantization, in float32.
- q and k rows of llama are put back into the order that Hugging Face's rotary embedding expects: llama.cpp stores the
  two halves of each head interleaved.
- Gemma's norm weights are stored minus 1 in a folder, but unchanged in a GGUF file.

The file is mapped. A tensor's bytes are read, and dequantized, when the tensor is asked for.
"""

import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvblocks.engine.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: the divisors of Llama 3's rotary frequencies."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class StoredTensor:
    """A tensor of a mapped file. name: its name in a Hugging Face folder. shape: outermost dimension first."""

    def __init__(self, tensor: gguf.ReaderTensor, fields: Mapping[str, Any]) -> None:
        """fields: as `metadata.config_fields` made them. Raises ModelError for what no such model has."""
        self._tensor = tensor
        self._is_centered = fields["model_type"] == "gemma3_text" and tensor.name.endswith("_norm.weight")
        self.name, self._num_interleaved_heads = _name(tensor.name, fields)
        self.shape = tuple(int(size) for size in reversed(tensor.shape))

    def read(self) -> NDArray[np.float32]:
        """The values: float32 in memory of their own. Raises ModelError. O(elements)."""
        values = dequantize(self._tensor)
        if self._num_interleaved_heads:
            values = _undo_interleaving(values, self._num_interleaved_heads)
        if self._is_centered:
            values = values - np.float32(1.0)
        return np.array(values, dtype=np.float32, order="C")


def dequantize(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """The values of a tensor, float32. Raises ModelError for a quantization that the gguf package can't read."""
    return _dequantize(tensor, tensor.data)


def check_readable(tensors: list[gguf.ReaderTensor]) -> None:
    """Raise ModelError for the first tensor whose quantization can't be read. Reads one row per quantization."""
    seen = set()
    for tensor in tensors:
        if tensor.tensor_type not in seen:
            seen.add(tensor.tensor_type)
            _dequantize(tensor, tensor.data[:1])


def _dequantize(tensor: gguf.ReaderTensor, rows: NDArray[Any]) -> NDArray[np.float32]:
    try:
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, tensor.tensor_type)
    except NotImplementedError as error:  # what the gguf package raises for a quantization that it only knows by name
        raise ModelError(
            f"expected a quantization that the gguf package can dequantize (F16, BF16, Q4_0 to Q8_0, the K-quants and"
            f" most IQ ones), got {tensor.tensor_type.name} in {tensor.name!r}"
        ) from error
    return values


def _name(name: str, fields: Mapping[str, Any]) -> tuple[str, int]:
    """The tensor's name in a Hugging Face folder, and over how many heads its rows are interleaved (0: they aren't)."""
    if name in _OUTER:
        return _OUTER[name], 0
    match = _IN_LAYER.fullmatch(name)
    parts = _GEMMA3_LAYER if fields["model_type"] == "gemma3_text" else _LAYER
    if match is None or match[2] not in parts:
        raise ModelError(f"expected only the tensors of a plain {fields['model_type']} model, got {name!r}")
    heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
    is_interleaved = fields["model_type"] == "llama"
    return f"model.layers.{match[1]}.{parts[match[2]]}.{match[3]}", heads.get(match[2], 0) if is_interleaved else 0


def _undo_interleaving(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """[num_heads * head_dim, ...], each head's halves interleaved -> the same rows, first half before second half."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
