"""The fingerprint: the same in every process, and another one for all that changes KV."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.small_models import EVEN, GEMMA3, converted, packed, random_tokens, random_weights

from kvblocks.engine import Engine, LoadedModel, TierOptions
from kvblocks.engine.model.products import pack, packed_rows
from kvblocks.engine.tiers import fingerprint as fingerprint_module
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


def packed_as_loaded(weights):
    """The weights in the loader's packed layout: a tied embedding is a view of the head."""
    laid_out = packed(weights)
    return replace(laid_out, embedding=packed_rows(laid_out.lm_head, weights.embedding))


needs_packing = pytest.mark.skipif(
    not pack(torch.ones(1, 1)).is_mkldnn,
    reason="torch has oneDNN pack matrices on x86 alone, and keeps them plain here",
)


@needs_packing
def test_it_is_the_same_however_weights_are_laid_out():
    weights = packed_as_loaded(MODEL.weights)
    assert weights.embedding.dim() == 4
    assert fingerprint(LoadedModel(EVEN, weights), "layout", "mode") == fingerprint(MODEL, "layout", "mode")


def same(weights):
    return weights


def in_bfloat16(weights):
    return converted(weights, torch.bfloat16)


@needs_packing
@pytest.mark.parametrize(
    ("change", "arithmetic", "is_deterministic", "is_used"),
    [
        (packed_as_loaded, 0, False, True),
        (packed_as_loaded, 0, True, False),  # bits are promised, and those of packed products are others
        (same, 0, True, True),
        (same, 1, True, False),  # so are those of another version of the layers
        (same, 1, False, True),
        (in_bfloat16, 0, False, False),
    ],
)
def test_who_uses_what_an_engine_left_on_a_disk(tmp_path, monkeypatch, change, arithmetic, is_deterministic, is_used):
    torch.set_num_threads(1)
    options = {"tiers": [TierOptions(f"disk:{tmp_path / 'kv'}", "64MiB")], "deterministic": is_deterministic}
    prompt, num_hit = random_tokens(EVEN, 300), []
    for weights, added in ((MODEL.weights, 0), (change(MODEL.weights), arithmetic)):
        monkeypatch.setattr(fingerprint_module, "ARITHMETIC", fingerprint_module.ARITHMETIC + added)
        with Engine(LoadedModel(EVEN, weights), num_blocks=24, **options) as engine:
            (completion,) = engine.generate([prompt], max_tokens=1)
            num_hit.append(completion.num_cached_tokens)
            while engine.has_work:
                engine.step()
    assert num_hit == [0, 288 if is_used else 0]


def changed(name):
    """The model with a small change in the tensor of that name."""
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
