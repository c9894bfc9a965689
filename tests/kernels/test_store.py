"""Storing K and V: every token goes to its slot and nowhere else, in every dtype and layout.

A store to a wrong slot would spoil another sequence's KV.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels import reference
from kvblocks.kernels.layout import FP8, FP8_MAX, KernelArgumentError
from kvblocks.kernels.store import store

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def bits(tensor):
    """A tensor's bytes, so that NaN equals NaN and e4m3 can be compared."""
    return tensor.contiguous().view(torch.uint8)


def make(device, *, num_tokens=9, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32):
    """Random key and value, and caches of NaN with room for twice as many tokens."""
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    num_blocks = 2 * num_tokens // block_size + 2
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, device=device).to(dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    return *new, *caches, slots.to(device)


@pytest.mark.every(13)
@DTYPES
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [(1, 64), (3, 128), (8, 256), (40, 64)])
def test_every_token_goes_to_its_slot_and_nowhere_else(device, dtype, block_size, heads):
    num_kv_heads, head_dim = heads
    case = make(device, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    key, value, key_cache, value_cache, slots = case
    slots[[2, 5]] = -1
    expected = key_cache.clone(), value_cache.clone()
    reference.store(key, value, *expected, slots)
    store(key, value, key_cache, value_cache, slots)
    assert torch.equal(bits(key_cache), bits(expected[0]))
    assert torch.equal(bits(value_cache), bits(expected[1]))


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_padding_alone_stores_nothing(device, num_tokens):
    key, value, key_cache, value_cache, _ = make(device, num_tokens=num_tokens)
    store(key, value, key_cache, value_cache, torch.full((num_tokens,), -1, dtype=torch.int64, device=device))
    assert key_cache.isnan().all() and value_cache.isnan().all()


def test_slices_of_one_projection_and_caches_of_other_strides(device):
    num_tokens, num_kv_heads, head_dim, block_size = 11, 2, 64, 16
    projected = torch.randn(num_tokens, 8 * head_dim, device=device)
    key = projected[:, 4 * head_dim : 6 * head_dim].unflatten(1, (num_kv_heads, head_dim))
    value = projected[:, 6 * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    # K and V of a block next to each other, heads before slots.
    stored = torch.full((3, 2, num_kv_heads, block_size, head_dim), torch.nan, device=device)
    key_cache, value_cache = (stored[:, i].transpose(1, 2) for i in range(2))
    slots = torch.arange(20, 20 + num_tokens, device=device)
    store(key, value, key_cache, value_cache, slots)
    blocks, offsets = slots // block_size, slots % block_size
    assert torch.equal(key_cache[blocks, offsets], key)
    assert torch.equal(value_cache[blocks, offsets], value)
    assert stored.isnan().sum() == stored.numel() - key.numel() - value.numel()


def test_a_slot_beyond_two_to_the_31_bytes(device):
    # Untouched memory costs nothing: only the pages of the slot are allocated.
    memory = torch.empty(2**31 + 2**16, dtype=torch.uint8, device=device)
    # Neither the block's number nor the stride has more than 31 bits, but their product does.
    shape, strides = (3, 16, 1, 64), (2**30, 64, 64, 1)
    key_cache, value_cache = (memory[at:].as_strided(shape, strides).view(FP8) for at in (0, 4096))
    key, value = torch.randn(2, 1, 1, 64, device=device).to(FP8).float()
    store(key, value, key_cache, value_cache, torch.tensor([33], device=device))
    assert torch.equal(key_cache[2, 1].float(), key[0])
    assert torch.equal(value_cache[2, 1].float(), value[0])


@pytest.mark.every(5)
@DTYPES
@pytest.mark.parametrize(("k_scale", "v_scale"), [(None, None), (0.03, 1.7)])
# Signalling NaN and overflow are what is tested here, and numpy warns of them.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_fp8_is_the_nearest_number_or_the_largest(device, dtype, k_scale, v_scale):
    every_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    key = every_bf16.to(dtype).to(device).view(64, 16, 64)
    key_cache = torch.zeros(5, 16, 16, 64, device=device).to(FP8)
    value_cache = key_cache.clone()
    factors = 1 + torch.arange(16, device=device) / 8
    scales = [None if scale is None else scale * factors for scale in (k_scale, v_scale)]
    slots = torch.arange(64, device=device)
    store(key, key.flip(0), key_cache, value_cache, slots, k_scale=scales[0], v_scale=scales[1])
    for cache, source, scale in ((key_cache, key, scales[0]), (value_cache, key.flip(0), scales[1])):
        exact = source.float() if scale is None else source.float() / scale[:, None]
        expected = exact.clamp(-FP8_MAX, FP8_MAX).to(FP8)
        stored = cache.flatten(0, 1)[:64]
        # The sign of a NaN doesn't matter.
        assert torch.equal(stored.float().isnan(), exact.isnan())
        assert torch.equal(bits(stored)[~exact.isnan()], bits(expected)[~exact.isnan()])
    assert not bits(key_cache.flatten(0, 1)[64:]).any()


@settings(max_examples=30)
@given(numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_fp8_of_any_float(numbers):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = torch.zeros(1, 1, 64, device=device)
    key[0, 0, : len(numbers)] = torch.tensor(numbers, device=device)
    key_cache, value_cache = torch.zeros(2, 1, 16, 1, 64, device=device).to(FP8)
    store(key, key, key_cache, value_cache, torch.tensor([3], device=device))
    assert torch.equal(bits(key_cache[0, 3]), bits(key[0].clamp(-FP8_MAX, FP8_MAX).to(FP8)))


def replace(index, change):
    """A case of `make` with one of its five tensors changed."""
    case = list(make(torch.device("cpu")))
    case[index] = change(case[index])
    return case


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: replace(0, lambda key: key[:, :1]), r"key: expected the shape \(9, 2, 64\), got \(9, 1, 64\)"),
        (lambda: replace(0, lambda key: key.half()), "key: expected torch.float32, got torch.float16"),
        (lambda: replace(1, lambda value: value[1:]), r"value: expected the shape \(9, 2, 64\), got \(8, 2, 64\)"),
        (lambda: replace(1, lambda value: value.double()), "value: expected torch.float32, got torch.float64"),
        (lambda: replace(0, lambda key: key.transpose(0, 2).contiguous().transpose(0, 2)), "key: expected a last str"),
        (lambda: replace(4, lambda slots: slots.int()), "slot_mapping: expected torch.int64, got torch.int32"),
        (lambda: replace(4, lambda slots: slots[1:]), r"slot_mapping: expected the shape \(9,\), got \(8,\)"),
    ],
)
def test_bad_arguments_change_nothing(arguments, message):
    key, value, key_cache, value_cache, slots = arguments()
    with pytest.raises(KernelArgumentError, match=message):
        store(key, value, key_cache, value_cache, slots)
    assert key_cache.isnan().all() and value_cache.isnan().all()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "expected no scales unless the caches are torch.float8"),
        ({"k_scale": torch.ones(2)}, "expected k_scale and v_scale or neither"),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(3)}, r"v_scale: expected the shape \(2,\), got \(3,\)"),
    ],
)
def test_scales_are_for_fp8_both_of_them_and_by_head(scales, message):
    with pytest.raises(KernelArgumentError, match=message):
        store(*make(torch.device("cpu")), **scales)
