"""Quotas of tenants in tiers, and what `explain` says of what is stored there."""

import random

import pytest
from model.tiered import PROMPT, make_manager, run, settle, spill, start, stats

from kvblocks import InvalidArgumentError, KVCacheManager, QuotaUsage, Sequence, Tier, TierPart


def num_stored(manager, prompt, salt=None, tier="host"):
    """How many blocks of a prompt a tier has."""
    hit = manager.get_computed_blocks(Sequence("probe", [*prompt, 0], salt=salt)).cut(0)
    loads = [load for load in manager.tiers.find(hit) if load.tier == tier]
    return sum(load.num_tokens for load in loads) // 4


def store(manager, prompt, salt=None):
    run(manager, ("store", salt), prompt, salt=salt)
    settle(manager)


def test_a_tenant_over_its_quota_gives_way_first():
    manager = make_manager(64, Tier("host", 8, 100))
    manager.tiers.set_quota("host", "greedy", 2)
    store(manager, range(8), "modest")
    store(manager, range(100, 124), "greedy")  # six blocks: nobody wants the space yet
    assert manager.tiers.quotas("host") == [QuotaUsage("greedy", 2, 6)]
    store(manager, range(200, 212))
    assert num_stored(manager, range(8), "modest") == 2, "least recently used, and spared"
    assert num_stored(manager, range(100, 124), "greedy") == 3
    assert manager.tiers.quotas("host") == [QuotaUsage("greedy", 2, 3)]
    assert list(manager.quotas) == [], "the device's are others"
    assert (manager.tiers.quota_of("host", "greedy"), manager.tiers.quota_of("host", "other")) == (2, None)


def test_a_quota_may_be_used_up():
    """The whole tier holds what others stored without a quota."""
    manager = make_manager(64, Tier("host", 8, 100))
    manager.tiers.set_quota("host", "ann", 2)
    store(manager, range(100, 132))
    store(manager, range(12), "ann")
    assert manager.tiers.quotas("host") == [QuotaUsage("ann", 2, 2)]


def test_without_a_quota_the_least_recently_used_goes():
    manager = make_manager(64, Tier("host", 8, 100))
    store(manager, range(8), "modest")
    store(manager, range(100, 124), "greedy")
    store(manager, range(200, 212))
    assert num_stored(manager, range(8), "modest") == 0
    assert manager.tiers.quotas("host") == []


def test_nobody_is_pushed_below_a_quota():
    """However much one tenant stores, the others keep what is within their quotas."""
    manager = make_manager(32, Tier("host", 24, 100), Tier("disk", 24, 100))
    manager.tiers.set_default_quota("host", 6)
    for salt in ("ann", "bob"):
        store(manager, range(24), salt)
    for number in range(1, 30):
        store(manager, range(1000 * number, 1000 * number + 60), "greedy")
        assert [num_stored(manager, range(24), salt) for salt in ("ann", "bob")] == [6, 6]
        assert [num_stored(manager, range(24), salt, "disk") for salt in ("ann", "bob")] in ([6, 6], [0, 0], [0, 6])
    usage = {usage.salt: usage.num_cached_blocks for usage in manager.tiers.quotas("host")}
    assert usage == {"ann": 6, "bob": 6, "greedy": 12}, "what nobody else wants anybody may have"
    assert num_stored(manager, range(24), "ann", "disk") == 0


@pytest.mark.parametrize("seed", range(8))
def test_what_a_tenant_may_keep_it_keeps(seed):
    """If all quotas fit into the tier, nobody loses blocks within its quota, and the whole tier is used."""
    chosen = random.Random(seed)
    quotas = {"a": 3, "b": 5, "c": 7, "d": 9}
    manager = make_manager(64, Tier("host", sum(quotas.values()), 100, max_transfer_blocks=chosen.choice([1, 32])))
    for salt, number in quotas.items():
        manager.tiers.set_quota("host", salt, number)
    before = dict.fromkeys(quotas, 0)
    for _ in range(150):
        start, salt = 1000 * chosen.randrange(20), chosen.choice("abcddd")
        tokens = [*range(start, start + 4 * chosen.randint(1, 4)), *range(9000, 9000 + 4 * chosen.randint(0, 10))]
        store(manager, tokens, salt)
        after = {usage.salt: usage.num_cached_blocks for usage in manager.tiers.quotas("host")}
        assert all(after[other] >= min(before[other], quotas[other]) for other in quotas), (before, after)
        before = after
    assert before == quotas


