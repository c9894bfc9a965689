"""The bench that compares two trees measures each by its own code. No test asks how long it took."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_versus(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.core.versus", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)


def copy_of_core(tree: Path) -> Path:
    """A tree of its own with the core of kvblocks, which calls itself 0.0.0."""
    package = tree / "kvblocks"
    shutil.copytree(ROOT / "kvblocks", package, ignore=shutil.ignore_patterns("engine", "cli", "__pycache__"))
    (package / "version.py").write_text('__version__ = "0.0.0"\n', encoding="utf-8")
    return tree


def test_each_tree_is_measured_by_its_own_code(tmp_path):
    kept = tmp_path / "kept.json"
    old, new = copy_of_core(tmp_path / "old"), copy_of_core(tmp_path / "new")
    (new / "kvblocks" / "version.py").write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    options = (
        "--processes",
        "2",
        "--rounds",
        "1",
        "--samples",
        "1",
        "--items",
        "allocate_16,touch_64",
        "--json",
        str(kept),
    )
    done = run_versus(str(old), "--new", str(new), *options)
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())
    assert results["conditions"]["kvblocks"] == "0.0.0 (old), 9.9.9 (new)"
    assert results["conditions"]["num_processes"] == 2
    assert results["conditions"]["build"] == "plain (old), plain (new)"
    assert [row["item"] for row in results["results"]] == ["allocate_16", "touch_64"]
    for row in results["results"]:
        assert 0 < row["old_min"] <= row["old_median"] <= row["old_max"], row
        assert 0 < row["new_min"] <= row["new_median"] <= row["new_max"], row
        assert row["new_min"] / row["old_max"] <= row["ratio"] <= row["new_max"] / row["old_min"], row
        assert f"{row['item']}: {row['way']}" in done.stdout


def test_a_folder_without_the_package_is_refused(tmp_path):
    done = run_versus(str(tmp_path), "--rounds", "1", "--items", "touch_64")
    assert done.returncode != 0
    assert f"{tmp_path}: expected a folder with the package kvblocks" in done.stderr
