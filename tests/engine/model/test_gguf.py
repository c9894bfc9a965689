"""`--model FILE.gguf`: the logits of the folder's weights, the file's own quantisation, tokenizers, and refusals."""

import os

import gguf
import numpy as np
import pytest
import torch
from engine.model.gguf_files import BYTES, add_tokenizer, random_blocks, write_gguf
from engine.small_models import prefill, random_tokens
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvblocks.engine import Engine, LoadedModel, ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.convert import convert_gguf
from kvblocks.engine.model.gguf.file import GGUFModel
from kvblocks.engine.model.gguf.metadata import Metadata
from kvblocks.engine.model.gguf.tokenizer import tokenizer_parts
from kvblocks.engine.model.loader import load_weights
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.text.tokenizer import Tokenizer

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3 = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 27}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied, rope linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, rope llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    "gemma3, rope linear": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3 | {"rope_parameters": GEMMA3_ROPES}),
}


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
# What the gguf package reads and can't write.
ONLY_READ = (
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS),
    *(Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS),
)


def save(folder, name, **more):
    """Save a random model of transformers'. more: fields that it has otherwise."""
    model_type, config_type, fields = MODELS[name]
    model = model_type(config_type(**BASE | fields | more))
    torch.manual_seed(0)
    with torch.no_grad():
        for key, weights in model.named_parameters():
            weights.normal_(float("norm" in key and "gemma3" not in name), weights.shape[-1] ** -0.5)
    model.eval().save_pretrained(folder)
    return model


def add_rope_factors(writer):
    """Llama 3's, as llama.cpp's converter computes them: one frequency after another."""
    values = []
    for place in range(0, 16, 2):
        length = 2 * np.pi * LLAMA3["rope_theta"] ** (place / 16)
        if length < 8192 / 4:
            values.append(1.0)
        elif length > 8192 / 1:
            values.append(32.0)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            values.append(1 / ((1 - smooth) / 32 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))


def decoder(source):
    """Our model of a folder or an open file."""
    is_file = isinstance(source, GGUFModel)
    config = ModelConfig.from_fields(source.fields) if is_file else ModelConfig.from_folder(source)
    return DecoderModel(config, load_weights(source, config))


def last_logits(model, tokens):
    return prefill(model, model.new_kv_cache(8, 16), tokens, list(range(8)))


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_folder(name, tmp_path):
    folder = tmp_path / "folder"
    reference = save(folder, name)
    change = add_rope_factors if name == "llama, rope llama3" else None
    path = write_gguf(folder, tmp_path / "model.gguf", name.partition(",")[0], change=change)
    of_file, of_folder = decoder(GGUFModel(path)), decoder(folder)
    tokens = random_tokens(of_file.config, 90)
    logits = last_logits(of_file, tokens)
    assert torch.equal(logits, last_logits(of_folder, tokens))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(logits, expected, atol=float(expected.abs().max()) * 1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_the_same_weights_from_the_file(name, tmp_path):
    """So the files of these tests are such as others read."""
    reference = save(tmp_path, name)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", name, Kind.Q8_0)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    model = GGUFModel(path)
    assert {one.name for one in model.tensors} == set(theirs)
    for tensor in model.tensors:
        assert np.array_equal(tensor.read(), theirs[tensor.name].float().numpy()), tensor.name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_weights_are_what_the_gguf_package_makes_of_them(kind, tmp_path):
    save(tmp_path, "qwen3")
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "qwen3", kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.2.ffn_up.weight"]
    weights = load_weights(GGUFModel(path), ModelConfig.from_fields(GGUFModel(path).fields), dtype=torch.float16)
    assert torch.equal(
        weights.layers[2].gate_up[160:], torch.from_numpy(gguf.quants.dequantize(stored.data, kind)).half()
    )
    (tmp_path / "made").mkdir()
    convert_gguf(path, tmp_path / "made")
    of_folder, of_file = decoder(tmp_path / "made"), decoder(GGUFModel(path))
    tokens = random_tokens(of_file.config, 40)
    assert torch.equal(last_logits(of_folder, tokens), last_logits(of_file, tokens))


@pytest.mark.parametrize("kind", ONLY_READ, ids=lambda kind: kind.name)
def test_blocks_that_are_only_read_are_what_the_gguf_package_makes_of_them(kind, tmp_path):
    """K-quants and the like: blocks of random bytes, in a model of the architecture whose rows are put in order."""
    save(tmp_path, "llama", **WIDE)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "llama", kind, quantize=random_blocks)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {stored[f"blk.0.{name}.weight"].tensor_type for name in ("attn_q", "ffn_up", "ffn_down")} == {kind}
    up, queries = (gguf.quants.dequantize(stored[f"blk.0.{name}.weight"].data, kind) for name in ("ffn_up", "attn_q"))
    read = {tensor.name: tensor.read() for tensor in GGUFModel(path).tensors}
    assert np.array_equal(read["model.layers.0.mlp.up_proj.weight"], up.astype(np.float32))
    pairs = queries.astype(np.float32).reshape(4, 32, 2, 256)  # each head's halves are interleaved
    halves = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(256, 256)
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.weight"], halves)
    (tmp_path / "made").mkdir()
    convert_gguf(path, tmp_path / "made")
    of_folder, of_file = decoder(tmp_path / "made"), decoder(GGUFModel(path))
    logits = last_logits(of_file, random_tokens(of_file.config, 40))
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, last_logits(of_folder, random_tokens(of_file.config, 40)))


