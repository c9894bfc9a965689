"""The compiled build: `KVBLOCKS_COMPILE=1 pip install .` runs mypyc over the core, whose sources stay as they are.

KVBLOCKS_OPT_LEVEL=0 (the default is 3) is for tests: it compiles sooner and runs slower. Without KVBLOCKS_COMPILE, or
if the C compiler fails, the plain build is made. `kvblocks.__compiled__` tells which one is installed. The package's
long description is made here too: it is README.md, with links that lead to files of the repository. Everything else
about the package is in pyproject.toml.
"""

import os
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# What is compiled, as one unit: calls between its modules are then C calls. The engine, the server and the
# command line stay plain.
FOLDERS = (
    "hashing",
    "core",
    "retention",
    "retention/policies",
    "prefix_cache",
    "observe",
    "tiers",
)
SINGLE = ("arguments.py", "closed.py", "manager.py")
# These modules stay plain. Records gain nothing from being compiled, and people pickle and subclass them. For the same
# reason errors, events and stats stay plain. A sealer hashes in C anyway. Only tests run the check of policies.
PLAIN = (
    "core/kinds.py",
    "core/plan.py",
    "core/state_copy.py",
    "observe/explanation.py",
    "prefix_cache/evicted.py",
    "prefix_cache/protocol.py",
    "retention/policies/check.py",
    "retention/policies/policy.py",
    "tiers/tier.py",
    "tiers/sealing.py",
)

# Where a wheel is built, no package but mypy need be installed. `make check` checks types strictly.
MYPY_OPTIONS = ("--config-file=", "--follow-imports=silent", "--ignore-missing-imports")


def compiled_files() -> list[str]:
    """Return the paths of the sources that are compiled, relative to this file. A test compares them with the tree."""
    package = ROOT / "kvblocks"
    files = [
        *SINGLE,
        *(f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((package / folder).glob("*.py"))),
    ]
    return [f"kvblocks/{file}" for file in files if file not in PLAIN and not file.endswith("__init__.py")]


def long_description() -> str:
    """Return README.md with links to files of this version's tag, below the repository of pyproject.toml.

    A package index has no files beside the page. Links with a scheme, and those within the page, stay. Images of a
    `<picture>` are HTML.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = (ROOT / "kvblocks" / "version.py").read_text(encoding="utf-8").split('"')[-2]
    repository = project["urls"]["Repository"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    images = re.sub(r"(!\[[^]]*\]\(|\bsrc(?:set)?=\")(?![a-z]+:|#)", rf"\g<1>{repository}/raw/v{version}/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/blob/v{version}/", images)


class BuildOrGoWithout(build_ext):
    """All extensions or none: half of them would not work together."""

    def run(self) -> None:
        """Build, and on failure say so and leave the plain modules."""
        try:
            super().run()
        except Exception as error:  # noqa: BLE001  # whatever a compiler, or the lack of one, may raise
            print(f"kvblocks: not compiled ({error}); the plain Python build is installed instead", file=sys.stderr)
            self.extensions = []


def extensions() -> list:
    """Return mypyc's extensions for the core. Needs mypy."""
    from mypyc.build import mypycify

    # The dotted name puts the shared library inside the package, so that the wheel has no second top-level module.
    return mypycify(
        [*MYPY_OPTIONS, *compiled_files()],
        opt_level=os.environ.get("KVBLOCKS_OPT_LEVEL", "3"),
        debug_level="0",
        group_name="kvblocks.core",
    )


def main() -> None:
    """Build."""
    readme = {"long_description": long_description(), "long_description_content_type": "text/markdown"}
    if os.environ.get("KVBLOCKS_COMPILE") != "1":
        setup(**readme)
    elif find_spec("mypyc") is None:
        setup(**readme, setup_requires=["mypy>=1.18"])  # pip reads this first, and installs mypy where it builds
    else:
        built = {"ext_modules": extensions(), "cmdclass": {"build_ext": BuildOrGoWithout}}
        setup(**readme, **built, setup_requires=["mypy>=1.18"])


if __name__ == "__main__":
    main()
