"""What vLLM lacks is one call away, and what its metrics and other callers ask is answered."""

import pytest
import torch
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from bench.vllm.schedulers import Settings, make_vllm_config
from integrations.vllm.configurations import CONFIGURATIONS
from integrations.vllm.stand import BLOCK, WHOSE, Stand, request
from integrations.vllm.workload import make_asks
from kvblocks import Sequence

PROMPT = list(range(100, 100 + 4 * BLOCK))


def crowd(stand, number, salt=None, start=5000):
    """Let so many requests of 4 blocks come and go, one after the other."""
    for index in range(number):
        first = start + 1000 * index
        stand.cached(request(f"crowd {start} {index}", range(first, first + 4 * BLOCK), cache_salt=salt))


@pytest.mark.parametrize("pins", [False, True])
def test_a_pinned_prefix_stays_under_a_running_scheduler(pins):
    stand = Stand(Settings(num_blocks=21))
    pin = stand.manager.manager.pins.pin(PROMPT) if pins else None
    stand.cached(request("first", [*PROMPT, 1]))
    crowd(stand, 12)
    assert stand.cached(request("same", [*PROMPT, 1])) == (4 * BLOCK if pins else 0)
    if pin is not None:
        stand.manager.manager.pins.unpin(pin)
        crowd(stand, 12, start=50_000)
        assert stand.cached(request("later", [*PROMPT, 1])) == 0


def test_a_pin_keeps_no_reset_from_happening():
    stand = Stand(Settings())
    stand.manager.manager.pins.pin(PROMPT)
    stand.cached(request("first", [*PROMPT, 1]))
    assert stand.scheduler.reset_prefix_cache()
    assert stand.cached(request("same", [*PROMPT, 1])) == 0
    assert stand.cached(request("again", [*PROMPT, 1])) == 4 * BLOCK


@pytest.mark.parametrize("has_quota", [False, True])
def test_a_salt_beyond_its_quota_evicts_its_own(has_quota):
    stand = Stand(Settings(num_blocks=41))
    if has_quota:
        stand.manager.manager.quotas.set("loud", 8)
    stand.cached(request("quiet", [*PROMPT, 1], cache_salt="quiet"))
    crowd(stand, 30, salt="loud")
    assert stand.cached(request("same", [*PROMPT, 1], cache_salt="quiet")) == (4 * BLOCK if has_quota else 0)
    used = {usage.salt: usage for usage in stand.manager.manager.quotas}
    assert not has_quota or used["loud"].max_cached_blocks == 8


def test_a_miss_is_explained():
    stand = Stand(Settings())
    stand.cached(request("first", PROMPT, cache_salt="one"))
    manager = stand.manager.manager
    same = manager.inspect.explain(Sequence("asked", PROMPT, salt="one"))
    other = manager.inspect.explain(Sequence("asked", PROMPT, salt="two"))
    parted = manager.inspect.explain(Sequence("asked", [*PROMPT[:40], 1, *PROMPT[41:]], salt="one"))
    assert (same.cause, same.num_cached_blocks) == ("no miss", 4)
    assert (other.cause, other.num_cached_blocks) == ("other keys", 0) and "one" in str(other)
    assert (parted.cause, parted.num_cached_blocks, parted.num_common_tokens) == ("partly equal", 2, 8)


class Calls(KVCacheMetricsCollector):
    """Counts its calls by their kinds."""

    def __init__(self):
        super().__init__(sample_rate=1.0)
        self.counts = dict.fromkeys(("allocated", "accessed", "evicted", "reset"), 0)

    def on_block_allocated(self, block):
        self.counts["allocated"] += 1
        super().on_block_allocated(block)

    def on_block_accessed(self, block):
        self.counts["accessed"] += 1
        super().on_block_accessed(block)

    def on_block_evicted(self, block):
        self.counts["evicted"] += 1
        super().on_block_evicted(block)

    def reset(self):
        self.counts["reset"] += 1
        super().reset()


@pytest.mark.parametrize("has_caching", [True, False])
def test_residency_metrics_get_the_calls_that_vllm_makes(monkeypatch, has_caching):
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.KVCacheMetricsCollector", lambda _rate: Calls())
    settings = Settings(num_blocks=81, has_caching=has_caching)
    asks = make_asks(CONFIGURATIONS[-1].mix, 0, 60)
    found = []
    for whose in WHOSE:
        config = make_vllm_config(settings)
        config.observability_config.kv_cache_metrics = True
        stand = Stand(settings, whose, config=config)
        for ask in asks:
            stand.add(ask.make_request(settings))
        stand.run_all()
        collector = stand.scheduler.kv_metrics_collector
        events = len(collector.drain_events()) + sum(len(stats.kv_cache_eviction_events) for stats in stand.stats)
        stand.manager.evict_blocks({1, 2, 3})
        assert stand.scheduler.reset_prefix_cache()
        found.append((dict(collector.counts), len(collector.block_metrics), events))
    assert found[0] == found[1]
    assert found[0][0]["allocated"] and bool(found[0][0]["accessed"]) == has_caching == bool(found[0][2])


def windows_that_are_not_cached():
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}

    class Uncached(SlidingWindowSpec):
        @property
        def prefix_cacheable(self):
            return False

    specs = [FullAttentionSpec(**shape), Uncached(**shape, sliding_window=64)]
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("windows", [(), (64,)])
def test_as_many_tokens_are_said_to_be_cached_as_by_vllm(windows):
    found = []
    for whose in WHOSE:
        stand = Stand(Settings(windows=windows), whose)
        runs = stand.add(request("runs", range(7 * BLOCK + 3), 9))
        counts = [stand.manager.estimate_cached_tokens(runs)]
        stand.step()
        found.append([*counts, stand.manager.estimate_cached_tokens(runs)])
    assert found[0] == found[1] == [0, 7 * BLOCK]


def test_groups_that_cache_nothing_do_not_count_against_those_that_do():
    stand = Stand(Settings(num_blocks=200, windows=(64,)), groups=windows_that_are_not_cached())
    runs = stand.add(request("runs", range(7 * BLOCK + 3), 9))
    stand.scheduler.schedule()
    assert stand.manager.estimate_cached_tokens(runs) == 7 * BLOCK
