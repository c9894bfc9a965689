"""The public names: imported when they are first asked for, and as good as if they had been imported at once."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvblocks

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kvblocks" / "__init__.py"
BUILT_ON_THE_LIBRARY = {"cli", "engine", "integrations", "replay", "server", "verify"}


def typed_imports() -> dict[str, str]:
    """The names that type checkers see, with their modules."""
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [item for item in node.body if isinstance(item, ast.ImportFrom)]
            return {alias.name: str(item.module) for item in imports for alias in item.names}
    raise AssertionError("no imports for type checkers")


def public_modules() -> set[str]:
    """The library's public modules, as docs/stability.md lists them."""
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    listed = page.partition("## Public modules")[2].partition("## ")[0]
    return set(re.findall(r"^\| `(kvblocks[\w.]*)` \|", listed, re.MULTILINE))


def public_names(module: str) -> set[str]:
    """The names in its `__all__`; where it has none, those that don't begin with `_`."""
    names = vars(importlib.import_module(module))
    return set(names.get("__all__", [name for name in names if not name.startswith("_")]))


def library_imports(path: Path) -> set[tuple[str, str]]:
    """What a file imports from kvblocks itself, its modules and the library's packages, as pairs (module, name)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvblocks":
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvblocks":
            found.add(("kvblocks", node.attr))
    beside = BUILT_ON_THE_LIBRARY | {"kernels"}
    return {(module, name) for module, name in found if [*module.split("."), name][1] not in beside}


@pytest.mark.parametrize("package", sorted(BUILT_ON_THE_LIBRARY))
def test_what_is_built_on_the_library_imports_public_names(package):
    paths = sorted((ROOT / "kvblocks" / package).rglob("*.py"))
    imported = {(module, name, path.name) for path in paths for module, name in library_imports(path)}
    modules = public_modules()
    private = [each for each in imported if each[0] not in modules or each[1] not in public_names(each[0])]
    assert imported and not private, "\n".join(map(str, sorted(private)))


def test_public_modules_are_those_that_the_contract_lets_pass():
    """Of the modules beside the packages all are public but `manager`, whose class is in kvblocks, and `closed`."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract = next(one for one in config["contracts"] if "public names only" in one["name"])
    passing = {line.removeprefix("kvblocks.** -> ") for line in contract["ignore_imports"]}
    top = {f"kvblocks.{path.stem}" for path in (ROOT / "kvblocks").glob("*.py") if not path.stem.startswith("_")}
    assert public_modules() == passing | {"kvblocks"} | (top - set(contract["forbidden_modules"]))
    assert {package.removeprefix("kvblocks.") for package in contract["source_modules"]} == BUILT_ON_THE_LIBRARY


def test_what_type_checkers_see_is_what_there_is():
    assert {name: f"kvblocks.{module}" for name, module in vars(kvblocks)["_MODULES"].items()} == typed_imports()
    assert {*vars(kvblocks)["_MODULES"], "__compiled__"} == set(kvblocks.__all__)
    assert list(kvblocks.__all__) == sorted(kvblocks.__all__, key=lambda name: (name.islower(), name))


@pytest.mark.parametrize("name", kvblocks.__all__)
def test_each_name_is_that_of_its_home(name):
    if name != "__compiled__":
        assert getattr(kvblocks, name) is vars(importlib.import_module(typed_imports()[name]))[name]


@pytest.mark.parametrize(("made", "most"), [(kvblocks.KVCacheManager(4), 40), (kvblocks.PrefixCache(4), 18)])
def test_there_is_one_door_for_one_thing(made, most):
    """What isn't a call of an engine's step is read through a noun, such as `manager.pins`."""
    names = [name for name in dir(made) if not name.startswith("_")]
    assert len(names) <= most, names


def test_modules_are_attributes_as_if_they_had_been_imported():
    program = "import kvblocks; print(kvblocks.errors.KVBlocksError, kvblocks.metrics.CacheMetrics, kvblocks.observe)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_a_star_brings_all_of_them():
    names: dict[str, object] = {}
    exec("from kvblocks import *", names)
    assert set(kvblocks.__all__) <= set(names)


def test_dir_shows_all_of_them_before_any_was_asked_for():
    program = "import kvblocks; print(*dir(kvblocks))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(kvblocks.__all__) <= set(shown)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kvblocks' has no attribute 'Manager'"):
        kvblocks.Manager  # noqa: B018  # asking is the point
    with pytest.raises(ImportError):
        exec("from kvblocks import Manager")


def test_records_can_be_pickled():
    manager = kvblocks.KVCacheManager(8, 4, enable_events=True)
    manager.allocate_slots(kvblocks.Sequence("a", range(9)))
    records = [manager.stats, manager.take_events(), manager.inspect.prefix_rows(), kvblocks.FullAttention(4)]
    records += [kvblocks.CacheMetrics(manager).snapshot(), manager.inspect.explain(kvblocks.Sequence("b", range(3)))]
    assert pickle.loads(pickle.dumps(records)) == records


def test_a_pickle_is_read_by_a_process_that_imported_nothing():
    data = pickle.dumps([kvblocks.KVCacheManager(8, 4).stats, kvblocks.PinBudgetError("full")])
    program = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert b"num_blocks=8" in done.stdout and b"PinBudgetError('full')" in done.stdout


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("kvblocks.metrics", "CacheMetrics"),
        ("kvblocks.hashing", "decode_extra_keys"),
        ("kvblocks.prefix_cache", "PrefixCache"),
    ],
)
def test_paths_that_the_docs_name_lead_there(path, name):
    assert callable(vars(importlib.import_module(path))[name])
