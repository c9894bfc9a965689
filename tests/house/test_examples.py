"""What users copy must run: the examples, the README's, and the guide for engine authors."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python_blocks(path):
    """The code of a document's ```python blocks, each on its own lines, so that an error names the document's line."""
    text = path.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, m.start(1)) + m[1]
        for m in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_prints(path):
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def toy_answer(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum(position * token for position, token in enumerate(tokens, 1)) % 1000)
    return tokens[len(prompt) :]


def test_the_toy_scheduler_is_short_and_right(capsys):
    path = ROOT / "examples" / "toy_scheduler.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    example = runpy.run_path(str(path))
    expected = {name: toy_answer([*example["system"], number], 6) for number, name in enumerate(example["answers"])}
    assert example["answers"] == expected
    assert len(expected) == 4
    shown = capsys.readouterr().out
    assert "bob: 12 of 15 tokens cached" in shown
    assert "preempted" in shown


def test_the_readmes_example_runs():
    blocks = [
        block
        for block in python_blocks(ROOT / "README.md")
        if re.search(r"^(from|import) kvblocks\b", block, re.MULTILINE)
    ]
    assert blocks, "README.md: expected a python block that imports kvblocks, got none"
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    "name",
    [
        *("engine-authors.md", "features.md", "metrics.md", "policies.md", "prefix-cache.md", "replay.md", "tiers.md"),
        *("wire.md", "wire-hints.md"),
    ],
)
def test_a_guide_runs(name):
    """All blocks in one namespace, as one who reads it would type them."""
    blocks = python_blocks(ROOT / "docs" / name)
    assert len(blocks) >= (1 if name == "replay.md" else 3)
    namespace = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
