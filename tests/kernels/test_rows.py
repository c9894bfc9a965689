"""The row-wise kernels against float64, and that a row's bits depend on nothing but the row."""

from dataclasses import replace

import pytest
import torch

from kvblocks.kernels import oracle
from kvblocks.kernels.layout import FP8, FP8_MAX, KernelArgumentError
from kvblocks.kernels.rows import ACTIVATIONS, MAX_COLUMNS, Turn, add_norm, gate, norm, place

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
EPS = 1e-5
# The largest relative error of a result. For fp32 it is that of the sums. For the others it is that of two roundings:
# one on the way, and one at the end.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def close(got, expected, *, rounded=1):
    """rounded: how often a result was rounded."""
    limit = TOLERANCE[got.dtype] * rounded
    torch.testing.assert_close(got.double().cpu(), expected, rtol=limit, atol=limit)


def random(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@DTYPES
@pytest.mark.parametrize("num_columns", [1, 52, 576, 2048])
@pytest.mark.parametrize("is_wide", [False, True], ids=["weight as the rows", "weight in fp32"])
def test_norms(device, dtype, num_columns, is_wide):
    rows = random(device, 3, num_columns, dtype=dtype) * 3
    weight = 1 + random(device, num_columns, dtype=torch.float32 if is_wide else dtype, seed=1) / 4
    before = rows.clone()
    got = norm(rows, weight, EPS)
    assert got.dtype == dtype and torch.equal(rows, before)
    close(got, oracle.rms_norm(rows, weight, EPS), rounded=2)


@DTYPES
@pytest.mark.parametrize("has_output_norm", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_columns", [75, 192])
def test_a_sum_is_rounded_and_then_normed(device, dtype, has_output_norm, has_norm, num_columns):
    hidden, added = (random(device, 5, num_columns, dtype=dtype, seed=seed) * 2 for seed in (0, 1))
    weights = [1 + random(device, num_columns, seed=seed) / 4 for seed in (2, 3)]
    output_norm, weight = weights[0] if has_output_norm else None, weights[1] if has_norm else None
    addend = oracle.rms_norm(added, weights[0], EPS) if has_output_norm else added.double().cpu()
    expected = hidden.double().cpu() + addend
    got = add_norm(hidden, added, EPS, output_norm=output_norm, weight=weight)
    close(hidden, expected, rounded=2)
    assert (got is None) == (not has_norm)
    if got is not None:
        close(got, oracle.rms_norm(hidden, weights[1], EPS))


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 75, 1500])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning:triton")
def test_gates(device, dtype, activation, width):
    gate_up = random(device, 4, 2 * width, dtype=dtype) * 3
    gate_up[0, 0], gate_up[1, 0] = -100, 100  # where a sigmoid is 0, and 1
    close(gate(gate_up, activation), oracle.gate(gate_up, activation))


def make_place(device, dtype, *, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, num_rows=5):
    """Heads, how they are turned, caches of NaN, and slots, one of them -1."""
    heads = random(device, num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = random(device, 40, head_dim // 2, seed=1)
    positions = torch.tensor([39, 0, 7, 7, 21][:num_rows], device=device)
    caches = torch.full((2, 4, block_size, num_kv_heads, head_dim), torch.nan, device=device).to(dtype)
    slots = torch.tensor([17, -1, 0, 63, 5][:num_rows], device=device)
    return heads, Turn(angles.cos().to(dtype), angles.sin().to(dtype), positions), (caches[0], caches[1]), slots


def expect_place(heads, turn, num_heads, num_kv_heads):
    """The expected heads of queries, K and V, in float64."""
    turned, value = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if turn.norm is not None:
        turned = oracle.rms_norm(turned, turn.norm, turn.eps)
    turned = oracle.turn(turned, turn.cos, turn.sin, turn.positions)
    return turned[:, :num_heads], turned[:, num_heads:], value


@pytest.mark.every(11)
@DTYPES
@pytest.mark.parametrize("shape", [(6, 2, 64), (5, 1, 128), (1, 1, 256), (32, 8, 64)])
@pytest.mark.parametrize("normed", [None, "as the heads", "in fp32"])
def test_heads_are_turned_and_stored(device, dtype, shape, normed):
    num_heads, num_kv_heads, head_dim = shape
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    heads, turn, caches, slots = make_place(device, dtype, **sizes)
    if normed is not None:
        weight = 1 + random(device, num_heads + num_kv_heads, head_dim, seed=2) / 4
        turn = replace(turn, norm=weight.to(dtype if normed == "as the heads" else torch.float32), eps=EPS)
    before = heads.clone()
    query = place(heads, turn, caches, slots)
    assert torch.equal(heads, before)
    expected_query, *expected = expect_place(heads, turn, num_heads, num_kv_heads)
    close(query, expected_query, rounded=3 if normed else 1)
    stored = slots >= 0
    for cache, rows in zip(caches, expected, strict=True):
        by_slot = cache.flatten(0, 1)
        close(by_slot[slots[stored]], rows.double().cpu()[stored.cpu()], rounded=3 if normed else 1)
        kept = torch.ones(len(by_slot), dtype=torch.bool, device=device)
        kept[slots[stored]] = False
        assert by_slot[kept].isnan().all()
    assert torch.equal(caches[1].flatten(0, 1)[slots[stored]], heads[stored][:, num_heads + num_kv_heads :])


def test_caches_may_have_their_heads_first(device):
    heads, turn, (key_cache, value_cache), slots = make_place(device, torch.float32)
    strided = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (key_cache, value_cache)]
    plain = place(heads, turn, (key_cache, value_cache), slots)
    assert torch.equal(place(heads, turn, tuple(strided), slots), plain)
    for cache, other in zip(strided, (key_cache, value_cache), strict=True):
        torch.testing.assert_close(cache, other, equal_nan=True, rtol=0, atol=0)


@DTYPES
@pytest.mark.parametrize("has_scales", [False, True])
def test_e4m3_is_of_what_would_be_stored(device, dtype, has_scales):
    heads, turn, caches, slots = make_place(device, dtype)
    heads[2] *= 1000  # beyond the largest number
    narrow = tuple(torch.zeros(cache.shape, device=device).to(FP8) for cache in caches)
    scales = torch.tensor([[0.5, 0.03], [2.0, 0.7]], device=device)
    query = place(heads, turn, caches, slots)
    assert torch.equal(place(heads, turn, narrow, slots, (scales[0], scales[1]) if has_scales else None), query)
    for cache, wide, scale in zip(narrow, caches, scales, strict=True):
        exact = wide.flatten(0, 1)[slots[slots >= 0]].float()
        exact = exact / scale[:, None] if has_scales else exact
        got = cache.flatten(0, 1)[slots[slots >= 0]]
        assert torch.equal(got.view(torch.uint8), exact.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8))