def test_a_tenant_may_replace_what_it_has_by_what_is_newer():
    manager = make_manager(64, Tier("host", 8, 100))
    manager.tiers.set_default_quota("host", 4)
    for salt in ("a", "b"):
        store(manager, range(16), salt)
    store(manager, range(100, 108), "a")
    assert [num_stored(manager, range(first, first + 16), "a") for first in (0, 100)] == [2, 2]
    assert num_stored(manager, range(16), "b") == 4


def test_of_what_is_longer_than_a_quota_the_beginning_is_stored():
    manager = make_manager(64, Tier("host", 8, 100))
    manager.tiers.set_default_quota("host", 4)
    for salt in ("a", "b"):
        store(manager, range(16), salt)
    store(manager, range(100, 140), "a")
    assert num_stored(manager, range(100, 140), "a") == 4
    assert num_stored(manager, range(16), "b") == 4
    assert stats(manager).num_dropped_blocks == 6


def test_what_is_on_its_way_counts():
    manager = make_manager(128, Tier("host", 8, 100))
    manager.tiers.set_quota("host", "a", 4)
    manager.tiers.set_quota("host", "b", 4)
    store(manager, range(32), "b")
    for number in range(4):
        run(manager, number, range(100 * number, 100 * number + 8), salt="a")
    transfers = manager.tiers.take_transfers()
    assert sum(len(transfer.slots) for transfer in transfers) == 4
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 4, 0), QuotaUsage("b", 4, 4)]
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 4, 4), QuotaUsage("b", 4, 4)]


def test_a_default_is_for_every_salt_without_its_own():
    manager = make_manager(64, Tier("host", 32, 100))
    manager.tiers.set_default_quota("host", 1)
    manager.tiers.set_quota("host", "big", 5)
    for salt in ("a", "big", None):
        store(manager, range(8), salt)
    assert sorted(manager.tiers.quotas("host"), key=str) == [QuotaUsage("a", 1, 2), QuotaUsage("big", 5, 2)]
    manager.tiers.set_default_quota("host", None)
    assert manager.tiers.quotas("host") == [QuotaUsage("big", 5, 2)]
    manager.tiers.set_quota("host", "big", None)
    assert manager.tiers.quotas("host") == []


def test_quotas_count_what_is_stored_already_and_what_is_forgotten():
    manager = make_manager(64, Tier("host", 32, 100))
    store(manager, range(8), "a")
    manager.tiers.set_quota("host", "a", 1)
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 1, 2)]
    manager.forget_salt("a")
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 1, 0)]
    store(manager, range(8), "a")
    manager.reset_prefix_cache()
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 1, 0)]


def test_slots_that_move_count_and_are_not_taken():
    manager = make_manager(32, Tier("host", 8, 100))
    manager.tiers.set_quota("host", "a", 0)
    store(manager, range(32), "a")
    spill(manager)
    sequence = Sequence("two", range(33), salt="a")
    loads = manager.tiers.find(manager.get_computed_blocks(sequence))
    assert manager.tiers.allocate(sequence, None, loads) is not None
    run(manager, "other", range(100, 116))
    (load,) = manager.tiers.take_transfers()
    assert load.is_load
    assert manager.tiers.quotas("host") == [QuotaUsage("a", 0, 8)]


