"""`ManagerQuotas`, which is `manager.quotas`: the calls about quotas. `retention.quotas` says what a quota does."""

from collections.abc import Iterator
from typing import SupportsIndex, final

from kvblocks.arguments import Text, check_count, check_name
from kvblocks.closed import Closed
from kvblocks.core.link import ManagerLink
from kvblocks.retention.eviction import Eviction
from kvblocks.retention.quotas import QuotaOrder, TenantQuotas, charge
from kvblocks.stats import QuotaUsage


@final
class ManagerQuotas(Closed):
    """The quotas of a manager's tenants: `manager.quotas`.

    Iterating yields the `QuotaUsage` of each salt that has a quota of its own, or that has the default quota and
    anything cached: O(salts). Made by a manager. As with the manager's own calls, one that raises has changed nothing.
    """

    def __init__(self, link: ManagerLink, eviction: Eviction | None) -> None:
        self._link = link
        self._change = link.change
        self._pool = link.slots.pool
        self._eviction = eviction
        self._quotas: TenantQuotas | None = None

    def __len__(self) -> int:
        return 0 if self._quotas is None else len(self._quotas.tenants())

    def __iter__(self) -> Iterator[QuotaUsage]:
        return iter([] if self._quotas is None else self._quotas.usage())

    def set(self, salt: Text | None, max_blocks: SupportsIndex | None) -> None:
        """Limit how many blocks the sequences of one salt may keep cached while others want the space.

        salt: None stands for sequences without a salt. max_blocks: None removes the limit. Beyond the limit, sequences
        of this salt may still use free space for cached blocks, but some of these are then evicted before those of
        others: the least recently used ones, or with an eviction policy those that it chooses among them. Owned blocks
        count, and are never evicted. Raises InvalidArgumentError, also without a group of full attention. O(pool).
        """
        self._link.check_has_primary("quotas.set")
        name = check_name("salt", salt)
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = self._made()
        self._change.begin()
        quotas.set_quota(name, number)
        self._apply(quotas)

    def set_default(self, max_blocks: SupportsIndex | None) -> None:
        """Set the quota of every salt that has none of its own; it doesn't apply to sequences without a salt.

        max_blocks: as in `set`. Raises InvalidArgumentError. O(pool).
        """
        self._link.check_has_primary("quotas.set_default")
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = self._made()
        self._change.begin()
        quotas.set_default(number)
        self._apply(quotas)

    def of(self, salt: Text | None) -> int | None:
        """Return the quota of a salt, its own or the default; None without one. Raises InvalidArgumentError. O(1)."""
        name = check_name("salt", salt)
        return None if self._quotas is None else self._quotas.limit_of(name)

    def _made(self) -> TenantQuotas:
        return TenantQuotas() if self._quotas is None else self._quotas

    def _apply(self, quotas: TenantQuotas) -> None:
        """Count the cached blocks again, and end the change. Without any quota, nothing is counted."""
        in_force = self._quotas = charge(self._pool, quotas)
        if self._eviction is not None:
            self._eviction.use_quotas(in_force)
        else:
            self._pool.chooser = None if in_force is None else QuotaOrder(in_force)
        self._link.end()
