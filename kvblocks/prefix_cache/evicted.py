"""`EvictedBlocks`: what a `PrefixCache` gave up. Not compiled, since a compiled class can't be a list."""

from typing import Any


class EvictedBlocks(list[int]):
    """The ids that the cache gave up, in the order in which they went; the caller's again.

    payloads: the payloads that went, with their blocks or alone, in that order. Who makes a list sets it: a constructor
    in Python would take a tenth of the time of an eviction.
    """

    __slots__ = ("payloads",)

    payloads: list[Any]
