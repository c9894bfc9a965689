"""mini-sglang's radix cache, from a checkout that the environment variable MINISGL_SRC names; it isn't on PyPI.

And kvblocks in its place, called as mini-sglang calls it.

Needs torch, apache-tvm-ffi and a C++ compiler: the cache compares keys in C++, which is compiled at the first call.
"""
# ruff: noqa: E402  # what must be set before the peer is imported stands between the imports

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

if "MINISGL_SRC" not in os.environ:
    raise ImportError("set MINISGL_SRC to a checkout of mini-sglang")
_SOURCES = Path(os.environ["MINISGL_SRC"], "python")
for _package in ("minisgl", "minisgl.kvcache", "minisgl.kernel"):  # without their __init__, which want a GPU's packages
    _module = ModuleType(_package)
    _module.__path__ = [str(_SOURCES.joinpath(*_package.split(".")))]
    sys.modules.setdefault(_package, _module)

# Its radix cache takes the page size and a rounding from modules that need a GPU's packages.
_core: Any = ModuleType("minisgl.core")
_core.get_global_ctx = lambda: SimpleNamespace(page_size=1)
_utils: Any = ModuleType("minisgl.utils")
_utils.align_down = lambda number, unit: number // unit * unit
sys.modules |= {"minisgl.core": _core, "minisgl.utils": _utils}

import torch
from minisgl.kernel.radix import fast_compare_key

sys.modules["minisgl.kernel"].fast_compare_key = fast_compare_key  # type: ignore[attr-defined]  # a module of our own

from minisgl.kvcache.radix_cache import RadixPrefixCache

sys.modules["minisgl"].kvcache = sys.modules["minisgl.kvcache"]  # type: ignore[attr-defined]  # likewise

from bench.core.page_one import Contestant
from kvblocks.integrations.mini_sglang import KVBlocksPrefixCache

torch.set_num_threads(1)


def make_tree() -> Contestant:
    """Return an empty radix cache of pages of one token, on the CPU."""
    return _make_contestant(RadixPrefixCache(torch.device("cpu")))


def make_ours() -> Contestant:
    """Return the same of kvblocks, as mini-sglang has it with `--cache-type kvblocks`."""
    return _make_contestant(KVBlocksPrefixCache(torch.device("cpu")))


def _make_contestant(tree: Any) -> Contestant:

    def pack(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    def lock_and_unlock(handle: Any) -> None:
        tree.lock_handle(handle)
        tree.lock_handle(handle, unlock=True)

    def insert_and_hold(tokens: torch.Tensor, ids: torch.Tensor) -> None:
        lock_and_unlock(tree.insert_prefix(tokens, ids).handle)

    def match(tokens: torch.Tensor) -> torch.Tensor:
        return tree.match_prefix(tokens).cuda_handle.get_matched_indices()

    def match_and_hold(tokens: torch.Tensor) -> torch.Tensor:
        handle = tree.match_prefix(tokens).cuda_handle
        ids = handle.get_matched_indices()
        lock_and_unlock(handle)
        return ids

    def evict(num_tokens: int) -> Any:
        return tree.evict(num_tokens)

    return Contestant(pack, tree.insert_prefix, insert_and_hold, match, match_and_hold, evict)
