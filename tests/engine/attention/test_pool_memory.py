"""The KV cache's memory on a CPU: zeroed, aligned, and taken when it is written."""

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch
from engine.small_models import CONFIGS, EVEN

from kvblocks.engine.attention.attention import KVCache, zeros_when_touched


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros(dtype):
    zeros = zeros_when_touched((3, 5, 7), dtype)
    assert zeros.shape == (3, 5, 7)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % 64 == 0
    assert not zeros.any()
    part = zeros[1]
    part += 2
    del zeros
    gc.collect()
    assert torch.equal(part, torch.full((5, 7), 2.0, dtype=dtype))


def test_without_private_mappings(monkeypatch):
    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    zeros = zeros_when_touched((3, 5), torch.float32)
    assert zeros.shape == (3, 5)
    assert not zeros.any()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for resident memory, which Linux has")
def test_a_pool_takes_memory_when_it_is_written():
    gc.collect()  # else what earlier tests have left could be freed between two looks
    before = resident_bytes()
    cache = KVCache.allocate(EVEN, 4096, 16)
    assert cache.num_bytes > 60_000_000
    assert resident_bytes() - before < cache.num_bytes / 4
    cache.memory[0].fill_(1)
    assert resident_bytes() - before > cache.num_bytes / 2


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_are_parts_of_one_piece(config):
    cache = KVCache.allocate(config, 5, 16)
    start, stop = cache.memory[0].data_ptr(), cache.memory[0].data_ptr() + cache.memory[0].nbytes
    assert len({tensor.data_ptr() for tensor in (*cache.keys, *cache.values)}) == 2 * config.num_layers
    assert all(start <= tensor.data_ptr() < stop for tensor in (*cache.keys, *cache.values))
