"""Amounts of memory: how options are read, how much is free, and that a pool which doesn't fit is refused.

Without that check a pool that is too large ends the process later, while it serves.
"""

import os
from pathlib import Path

import pytest
import torch

from kvblocks.engine.run import memory
from kvblocks.engine.run.memory import check_memory, free_memory, read_memory
from kvblocks.errors import InvalidArgumentError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        (1, 1),
        (5_000_000, 5_000_000),
        ("123", 123),
        ("2GiB", 2 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 2**29),
        (" 64 KB ", 64_000),
        ("7b", 7),
        ("1TB", 10**12),
    ],
)
def test_bytes(budget, num_bytes):
    assert read_memory(budget, CPU) == num_bytes


@pytest.mark.parametrize(
    "budget", [0, -1, True, None, 0.0, -0.5, 1.1, float("nan"), "", "GiB", "2 GiBs", "-1GB", "0.1B", "1e9"]
)
def test_what_is_no_amount_of_memory(budget):
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_memory: expected bytes .* got"):
        read_memory(budget, CPU)


def test_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: {"cpu": 1001}[device.type])
    assert read_memory(0.5, CPU) == 500
    assert read_memory(1.0, CPU) == 1001


def test_what_is_free_on_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total / 1000 < free_memory(CPU) <= total


def test_what_is_free_on_other_systems(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError("no /proc here")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_memory(CPU) == 3 * 4096
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(InvalidArgumentError, match="doesn't say how much memory is free"):
        free_memory(CPU)


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks", "device", "words"),
    [
        (1001, 0, "cpu", "within the 0.0 MiB of host memory"),
        (1000 - 7 * 128 + 1, 7, "cpu", "got 7 blocks"),
        (0, 8, "cpu", "host memory"),
        (5001, 0, "cuda", "memory of cuda"),
        (0, 8, "cuda", "of host memory that are free, got 8 blocks, which take 0.0 MiB"),
        (3 * 2**30, 8, "cuda", "which take 3.0 GiB"),
    ],
)
def test_a_pool_is_held_against_what_is_free(monkeypatch, num_bytes, num_blocks, device, words):
    monkeypatch.setattr(memory, "free_memory", lambda device: {"cpu": 1000, "cuda": 5000}[device.type])
    with pytest.raises(InvalidArgumentError, match="pool: expected a KV cache within") as raised:
        check_memory("pool", num_bytes, num_blocks, torch.device(device))
    assert words in str(raised.value)


@pytest.mark.parametrize(("num_bytes", "num_blocks", "device"), [(1000, 0, "cpu"), (104, 7, "cpu"), (5000, 7, "cuda")])
def test_a_pool_may_take_all_that_is_free(monkeypatch, num_bytes, num_blocks, device):
    monkeypatch.setattr(memory, "free_memory", lambda device: {"cpu": 1000, "cuda": 5000}[device.type])
    check_memory("pool", num_bytes, num_blocks, torch.device(device))


def test_where_nobody_says_what_is_free_a_pool_is_not_checked(monkeypatch):
    def refuse(device):
        raise InvalidArgumentError("unknown")

    monkeypatch.setattr(memory, "free_memory", refuse)
    check_memory("pool", 10**18, 1, CPU)
