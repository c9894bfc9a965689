"""Counts what each tenant asked for, hit, holds and lost, for `kvblocks cache top` and optionally for Prometheus.

Tenants are those of the keys; all other clients count as one, so the number of tenants is bounded.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from kvblocks import KVCacheManager
from kvblocks.engine.completion import Completion
from kvblocks.server.access.callers import TENANT_SALTS
from kvblocks.server.wire import Json

NO_TENANT = ""
"""The name that stands for all clients without a key of their own."""

_COUNTED = ("num_requests", "num_prompt_tokens", "num_cached_tokens")


def tenant_of(salt: str | None) -> str:
    """Return the tenant that a salt belongs to; NO_TENANT if none."""
    if salt is None or not salt.startswith(TENANT_SALTS):
        return NO_TENANT
    return salt.removeprefix(TENANT_SALTS).partition("/")[0]


class TenantUsage:
    """Counts by tenant since the server began. Owned by the engine's thread.

    tenants: those of the keys; the salts of any other name count as no tenant's, since clients may make up names.
    latest: the last result of `read`; any thread may read it.
    """

    def __init__(self, manager: KVCacheManager, tenants: Collection[str]) -> None:
        self._manager = manager
        self._tenants = frozenset(tenants)
        self._tiers = tuple([tier.name for tier in manager.tiers])
        self._counts: dict[str, Counter[str]] = {}
        self._by_tier: dict[str, Counter[str]] = {}
        self._evictions = manager.inspect.watch_evictions(self._tenant_of) if manager.enable_caching else None
        self.latest: Mapping[str, Json] = {}

    def note(self, tenant: str | None, completion: Completion) -> None:
        """Count a prompt that was computed for a tenant. O(tiers)."""
        name = tenant or NO_TENANT
        counts, by_tier = self._counts.setdefault(name, Counter()), self._by_tier.setdefault(name, Counter())
        values = (1, completion.num_prompt_tokens, completion.num_cached_tokens)
        counts.update(dict(zip(_COUNTED, values, strict=True)))
        by_tier.update(completion.num_loaded_tokens)
        by_tier["device"] += completion.num_cached_tokens - sum(completion.num_loaded_tokens.values())

    def read(self) -> Mapping[str, Json]:
        """Return what is known of each tenant, by name. O(runs + pins)."""
        manager = self._manager
        held: Counter[str] = Counter()
        for salt, number in manager.inspect.count_by_salt().items() if manager.enable_caching else ():
            held[self._tenant_of(salt)] += number
        pinned: Counter[str] = Counter()
        for pin in manager.pins:
            pinned[self._tenant_of(pin.sequence.salt)] += pin.num_held_blocks
        quotas = {self._tenant_of(quota.salt): quota.max_cached_blocks for quota in manager.quotas}
        evicted = Counter() if self._evictions is None else self._evictions.num_evicted
        names = sorted({*self._counts, *held, *pinned, *evicted, *quotas})
        self.latest = {
            name: {
                **{field: self._counts.get(name, Counter())[field] for field in _COUNTED},
                "hit_share": _share(self._counts.get(name, Counter())),
                "num_cached_tokens_by_tier": {
                    tier: self._by_tier.get(name, Counter())[tier] for tier in ("device", *self._tiers)
                },
                "num_held_blocks": held[name],
                "num_evicted_blocks": evicted[name],
                "num_pinned_blocks": pinned[name],
                "quota_blocks": quotas.get(name),
            }
            for name in names
        }
        return self.latest

    def _tenant_of(self, salt: str | None) -> str:
        name = tenant_of(salt)
        return name if name in self._tenants else NO_TENANT


def _share(counts: Counter[str]) -> float:
    return counts["num_cached_tokens"] / counts["num_prompt_tokens"] if counts["num_prompt_tokens"] else 0.0
