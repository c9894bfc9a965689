"""Runs mypy on kvblocks as it ships, with the folder kernels/ as kvblocks.kernels.

mypy follows the file system and ignores setuptools' package-dir, so it gets a tree of links in the shape that ships.
Paths in its messages are converted back to the repository's. Arguments are passed on to mypy. It has a separate cache,
since a plain `mypy FILE` in the checkout leaves one in which kvblocks has no kernels.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_shipped_tree(destination: Path) -> None:
    """Make `destination`/kvblocks, whose entries are links to the sources. Writes nowhere else."""
    package = destination / "kvblocks"
    package.mkdir()
    for entry in (ROOT / "kvblocks").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    (package / "kernels").symlink_to(ROOT / "kernels", target_is_directory=True)


def main() -> int:
    """Run mypy and return its exit status."""
    with tempfile.TemporaryDirectory(prefix="kvblocks-types-") as folder:
        link_shipped_tree(Path(folder))
        command = [
            *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
            *("--cache-dir", str(ROOT / ".mypy_cache" / "shipped"), *sys.argv[1:], "-p", "kvblocks"),
        ]
        result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    print(re.sub(r"^kvblocks/kernels/", "kernels/", result.stdout, flags=re.MULTILINE), end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
