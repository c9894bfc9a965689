"""Blocks as bytes: one piece on a CPU, gathered on other devices. The bytes and their order are the same."""

import gc
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from engine.small_models import EVEN, GEMMA3, ODD

from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.tiers.block_bytes import BlockBytes, new_rows

LOCATIONS = [LayerLocation(0, 0), LayerLocation(0, 1), LayerLocation(1, 0), LayerLocation(1, 1)]
CACHES = {
    "even": lambda: KVCache.allocate(EVEN, 9, 4),
    "odd": lambda: KVCache.allocate(ODD, 9, 4),
    "bfloat16": lambda: KVCache.allocate(EVEN, 9, 4, dtype=torch.bfloat16),
    "groups": lambda: KVCache.allocate(GEMMA3, 9, 4, layer_locations=LOCATIONS),
    "one block": lambda: KVCache.allocate(ODD, 1, 1),
}


def filled(cache):
    for number, part in enumerate(cache.parts):
        part.copy_(torch.arange(part.numel()).view(part.shape) % 251 + number)
    return cache


def split(cache):
    """The same cache in the form of other devices: a tensor for each layer of a block."""
    pairs = list(zip(cache.parts[::2], cache.parts[1::2], strict=True))
    memory = tuple(torch.stack(pair) for pair in pairs)
    places = {key.data_ptr(): number for number, (key, _) in enumerate(pairs)}
    order = [places[key.data_ptr()] for key in cache.keys]
    return KVCache(tuple(memory[i][0] for i in order), tuple(memory[i][1] for i in order), memory)


@pytest.mark.parametrize("name", CACHES)
def test_a_row_is_what_layers_hold_of_a_block(name):
    cache = filled(CACHES[name]())
    blocks = BlockBytes(cache)
    rows = blocks.new_rows(2)
    assert rows.shape == (2, cache.num_block_bytes)
    ids = [cache.num_blocks - 1, 0] if cache.num_blocks > 1 else [0]
    blocks.read(ids, list(rows[: len(ids)]), blocks.mark())
    for block_id, row in zip(ids, rows, strict=False):
        expected = torch.cat([part[block_id].reshape(-1) for part in cache.parts]).view(torch.uint8)
        assert row.tobytes() == expected.numpy().tobytes()
        assert blocks.rows_of([block_id])[0].tobytes() == row.tobytes()


@pytest.mark.parametrize("name", CACHES)
def test_rows_come_back_to_other_blocks(name):
    cache, other = filled(CACHES[name]()), CACHES[name]()
    rows = BlockBytes(cache).new_rows(cache.num_blocks)
    ids = list(range(cache.num_blocks))
    BlockBytes(cache).read(ids, list(rows), None)
    BlockBytes(other).write(ids[::-1], list(rows), None)
    for part, moved in zip(cache.parts, other.parts, strict=True):
        assert torch.equal(moved, part.flip(0))


@pytest.mark.parametrize("name", CACHES)
def test_layers_apart_are_gathered_to_the_same_bytes_and_scattered_back(name):
    cache = filled(CACHES[name]())
    apart = split(cache)
    assert apart.parts_per_block == 1
    ids = torch.tensor([cache.num_blocks - 1, 0][: cache.num_blocks])
    staging = torch.zeros(len(ids), cache.num_block_bytes, dtype=torch.uint8)
    apart.gather_blocks(ids, staging)
    rows = BlockBytes(cache).rows_of(ids.tolist())
    assert [row.tobytes() for row in rows] == [row.numpy().tobytes() for row in staging]
    for part in apart.parts:
        part.zero_()
    apart.scatter_blocks(ids, staging)
    for part, expected in zip(apart.parts, cache.parts, strict=True):
        assert torch.equal(part[ids], expected[ids])
        assert int((part != 0).flatten(1).any(1).sum()) <= len(ids)


def test_slots_of_rows_lie_where_the_layer_has_them():
    cache = filled(KVCache.allocate(EVEN, 9, 4))
    slots = torch.tensor([0, 3, 4, 35, -1])
    spread = cache.row_slots(slots)
    assert spread[-1] == -1
    for layer, (keys, values) in enumerate(cache.rows):
        assert keys.is_contiguous() and values.is_contiguous()
        for part, rows in ((cache.keys[layer], keys), (cache.values[layer], values)):
            found = rows.flatten(0, 1)[spread[:-1]]
            assert torch.equal(found, part.flatten(0, 1)[slots[:-1]])


