"""nano-vllm's own modules, from the checkout that NANO_SRC names; it isn't on PyPI.

The packages' __init__ import what only a machine with a GPU has, so they are not run.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

SOURCES = os.environ.get("NANO_SRC")
REASON = "set NANO_SRC to a checkout of https://github.com/GeeeekExplorer/nano-vllm"
PACKAGES = ("nanovllm", "nanovllm.engine", "nanovllm.layers", "nanovllm.models", "nanovllm.utils")


def add_packages():
    """Make the packages importable from the checkout, without what their __init__ would do."""
    for name in PACKAGES:
        module = ModuleType(name)
        module.__path__ = [str(Path(SOURCES, *name.split(".")))]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def load():
    """Import the scheduler and what it needs."""
    # The scheduler wants a class's name only; its module would import transformers for a second or two.
    config = ModuleType("nanovllm.config")
    config.Config = object
    add_packages()
    sys.modules["nanovllm.config"] = config
    importlib.import_module("nanovllm.engine.scheduler")
