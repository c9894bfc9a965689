"""Memory for what is computed on the way."""

import torch
from torch import Tensor


class Workspace:
    """Tensors to write to, by name; on a CPU they are kept.

    A large piece of fresh memory costs a page fault every 4 KiB, which takes several times what is then done with it,
    and whether an allocator gives back a used one can't be told. On a GPU torch's own does.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with any contents, good until the name is taken again: one dtype a name. O(1), but for growing."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = shape[0] * shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)
