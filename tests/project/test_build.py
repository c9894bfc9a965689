"""Which build of the core is under test: CI runs the core's tests on the plain one and on the compiled one."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import Distribution, Extension

import kvblocks

ROOT = Path(__file__).resolve().parents[2]


def test_the_build_is_the_one_that_was_meant() -> None:
    """KVBLOCKS_EXPECT_COMPILED is set by `make test-compiled`. A forgotten .so among the sources is found here too."""
    expected = os.environ.get("KVBLOCKS_EXPECT_COMPILED") == "1"
    assert kvblocks.__compiled__ == expected, f"{kvblocks.__file__}: compiled is {kvblocks.__compiled__}"


def test_the_compiled_build_compiles_the_whole_core() -> None:
    """setup.py compiles all modules of its folders except those listed here, which gain nothing from it."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")
    compiled = set(setup["compiled_files"]())
    rooms = [
        path
        for path in (ROOT / "kvblocks").iterdir()
        if path.is_dir() and path.name not in {"engine", "server", "cli", "integrations", "verify", "gate", "kernels"}
    ]
    core = [*(ROOT / "kvblocks").glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))]
    plain = {"errors.py", "events.py", "stats.py", "version.py", "metrics.py", "core/kinds.py"}
    plain |= {"__main__.py", "core/plan.py", "observe/explanation.py", "tiers/tier.py", "tiers/sealing.py"}
    plain |= {
        "retention/policies/check.py",
        "retention/policies/policy.py",
        "core/state_copy.py",
    }
    plain |= {
        "prefix_cache/protocol.py",
        "prefix_cache/evicted.py",
    }
    names = {path.relative_to(ROOT / "kvblocks").as_posix() for path in core if path.name != "__init__.py"}
    plain |= {name for name in names if name.startswith(("tiers/disk/", "tiers/store/"))}  # wait for a disk or a server
    plain |= {name for name in names if name.startswith("replay/")}  # drives a compiled manager
    plain |= {name for name in names if name.startswith("wire/")}  # encodes and waits for sockets
    assert {f"kvblocks/{name}" for name in names - plain} == compiled


@pytest.mark.skipif(not kvblocks.__compiled__, reason="about the compiled build")
def test_what_mypyc_adds_is_inside_the_package() -> None:
    added = [name for name in sys.modules if name.endswith("__mypyc")]
    assert "kvblocks.core__mypyc" in added and all(name.startswith("kvblocks.") for name in added)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: cc")
def test_where_the_c_compiler_fails_the_plain_build_is_made(tmp_path, monkeypatch, capfd) -> None:
    """test_compiled_wheel.py builds the whole wheel so."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")
    monkeypatch.chdir(tmp_path)
    Path("some.c").write_text("int some;")
    for compiler, num_built in (("cc", 1), ("false", 0)):
        monkeypatch.setenv("CC", compiler)
        command = setup["BuildOrGoWithout"](Distribution({"ext_modules": [Extension("some", ["some.c"])]}))
        command.build_temp, command.build_lib = compiler, compiler
        command.ensure_finalized()
        command.run()
        said = capfd.readouterr().err
        assert ("the plain Python build is installed instead" in said) == (num_built == 0), said
        assert len(command.extensions) == len(list(Path(compiler).rglob("some.*so"))) == num_built


# The same with every build, so once: the compiled build's tests are the ones that have a C compiler in any case.
@pytest.mark.skipif(not kvblocks.__compiled__, reason="about the compiled build")
def test_the_compiled_build_needs_no_package_but_mypy() -> None:
    """A wheel is often built where nothing else is installed: by `pip install`, by cibuildwheel, by `make dist`."""
    pytest.importorskip("mypy", reason="needs the extra kvblocks[dev]")
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--cache-dir", os.devnull, *setup["MYPY_OPTIONS"]]
    done = subprocess.run([*command, *setup["compiled_files"]()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
