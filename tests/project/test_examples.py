"""What users copy must run: the examples, the README's, and every page with python blocks."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvblocks.engine import Engine
from kvblocks.tiers import tiers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OWN_TIER = ROOT / "examples" / "own_tier.py"
# Those that need a model have tests of their own.
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.py")) if "kvblocks.engine" not in path.read_text("utf-8")
]


def python_blocks(path):
    """The code of a document's ```python blocks, each on its own lines, so that an error names the document's line."""
    text = path.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, m.start(1)) + m[1]
        for m in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


BESIDE_A_SERVER = frozenset({"server.md", "agents.md", "misses.md"})
GUIDES = [
    path for path in sorted(DOCS.rglob("*.md")) if python_blocks(path) and path.name not in BESIDE_A_SERVER
]  # the others are run beside a server, by tests/server/test_server_docs.py


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_prints(path):
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def settled(generate):
    """`Engine.generate`, after which all stores have ended."""

    def generate_and_wait(engine, *arguments, **options):
        found = generate(engine, *arguments, **options)
        while engine.offload.has_work:
            engine.offload.wait(0.1)
            engine.offload.advance()
        return found

    return generate_and_wait


def test_a_tier_of_ones_own_is_short_and_gives_the_same_answer(tiny_folder, monkeypatch, capsys):
    source = OWN_TIER.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 60
    monkeypatch.setattr(sys, "argv", [str(OWN_TIER), str(tiny_folder)])
    monkeypatch.setattr(tiers, "num_worth_loading", lambda loads, _: len(loads))  # however fast this machine computes
    monkeypatch.setattr(Engine, "generate", settled(Engine.generate))  # however late its threads store
    runpy.run_path(str(OWN_TIER), run_name="__main__")
    printed = capsys.readouterr().out
    found = re.fullmatch(
        r"the same answer: True loaded: \{'zip': 192\} ZipStats\(num_compressed_bytes=(\d+)\)\n", printed
    )
    assert found and int(found[1]) > 0, printed


def functions(source):
    """The source of each function, by name: the last one where a name is defined several times."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def test_the_toy_engine_is_short_right_and_what_the_tutorial_builds(capsys):
    path = ROOT / "examples" / "toy_engine.py"
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 100
    tutorial = functions("\n".join(python_blocks(ROOT / "docs" / "tutorial.md")))
    assert functions(source) == {name: tutorial[name] for name in functions(source)}

    engine = runpy.run_path(str(path), run_name="__main__")
    plain = {}
    exec(tutorial["plain_answer"], {"MAX_NEW_TOKENS": engine["MAX_NEW_TOKENS"]}, plain)
    expected = {
        name: plain["plain_answer"]([*engine["system"], n]) for n, name in enumerate(["ann", "bob", "cid", "dee"])
    }
    first = expected["bob"][0] + 1
    expected["bob/1"] = [first, *plain["plain_answer"]([*engine["system"], 1, first], engine["MAX_NEW_TOKENS"] - 1)]
    assert engine["answers"] == expected
    assert engine["manager"].stats.num_queries > 4, "expected a preemption"
    assert "bob/1" in capsys.readouterr().out


def test_the_readmes_example_runs():
    blocks = [
        block
        for block in python_blocks(ROOT / "README.md")
        if re.search(r"^(from|import) kvblocks\b", block, re.MULTILINE)
    ]
    assert blocks, "README.md: expected a python block that imports kvblocks, got none"
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_guide_runs(path):
    """All blocks in one namespace, as one who reads it would type them."""
    namespace = {"__name__": "guide"}
    for block in python_blocks(path):
        exec(compile(block, path.name, "exec"), namespace)


def test_the_guides_are_found():
    names = {path.relative_to(DOCS).as_posix() for path in GUIDES}
    assert names >= {"engine-authors.md", "features.md", "tiers-in-engines.md", "tutorial.md", "wire.md"}
