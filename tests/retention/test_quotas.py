"""Quotas, one promise at a time. Long histories are in test_stateful.py, fairness is in test_fairness.py."""

from typing import Any

import pytest

from kvblocks import InvalidArgumentError, KVCacheManager, QuotaUsage, Sequence
from kvblocks.hashing.extra_keys import encode_extra_keys
from kvblocks.retention.quotas import TenantQuotas


def compute(manager: KVCacheManager, tokens: Any, salt: str | None = None) -> None:
    sequence = Sequence("passing", tokens, salt=salt)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def num_hit(manager: KVCacheManager, tokens: Any, salt: str | None = None) -> int:
    return manager.get_computed_blocks(Sequence("probe", [*tokens, 0], salt=salt)).num_tokens


def test_a_tenant_over_its_quota_gives_way_first() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    manager.quotas.set("greedy", 2)
    compute(manager, range(8), "modest")
    compute(manager, range(100, 124), "greedy")  # six blocks: nobody wants the space yet
    assert list(manager.quotas) == [QuotaUsage("greedy", 2, 6)]
    compute(manager, range(200, 212))
    assert num_hit(manager, range(8), "modest") == 8  # least recently used, and spared
    assert num_hit(manager, range(100, 124), "greedy") == 12
    assert list(manager.quotas) == [QuotaUsage("greedy", 2, 3)]


def test_within_its_quota_it_is_treated_as_everybody() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    manager.quotas.set("other", 4)
    compute(manager, range(16), "other")
    compute(manager, range(16), "modest")
    compute(manager, range(200, 208))
    assert num_hit(manager, range(16), "other") == 8


def test_free_blocks_that_hold_nothing_go_first() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    manager.quotas.set("greedy", 1)
    compute(manager, range(16), "greedy")
    compute(manager, range(16), "modest")
    assert (num_hit(manager, range(16), "greedy"), num_hit(manager, range(16), "modest")) == (16, 16)


def test_quotas_count_what_is_cached_already_and_may_be_taken_away() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    compute(manager, range(8), "modest")
    compute(manager, range(16), "greedy")
    manager.quotas.set("greedy", 1)
    assert list(manager.quotas) == [QuotaUsage("greedy", 1, 4)]
    manager.quotas.set("greedy", None)
    assert list(manager.quotas) == []
    compute(manager, range(200, 216))
    assert num_hit(manager, range(8), "modest") == 0


def test_a_prefix_that_parts_from_a_tenants_is_the_tenants() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    compute(manager, range(8), "a")
    compute(manager, [0, 1, 2, 3, 90, 91, 92, 93], "a")  # a run of its own, whose key has no salt
    manager.quotas.set("a", 1)
    manager.quotas.set(None, 1)
    assert sorted(manager.quotas, key=str) == [QuotaUsage("a", 1, 3), QuotaUsage(None, 1, 0)]


def test_a_default_is_for_every_salt_without_its_own() -> None:
    manager = KVCacheManager(16, 4, debug=True)
    manager.quotas.set_default(1)
    manager.quotas.set("big", 5)
    compute(manager, range(8), "a")
    compute(manager, range(8), "big")
    compute(manager, range(8))  # without a salt: no quota by default
    assert sorted(manager.quotas, key=str) == [QuotaUsage("a", 1, 2), QuotaUsage("big", 5, 2)]
    manager.quotas.set_default(None)
    assert list(manager.quotas) == [QuotaUsage("big", 5, 2)]


def test_salts_that_come_and_go_do_not_add_up() -> None:
    quotas = TenantQuotas()
    quotas.set_default(2)
    for n in range(5000):
        tenant = quotas.account_of(encode_extra_keys(f"user-{n}", None, (), 4)[0])
        assert tenant is not None
        tenant.add(3)
        if n % 500:
            tenant.add(-3)  # evicted again
    assert len(quotas) < 2100
    assert [tenant.salt for tenant in quotas.tenants()] == [f"user-{n}" for n in range(0, 5000, 500)]


def test_the_one_longest_over_goes_first() -> None:
    manager = KVCacheManager(12, 4, debug=True)
    for salt in ("a", "b"):
        manager.quotas.set(salt, 1)
    compute(manager, range(16), "modest")
    compute(manager, range(12), "a")
    compute(manager, range(20), "b")
    compute(manager, range(200, 208))  # a was over first
    assert [quota.num_cached_blocks for quota in manager.quotas] == [1, 5]
    compute(manager, range(300, 308))
    assert [quota.num_cached_blocks for quota in manager.quotas] == [1, 3]
    assert num_hit(manager, range(16), "modest") == 16


def test_a_reset_counts_anew() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    manager.quotas.set("a", 1)
    compute(manager, range(16), "a")
    manager.reset_prefix_cache()
    assert list(manager.quotas) == [QuotaUsage("a", 1, 0)]
    compute(manager, range(8), "a")
    assert list(manager.quotas) == [QuotaUsage("a", 1, 2)]


def test_bad_arguments() -> None:
    manager = KVCacheManager(8, 4)
    with pytest.raises(InvalidArgumentError, match="salt: expected a non-empty str or None"):
        manager.quotas.set("", 1)
    for call in (lambda: manager.quotas.set("a", -1), lambda: manager.quotas.set_default(True)):
        with pytest.raises(InvalidArgumentError, match="max_blocks: expected an int of at least 0"):
            call()
    assert list(manager.quotas) == []
