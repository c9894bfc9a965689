"""Reads calls that are written as Python writes them. Nothing is executed; only literals are accepted."""

import ast
from typing import Any

from kvblocks.server.tools.calls import Written, write_call

_NAMES = {"true": True, "false": False, "null": None}


def read_python_calls(text: str) -> list[Written] | None:
    """Return the calls in a text such as `[name(key="text")]`, or None if it isn't of that form. O(text)."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_read_call(item) for item in items] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_call(node: ast.expr) -> Written:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("expected named arguments")
        arguments[keyword.arg] = _value(keyword.value)
    call = write_call(ast.unparse(node.func), arguments)
    if call is None:
        raise ValueError("expected arguments that JSON can have")
    return call


def _value(node: ast.expr) -> Any:
    """The JSON value of a literal. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, bool, int, float))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise ValueError("expected a literal")
