"""The names of `from kvblocks.wire import …`: each is imported when it is asked for, and not before."""

import ast
import importlib
from pathlib import Path

import pytest

from kvblocks import wire

SOURCE = Path(wire.__file__)


def typed_imports() -> dict[str, str]:
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If):
            imports = [item for item in node.body if isinstance(item, ast.ImportFrom)]
            return {alias.name: str(item.module) for item in imports for alias in item.names}
    raise AssertionError("no imports for type checkers")


def test_each_name_is_that_of_its_home():
    assert sorted(typed_imports()) == sorted(wire.__all__)
    for name, module in typed_imports().items():
        assert getattr(wire, name) is vars(importlib.import_module(module))[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'kvblocks.wire' has no attribute 'Publisher'"):
        wire.Publisher  # noqa: B018  # asking is the point
