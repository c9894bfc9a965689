"""`CacheMetrics` as a collector for `prometheus_client`. It has no counters of its own: each scrape takes a snapshot.

    metrics = CacheMetrics(manager, clock=time.monotonic)
    KVBlocksCollector(metrics, registry=prometheus_client.REGISTRY)
    prometheus_client.start_http_server(9000)

Salts may be secrets, and there may be millions of them. So by default no series names a tenant; metrics show only the
number of tenants, and how many are over their quota. Pass `tenant_label` to opt in. A label that is a hash of the salt
doesn't keep it secret, since anybody who guesses a salt can hash the guess.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvblocks import CacheMetrics, KVCacheManager
from kvblocks.engine.schedule.entrance import Entrance
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.tiers.offload import Offload
from kvblocks.errors import InvalidArgumentError
from kvblocks.stats import HistogramValues, MetricsSnapshot, QuotaUsage
from kvblocks.tiers.disk import DiskStats
from kvblocks.tiers.store import StoreStats

# Of CacheStats: attribute, name without prefix and _total, help.
_COUNTERS = (
    ("num_queries", "queries", "Sequences allocated from the start; a preempted one that is resumed counts again."),
    ("num_hits", "hits", "Of the queries, those that came with a prefix hit."),
    ("num_queried_tokens", "queried_tokens", "Tokens that the queries had when they were allocated."),
    ("num_hit_tokens", "hit_tokens", "Of the queried tokens, those whose KV was cached and needed no computing."),
    (
        "num_limited_tokens",
        "limited_tokens",
        "Tokens computed that one KV-cache group had cached, but another had not.",
    ),
    ("num_taken_blocks", "taken_blocks", "Blocks handed out by the pool."),
    ("num_evicted_blocks", "evicted_blocks", "Blocks that stopped being cached because they were handed out."),
)
_GAUGES = (
    ("num_blocks", "pool_blocks", "Blocks in the pool."),
    ("num_free_blocks", "free_blocks", "Blocks that no sequence or pin holds, those with cached prefixes included."),
    ("num_cached_blocks", "cached_blocks", "Blocks that hold a cached prefix, held or free."),
    ("usage", "usage_ratio", "Share of the pool that sequences and pins hold."),
)
_WINDOW_GAUGES = (
    ("num_queries", "recent_queries", "Queries that the recent ratios cover."),
    ("hit_rate", "recent_token_hit_ratio", "Share of the recently queried tokens that were cached."),
    ("request_hit_rate", "recent_request_hit_ratio", "Share of the recent queries that came with a prefix hit."),
)
_PIN_GAUGES = (
    ("num_pins", "pins", "Pins that have not ended."),
    ("num_wanted_blocks", "pin_wanted_blocks", "Blocks of the pinned prefixes, counted once for each pin."),
    ("num_held_blocks", "pin_held_blocks", "Blocks that pins protect now, counted once for each pin."),
    ("num_pinned_blocks", "pinned_blocks", "Blocks that any pin protects now."),
)
_HISTOGRAMS = (
    ("lifetimes", "block_lifetime", "From a sampled block's being taken until it is evicted"),
    ("idle_times", "block_idle_before_eviction", "From a sampled block's last release until it is evicted"),
    ("reuse_gaps", "block_reuse_gap", "From a sampled block's release until a hit takes it back"),
)
_AGES = (
    ("last_idle_time", "last_eviction_idle", "How long the last evicted sampled block had been free"),
    ("queue_age", "queue_age", "How long the sampled block that was released first has been free"),
)

# Of TierStats: attribute, name without prefix and _total, help.
_TIER_COUNTERS = (
    ("num_loaded_blocks", "tier_loaded_blocks", "Blocks that hits found in the tier and that were loaded from it."),
    ("num_stored_blocks", "tier_stored_blocks", "Blocks that were stored in the tier."),
    ("num_failed_blocks", "tier_failed_blocks", "Blocks of transfers that failed, loads and stores."),
    ("num_dropped_blocks", "tier_dropped_blocks", "Blocks that were to be stored, and were not."),
    ("num_evicted_blocks", "tier_evicted_blocks", "Blocks of the tier that were evicted to make room for others."),
)
_TIER_GAUGES = (
    ("num_blocks", "tier_slots", "Slots of the tier, each for one block."),
    ("num_cached_blocks", "tier_cached_blocks", "Slots that hold a block."),
    ("num_moving_blocks", "tier_moving_blocks", "Slots that transfers own."),
)
_DISK_COUNTERS = (
    ("num_damaged_blocks", "tier_damaged_blocks", "Blocks on the disk that were damaged."),
    ("num_failed_writes", "tier_failed_writes", "Writes to the disk that failed."),
    ("num_failed_syncs", "tier_failed_syncs", "Syncs of the disk that failed."),
)

_STORE_COUNTERS = (
    ("num_lookups", "store_lookups", "Batches of blocks that the store was asked for."),
    ("num_present_blocks", "store_present_blocks", "Blocks not sent, since the store had them or got them just then."),
    ("num_missing_blocks", "store_missing_blocks", "Blocks that were to be loaded and were gone."),
    ("num_damaged_blocks", "store_damaged_blocks", "Blocks in the store that were damaged."),
    ("num_refused_blocks", "store_refused_blocks", "Blocks that the store refused to take, as a full one does."),
    ("num_trimmed_blocks", "store_trimmed_blocks", "Blocks that were deleted to keep a tenant's quota."),
    ("num_failures", "store_failures", "Calls of the store that failed, or got only some answers."),
    ("num_skipped", "store_skipped", "Calls that weren't made, since the store had failed."),
)
_STORE_GAUGES = (("is_away", "store_away", "1 while the store counts as unreachable."),)

_GATE_GAUGES = (
    ("num_room_tokens", "gate_room_tokens", "Tokens that sessions may have together: the pool's, and half the host's."),
    ("num_member_tokens", "gate_member_tokens", "Tokens of the members' last prompts and answers."),
    ("num_other_tokens", "gate_other_tokens", "Tokens of running requests that have no session."),
    ("num_members", "gate_members", "Sessions that take turns now."),
    ("num_waiting_sessions", "gate_waiting_sessions", "Sessions that wait to become members."),
    ("num_waiting_requests", "gate_waiting_requests", "Requests that wait for the gate."),
)

TenantLabel = Callable[[str | None], str | None]
"""Maps a salt (None: sequences without one) to a label, or to None for a tenant without series of its own."""


class KVBlocksCollector(Collector):
    """Exports a manager's metrics to Prometheus, under names that begin with `kvblocks_`.

    registry: where it registers itself. None: nowhere, so call `registry.register(collector)`. A registry takes only
    one. tenant_label: which tenants get series of their own, and their labels; tenants with equal labels are added up.
    None: no tenant does, so that no salt leaks. Durations are in seconds if the metrics have a clock, else in blocks
    taken from the pool. A metric's name says which.

    Scrapes may come from another thread than the manager's, as they do from `start_http_server`. Each costs one
    `CacheMetrics.snapshot`. Raises InvalidArgumentError, and ValueError if the registry already has these names.
    """

    def __init__(
        self,
        metrics: CacheMetrics,
        *,
        registry: CollectorRegistry | None = None,
        tenant_label: TenantLabel | None = None,
    ) -> None:
        if not isinstance(metrics, CacheMetrics):
            raise InvalidArgumentError(f"metrics: expected CacheMetrics, got {type(metrics).__name__}")
        self._metrics = metrics
        self._tenant_label = tenant_label
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        snapshot = self._metrics.snapshot()
        for attribute, name, text in _COUNTERS:
            yield CounterMetricFamily(f"kvblocks_{name}", text, value=getattr(snapshot.stats, attribute))
        yield from _gauges(snapshot.stats, _GAUGES)
        yield from _gauges(snapshot.window, _WINDOW_GAUGES)
        yield from _gauges(snapshot.pins, _PIN_GAUGES)
        yield from self._tenants(snapshot.quotas)
        yield from _lives(snapshot)
        tiers = [(tier.name, tier) for tier in snapshot.tiers]
        yield from _by_tier(CounterMetricFamily, tiers, _TIER_COUNTERS)
        yield from _by_tier(GaugeMetricFamily, tiers, _TIER_GAUGES)

    def _tenants(self, quotas: tuple[QuotaUsage, ...]) -> Iterator[Metric]:
        num_over = sum(quota.num_cached_blocks > quota.max_cached_blocks for quota in quotas)
        text = "Salts that have a quota of their own, or one by default and anything cached."
        yield GaugeMetricFamily("kvblocks_tenants", text, value=len(quotas))
        yield GaugeMetricFamily(
            "kvblocks_tenants_over_quota", "Salts with more blocks than their quota.", value=num_over
        )
        if self._tenant_label is None:
            return
        sums: dict[str, tuple[int, int]] = {}
        for quota in quotas:
            label = self._tenant_label(quota.salt)
            if label is not None:
                num_cached, most = sums.get(label, (0, 0))
                sums[label] = num_cached + quota.num_cached_blocks, most + quota.max_cached_blocks
        cached = GaugeMetricFamily("kvblocks_tenant_cached_blocks", "The tenant's cached blocks.", labels=["tenant"])
        allowed = GaugeMetricFamily("kvblocks_tenant_quota_blocks", "The tenant's quota.", labels=["tenant"])
        for label, (num_cached, most) in sums.items():
            cached.add_metric([label], num_cached)
            allowed.add_metric([label], most)
        yield cached
        yield allowed


class OffloadCollector(Collector):
    """Metrics of an engine's transfers between the device and its tiers. registry: as for `KVBlocksCollector`."""

    def __init__(self, offload: Offload, *, registry: CollectorRegistry | None = None) -> None:
        self._offload = offload
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        traffic = self._offload.traffic()
        labels = ["tier", "direction"]
        moved = CounterMetricFamily("kvblocks_tier_moved_bytes", "Bytes that transfers moved.", labels=labels)
        text = "Seconds that these transfers took, without waiting."
        seconds = CounterMetricFamily("kvblocks_tier_transfer_seconds", text, labels=labels)
        for one in traffic:
            for direction, num_bytes in one.num_bytes.items():
                moved.add_metric([one.tier, direction], num_bytes)
                seconds.add_metric([one.tier, direction], one.seconds[direction])
        yield moved
        yield seconds
        disks = [(one.tier, one.place) for one in traffic if isinstance(one.place, DiskStats)]
        yield from _by_tier(CounterMetricFamily, disks, _DISK_COUNTERS)
        stores = [(one.tier, one.place) for one in traffic if isinstance(one.place, StoreStats)]
        yield from _by_tier(CounterMetricFamily, stores, _STORE_COUNTERS)
        yield from _by_tier(GaugeMetricFamily, stores, _STORE_GAUGES)


