"""A plugin of pytest for vLLM's own tests of tiers: puts `DiskTier` in the places of vLLM's example and file tier.

It is loaded before any test is imported. Each replacement takes the same options as the tier that it replaces, and has
the attributes that tests read.
"""

import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from integrations.vllm.disk.stand import make_spec
from integrations.vllm.swap import pytest_runtest_logreport, pytest_sessionfinish
from kvblocks.integrations.vllm.disk import DiskTier
from kvblocks.integrations.vllm.disk.naming import identity_of

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]

kv_cache_utils.init_none_hash(sha256)  # as an engine core does before its first request


class Chunks:
    """The example tier's mapping of keys, to which a test may add some."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def __setitem__(self, key: bytes, value: object) -> None:
        slots, store = self._tier._slots, self._tier._store  # noqa: SLF001
        ((entry,), _) = slots.reserve([key])
        store.write([entry.slot], [identity_of(key)], bytes(self._tier.block_size_bytes))
        entry.is_stored = True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._tier._slots._entries)  # noqa: SLF001

    def __contains__(self, key: bytes) -> bool:
        entry = self._tier._slots.find(key)  # noqa: SLF001
        return entry is not None and entry.is_stored

    def __len__(self) -> int:
        return len(self._tier._slots)  # noqa: SLF001


class AtOnce(DiskTier):
    """Replaces the example tier. A job has ended when the call that submits it returns. The medium is memory."""

    medium = Medium.CPU

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, **options: Any) -> None:
        options.pop("custom_param", None)
        self.folder = tempfile.TemporaryDirectory()
        if not isinstance(primary_kv_view, memoryview):  # a mock, in tests of the factory
            primary_kv_view = memoryview(bytearray(64)).cast("B", (4, 16))
        chosen = {"root_dir": self.folder.name, "max_bytes": 2**22, **options}
        del offloading_spec  # a mock
        super().__init__(make_spec(), primary_kv_view, tier_type, **chosen)
        self.chunks = Chunks(self)
        self.completed_jobs: list[Any] = []

    def submit_store(self, job_metadata: Any) -> None:
        """Store, and wait until the job has ended."""
        super().submit_store(job_metadata)
        self._end()

    def submit_load(self, job_metadata: Any) -> None:
        """Load, and wait until the job has ended."""
        super().submit_load(job_metadata)
        self._end()

    def _end(self) -> None:
        DiskTier.drain_jobs(self)
        self.completed_jobs += super().get_finished_jobs()

    def get_finished_jobs(self) -> list[Any]:
        """Return the jobs that have ended. A test may have changed them."""
        found, self.completed_jobs = self.completed_jobs, []
        return found

    def get_num_chunks(self) -> int:
        """As the example's."""
        return len(self.chunks)


class Nothing:
    """Replaces the file tier's lookups in threads. Ours have no threads, so there is nothing to wait for."""

    _lookup_batch: ClassVar[list[Any]] = []
    _pending_results = type("Results", (), {"empty": staticmethod(lambda: False)})


class Files(DiskTier):
    """Replaces the file tier."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **{"max_bytes": 2**26, **options})
        self._lookup_manager = Nothing()
        self._use_o_direct = False
        self._store_job_keys: dict[int, Any] = {}

    @property
    def file_mapper(self) -> Any:
        """Like the file tier's, it gives the file of a key. Here all keys are in one file."""
        folder = self._store._folder.path  # noqa: SLF001
        return SimpleNamespace(get_file_name=lambda _: str(folder / "kvblocks.arena"), base_path=str(folder))

    @property
    def events(self) -> Any:
        """As the file tier's."""
        return self._events


example.ExampleSecondaryTierManager = AtOnce
fs.FileSystemTierManager = Files
