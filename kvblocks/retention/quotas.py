"""Salts and their quotas: how many cached blocks each salt may keep while others want the space.

A quota alone evicts nothing: as long as the pool has blocks that hold nothing, a tenant may cache beyond its quota. But
when a cached block would be evicted next and tenants are over their quotas, the tenant that has been over longest loses
its least recently used free block instead. Owned blocks count towards a quota and are never taken.

Counting is exact: every cached run knows its tenant, by the salt in its first block's key.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from struct import unpack_from

from kvblocks.core.block import Epoch, KVCacheBlock, Run
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hooks import Accounts, Chooser
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.hashing.extra_keys import SALT_KIND
from kvblocks.retention.tenant import OverQuota, Tenant
from kvblocks.stats import QuotaUsage


class TenantQuotas(Accounts):
    """The tenants that have quotas, by salt."""

    def __init__(self) -> None:
        self.default_max_blocks: int | None = None
        self._over = OverQuota()
        self._tenants: dict[str | None, Tenant] = {}
        self._named: dict[str | None, int] = {}
        self._sweep_at = 1000

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def over(self) -> dict[Tenant, int]:
        """The tenants over their quotas, in the order in which they went over. Don't change it. O(1)."""
        return self._over.tenants

    @property
    def is_empty(self) -> bool:
        """Whether there are no quotas. O(1)."""
        return not self._named and self.default_max_blocks is None

    def tenants(self) -> list[Tenant]:
        """Return the tenants that have a quota of their own or anything cached, oldest first."""
        tenants = list(self._tenants.values())  # a copy, since another thread may ask, for metrics
        return [tenant for tenant in tenants if tenant.salt in self._named or tenant.num_cached_blocks]

    def usage(self) -> list[QuotaUsage]:
        """Return the quota and the usage of each of `tenants`. O(salts)."""
        return [QuotaUsage(t.salt, t.max_cached_blocks, t.num_cached_blocks) for t in self.tenants()]

    def limit_of(self, salt: str | None) -> int | None:
        """Return the quota of a salt, its own or the default; None if it has none. O(1)."""
        return self._named.get(salt, None if salt is None else self.default_max_blocks)

    def set_quota(self, salt: str | None, max_blocks: int | None) -> None:
        """Set the quota of one salt; None removes it. `charge` must follow. O(1)."""
        self._tenants.pop(salt, None)
        self._named.pop(salt, None)
        if max_blocks is not None:
            self._tenants[salt] = Tenant(salt, max_blocks, self._over)
            self._named[salt] = max_blocks

    def set_default(self, max_blocks: int | None) -> None:
        """Set the quota of each salt that has none of its own, except sequences without a salt. O(salts).

        max_blocks: None removes the default. `charge` must follow.
        """
        self.default_max_blocks = max_blocks
        self._tenants = {salt: tenant for salt, tenant in self._tenants.items() if salt in self._named}

    def account_of(self, extra_keys: bytes | None) -> Tenant | None:
        """Return the tenant whose salt is in a first block's encoded extra keys; None if it has no quota. O(1)."""
        return self.tenant_of(salt_in(extra_keys))

    def tenant_of(self, salt: str | None) -> Tenant | None:
        """Return the tenant of a salt; None if it has no quota. O(1)."""
        tenant = self._tenants.get(salt)
        if tenant is None and salt is not None and self.default_max_blocks is not None:
            if len(self._tenants) >= self._sweep_at:
                self._forget_idle()
            tenant = self._tenants[salt] = Tenant(salt, self.default_max_blocks, self._over)
        return tenant

    def find(self, salt: str | None) -> Tenant | None:
        """Return the tenant of a salt; None if there is no such tenant yet. O(1)."""
        return self._tenants.get(salt)

    def forget_advisers(self) -> None:
        """Drop all tenants' own eviction policies, so that new ones are made when needed. O(salts)."""
        for tenant in self._tenants.values():
            tenant.adviser = None

    def recount(self, runs: list[tuple[Run, int]], free_blocks: Items[KVCacheBlock]) -> None:
        """Count all cached blocks again. O(runs + free blocks).

        runs: all runs, parents first, each with its number of cached blocks. free_blocks: in the queue's order.
        """
        self._over.reorder([])
        for tenant in self._tenants.values():
            tenant.num_cached_blocks = 0
            tenant.free_blocks.clear()
        for run, num_cached_blocks in runs:
            parent, _, _, extra_keys = run.key
            run.account = self.account_of(extra_keys) if parent is None else parent.account
            if run.account is not None:
                run.account.add(num_cached_blocks)
        self._over.reorder(sorted(self.over, key=_name))  # by name: it isn't known who went over first
        self.note_released(free_blocks)

    def note_released(self, blocks: Items[KVCacheBlock], giver: Sequence | None = None) -> None:  # noqa: ARG002
        """Note which tenants' blocks became free. blocks: just released, in order. O(blocks)."""
        for block in blocks:
            if block.ref_cnt == 0 and block.run is not None:
                tenant = block.run.account
                if isinstance(tenant, Tenant):
                    tenant.note_free(block)

    def next_victim(self) -> KVCacheBlock | None:
        """Return the least recently used free block of `next_tenant`; None if there is none."""
        tenant = self.next_tenant()
        return None if tenant is None else tenant.first_free()

    def next_tenant(self) -> Tenant | None:
        """Return the tenant that has been over its quota longest and has a free block; None if none. O(log tenants)."""
        return self._over.next_tenant()

    def note_clearing(self, runs: Iterable[Run]) -> None:  # noqa: ARG002  # for other watchers
        """Reset all counts, since nothing is cached any more. O(salts with a quota of their own)."""
        self._over = OverQuota()
        self._tenants = {salt: Tenant(salt, max_blocks, self._over) for salt, max_blocks in self._named.items()}

    def _forget_idle(self) -> None:
        """Drop tenants with the default quota and nothing cached, so that tenants of old salts don't accumulate."""
        kept = [t for t in self._tenants.values() if t.salt in self._named or t.num_cached_blocks]
        self._tenants = {tenant.salt: tenant for tenant in kept}
        self._sweep_at = max(1000, 2 * len(kept))  # so that this costs O(1) for each tenant on average