class RememberedCollector(Collector):
    """Metrics of an engine's remembered prompts. registry: as for `KVBlocksCollector`."""

    def __init__(self, remembered: RememberedPrompts, *, registry: CollectorRegistry | None = None) -> None:
        self._remembered = remembered
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        of = self._remembered
        text = "First tokens that were remembered: answers that began without a forward pass."
        yield CounterMetricFamily("kvblocks_remembered_answers", text, value=of.num_answers)
        yield GaugeMetricFamily("kvblocks_remembered_prompts", "Prompts whose next token is remembered.", len(of))
        yield GaugeMetricFamily("kvblocks_remembered_blocks", "Blocks that these prompts hold.", of.num_blocks)


class GateCollector(Collector):
    """Metrics of the session gate of an engine that has one. registry: as for `KVBlocksCollector`."""

    def __init__(self, entrance: Entrance, *, registry: CollectorRegistry | None = None) -> None:
        self._entrance = entrance
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families as of the gate's last decision."""
        view = self._entrance.view
        if view is None:
            return
        yield from _gauges(view.stats, _GATE_GAUGES)
        yield CounterMetricFamily("kvblocks_gate_entries", "Sessions that entered.", value=view.stats.num_entries)
        text = "Of the sessions that entered, those without room, since nothing was busy."
        yield CounterMetricFamily("kvblocks_gate_idle_entries", text, value=view.stats.num_idle_entries)
        left = CounterMetricFamily("kvblocks_gate_left", "Members that left, by the rule.", labels=["rule"])
        for rule, number in view.stats.num_left.items():
            left.add_metric([rule], number)
        yield left
        counts = Counter(one.reason for one in view.waiting)
        text = "Of the first 32 requests that wait for the gate, how many wait for what."
        waiting = GaugeMetricFamily("kvblocks_gate_waiting", text, labels=["reason"])
        for reason in ("next", "room", "idle", "behind", "turn"):
            waiting.add_metric([reason], counts[reason])
        yield waiting


