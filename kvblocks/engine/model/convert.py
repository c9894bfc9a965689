"""Turns a GGUF file into the Hugging Face folder that `transformers` and this engine read.

It knows the one family that `kvblocks fetch` offers: the llama architecture with SmolLM's byte-level BPE. For it, this
module decides the names, the shapes and the values in the folder. Any other family is refused by name.

Invariants:
- Weights are the exact values of the GGUF's own dequantisation, stored as float32. A Q4_1 weight is q * scale +
  minimum with float16 scale and minimum, which needs more bits than float16 or bfloat16 have; rounding would save
  half the disk and change the logits.
- q and k rows are put back into the order that Hugging Face's rotary embedding expects: llama.cpp stores the two
  halves of each head interleaved.
- Text encodes to the same ids as the published tokenizer's: digits one by one, then GPT-2's byte level.

The format is described in ggml's docs/gguf.md. The `gguf` package reads and dequantises, in under 3 s for SmolLM2-135M,
once per machine.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvblocks.engine.errors import ModelError

__all__ = ["convert_gguf"]

_CONTROL_TOKEN = 3  # ggml's token type for tokens that are markup, not text

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(source: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Writes config, weights, tokenizer and chat template of the GGUF file `source` into the existing folder `folder`.

    Weights are float32, 4 bytes a parameter on disk and in memory while converting. `progress` is called with the
    fraction done, from 0 to 1.

    Raises ModelError if the file is not a GGUF, or holds an architecture, a tokenizer or a tensor that is not
    supported; OSError if the folder can't be written. O(parameters). Writes into `folder` only; after an error its
    content is partial.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ModelError(f"expected a GGUF file, got {source}: {error}") from error
    config = _model_config(reader)
    _write_json(folder / "config.json", config)
    _write_tokenizer(reader, folder, int(config["max_position_embeddings"]))
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **special_ids})
    tensors = _read_tensors(reader, config, progress)
    _save_tensors(tensors, folder / "model.safetensors")


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise ModelError(f"expected the GGUF file to have {key!r}, got none")
    return field.contents()


def _optional(reader: gguf.GGUFReader, key: str, default: Any) -> Any:
    return _value(reader, key) if key in reader.fields else default


def _require(reader: gguf.GGUFReader, key: str, *, expected: object, default: object = None) -> None:
    got = _optional(reader, key, default)
    if got != expected:
        raise ModelError(f"expected a GGUF file with {key} = {expected!r}, got {got!r}")


def _shortest_float(value: float) -> float:
    """The shortest decimal with the same float32: metadata has 9.999999747378752e-06 where the author wrote 1e-05."""
    return float(str(np.float32(value)))


def _model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    _require(reader, "general.architecture", expected="llama")
    num_heads = int(_value(reader, "llama.attention.head_count"))
    hidden_size = int(_value(reader, "llama.embedding_length"))
    head_dim = int(_optional(reader, "llama.attention.key_length", hidden_size // num_heads))
    _require(reader, "llama.rope.dimension_count", expected=head_dim, default=head_dim)
    _require(reader, "llama.rope.scaling.type", expected="none", default="none")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_optional(reader, "llama.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rope_theta": _shortest_float(_optional(reader, "llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _shortest_float(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_optional(reader, "tokenizer.ggml.padding_token_id", 0)),
        "torch_dtype": "float32",
    }


def _read_tensors(
    reader: gguf.GGUFReader, config: dict[str, Any], progress: Callable[[float], None] | None
) -> dict[str, NDArray[np.float32]]:
    tensors: dict[str, NDArray[np.float32]] = {}
    for position, tensor in enumerate(reader.tensors):
        name, num_interleaved_heads = _hugging_face_name(tensor.name, config)
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:  # gguf can't read this quantisation
            raise ModelError(f"cannot dequantise tensor {tensor.name!r}: {error}") from error
        if num_interleaved_heads:
            values = _undo_interleaving(values, num_interleaved_heads)
        tensors[name] = np.ascontiguousarray(values, dtype=np.float32)
        if progress is not None:
            progress((position + 1) / (len(reader.tensors) + 1))  # the last share is the write to disk
    _check_complete(set(tensors), config)
    return tensors


def _hugging_face_name(name: str, config: dict[str, Any]) -> tuple[str, int]:
    """The tensor's name in a Hugging Face folder, and over how many heads its rows are interleaved (0: they aren't)."""
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name], 0
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_TENSORS:
        raise ModelError(f"expected only the tensors of a plain llama model, got {name!r}")
    num_interleaved_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight", num_interleaved_heads.get(match[2], 0)


def _undo_interleaving(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """[num_heads * head_dim, in], each head's halves interleaved -> the same rows, first half before second half."""
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(0, 2, 1, 3).reshape(num_rows, num_columns)


def _check_complete(names: set[str], config: dict[str, Any]) -> None:
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{layer}.{part}.weight" for part in _LAYER_TENSORS.values()}
    wrong = expected ^ (names - {"lm_head.weight"})
    if wrong:
        raise ModelError(
            f"expected the {len(expected)} tensors of {config['num_hidden_layers']} layers, "
            f"got {len(wrong)} missing or too many, such as {min(wrong)!r}"
        )


def _save_tensors(tensors: dict[str, NDArray[np.float32]], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        os_error = re.search(r"os error (\d+)", str(error))
        if os_error is None:
            raise
        raise OSError(int(os_error[1]), str(error), str(path)) from error
    shutil.copymode(path.with_name("config.json"), path)  # safetensors makes private files; others follow the umask


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path, max_length_tokens: int) -> None:
    _require(reader, "tokenizer.ggml.model", expected="gpt2")
    _require(reader, "tokenizer.ggml.pre", expected="smollm")
    _require(reader, "tokenizer.ggml.add_bos_token", expected=False, default=False)
    texts: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [(left, right) for left, right in (m.split(" ") for m in _value(reader, "tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control_texts = [text for text, kind in zip(texts, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control_texts])
    tokenizer.save(str(folder / "tokenizer.json"))

    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    special = {name: texts[_value(reader, key)] for name, key in keys.items() if key in reader.fields}
    _write_json(folder / "special_tokens_map.json", special)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # "read tokenizer.json as it is"
        "model_max_length": max_length_tokens,
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
