"""The conditions of a measurement, which are printed and kept with every result."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kvblocks
from bench.core.ours import is_compiled
from bench.core.workload import BLOCK_SIZE, POOL_BLOCKS

UNJUDGED = "No target was judged: this run is too small to say whether one is met."
"""What a bench with targets prints after a run that is made to see that it runs, such as one with --quick."""


def cpu_model() -> str:
    """Return the processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def source() -> str:
    """Return where the measured kvblocks comes from."""
    here = Path(__file__).resolve().parent.parent
    return "checkout" if Path(kvblocks.__file__).resolve().is_relative_to(here / "kvblocks") else "installed"


def gpu_state() -> str:
    """Return the GPUs' driver, current clocks and power limit, as far as nvidia-smi says them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip().replace("\n", "; ") or "unknown"


def conditions(**more: object) -> dict[str, object]:
    """Return the conditions that the numbers depend on, and `more` that the bench adds."""
    return {
        "kvblocks": kvblocks.__version__,
        "build": "compiled" if is_compiled() else "plain",
        "source": source(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "num_blocks": POOL_BLOCKS,
        "block_size": BLOCK_SIZE,
        "collector": "collected, frozen and off while timing",
        **more,
    }


def print_conditions(facts: dict[str, object], *, quiet: bool = False) -> None:
    """Print one condition a line; on stderr when the results themselves go to stdout as JSON."""
    for name, value in facts.items():
        print(f"# {name}: {value}", file=sys.stderr if quiet else sys.stdout, flush=True)


def keep(path: Path | None, facts: dict[str, object], results: Sequence[object], **more: object) -> None:
    """Write results and their conditions to a file, if one was named, as the files in bench/results/ are.

    The file is replaced atomically, so a bench may write it again after each result.
    """
    if path is not None:
        kept = {"conditions": facts, "results": results, **more}
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
