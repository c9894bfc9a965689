"""Fixes the keys by which Triton finds our kernels in its cache, so that all processes look for the same ones."""

import os
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages


def fix_keys() -> None:
    """Compute all kernels' keys, in one order. Call it before the process computes any, by launching a kernel.

    A key holds the constants that a kernel's functions use, but only of those functions whose keys Triton (3.6 and 3.7)
    has computed before. So the order of a process's launches decides whether it finds what another one has compiled. It
    does nothing in the interpreter, which has no keys, and unless TRITON_CACHE_DIR names a cache that was filled ahead.
    """
    if not os.environ.get("TRITON_CACHE_DIR") or find_spec("triton") is None:
        return
    from triton.runtime.jit import JITFunction

    from kvblocks import kernels

    for name in sorted(module.name for module in walk_packages(kernels.__path__, f"{kernels.__name__}.")):
        for function in vars(import_module(name)).values():
            if isinstance(function, JITFunction):
                _ = function.cache_key
