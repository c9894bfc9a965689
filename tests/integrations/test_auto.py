"""`KVBLOCKS_AUTO`: in a new process that has no line of it an engine's own names are ours, and only then.

nano-vllm and mini-sglang are their stand-ins and, where NANO_SRC and MINISGL_SRC name them, their own sources. Tests of
mlx-lm are in `mlx_lm/test_server.py`, of vLLM in `vllm/test_early.py`.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copyfile

import pytest

from integrations.mini_sglang import sources as mini_sglang
from integrations.nano_vllm import sources as nano_vllm

TESTS = Path(__file__).resolve().parents[1]
HERE = TESTS / "integrations"
TRANSFORMERS = """
from transformers.generation.continuous_batching import continuous_api
print("ours:", continuous_api.PagedAttentionCache.__module__.startswith("kvblocks."))
"""
NANO = """
from nanovllm.engine import scheduler
print("ours:", scheduler.BlockManager.__module__.startswith("kvblocks."))
"""
MINI = """
from minisgl.kvcache import SUPPORTED_CACHE_MANAGER as types
print("ours:", "kvblocks" in types.supported_names())
"""
REAL_NANO = "from integrations.nano_vllm import sources\nsources.load()\n"
REAL_MINI = "from integrations.mini_sglang import sources\nsources.load()\n"

PROGRAMS = [
    pytest.param("nano_vllm", NANO, id="nano-vllm's stand-in"),
    pytest.param("mini_sglang", MINI, id="mini-sglang's stand-in"),
    pytest.param(
        "nano_vllm",
        REAL_NANO + NANO,
        id="nano-vllm",
        marks=pytest.mark.skipif(not nano_vllm.SOURCES, reason=nano_vllm.REASON),
    ),
    pytest.param(
        "mini_sglang",
        REAL_MINI + MINI,
        id="mini-sglang",
        marks=pytest.mark.skipif(not mini_sglang.SOURCES, reason=mini_sglang.REASON),
    ),
]


class Interpreter:
    """An interpreter of its own that has all packages of this one, so that nothing is written beside them."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self._python = folder / "venv" / "bin" / "python"
        site = next((folder / "venv").glob("lib/python*/site-packages"))
        (site / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n{TESTS.parent}\n", encoding="utf-8")
        self.nano = folder / "stand_in" / "nanovllm" / "engine" / "scheduler.py"
        self.nano.parent.mkdir(parents=True)
        self.restore()
        for name in ("sequence", "block_manager"):
            self.nano.with_name(f"{name}.py").write_text("from nanovllm.engine.scheduler import *\n", encoding="utf-8")
        self._path = f"{folder / 'stand_in'}:{HERE / 'mini_sglang' / 'stand_in'}:{TESTS}"

    def restore(self) -> None:
        copyfile(HERE / "nano_vllm" / "stand_in.py", self.nano)

    def run(self, *arguments: str, auto: str | None = None) -> str:
        values = {key: value for key, value in os.environ.items() if key != "KVBLOCKS_AUTO"}
        values |= {"PYTHONPATH": self._path} | ({} if auto is None else {"KVBLOCKS_AUTO": auto})
        done = subprocess.run(
            [str(self._python), *arguments], env=values, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """One in which it was enabled."""
    made = Interpreter(tmp_path_factory.mktemp("auto"))
    assert "ours: False" in made.run("-c", NANO, auto="nano_vllm")  # nobody has asked for it yet
    assert "written" in made.run("-m", "kvblocks.integrations.auto", "enable")
    return made


@pytest.mark.parametrize(("name", "program"), PROGRAMS)
def test_an_engine_has_ours_if_the_variable_names_it(interpreter, name, program):
    assert interpreter.run("-c", program, auto=f" mlx_lm, {name}").startswith("ours: True")


def test_without_its_name_it_has_its_own(interpreter):
    for auto in (None, "", "mini_sglang,transformers"):
        assert interpreter.run("-c", NANO, auto=auto) == "ours: False\n"


@pytest.mark.slow
def test_transformers_has_ours(interpreter):
    """As it is installed."""
    assert "ours: True" in interpreter.run("-c", TRANSFORMERS, auto="transformers")


def test_an_engine_that_differs_stays_as_it_is(interpreter):
    text = interpreter.nano.read_text(encoding="utf-8")
    interpreter.nano.write_text(text.replace("def may_append", "def may_append_now"), encoding="utf-8")
    try:
        told = interpreter.run("-c", NANO, auto="nano_vllm")
    finally:
        interpreter.restore()
    assert told.startswith("ours: False")
    assert "KVBLOCKS_AUTO: nano_vllm was not installed" in told and "may_append" in told


def test_an_unknown_name_is_told(interpreter):
    told = interpreter.run("-c", NANO, auto="sglang,nano_vllm")
    assert told.startswith("ours: True") and "got sglang" in told


def test_a_program_with_a_line_of_its_own_is_left_alone(interpreter):
    """In both orders of imports."""
    own = "from kvblocks.integrations import nano_vllm\nnano_vllm.install(early=True)\n"
    show = "print(scheduler.BlockManager.__name__)"
    assert interpreter.run("-c", own + NANO + show, auto="nano_vllm").endswith("KVBlocksEarlyBlockManager\n")
    assert interpreter.run("-c", NANO + own + show, auto="nano_vllm").endswith("KVBlocksEarlyBlockManager\n")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_server_of_mini_sglang_has_it_once(interpreter):
    """In its own process, and in the one that it spawns."""
    told = interpreter.run("-m", "kvblocks.integrations.mini_sglang", "--model", "none", auto="mini_sglang")
    assert told == "arguments: --model none --cache-type kvblocks\ntypes: kvblocks\n"


def test_disabled_again(interpreter):
    interpreter.run("-m", "kvblocks.integrations.auto", "disable")
    try:
        assert interpreter.run("-c", NANO, auto="nano_vllm").startswith("ours: False")
    finally:
        interpreter.run("-m", "kvblocks.integrations.auto", "enable")
