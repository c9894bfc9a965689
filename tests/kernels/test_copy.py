"""Copies of blocks on a device, and to staging rows and back, for all layouts of caches.

Copy on write and tiers move KV with these kernels. A wrong byte is a wrong answer.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels.copy import CacheTable, copy_blocks, gather_blocks, scatter_blocks
from kvblocks.kernels.layout import FP8, KernelArgumentError

NUM_BLOCKS = 6


def make(device, *, num_caches=3, block=(16, 2, 64), dtype=torch.float32):
    """Caches of random bytes, as one tensor [num_caches, NUM_BLOCKS, *block]."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_caches, NUM_BLOCKS, *block)
    numbers = torch.randint(0, 100, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return numbers.to(device).view(dtype)


def copy_in_order(caches, pairs):
    for cache in caches:
        for source, destination in pairs:
            cache[destination] = cache[source].clone()


def equal(some, others):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
@pytest.mark.parametrize("block", [(16, 2, 64), (128, 1, 128), (32, 3, 256)])
def test_pairs_of_blocks(device, dtype, block):
    caches = make(device, block=block, dtype=dtype)
    expected = caches.clone()
    pairs = [(0, 3), (2, 1), (4, 4)]
    copy_in_order(expected, pairs)
    copy_blocks(CacheTable.of(caches), torch.tensor(pairs, device=device))
    assert equal(caches, expected)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)), max_size=8))
def test_any_pairs_take_effect_in_order(pairs):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    caches = make(device, num_caches=2, block=(16, 1, 64))
    expected = caches.clone()
    copy_in_order(expected, pairs)
    copy_blocks(CacheTable.of(caches), torch.tensor(pairs, device=device, dtype=torch.int64).view(-1, 2))
    assert equal(caches, expected)


def layers_of_keys_and_values(device):
    """As an engine allocates them: K and V of a layer in one tensor."""
    layers = [make(device, num_caches=2, dtype=torch.float16) for _ in range(2)]
    return [half for layer in layers for half in layer]


def blocks_of_keys_and_values(device):
    """K and V of a block next to each other, heads before slots: blocks lie apart, and are permuted."""
    stored = make(device, num_caches=1, block=(2, 4, 16, 64))[0]
    return [stored[:, 0].transpose(1, 2), stored[:, 1].transpose(1, 2)]


LAYOUTS = pytest.mark.parametrize("layout", [make, layers_of_keys_and_values, blocks_of_keys_and_values])


@LAYOUTS
def test_every_layout_copies(device, layout):
    caches = layout(device)
    expected = [cache.clone() for cache in caches]
    pairs = [(1, 5), (5, 0)]
    copy_in_order(expected, pairs)
    copy_blocks(CacheTable.of(caches), torch.tensor(pairs, device=device))
    assert equal([cache.contiguous() for cache in caches], [cache.contiguous() for cache in expected])


@LAYOUTS
def test_blocks_go_to_host_memory_and_come_back(device, layout):
    caches = layout(device)
    before = [cache.clone() for cache in caches]
    table = CacheTable.of(caches)
    ids = torch.tensor([4, 0, 5], device=device)
    staging = torch.zeros(3, table.staging_bytes, dtype=torch.uint8, device=device)
    gather_blocks(table, ids, staging)
    assert equal(caches, before), "gathering changed the caches"
    host = staging.cpu()
    for cache in caches:
        cache.view(torch.uint8).zero_()
    scatter_blocks(table, ids, host.to(device))
    for cache, old in zip(caches, before, strict=True):
        for block in range(NUM_BLOCKS):
            assert torch.equal(cache[block], old[block]) == (block in {4, 0, 5})


def test_a_staging_row_holds_a_block_of_every_cache_in_turn(device):
    caches = make(device)
    table = CacheTable.of(caches)
    ids = torch.tensor([3, 3, 1], device=device)
    staging = torch.zeros(3, table.staging_bytes, dtype=torch.uint8, device=device)
    gather_blocks(table, ids, staging)
    expected = caches[:, ids].transpose(0, 1).contiguous().view(torch.uint8).view(3, -1)
    assert torch.equal(staging, expected)


