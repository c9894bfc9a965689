"""`EvictedBlocks`: what a `PrefixCache` gave up. Not compiled, since a compiled class can't be a list."""

from collections.abc import Iterable
from typing import Any


class EvictedBlocks(list[int]):
    """The ids that the cache gave up, in the order in which they went; the caller's again.

    payloads: the payloads that went, with their blocks or alone, in that order.
    """

    __slots__ = ("payloads",)

    def __init__(self, kv_block_ids: Iterable[int] = (), payloads: Iterable[Any] = ()) -> None:
        list.__init__(self, kv_block_ids)  # faster than `super()`
        self.payloads: list[Any] = [*payloads]
