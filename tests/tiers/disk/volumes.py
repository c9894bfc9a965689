"""Real small file systems for tests, where this process may mount them."""

import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

KINDS = ("tmpfs", "ext4")


@contextmanager
def mounted(folder, kind, num_bytes):
    """Mount a file system of a size at a folder, within this context. Skips the test where that isn't allowed."""
    folder.mkdir()
    device = "tmpfs"
    options = ["-o", f"size={num_bytes}"]
    try:
        if kind == "ext4":
            device = str(folder.with_suffix(".image"))
            with Path(device).open("wb") as image:
                image.truncate(num_bytes)
            run("mkfs.ext4", "-q", "-m", "0", device)
            options = ["-o", "loop"]
        run("mount", "-t", kind, *options, device, str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{kind} can't be mounted here: {error}")
    try:
        yield folder
    finally:
        run("umount", "-l", str(folder))


def run(*command):
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": path})


def fill_up(folder):
    """Fill a file system to its last byte, with a file that isn't ours."""
    os.sync()  # what was written before has its place from now on
    descriptor = os.open(folder / "filler", os.O_RDWR | os.O_CREAT, 0o600)
    for size in (2**20, 2**16, 4096):
        with suppress(OSError):
            while True:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
    os.close(descriptor)
