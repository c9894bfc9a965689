"""No attribute carries an argument: none is set to a value and back to None within one call.

Such an attribute says something to a method that is called in between. Nobody who reads that method sees who set the
attribute, and a call that is interrupted leaves it set. Pass what is to be said as an argument.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.layering import FunctionNode, find_functions

ROOT = Path(__file__).resolve().parents[2] / "kvblocks"
ROOMS = ("core", "groups", "states", "retention", "prefix_cache", "observe", "tiers")


Branches = dict[ast.AST, bool]
"""By `if`, whether something stands in its body, rather than behind its `else`."""


def own_nodes(node: ast.AST, branches: Branches) -> Iterator[tuple[ast.AST, Branches]]:
    """Every node of a function in the order of the source, without those of functions inside it, with its branches."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, FunctionNode | ast.Lambda | ast.ClassDef):
                inside = branches | {node: field == "body"} if isinstance(node, ast.If) else branches
                yield child, inside
                yield from own_nodes(child, inside)


def settings(function: FunctionNode) -> Iterator[tuple[str, ast.expr, Branches]]:
    """Every attribute that is set, by assignment or by a call of one argument whose result is ignored.

    Yields what is set, to which value, and in which branches. Only calls of what is kept in an attribute count.
    """
    for node, branches in own_nodes(function, {}):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield ast.unparse(target), node.value, branches
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute) and node.value is not None:
            yield ast.unparse(node.target), node.value, branches
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            values = [*call.args, *[keyword.value for keyword in call.keywords]]
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Attribute) and len(values) == 1:
                yield f"{ast.unparse(call.func)}()", values[0], branches


def find_set_and_reset(source: str) -> list[str]:
    """Every attribute that a function of `source` sets to a value, and then to None."""
    problems = []
    for name, function, _ in find_functions(ast.parse(source)):
        earlier: list[tuple[str, ast.expr, Branches]] = []
        for target, value, branches in settings(function):
            if not (isinstance(value, ast.Constant) and value.value is None):
                earlier.append((target, value, branches))
                continue
            for other, set_to, others in earlier:
                if other == target and all(others[fork] == branches[fork] for fork in others.keys() & branches.keys()):
                    lines = f"in line {set_to.lineno}, and to None in line {value.lineno}"
                    problems.append(f"{name}: sets {target} {lines}")
    return problems


def test_no_attribute_is_set_and_reset_within_a_call() -> None:
    paths = [ROOT / "manager.py", *[path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]]
    assert len(paths) > len(ROOMS)
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in paths
        for problem in find_set_and_reset(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    "body",
    [
        "self._eviction.giver = sequence\n        self._slots.release(sequence)\n        self._eviction.giver = None",
        "self._log.note_start(sequence)\n        self._slots.start(sequence)\n        self._log.note_start(None)",
        "try:\n            self.giver: object = 1\n        finally:\n            self.other = self.giver = None",
        "self._log.tell(who=sequence)\n        if sequence:\n            self._log.tell(who=None)",
    ],
)
def test_the_checker_finds_it(body: str) -> None:
    found = find_set_and_reset(f"class Room:\n    def call(self, sequence):\n        {body}\n")
    assert len(found) == 1
    assert found[0].startswith("Room.call: sets ")


@pytest.mark.parametrize(
    "body",
    [
        "self.giver = None\n        self.giver = sequence",  # made later than the object
        "self.giver = sequence\n        self.other = None",
        "self.giver = sequence\n        def later():\n            self.giver = None",
        "given, self.giver = self.giver, None",  # what was kept since an earlier call is taken
        "if sequence:\n            self.giver = sequence\n        else:\n            self.giver = None",
        "found.append(sequence)\n        found.append(None)",
    ],
)
def test_the_checker_lets_the_rest_be(body: str) -> None:
    assert find_set_and_reset(f"class Room:\n    def call(self, sequence):\n        {body}\n") == []
