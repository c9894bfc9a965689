"""A tenant: whoever shares a salt, with a quota on what it may keep cached while others want the space.

The runs that a tenant has cached count it up and down; `TenantQuotas` makes it and tells it what becomes free. What
stops being free is not told, but found out when somebody looks, so that it costs nothing where nobody does.

Invariants: every free cached block of the tenant's is in `free_blocks`, in the order in which they became free (the
free queue puts those that left a window before the others); together with those that aren't any more they are at most
2 * num_cached_blocks + 16. Every tenant that is over its quota and has `free_blocks` is a candidate of `OverQuota`.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from kvblocks.core.block import Account, KVCacheBlock
from kvblocks.retention.adviser import Adviser


class OverQuota:
    """The tenants beyond their quotas. tenants: each with its number, in the order in which they went beyond.

    Those that may have free blocks are candidates, in a heap by number; who has everything in use costs nothing.
    """

    __slots__ = ("_candidates", "_num_entered", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[Tenant, int] = {}
        self._candidates: list[tuple[int, Tenant]] = []  # some may have left since, or have entered again
        self._num_entered = 0

    def enter(self, tenant: "Tenant") -> None:
        """Note that a tenant, which isn't here, is beyond its quota. O(log tenants) on average."""
        self._num_entered += 1
        self.tenants[tenant] = self._num_entered
        if tenant.free_blocks:
            self.note_free(tenant)

    def leave(self, tenant: "Tenant") -> None:
        """Note that a tenant isn't beyond its quota any more, if it was. O(1)."""
        self.tenants.pop(tenant, None)

    def note_free(self, tenant: "Tenant") -> None:
        """Note that a tenant has a free block, if it is here. O(log tenants) on average."""
        number = self.tenants.get(tenant, 0)
        if not number or tenant.candidate_number == number:
            return
        tenant.candidate_number = number
        heappush(self._candidates, (number, tenant))
        if len(self._candidates) > 2 * len(self.tenants) + 16:
            self._candidates = [entry for entry in self._candidates if self._is_valid(entry)]
            heapify(self._candidates)

    def next_tenant(self) -> "Tenant | None":
        """Return the tenant that is here longest and has a free block; None: none has. O(log tenants) on average."""
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
        """Let these be the tenants beyond their quotas, in this order. O(tenants x log tenants)."""
        self.tenants.clear()
        self._candidates.clear()
        for tenant in tenants:
            self.enter(tenant)

    def _is_valid(self, entry: "tuple[int, Tenant]") -> bool:
        return self.tenants.get(entry[1]) == entry[0]


class Tenant(Account):
    """The sequences of one salt.

    max_cached_blocks: its quota. num_cached_blocks: what it has cached, owned or free. free_blocks: blocks that it gave
    back, least recently first; some may have been taken or evicted since. over: shared by all tenants; it keeps
    candidate_number. adviser: its eviction policy, None until one is asked; `Eviction` keeps it.
    """

    __slots__ = ("adviser", "candidate_number", "free_blocks", "max_cached_blocks", "num_cached_blocks", "over", "salt")

    def __init__(self, salt: str | None, max_cached_blocks: int, over: OverQuota) -> None:
        self.salt = salt
        self.max_cached_blocks = max_cached_blocks
        self.num_cached_blocks = 0
        self.free_blocks: OrderedDict[KVCacheBlock, None] = OrderedDict()
        self.over = over
        self.candidate_number = 0
        self.adviser: Adviser | None = None

    @property
    def num_excess_blocks(self) -> int:
        """Cached blocks beyond the quota; negative while it isn't used up. O(1)."""
        return self.num_cached_blocks - self.max_cached_blocks

    def add(self, num_blocks: int) -> None:
        """Count blocks that became cached, or with a negative number are cached no more. O(log tenants) on average."""
        self.num_cached_blocks += num_blocks
        if self.num_cached_blocks > self.max_cached_blocks:
            if self not in self.over.tenants:
                self.over.enter(self)
        elif num_blocks < 0:
            self.over.leave(self)
        if num_blocks < 0:
            self._limit_stale()

    def note_free(self, block: KVCacheBlock) -> None:
        """Put a cached block of the tenant's, which was just released, behind the others. O(log tenants) on average."""
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block)
        self.over.note_free(self)
        self._limit_stale()

    def first_free(self) -> KVCacheBlock | None:
        """Return the least recently used of its free cached blocks, None if there is none. O(1) on average."""
        while self.free_blocks:
            block = next(iter(self.free_blocks))
            if self._has_free(block):
                return block
            del self.free_blocks[block]
        return None

    def all_free(self) -> list[KVCacheBlock]:
        """Return its free cached blocks, least recently used first. O(them, and those that were)."""
        return [block for block in self.free_blocks if self._has_free(block)]

    def _has_free(self, block: KVCacheBlock) -> bool:
        run = block.run
        return block.ref_cnt == 0 and run is not None and run.account is self and run.epoch.is_current

    def _limit_stale(self) -> None:
        """Forget blocks that aren't free and the tenant's any more, once they are many: half of those that it keeps."""
        if len(self.free_blocks) > 2 * self.num_cached_blocks + 16:
            self.free_blocks = OrderedDict.fromkeys(self.all_free())

    def __repr__(self) -> str:
        return f"Tenant({self.salt!r}, {self.num_cached_blocks} of {self.max_cached_blocks} blocks)"
