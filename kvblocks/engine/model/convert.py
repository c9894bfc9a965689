"""Turns a GGUF file into the Hugging Face folder that `transformers` and this engine read.

Weights are stored as float32: a Q4_1 weight is q * scale + minimum with float16 scale and minimum, which needs more
bits than float16 or bfloat16 have. Rounding would save half the disk and change the logits.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.gguf.file import GGUFModel
from kvblocks.engine.model.loader import check_weights

__all__ = ["convert_gguf"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def convert_gguf(source: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Writes config, weights, tokenizer and chat template of the GGUF file `source` into the existing folder `folder`.

    Weights are float32, 4 bytes a parameter on disk and in memory while converting. `progress` is called with the
    fraction done, from 0 to 1.

    Raises ModelError if the file is not a GGUF, or holds an architecture, a tokenizer or a tensor that is not
    supported; OSError if the folder can't be written. O(parameters). Writes into `folder` only; after an error its
    content is partial.
    """
    model = GGUFModel(source)
    check_weights(model, ModelConfig.from_fields(model.fields))
    definition, config = model.tokenizer
    _write_json(folder / "config.json", model.fields)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", config)
    special = {name: config[name] for name in _SPECIAL_TOKENS if name in config}
    _write_json(folder / "special_tokens_map.json", special)
    special_ids = {name: model.fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **special_ids})
    tensors: dict[str, NDArray[np.float32]] = {}
    for position, tensor in enumerate(model.tensors, 1):
        tensors[tensor.name] = tensor.read()
        if progress is not None:
            progress(position / (len(model.tensors) + 1))  # the last share is the write to disk
    _save_tensors(tensors, folder / "model.safetensors")


def _save_tensors(tensors: dict[str, NDArray[np.float32]], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        os_error = re.search(r"os error (\d+)", str(error))
        if os_error is None:
            raise
        raise OSError(int(os_error[1]), str(error), str(path)) from error
    shutil.copymode(path.with_name("config.json"), path)  # safetensors makes private files; others follow the umask


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