@pytest.mark.parametrize("call", ["set_quota", "set_default_quota", "quotas"])
@pytest.mark.parametrize("tier", ["disk", None, 0])
def test_a_tier_that_is_none_is_refused(call, tier):
    manager = make_manager(8, Tier("host", 8, 100))
    arguments = {"set_quota": (tier, "a", 1), "set_default_quota": (tier, 1), "quotas": (tier,)}[call]
    with pytest.raises(InvalidArgumentError, match=rf"tiers\.{call}: expected the name of a tier, one of \['host'\]"):
        getattr(manager.tiers, call)(*arguments)


@pytest.mark.parametrize(("salt", "number"), [("", 1), (5, 1), ("a", -1), ("a", "b"), ("a", 0.5)])
def test_quotas_that_are_none_are_refused(salt, number):
    manager = make_manager(8, Tier("host", 8, 100))
    with pytest.raises(InvalidArgumentError, match=r"expected .*, got"):
        manager.tiers.set_quota("host", salt, number)
    assert manager.tiers.quotas("host") == []


# What `explain` says.


def test_explain_says_what_is_below():
    manager = make_manager(32, Tier("host", 6, 100), Tier("disk", 64, 100))
    store(manager, PROMPT)
    spill(manager)
    explanation = manager.inspect.explain(Sequence("two", [*PROMPT, 0]))
    assert explanation.tiers == (TierPart("host", 0, 24, 0), TierPart("disk", 24, 40, 54))
    assert str(explanation) == (
        "0 of 10 full blocks are cached; block 0 was never cached, as far as is remembered; "
        "tokens 0 to 23 are on 'host' until about 0 more blocks are stored there; "
        "tokens 24 to 39 are on 'disk' until about 54 more blocks are stored there"
    )


def test_explain_counts_what_goes_before():
    manager = make_manager(64, Tier("disk", 16, 100))
    store(manager, range(16))
    store(manager, range(100, 116))

    def ahead(first, salt=None):
        sequence = Sequence("two", [*range(first, first + 16), 0], salt=salt)
        (part,) = manager.inspect.explain(sequence).tiers
        return part.num_blocks_ahead

    spill(manager)
    assert (ahead(0), ahead(100)) == (8, 12)
    for number in range(8):
        assert ahead(0) == 8 - number
        store(manager, range(1000 + 4 * number, 1004 + 4 * number))
        spill(manager)
    assert ahead(0) == 0
    store(manager, range(2000, 2004))
    spill(manager)
    assert manager.inspect.explain(Sequence("two", [*range(16), 0])).tiers[0].end_token == 12


def test_explain_knows_who_is_beyond_a_quota():
    manager = make_manager(64, Tier("disk", 12, 100))
    store(manager, range(16))
    store(manager, range(16), "greedy")
    manager.tiers.set_quota("disk", "greedy", 1)
    spill(manager)
    sequence = Sequence("two", [*range(16), 0], salt="greedy")
    assert manager.inspect.explain(sequence).tiers == (TierPart("disk", 0, 16, 4),), "what holds nothing goes first"
    manager.tiers.set_quota("disk", "greedy", None)
    assert manager.inspect.explain(sequence).tiers == (TierPart("disk", 0, 16, 8),)


def test_explain_says_nothing_of_tiers_that_have_nothing_behind_a_hit():
    manager = make_manager(32, Tier("host", 64, 100))
    store(manager, PROMPT)
    assert manager.inspect.explain(Sequence("two", [*PROMPT, 0])).tiers == ()
    assert manager.inspect.explain(Sequence("two", range(500, 520))).tiers == ()
    assert KVCacheManager(8, 4).inspect.explain(Sequence("two", range(8))).tiers == ()


def test_explain_counts_from_what_is_being_read():
    manager = make_manager(32, Tier("host", 16, 100))
    store(manager, PROMPT)
    spill(manager)
    sequence, _ = start(manager, tokens=[*PROMPT, 0])
    part = manager.inspect.explain(Sequence("three", [*PROMPT, 0])).tiers
    assert part == (TierPart("host", 0, 40, 6),), "all that can be taken now"
    manager.abort(sequence, 0)
