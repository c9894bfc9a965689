"""Merging the attention over parts of the keys, compared with the oracle: the result is that over all keys.

Split decoding and cascades rely on it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels import oracle
from kvblocks.kernels.layout import KernelArgumentError
from kvblocks.kernels.merge import merge_state

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(num_parts, shape=(5, 3, 64), *, dtype=torch.float32, seed=0):
    """Parts whose lse differ widely. Where an lse is -inf, the output is NaN. Row 0 has no keys in any part."""
    generator = torch.Generator().manual_seed(seed)
    lses = 20 * torch.randn(num_parts, *shape[:2], generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 0.3] = -torch.inf
    lses[:, 0] = -torch.inf
    outputs = torch.randn(num_parts, *shape, generator=generator)
    outputs[lses == -torch.inf] = torch.nan
    return list(outputs.to(DEVICE, dtype)), list(lses.to(DEVICE))


def check(outputs, lses, merged, merged_lse):
    """Compare with the oracle. The output is rounded once: half a unit in the last place, or a whole one in the
    interpreter, which cuts bf16 off. Weights of order 1 in float32 add 1e-6, an lse of order 50 has 4e-6 of its own.
    """
    expected, expected_lse = oracle.merge(outputs, lses)
    epsilon = torch.finfo(merged.dtype).eps
    if merged.dtype != torch.bfloat16 or DEVICE.type != "cpu":
        epsilon /= 2
    error = (merged.double().cpu() - expected).abs()
    # exp2 of a difference of logarithms of order 50 is as wrong as they are.
    assert (error <= epsilon * expected.abs() + 2e-5).all()
    seen = expected_lse > -torch.inf
    assert torch.equal(merged_lse.cpu() > -torch.inf, seen)
    assert (merged_lse.double().cpu() - expected_lse)[seen].abs().le(1e-5).all()
    assert (merged.double().cpu()[~seen] == 0).all()


@pytest.mark.parametrize("num_parts", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 64), (2, 9, 128), (1, 1, 256)])
def test_parts_with_and_without_keys(num_parts, dtype, shape):
    outputs, lses = make(num_parts, shape, dtype=dtype)
    merged, merged_lse = merge_state(outputs, lses)
    assert merged.dtype == dtype
    check(outputs, lses, merged, merged_lse)


@settings(max_examples=40)
@given(
    lses=st.lists(st.floats(-1e4, 1e4, width=32) | st.just(-torch.inf), min_size=2, max_size=6),
    seed=st.integers(0, 5),
)
def test_any_weights(lses, seed):
    outputs, _ = make(len(lses), (1, 1, 64), seed=seed)
    outputs = [torch.nan_to_num(output, nan=1.0) for output in outputs]
    parts = [torch.full((1, 1), lse, device=DEVICE) for lse in lses]
    merged, merged_lse = merge_state(outputs, parts)
    expected, expected_lse = oracle.merge(outputs, parts)
    # float32 logarithms of order 1e4 are known to 1e-3, their exponentials likewise.
    assert torch.allclose(merged.double().cpu(), expected, rtol=0, atol=6e-3)
    assert torch.allclose(merged_lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-5)


def test_two_halves_of_the_keys_are_the_whole():
    torch.manual_seed(0)
    query, scores_scale = torch.randn(4, 2, 64, device=DEVICE), 0.125
    key_cache, value_cache = torch.randn(2, 4, 16, 2, 64, device=DEVICE)
    batch = {"query_start": torch.arange(5), "scale": scores_scale}

    def attend(blocks):
        tables = torch.tensor([blocks] * 4)
        lengths = torch.full((4,), 16 * len(blocks))
        parts = oracle.attention(query, key_cache, value_cache, tables, seq_lens=lengths, **batch)
        return [part.float().to(DEVICE) for part in parts]

    parts = attend([0, 2]), attend([3])
    merged, merged_lse = merge_state([output for output, _ in parts], [lse for _, lse in parts])
    whole, whole_lse = attend([0, 2, 3])
    assert torch.allclose(merged, whole, rtol=0, atol=2e-6)
    assert torch.allclose(merged_lse, whole_lse, rtol=0, atol=2e-6)


def test_other_strides_and_another_dtype():
    outputs, lses = make(3, (5, 3, 64), dtype=torch.float16)
    expected = merge_state(outputs, lses, dtype=torch.float32)
    stacked = torch.stack(outputs, 1)
    padded = [torch.nn.functional.pad(lse, (2, 3), value=7.0)[:, 2:5] for lse in lses]
    merged, merged_lse = merge_state(list(stacked.unbind(1)), padded, dtype=torch.float32)
    assert merged.dtype == torch.float32
    assert torch.equal(merged, expected[0])
    assert torch.equal(merged_lse, expected[1])
    check(outputs, lses, merged, merged_lse)


def test_no_rows():
    merged, lse = merge_state([torch.zeros(0, 3, 64)] * 2, [torch.zeros(0, 3)] * 2)
    assert merged.shape == (0, 3, 64)
    assert lse.shape == (0, 3)


OUTPUT, LSE = torch.zeros(2, 3, 64), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        ([OUTPUT], [LSE], "at least two outputs and as many lses, got 1 outputs and 1 lses"),
        ([OUTPUT] * 2, [LSE] * 3, "got 2 outputs and 3 lses"),
        ([OUTPUT[..., :7]] * 2, [LSE] * 2, r"a head_dim among \(64, 128, 256\), got \(2, 3, 7\)"),
        ([OUTPUT, OUTPUT[:1]], [LSE] * 2, r"outputs\[1\]: expected the shape \(2, 3, 64\), got \(1, 3, 64\)"),
        ([OUTPUT, OUTPUT.double()], [LSE] * 2, r"outputs\[1\]: expected torch.float32 or"),
        ([OUTPUT] * 2, [LSE, LSE[:, 1:]], r"lses\[1\]: expected the shape \(2, 3\), got \(2, 2\)"),
        ([OUTPUT] * 2, [LSE, LSE.half()], r"lses\[1\]: expected torch.float32, got torch.float16"),
        ([OUTPUT] * 2, [LSE, LSE.t().contiguous().t()], r"lses\[1\]: expected a last stride of 1"),
    ],
)
def test_bad_arguments(outputs, lses, message):
    with pytest.raises(KernelArgumentError, match=message):
        merge_state(outputs, lses)


def test_dtypes_that_nothing_can_be_merged_to():
    with pytest.raises(KernelArgumentError, match=r"dtype: expected torch\.float32 or"):
        merge_state([OUTPUT] * 2, [LSE] * 2, dtype=torch.float64)
