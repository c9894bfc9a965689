"""Metrics against histories computed by hand, against the manager's own counters, and from another thread."""

import json
import random
import sys
import threading
from itertools import pairwise
from typing import Any

import pytest

from kvblocks import InvalidArgumentError, KVCacheManager, QuotaUsage, Sequence
from kvblocks.observe.metrics import BLOCK_BOUNDS, SECOND_BOUNDS, CacheMetrics
from kvblocks.stats import HitCounts, PinUsage


def compute(manager: KVCacheManager, tokens: Any, salt: str | None = None) -> HitCounts:
    """Run a request from start to end. Returns what it should count for."""
    sequence = Sequence("passing", tokens, salt=salt)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit) is not None
    manager.free(sequence)
    return HitCounts(1, int(hit.num_tokens > 0), sequence.num_tokens, hit.num_tokens)


def total(counts: list[HitCounts]) -> HitCounts:
    together = HitCounts()
    for one in counts:
        together = together.plus(one)
    return together


def test_a_history_by_hand() -> None:
    manager = KVCacheManager(4, 4)
    metrics = CacheMetrics(manager, sample_every=1, window=2, bounds=[1, 4, 100])
    assert metrics.snapshot().stats.hit_rate == metrics.snapshot().window.request_hit_rate == 0.0
    for tokens in (range(8), range(10), range(100, 116)):
        compute(manager, tokens)
        metrics.observe()
    now = metrics.snapshot()
    assert (now.time, now.time_unit) == (7.0, "blocks")
    assert now.stats == manager.stats
    assert (now.stats.hit_rate, now.stats.request_hit_rate) == (8 / 34, 1 / 3)
    assert now.window == HitCounts(2, 1, 26, 8)
    assert (now.window.hit_rate, now.window.request_hit_rate) == (8 / 26, 1 / 2)
    assert (now.stats.num_evicted_blocks, now.stats.num_free_blocks, now.stats.num_cached_blocks) == (2, 4, 4)
    assert now.stats.usage == 0.0
    assert now.num_sampled_blocks == 4
    # Blocks 0 and 1, taken at 2 and hit at 3, while block 2 had been taken at 3; all were taken again at 7.
    assert (now.lifetimes.counts, now.lifetimes.total) == ((0, 0, 2, 0), 10.0)
    assert (now.idle_times.counts, now.idle_times.total) == ((0, 2, 0, 0), 8.0)
    assert (now.reuse_gaps.counts, now.reuse_gaps.total) == ((2, 0, 0, 0), 0.0)  # nothing was taken in between
    assert (now.last_idle_time, now.queue_age) == (4.0, 0.0)
    held = Sequence("held", range(500, 508))
    manager.allocate_slots(held)
    later = metrics.snapshot()
    assert (later.stats.usage, later.queue_age, later.last_idle_time) == (0.5, 2.0, 2.0)
    assert later.window == HitCounts(3, 1, 34, 8)  # what wasn't observed yet belongs to it
    assert now.window == HitCounts(2, 1, 26, 8)


def test_seconds_are_the_callers() -> None:
    manager, times = KVCacheManager(2, 4), iter(range(990, 2000, 10))
    metrics = CacheMetrics(manager, sample_every=1, clock=lambda: float(next(times)))
    compute(manager, range(8))  # taken at 1000, released at 1010
    compute(manager, range(100, 108))  # at 1020 and 1030
    now = metrics.snapshot()
    assert (now.time, now.time_unit) == (1040.0, "seconds")
    assert now.lifetimes.bounds == SECOND_BOUNDS
    assert (now.lifetimes.num_values, now.lifetimes.mean, now.idle_times.mean) == (2, 20.0, 10.0)
    assert (now.last_idle_time, now.queue_age) == (10.0, 10.0)


@pytest.mark.parametrize("first_block_id", [0, 20])
def test_pins_and_quotas(first_block_id: int) -> None:
    manager = KVCacheManager(16, 4, pin_budget=1.0, first_block_id=first_block_id)
    metrics = CacheMetrics(manager)
    compute(manager, range(8))
    manager.pins.pin(range(16))
    manager.pins.pin(range(8))
    manager.quotas.set("a", 1)
    compute(manager, range(12), "a")
    now = metrics.snapshot()
    assert now.pins == PinUsage(num_pins=2, num_wanted_blocks=6, num_held_blocks=4, num_pinned_blocks=2)
    assert now.quotas == (QuotaUsage("a", 1, 3),) == tuple(manager.quotas)
    assert now.stats.usage == 2 / 16


