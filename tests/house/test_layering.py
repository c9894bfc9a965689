"""The floors of docs/design.md, read from the sources; and that the checker itself can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from house import layering
from house.layering import check_imports, find_imports, is_inside

ROOT = Path(__file__).resolve().parents[2]


def read_tree(folder: Path, package: str) -> tuple[dict[str, str], set[str]]:
    """The sources below `folder` by dotted name, and which of the names are packages."""
    sources, packages = {}, set()
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, packages


@pytest.fixture(scope="module")
def tree() -> tuple[dict[str, str], frozenset[str]]:
    """The modules as they ship: kernels/ as kvblocks.kernels."""
    sources, packages = read_tree(ROOT / "kvblocks", "kvblocks")
    kernel_sources, kernel_packages = read_tree(ROOT / "kernels", "kvblocks.kernels")
    return sources | kernel_sources, frozenset(packages | kernel_packages)


def test_imports_keep_to_the_floors(tree):
    problems = check_imports(*tree)
    assert not problems, "\n" + "\n".join(problems)


def test_no_permission_to_import_is_left_over(tree):
    sources, packages = tree
    found = {name: find_imports(name, text, sources, is_package=name in packages) for name, text in sources.items()}
    targets = {name: {each.target for each in imports} for name, imports in found.items()}
    ours = set().union(*[targets[name] for name in sources if name.startswith(layering.USERS)])
    kernels = {name for name in sources if any(is_inside(target, layering.KERNELS) for target in targets[name])}
    adapters = set().union(*[targets[name] for name in sources if is_inside(name, layering.VERIFY_ADAPTERS)])
    assert ours >= layering.FACADE
    assert kernels >= layering.KERNELS_DOORS
    assert {target.partition(".")[0] for target in adapters} >= layering.VERIFIED_PACKAGES
    for name, package in layering.PERMITTED_STDLIB.items():
        assert package in {target.partition(".")[0] for target in targets[name]}, name


def test_the_tree_was_really_read(tree):
    sources, packages = tree
    assert {"kvblocks.errors", "kvblocks.manager"} <= sources.keys()
    assert {"kvblocks", "kvblocks.engine", "kvblocks.kernels"} <= packages


# Sources with one violation each, beside modules that they may name.
NEIGHBOURS = {
    "kvblocks": "",
    "kvblocks.errors": "",
    "kvblocks.hashing.scheme": "",
    "kvblocks.core.pool": "",
    "kvblocks.manager": "",
    "kvblocks.engine": "",
    "kvblocks.engine.run.forward": "",
    "kvblocks.engine.attention.attention": "",
    "kvblocks.server": "",
    "kvblocks.server.app": "",
    "kvblocks.kernels": "",
    "kvblocks.kernels.store": "",
    "kvblocks.gate": "",
    "kvblocks.gate.gate": "",
    "kvblocks.integrations": "",
}
DOORS = "only kvblocks.engine.attention.attention, "
PACKAGES = frozenset(f"kvblocks{name}" for name in ("", ".engine", ".gate", ".integrations", ".kernels", ".server"))


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("kvblocks.core.pool", "from kvblocks.manager import KVCacheManager", "at most 2, got 6"),
        ("kvblocks.core.pool", "def f():\n    import kvblocks.manager", "pool:2: imports kvblocks.manager"),
        ("kvblocks.core.pool", "if TYPE_CHECKING:\n    from kvblocks import manager", "at most 2, got 6"),
        ("kvblocks.core.pool", "from .. import manager", "at most 2, got 6"),
        ("kvblocks.core.pool", "from ..manager import KVCacheManager", "at most 2, got 6"),
        ("kvblocks.manager", "from kvblocks import Sequence", "at most 6, got 8"),
        ("kvblocks.manager", "from kvblocks.engine import model", "at most 6, got 14"),
        ("kvblocks.manager", "import torch", "imports torch"),
        ("kvblocks.manager", "def f():\n    import numpy.typing", "imports numpy.typing"),
        ("kvblocks.manager", "import time", "no I/O"),
        ("kvblocks.manager", "import os.path", "no I/O"),
        ("kvblocks.manager", "from random import Random", "no I/O"),
        ("kvblocks.manager", "__import__('threading')", "no I/O"),
        ("kvblocks.manager", "__import__(name)", "computed name"),
        ("kvblocks.manager", "import kvblocks.blocks", "not a module of this tree"),
        ("kvblocks.planner", "", "has no floor; add its folder to FLOORS"),
        (
            "kvblocks.engine.run.forward",
            "from kvblocks.kernels import store",
            DOORS,
        ),
        (
            "kvblocks.engine.run.forward",
            "import importlib\nimportlib.import_module('kvblocks.kernels')",
            "only kvblocks.engine",
        ),
        (
            "kvblocks.engine.run.forward",
            "from ...kernels.store import store",
            DOORS,
        ),
        ("kvblocks.engine.run.forward", "from kernels import store", "imports kernels"),
        ("kvblocks.engine.run.forward", "import requests", "imports requests"),
        ("kvblocks.engine.run.forward", "import starlette", "imports starlette"),
        ("kvblocks.engine.run.forward", "from kvblocks.server import app", "knows nothing of its server"),
        ("kvblocks.engine", "from kvblocks.server.app import make_app", "knows nothing of its server"),
        ("kvblocks.server.app", "import requests", "imports requests"),
        (
            "kvblocks.server.app",
            "from kvblocks.kernels import store",
            DOORS,
        ),
        ("kvblocks.server.app", "import kvblocks.cli.app", "at most 19, got 20"),
        ("kvblocks.cli.app", "import requests", "imports requests"),
        ("kvblocks.engine.attention.attention", "from kvblocks.cli import app", "at most 11, got 20"),
        ("kvblocks.kernels.store", "from kvblocks.errors import KVBlocksError", "kernels take tensors"),
        ("kvblocks.kernels.store", "from kvblocks.engine import model", "kernels take tensors"),
        ("kvblocks.kernels.store", "import numpy", "imports numpy"),
        ("kvblocks.kernels.store", "import os", "no I/O"),
        ("kvblocks.cli.app", "from kvblocks.kernels import store", DOORS),
        ("kvblocks.tiers.disk.store", "import numpy", "imports numpy"),
        ("kvblocks.tiers.disk.store", "import kvblocks.engine", "at most 9, got 14"),
        ("kvblocks.tiers.sealing", "import os", "no I/O"),
        ("kvblocks.gate.gate", "from kvblocks.core.pool import BlockPool", "kvblocks.gate uses the public names"),
        ("kvblocks.gate.gate", "from kvblocks.errors import KVBlocksError", "kvblocks.gate uses the public names"),
        ("kvblocks.gate.gate", "import kvblocks.integrations", "kvblocks.gate uses the public names"),
        ("kvblocks.gate.gate", "import numpy", "imports numpy"),
        ("kvblocks.gate.gate", "import time", "no I/O"),
        ("kvblocks.integrations.hf", "from kvblocks.gate.gate import SessionGate", "kvblocks.integrations uses the"),
    ],
)
def test_the_checker_finds_a_forbidden_import(module, source, expected):
    problems = check_imports(NEIGHBOURS | {"kvblocks.cli.app": ""} | {module: source}, PACKAGES)
    assert len(problems) == 1
    assert problems[0].startswith(module + ":")
    assert expected in problems[0]


def test_the_checker_finds_a_circle():
    sources = NEIGHBOURS | {
        "kvblocks.errors": "def f():\n    from kvblocks.version import f",
        "kvblocks.version": "from kvblocks import errors",
    }
    problems = check_imports(sources, PACKAGES)
    assert len(problems) == 1
    assert problems[0].startswith("imports go in a circle: ")
    assert {"kvblocks.errors", "kvblocks.version"} <= set(problems[0].split(": ")[1].split(" -> "))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvblocks.core.pool", "from array import array\nimport xxhash\nfrom kvblocks.errors import KVBlocksError"),
        ("kvblocks.hashing.scheme", "from kvblocks.errors import KVBlocksError\nfrom ..errors import KVBlocksError"),
        ("kvblocks", "from kvblocks.manager import KVCacheManager\nfrom .core.pool import BlockPool"),
        (
            "kvblocks.engine.attention.attention",
            "import torch\nfrom kvblocks.kernels import store\nfrom ...kernels.store import f",
        ),
        ("kvblocks.engine", "from kvblocks import KVCacheManager\nfrom .run.forward import Model\nimport time, os"),
        ("kvblocks.server.app", "import uvicorn\nfrom kvblocks.engine import model\nimport asyncio"),
        ("kvblocks.cli.app", "from kvblocks.server import app"),
        ("kvblocks.kernels.store", "import math\nimport torch\nimport triton.language as tl"),
        ("kvblocks.kernels", "from .store import store\nfrom kvblocks.kernels import store as again"),
        ("kvblocks.cli.app", "from kvblocks.engine.run.forward import Model\nimport typer"),
        (
            "kvblocks.gate",
            "from kvblocks import KVBlocksError\nfrom kvblocks.gate.gate import SessionGate",
        ),
        ("kvblocks.integrations.hf", "from kvblocks.gate import SessionGate"),
    ],
)
def test_the_checker_lets_good_imports_pass(module, source):
    assert check_imports(NEIGHBOURS | {module: source}, PACKAGES) == []


# Runs one statement where torch, triton and numpy cannot be imported, and prints the modules that it brought.
ISOLATED = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "numpy"}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
before = set(sys.modules)
exec(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run_isolated(statement: str) -> subprocess.CompletedProcess[str]:
    """Run `statement` as ISOLATED says, on what is installed: -P keeps the current folder out of the path."""
    command = [sys.executable, "-P", "-c", ISOLATED, statement]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def foreign_packages(modules: list[str]) -> set[str]:
    """The packages among `modules` that are neither kvblocks nor of the standard library."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"kvblocks"}


