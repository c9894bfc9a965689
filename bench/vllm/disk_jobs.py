"""What `bench.vllm.disk_tier` times: jobs of three tiers below vLLM's host memory."""

import mmap
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvblocks.integrations.vllm import DiskTier

JOB_BYTES = 2**26
OURS, THEIRS, BUFFERED = "kvblocks", "vLLM's files", "vLLM's files, page cache"
CONTEXT = ReqContext(req_id="bench")


def make_spec() -> Any:
    """Return the part of vLLM's configuration that the tiers read."""
    spec = MagicMock()
    spec.config = config.OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=config.OffloadingModelConfig(name="bench", dtype="float16"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
    )
    spec.blocks_per_chunk = 1
    spec.kv_events_config = OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False)
    return spec


class Bench:
    """The three tiers over one host memory, for chunks of one size."""

    def __init__(self, folder: Path, num_chunk_bytes: int, num_threads: int) -> None:
        kv_cache_utils.init_none_hash(sha256)
        self.number = JOB_BYTES // num_chunk_bytes
        pages = mmap.mmap(-1, JOB_BYTES)  # O_DIRECT needs memory in whole pages
        self.memory = torch.frombuffer(pages, dtype=torch.int8).view(self.number, num_chunk_bytes)
        self.memory.random_(-128, 127)
        view = memoryview(self.memory.numpy())
        threads = {"n_read_threads": num_threads, "n_write_threads": num_threads}
        most = {"max_bytes": 40 * JOB_BYTES}
        self.tiers: dict[str, Any] = {
            OURS: DiskTier(make_spec(), view, OURS, root_dir=str(folder / "ours"), **most, **threads),
            THEIRS: FileSystemTierManager(make_spec(), view, THEIRS, root_dir=str(folder / "theirs"), **threads),
            BUFFERED: FileSystemTierManager(make_spec(), view, BUFFERED, root_dir=str(folder / "cached"), **threads),
        }
        self.tiers[BUFFERED]._use_o_direct = False  # noqa: SLF001
        self.num_jobs = 0

    def time(self, name: str, keys: list[Any], *, is_load: bool) -> float:
        """Store or load all chunks in two jobs, so that several threads have work. Returns MB/s."""
        tier = self.tiers[name]
        start, half = perf_counter(), self.number // 2
        for places in (range(half), range(half, self.number)):
            self.num_jobs += 1
            own = [keys[place] for place in places]
            job = TransferJob(self.num_jobs, own, list(places), is_load, CONTEXT)
            (tier.submit_load if is_load else tier.submit_store)(job)
        tier.drain_jobs()
        results = list(tier.get_finished_jobs())
        seconds = perf_counter() - start
        if len(results) != 2 or not all(result.success for result in results):
            raise RuntimeError(f"{name}: expected two jobs that succeed, got {results}")
        return JOB_BYTES / seconds / 1e6

    def round(self, number: int) -> dict[tuple[str, str], float]:
        """Store new keys in each tier and load them again. Returns MB/s by tier and call."""
        keys = [make_offload_key(sha256((number, place)), 0) for place in range(self.number)]
        order = list(self.tiers)[:: -1 if number % 2 else 1]
        found = {}
        for call in ("store", "load"):
            for name in order:
                kept = self.memory.clone()
                if call == "load":
                    self.memory.zero_()
                found[name, call] = self.time(name, keys, is_load=call == "load")
                if not torch.equal(self.memory, kept):
                    raise RuntimeError(f"{name}: what was loaded is not what was stored")
        return found

    def close(self) -> None:
        """Close the tiers."""
        for tier in self.tiers.values():
            tier.shutdown()
