"""Shell completion: what bash shows and inserts when somebody presses Tab."""

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("pty", reason="terminals are POSIX'")

from cli.screen import Screen

from kvblocks.cli import completion
from kvblocks.engine.attention.names import ATTENTIONS
from kvblocks.retention.policies import NAMED

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory):
    """A folder with the command `kvblocks`, as an installation has one."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "kvblocks"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvblocks "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def script(bin_folder):
    """What `--install-completion` puts into a shell's settings. The command asks which shell called it."""
    command = [BASH, "-c", f"'{bin_folder}/kvblocks' --show-completion; exit $?"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_bash_completes_what_is_typed(bin_folder, script, tmp_path):
    """A real bash at a terminal: commands, options and the names behind them, and files where there are none."""
    (tmp_path / "rc").write_text(f"PS1='ready> '\nbind 'set bell-style none'\n{script}")
    (tmp_path / "prompts.jsonl").write_text("")
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path), "INPUTRC": "/dev/null"}
    environment["TERM"] = "dumb"
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    screen = Screen(BASH, "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i", cwd=tmp_path, env=environment)
    try:
        screen.wait_for("ready> ")
        for typed, shown in (
            ("kvblocks ser\t", "kvblocks serve "),
            ("--evic\t", "--eviction "),
            ("s3\t", "s3fifo "),
            ("--sched\t", "--schedule "),
            ("lon\t", "longest-prefix "),
            ("--model smo\t", "smollm2 "),
            ("--disk-cache prom\t", "prompts.jsonl "),
        ):
            screen.type(typed)
            screen.wait_for(shown)
        screen.type("\x15kvblocks cache list\t")
        screen.wait_for("cache list-pinned ")
    finally:
        screen.close()


def test_the_names_are_those_that_are_accepted():
    assert completion.evictions("") == list(NAMED)
    assert completion.evictions("s") == [name for name in NAMED if name.startswith("s")]
    assert completion.attentions("") == list(ATTENTIONS)
    assert completion.kv_cache_dtypes("fp8") == ["fp8", "fp8_e4m3"]
    assert completion.schedules("g") == ["grouped"]
    assert completion.log_levels("w") == ["warning"]
    assert completion.models("s") == ["smollm2"]
    assert completion.evictions("nonsense") == []


def test_a_completion_imports_nothing_heavy():
    code = """
import sys
from kvblocks.cli import app, completion
for names in (completion.evictions, completion.schedules, completion.attentions, completion.models):
    assert names("")
print([name for name in ("torch", "numpy", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