def test_the_record_as_plain_values() -> None:
    manager = KVCacheManager(4, 4)
    metrics = CacheMetrics(manager, sample_every=1)
    manager.quotas.set("a", 2)
    for _ in range(3):
        compute(manager, range(10), "a")
        compute(manager, range(100, 116))
    now = metrics.snapshot()
    values = now.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["stats"]["hit_rate"] == now.stats.hit_rate
    assert values["stats"]["request_hit_rate"] == now.stats.request_hit_rate
    assert values["stats"]["usage"] == 0.0
    assert values["window"] | {} == {
        "num_queries": 6,
        "num_hits": now.stats.num_hits,
        "num_queried_tokens": 78,
        "num_hit_tokens": now.stats.num_hit_tokens,
        "hit_rate": now.stats.hit_rate,
        "request_hit_rate": now.stats.request_hit_rate,
    }
    assert values["quotas"] == [
        {"salt": "a", "max_cached_blocks": 2, "num_cached_blocks": now.quotas[0].num_cached_blocks}
    ]
    assert values["lifetimes"]["bounds"] == list(BLOCK_BOUNDS)
    assert sum(values["lifetimes"]["counts"]) == now.lifetimes.num_values > 0
    assert values["pins"] == {"num_pins": 0, "num_wanted_blocks": 0, "num_held_blocks": 0, "num_pinned_blocks": 0}
    with pytest.raises(AttributeError):
        now.time = 0  # type: ignore[misc]


def test_counts_from_before_are_in_stats_and_not_in_the_window() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, range(8))
    metrics = CacheMetrics(manager)
    expected = compute(manager, range(9))
    now = metrics.snapshot()
    assert now.window == expected
    assert now.stats.num_queries == 2


def test_without_a_sample_nothing_is_watched() -> None:
    manager = KVCacheManager(2, 4)
    metrics = CacheMetrics(manager, sample_every=None)
    compute(manager, range(8))
    compute(manager, range(100, 108))
    now = metrics.snapshot()
    assert now.stats.num_evicted_blocks == 2
    assert (now.num_sampled_blocks, now.lifetimes.num_values, now.last_idle_time, now.queue_age) == (0, 0, None, None)
    CacheMetrics(manager)  # there was no sampler to replace


def test_one_at_a_time_until_it_is_closed() -> None:
    manager = KVCacheManager(2, 4)
    metrics = CacheMetrics(manager, sample_every=1)
    with pytest.raises(InvalidArgumentError, match="expected a manager whose blocks nobody samples"):
        CacheMetrics(manager)
    compute(manager, range(8))
    metrics.close()
    metrics.close()
    compute(manager, range(100, 108))
    now = metrics.snapshot()
    assert (now.lifetimes.num_values, now.stats.num_queries) == (0, 2)
    others = CacheMetrics(manager, sample_every=1)
    metrics.close()
    compute(manager, range(200, 208))
    compute(manager, range(300, 308))
    assert others.snapshot().lifetimes.num_values == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_every": 0}, "sample_every: expected an int of at least 1, got 0"),
        ({"sample_every": True}, "sample_every: expected an int"),
        ({"window": 0}, "window: expected an int of at least 1, got 0"),
        ({"clock": 5}, "clock: expected a function"),
        ({"bounds": []}, "bounds: expected at least one number"),
        ({"bounds": [1, 1]}, "ascending"),
        ({"bounds": [2, 1]}, "ascending"),
        ({"bounds": [1, float("inf")]}, "finite"),
        ({"bounds": ["1"]}, "bounds: expected"),
    ],
)
def test_bad_arguments_attach_nothing(options: Any, message: str) -> None:
    manager = KVCacheManager(8, 4)
    with pytest.raises(InvalidArgumentError, match=message):
        CacheMetrics(manager, **options)
    CacheMetrics(manager)  # nobody samples its blocks


