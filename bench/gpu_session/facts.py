"""The item `facts`: the machine's hardware and software, and how fast it copies and multiplies."""

import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_session.cases import Case, Facts

GEMM_SIZE = 8192
_PACKAGES = {
    name: {"xdist": "pytest-xdist", "flashinfer": "flashinfer-python", "fla": "fla-core"}.get(name, name)
    for name in (
        *("torch", "triton", "numpy", "pytest", "xdist", "hypothesis", "transformers"),
        *("flash_attn", "flashinfer", "fla", "mamba_ssm"),
    )
}
"""Distributions, by the names of what they contain."""
_TOOLS = ("gcc", "nvcc", "ptxas", "nvidia-smi", "compute-sanitizer", "ncu", "cuobjdump")


def cases(*, is_rehearsal: bool) -> Iterator[Case]:
    """Yield the cases, cheap ones first."""
    yield "versions", versions
    yield "tools", tools
    if not is_rehearsal:
        yield "device", device
        yield "copy", copy
        yield "matrix product", matrix_product


def versions() -> Facts:
    """The versions of Python and of packages; None for those that aren't installed."""
    from importlib.metadata import PackageNotFoundError, version

    from bench.conditions import cpu_model

    found: Facts = {"python": platform.python_version(), "kernel": platform.release(), "cpu": cpu_model()}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    return found


def tools() -> Facts:
    """Return the paths of tools, whether Python.h exists, and the device files."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    devices = sorted(map(str, Path("/dev").glob("nvidia*")))
    return {**{name: shutil.which(name) for name in _TOOLS}, "Python.h": header.is_file(), "devices": devices}


def device() -> Facts:
    """What the driver says about the device."""
    import torch

    from bench.conditions import gpu_state

    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": found.name,
        "capability": torch.cuda.get_device_capability(),
        "sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "free_bytes": free,
        "total_bytes": total,
        "cuda": torch.version.cuda,
        "driver, clocks and power": gpu_state(),
    }


def copy() -> Facts:
    """Bytes per second of a copy on the device, counting bytes read and written."""
    import torch

    from bench.attention.timing import copy_bandwidth

    return {"bytes_per_second": round(copy_bandwidth(torch.device("cuda")))}


def matrix_product() -> Facts:
    """Operations per second of a product of square matrices in bf16."""
    import torch

    from bench.attention.timing import time_calls

    first = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
    timing = time_calls([lambda: first @ first])
    return {"flops_per_second": round(2 * GEMM_SIZE**3 / (timing.median * 1e-6)), "median_us": timing.median}
