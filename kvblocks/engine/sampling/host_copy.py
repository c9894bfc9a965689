"""Copies of results to the host, without waiting."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor to the host, begun now and read later. On a CPU it is the tensor itself.

    It goes to pinned memory, after the work that the device already has. Work that the device gets later doesn't change
    it.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_done(self) -> bool:
        """Whether the copy is there. O(1)."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the copy is there."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[float]:
        """The values of the vector, waiting if needed. O(values)."""
        self.wait()
        values: list[float] = self._values.tolist()
        return values
