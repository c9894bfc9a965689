"""A whole vLLM on a CPU with the tier below its host memory: `python -m integrations.vllm.disk.engine REQUEST`.

vLLM's own worker copies between a GPU and the host, and refuses a CPU. `CPUTieringSpec` is vLLM's spec with one that
copies by torch instead; all else is vLLM's: scheduler, connector, manager of tiers, the memory that they share.
REQUEST is a JSON object with the fields of `Run`. The answer is a line of JSON behind MARK: tokens and hits by prompt.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

MARK = "answer: "
ROOT = Path(__file__).resolve().parents[4]
TIMEOUT = 600
NUM_PROMPTS, PROMPT_TOKENS, BLOCK = 6, 200, 32

if os.environ.get("KVBLOCKS_TIERED"):
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class CopyingWorker(OffloadingWorker):
        """Copies at once between the blocks of a CPU's KV cache and the memory that the scheduler's side shares."""

        def __init__(self, caches: Any, region: Any) -> None:
            self.region = region
            self.blocks = [cache.tensor for cache in caches.tensors]
            self.chunks = [region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors]
            self.ended: list[Any] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, (self.blocks, src_spec.block_ids), (self.chunks, dst_spec.chunk_ids))

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, (self.chunks, src_spec.chunk_ids), (self.blocks, dst_spec.block_ids))

        def _copy(self, job_id: int, source: Any, target: Any) -> bool:
            for from_tensor, to_tensor in zip(source[0], target[0], strict=True):
                for from_id, to_id in zip(source[1], target[1], strict=True):
                    to_tensor[int(to_id)].copy_(from_tensor[int(from_id)])
            self.ended.append(TransferResult(job_id, True))
            return True

        def get_finished(self) -> list[Any]:
            found, self.ended = self.ended, []
            return found

        def wait(self, job_ids: set[int]) -> None:
            """They have ended."""

        def shutdown(self) -> None:
            self.blocks, self.chunks = [], []
            self.region.cleanup()

    class CPUTieringSpec(TieringOffloadingSpec):
        """vLLM's spec, and that worker."""

        def get_worker(self, kv_caches: Any) -> Any:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            return CopyingWorker(kv_caches, region)


@dataclass(frozen=True, slots=True)
class Run:
    """What to run. folder: the tier's; None: no offloading. is_plain: vLLM's own spec. algorithm: of vLLM's hashes."""

    model: str
    folder: str | None = None
    scheduler: str | None = None
    is_plain: bool = False
    algorithm: str = "sha256"

    def start(self) -> dict[str, Any]:
        """Return the answer of a process of its own. Raises RuntimeError with the end of what it printed."""
        path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "KVBLOCKS_TIERED": "1",
        }
        command = [sys.executable, "-m", "integrations.vllm.disk.engine", json.dumps(asdict(self))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise RuntimeError(f"the engine ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")

    def transfer(self) -> dict[str, Any] | None:
        """Return what --kv-transfer-config says."""
        if self.folder is None:
            return None
        module = "kvblocks.integrations.vllm"
        tier = {"type": "DiskTier", "module_path": module, "root_dir": self.folder, "max_bytes": 2**26}
        extra = {"cpu_bytes_to_use": 2**18, "secondary_tiers": [tier], "spec_name": "TieringOffloadingSpec"}
        if not self.is_plain:
            extra |= {"spec_name": "CPUTieringSpec", "spec_module_path": "integrations.vllm.disk.engine"}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def main(run: Run) -> None:
    """Run the engine, and print the answer."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=run.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=256,
        num_gpu_blocks_override=20,
        scheduler_cls=run.scheduler,
        kv_transfer_config=run.transfer(),
        prefix_caching_hash_algo=run.algorithm,
        disable_log_stats=True,
        seed=0,
    )
    random = Random(7)
    prompts = [[random.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    answer: dict[str, Any] = {"tokens": [], "cached": []}
    for prompt in prompts * 2:  # one after the other; the pool holds less than three of them
        given: Any = {"prompt_token_ids": prompt}
        (output,) = model.generate([given], params, use_tqdm=False)
        answer["tokens"].append(list(output.outputs[0].token_ids))
        answer["cached"].append(output.num_cached_tokens)
    core: Any = model.llm_engine.engine_core.engine_core
    if run.folder is not None:
        manager = core.scheduler.connector.connector_scheduler.manager
        deadline = time.monotonic() + 30
        while manager.has_pending_work() and time.monotonic() < deadline:
            core.step()
        (tier,) = manager.secondary_tiers
        stats = tier._store.stats  # noqa: SLF001
        answer |= {"written": stats.num_written_blocks, "read": stats.num_read_blocks, "bad": stats.num_damaged_blocks}
    core.shutdown()
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
