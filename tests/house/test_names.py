"""A class name means one thing in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A name that several classes share -> why.
SHARED = {
    **dict.fromkeys(("AllBlocksCleared", "BlockRemoved", "BlockStored"), "an event, and its form on the wire"),
    "KVBlocksPagedCache": "one class for each kind of cache that transformers has, under the name that users import",
}


def classes(sources):
    """The public classes of files, by name."""
    found = defaultdict(list)
    for path, text in sources:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return found


def test_a_class_name_means_one_thing():
    files = [path for folder in ("kvblocks", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = classes((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in files)
    assert len(found) > 300
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert set(shared) == set(SHARED), shared


def test_two_classes_of_one_name_are_found():
    assert classes([("a", "class One: ..."), ("b", "def f():\n    class One: ...")]) == {"One": ["a", "b"]}
