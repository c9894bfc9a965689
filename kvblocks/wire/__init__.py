"""The formats in which engines tell routers about cached blocks: events, their transport, and who has which block.

    publisher = EventPublisher("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    publisher.publish(manager.take_events())           # in the engine, each step

    with MirrorClient({"worker-0": Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")}) as client:
        client.receive(1.0)                            # in the router
        client.mirror.find("worker-0", block_hashes)

The records of the wire and their encodings are in `kvblocks.wire.codecs`; the bookkeeping of a publisher is in
`kvblocks.wire.ledger`, and that of a consumer in `kvblocks.wire.mirror`. These three do no input or output. Only
`kvblocks.wire.publisher`, `client` and `tail` use sockets. docs/design/wire.md explains a frame byte by byte.

Needs `pip install 'kvblocks[wire]'`. The names below are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvblocks.wire.client import MirrorClient, Source
    from kvblocks.wire.codecs import (
        CODECS,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        Codec,
        EventBatch,
        UnknownEvent,
        decode,
    )
    from kvblocks.wire.convert import Converter
    from kvblocks.wire.errors import MalformedFrameError, PublisherClosedError
    from kvblocks.wire.mirror import EventMirror
    from kvblocks.wire.publisher import EventPublisher

_HOMES = {
    "client": ("MirrorClient", "Source"),
    "codecs": (
        *("CODECS", "Codec", "decode"),
        *("AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "UnknownEvent"),
    ),
    "convert": ("Converter",),
    "errors": ("MalformedFrameError", "PublisherClosedError"),
    "mirror": ("EventMirror",),
    "publisher": ("EventPublisher",),
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
    "EventMirror",
    "EventPublisher",
    "MalformedFrameError",
    "MirrorClient",
    "PublisherClosedError",
    "Source",
    "UnknownEvent",
    "decode",
]


def __getattr__(name: str) -> object:
    """Import the name that is asked for. Raises AttributeError for an unknown name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvblocks.wire' has no attribute {name!r}")
    return vars(import_module(f"kvblocks.wire.{_MODULES[name]}"))[name]
