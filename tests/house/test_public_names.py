"""The public names: imported when they are first asked for, and as good as if they had been imported at once."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kvblocks

SOURCE = Path(__file__).resolve().parents[2] / "kvblocks" / "__init__.py"


def typed_imports() -> dict[str, str]:
    """The names that type checkers see, with their modules."""
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [item for item in node.body if isinstance(item, ast.ImportFrom)]
            return {alias.name: str(item.module) for item in imports for alias in item.names}
    raise AssertionError("no imports for type checkers")


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