class StateCollector(Collector):
    """Metrics of the recurrent states of a manager that has such layers. registry: as for `KVBlocksCollector`."""

    def __init__(self, manager: KVCacheManager, *, registry: CollectorRegistry | None = None) -> None:
        self._manager = manager
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        states = self._manager.states
        yield GaugeMetricFamily("kvblocks_state_slots", "Sequences that can have a state at once.", states.num_slots)
        yield GaugeMetricFamily("kvblocks_free_state_slots", "Slots that no sequence has.", states.num_free_slots)
        copies = CounterMetricFamily("kvblocks_state_copies", "Copies of states, by kind.", labels=["kind"])
        skipped = CounterMetricFamily(
            "kvblocks_state_skipped_saves", "States that should have been saved, and were not.", labels=["reason"]
        )
        stats = states.stats
        for kind in ("cleared", "restored", "forked", "saved"):
            copies.add_metric([kind], getattr(stats, f"num_{kind}"))
        for reason in ("without_room", "present", "taken_back", "passed"):
            skipped.add_metric([reason], getattr(stats, f"num_{reason}"))
        yield copies
        yield skipped


def _by_tier(
    family: type[CounterMetricFamily | GaugeMetricFamily],
    records: Sequence[tuple[str, Any]],
    table: Iterable[tuple[str, str, str]],
) -> Iterator[Metric]:
    """A family for each row of the table, with a series for each tier; none without tiers."""
    for attribute, name, text in table if records else ():
        metric = family(f"kvblocks_{name}", text, labels=["tier"])
        for tier, record in records:
            metric.add_metric([tier], getattr(record, attribute))
        yield metric


