"""Which build of the core is under test: CI runs the core's tests on the plain one and on the compiled one."""

import os
from pathlib import Path

import kvblocks


def test_the_build_is_the_one_that_was_meant() -> None:
    """KVBLOCKS_EXPECT_COMPILED is set by `make test-compiled`. A forgotten .so among the sources is found here too."""
    expected = os.environ.get("KVBLOCKS_EXPECT_COMPILED") == "1"
    assert kvblocks.__compiled__ == expected, f"{kvblocks.__file__}: compiled is {kvblocks.__compiled__}"


def test_the_compiled_build_compiles_the_whole_core() -> None:
    """Each module of the core is named in setup.py, or in the list here of those that gain nothing."""
    root = Path(__file__).parent.parent
    named = (root / "setup.py").read_text()
    core = {path.stem for path in (root / "kvblocks").glob("*.py") if not path.stem.startswith("cli")}
    plain = {"__init__", "__main__", "errors", "events", "groups", "pool_plan", "stats", "version"}
    assert {module for module in core - plain if f'"{module}"' not in named} == set()
