"""Applying quotas, with an eviction policy or without one."""

from kvblocks.core.pool import BlockPool
from kvblocks.retention.eviction import Eviction
from kvblocks.retention.quotas import TenantQuotas


def charge(pool: BlockPool, quotas: TenantQuotas) -> TenantQuotas | None:
    """Apply changed quotas to a pool and count its cached blocks again. Returns the quotas, None if none. O(pool)."""
    quotas.recount(pool.index.count_by_run(), pool.free_blocks())
    in_force, accounts = None if quotas.is_empty else quotas, pool.index.accounts
    if isinstance(accounts, Eviction):
        accounts.use_quotas(in_force)
    else:
        pool.index.charge(in_force)
    return in_force
