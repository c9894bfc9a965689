"""How a block is named to the outside, by the path that people import: see `kvblocks.core.hashing`."""

from kvblocks.core.hashing import ExtraKey, HashFunction, PositionKey, decode_extra_keys

__all__ = ["ExtraKey", "HashFunction", "PositionKey", "decode_extra_keys"]