ONE_GROUP = """
from kvblocks import KVCacheManager, Sequence
manager = KVCacheManager(8, 4)
sequence = Sequence("a", range(10))
manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
manager.append_slots(sequence, [1, 2, 3])
manager.free(sequence)
"""


def test_a_manager_of_one_group_loads_the_core_alone():
    result = run_isolated(ONE_GROUP)
    assert result.returncode == 0, result.stderr
    modules = json.loads(result.stdout)
    assert "kvblocks.manager" in modules
    assert foreign_packages(modules) == {"xxhash"}
    ours = {name for name in modules if name.startswith("kvblocks.")}
    top = {"kvblocks." + name for name in ("arguments", "closed", "errors", "events", "manager", "stats")}
    top |= {"kvblocks.hashing"} | {f"kvblocks.hashing.{name}" for name in ("by_name", "extra_keys", "scheme")}
    assert {name for name in ours - top if not layering.is_inside(name, "kvblocks.core")} == set()


def test_all_public_names_need_xxhash_only():
    result = run_isolated("from kvblocks import *\nassert KVCacheManager and CacheMetrics")
    assert result.returncode == 0, result.stderr
    modules = json.loads(result.stdout)
    assert foreign_packages(modules) == {"xxhash"}
    assert not [name for name in modules if name.startswith(("kvblocks.engine", "kvblocks.kernels", "kvblocks.cli"))]


def test_the_gate_loads_no_module_that_touches_blocks():
    result = run_isolated("from kvblocks.gate import *")
    assert result.returncode == 0, result.stderr
    modules = json.loads(result.stdout)
    assert foreign_packages(modules) == set()
    ours = {name for name in modules if name.startswith("kvblocks.") and not layering.is_inside(name, layering.GATE)}
    assert ours == {"kvblocks.arguments", "kvblocks.errors"}


def test_the_isolation_can_fail():
    assert "blocked: numpy" in run_isolated("import numpy").stderr
    assert foreign_packages(json.loads(run_isolated("import iniconfig").stdout)) == {"iniconfig"}
