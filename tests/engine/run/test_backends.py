"""Which attention a model gets, and which models only attention in torch computes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine.small_models import LLAMA4, ODD, random_weights

from kvblocks.engine import Engine, LoadedModel
from kvblocks.engine.attention.attention import TiledTorchAttention, TorchAttention
from kvblocks.engine.run.backends import Backend
from kvblocks.errors import InvalidArgumentError

EVERYTHING = replace(LLAMA4, chunk_sizes=())
PARTS = {
    "chunked attention": replace(LLAMA4, unrotated_layers=frozenset(), experts=None),
    "layers without RoPE": replace(EVERYTHING, experts=None),
    "experts": replace(EVERYTHING, unrotated_layers=frozenset()),
    "chunked attention and layers without RoPE and experts": LLAMA4,
}


def on_a_gpu(config):
    """What is asked of a model whose weights are on a GPU."""
    return SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.float32)


@pytest.mark.parametrize("part", PARTS)
def test_attention_that_only_torch_computes(part):
    model = on_a_gpu(PARTS[part])
    for attention in ("triton", "flash-attn"):
        message = f"attention='{attention}': expected a model without {part}, which .* got Llama4ForCausalLM"
        with pytest.raises(InvalidArgumentError, match=message):
            Backend(attention).choose_attention(model, 16)
    assert Backend().choose_attention(model, 16) == TorchAttention()
    assert Backend(deterministic=True).choose_attention(model, 16) == TiledTorchAttention()


@pytest.mark.parametrize(
    ("changes", "block_size", "why"),
    [
        ({"head_dim": 80}, 16, "expected a head_dim among 64, 128, 256, got 80"),
        ({"head_dim": 96}, 16, "expected a head_dim among 64, 128, 256, got 96"),
        ({"head_dim": 64}, 8, "expected a block_size among 16, 32, 64, 128, got 8"),
        ({"head_dim": 64}, 256, "expected a block_size among 16, 32, 64, 128, got 256"),
    ],
)
def test_auto_is_torch_with_a_warning_for_sizes_that_the_kernels_do_not_take(changes, block_size, why, caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    model = on_a_gpu(replace(ODD, **changes))
    Backend().check_place(model.device, block_size)
    assert Backend().choose_attention(model, block_size) == TorchAttention()
    with pytest.raises(InvalidArgumentError, match=why):
        Backend("triton").choose_attention(model, block_size)
    Backend().prepared(model, block_size)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and why in caplog.text


def test_auto_is_triton_without_a_warning_for_sizes_that_the_kernels_take(caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    from kvblocks.engine.attention.triton_attention import TritonAttention

    model = on_a_gpu(replace(ODD, head_dim=128))
    assert isinstance(Backend().choose_attention(model, 32), TritonAttention)
    Backend().prepared(model, 32)
    assert caplog.records == []


def test_a_llama_without_them_needs_no_torch():
    assert ODD.needs_torch == replace(EVERYTHING, unrotated_layers=frozenset(), experts=None).needs_torch == ""


def test_an_engine_refuses_it():
    model = LoadedModel(LLAMA4, random_weights(LLAMA4))
    with pytest.raises(InvalidArgumentError, match="expected a model without chunked attention and"):
        Engine(model, num_blocks=9, attention="triton")
