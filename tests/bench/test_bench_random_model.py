"""Random models have the shapes that they are named after, and a tokenizer that reads what it wrote."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from kvblocks.engine import Engine
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.loader import expected_shapes


@pytest.fixture
def models(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    return importlib.import_module("bench.random_model")


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("llama-3.2-1b", 1.24e9),
        ("llama-3.2-3b", 3.21e9),
        ("qwen3-1.7b", 1.72e9),
        ("qwen3-4b", 4.02e9),
        ("gemma-3-1b", 1.0e9),
    ],
)
def test_shapes_have_as_many_weights_as_they_are_called(models, name, num_weights):
    sizes = expected_shapes(ModelConfig.from_fields(models.SHAPES[name])).values()
    assert sum(map(math.prod, sizes)) == pytest.approx(num_weights, rel=0.01)


def test_random_models_speak_words_that_are_read_as_they_were_written(models, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 700}
    for name in ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        monkeypatch.setitem(models.SHAPES, "tiny", models.SHAPES[name] | small | heads)
        with models.open_model("tiny") as folder:
            engine = Engine(folder, num_blocks=8, device="cpu")
            tokenizer = engine.model.tokenizer
            chat = tokenizer.apply_chat_template([{"role": "user", "content": "The Tern Kettle"}])
            [answer] = engine.generate([chat], max_tokens=12, ignore_eos=True)
        assert not folder.exists()
        assert tokenizer.decode(chat, skip_special_tokens=False) == (
            "<|im_start|> user The Tern Kettle <|im_end|> <|im_start|> assistant"
        )
        assert tokenizer.encode(answer.text) == answer.token_ids
        assert engine.model.dtype == torch.float32  # on a CPU; the folder says bfloat16
        assert answer.text.split()


def test_a_shape_with_too_small_a_vocabulary_is_an_error(models, tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size: expected at least .*, got 20"):
        models.write_model(tmp_path, models.SHAPES["llama-3.2-1b"] | {"vocab_size": 20})
