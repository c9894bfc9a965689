"""`EvictedBlocks`: what a `PrefixCache` evicted. Not compiled, since a compiled class can't be a list."""

from typing import Any


class EvictedBlocks(list[int]):
    """The ids that the cache evicted, in that order; they are the caller's again.

    The code that makes such a list sets `payloads`, because a constructor in Python would take a tenth of the time of
    an eviction.
    """

    __slots__ = ("payloads",)

    payloads: list[Any]
    """The evicted payloads, in that order, whether their blocks were evicted or not."""
