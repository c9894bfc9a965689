"""A tiny GGUF made here. A module of its own, so that tests without such files run where gguf is not installed."""

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

SPECIAL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ t", "Ġt he", "i n", "Ġ a", "Ã ©", "1 2"]  # 12: digits are split one by one before merges
CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class TinyModel:
    """The content of a tiny GGUF. Weights are in Hugging Face's order; `write` uses llama.cpp's order."""

    tied: bool = True
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_size: int = 96
    matrix_kind: Kind = Kind.Q4_1
    tokenizer_pre: str = "smollm"
    architecture: str = "llama"
    weights: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokens = [*SPECIAL_TEXTS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
        kv_size = self.hidden_size // self.num_heads * self.num_kv_heads
        shapes = {"token_embd": (len(self.tokens), self.hidden_size), "output_norm": (self.hidden_size,)}
        if not self.tied:
            shapes["output"] = shapes["token_embd"]
        for layer in range(self.num_layers):
            shapes |= {
                f"blk.{layer}.attn_norm": (self.hidden_size,),
                f"blk.{layer}.attn_q": (self.hidden_size, self.hidden_size),
                f"blk.{layer}.attn_k": (kv_size, self.hidden_size),
                f"blk.{layer}.attn_v": (kv_size, self.hidden_size),
                f"blk.{layer}.attn_output": (self.hidden_size, self.hidden_size),
                f"blk.{layer}.ffn_norm": (self.hidden_size,),
                f"blk.{layer}.ffn_gate": (self.ffn_size, self.hidden_size),
                f"blk.{layer}.ffn_up": (self.ffn_size, self.hidden_size),
                f"blk.{layer}.ffn_down": (self.hidden_size, self.ffn_size),
            }
        random = np.random.default_rng(0)
        self.weights = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def kind_of(self, name: str) -> Kind:
        """The type that a weight is stored in: by default that of SmolLM2's file."""
        if name.endswith("norm"):
            return Kind.F32
        return Kind.Q8_0 if name in {"token_embd", "output"} else self.matrix_kind

    def expected(self, name: str) -> np.ndarray:
        """The weight after quantising, in Hugging Face's order: both work row by row, so the order doesn't matter."""
        kind = self.kind_of(name)
        weight = self.weights[name]
        return weight if kind is Kind.F32 else gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)

    def write(self, path: Path) -> Path:
        """Write the GGUF file."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_context_length(256)
        writer.add_embedding_length(self.hidden_size)
        writer.add_block_count(self.num_layers)
        writer.add_feed_forward_length(self.ffn_size)
        writer.add_head_count(self.num_heads)
        writer.add_head_count_kv(self.num_kv_heads)
        writer.add_rope_freq_base(50000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.hidden_size // self.num_heads)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.tokenizer_pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(self.tokens) - 3))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(CHAT_TEMPLATE)
        for name, weight in self.weights.items():
            kind = self.kind_of(name)
            rows = self._interleave(name, weight)
            stored = rows if kind is Kind.F32 else gguf.quants.quantize(rows, kind)
            writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _interleave(self, name: str, weight: np.ndarray) -> np.ndarray:
        """The row order of llama.cpp's own converter for q and k."""
        num_heads = {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}.get(name.rpartition(".")[2])
        if num_heads is None:
            return weight
        halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)