class QuotaOrder(Chooser):
    """Takes blocks of tenants over their quotas first, otherwise the queue's first. For pools without a policy."""

    def __init__(self, quotas: TenantQuotas) -> None:
        self._quotas = quotas

    @property
    def is_choosing(self) -> bool:
        """Whether any tenant is over its quota. O(1)."""
        return bool(self._quotas.over)

    def take_next(self, queue: FreeBlockQueue, max_blocks: int) -> list[KVCacheBlock]:  # noqa: ARG002  # one by one
        """Take the queue's first block or, if that is cached and there is a `next_victim`, the victim.

        O(log tenants) on average.
        """
        first = queue.first
        block = self._quotas.next_victim() if first is not None and first.is_cached else None
        if block is None:
            return [queue.popleft()]
        queue.touch([block])
        return [block]


def charge(pool: BlockPool, quotas: TenantQuotas) -> TenantQuotas | None:
    """Apply changed quotas to a pool, and count its cached blocks again. Returns the quotas; None if there are none.
    O(pool).

    Whatever chooses blocks must be told of the result.
    """
    quotas.recount(pool.index.count_by_run(), [*pool.queue])
    in_force, index = None if quotas.is_empty else quotas, pool.index
    if index.accounts is not None:
        index.unwatch(index.accounts)
    index.accounts = in_force
    if in_force is not None:
        index.watch(in_force)
    return in_force


def salt_in(extra_keys: bytes | None) -> str | None:
    """Return the salt in a first block's encoded extra keys, where it comes first; None without one. O(bytes)."""
    if not extra_keys or extra_keys[0] != SALT_KIND:
        return None
    (num_bytes,) = unpack_from("<I", extra_keys, 1)
    return extra_keys[5 : 5 + num_bytes].decode()


def forget_salt(pool: BlockPool, salt: str | None) -> int:
    """Stop caching all prefixes with one salt (None: without a salt). Returns how many blocks. O(runs + blocks)."""
    num_before = pool.num_cached_blocks
    for run in pool.index.runs():
        parent, _, _, extra_keys = run.key
        if parent is None and salt_in(extra_keys) == salt:
            while run.blocks:  # once for each duplicate of its first block; after the last one the run is empty
                pool.index.forget(run.blocks[0], "dropped")
    pool.requeue_detached()
    return num_before - pool.num_cached_blocks


def ended_epoch(epoch: Epoch) -> Epoch:
    """Return an epoch that has ended, for sequences that must go on as after a reset."""
    ended = Epoch(epoch.hash_scheme, epoch.block_bytes)
    ended.is_current = False
    return ended


def _name(tenant: Tenant) -> str:
    return tenant.salt or ""
