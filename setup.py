"""The compiled build: `KVBLOCKS_COMPILE=1 pip install .` runs mypyc over the core, whose sources stay as they are.

Everything else about the package is in pyproject.toml. Without the variable, or where the C compiler fails, the plain
build is made; `kvblocks.__compiled__` tells which one is installed.
"""

import os
import sys
from importlib.util import find_spec

from setuptools import setup
from setuptools.command.build_ext import build_ext

# The core, as one unit: calls between its modules are then C calls. The engine and the command line stay plain.
MODULES = (
    *("arguments", "change", "tokens", "hashing", "eviction_history", "tenant", "epoch", "block"),
    *("free_queue", "sequence_keys", "sequence", "quotas", "cached_runs", "prefix_index", "block_sampler"),
    *("group_layout", "group_tables", "companions", "ghosts", "group_pool", "group_lookup"),
    *("group_need", "group_registration", "group_retention", "group_slots", "group_explanation"),
    *("in_flight", "cache_hit", "pool", "registration", "pinned_blocks", "retention", "slots", "steps", "explanation"),
    *("sequence_checks", "shared_prefixes", "picture", "manager", "metrics"),
    *("prefix_match", "prefix_pins", "prefix_store", "prefix_cache"),
)


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

    # errors, events, groups, pool_plan and stats stay plain: records gain nothing, and people pickle and subclass them.
    # The dotted name puts the shared library inside the package, so that the wheel has no second top-level module.
    files = [f"kvblocks/{module}.py" for module in MODULES]
    return mypycify(["--strict", "--config-file=", *files], opt_level="3", debug_level="0", group_name="kvblocks.core")


if os.environ.get("KVBLOCKS_COMPILE") == "1" and find_spec("mypyc") is None:
    setup(setup_requires=["mypy>=1.18"])  # pip asks for this first, and then installs it into the build's environment
elif os.environ.get("KVBLOCKS_COMPILE") == "1":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildOrGoWithout}, setup_requires=["mypy>=1.18"])
else:
    setup()