def test_a_row_has_the_same_bits_in_any_batch(device):
    heads, turn, caches, slots = make_place(device, torch.bfloat16)
    query = place(heads, turn, caches, slots)
    for row in range(len(heads)):
        one = slice(row, row + 1)
        own = replace(turn, positions=turn.positions[one])
        assert torch.equal(place(heads[one], own, caches, slots[one]), query[one])
    rows, weight = random(device, 5, 576, dtype=torch.bfloat16), random(device, 576)
    for function in (lambda rows: norm(rows, weight, EPS), lambda rows: gate(rows, "silu")):
        assert torch.equal(torch.cat([function(rows[row : row + 1]) for row in range(5)]), function(rows))


def test_no_rows_are_no_launch(device):
    heads, turn, caches, slots = make_place(device, torch.float32)
    none = slice(0, 0)
    assert place(heads[none], replace(turn, positions=turn.positions[none]), caches, slots[none]).shape == (0, 6, 64)
    rows = torch.empty(0, 64, device=device)
    assert norm(rows, rows.new_ones(64), EPS).shape == (0, 64) and gate(rows, "silu").shape == (0, 32)


ROWS, WEIGHT = torch.ones(2, 64), torch.ones(64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm(ROWS.double(), WEIGHT, EPS), "rows: expected torch.float32 or .*, got torch.float64"),
        (lambda: norm(ROWS, WEIGHT.half(), EPS), "weight: expected torch.float32 or .*, got torch.float16"),
        (lambda: norm(ROWS, WEIGHT[:9], EPS), r"weight: expected the shape \(64,\), got \(9,\)"),
        (lambda: norm(ROWS[:, ::2], WEIGHT[:32], EPS), "rows: expected a contiguous tensor"),
        (lambda: norm(torch.ones(1, MAX_COLUMNS + 1), WEIGHT, EPS), "with at most 8192 columns, got the shape"),
        (lambda: add_norm(ROWS, ROWS[:1], EPS), r"added: expected the shape \(2, 64\), got \(1, 64\)"),
        (lambda: add_norm(ROWS, ROWS.half(), EPS), "added: expected torch.float32, got torch.float16"),
        (lambda: gate(ROWS, "relu"), "activation: expected silu or gelu_pytorch_tanh, got 'relu'"),
        (lambda: gate(ROWS[:, :63], "silu"), r"gate_up: expected \[num_rows, 2 \* width\], got the shape \(2, 63\)"),
    ],
)
def test_bad_rows(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t, c, s: (h[:, :4], t, c, s), r"heads: expected \[num_rows, num_heads \+ 2 \* 2, 64\], got the sh"),
        (lambda h, t, c, s: (h.half(), t, c, s), "heads: expected torch.float32, got torch.float16"),
        (lambda h, t, c, s: (h, t, c, s[:2]), r"slot_mapping: expected the shape \(5,\), got \(2,\)"),
        (lambda h, t, c, s: (h, replace(t, positions=t.positions.int()), c, s), "turn.positions: expected torch.int64"),
        (lambda h, t, c, s: (h, replace(t, sin=t.sin[:9]), c, s), r"turn.sin: expected the shape \(40, 32\), got \(9"),
        (lambda h, t, c, s: (h, replace(t, norm=h[0]), c, s), r"turn.norm: expected the shape \(8, 64\), got \(10, 64"),
        (
            lambda h, t, c, s: (h, t, c, s, (h[0, 0], h[0, 0])),
            "scales: expected None unless the caches are torch.float",
        ),
    ],
)
def test_bad_heads_change_nothing(change, message):
    heads, turn, caches, slots = make_place(torch.device("cpu"), torch.float32)
    with pytest.raises(KernelArgumentError, match=message):
        place(*change(heads, turn, caches, slots))
    assert all(cache.isnan().all() for cache in caches)
