"""GGUF files of `transformers`' models, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_name(name: str, architecture: str) -> str:
    """The name in a GGUF file of a folder's tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(GEMMA3_NAMES if architecture == 'gemma3' else NAMES)[part]}.{kind}"


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def random_blocks(rows: np.ndarray, kind: Kind) -> np.ndarray:
    """As many blocks as these rows take, of random bytes that mean small numbers: for kinds that can't be quantised."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = rows.size // num_values
    random, found = np.random.default_rng(rows.size), np.empty((0, num_bytes), dtype=np.uint8)
    while len(found) < num_blocks:
        blocks = random.integers(0, 256, (512, num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.quants.dequantize(blocks, kind)).max(axis=1)
        found = np.concatenate([found, blocks[(largest < 1) & (largest > 1e-3)]])
    return found[:num_blocks].reshape(len(rows), -1)


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    kind: Kind = Kind.F32,
    change: Callable[[Any], None] | None = None,
    quantize: Callable[[np.ndarray, Kind], np.ndarray] = gguf.quants.quantize,
) -> Path:
    """Write the model of a folder. kind: of matrices whose rows are long enough. change: gets the writer last."""
    fields = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    ropes = fields["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_sliding_window(fields["sliding_window"])
    add_tokenizer(writer, fields["vocab_size"])
    for name, saved in load_file(folder / "model.safetensors").items():
        ours = gguf_name(name, architecture)
        is_centered = architecture == "gemma3" and ours.endswith("norm.weight")
        weight = saved + np.float32(1.0) if is_centered else saved
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        rows = interleaved(weight, fields[heads]) if architecture == "llama" and heads else weight
        its_kind = kind if rows.ndim > 1 and rows.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F32
        stored = rows if its_kind is Kind.F32 else quantize(rows, its_kind)
        writer.add_tensor(ours, stored, raw_dtype=its_kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, vocab_size: int) -> None:
    """Bytes as tokens, three of markup, and more up to the size of the vocabulary."""
    texts = [*BYTES, "!!", "<s>", "</s>", "<|im_end|>"][:vocab_size]
    texts += [f"<unused{index}>" for index in range(len(texts), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    types = [
        gguf.TokenType.CONTROL if text.startswith("<") and len(text) > 1 else gguf.TokenType.NORMAL for text in texts
    ]
    writer.add_token_types(types)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(len(BYTES) + 2)
