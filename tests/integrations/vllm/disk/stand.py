"""What the tests of the tier share: a tier as vLLM makes it, in front of memory that takes the host's place."""

import hashlib
import os
from typing import Any, Self

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvblocks.integrations.vllm as adapter
from kvblocks.integrations.vllm.disk import DiskTier

CHUNK_BYTES = 16384
NUM_CHUNKS = 8
MAX_BYTES = 2**22
CONTEXT = ReqContext(req_id="any")
END = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())


def begin_hashing(algorithm: str = "sha256") -> None:
    """Let vLLM begin to hash, as its engine core does behind its scheduler."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))


def make_spec(**more: Any) -> TieringOffloadingSpec:
    """Return vLLM's own offloading of a model of two layers. more: secondary_tiers, or what its model is."""
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel |= {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    parallel |= {"is_parallelism_agnostic": True} | more.get("parallel", {})
    return TieringOffloadingSpec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(more.get("tokens_per_block", 16), ("layer0", "layer1"), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=more.get("events", False),
            extra_config={"cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES, "secondary_tiers": more.get("tiers", [])},
            engine_id=f"kvblocks-{os.getpid()}-{id(more)}",
            model=config.OffloadingModelConfig(more.get("model", "some/model"), more.get("dtype", "float16")),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=config.OffloadingParallelConfig(**parallel),
            kv_cache_layout=more.get("layout"),
        )
    )


def named(folder: Any, **options: Any) -> dict[str, Any]:
    """Return the tier's part of vLLM's configuration."""
    module = adapter.__name__
    return {"type": "DiskTier", "module_path": module, "root_dir": str(folder), "max_bytes": MAX_BYTES} | options


def key_of(number: int) -> bytes:
    """Return a key as vLLM makes them: a hash, and the number of a group."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def bytes_of(key: bytes, size: int = CHUNK_BYTES) -> bytes:
    """Return the bytes that stand for a key's KV."""
    return hashlib.shake_128(key).digest(size)


class Stand:
    """A tier, and the memory that it copies from and to."""

    def __init__(self, folder: Any, num_chunks: int = NUM_CHUNKS, spec: Any = None, **options: Any) -> None:
        self.memory = bytearray(num_chunks * CHUNK_BYTES)
        view = memoryview(self.memory).cast("B", (num_chunks, CHUNK_BYTES))
        chosen = {"root_dir": str(folder), "max_bytes": MAX_BYTES, **options}
        self.tier = DiskTier(spec or make_spec(), view, "DiskTier", **chosen)
        self.disk = self.tier._store  # noqa: SLF001
        self.slots = self.tier._slots  # noqa: SLF001
        self.num_jobs = 0
        self.gates: list[Any] = []  # that hold its copies; they open before it shuts down, or a test that fails hangs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.gates:
            gate.go_on.release(1000)
        self.tier.shutdown()

    def job(self, keys: list[bytes], *, is_load: bool, chunk_ids: list[int] | None = None) -> TransferJob:
        self.num_jobs += 1
        return TransferJob(self.num_jobs, keys, chunk_ids or list(range(len(keys))), is_load, CONTEXT)

    def begin_store(self, keys: list[bytes], place: int = 0) -> None:
        """Put bytes into the memory, from a place on, and submit a job that stores them."""
        self.memory[place * CHUNK_BYTES : (place + len(keys)) * CHUNK_BYTES] = b"".join(map(bytes_of, keys))
        self.tier.submit_store(self.job(keys, is_load=False, chunk_ids=list(range(place, place + len(keys)))))

    def store(self, *numbers: int) -> Any:
        """Store keys, and return the job's result."""
        self.begin_store([key_of(number) for number in numbers])
        return self.ended()

    def load(self, *numbers: int) -> Any:
        """Load keys into memory that was cleared, compare what arrived, and return the job's result."""
        keys = [key_of(number) for number in numbers]
        self.memory[:] = bytes(len(self.memory))
        self.tier.submit_load(self.job(keys, is_load=True))
        result = self.ended()
        arrived = keys if result.success else result.successful_keys or ()
        for place, key in enumerate(keys):
            if key in arrived:
                assert self.memory[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES] == bytes_of(key)
        return result

    def ended(self) -> Any:
        """Wait, and return the only job's result."""
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.num_jobs
        return result

    def has(self, *numbers: int) -> list[str]:
        """Return what a lookup says of each."""
        return [self.tier.lookup(key_of(number), CONTEXT).name for number in numbers]
