"""The pages for newcomers: the paths, functions and fast tests that they name are there."""

import ast
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/map.md")
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+(?:/|\.(?:py|md|toml|txt|json|css|svg)))`")
"""A path in code marks: a folder ends with a slash, a file with what kind it is."""

PLACED = re.compile(r"`([A-Za-z_][\w.]*)`\s*\(`([\w/.-]+\.py)`\)")
"""A function or class, and behind it the file that it is in."""


def find(name: str) -> Path | None:
    """A path as the pages write it: from the root, or from kvblocks/."""
    return next((path for path in (ROOT / name, ROOT / "kvblocks" / name) if path.exists()), None)


@functools.cache
def definitions(path: Path) -> set[str]:
    """The names of a file's functions, classes and methods, these as Class.method too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            inside = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{child.name}" for child in inside}
    return names


def missing(text: str) -> list[str]:
    """What a page names and the tree lacks."""
    lacking = [name for name in PATH.findall(text) if find(name) is None]
    for name, file in PLACED.findall(text):
        path = find(file)
        if path is not None and name not in definitions(path):
            lacking.append(f"{name} in {file}")
    return lacking


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    assert not missing((ROOT / page).read_text(encoding="utf-8"))


def test_the_map_names_functions_and_paths():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert len(PATH.findall(text)) > 100
    assert len(PLACED.findall(text)) > 30


def test_what_is_not_there_is_found():
    assert missing("`core/pool.py` and `BlockPool.take` (`core/pool.py`)") == []
    assert missing("`core/pools.py`, `nowhere/` and `BlockPool.took` (`core/pool.py`)") == [
        *("core/pools.py", "nowhere/"),
        "BlockPool.took in core/pool.py",
    ]


@pytest.mark.parametrize(("variable", "least"), [("FAST_TESTS", 20), ("COVERED_TESTS", 10)])
def test_the_tests_of_short_runs_are_there(variable, least):
    """As make sees the lists, which it makes of parts."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "-s", "-f", "Makefile", "-f", "-", "show-tests"]
    rule = f"show-tests:\n\t@echo $({variable})\n"
    done = subprocess.run(command, cwd=ROOT, input=rule, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert len(names) > least
    for name in names:
        path, _, test = name.partition("::")
        assert path.startswith("tests/") and (ROOT / path).exists(), f"Makefile: {variable}: {name} is not there"
        assert not test or test in definitions(ROOT / path), f"Makefile: {variable}: {name} is not there"
