"""The fingerprint of what computes KV: whatever makes another KV of the same tokens makes another fingerprint.

It covers the bytes of all weights, the model's shape and positions (RoPE and its scaling are in the configuration),
dtype, the layout of a block, and the format of this file. The layout in which weights are read is not part of it: KV
then differs in its last bits, as it does between two processors or two sizes of a batch. A mode that promises the same
bits takes along what those bits depend on, the weights' layout among it. Adapters are keys of the prefixes (`lora`),
not part of it: the engine has none.
"""

import hashlib
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from kvblocks.engine.run.runner import LoadedModel

_FORMAT = "kvblocks KV 1"


def fingerprint(model: LoadedModel, layout: str, mode: str) -> bytes:
    """Return 32 bytes that stand for a model and how its KV is computed and laid out. O(bytes of the weights).

    layout: of a block's bytes. mode: what bits depend on beside the weights.
    """
    digest = xxh3_128()
    weights = model.weights
    if weights.embedding.dim() > 2:  # it is read where the head lies
        weights = replace(weights, embedding=weights.lm_head)
    for name, tensor in sorted(_tensors("", weights)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        dense = tensor.to_dense() if tensor.is_mkldnn else tensor
        flat = dense.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    shape = {**asdict(model.config), "architecture": model.config.architecture.name}
    parts = (_FORMAT, repr(sorted(shape.items())), digest.hexdigest(), layout, mode)
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in weights, by where they are."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    else:
        return []
    return [found for key, item in items for found in _tensors(f"{name}.{key}", item)]
