"""A tenant: whoever shares a salt, with a quota on what it may keep cached while others want the space.

A plain record. The runs that a tenant has cached count it up and down; `TenantQuotas` makes it and keeps the order of
its free blocks.
"""

from collections import OrderedDict
from typing import Any


class Tenant:
    """The sequences of one salt.

    max_cached_blocks: its quota. num_cached_blocks: what it has cached, owned or free. free_blocks: blocks that it gave
    back, least recently first; some may have been taken or evicted since. over: shared by all tenants; those that went
    over their quota, until somebody looks.
    """

    __slots__ = ("free_blocks", "max_cached_blocks", "num_cached_blocks", "over", "salt")

    def __init__(self, salt: str | None, max_cached_blocks: int, over: "dict[Tenant, None]") -> None:
        self.salt = salt
        self.max_cached_blocks = max_cached_blocks
        self.num_cached_blocks = 0
        self.free_blocks: OrderedDict[Any, None] = OrderedDict()
        self.over = over

    @property
    def num_excess_blocks(self) -> int:
        """Cached blocks beyond the quota; negative while it isn't used up. O(1)."""
        return self.num_cached_blocks - self.max_cached_blocks

    def add(self, num_blocks: int) -> None:
        """Count blocks that became cached, or with a negative number are cached no more. O(1)."""
        self.num_cached_blocks += num_blocks
        if self.num_cached_blocks > self.max_cached_blocks:
            self.over[self] = None

    def __repr__(self) -> str:
        return f"Tenant({self.salt!r}, {self.num_cached_blocks} of {self.max_cached_blocks} blocks)"
