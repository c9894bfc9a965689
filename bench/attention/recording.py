"""Records what Triton would compile and launch on a GPU, without one: a stand-in for the driver.

Calls run on CPU tensors, in a process without TRITON_INTERPRET, and launch nothing, so outputs are undefined. A
specialisation is what Triton compiles once: types, constants, which integers are 1 or multiples of 16, and which
addresses are multiples of 16. In serving, a call with a new one has to wait for the compiler.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

SMS = {"sm80": 108, "sm89": 142, "sm90": 132, "sm100": 148, "gfx942": 304}
"""Multiprocessors of an A100, an L40S, an H100 SXM, a B200 and an MI300X."""


def gpu_target(target: str) -> Any:
    """What Triton calls a target."""
    from triton.backends.compiler import GPUTarget

    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    return GPUTarget("cuda", int(target.removeprefix("sm")), 32)


@dataclass(frozen=True)
class Specialisation:
    """What is compiled once. key: equal for equal ones. options: the compiler's options, such as `num_warps`."""

    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    key: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        name: str = self.function.__name__
        return name

    @property
    def named_constants(self) -> dict[str, Any]:
        """Constants by parameter, with the arguments that Triton made constant because they are 1 or None."""
        return {self.function.arg_names[index[0]]: value for index, value in self.constants.items()}


@dataclass
class Recording:
    """Launches in their order, each with its grid; `specialisations` are the different ones, by their key."""

    target: str
    launches: list[tuple[Specialisation, tuple[int, ...]]] = field(default_factory=list)
    specialisations: dict[str, Specialisation] = field(default_factory=dict)

    @property
    def count_sms(self) -> int:
        """The target's multiprocessors."""
        return SMS[self.target]

    def first_launches(self) -> list[tuple[Specialisation, tuple[int, ...]]]:
        """Each specialisation with the grid that it was first launched with."""
        grids: dict[str, tuple[int, ...]] = {}
        for specialisation, grid in self.launches:
            grids.setdefault(specialisation.key, grid)
        return [(specialisation, grids[key]) for key, specialisation in self.specialisations.items()]


class _Driver:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, target: str) -> None:
        self._target = gpu_target(target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        return self._target


@contextmanager
def record(target: str) -> Iterator[Recording]:
    """Record the kernels that are launched, without a GPU. kernels/table.py sees the target and its number of SMs.

    Raises RuntimeError in the interpreter, which has taken the compiler's place for the whole process.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("expected TRITON_INTERPRET to be unset: there the interpreter takes the compiler's place")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kvblocks.kernels import table

    recording, run = Recording(target), JITFunction.run
    found: list[Specialisation] = []

    def instead_of_compiling(
        function: Any, key: object, signature: Any, _device: int, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        what = f"{function.__module__}.{function.__name__} {key}"
        settings = dict(options.__dict__)
        found.append(Specialisation(function, signature, constants, attributes, settings, what))

    def recording_run(function: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        found.clear()
        run(function, *args, grid=grid, **kwargs)
        specialisation = recording.specialisations.setdefault(found[0].key, found[0])
        recording.launches.append((specialisation, tuple(grid)))

    # The driver is not put back: one that is active already was set by another recording.
    driver.set_active(_Driver(target))  # type: ignore[arg-type]
    with (
        patch.object(JITFunction, "_do_compile", instead_of_compiling),
        patch.object(JITFunction, "run", recording_run),
        patch.object(table, "family", lambda _device: target),
        patch.object(table, "count_sms", lambda _device: SMS[target], create=True),
    ):
        _forget_bindings()
        try:
            yield recording
        finally:
            _forget_bindings()


def _forget_bindings() -> None:
    """Make every kernel bind its arguments anew. Otherwise it keeps the binder of its first target."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("kvblocks.kernels.")]
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    for function in functions:
        function.device_caches.clear()
