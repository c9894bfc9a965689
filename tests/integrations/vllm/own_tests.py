"""Runs vLLM's own scheduler-level tests, with vLLM's manager or with ours in its place.

They run from a copy in a folder of their own; no file of vLLM's is changed. `own_tests.txt` lists those that pass there
with vLLM's manager and without a network: one test a line.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.vllm.schedulers import OPT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MODELS = ("facebook/opt-125m", "facebook/opt-350m")
TIMEOUT = 900


def sources() -> Path | None:
    """Return the folder of vLLM's sources, which `make test-vllm` fetches; None if they are not there."""
    folder = Path(os.environ.get("VLLM_SOURCES", ROOT / ".venv-vllm" / "vllm-0.32.0"))
    return folder if (folder / "tests" / "v1" / "core" / "test_scheduler.py").is_file() else None


def listed() -> list[str]:
    """Return the tests that vLLM passes with its own manager."""
    return (HERE / "own_tests.txt").read_text(encoding="utf-8").split("\n")[:-1]


def copy_tests(from_folder: Path, to_folder: Path) -> None:
    """Copy what the tests need, and put the configurations of the models that they name beside them."""
    tests = from_folder / "tests"
    shutil.copytree(tests / "v1", to_folder / "tests" / "v1")
    shutil.copy(tests / "__init__.py", to_folder / "tests")
    for model in MODELS:
        (to_folder / model).mkdir(parents=True)
        (to_folder / model / "config.json").write_text(json.dumps(OPT), encoding="utf-8")


def run(folder: Path, names: list[str], *, swaps: bool, plugin: str = "integrations.vllm.swap") -> dict[str, str]:
    """Run tests in `folder`, and return their outcomes by name: "passed", or what went wrong.

    plugin: a module that puts what is under test in the places of vLLM's.
    """
    outcomes = folder / "outcomes.json"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "KVBLOCKS_SWAP": str(int(swaps)),
        "KVBLOCKS_OUTCOMES": str(outcomes),
        "VLLM_LOGGING_LEVEL": "INFO",  # some of the tests read the log
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin, *names]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if not outcomes.is_file():
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    found: dict[str, str] = json.loads(outcomes.read_text(encoding="utf-8"))
    outcomes.unlink()
    return found


def judge(names: list[str], refused: Mapping[str, str], outcomes: Mapping[str, str]) -> list[str]:
    """Return the outcomes that are not as expected, a line each. refused: by test, why it does not pass."""
    problems = [f"{name}: refused, but vLLM has no such test" for name in refused if name not in set(names)]
    for name in names:
        outcome = outcomes.get(name, "did not run")
        if outcome == "passed" and name in refused:
            problems.append(f"{name}: passes, though it is listed as refused: {refused[name]}")
        if outcome != "passed" and name not in refused:
            problems.append(f"{name}: {outcome}")
    return problems
