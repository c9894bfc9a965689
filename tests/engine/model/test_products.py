"""Products with packed weights: their results, and that a weight is held in memory once."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from engine.small_models import CONFIGS, packed, prefill, random_tokens, random_weights

from kvblocks.engine.model import products
from kvblocks.engine.model.products import pack, packed_rows, product, take_rows
from kvblocks.engine.run.forward import DecoderModel

# Whole blocks, parts of blocks, a single number, SmolLM2's widths.
SHAPES = [(512, 192), (64, 16), (131, 52), (63, 15), (65, 17), (1, 1), (1000, 1), (960, 576), (576, 1536)]
# The tolerance against float64, relative to the largest result: for the dtype's rounding, and for that of the sums.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def matrix(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


needs_packing = pytest.mark.skipif(
    not pack(torch.ones(1, 1)).is_mkldnn,
    reason="torch has oneDNN pack matrices on x86 alone, and keeps them plain here",
)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, dtype):
    plain = matrix(*shape, dtype=dtype)
    weight, bias = pack(plain), matrix(shape[0], dtype=dtype, seed=1)
    before = plain.clone()
    for num_rows in (1, 2, 3, 8, 16, 17, 64, 100):
        rows = matrix(num_rows, shape[1] + 3, dtype=dtype, seed=2)[:, 1:-2]  # strided
        for added in (None, bias):
            result = product(rows, weight, added)
            exact = F.linear(rows.double(), plain.double(), None if added is None else added.double())
            assert result.dtype == dtype
            assert result.shape == exact.shape
            assert (result - exact).abs().max() <= TOLERANCES[dtype] * exact.abs().max(), num_rows
    assert torch.equal(plain, before)


def test_a_product_of_no_rows():
    assert product(torch.ones(0, 5), pack(torch.ones(7, 5)), None).shape == (0, 7)


@needs_packing
def test_what_is_packed():
    assert pack(matrix(8, 8)).is_mkldnn
    half = matrix(8, 8, dtype=torch.float16)
    assert pack(half) is half  # its products are slower packed, where there are any
    with torch.device("meta"):
        elsewhere = torch.ones(8, 8)
    assert pack(elsewhere) is elsewhere


@pytest.mark.parametrize("missing", ["_REORDER", "_MULTIPLY"])
def test_without_the_operators_matrices_stay_plain(monkeypatch, missing):
    monkeypatch.setattr(products, missing, None)
    plain = matrix(8, 8)
    assert pack(plain) is plain


def test_where_the_library_refuses_matrices_stay_plain(monkeypatch):
    def refuse(matrix, num_rows):
        raise RuntimeError("the cpu support avx512bw")

    monkeypatch.setattr(products, "_REORDER", refuse)
    plain = matrix(8, 8)
    assert pack(plain) is plain


of_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "NO AVX", "AVX2"} or torch.cpu._is_amx_tile_supported(),  # noqa: SLF001
    reason="oneDNN packs 16-bit numbers without AVX-512, and with AMX, in layouts of which there is no view",
)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=of_avx512)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape) > 1])
def test_rows_of_a_packed_matrix(shape, dtype):
    plain = matrix(*shape, dtype=dtype)
    weight = pack(plain)
    view = packed_rows(weight, plain)
    assert view is not None
    assert view.data_ptr() == torch.ops.mkldnn.data_ptr(weight)
    indexes = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0])
    taken = take_rows(view, indexes, shape[1])
    assert torch.equal(taken, plain[indexes])
    assert taken.is_contiguous()


@needs_packing
def test_rows_in_another_layout_are_not_shown(monkeypatch):
    plain = matrix(128, 64)
    weight = pack(plain)
    changed = plain.clone()
    changed[127, 63] += 1
    assert packed_rows(weight, changed) is None  # one number is elsewhere
    assert packed_rows(weight, plain.T.contiguous()) is None
    assert packed_rows(plain, plain) is None
    monkeypatch.setattr(products, "_ADDRESS", None)
    assert packed_rows(weight, plain) is None


@needs_packing
def test_the_view_keeps_the_memory():
    plain = matrix(512, 192)
    weight = pack(plain)
    view = packed_rows(weight, plain)
    part = view[3:]
    owner = weakref.ref(weight)
    del weight, view
    gc.collect()
    assert owner() is not None
    assert torch.equal(take_rows(part, torch.arange(4), 192), plain[192:196])
    del part
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_models_with_packed_weights(config):
    weights = random_weights(config)
    tokens = random_tokens(config, 100)
    logits = []
    for model in (DecoderModel(config, weights), DecoderModel(config, packed(weights))):
        cache = model.new_kv_cache(num_blocks=8, block_size=16)
        logits.append(torch.stack([prefill(model, cache, tokens, range(8), cuts) for cuts in ((), (60, 99))]))
    assert (logits[0] - logits[1]).abs().max() <= 5e-6 * logits[0].abs().max()
