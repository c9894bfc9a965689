"""`install` and `uninstall`: replace mlx-lm's prompt cache by `BlockPromptCache`, and restore it."""

import os
import sys
from typing import Any

import mlx.core as mx

from kvblocks import InvalidArgumentError
from kvblocks.integrations.mlx_lm import probe
from kvblocks.integrations.mlx_lm.prompt_cache import BlockPromptCache

_NAME, _SERVER, _CACHE = "LRUPromptCache", "mlx_lm.server", "mlx_lm.models.cache"
_THEIR_SIZE, _THEIR_BYTES = 10, 1 << 63  # what mlx-lm's own has by default
_originals: dict[str, Any] = {}


def install(*, max_bytes: int | None = None, block_size: int = 64, disk: Any = None) -> type[BlockPromptCache]:
    """Make mlx-lm's server, and programs that create an `LRUPromptCache`, use kvblocks from now on. Returns the class.

    max_bytes: the most bytes of each cache; None: a quarter of the machine's memory. A program's own `max_bytes` takes
    precedence, and so does its `max_size`, except for mlx-lm's default of 10, since here bytes are bounded and not the
    number of prompts. disk: a `DiskOptions`, to also keep what is inserted in a folder, and to find it there after a
    restart. Replaces a name in two modules of mlx-lm, in memory, so call it before a program imports the name. A second
    call replaces the options. Raises UnsupportedEngineError and InvalidArgumentError.
    """
    given: Any = max_bytes
    if given is not None and (type(given) is not int or given < 0):
        raise InvalidArgumentError(f"install: max_bytes: expected an int of at least 0, or None, got {max_bytes!r}")
    probe.check_mlx_lm()
    server = sys.modules.get(_SERVER)
    if server is not None:
        probe.check_server(server)
    most = default_max_bytes() if max_bytes is None else max_bytes

    class InstalledPromptCache(BlockPromptCache):
        """A `BlockPromptCache` with the parameters of mlx-lm's LRUPromptCache."""

        def __init__(self, max_size: int = _THEIR_SIZE, max_bytes: int = _THEIR_BYTES) -> None:
            super().__init__(
                max_bytes=most if max_bytes == _THEIR_BYTES else max_bytes,
                block_size=block_size,
                max_size=None if max_size == _THEIR_SIZE else max_size,
                disk=disk,
            )

    BlockPromptCache(block_size=block_size)  # refuses a bad one now
    for name in (_CACHE, _SERVER):
        module: Any = sys.modules.get(name)
        if module is not None:
            _originals.setdefault(name, getattr(module, _NAME))
            setattr(module, _NAME, InstalledPromptCache)
    return InstalledPromptCache


def uninstall() -> None:
    """Undo `install`. Existing caches keep working."""
    original = _originals.get(_CACHE)
    for name in (_CACHE, _SERVER):  # a server that was imported since `install` has ours, too
        if original is not None and name in sys.modules:
            setattr(sys.modules[name], _NAME, original)
    _originals.clear()


def default_max_bytes() -> int:
    """Return a quarter of the memory that a model may use on this machine, in bytes."""
    total = mx.device_info().get("memory_size")
    if total is None:  # without a GPU
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total) // 4
