"""The fingerprint of KV: whatever changes the KV of the same tokens changes the fingerprint.

It covers the bytes of all weights, the model's configuration (including RoPE and its scaling), the dtype, the layout of
a block, and the version of this format. It doesn't cover the layout in which weights are read, which changes only the
last bits of KV, as another processor or batch size does. A mode that promises the same bits adds all that these bits
depend on, including that layout. Adapters aren't covered either: they are keys of prefixes (`lora`), and this engine
has none.
"""

import hashlib
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from kvblocks import Plan
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.determinism import ARITHMETIC
from kvblocks.engine.run.runner import LoadedModel

_FORMAT = "kvblocks KV 1"


def fingerprint(model: LoadedModel, layout: str, mode: str) -> bytes:
    """Return 32 bytes that identify a model and how its KV is computed and laid out. O(bytes of the weights).

    layout: a text that describes the layout of a block's bytes. mode: what else the bits depend on.
    """
    digest = xxh3_128()
    weights = model.weights
    if weights.embedding.dim() > 2:  # the embedding is a view of the head
        weights = replace(weights, embedding=weights.lm_head)
    for name, tensor in sorted(_tensors("", weights)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        dense = tensor.to_dense() if tensor.is_mkldnn else tensor
        flat = dense.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    shape = {**asdict(model.config), "architecture": model.config.architecture.name}
    parts = (_FORMAT, repr(sorted(shape.items())), digest.hexdigest(), layout, mode)
    return hashlib.sha256("\n".join(parts).encode()).digest()


def kv_fingerprint(model: LoadedModel, plan: Plan, backend: Backend) -> bytes:
    """Return the fingerprint of an engine's KV, by which it is known outside the process. O(bytes of the weights)."""
    kept = model.dtype if backend.scales is None else backend.scales
    groups = tuple([group for group in plan.groups if group.has_table])
    layout = f"{kept}, blocks of {plan.block_size}, {groups}, layers {plan.layer_groups}"
    if plan.state_bytes:  # the number of slots is nobody's business
        layout += f", states of {plan.state_bytes} bytes"
    return fingerprint(model, layout, _bits_mode(model, backend))


def _bits_mode(model: LoadedModel, backend: Backend) -> str:
    """What the bits of KV depend on beside the weights, for an engine that promises the same bits."""
    if not backend.deterministic:
        return "natural"
    cpu = torch.backends.cpu.get_cpu_capability()
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu
    packed = " with packed weights" if model.weights.lm_head.is_mkldnn else ""
    how = f"deterministic {backend.attention} on {device}{packed}"
    return f"{how}, arithmetic {ARITHMETIC}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in weights, with their paths."""
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
