"""Putting quotas into force, beside an eviction policy or without one."""

from kvblocks.core.pool import BlockPool
from kvblocks.retention.eviction import Eviction
from kvblocks.retention.quotas import TenantQuotas


def charge(pool: BlockPool, quotas: TenantQuotas) -> TenantQuotas | None:
    """Put changed quotas of a pool into force, counting anew. Returns them, None if there are none. O(pool)."""
    quotas.recount(pool.index.count_by_run(), pool.free_blocks())
    in_force, accounts = None if quotas.is_empty else quotas, pool.index.accounts
    if isinstance(accounts, Eviction):
        accounts.use_quotas(in_force)
    else:
        pool.index.charge(in_force)
    return in_force
