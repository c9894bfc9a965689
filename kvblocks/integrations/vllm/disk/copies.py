"""`Copies`: threads that move bytes between vLLM's host memory and a `DiskStore`, and sync the store.

A copy moves one block, and isn't interrupted. A shutdown waits for running copies, and drops those that haven't begun.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvblocks import BlockIdentity
from kvblocks.integrations.vllm.disk.nowhere import Nowhere
from kvblocks.tiers.disk import DiskError, DiskStore

_SYNC_SECONDS = 1.0  # so many seconds of work may be lost by a kill or a loss of power
_USES_EVERY = 10  # the order of use alone is synced only every so many times


@dataclass(frozen=True)
class Part:
    """A block to move: its place in host memory, its slot on the disk, and its identity."""

    chunk_id: int
    slot: int
    identity: BlockIdentity


@dataclass(frozen=True)
class Copied:
    """The result of a job: how many leading parts were moved, and how many seconds that took."""

    number: int
    seconds: float


class Copies:
    """Threads that use a store; `stop` ends them. memory: the host memory as bytes, num_block_bytes per block."""

    def __init__(
        self, store: DiskStore | Nowhere, memory: memoryview, num_block_bytes: int, num_threads: tuple[int, int]
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
        """Fill host memory, up to the first block that can't be read or verified. Raises RuntimeError after `stop`."""
        return self._readers.submit(self._move, parts, self._read)

    def store(self, parts: Sequence[Part]) -> Future[Copied]:
        """Write blocks to the disk, up to the first that can't be written. Raises RuntimeError after `stop`."""
        return self._writers.submit(self._move, parts, self._write)

    def _move(self, parts: Sequence[Part], move: Any) -> Copied:
        start, number = time.monotonic(), 0
        for part in parts:
            place = self._memory[part.chunk_id * self._size : (part.chunk_id + 1) * self._size]
            with place:  # released at once: otherwise vLLM could not free its memory
                if self._is_stopping.is_set() or not move(part, place):
                    break
            number += 1
        return Copied(number, time.monotonic() - start)

    def _read(self, part: Part, place: memoryview) -> bool:
        try:
            return self._store.read([part.slot], [part.identity], place) == 1
        except DiskError:  # the store was closed; a wrong block doesn't raise: the store counts and logs it
            return False

    def _write(self, part: Part, place: memoryview) -> bool:
        try:
            self._store.write([part.slot], [part.identity], place)
        except DiskError:  # counted and logged by the store
            return False
        return True

    def _keep_syncing(self) -> None:
        number = 0
        while not self._is_stopping.wait(_SYNC_SECONDS):
            number += 1
            if self._store.needs_sync or (self._store.has_uses and not number % _USES_EVERY):
                with suppress(DiskError):  # counted and logged by the store; the next sync tries again
                    self._store.sync()

    def stop(self) -> None:
        """Wait for the blocks that are being moved, and drop the others. A second call does nothing."""
        self._is_stopping.set()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._syncer.join()
