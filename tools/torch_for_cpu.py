"""Prints the arguments that make pip take the CPU build of torch, for the Makefile, or nothing if none are needed.

On Linux, PyPI's torch brings CUDA, which is several GB. This asks pip what it would install (`--dry-run`). If that
includes CUDA and this machine has no NVIDIA GPU, the index of PyTorch's CPU builds is named, and a line on stderr says
so. The script's arguments are passed on to pip; if one names an index, that decides.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def has_nvidia_gpu() -> bool:
    """Whether NVIDIA's driver is installed."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def brings_cuda(arguments: list[str]) -> bool:
    """Whether pip would install CUDA packages with torch. False if pip fails, as the installation will report it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--disable-pip-version-check", "-c", str(CONSTRAINTS), *arguments, "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        names = [entry["metadata"]["name"] for entry in json.loads(done.stdout)["install"]]
    except (json.JSONDecodeError, KeyError):
        return False
    return any(name.lower().startswith(("nvidia-", "cuda-")) for name in names)


def main(arguments: list[str]) -> None:
    """Print the arguments that pip needs."""
    names_index = any("index" in argument for argument in arguments)
    if names_index or not sys.platform.startswith("linux") or has_nvidia_gpu() or not brings_cuda(arguments):
        return
    print(f"no NVIDIA GPU is here, so torch's CPU build is installed, from {CPU_INDEX}", file=sys.stderr)
    print("--extra-index-url", CPU_INDEX)


if __name__ == "__main__":
    main(sys.argv[1:])
