"""The contract of eviction policies: built-in, random and malicious ones, in every kind of cache."""

import random
from typing import Any

import pytest
from model.group_history import GroupHistory
from model.history import History, RandomChooser, walk
from model.policy_contract import (
    Beginnings,
    Malicious,
    Random,
    compare_in_cache,
    compare_in_groups,
    compare_in_manager,
)
from model.prefix_history import OPERATIONS as PREFIX_OPERATIONS
from model.prefix_history import PrefixHistory
from model.reference_groups import ReferenceGroups
from model.tier_machine import TierMachine
from model.where import where

from kvblocks import ChunkedLocal, FullAttention, Group, KVCacheManager, Sequence, SlidingWindow, Tier
from kvblocks.retention.policies import NAMED, check_policy

POLICIES: dict[str, Any] = {**NAMED, "random": Random, "beginnings": Beginnings, "malicious": Malicious}
GROUPS: dict[str, list[Group]] = {
    "two windows": [FullAttention(2), SlidingWindow(2, 2), SlidingWindow(2, 5)],
    "two full": [FullAttention(2), FullAttention(4), SlidingWindow(2, 3)],
    "kept windows": [FullAttention(2), SlidingWindow(2, 3, keeps_passed=True), SlidingWindow(2, 5)],
    "chunks": [FullAttention(2), ChunkedLocal(2, 6), SlidingWindow(4, 3)],
    "windows only": [SlidingWindow(2, 3), SlidingWindow(4, 6)],
}


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "malicious"])
def test_they_keep_to_the_interface(name: str) -> None:
    for seed, num_blocks in enumerate([2, 5, 12, 12, 40]):
        check_policy(POLICIES[name], num_blocks, 1000, seed)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "options"),
    [(10, 2, {"debug": True, "enable_events": True}), (14, 1, {"first_block_id": 2})],
)
def test_manager_and_reference_model_agree(
    name: str, num_blocks: int, block_size: int, options: dict[str, Any], met: Any
) -> None:
    num_operations = 2500 if name == "random" else 1000  # the policy of which is asked what the walks met
    seed = 10 * num_blocks + block_size
    contract = compare_in_manager(POLICIES[name], num_blocks, block_size, num_operations, seed=seed, **options)
    assert bool(contract.counts["failures"]) == (name == "malicious")
    met[name].add(contract.counts)


def test_a_walk_with_one_policy_agrees() -> None:
    """A short form of the above, for `make test-fast`."""
    contract = compare_in_manager(Random, 10, 2, 1000, seed=3, debug=True)
    assert contract.counts["asked"] and contract.counts["of tenants"]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("groups", GROUPS)
def test_a_manager_of_several_groups_agrees(name: str, groups: str, met: Any) -> None:
    contract = compare_in_groups(POLICIES[name], GROUPS[groups], 500, seed=len(groups), debug=True)
    assert bool(contract.counts["failures"]) == (name == "malicious")
    met[f"{name}, groups"].add(contract.counts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("max_blocks", "block_size"), [(6, 2), (20, 1)])
def test_a_prefix_cache_agrees(name: str, max_blocks: int, block_size: int, met: Any) -> None:
    counts = compare_in_cache(POLICIES[name], max_blocks, block_size, 600, seed=max_blocks)
    assert bool(counts["failures"]) == (name == "malicious")
    met[f"{name}, cache"].add(counts)


def test_the_walks_met_all_cases(met: Any) -> None:
    """Asked of policies whose behaviour no change of a rule is meant to move: any other may be as odd as it likes."""
    least = {"asked": 70, "several wanted": 25, "hit": 110, "free": 360, "use": 90, "remove": 230, "begin": 200}
    least |= {"pause": 400, "end": 90, "of tenants": 800, "of sessions": 50}
    met["random"].check(2, least)
    met["random, groups"].check(len(GROUPS), {"asked": 70, "hit": 17, "use": 40, "of sessions": 25})
    met["random, cache"].check(2, {"asked": 100, "hits": 150, "evicting": 50, "too few evictable": 5})
    met["malicious"].check(2, {"failures": 40})
    met["malicious, groups"].check(len(GROUPS), {"failures": 90})
    met["malicious, cache"].check(2, {"failures": 190})


