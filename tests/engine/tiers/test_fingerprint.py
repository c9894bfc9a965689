"""The fingerprint: the same in every process, another one for whatever makes another KV."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engine.small_models import EVEN, GEMMA3, random_weights

from kvblocks.engine import LoadedModel
from kvblocks.engine.model.products import pack
from kvblocks.engine.tiers.fingerprint import fingerprint

MODEL = LoadedModel(EVEN, random_weights(EVEN))
PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
from engine.small_models import EVEN, random_weights
from kvblocks.engine import LoadedModel
from kvblocks.engine.tiers.fingerprint import fingerprint
print(fingerprint(LoadedModel(EVEN, random_weights(EVEN)), "layout", "mode").hex())
"""


def test_it_is_the_same_in_another_process():
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tests)], capture_output=True, text=True, check=True, cwd=tests.parent
    )
    assert done.stdout.strip() == fingerprint(MODEL, "layout", "mode").hex()
    assert len(fingerprint(MODEL, "layout", "mode")) == 32


def test_it_is_the_same_however_weights_are_laid_out():
    layers = tuple(replace(layer, qkv=pack(layer.qkv), down=pack(layer.down)) for layer in MODEL.weights.layers)
    packed = LoadedModel(EVEN, replace(MODEL.weights, layers=layers))
    assert fingerprint(packed, "layout", "mode") == fingerprint(MODEL, "layout", "mode")


def changed(name):
    """The model with the tensor of that name a little different."""
    weights = MODEL.weights
    holder = weights.layers[1] if "." in name else weights
    tensor = getattr(holder, name.rpartition(".")[2]).clone()
    tensor.view(-1)[-1] += 1
    if "." not in name:
        return LoadedModel(EVEN, replace(weights, **{name: tensor}))
    layer = replace(weights.layers[1], **{name.rpartition(".")[2]: tensor})
    return LoadedModel(EVEN, replace(weights, layers=(weights.layers[0], layer)))


TENSORS = [
    "embedding",
    "final_norm",
    "lm_head",
    *[f"layers.{name}" for name in ("input_norm", "qkv", "output", "down")],
]


@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_counts(name):
    assert fingerprint(changed(name), "layout", "mode") != fingerprint(MODEL, "layout", "mode")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": replace(EVEN.rope, theta=1.0)},
        {"rms_norm_eps": 1e-3},
        {"query_scale": 0.1},
        {"attention_softcap": 3.0},
        {"windows": (None, 7)},
        {"architecture": GEMMA3.architecture},
    ],
)
def test_each_part_of_the_shape_that_computing_needs_counts(changes):
    other = LoadedModel(replace(EVEN, **changes), MODEL.weights)
    assert fingerprint(other, "layout", "mode") != fingerprint(MODEL, "layout", "mode")


def test_layout_and_mode_count_apart():
    found = {fingerprint(MODEL, *given) for given in (("a", "b"), ("b", "a"), ("a", "a"), ("ab", ""), ("a\nb", ""))}
    assert len(found) == 5