def test_blocks_are_copied_whole():
    cache = filled(KVCache.allocate(EVEN, 9, 4))
    before = [part.clone() for part in cache.parts]
    cache.copy_blocks([(2, 5), (5, 7)])
    for part, old in zip(cache.parts, before, strict=True):
        expected = old.clone()
        expected[5] = expected[7] = old[2]
        assert torch.equal(part, expected)
    assert cache.num_bytes == 9 * cache.num_block_bytes


def test_memory_for_rows_is_there_before_anybody_needs_it():
    cache = KVCache.allocate(replace(EVEN, num_layers=1), 2, 4)
    rows = BlockBytes(cache).new_rows(3)
    assert rows.any() == False  # noqa: E712  # numpy's
    assert rows.flags.c_contiguous and rows.flags.writeable


def test_pinned_memory_is_as_large_as_its_rows_and_pinned_as_long_as_one_is_used(monkeypatch):
    """With a stand-in for CUDA. torch would pin a power of 2."""
    pinned = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: (size, flags)}),
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    rows = new_rows(3, 5000, is_pinned=True)
    assert rows.shape == (3, 5000) and not rows.any()
    assert list(pinned.values()) == [(15_000, 0)]
    assert all(address % mmap.PAGESIZE == 0 for address in pinned)
    last = torch.from_numpy(rows[2])
    last.fill_(7)
    assert rows[2].min() == 7 and not rows[:2].any()
    del rows
    gc.collect()
    assert len(pinned) == 1, "a row of it is used"
    del last
    gc.collect()
    assert pinned == {}


def test_memory_that_can_not_be_pinned_is_an_error(monkeypatch):
    def refuse(result):
        raise RuntimeError(f"CUDA error {result}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        new_rows(1, 5000, is_pinned=True)


class Streams:
    """A stand-in for CUDA's streams. Copies are made at once, but a stream has ended only after all that it waits for.

    waiting: set when a stream is waited for. calls: the names of the calls of all streams.
    """

    def __init__(self, monkeypatch):
        self.waiting = Event()
        self.calls = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


class Stream:
    def __init__(self, streams):
        self.streams = streams
        self.events = []

    def wait_event(self, event):
        self.streams.calls.append("wait_event")
        self.events.append(event)

    def synchronize(self):
        self.streams.calls.append("synchronize")
        events = [*self.events]
        self.streams.waiting.set()
        for event in events:
            assert event.wait(60)


class Device(str):
    """The CPU, in the place of a GPU."""

    __slots__ = ()
    type = "cuda"


def on_a_gpu(cache):
    """`BlockBytes` of a cache, as if it were on a GPU."""
    apart = split(cache)
    like_gpu = SimpleNamespace(
        keys=[SimpleNamespace(device=Device("cpu"))],
        num_block_bytes=cache.num_block_bytes,
        gather_blocks=apart.gather_blocks,
        scatter_blocks=apart.scatter_blocks,
    )
    return BlockBytes(like_gpu), apart


@pytest.mark.parametrize(("first", "second"), [("read", "write"), ("write", "read")])
def test_loads_and_stores_wait_for_launched_work_and_not_for_each_other(monkeypatch, first, second):
    streams = Streams(monkeypatch)
    blocks, cache = on_a_gpu(filled(CACHES["even"]()))
    rows = list(new_rows(2, blocks.num_block_bytes, is_pinned=False))
    is_launched_done, is_done = Event(), Event()
    is_done.set()
    with ThreadPoolExecutor(2) as threads:
        try:
            waits = threads.submit(getattr(blocks, first), [1], rows[:1], is_launched_done)
            assert streams.waiting.wait(60)
            threads.submit(getattr(blocks, second), [2], rows[1:], is_done).result(60)
            assert not waits.done()
        finally:
            is_launched_done.set()
        waits.result(60)
    kept, zeros = (1, 2) if first == "read" else (2, 1)
    assert all(part[kept].any() and not part[zeros].any() for part in cache.parts)
    assert rows[first == "write"].any()


@pytest.mark.parametrize("call", ["read", "write"])
def test_after_an_error_nothing_is_copied_any_more(monkeypatch, call):
    """The rows and blocks of a failed transfer are used for others."""
    streams = Streams(monkeypatch)
    blocks, _ = on_a_gpu(filled(CACHES["even"]()))
    rows = list(new_rows(2, blocks.num_block_bytes, is_pinned=False))
    is_done = Event()
    is_done.set()
    with pytest.raises(RuntimeError, match="size"):
        getattr(blocks, call)([1, 2], [rows[0], rows[1][:-1]], is_done)
    assert streams.calls == ["wait_event", "synchronize"]
