"""Quotas work: a greedy tenant with a quota does not evict what modest tenants use again.

bench/replay/fairness.py has the simulation, and says what it does not show.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvblocks import KVCacheManager, Sequence

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fairness(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.replay.fairness")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_quota_gives_the_modest_tenants_their_hit_rate_back(fairness, seed):
    alone, without, with_quota, greedy_alone = fairness.simulate_all(seed=seed)
    assert alone.hit_rate > 0.85
    assert without.hit_rate < alone.hit_rate - 0.3
    assert with_quota.hit_rate > alone.hit_rate - 0.01
    for salt in fairness.MODEST:
        assert with_quota.hit_rates[salt] > alone.hit_rates[salt] - 0.01
    # The greedy tenant got as much done. Where nobody else wants the space, it may use all of it.
    assert with_quota.num_greedy_requests == without.num_greedy_requests > 900
    assert greedy_alone.max_greedy_blocks == fairness.NUM_BLOCKS
    assert without.max_greedy_blocks > fairness.NUM_BLOCKS * 0.7


@pytest.mark.parametrize("quota", [0, 64, 200, 400])
def test_nobody_loses_a_block_while_a_tenant_is_above_the_bound(fairness, quota):
    """When another tenant loses a block, this one has cached at most its quota, or only what its sequences own."""
    outcome = fairness.simulate("", (*fairness.MODEST, fairness.GREEDY), quota)
    assert outcome.num_lost_blocks > 1000
    assert outcome.max_over_bound == 0  # it is reached, and never passed
    num_held = 2 * (fairness.GREEDY_TOKENS + fairness.GREEDY_ANSWER_TOKENS) // fairness.BLOCK_SIZE
    assert outcome.max_at_loss <= max(quota, num_held)


def test_without_a_quota_there_is_no_bound(fairness):
    outcome = fairness.simulate("", (*fairness.MODEST, fairness.GREEDY), None)
    assert outcome.max_at_loss > 400


def test_a_default_quota_is_as_good(fairness):
    """All tenants have the default quota, and none has to be named."""
    alone = fairness.simulate("", fairness.MODEST, None)
    simulation = fairness.Simulation((*fairness.MODEST, fairness.GREEDY), None)
    for salt in simulation.tenants:
        simulation.manager.quotas.set(salt, None)
    simulation.manager.quotas.set_default(fairness.NUM_BLOCKS // 4)
    for _ in range(600):
        simulation.tick()
    simulation.manager.check()
    modest = [simulation.tally(salt) for salt in fairness.MODEST]
    rate = sum(tally.num_hit_tokens for tally in modest) / sum(tally.num_queried_tokens for tally in modest)
    assert rate > alone.hit_rate - 0.02
    assert simulation.max_greedy_blocks > fairness.NUM_BLOCKS // 4  # it was over its quota, and gave way


def test_what_runs_is_never_taken():
    """With a quota of 0 a tenant keeps the blocks of its running sequences. Once freed, they are evicted first."""
    manager = KVCacheManager(8, 4)
    manager.quotas.set("greedy", 0)
    running = Sequence("running", range(24), salt="greedy")
    manager.allocate_slots(running)
    for number in range(5):
        passing = Sequence("passing", range(number * 8, number * 8 + 8), salt="modest")
        assert manager.allocate_slots(passing) is not None
        manager.free(passing)
    assert manager.allocate_slots(Sequence("large", range(12), salt="modest")) is None
    assert [block.is_cached for block in running.blocks] == [True] * 6
    manager.free(running)
    assert manager.allocate_slots(Sequence("large", range(12), salt="modest")) is not None


def test_the_bench_prints_a_table_or_json():
    command = [sys.executable, "-m", "bench.replay.fairness", "--quota", "100"]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=150).stdout
    assert "and it has a quota" in table and "# quota: 100" in table
    printed = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=150)
    results = json.loads(printed.stdout)["results"]
    assert len(results) == 4
    assert results[2]["scenario"] == "and it has a quota" and results[2]["max_over_bound"] <= 0
