"""How fast loading and computing are, as learned from measurements, and which loads that makes worthwhile.

A tier that is slower than computing must not be loaded from. Yet one slow load must not end loading for good.
"""

import random

import pytest

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.tiers.rates import Rate, num_worth_loading


@pytest.mark.parametrize(
    ("loads", "seconds_a_token", "expected"),
    [
        ([], 1.0, 0),
        ([(10, 5.0)], 1.0, 1),
        ([(10, 15.0)], 1.0, 0),
        ([(10, 10.0)], 1.0, 0),  # no faster: computing needs no slots below
        ([(10, 5.0), (10, 15.0)], 1.0, 1),  # the second is slower than computing
        ([(10, 12.0), (100, 5.0)], 1.0, 2),  # the first isn't, but leads to the second
        ([(10, 12.0), (10, 9.0)], 1.0, 0),  # together they aren't faster
        ([(10, 99.0), (10, 99.0)], 0.0, 2),  # nobody knows how slow computing is
    ],
)
def test_loads_are_taken_as_far_as_they_save_time(loads, seconds_a_token, expected):
    assert num_worth_loading(loads, seconds_a_token) == expected


def test_the_answer_is_the_best_of_all():
    for seed in range(200):
        chosen = random.Random(seed)
        loads = [(chosen.randint(1, 9), chosen.uniform(0, 10)) for _ in range(chosen.randint(0, 6))]
        saved = [sum(tokens - seconds for tokens, seconds in loads[:end]) for end in range(len(loads) + 1)]
        assert saved[num_worth_loading(loads, 1.0)] == pytest.approx(max(saved))


def test_a_rate_is_what_is_expected_until_it_is_measured():
    rate = Rate(100.0)
    assert rate.seconds_a_unit == pytest.approx(0.01)
    rate.note(10, 1.0)
    assert rate.seconds_a_unit == pytest.approx(0.1)
    rate.note(10, 2.0)
    assert rate.seconds_a_unit == pytest.approx(0.12)
    assert Rate().seconds_a_unit == 0.0


@pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (5, 0.0)])
def test_nothing_is_learned_from_nothing(units, seconds):
    rate = Rate(4.0)
    rate.note(units, seconds)
    assert rate.seconds_a_unit == 0.25


def test_one_slow_load_does_not_end_loading_for_good():
    rate = Rate()
    rate.note(1000, 1.0)
    asked = 0
    while num_worth_loading([(16, 1000 * rate.seconds_a_unit)], 0.001) == 0:
        rate.doubt()
        asked += 1
    assert 5 < asked < 40


def test_who_declines_loads_doubts_how_slow_they_are():
    manager = KVCacheManager(16, 4, tiers=[Tier("host", 16, 1000)])
    sequence = Sequence("a", range(16))
    manager.allocate_slots(sequence)
    manager.free(sequence)
    for transfer in [*manager.tiers.take_transfers(), *manager.tiers.take_transfers()]:
        manager.tiers.complete(transfer, ok=True)
    crowd = Sequence("crowd", range(100, 164))
    manager.allocate_slots(crowd)
    manager.abort(crowd, 0)
    manager.tiers.note_computed(1000, 0.001)
    hit = manager.get_computed_blocks(Sequence("b", range(16)))
    found = manager.tiers.find(hit)
    found[0].pool.rate.note(1000, 1.0)
    assert manager.tiers.worth_loading(found) == []
    asked = 1
    while not manager.tiers.worth_loading(found):
        asked += 1
    assert 10 < asked < 80


def test_a_try_that_failed_late_teaches_that_the_tier_is_slow():
    rate = Rate()
    rate.note_failed(100, 5.0)
    assert rate.seconds_a_unit == pytest.approx(0.05)
    rate.note_failed(100, 0.001)
    assert rate.seconds_a_unit == pytest.approx(0.05), "a try that failed at once says nothing"
    rate.note(100, 1.0)
    assert rate.seconds_a_unit == pytest.approx(0.01), "a measurement replaces it"
    rate.note_failed(100, 2.0)
    assert rate.seconds_a_unit == pytest.approx(0.8 * 0.01 + 0.2 * 0.02)
    rate.note_failed(0, 2.0)
    assert rate.seconds_a_unit == pytest.approx(0.012)


def test_loads_that_fail_late_are_not_tried_again_at_once():
    manager, prompt = a_tier_with_a_prompt()
    found = find(manager, prompt)
    manager.tiers.note_computed(100, 1.0)
    assert manager.tiers.worth_loading(found) == found
    manager.tiers.allocate(found[0].sequence, None, found)
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.complete(transfer, ok=False, seconds=60.0)
    manager.abort(found[0].sequence, 0)
    manager, prompt = a_tier_with_a_prompt(manager)
    assert manager.tiers.worth_loading(find(manager, prompt)) == []


def test_what_waits_before_a_load_counts():
    """Loads of a tier follow each other, so the bytes that others wait for come first. Declining teaches nothing."""
    manager, prompt = a_tier_with_a_prompt(bytes_per_second=100.0)  # a block of four tokens loads in a second
    manager.tiers.note_computed(100, 45.0)  # 7.2 s for the prompt's 16 tokens
    first, second = find(manager, prompt, "first"), find(manager, prompt, "second")
    assert manager.tiers.worth_loading(first) == first and manager.tiers.worth_loading(second) == second
    assert manager.tiers.allocate(first[0].sequence, None, first) is not None
    for _ in range(20):
        assert manager.tiers.worth_loading(second) == []
    (transfer,) = manager.tiers.take_transfers()
    assert manager.tiers.worth_loading(second) == [], "also while it is under way"
    manager.tiers.complete(transfer, ok=True)
    assert manager.tiers.worth_loading(second) == second


def a_tier_with_a_prompt(manager=None, **options):
    """A manager whose tier alone has a prompt of four blocks, and the prompt."""
    manager = manager or KVCacheManager(16, 4, tiers=[Tier("disk", 32, 100, **options)])
    prompt = range(17)
    sequence = Sequence(object(), prompt)
    assert manager.allocate_slots(sequence) is not None
    manager.free(sequence)
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok=True)
    crowd = Sequence(object(), range(10**6, 10**6 + 64))
    assert manager.allocate_slots(crowd) is not None
    manager.abort(crowd, 0)
    return manager, prompt


def find(manager, prompt, name="reader"):
    return manager.tiers.find(manager.get_computed_blocks(Sequence(name, prompt)))
