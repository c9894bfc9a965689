"""Reads JSON files of models, and checks single fields and names of dtypes.

Every function raises ModelError with what it expected and what it got. None changes anything.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvblocks.engine.errors import ModelError
from kvblocks.errors import InvalidArgumentError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises ModelError if it can't be read or holds something else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"expected JSON in {path}, got: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"expected a JSON object in {path}, got a {type(fields).__name__}")
    return fields


def read_size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; a missing or null field is `default`."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"expected {name} to be a positive integer, got {value!r}")
    return value


def read_number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; a missing or null field is `default`."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"expected {name} to be a positive number, got {value!r}")
    return float(value)


def read_optional_number(fields: Mapping[str, Any], name: str) -> float | None:
    """A positive number, or None for a missing or null field."""
    return None if fields.get(name) is None else read_number(fields, name)


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false; a missing or null field is false."""
    value = fields.get(name)
    value = False if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"expected {name} to be true or false, got {value!r}")
    return value


def read_eos_token_ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them, or null, as a tuple."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values):
        raise ModelError(f"expected eos_token_id to be a token id or a list of them, got {value!r}")
    return tuple(values)


def parse_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype of a name or of a torch.dtype; None for None. Raises InvalidArgumentError."""
    if dtype is None:
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise InvalidArgumentError(f"dtype: expected {', '.join(DTYPES)} or None, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype in a folder's config.json, in its old or new field, or else float32. Raises ModelError."""
    fields = read_json(folder / "config.json")
    text = fields.get("text_config")
    for named in (fields, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(named.get(key)).removeprefix("torch.")
            if name in DTYPES:
                return DTYPES[name]
    return torch.float32
