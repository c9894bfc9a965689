"""Models of random weights in the shape of well-known ones, as Hugging Face folders: to measure speed, not answers.

A bench takes their names where it takes a folder (`open_model`). A folder has the real configuration, weights that are
normally distributed, and a tokenizer of whole words made here, so that nothing has to be fetched.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvblocks.engine.demo.script import HANDBOOK
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
from kvblocks.engine.model.loader import expected_shapes

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": True,
}
# By the name that `--model` takes: the fields of the real model's config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA32
    | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "llama-3.2-3b": _LLAMA32
    | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "qwen3-1.7b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    # Qwen3-Next's layers and heads' sizes, in a quarter of the width, with fewer layers and experts.
    "qwen3-next-small": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "vocab_size": 16384,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    # Kimi Linear's layers: three of its delta attention for each latent one. Narrower, with fewer layers and experts.
    "kimi-linear-small": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "vocab_size": 16384,
        "model_max_length": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}

_UNKNOWN, _BEGIN, _END = "<|unknown|>", "<|im_start|>", "<|im_end|>"
_ROLES = ("system", "user", "assistant")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@contextmanager
def open_model(name: str) -> Iterator[Path]:
    """Give the folder of a model: a known one by name, a random one by its shape's name, or a folder as it is.

    A random model is in bfloat16 and lies in the system's temporary folder until the end: 2.5 GB for 1.2e9 weights.
    """
    if name not in SHAPES:
        yield fetch_model(name) if name in KNOWN_MODELS else Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}-random"
        path.mkdir()
        write_model(path, SHAPES[name])
        yield path


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a model of random weights, with a tokenizer, into a folder. It answers with words of the tokenizer only."""
    words = sorted({*HANDBOOK.split(), *_ROLES})
    num_known = _write_tokenizer(folder, words)
    if shape["vocab_size"] < num_known:
        raise ValueError(
            f"vocab_size: expected at least {num_known}, the tokenizer's tokens, got {shape['vocab_size']}"
        )
    write_weights(folder, {**shape, "torch_dtype": "bfloat16"}, torch.bfloat16, num_words=len(words))


def write_weights(folder: Path, fields: Mapping[str, Any], dtype: torch.dtype, *, num_words: int | None = None) -> None:
    """Write config.json and model.safetensors, always the same for the same fields.

    num_words: the likeliest token is always below it, since the output weights of all others are zero.
    """
    config = ModelConfig.from_fields(fields)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(dtype)
        for name, size in expected_shapes(config).items()
    }
    output = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if num_words is not None:
        tensors[output][num_words:].zero_()
    (folder / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def _write_tokenizer(folder: Path, words: Iterable[str]) -> int:
    """Write a tokenizer of whole words, whose text gives the same tokens again; return how many tokens it has."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {word: index for index, word in enumerate((*words, _UNKNOWN))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (_BEGIN, _END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"chat_template": _TEMPLATE, "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return int(tokenizer.get_vocab_size())
