"""`install` and `uninstall`: put `BlockPromptCache` in the place of mlx-lm's prompt cache, and take it out again."""

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
    """Have mlx-lm's server, and programs that make an `LRUPromptCache`, use kvblocks from now on. Returns the class.

    max_bytes: of each cache that is made; None: a quarter of the machine's memory. A program's own `max_bytes` goes
    first, and so does its `max_size`, except for 10, mlx-lm's default: bytes are bounded, not the number of prompts.
    disk: a `DiskOptions`: what was inserted is also kept in a folder, and found there after a restart. Replaces a name
    in two modules of mlx-lm, in memory; a second call replaces the options. Call it before a program imports the name.
    Raises UnsupportedEngineError and InvalidArgumentError.
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
    """Undo `install`. Caches that were made keep working."""
    original = _originals.get(_CACHE)
    for name in (_CACHE, _SERVER):  # a server that was imported since `install` has ours, too
        if original is not None and name in sys.modules:
            setattr(sys.modules[name], _NAME, original)
    _originals.clear()


def default_max_bytes() -> int:
    """Return a quarter of the memory that a model may use here."""
    total = mx.device_info().get("memory_size")
    if total is None:  # without a GPU
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total) // 4
