"""The dtypes that a model can run in: their names, and the one that a folder's config.json gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvblocks.engine.model.fields import read_json
from kvblocks.errors import InvalidArgumentError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
