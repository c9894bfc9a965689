"""The formats in which routers and engines talk about cached blocks: events, their transport, and who has which blocks.

    payload = CODECS["vllm"].encode(EventBatch(time(), Converter("vllm").convert(manager.take_events()), 0))
    decode(payload)

The records of the wire and their encodings are `kvblocks.wire.records` and `kvblocks.wire.codecs`, without input or
output.

Needs `pip install 'kvblocks[wire]'`. The names below are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvblocks.wire.codecs import CODECS, Codec, decode
    from kvblocks.wire.convert import Converter
    from kvblocks.wire.errors import MalformedFrameError, PublisherClosedError
    from kvblocks.wire.records import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, UnknownEvent

_HOMES = {
    "codecs": ("CODECS", "Codec", "decode"),
    "convert": ("Converter",),
    "errors": ("MalformedFrameError", "PublisherClosedError"),
    "records": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "UnknownEvent"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CODECS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Codec",
    "Converter",
    "EventBatch",
    "MalformedFrameError",
    "PublisherClosedError",
    "UnknownEvent",
    "decode",
]


def __getattr__(name: str) -> object:
    """Import what is asked for. Raises AttributeError for a name that there isn't."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvblocks.wire' has no attribute {name!r}")
    return vars(import_module(f"kvblocks.wire.{_MODULES[name]}"))[name]
