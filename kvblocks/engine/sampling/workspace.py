"""Memory for the intermediate results of sampling."""

import torch
from torch import Tensor


class Workspace:
    """Scratch tensors by name, which are kept for reuse on a CPU.

    Fresh memory costs a page fault every 4 KiB, which takes several times as long as the computation on it. The CPU's
    allocator may or may not reuse memory; torch's allocator for GPUs does.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, valid until the name is taken again. A name has one dtype.

        O(1) unless it must grow.
        """
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = shape[0] * shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)
