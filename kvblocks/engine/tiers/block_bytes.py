"""`BlockBytes`: copies the bytes of a KV cache's blocks to rows of host memory and back.

A row is a uint8 array of `num_block_bytes`: a block's K and V in all layers, one part after another. On a CPU a block
is contiguous, so a row of the cache is the block itself. On CUDA one launch of a kernel gathers blocks into a buffer on
the device, from where they are copied to rows. Reads have a stream of their own, and so have writes.
"""

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvblocks.engine.attention.attention import KVCache

Row = NDArray[np.uint8]

_REGISTER_DEFAULT = 0
_HAS_FLAGS = hasattr(mmap, "MAP_ANONYMOUS")


def new_rows(num_rows: int, num_block_bytes: int, *, is_pinned: bool) -> Row:
    """Return host memory for rows, with all pages touched. is_pinned: for copies from and to a GPU.

    Raises torch's error if CUDA can't pin that much.
    """
    if is_pinned and num_rows > 0:
        return _pinned_rows(num_rows, num_block_bytes)
    rows: Row = torch.zeros(num_rows, num_block_bytes, dtype=torch.uint8).numpy()
    rows[:, ::4096] = 0  # a page of zeros may take no memory before somebody writes to it
    return rows


def _pinned_rows(num_rows: int, num_block_bytes: int) -> Row:
    """Return pinned memory of exactly this size, in pages of its own.

    torch's pinned memory is rounded up to a power of 2 (70 GiB would take 128), and it keeps what is freed.
    """
    size = num_rows * num_block_bytes
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if _HAS_FLAGS else mmap.mmap(-1, size)
    rows: Row = np.frombuffer(pages, dtype=np.uint8).reshape(num_rows, num_block_bytes)
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(rows.ctypes.data, size, _REGISTER_DEFAULT))
    # Before the pages go. At the end of the process the driver does this.
    weakref.finalize(rows.base, cuda.cudaHostUnregister, rows.ctypes.data).atexit = False
    return rows


class BlockBytes:
    """The blocks of `kv_cache` as rows of bytes. Any thread may call it. Calls return when the bytes are copied.

    after: a result of `mark`. Bytes are read or overwritten only when all work launched before it is done. On CUDA a
    write doesn't wait for reads, nor a read for writes: nobody may write a block that another call reads or writes.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self.num_block_bytes = kv_cache.num_block_bytes
        self.is_on_host = kv_cache.keys[0].device.type == "cpu"
        if self.is_on_host:
            self._rows: Row = kv_cache.memory[0].view(kv_cache.num_blocks, -1).view(torch.uint8).numpy()
        else:
            device = kv_cache.keys[0].device
            self._read_stream, self._write_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> "torch.cuda.Event | None":
        """Return an event after all work launched so far on the current stream.

        None on a CPU, where it is done already.
        """
        if self.is_on_host:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._kv_cache.keys[0].device))
        return event

    def new_rows(self, num_rows: int) -> Row:
        """Call the function `new_rows` for blocks of this cache."""
        return new_rows(num_rows, self.num_block_bytes, is_pinned=not self.is_on_host)

    def read(self, block_ids: Sequence[int], rows: Sequence[Row], after: "torch.cuda.Event | None") -> None:
        """Copy blocks to rows."""
        if self.is_on_host:
            for block_id, row in zip(block_ids, rows, strict=True):
                row[:] = self._rows[block_id]
            return
        with self._staging(self._read_stream, len(block_ids), after) as staging:
            self._kv_cache.gather_blocks(torch.tensor(block_ids), staging)
            for index, row in enumerate(rows):
                torch.from_numpy(row).copy_(staging[index], non_blocking=True)

    def write(self, block_ids: Sequence[int], rows: Sequence[Row], after: "torch.cuda.Event | None") -> None:
        """Copy rows to blocks."""
        if self.is_on_host:
            for block_id, row in zip(block_ids, rows, strict=True):
                self._rows[block_id] = row
            return
        with self._staging(self._write_stream, len(block_ids), after) as staging:
            for index, row in enumerate(rows):
                staging[index].copy_(torch.from_numpy(row), non_blocking=True)
            self._kv_cache.scatter_blocks(torch.tensor(block_ids), staging)

    def rows_of(self, block_ids: Sequence[int]) -> list[Row]:
        """Return the blocks themselves as rows: writing to the rows writes to the blocks. Only on a CPU."""
        return [self._rows[block_id] for block_id in block_ids]

    @contextmanager
    def _staging(
        self, stream: torch.cuda.Stream, num_blocks: int, after: "torch.cuda.Event | None"
    ) -> Iterator[Tensor]:
        """Give a buffer on the device, within this context and its stream. At the end, wait for the stream's work.

        After an error, too: the caller may then reuse its rows and blocks, so nothing may still copy them.
        """
        device = self._kv_cache.keys[0].device
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                if after is not None:
                    stream.wait_event(after)
                yield torch.empty(num_blocks, self.num_block_bytes, dtype=torch.uint8, device=device)
            finally:
                stream.synchronize()


class Staging:
    """Host rows that one thread uses between a device and a place. They are allocated when first needed."""

    def __init__(self, blocks: BlockBytes) -> None:
        self._blocks = blocks
        self._memory: Row | None = None

    def rows(self, number: int) -> list[Row]:
        """Return `number` rows. They are the same ones in each call, unless more are asked for than ever before."""
        if self._memory is None or len(self._memory) < number:
            self._memory = self._blocks.new_rows(number if self._memory is None else max(number, 2 * len(self._memory)))
        return [*self._memory[:number]]