def test_an_engine_answers_from_a_file_whatever_its_name(tmp_path):
    save(tmp_path / "folder", "qwen3")
    path = write_gguf(tmp_path / "folder", tmp_path / "sha256-5d", "qwen3", Kind.Q8_0)
    with Engine(path, num_blocks=20) as engine:
        assert engine.model.dtype == torch.float32
        assert engine.model.stop_token_ids == {len(BYTES) + 2, len(BYTES) + 3}
        (completion,) = engine.generate(["hello"], max_tokens=5, ignore_eos=True)
        assert (completion.num_prompt_tokens, len(completion.token_ids)) == (5, 5)
    assert LoadedModel.load(path, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.slow
def test_a_published_file_answers_as_transformers_does():
    """The user's own file: KVBLOCKS_TEST_GGUF=FILE. Nothing is fetched."""
    path = os.environ.get("KVBLOCKS_TEST_GGUF")
    if not path:
        pytest.skip("needs a published GGUF file, named by KVBLOCKS_TEST_GGUF")
    text = "The capital of France is the city of"
    with Engine(path, num_blocks=64) as engine:
        prompt = engine.model.tokenizer.encode(text)
        (completion,) = engine.generate([text], max_tokens=8, ignore_eos=True)
        folder, name = os.path.split(path)
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        assert theirs(text)["input_ids"] == prompt
        assert engine.model.tokenizer.decode(prompt, skip_special_tokens=True) == text
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=name)).float().eval()
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    missing, unknown = reference.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    reference.tie_weights()
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert completion.token_ids == expected[0, len(prompt) :].tolist()


# --- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer_of(path, *, texts, pre=None, scores=None, types=None, **more):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if pre is None else "gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(texts)
    writer.add_token_types(types or [gguf.TokenType.NORMAL] * len(texts))
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    definition, fields = tokenizer_parts(Metadata(gguf.GGUFReader(path)), 100)
    return Tokenizer.from_text(definition, {"tokenizer_config.json": fields})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġab", "'", "S"]),
        ("gpt-2", ["1234", "Ġab", "'", "S"]),
        ("qwen2", ["1", "2", "3", "4", "Ġab", "'S"]),
        ("llama-bpe", ["123", "4", "Ġab", "'S"]),
    ],
)
def test_a_text_is_cut_as_the_model_was_trained(pre, pieces, tmp_path):
    merges = ["1 2", "12 3", "123 4", "a b", "Ġ ab", "' S"]
    texts = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<s>"]
    types = [gguf.TokenType.NORMAL] * (len(texts) - 1) + [gguf.TokenType.CONTROL]
    bos = {"bos_token_id": len(texts) - 1, "token_merges": merges}
    tokenizer = tokenizer_of(tmp_path / "a", texts=texts, pre=pre, types=types, **bos)
    ids = tokenizer.encode("1234 ab'S", add_special_tokens=False)
    assert [tokenizer.id_to_token(one) for one in ids] == pieces
    assert tokenizer.decode(ids) == "1234 ab'S"
    assert (tokenizer.encode("1")[0] == len(texts) - 1) == (pre == "llama-bpe")  # Llama 3 begins with its BOS
    assert tokenizer.encode("<s>", parse_special=True, add_special_tokens=False) == [len(texts) - 1]
    assert len(tokenizer.encode("<s>", add_special_tokens=False)) == 3
    others = tokenizer_of(tmp_path / "b", texts=texts, pre=pre, types=types, add_bos_token=pre != "llama-bpe", **bos)
    assert (others.encode("1")[0] == len(texts) - 1) == (pre != "llama-bpe")


