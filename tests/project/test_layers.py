"""The contracts of pyproject.toml, which import-linter checks; and what import statements don't show."""

import json
import re
import subprocess
import sys
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[2]
KVBLOCKS = ROOT / "kvblocks"
BUILT_ON_THE_LIBRARY = ("cli", "engine", "integrations", "replay", "server", "verify")


def test_the_contracts_are_kept(capsys):
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0, capsys.readouterr().out


def test_the_library_computes_no_import():
    """A computed import could be of anything, and no contract would see it."""
    computed = re.compile(r"\b(?:import_module|__import__)\((?!\"[\w.]+\"\))")
    paths = {path.relative_to(KVBLOCKS).as_posix(): path for path in KVBLOCKS.rglob("*.py")}
    library = {name: path for name, path in paths.items() if not name.startswith(BUILT_ON_THE_LIBRARY)}
    found = {name for name, path in library.items() if computed.search(path.read_text(encoding="utf-8"))}
    assert found == {"__init__.py", "wire/__init__.py"}, "these two import their own names when they are asked for"


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


def own_modules(modules: list[str], besides: str) -> set[str]:
    """The modules of kvblocks among `modules` that are neither kvblocks itself nor in the package `besides`."""
    return {name for name in modules if name.startswith("kvblocks.") and not f"{name}.".startswith(f"{besides}.")}


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
    beside = {"kvblocks." + name for name in ("arguments", "closed", "errors", "events", "manager", "stats")}
    beside |= {"kvblocks.hashing"} | {f"kvblocks.hashing.{name}" for name in ("by_name", "extra_keys", "scheme")}
    assert own_modules(modules, besides="kvblocks.core") <= beside


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
    assert own_modules(modules, besides="kvblocks.gate") == {"kvblocks.arguments", "kvblocks.errors"}


def test_the_isolation_can_fail():
    assert "blocked: numpy" in run_isolated("import numpy").stderr
    assert foreign_packages(json.loads(run_isolated("import iniconfig").stdout)) == {"iniconfig"}
