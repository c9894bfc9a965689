"""Install a wheel in a clean environment and run the core's tests on it, importing nothing from the checkout.

    python tools/try_wheel.py WHEEL [--python PYTHON ...]

Each PYTHON gets a virtual environment of its own in a temporary folder: the wheel, its dependencies, and the tests'
tools at the versions in constraints.txt. There the trial imports kvblocks, hits a cached prefix, runs README.md's code,
compares what it prints with its comments, runs the command that needs an extra, and runs the tests below on a copy of
tests/. It prints a line for each interpreter. The exit status is 1 if one failed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
TESTS = ("test_worked_examples.py", "test_manager.py", "test_late_commit.py", "core", "prefix_cache")
PAGE = "docs/worked-example.md"  # which one of the tests runs
TRIAL = """
import sys
import kvblocks
from kvblocks import KVCacheManager, Sequence

manager = KVCacheManager(num_blocks=8, block_size=4)
first, second = Sequence("a", range(10)), Sequence("b", range(10))
for sequence in (first, second):
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]
manager.check()
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(kvblocks.__version__, "compiled" if kvblocks.__compiled__ else "plain", kvblocks.__file__)
"""


class TrialError(Exception):
    """A command failed. The text says which one, and what it printed."""


def run(command: list[str], folder: Path, *, expected: int = 0) -> str:
    """Run a command in a folder and return its output. Raises TrialError for another exit status than expected."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise TrialError(
            f"{' '.join(command)}: expected exit status {expected}, got {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


def check_readme(own: str, folder: Path) -> None:
    """Run README.md's first Python code. A comment after a print must begin with what is printed. Raises TrialError."""
    code = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    expected = re.findall(r"^print\(.*\)  # (.+)$", code, flags=re.MULTILINE)
    printed = run([own, "-c", code], folder).splitlines()
    if not expected or len(printed) != len(expected) or not all(map(str.startswith, expected, printed)):
        raise TrialError(f"README.md: expected its code to print {expected}, got {printed}")


def try_wheel(wheel: Path, python: str, folder: Path) -> str:
    """Try the wheel with one interpreter and return a line of results. Raises TrialError."""
    environment = folder / "venv"
    run([python, "-m", "venv", str(environment)], folder)
    own = str(environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join(pin for pin in pins if re.match(r"(xxhash|pytest|hypothesis)", pin)))
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    run([*install, str(wheel)], folder)
    said = run([own, "-c", TRIAL], folder).strip()
    if not Path(said.split(" ", 2)[2]).resolve().is_relative_to(environment.resolve()):
        raise TrialError(f"expected kvblocks of {environment}, got {said}")
    check_readme(own, folder)
    refusal = run([own, "-m", "kvblocks"], folder, expected=1)
    if "kvblocks[engine]" not in refusal:
        raise TrialError(f"expected `python -m kvblocks` to name the extra that it needs, got {refusal}")
    run([*install, *TOOLS], folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / PAGE, folder / PAGE)
    report = run(
        [own, "-m", "pytest", "-q", "-m", "not slow", "--durations=0", *(f"tests/{name}" for name in TESTS)], folder
    )
    version = run([own, "--version"], folder).strip()
    return f"{version}: {' '.join(said.split(' ', 2)[:2])}, {report.strip().splitlines()[-1].strip('= ')}"


def main() -> int:
    """Try the wheel with each interpreter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    asked = parser.parse_args()
    failed = False
    for python in asked.python:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(
                    f"{asked.wheel.name}: {try_wheel(asked.wheel.resolve(), python, Path(folder).resolve())}",
                    flush=True,
                )
            except TrialError as error:
                failed = True
                print(f"{asked.wheel.name}, {python}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