@pytest.mark.parametrize("window", [1, 7, 50, 10_000])
def test_the_window_is_the_newest_steps_that_have_enough_requests(window: int) -> None:
    chooser = random.Random(window)
    manager = KVCacheManager(60, 2)
    metrics = CacheMetrics(manager, sample_every=1, window=window)
    steps: list[HitCounts] = []
    for _ in range(300):
        requests = [
            compute(manager, [chooser.randrange(3) for _ in range(chooser.randrange(1, 30))])
            for _ in range(chooser.choice([0, 0, 1, 1, 2, 5]))
        ]
        steps.append(total(requests))
        metrics.observe()
        now = metrics.snapshot()
        newest = HitCounts()
        for step in reversed(steps):
            if newest.num_queries >= window:
                break
            newest = newest.plus(step)
        assert now.window == newest
        assert window <= now.window.num_queries < window + 5 or now.window == total(steps)
        assert now.stats == manager.stats
        assert now.lifetimes.num_values == now.idle_times.num_values <= now.stats.num_evicted_blocks
    counts = total(steps)
    stats = metrics.snapshot().stats
    assert counts.hit_rate == stats.hit_rate > 0.05
    assert counts.request_hit_rate == stats.request_hit_rate > 0.3
    assert stats.num_evicted_blocks > 500


def test_every_eviction_is_a_life_when_all_blocks_are_watched_and_none_goes_with_another() -> None:
    manager = KVCacheManager(30, 1)
    metrics = CacheMetrics(manager, sample_every=1)
    for number in range(200):
        compute(manager, range(number * 1000, number * 1000 + 1 + number % 20))
    now = metrics.snapshot()
    assert now.lifetimes.num_values == now.idle_times.num_values == now.stats.num_evicted_blocks > 1000
    # Nothing is hit and nothing decodes, so a block lives in the queue until the others have been taken once.
    assert now.idle_times.total / now.idle_times.num_values == pytest.approx(30, abs=2)


def test_observing_is_not_needed_for_counts_and_means_all_for_the_window() -> None:
    manager = KVCacheManager(8, 4)
    metrics = CacheMetrics(manager, window=1)
    expected = [compute(manager, range(n)) for n in (5, 6, 7)]
    assert metrics.snapshot().window == total(expected)


def test_another_thread_may_take_snapshots() -> None:
    """Snapshots don't raise while salts, pins and blocks come and go, and counters never decrease."""
    manager = KVCacheManager(200, 1, pin_budget=1.0)
    metrics = CacheMetrics(manager, sample_every=1)
    manager.quotas.set_default(3)
    is_over = threading.Event()
    problems: list[BaseException] = []
    snapshots: list[Any] = []

    def scrape() -> None:
        try:
            while not is_over.is_set():
                snapshots.append(metrics.snapshot())
        except BaseException as error:  # noqa: BLE001  # the other thread tells of it
            problems.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for number in range(3000):
            compute(manager, range(number, number + 20), f"salt-{number % 700}")
            pin = manager.pins.pin(range(number, number + 9), salt=f"salt-{number % 700}")
            metrics.observe()
            manager.pins.unpin(pin)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not problems
    assert len(snapshots) > 20
    for before, after in pairwise(snapshots):
        assert before.stats.num_taken_blocks <= after.stats.num_taken_blocks
        assert before.lifetimes.num_values <= after.lifetimes.num_values
    assert snapshots[-1].stats.num_queries > 0


def test_what_a_snapshot_asks_is_made_before_another_thread_takes_one() -> None:
    """Two threads could else make a manager's pins at once, and what one of them has pinned would be lost."""
    manager = KVCacheManager(8, 4)
    metrics = CacheMetrics(manager)
    made = manager._pins, manager._quotas, manager._tiers  # noqa: SLF001
    assert None not in made
    metrics.snapshot()
    assert (manager.pins, manager.quotas, manager.tiers) == made


def test_events_are_the_same_whether_anybody_watches() -> None:
    events = []
    for is_sampled in (False, True):
        manager = KVCacheManager(5, 1, enable_events=True)
        if is_sampled:
            manager._start_sampling(1000, lambda: 0.0, (1.0,))  # noqa: SLF001
        first = Sequence("a", [10, 11, 12])
        manager.allocate_slots(first)
        others = [Sequence("b", [1]), Sequence("c", [2])]
        for sequence in others:
            manager.allocate_slots(sequence)
        manager.free(first)
        manager.take_events()
        manager.append_step(others, [7, 8])
        events.append(manager.take_events())
    assert events[0] == events[1]
