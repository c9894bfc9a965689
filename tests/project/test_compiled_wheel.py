"""The compiled wheel's contents, and what is built where there is no C compiler.

`make test-compiled` runs what is compiled, and test_build.py has a C compiler that fails on one small file.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Compiling takes a minute on a quiet core, and several on a busy one.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


def build_wheel(folder: Path, **variables: str) -> tuple[list[str], str]:
    """Build a wheel with KVBLOCKS_COMPILE=1 from a copy of the sources; its files, and what the build said."""
    for name in ("build", "mypy"):
        pytest.importorskip(name, reason="needs the extra kvblocks[dev]")
    source = folder / "source"
    source.mkdir()
    for name in ("kvblocks", "kernels", "bench"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
    environment = os.environ | {"KVBLOCKS_COMPILE": "1"} | variables
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist(), result.stdout + result.stderr


def test_the_compiled_wheel_has_one_top_level_package(tmp_path: Path) -> None:
    names, _ = build_wheel(tmp_path)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kvblocks"}
    compiled = {Path(name).name.split(".")[0] for name in names if name.endswith((".so", ".pyd"))}
    assert {"manager", "prefix_index", "core__mypyc"} <= compiled
    assert "kvblocks/manager.py" in names  # the sources come along, to be read


@pytest.mark.skipif(sys.platform == "win32", reason="distutils takes another compiler than $CC there")
def test_without_a_compiler_the_plain_build_is_made(tmp_path: Path) -> None:
    names, output = build_wheel(tmp_path, CC="false")
    assert "the plain Python build is installed instead" in output
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    assert "kvblocks/manager.py" in names
