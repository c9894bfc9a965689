"""`GGUFModel`: an opened and checked GGUF file that provides everything a Hugging Face folder would."""

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.gguf.metadata import Metadata, config_fields
from kvblocks.engine.model.gguf.tensors import ROPE_FACTORS, StoredTensor, check_readable, dequantize
from kvblocks.engine.model.gguf.tokenizer import tokenizer_parts


class GGUFModel:
    """A model in one GGUF file, which stays mapped as long as this object lives. path: the file.

    Raises ModelError if the file is no GGUF, is one part of several, or holds an architecture or a quantization that is
    not supported. Reads no weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"expected a GGUF file, got {path}: {error}") from error
        self._metadata = Metadata(reader)
        if self._metadata.number("split.count", 1) > 1:
            raise ModelError(f"expected one GGUF file, got a part of several, {path}: merge them (llama-gguf-split)")
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        embedding = by_name.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"expected weights in the GGUF file {path}, got none: no 'token_embd.weight'")
        check_readable(reader.tensors)
        factors = by_name.pop(ROPE_FACTORS, None)
        self.fields: dict[str, Any] = config_fields(
            self._metadata,
            int(embedding.shape[-1]),
            is_tied="output.weight" not in by_name,
            rope_factors=None if factors is None else lambda: dequantize(factors),
        )
        self.tensors = [StoredTensor(tensor, self.fields) for tensor in by_name.values()]

    @cached_property
    def tokenizer(self) -> tuple[str, dict[str, Any]]:
        """The text of tokenizer.json and the fields of tokenizer_config.json. Raises ModelError."""
        return tokenizer_parts(self._metadata, self.fields["max_position_embeddings"])
