"""Bytes per block of an empty pool and of a pool whose blocks are all cached. Each contestant has its own process.

    python -m bench.core.memory vllm        prints {"empty": ..., "cached": ...}

This is resident memory. It includes what allocators round up, and modules that are loaded only when the pool is made.
"""

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from bench.core.workload import POOL_BLOCKS


def resident_bytes() -> int:
    """Return the process's resident memory, after giving back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def measure_here(name: str) -> dict[str, float]:
    """Return contestant `name`'s bytes per block, measured in this process."""
    from bench.core.ours import Ours
    from bench.peers import load

    driver = Ours() if name == "kvblocks" else load(name)
    before = resident_bytes()
    pool = driver.hold_empty_pool()
    if pool is None:
        sys.exit(f"{driver.label} has no pool of blocks")
    empty = resident_bytes()
    driver.fill(pool)
    cached = resident_bytes()
    return {"empty": (empty - before) / POOL_BLOCKS, "cached": (cached - before) / POOL_BLOCKS}


def measure_memory(name: str) -> dict[str, float] | str:
    """Return contestant `name`'s bytes per block, measured in a separate process, or why there are none."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.core.memory", name]
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["?"])[-1]
    measured: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1])))
