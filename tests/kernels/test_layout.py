"""The checks before a kernel is launched: shapes, dtypes, options and devices.

A kernel that ran with wrong arguments would read or write memory out of bounds.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvblocks.kernels import layout
from kvblocks.kernels.layout import FP8, AttentionOptions, KernelArgumentError, check_attention, check_cache

CACHE = torch.zeros(5, 16, 2, 64)
OPTIONS = AttentionOptions(0.125)


def call(**changes):
    """`check_attention` of a good call, some of whose arguments are changed."""
    arguments = {
        "query": torch.zeros(7, 6, 64),
        "key_cache": CACHE,
        "value_cache": CACHE,
        "block_tables": torch.zeros(3, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(3, dtype=torch.int32),
        "options": OPTIONS,
    }
    return check_attention(**{**arguments, **changes})


def test_the_sizes_of_a_call():
    shape = call()
    assert (shape.num_rows, shape.num_heads, shape.num_seqs, shape.max_blocks) == (7, 6, 3, 4)
    assert shape.group_size == 3
    assert shape.cache == layout.CacheShape(num_blocks=5, block_size=16, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("dtype", layout.QUERY_DTYPES)
def test_supported_dtypes(dtype):
    query, cache = torch.zeros(7, 6, 64, dtype=dtype), CACHE.to(dtype)
    call(query=query, key_cache=cache, value_cache=cache)
    call(query=query, key_cache=cache.to(FP8), value_cache=cache.to(FP8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(7, 384)}, r"query: expected 3 dimensions, got the shape \(7, 384\)"),
        ({"query": torch.zeros(7, 6, 64).half()}, "query: expected torch.float32, got torch.float16"),
        ({"query": torch.zeros(7, 6, 128)}, "query: expected the caches' head_dim of 64, got 128"),
        ({"query": torch.zeros(7, 5, 64)}, "query: expected heads in multiples of 2, got 5"),
        ({"query": torch.zeros(7, 0, 64)}, "query: expected heads in multiples of 2, got 0"),
        ({"query": torch.zeros(7, 64, 6).mT}, "query: expected a last stride of 1, got strides"),
        ({"query": torch.zeros(7, 6, 64, device="meta")}, "key_cache: expected the device of query, meta, got cpu"),
        ({"block_tables": torch.zeros(3, dtype=torch.int32)}, "block_tables: expected 2 dimensions"),
        ({"block_tables": torch.zeros(3, 4).long()}, "block_tables: expected torch.int32, got torch.int64"),
        ({"block_tables": torch.zeros(4, 3).int().mT}, "block_tables: expected a last stride of 1"),
        ({"seq_lens": torch.zeros(4).int()}, r"seq_lens: expected the shape \(3,\), got \(4,\)"),
        ({"seq_lens": torch.zeros(3).long()}, "seq_lens: expected torch.int32, got torch.int64"),
        ({"seq_lens": torch.zeros(6).int()[::2]}, "seq_lens: expected a last stride of 1"),
    ],
)
def test_bad_tensors(change, message):
    with pytest.raises(KernelArgumentError, match=message):
        call(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale: expected a number above 0, got 0.0"),
        ({"scale": float("inf")}, "scale: expected a number above 0, got inf"),
        ({"k_scale": torch.ones(2)}, "expected k_scale and v_scale or neither"),
        ({"softcap": 0.0}, "softcap: expected None or a number above 0, got 0.0"),
        ({"window": 0}, "window: expected None or at least 1, got 0"),
        ({"sinks": torch.zeros(2)}, r"sinks: expected the shape \(6,\), got \(2,\)"),
        ({"sinks": torch.zeros(6).double()}, "sinks: expected torch.float32 or torch.float16 or torch.bfloat16, got"),
        ({"sinks": torch.zeros(12)[::2]}, "sinks: expected a last stride of 1"),
        ({"sinks": torch.zeros(6, device="meta")}, "sinks: expected the device of query, cpu, got meta"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(KernelArgumentError, match=message):
        call(options=replace(OPTIONS, **change))


@pytest.mark.parametrize(
    ("key_cache", "value_cache", "message"),
    [
        (CACHE[0], CACHE[0], r"key_cache: expected 4 dimensions, got the shape \(16, 2, 64\)"),
        (CACHE.double(), CACHE, "key_cache: expected torch.float32 or torch.float16 or torch.bfloat16 or torch.float8"),
        (CACHE, CACHE[1:], r"value_cache: expected the shape \(5, 16, 2, 64\), got \(4, 16, 2, 64\)"),
        (CACHE, CACHE.half(), "value_cache: expected torch.float32, got torch.float16"),
        (CACHE, CACHE.to("meta"), "value_cache: expected the device of key_cache, cpu, got meta"),
        (CACHE[:0], CACHE[:0], "expected at least one block and one head"),
        (CACHE[:, :8], CACHE[:, :8], r"expected a block_size among \(16, 32, 64, 128\), got 8"),
        (CACHE[..., :32], CACHE[..., :32], r"expected a head_dim among \(64, 128, 256\), got 32"),
        (CACHE, torch.zeros(5, 16, 64, 2).mT, "value_cache: expected a last stride of 1"),
    ],
)
def test_bad_caches(key_cache, value_cache, message):
    with pytest.raises(KernelArgumentError, match=message):
        check_cache(key_cache, value_cache)


def test_fp8_lies_in_pairs():
    flat = torch.zeros(3 * 16 * 2 * 64 + 1, dtype=torch.uint8).view(FP8)
    odd_address = flat[1:].view(3, 16, 2, 64)
    odd_strides = torch.zeros(3, 16, 2, 65, dtype=torch.uint8).view(FP8)[..., :64]
    even = flat[:-1].view(3, 16, 2, 64)
    check_cache(even, even)
    for cache in (odd_address, odd_strides):
        with pytest.raises(KernelArgumentError, match="value_cache: expected an even address and even strides"):
            check_cache(even, cache)


def test_fp8_needs_a_gpu_that_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(
        KernelArgumentError, match=r"expected CUDA's compute capability 8\.9 or newer .* got NVIDIA A100"
    ):
        layout.check_fp8_device(torch.device("cuda"))
    layout.check_fp8_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    layout.check_fp8_device(torch.device("cuda"))
    # An AMD GPU's version number means something else.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(KernelArgumentError, match="expected CUDA's compute capability"):
        layout.check_fp8_device(torch.device("cuda"))


class FakeGPU:
    """A tensor on a GPU as far as the checks look, for machines without one."""

    def __init__(self, index):
        self.device = torch.device("cuda", index)


def test_kernels_are_launched_on_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    layout.check_devices(query=FakeGPU(1), cache=FakeGPU(1))
    with pytest.raises(KernelArgumentError, match="query: expected the current device, cuda:1, got cuda:0"):
        layout.check_devices(query=FakeGPU(0), cache=FakeGPU(0))


def test_heads_before_slots_is_a_transpose():
    stored = torch.zeros(5, 2, 16, 64)
    assert check_cache(stored.transpose(1, 2), stored.transpose(1, 2)).block_size == 16


def test_cpu_users_have_no_triton():
    # A finder that refuses triton stands for a machine without it.
    script = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import kvblocks.kernels, kvblocks.kernels.reference, kvblocks.kernels.layout, kvblocks.kernels.oracle\n"
        "import kvblocks.engine.attention.attention\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "works"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.6.1+x", "2.5.1", False), ("3.7.1", "2.5.0rc1", True)],
)
def test_versions_that_the_interpreter_needs(triton_version, numpy_version, works):
    """It was tried: triton 3.6.0 with numpy 2.3.5 and 2.4.6, and 3.7.1 with 2.4.6."""
    if works:
        layout.check_interpreter(triton_version, numpy_version)
        return
    with pytest.raises(ImportError, match=r"expected triton 3\.7 or newer.* got triton 3\.6\.\S+ and numpy 2\.[45]"):
        layout.check_interpreter(triton_version, numpy_version)
