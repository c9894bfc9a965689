"""Reads how much memory the KV cache may take: a number of bytes, a text such as "2GiB", or a share of what is free."""

import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from kvblocks.engine.run.container import free_in_container
from kvblocks.errors import InvalidArgumentError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
HOST_BYTES_A_BLOCK = 128
"""An estimate of the host memory that the manager uses per block, in bytes (120 were measured)."""

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", re.IGNORECASE)


def read_memory(budget: float | str, device: torch.device, name: str = "kv_cache_memory") -> int:
    """Return `budget` in bytes.

    An int: bytes. A text: a number with a unit, B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024). A
    float above 0 and at most 1: that share of the memory that is free on `device` now. On a CPU this is what Linux
    calls available, or what the container's limit leaves if that is less. name: the argument's name in errors.

    Raises InvalidArgumentError for anything else, and for a share if the system doesn't say what is free.
    """
    if isinstance(budget, str):
        match = _TEXT.fullmatch(budget)
        num_bytes = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(budget, float):
        num_bytes = int(budget * free_memory(device)) if 0 < budget <= 1 else 0
    else:
        num_bytes = budget if isinstance(budget, int) and not isinstance(budget, bool) else 0
    if num_bytes < 1:
        raise InvalidArgumentError(
            f"{name}: expected bytes (an int, or a text such as '2GiB') or a share of what is free (a float"
            f" above 0, at most 1), got {budget!r}"
        )
    return num_bytes


def check_memory(name: str, num_bytes: int, num_blocks: int, device: torch.device) -> None:
    """Raise InvalidArgumentError if a pool of `num_bytes` and `num_blocks` takes more memory than is free now. O(1).

    name: the argument that determines the size, for the error. Without information about free memory, nothing is
    checked.
    """
    try:
        free = free_memory(device)
        free_on_host = free if device.type == "cpu" else free_memory(torch.device("cpu"))
    except InvalidArgumentError:
        return
    num_host_bytes = num_blocks * HOST_BYTES_A_BLOCK
    needed = num_bytes + num_host_bytes if device.type == "cpu" else num_bytes
    if needed > free or num_host_bytes > free_on_host:
        where = "host memory" if needed <= free or device.type == "cpu" else f"memory of {device}"
        least, most = (num_host_bytes, free_on_host) if needed <= free else (needed, free)
        raise InvalidArgumentError(
            f"{name}: expected a KV cache within the {show_bytes(most)} of {where} that are free, got {num_blocks}"
            f" blocks, which take {show_bytes(least)}"
        )


def show_bytes(num_bytes: int) -> str:
    """A number of bytes as a readable text."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device. Raises InvalidArgumentError if the system doesn't say. O(1)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    on_machine, in_container = _free_on_machine(), free_in_container()
    return on_machine if in_container is None else min(on_machine, in_container)


def measure_taken(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes of a device's memory that `run` takes at once, whether it gives them back or not.

    The result of `run` is kept until the bytes are counted. torch keeps what it has taken from a GPU for later tensors,
    so what is free after `run` is what was free at its peak. torch's own count is also read, since torch gives memory
    back when it runs short. What other processes take meanwhile counts as well. Raises what `run` raises. At the end
    torch returns unused memory to the device.
    """
    _give_back(device)
    free, reserved = free_memory(device), _most_reserved(device)
    kept = run()
    taken = max(free - free_memory(device), _most_reserved(device) - reserved, 0)
    del kept
    _give_back(device)
    return taken


def _most_reserved(device: torch.device) -> int:
    """The most bytes that torch has taken from a GPU since `_give_back`, kept ones included."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # "kB" means KiB in this file
    except OSError:
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError) as error:
        raise InvalidArgumentError(
            "kv_cache_memory: expected bytes on this system, which doesn't say how much memory is free"
        ) from error