@pytest.mark.parametrize("policy", [None, "lru"])
def test_lru_is_what_there_is_without_a_policy(policy: str | None) -> None:
    """Block for block: the same histories with the same reference models, which know nothing of policies."""
    history = History(14, 1, eviction=policy, enable_events=True)
    walk(history, RandomChooser(seed=141), num_operations=4000, forget_every=100)
    assert history.manager.stats.num_evicted_blocks > 50
    for groups in GROUPS.values():
        grouped = GroupHistory(10 * len(groups), groups, eviction=policy)
        assert type(grouped.model) is ReferenceGroups
        walk(grouped, RandomChooser(seed=7), num_operations=300)
    cached, chooser = PrefixHistory(8, 2, eviction=policy), RandomChooser(seed=8)
    operations = [operation for operation, weight in PREFIX_OPERATIONS for _ in range(weight)]
    for number in range(500):
        operation = chooser.choose(operations)
        with where(chooser.seed, number, operation):
            operation(cached, chooser)
            if number % 100 == 0:
                cached.clear(chooser)
            cached.check()
    cached.end()


def make_machine(seed: int, policy: Any) -> TierMachine:
    kinds = random.Random(seed)
    tiers = [
        Tier(
            name,
            30,
            100,
            store=kinds.choice(["freed", "computed", "reused"]),
            max_transfer_blocks=kinds.choice([2, 32]),
        )
        for name in ("host", "disk")
    ]
    groups = kinds.choice([None, [FullAttention(2), SlidingWindow(2, 4)]])
    options: dict[str, Any] = {} if groups is None else {"groups": groups}
    return TierMachine(seed, 36 if groups else 20, None if groups else 2, tiers, eviction=policy, **options)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_shows_wrong_bytes_where_there_are_tiers(name: str, met: Any) -> None:
    for seed in range(12):
        machine = make_machine(seed, POLICIES[name])
        machine.walk(250)
        machine.finish()
        met[f"{name}, tiers"].add(machine.counts)


def test_the_walks_with_tiers_met_all_cases(met: Any) -> None:
    met["random, tiers"].check(12, {"stores": 150, "loads": 3, "found below": 20})


def test_lru_is_what_there_is_without_a_policy_where_there_are_tiers() -> None:
    for seed in range(12):
        one, other = make_machine(seed, None), make_machine(seed, "lru")
        for _ in range(50):
            one.walk(5)
            other.walk(5)
            assert one.manager.inspect.free_block_ids() == other.manager.inspect.free_block_ids()
            assert list(one.manager.tiers) == list(other.manager.tiers)


@pytest.mark.parametrize("groups", ["two windows", "kept windows"])
def test_lru_is_what_there_is_without_a_policy_with_windows_and_quotas(groups: str) -> None:
    """Blocks that left a window count for their tenant, too, and are evicted in their order."""
    num_over = 0
    for seed in range(4):
        chosen = random.Random(seed)
        managers = [KVCacheManager(40, groups=GROUPS[groups], eviction=policy) for policy in (None, "lru")]
        running: list[list[Sequence]] = []
        for manager in managers:
            manager.quotas.set_default(6)
        for number in range(150):
            salt, length = chosen.choice(["a", "b", "c"]), chosen.randint(2, 16)
            tokens = [chosen.randrange(2) for _ in range(length)]
            pair = [Sequence(number, tokens, salt=salt) for _ in managers]
            first = chosen.randint(1, length)
            started = [start_chunk(manager, one, first) for manager, one in zip(managers, pair, strict=True)]
            if all(started):
                running.append(pair)
            if len(running) > 3 or (running and chosen.random() < 0.5):
                for manager, one in zip(managers, running.pop(chosen.randrange(len(running))), strict=True):
                    if one.num_computed_tokens < one.num_tokens:
                        manager.allocate_slots(one)
                    manager.free(one)
            assert managers[0].inspect.free_block_ids() == managers[1].inspect.free_block_ids()
            assert list(managers[0].quotas) == list(managers[1].quotas)
            num_over += any(usage.num_cached_blocks > usage.max_cached_blocks for usage in managers[0].quotas)
        managers[1].check()
    assert num_over > 100


def start_chunk(manager: KVCacheManager, sequence: Sequence, num_tokens: int) -> bool:
    """Start a sequence with its hit and `num_tokens` tokens more. Returns whether there was room."""
    hit = manager.get_computed_blocks(sequence)
    number = min(num_tokens, sequence.num_tokens - hit.num_tokens)
    return manager.allocate_slots(sequence, number, hit=hit) is not None
