"""A tenant: all sequences of one salt, with a quota on what they may keep cached while others want the space.

The tenant's runs add and subtract their cached blocks here. `TenantQuotas` makes tenants, and tells them which blocks
become free. A tenant isn't told which blocks stop being free: it finds out when it looks for a free block, so this
costs nothing otherwise.

Invariants: `free_blocks` contains every free cached block of the tenant, in the order in which they became free (the
free queue has those that left a window before the others). It may also contain blocks that are no longer free, and has
at most 2 * num_cached_blocks + 16 blocks. Every tenant that is over its quota and has `free_blocks` is a candidate of
`OverQuota`.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from kvblocks.core.block import Account, KVCacheBlock
from kvblocks.retention.adviser import Adviser


class OverQuota:
    """The tenants over their quotas. tenants: for each tenant, a number that gives the order in which they went over.

    Tenants that may have free blocks are candidates, in a heap by that number. A tenant without free blocks costs
    nothing.
    """

    __slots__ = ("_candidates", "_num_entered", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[Tenant, int] = {}
        self._candidates: list[tuple[int, Tenant]] = []  # some are outdated: they have left, or entered again
        self._num_entered = 0

    def enter(self, tenant: "Tenant") -> None:
        """Add a tenant that went over its quota. O(log tenants) on average."""
        self._num_entered += 1
        self.tenants[tenant] = self._num_entered
        if tenant.free_blocks:
            self.note_free(tenant)

    def leave(self, tenant: "Tenant") -> None:
        """Remove a tenant, if it is here. O(1)."""
        self.tenants.pop(tenant, None)

    def note_free(self, tenant: "Tenant") -> None:
        """Make a tenant a candidate, if it is here, since it has a free block. O(log tenants) on average."""
        number = self.tenants.get(tenant, 0)
        if not number or tenant.candidate_number == number:
            return
        tenant.candidate_number = number
        heappush(self._candidates, (number, tenant))
        if len(self._candidates) > 2 * len(self.tenants) + 16:
            self._candidates = [entry for entry in self._candidates if self._is_valid(entry)]
            heapify(self._candidates)

    def next_tenant(self) -> "Tenant | None":
        """Return the tenant that has been here longest and has a free block; or None. O(log tenants) on average."""
        while self._candidates:
            entry = self._candidates[0]
            if self._is_valid(entry):
                tenant = entry[1]
                if tenant.first_free() is not None:
                    return tenant
                tenant.candidate_number = 0
            heappop(self._candidates)
        return None

    def reorder(self, tenants: "list[Tenant]") -> None:
        """Make these the tenants over their quotas, in this order. O(tenants x log tenants)."""
        self.tenants.clear()
        self._candidates.clear()
        for tenant in tenants:
            self.enter(tenant)

    def _is_valid(self, entry: "tuple[int, Tenant]") -> bool:
        return self.tenants.get(entry[1]) == entry[0]


class Tenant(Account):
    """The sequences of one salt."""

    __slots__ = ("adviser", "candidate_number", "free_blocks", "max_cached_blocks", "num_cached_blocks", "over", "salt")

    def __init__(self, salt: str | None, max_cached_blocks: int, over: OverQuota) -> None:
        self.salt = salt
        self.max_cached_blocks = max_cached_blocks
        """Its quota."""
        self.num_cached_blocks = 0
        """Its cached blocks, owned or free."""
        self.free_blocks: OrderedDict[KVCacheBlock, None] = OrderedDict()
        """Blocks that it released, least recently first. Some may have been taken or evicted since."""
        self.over = over
        """Shared by all tenants."""
        self.candidate_number = 0
        """Written by `over`."""
        self.adviser: Adviser | None = None
        """Its eviction policy; None until it is used. Written by `Eviction`."""

    @property
    def num_excess_blocks(self) -> int:
        """Cached blocks over the quota; negative while the tenant is below it. O(1)."""
        return self.num_cached_blocks - self.max_cached_blocks

    def add(self, num_blocks: int) -> None:
        """Count blocks that became cached, or (negative) stopped being cached. O(log tenants) on average."""
        self.num_cached_blocks += num_blocks
        if self.num_cached_blocks > self.max_cached_blocks:
            if self not in self.over.tenants:
                self.over.enter(self)
        elif num_blocks < 0:
            self.over.leave(self)
        if num_blocks < 0:
            self._limit_stale()

    def note_free(self, block: KVCacheBlock) -> None:
        """Add a cached block of the tenant that was just released, as the last one. O(log tenants) on average."""
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block)
        self.over.note_free(self)
        self._limit_stale()

    def first_free(self) -> KVCacheBlock | None:
        """Return the least recently used of its free cached blocks; None if there is none. O(1) on average."""
        while self.free_blocks:
            block = next(iter(self.free_blocks))
            if self._has_free(block):
                return block
            del self.free_blocks[block]
        return None

    def all_free(self) -> list[KVCacheBlock]:
        """Return its free cached blocks, least recently used first. O(`free_blocks`)."""
        return [block for block in self.free_blocks if self._has_free(block)]

    def _has_free(self, block: KVCacheBlock) -> bool:
        run = block.run
        return block.ref_cnt == 0 and run is not None and run.account is self and run.epoch.is_current

    def _limit_stale(self) -> None:
        """Drop entries that are no longer free cached blocks of the tenant, once more than half may be stale."""
        if len(self.free_blocks) > 2 * self.num_cached_blocks + 16:
            self.free_blocks = OrderedDict.fromkeys(self.all_free())

    def __repr__(self) -> str:
        return f"Tenant({self.salt!r}, {self.num_cached_blocks} of {self.max_cached_blocks} blocks)"
