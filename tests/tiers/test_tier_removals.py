"""Explanations know what tiers have evicted, dropped and lost by a reset: the last removal of a block counts."""

import pytest
from model.tiered import PROMPT, make_manager, run, settle, spill

from kvblocks import EventOptions, FullAttention, KVCacheManager, Sequence, SlidingWindow, Tier

HISTORY = {"num_history_blocks": 1000}
MORE = range(100, 140)


def explain(manager, tokens=PROMPT, **more):
    """Of a prompt with one token more, which has to be computed."""
    return manager.inspect.explain(Sequence("again", [*tokens, 0], **more))


def test_a_block_was_last_evicted_from_the_tier_that_had_it_last():
    manager = make_manager(12, Tier("host", 12, 100), **HISTORY)
    run(manager)
    settle(manager)
    assert explain(manager).cause == "no miss"
    spill(manager)
    found = explain(manager)
    assert (found.cause, found.removal.tier, found.behind_tiers) == ("evicted", None, None)
    run(manager, "two", MORE, salt="ann")
    settle(manager)  # takes ten of twelve slots: the end of the prompt goes first
    found = explain(manager)
    assert (found.removal.tier, [part.end_token for part in found.tiers]) == (None, [8])
    behind = found.behind_tiers
    assert (behind.block, behind.removal.cause, behind.removal.tier, behind.removal.salt) == (
        2,
        "evicted",
        "host",
        "ann",
    )
    assert "; block 2 is in no tier: it was evicted from 'host' (0 blocks taken from the pool since)" in str(found)
    run(manager, "three", range(200, 212), salt="bob")
    settle(manager)
    found = explain(manager)
    assert (found.cause, found.num_cached_blocks, found.tiers) == ("evicted", 0, ())
    assert (found.removal.tier, found.removal.salt, found.removal.sequence_id) == ("host", "bob", None)
    assert "block 0 was evicted from 'host' (0 blocks taken from the pool since)" in str(found)
    run(manager)  # it is cached again, and evicted from the device again
    assert explain(manager).cause == "no miss"
    spill(manager)
    assert explain(manager).removal.tier is None


def test_a_prompt_of_which_tiers_have_all_or_what_comes_behind_was_never_cached():
    manager = make_manager(12, Tier("host", 64, 100), **HISTORY)
    run(manager)
    settle(manager)
    spill(manager)
    assert explain(manager).behind_tiers is None
    assert manager.inspect.explain(Sequence("whole", PROMPT)).behind_tiers is None
    assert explain(manager, range(60)).behind_tiers is None
    assert [part.end_token for part in explain(manager, range(60)).tiers] == [40]


@pytest.mark.parametrize("cause", ["reset", "dropped"])
def test_what_only_a_tier_had_is_known_to_be_dropped_there(cause):
    manager = make_manager(12, Tier("host", 64, 100), **HISTORY)
    run(manager, salt="ann")
    settle(manager)
    spill(manager)
    if cause == "reset":
        manager.reset_prefix_cache()
    else:
        manager.forget_salt("ann")
    found = explain(manager, salt="ann")
    assert (found.cause, found.removal.tier) == (cause, "host")


def test_bytes_that_turn_out_bad_are_no_removal():
    manager = make_manager(12, Tier("host", 64, 100), **HISTORY)
    run(manager)
    settle(manager)
    spill(manager)
    sequence = Sequence("two", [*PROMPT, 0])
    hit = manager.get_computed_blocks(sequence)
    manager.tiers.allocate(sequence, hit, manager.tiers.find(hit))
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok=False)
    found = explain(manager)
    assert (found.cause, found.removal.tier, found.tiers) == ("evicted", None, ())


def test_a_disk_that_was_taken_back_names_what_it_evicts():
    """The blocks come from another process, so the device never had them."""
    disk = Tier("disk", 12, 100, is_persistent=True)
    before = make_manager(32, disk)
    run(before)
    settle(before)
    remembered = [(slot, identity) for slot, identity in before.tiers.take_changes()["disk"].items() if identity]
    manager = make_manager(32, disk, **HISTORY)
    manager.tiers.restore("disk", remembered)
    assert explain(manager).cause == "never cached"
    for number in range(2):
        run(manager, number, range(100 + 50 * number, 140 + 50 * number))
        settle(manager)
    found = explain(manager)
    assert (found.cause, found.removal.tier) == ("evicted", "disk")


def test_what_others_do_in_a_shared_store_is_unknown():
    manager = make_manager(12, Tier("store", 10, 100, is_shared=True), **HISTORY)
    for number in range(3):
        run(manager, number, range(50 * number, 50 * number + 40))
        settle(manager)
    spill(manager)
    assert explain(manager).removal.tier is None
    assert next(iter(manager.tiers)).num_evicted_blocks > 0


def test_several_groups_are_watched_alike():
    groups = (FullAttention(4), SlidingWindow(4, 8))
    manager = KVCacheManager(24, groups=groups, tiers=[Tier("host", 40, 100)], debug=True, **HISTORY)
    for number in range(8):
        run(manager, number, range(50 * number, 50 * number + 40))
        settle(manager)
    found = explain(manager)
    assert (found.cause, found.removal.tier) == ("evicted", "host")


def test_events_and_a_history_have_the_same_names():
    manager = make_manager(12, Tier("host", 10, 100), enable_events=EventOptions(tiers=True), **HISTORY)
    run(manager)
    settle(manager)
    spill(manager)
    run(manager, "two", MORE)
    settle(manager)
    assert explain(manager).removal.tier == "host"
    assert any(event.medium == "CPU" for event in manager.take_events())
