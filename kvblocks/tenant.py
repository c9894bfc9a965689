"""A tenant: whoever shares a salt, with a quota on what it may keep cached while others want the space.

The runs that a tenant has cached count it up and down; `TenantQuotas` makes it and tells it what becomes free. What
stops being free is not told, but found out when somebody looks, so that it costs nothing where nobody does.

Invariants: every free cached block of the tenant's is in `free_blocks`, in the order of the free queue; together with
those that aren't any more they are at most 2 * num_cached_blocks + 16.
"""

from collections import OrderedDict
from typing import Any


class Tenant:
    """The sequences of one salt.

    max_cached_blocks: its quota. num_cached_blocks: what it has cached, owned or free. free_blocks: blocks that it gave
    back, least recently first; some may have been taken or evicted since. over: shared by all tenants; those that are
    beyond their quotas, longest first.
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
        """Count blocks that became cached, or with a negative number are cached no more. O(1) on average."""
        self.num_cached_blocks += num_blocks
        if self.num_cached_blocks > self.max_cached_blocks:
            self.over[self] = None
        elif num_blocks < 0:
            self.over.pop(self, None)
        if num_blocks < 0:
            self._limit_stale()

    def note_free(self, block: Any) -> None:
        """Put a cached block of the tenant's, which was just released, behind the others. O(1) on average."""
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block)
        self._limit_stale()

    def first_free(self) -> Any:
        """Return the least recently used of its free cached blocks, None if there is none. O(1) on average."""
        while self.free_blocks:
            block = next(iter(self.free_blocks))
            if self._has_free(block):
                return block
            del self.free_blocks[block]
        return None

    def _has_free(self, block: Any) -> bool:
        run = block.run
        return block.ref_cnt == 0 and run is not None and run.tenant is self and bool(run.epoch.is_current)

    def _limit_stale(self) -> None:
        """Forget blocks that aren't free and the tenant's any more, once they are many: half of those that it keeps."""
        if len(self.free_blocks) > 2 * self.num_cached_blocks + 16:
            self.free_blocks = OrderedDict.fromkeys([block for block in self.free_blocks if self._has_free(block)])

    def __repr__(self) -> str:
        return f"Tenant({self.salt!r}, {self.num_cached_blocks} of {self.max_cached_blocks} blocks)"
