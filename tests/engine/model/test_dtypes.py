"""The dtype that a model runs in: given by name, taken from its folder, or refused."""

import json
import shutil

import pytest
import torch

from kvblocks.engine import Engine, LoadedModel
from kvblocks.engine.model.fields import parse_dtype, stored_dtype
from kvblocks.errors import InvalidArgumentError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_by_its_name_and_by_torchs_object(tiny_folder, dtype):
    wanted = getattr(torch, dtype)
    engine = Engine(tiny_folder, num_blocks=8, dtype=dtype, device="cpu")
    assert engine.model.dtype == wanted == LoadedModel.load(tiny_folder, "cpu", wanted).dtype
    assert {tensor.dtype for tensor in (*engine.runner.kv_cache.keys, *engine.runner.kv_cache.values)} == {wanted}
    assert engine.generate(["hello"], max_tokens=3, ignore_eos=True)[0].num_prompt_tokens > 0
    again = Engine(engine.model, num_blocks=8, dtype=wanted)
    assert again.model is engine.model


def test_bfloat16_computes_about_the_same(tiny_folder):
    engines = [Engine(tiny_folder, num_blocks=8, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16")]
    logits = []
    for engine in engines:
        seen = []
        run = engine.runner.run
        engine.runner.run = lambda chunks, run=run, seen=seen: seen.append(run(chunks)) or seen[-1]
        engine.generate(["the hint"], max_tokens=1, ignore_eos=True)
        logits.append(seen[0])
    assert all(rows.dtype == torch.float32 for rows in logits)
    assert not torch.equal(*logits)
    torch.testing.assert_close(logits[1] / logits[0].std(), logits[0] / logits[0].std(), rtol=0, atol=0.2)


@pytest.mark.parametrize("dtype", ["float64", "half", torch.float64, 16, ["float32"]])
def test_other_dtypes_are_refused(tiny_folder, dtype):
    with pytest.raises(InvalidArgumentError, match="dtype: expected float32, float16, bfloat16 or None, got "):
        Engine(tiny_folder, num_blocks=8, dtype=dtype)


def test_a_loaded_model_keeps_its_own(tiny_folder):
    model = LoadedModel.load(tiny_folder)
    assert model.dtype == torch.float32
    with pytest.raises(InvalidArgumentError, match=r"expected torch\.float32, the loaded model's, got 'bfloat16'"):
        Engine(model, num_blocks=8, dtype="bfloat16")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float16", "torch_dtype": "float32"}, torch.float16),
        ({"text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn"}, torch.float32),
        ({"dtype": None}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_the_models_own_dtype(tmp_path, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert stored_dtype(tmp_path) == expected


def test_on_a_cpu_the_default_is_float32_and_elsewhere_the_models_own(tiny_folder, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert LoadedModel.load(folder).dtype == torch.float32
    assert LoadedModel.load(folder, "meta").dtype == torch.bfloat16
    assert parse_dtype(None) is None
