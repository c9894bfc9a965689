"""GGUF to Hugging Face folder: equal weights as `transformers` reads them, equal ids, and refusals that say why."""

import hashlib
import json
import stat

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.convert import convert_gguf

HUGGING_FACE_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "blk.1.attn_norm": "model.layers.1.input_layernorm.weight",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj.weight",
    "blk.1.attn_k": "model.layers.1.self_attn.k_proj.weight",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj.weight",
    "blk.1.ffn_up": "model.layers.1.mlp.up_proj.weight",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
}


@pytest.fixture
def convert(tmp_path):
    def convert_model(model, progress=None):
        folder = tmp_path / "folder"
        folder.mkdir()
        convert_gguf(model.write(tmp_path / "model.gguf"), folder, progress)
        return folder

    return convert_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F16])
def test_transformers_loads_exactly_the_dequantised_weights(convert, tiny_model, tied, kind):
    source = tiny_model(tied=tied, matrix_kind=kind)
    model = AutoModelForCausalLM.from_pretrained(convert(source))
    state = model.state_dict()
    names = {ours: theirs for ours, theirs in HUGGING_FACE_NAMES.items() if ours in source.weights}
    assert ("output" in names) is not tied
    for ours, theirs in names.items():
        assert state[theirs].dtype == torch.float32
        assert np.array_equal(state[theirs].numpy(), source.expected(ours)), theirs
    assert model.config.tie_word_embeddings is tied
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.num_key_value_heads == 2
    assert model.config.rope_parameters["rope_theta"] == 50000.0
    assert model.generation_config.eos_token_id == 2
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, len(source.tokens))
    assert logits.isfinite().all()


def test_tied_weights_are_stored_once(convert, tiny_model):
    source = tiny_model()
    assert len(load_file(convert(source) / "model.safetensors")) == len(source.weights)


def test_progress_rises_to_its_end_and_files_are_readable_by_others(convert, tiny_model):
    fractions = []
    folder = convert(tiny_model(), fractions.append)
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] <= fractions[-1] <= 1
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert len(modes) == 1


TEXTS = [
    "the tin in the attic",
    "  two  spaces\n\n\ttabs\r\n",
    "1234567890 3.14159 x2y3",
    "Où est le café? Größe, naïve, Ελλάδα, русский, 日本語, العربية",
    "👩‍👩‍👧‍👦🇫🇷e\u0301\u00a0\u200b\ufeff",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # <|not special|>',
    "it's we'll I'd 'tis",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_en",
    "",
    "\x00\x01\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_autotokenizer_reads_the_tokenizer_as_it_was_written(tiny_folder, text):
    from kvblocks.engine.text.tokenizer import Tokenizer

    ids = AutoTokenizer.from_pretrained(tiny_folder)(text).input_ids
    assert ids == Tokenizer.from_folder(tiny_folder).encode(text, parse_special=True)


def test_autotokenizer_knows_digits_special_tokens_and_the_template(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" the 123<|im_end|>")) == [
        "Ġthe",
        "Ġ",
        "1",
        "2",
        "3",
        "<|im_end|>",
    ]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tokenizer.model_max_length == 256
    assert tokenizer.chat_template is not None


def drop(name):
    def change(model):
        del model.weights[name]

    return change


def add(name):
    def change(model):
        model.weights[name] = np.zeros((64,), dtype=np.float32)

    return change


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"architecture": "mamba"}, None, "general.architecture llama, qwen2, qwen3, gemma3, got 'mamba'"),
        (
            {"tokenizer_pre": "tekken"},
            None,
            "tokenizer.ggml.pre llama-bpe, qwen2, smollm, gpt-2, default, got 'tekken'",
        ),
        ({}, add("blk.0.attn_q_norm"), "expected no tensor model.layers.0.self_attn.q_norm.weight"),
        ({}, add("rope_freqs_norm"), "got 'rope_freqs_norm.weight'"),
        ({}, drop("blk.1.ffn_up"), "model.layers.1.mlp.up_proj.weight"),
        ({}, add("blk.2.ffn_norm"), "model.layers.2.post_attention_layernorm.weight"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(convert, tiny_model, options, change, message):
    model = tiny_model(**options)
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        convert(model)


def test_a_file_that_is_not_a_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>" * 100)
    with pytest.raises(ModelError, match=r"expected a GGUF file, got .*model\.gguf"):
        convert_gguf(path, tmp_path)


def test_a_truncated_file_is_refused(tmp_path, tiny_model):
    path = tiny_model().write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError, match="expected a GGUF file"):
        convert_gguf(path, tmp_path)


# A digest of the names and the bytes of all weights, in the order of their names.
SMOLLM2_WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


@pytest.mark.slow
@pytest.mark.model
def test_the_real_weights_are_the_pinned_ones(smollm2_folder):
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(smollm2_folder / "model.safetensors").items()):
        digest.update(name.encode())
        digest.update(weight.data)
    assert digest.hexdigest() == SMOLLM2_WEIGHTS_SHA256


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_answers_in_transformers(smollm2_folder):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert json.loads((smollm2_folder / "config.json").read_text())["num_hidden_layers"] == 30
