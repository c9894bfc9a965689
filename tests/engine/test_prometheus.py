"""The collector: a scrape's values equal those of the snapshot."""

import urllib.request
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, RecurrentState, Sequence, Tier
from kvblocks.engine import Engine
from kvblocks.engine.prometheus import GateCollector, KVBlocksCollector, OffloadCollector, StateCollector
from kvblocks.engine.schedule.entrance import EntranceView
from kvblocks.engine.tiers.offload import TierTraffic
from kvblocks.gate import SessionGate
from kvblocks.observe.metrics import CacheMetrics
from kvblocks.stats import HitCounts
from kvblocks.tiers.disk import DiskStats
from kvblocks.tiers.store import StoreStats


def compute(manager: KVCacheManager, tokens: Any, salt: str | None = None) -> None:
    sequence = Sequence("passing", tokens, salt=salt)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def scrape(registry: CollectorRegistry) -> dict[Any, float]:
    """All samples by name and labels; no series comes twice, and each family has its help."""
    samples: dict[Any, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram"}
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            assert (family.type == "counter") == sample.name.endswith("_total")
            samples[key] = sample.value
    return samples


@pytest.fixture
def busy() -> tuple[KVCacheManager, CacheMetrics]:
    """A manager that has hits, evictions, pins, tenants and a running sequence."""
    manager = KVCacheManager(16, 4)
    metrics = CacheMetrics(manager, sample_every=1)
    manager.quotas.set("ann", 2)
    manager.quotas.set("bob", 5)
    manager.pins.pin(range(8))
    for start in (0, 0, 100, 200, 0, 300):
        for salt in (None, "ann", "bob"):
            compute(manager, range(start, start + 14), salt)
    manager.allocate_slots(Sequence("running", range(500, 506)))
    return manager, metrics


def test_a_scrape_says_what_the_snapshot_says(busy):
    manager, metrics = busy
    registry = CollectorRegistry()
    KVBlocksCollector(metrics, registry=registry)
    samples, now = scrape(registry), metrics.snapshot()
    stats = manager.stats
    assert min(stats.num_hits, stats.num_evicted_blocks, now.reuse_gaps.num_values, now.lifetimes.num_values) > 0
    expected = {
        "queries_total": stats.num_queries,
        "hits_total": stats.num_hits,
        "queried_tokens_total": stats.num_queried_tokens,
        "hit_tokens_total": stats.num_hit_tokens,
        "limited_tokens_total": stats.num_limited_tokens,
        "taken_blocks_total": stats.num_taken_blocks,
        "evicted_blocks_total": stats.num_evicted_blocks,
        "pool_blocks": 16,
        "free_blocks": stats.num_free_blocks,
        "cached_blocks": stats.num_cached_blocks,
        "usage_ratio": 4 / 16,
        "recent_queries": now.window.num_queries,
        "recent_token_hit_ratio": now.window.hit_rate,
        "recent_request_hit_ratio": now.window.request_hit_rate,
        "pins": 1,
        "pin_wanted_blocks": 2,
        "pin_held_blocks": 2,
        "pinned_blocks": 2,
        "tenants": 2,
        "tenants_over_quota": sum(quota.num_cached_blocks > quota.max_cached_blocks for quota in now.quotas),
        "sampled_blocks": 16,
        "last_eviction_idle_taken_blocks": now.last_idle_time,
        "queue_age_taken_blocks": now.queue_age,
    }
    histograms = {
        "block_lifetime_taken_blocks": now.lifetimes,
        "block_idle_before_eviction_taken_blocks": now.idle_times,
        "block_reuse_gap_taken_blocks": now.reuse_gaps,
    }
    series = {(f"kvblocks_{name}", ()): value for name, value in expected.items()}
    for name, values in histograms.items():
        series[f"kvblocks_{name}_sum", ()] = values.total
        series[f"kvblocks_{name}_count", ()] = values.num_values
        for index, bound in enumerate([*values.bounds, "+Inf"]):
            series[f"kvblocks_{name}_bucket", (("le", str(bound)),)] = sum(values.counts[: index + 1])
    assert samples == series


def test_a_scrape_is_of_its_moment(busy):
    manager, metrics = busy
    registry = CollectorRegistry()
    KVBlocksCollector(metrics, registry=registry)
    before = scrape(registry)
    compute(manager, range(900, 908))
    after = scrape(registry)
    assert after["kvblocks_queries_total", ()] == before["kvblocks_queries_total", ()] + 1
    assert after["kvblocks_taken_blocks_total", ()] == before["kvblocks_taken_blocks_total", ()] + 2


def test_no_salt_is_shown_unless_asked_for(busy):
    manager, metrics = busy
    manager.quotas.set("a secret", 1)
    registry = CollectorRegistry()
    KVBlocksCollector(metrics, registry=registry)
    shown = generate_latest(registry).decode()
    assert not any(salt in shown for salt in ("ann", "bob", "secret"))
    assert "tenant=" not in shown


def test_tenants_by_labels_of_ones_own(busy):
    manager, metrics = busy
    manager.quotas.set("a secret", 1)
    manager.quotas.set(None, 7)
    labels = {"ann": 'team "A"', "bob": 'team "A"', None: "unsalted"}
    registry = CollectorRegistry()
    KVBlocksCollector(metrics, registry=registry, tenant_label=labels.get)
    samples = scrape(registry)
    shown = {key: value for key, value in samples.items() if key[1] and key[1][0][0] == "tenant"}
    cached = {quota.salt: quota.num_cached_blocks for quota in manager.quotas}
    assert shown == {
        ("kvblocks_tenant_cached_blocks", (("tenant", 'team "A"'),)): cached["ann"] + cached["bob"],
        ("kvblocks_tenant_quota_blocks", (("tenant", 'team "A"'),)): 7,
        ("kvblocks_tenant_cached_blocks", (("tenant", "unsalted"),)): cached[None],
        ("kvblocks_tenant_quota_blocks", (("tenant", "unsalted"),)): 7,
    }
    assert samples["kvblocks_tenants", ()] == 4


def test_a_fresh_manager_has_no_ages(recwarn):
    registry = CollectorRegistry(auto_describe=True)
    KVBlocksCollector(CacheMetrics(KVCacheManager(4, 4), clock=lambda: 5.0), registry=registry)
    names = {name for name, _ in scrape(registry)}
    assert "kvblocks_block_lifetime_seconds_bucket" in names
    assert not any("queue_age" in name or "last_eviction" in name or "taken_blocks_bucket" in name for name in names)


def test_bad_arguments():
    with pytest.raises(InvalidArgumentError, match="metrics: expected CacheMetrics, got KVCacheManager"):
        KVBlocksCollector(KVCacheManager(4, 4))
    registry = CollectorRegistry(auto_describe=True)
    KVBlocksCollector(CacheMetrics(KVCacheManager(4, 4)), registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        KVBlocksCollector(CacheMetrics(KVCacheManager(4, 4)), registry=registry)


def test_an_engine_has_metrics_in_seconds(tiny_folder):
    engine = Engine(tiny_folder, num_blocks=16, block_size=4)
    prompt = list(range(20, 40))
    engine.generate([prompt], max_tokens=3, ignore_eos=True)
    engine.generate([prompt, prompt], max_tokens=3, ignore_eos=True)
    now = engine.metrics.snapshot()
    assert now.window == HitCounts(num_queries=3, num_hits=2, num_queried_tokens=60, num_hit_tokens=38)
    assert now.time_unit == "seconds" and now.queue_age is not None
    registry = CollectorRegistry()
    KVBlocksCollector(engine.metrics, registry=registry)
    assert scrape(registry)["kvblocks_hit_tokens_total", ()] == 38
    steps = []
    engine.metrics = SimpleNamespace(observe=lambda: steps.append(1))
    engine.generate([prompt], max_tokens=3, ignore_eos=True)
    assert len(steps) == 3


def test_prometheus_own_server_shows_them(busy):
    _, metrics = busy
    registry = CollectorRegistry()
    collector = KVBlocksCollector(metrics)
    registry.register(collector)
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            assert f"kvblocks_queries_total {float(metrics.snapshot().stats.num_queries)}" in answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_tiers_have_series_by_tier():
    manager = KVCacheManager(64, 4, tiers=[Tier("host", 8, 64), Tier("disk", 4, 64)])
    metrics = CacheMetrics(manager)
    for start in (0, 100, 200, 300, 400):
        compute(manager, range(start, start + 12))
        while transfers := manager.tiers.take_transfers():
            for transfer in transfers:
                manager.tiers.complete(transfer, ok=start != 100)
    registry = CollectorRegistry()
    KVBlocksCollector(metrics, registry=registry)
    samples, (host, disk) = scrape(registry), metrics.snapshot().tiers
    assert (host, disk) == tuple(manager.tiers)
    assert min(host.num_stored_blocks, host.num_evicted_blocks, host.num_failed_blocks + disk.num_failed_blocks) > 0
    expected = {
        "loaded_blocks_total": "num_loaded_blocks",
        "stored_blocks_total": "num_stored_blocks",
        "failed_blocks_total": "num_failed_blocks",
        "dropped_blocks_total": "num_dropped_blocks",
        "evicted_blocks_total": "num_evicted_blocks",
        "slots": "num_blocks",
        "cached_blocks": "num_cached_blocks",
        "moving_blocks": "num_moving_blocks",
    }
    shown = {key: value for key, value in samples.items() if key[0].startswith("kvblocks_tier")}
    assert shown == {
        (f"kvblocks_tier_{name}", (("tier", tier.name),)): getattr(tier, attribute)
        for name, attribute in expected.items()
        for tier in (host, disk)
    }


def test_what_an_engine_moved_is_shown_by_tier_and_direction():
    disk = DiskStats(num_damaged_blocks=1, num_failed_writes=2, num_failed_syncs=3)
    traffic = [
        TierTraffic("host", {"load": 10, "store": 20}, {"load": 0.5, "store": 0.25}),
        TierTraffic("disk", {"load": 30, "store": 40}, {"load": 1.5, "store": 2.5}, disk),
    ]
    values = dict(zip([field.name for field in fields(StoreStats)], range(10, 30), strict=False))
    store = StoreStats(**{**values, "is_away": True})
    traffic.append(TierTraffic("store", {"load": 50, "store": 60}, {"load": 3.5, "store": 4.5}, store))
    registry = CollectorRegistry()
    OffloadCollector(SimpleNamespace(traffic=lambda: traffic), registry=registry)
    samples = scrape(registry)
    series = {
        (f"kvblocks_tier_{name}_total", (("direction", direction), ("tier", one.tier))): values[direction]
        for one in traffic
        for name, values in (("moved_bytes", one.num_bytes), ("transfer_seconds", one.seconds))
        for direction in ("load", "store")
    }
    for name, value in (("damaged_blocks", 1), ("failed_writes", 2), ("failed_syncs", 3)):
        series[f"kvblocks_tier_{name}_total", (("tier", "disk"),)] = value
    shown = {"lookups", "present_blocks", "missing_blocks", "damaged_blocks", "refused_blocks", "trimmed_blocks"}
    for name in (*shown, "failures", "skipped"):
        series[f"kvblocks_store_{name}_total", (("tier", "store"),)] = values[f"num_{name}"]
    series["kvblocks_store_away", (("tier", "store"),)] = 1
    assert samples == series


def test_a_gate_is_shown_as_of_its_last_decision_and_the_page_names_every_series():
    gate = SessionGate(1000)
    gate.ask("a", "one", None, 900, 0, 0.0)
    gate.release(0, 0.001, 0.0)
    gate.ask("b", "two", None, 200, 0, 1.0)
    why = gate.why("b")
    view = EntranceView(1.0, gate.stats, tuple(gate.members()), (why,))
    registry = CollectorRegistry()
    GateCollector(SimpleNamespace(view=view), registry=registry)
    samples = scrape(registry)
    assert samples["kvblocks_gate_members", ()] == samples["kvblocks_gate_waiting_requests", ()] == 1
    assert samples["kvblocks_gate_member_tokens", ()] == 900
    assert samples["kvblocks_gate_waiting", (("reason", "room"),)] == 1
    assert samples["kvblocks_gate_waiting", (("reason", "idle"),)] == 0
    assert samples["kvblocks_gate_left_total", (("rule", "hold"),)] == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert {name for name, _ in samples if f"`{name}`" not in page} == set()


def test_states_are_counted_and_the_page_names_every_series():
    manager = KVCacheManager(16, groups=[FullAttention(4), RecurrentState(4, num_slots=2)])
    sequence = Sequence("one", range(9))
    manager.allocate_slots(sequence, 8)
    manager.states.take_copies()
    registry = CollectorRegistry()
    StateCollector(manager, registry=registry)
    samples = scrape(registry)
    assert samples["kvblocks_state_slots", ()] == 2
    assert samples["kvblocks_free_state_slots", ()] == 1
    kinds = {kind: samples["kvblocks_state_copies_total", (("kind", kind),)] for kind in ("cleared", "saved", "forked")}
    assert kinds == {"cleared": 1, "saved": 1, "forked": 0}
    assert samples["kvblocks_state_skipped_saves_total", (("reason", "passed"),)] == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert {name for name, _ in samples if f"`{name}`" not in page} == set()


def test_the_page_on_metrics_names_every_series_of_tiers():
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    registry = CollectorRegistry()
    KVBlocksCollector(CacheMetrics(KVCacheManager(16, 4, tiers=[Tier("host", 8, 64)])), registry=registry)
    moved = {"load": 1, "store": 1}, {"load": 1.0, "store": 1.0}
    traffic = [TierTraffic("disk", *moved, DiskStats()), TierTraffic("store", *moved, StoreStats())]
    OffloadCollector(SimpleNamespace(traffic=lambda: traffic), registry=registry)
    names = {name for name, _ in scrape(registry) if name.startswith(("kvblocks_tier_", "kvblocks_store_"))}
    assert len(names) == 22
    assert {name for name in names if f"`{name}`" not in page} == set()
