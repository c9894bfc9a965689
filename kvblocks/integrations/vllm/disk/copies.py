"""`Copies`: the threads that move bytes between vLLM's host memory and a `DiskStore`, and put them on the disk.

A copy is a block's. It runs to its end, or to the error that ended it: whoever shuts down waits for those that run, and
those that have not begun are dropped.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvblocks import BlockIdentity
from kvblocks.tiers.disk import DiskError, DiskStore

_SYNC_SECONDS = 1.0  # what a kill or a loss of power may cost


@dataclass(frozen=True)
class Part:
    """A block to be moved: its place in the host's memory, its slot on the disk, and who it is."""

    chunk_id: int
    slot: int
    identity: BlockIdentity


@dataclass(frozen=True)
class Copied:
    """What became of a job: how many first parts were moved, and the seconds that it took."""

    number: int
    seconds: float


class Copies:
    """Threads around a store, which they close. memory: of the host, num_block_bytes a block, as one row of bytes."""

    def __init__(
        self, store: DiskStore, memory: memoryview, num_block_bytes: int, num_threads: tuple[int, int]
    ) -> None:
        self._store = store
        self._memory = memory
        self._size = num_block_bytes
        self._is_stopping = threading.Event()
        readers, writers = num_threads
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kvblocks_disk_load")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="kvblocks_disk_store")
        self._syncer = threading.Thread(target=self._keep_syncing, name="kvblocks_disk_sync", daemon=True)
        self._syncer.start()

    def load(self, parts: Sequence[Part]) -> Future[Copied]:
        """Fill the host's memory, until the first block that is not right. Raises RuntimeError after `close`."""
        return self._readers.submit(self._move, parts, self._read)

    def store(self, parts: Sequence[Part]) -> Future[Copied]:
        """Write blocks, until the first that can't be written. Raises RuntimeError after `close`."""
        return self._writers.submit(self._move, parts, self._write)

    def _move(self, parts: Sequence[Part], move: Any) -> Copied:
        start, number = time.monotonic(), 0
        for part in parts:
            place = self._memory[part.chunk_id * self._size : (part.chunk_id + 1) * self._size]
            with place:  # or vLLM could not let go of its memory
                if self._is_stopping.is_set() or not move(part, place):
                    break
            number += 1
        return Copied(number, time.monotonic() - start)

    def _read(self, part: Part, place: memoryview) -> bool:
        try:
            return self._store.read([part.slot], [part.identity], place) == 1
        except DiskError:  # it was closed; what isn't right is counted and logged by the store, and not raised
            return False

    def _write(self, part: Part, place: memoryview) -> bool:
        try:
            self._store.write([part.slot], [part.identity], place)
        except DiskError:  # counted and logged by the store
            return False
        return True

    def _keep_syncing(self) -> None:
        while not self._is_stopping.wait(_SYNC_SECONDS):
            if self._store.needs_sync:
                try:
                    self._store.sync()
                except DiskError:  # likewise; the next one tries again
                    continue

    def stop(self) -> None:
        """Wait for the blocks that are being moved; drop what has not begun. Does nothing the second time."""
        self._is_stopping.set()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._syncer.join()
