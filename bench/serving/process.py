"""Starts a server for a bench."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Start `kvblocks serve` on a free port, yield its URL and process id, and stop it at the end."""
    command = [sys.executable, "-m", "kvblocks", "serve", "--model", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r" at (http://\S+)/v1$", line.rstrip())
            if found:
                yield found[1], process.pid
                break
        else:
            raise RuntimeError(f"{' '.join(command)}: ended with status {process.wait()} before it served")
    finally:
        process.terminate()
        process.communicate(timeout=300)