def _gauges(record: Any, table: Iterable[tuple[str, str, str]]) -> Iterator[Metric]:
    for attribute, name, text in table:
        yield GaugeMetricFamily(f"kvblocks_{name}", text, value=getattr(record, attribute))


def _lives(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """The metrics of sampled blocks. An unknown age has no series."""
    unit = "seconds" if snapshot.time_unit == "seconds" else "taken_blocks"
    words = "in seconds." if unit == "seconds" else "in blocks taken from the pool."
    sampled = snapshot.num_sampled_blocks
    yield GaugeMetricFamily("kvblocks_sampled_blocks", "Blocks whose lives are watched.", sampled)
    for attribute, name, text in _HISTOGRAMS:
        values: HistogramValues = getattr(snapshot, attribute)
        yield HistogramMetricFamily(
            f"kvblocks_{name}_{unit}", f"{text}, {words}", buckets=_cumulative(values), sum_value=values.total
        )
    for attribute, name, text in _AGES:
        age = getattr(snapshot, attribute)
        if age is not None:
            yield GaugeMetricFamily(f"kvblocks_{name}_{unit}", f"{text}, {words}", value=age)


def _cumulative(values: HistogramValues) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus wants them: each counts all values up to its bound."""
    buckets, num_values = [], 0
    for bound, count in zip((*map(str, values.bounds), "+Inf"), values.counts, strict=True):
        num_values += count
        buckets.append((bound, float(num_values)))
    return buckets
