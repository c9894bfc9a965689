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