def test_nothing_to_do(device):
    caches = make(device)
    before = caches.clone()
    table = CacheTable.of(list(caches))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    staging = torch.zeros(0, table.staging_bytes, dtype=torch.uint8, device=device)
    copy_blocks(table, none.view(0, 2))
    gather_blocks(table, none, staging)
    scatter_blocks(table, none, staging)
    assert equal(caches, before)


def test_blocks_beyond_two_to_the_31_bytes(device):
    # Untouched memory costs nothing: only the pages of two blocks are allocated.
    memory = torch.empty(2**31 + 2**16, dtype=torch.uint8, device=device)
    cache = memory.as_strided((2, 16, 1, 64), (2**31, 64, 64, 1))
    cache[0] = torch.arange(64, dtype=torch.uint8, device=device)
    table = CacheTable.of([cache])
    copy_blocks(table, torch.tensor([[0, 1]], device=device))
    assert torch.equal(cache[1], cache[0])
    staging = torch.zeros(1, table.staging_bytes, dtype=torch.uint8, device=device)
    gather_blocks(table, torch.tensor([1], device=device), staging)
    assert torch.equal(staging, cache[0].reshape(1, -1))


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (list, "expected at least one, got none"),
        (lambda: [torch.zeros(4)], r"expected the shape \[num_blocks, ...\], got \(4,\)"),
        (lambda: [torch.zeros(4, 64), torch.zeros(5, 64)], r"caches\[1\]: expected the shape \(4, 64\), got \(5, 64\)"),
        (lambda: [torch.zeros(4, 64), torch.zeros(4, 64).int()], r"caches\[1\]: expected torch.float32, got"),
        (lambda: [torch.zeros(4, 8, 8), torch.zeros(4, 8, 8).mT], r"caches\[1\]: expected the strides"),
        (lambda: [torch.zeros(4, 64)[:, ::2]], "expected blocks without gaps"),
        (lambda: [torch.zeros(4, 3)], "expected blocks in multiples of 16 bytes, got 12 every 12"),
        (lambda: [torch.zeros(99).as_strided((4, 16), (4, 1))], "expected blocks that do not overlap"),
        (lambda: [torch.zeros(65)[1:].view(4, 16)], "expected addresses in multiples of 16 bytes"),
    ],
)
def test_caches_that_cannot_be_copied(caches, message):
    with pytest.raises(KernelArgumentError, match=message):
        CacheTable.of(caches())


def test_bad_arguments_change_nothing(device):
    caches = make(device)
    before = caches.clone()
    table = CacheTable.of(caches)
    ids = torch.tensor([0, 1], device=device)
    staging = torch.zeros(2, table.staging_bytes, dtype=torch.uint8, device=device)
    with pytest.raises(KernelArgumentError, match=r"pairs: expected the shape \(2, 2\), got \(2,\)"):
        copy_blocks(table, ids)
    with pytest.raises(KernelArgumentError, match=r"pairs: expected torch\.int64, got torch\.int32"):
        copy_blocks(table, ids.int().view(1, 2))
    with pytest.raises(KernelArgumentError, match="pairs: expected a contiguous tensor"):
        copy_blocks(table, ids.repeat(2, 1).mT)
    with pytest.raises(KernelArgumentError, match=r"staging: expected the shape \(2, 24576\), got \(2, 24575\)"):
        scatter_blocks(table, ids, staging[:, 1:])
    with pytest.raises(KernelArgumentError, match=r"block_ids: expected the shape \(2,\), got \(1, 2\)"):
        scatter_blocks(table, ids.view(1, 2), staging)
    with pytest.raises(KernelArgumentError, match=r"staging: expected torch\.uint8, got torch\.float32"):
        scatter_blocks(table, ids, staging.float())
    assert equal(caches, before)