def test_sentence_piece_merges_by_score_and_spells_the_rest_in_bytes(tmp_path):
    texts = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁abc", "ab", "bc", "▁ab", "<turn>"]
    scores = [0.0] * 258 + [-9.0] * 4 + [-2.0, -1.0, -3.0, 0.0]
    types = [2, 3, *[6] * 256, *[1] * 7, 4]
    given: dict = {"texts": texts, "scores": scores, "types": types, "bos_token_id": 1, "unk_token_id": 0}
    tokenizer = tokenizer_of(tmp_path / "a", **given)

    def pieces(text, tokenizer=tokenizer):
        return [tokenizer.id_to_token(one) for one in tokenizer.encode(text)]

    assert pieces("abc") == ["<s>", "▁", "a", "bc"]  # bc has the better score
    assert pieces("ab") == ["<s>", "▁ab"]
    assert pieces("é<turn>") == ["<s>", "▁", "<0xC3>", "<0xA9>", "<turn>"]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"
    gemma = tokenizer_of(tmp_path / "b", add_space_prefix=False, **given)
    assert pieces("ab ab", gemma) == ["<s>", "ab", "▁ab"]
    assert gemma.decode(gemma.encode(" ab")) == " ab"


# --- refusals --------------------------------------------------------------------------------------------------------


def key(name, value):
    return lambda writer: writer.add_uint32(name, value)


def bad_factors(writer):
    writer.add_tensor("rope_freqs.weight", np.full(8, 3.0, dtype=np.float32))


def extra(writer):
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((4, 4), dtype=np.float32))


def unreadable(writer):
    writer.add_tensor("blk.9.attn_q.weight", np.zeros((4, 4), dtype=np.int32), raw_dtype=Kind.I32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (key("llama.expert_count", 8), "expected a GGUF file of a dense model"),
        (key("llama.rope.dimension_count", 8), r"llama.rope.dimension_count = 16 \(the head's size\), got 8"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "none or linear, got 'yarn'"),
        (bad_factors, "expected rope_freqs.weight of the GGUF file to be Llama 3's scaling"),
        (extra, "expected only the tensors of a plain llama model, got 'blk.0.ffn_gate_exps.weight'"),
        (
            unreadable,
            "expected a quantization that the gguf package can dequantize .* got I32 in 'blk.9.attn_q.weight'",
        ),
        (lambda writer: writer.add_uint16("split.count", 2), r"a part of several, .*model.gguf: merge them"),
        (lambda writer: writer.add_add_eos_token(True), "add_eos_token = False, got True"),
    ],
)
def test_what_is_not_supported_is_refused(change, message, tmp_path):
    save(tmp_path, "llama")
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "llama", change=change)
    with pytest.raises(ModelError, match=message):
        LoadedModel.load(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"<html>" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="expected a GGUF file, got"):
            LoadedModel.load(path)
    with pytest.raises(ModelError, match="a Hugging Face folder or a GGUF file, got"):
        LoadedModel.load(tmp_path / "none.gguf")
    writer = gguf.GGUFWriter(path, "mamba")
    add_tokenizer(writer, 300)
    writer.add_tensor("token_embd.weight", np.zeros((300, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general.architecture llama, qwen2, qwen3, gemma3, got 'mamba'"):
        LoadedModel.load(path)
