"""A stand-in for CUDA graphs: a step's launches are recorded once, and replayed on the recorded tensors.

Like a CUDA graph, a replay runs the recorded operators and kernels again, with the same numbers and the same memory,
and nothing else of the step. It writes its results to the recorded tensors. So a step gives wrong results here if it
reads a value on the host, or a tensor that has moved since.
"""

from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class RecordedGraph(TorchDispatchMode):
    """Records the operators that run inside it. launches: calls that run each of them again."""

    def __init__(self):
        super().__init__()
        self.launches = []
        self.num_kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        made = [
            tensor.untyped_storage().data_ptr() not in known for tensor in tree_leaves(outputs) if is_tensor(tensor)
        ]
        schema = function._schema  # noqa: SLF001 - what says which arguments are written
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        if writes or any(made):
            self.launches.append(lambda: repeat(function, args, kwargs, outputs, writes=writes))
        return outputs

    def launch(self, executor, *args, **kwargs):
        """Record a launch of one of our kernels."""
        self.num_kernels += 1
        self.launches.append(lambda: RUN(executor, *args, **kwargs))
        with _disable_current_modes():
            return RUN(executor, *args, **kwargs)

    def replay(self):
        """Run everything again."""
        for launch in self.launches:
            launch()


RUN = GridExecutor.__call__


def is_tensor(value):
    return isinstance(value, torch.Tensor) and value.numel() > 0


def repeat(function, args, kwargs, outputs, *, writes):
    """Run an operator again, into the tensors of its first result."""
    results = function(*args, **kwargs)
    if not writes and "empty" not in str(function):
        for result, output in zip(tree_leaves(results), tree_leaves(outputs), strict=True):
            output.copy_(result)


def capture_recorded(step, graphs=None):
    """Capture as `GraphCapture` does: run once before, then record. graphs: a list that gets what was recorded."""
    step.compute()
    graph = RecordedGraph()
    # A function is bound to the executor, a method wouldn't be.
    with graph, patch.object(GridExecutor, "__call__", lambda *a, **k: graph.launch(*a, **k)):  # noqa: PLW0108
        logits = step.compute()
    if graphs is not None:
        graphs.append(graph)

    def replay():
        graph.replay()
        return logits

    return replay
