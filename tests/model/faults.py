"""Faults of the code that tests must find, or the tests would prove nothing.

A fault is a list of changes of the sources. `first_failure` makes them in a copy of the package, and runs tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Change = tuple[str, str, str]
"""A file below kvblocks/, a text that it has once, and what replaces it."""


def changed(name: str, changes: list[Change]) -> dict[str, str]:
    """Return the sources that a fault changes, by file. Raises AssertionError if a text isn't there once."""
    sources: dict[str, str] = {}
    for file, text, replacement in changes:
        source = sources.get(file) or (ROOT / "kvblocks" / file).read_text()
        assert source.count(text) == 1, f"{name}: {file} has {source.count(text)} times: {text}"
        sources[file] = source.replace(text, replacement)
    return sources


def first_failure(name: str, changes: list[Change], tests: tuple[str, ...]) -> str:
    """Run those of the tests that `make test` runs, with a fault; return which failed first, "" if none did."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvblocks"
        # With their pyc files, so that only what is changed is compiled.
        shutil.copytree(ROOT / "kvblocks", package, ignore=shutil.ignore_patterns("*.so"))
        for file, source in changed(name, changes).items():
            (package / file).write_text(source)
        # -P: without it the folder where this runs comes before the copy.
        pytest = [sys.executable, "-P", "-m", "pytest", "-n", "0", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command = [*pytest, "-m", "not exhaustive", *tests]
        environment = os.environ | {"PYTHONPATH": folder}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        assert done.returncode == 1 and failed, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return failed[0].removeprefix("FAILED ")


def find_all(faults: dict[str, list[Change]], tests: tuple[str, ...]) -> int:
    """Say of each fault whose name has all words of the command line what found it; return the exit status."""
    chosen = [name for name in faults if all(word in name for word in sys.argv[1:])]
    survivors: list[str] = []
    for number, name in enumerate(chosen, 1):
        start = time.monotonic()
        found = first_failure(name, faults[name], tests)
        survivors += [name] * (not found)
        print(f"{number} {name}: {time.monotonic() - start:.0f} s, {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} were found")
    return bool(survivors)
