"""Pins, one promise at a time. Long histories are in test_stateful.py."""

from array import array
from typing import Any

import pytest

from kvblocks import (
    FullAttention,
    Group,
    InvalidArgumentError,
    InvalidTokensError,
    KVCacheManager,
    PinBudgetError,
    Sequence,
    SlidingWindow,
)
from kvblocks.retention.pins import block_priorities


def compute(manager: KVCacheManager, tokens: Any, **keys: Any) -> None:
    """Run a request from start to end. Its full blocks stay cached."""
    sequence = Sequence("passing", tokens, **keys)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def num_hit(manager: KVCacheManager, tokens: Any, **keys: Any) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens, **keys)).num_tokens


def flood(manager: KVCacheManager, times: int = 3) -> None:
    """Use every block that can be had, several times."""
    for n in range(times):
        compute(manager, [1000 + n] * (manager.num_free_blocks // len(manager.groups) * manager.block_size))


def test_a_pinned_prefix_survives_what_evicts_everything_else() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(12), salt="a")
    pin = manager.pins.pin(range(10), salt="a")
    assert (pin.num_blocks, pin.num_held_blocks, manager.num_free_blocks) == (2, 2, 8)
    flood(manager)
    assert num_hit(manager, range(12), salt="a") == 8
    assert list(manager.pins) == [pin]
    manager.pins.unpin(pin)
    assert (list(manager.pins), manager.num_free_blocks) == ([], 10)
    assert num_hit(manager, range(12), salt="a") == 8  # still cached, as anything else is
    flood(manager)
    assert num_hit(manager, range(12), salt="a") == 0


def test_a_prefix_may_be_pinned_before_it_is_computed() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    pin = manager.pins.pin(range(8))
    assert pin.num_held_blocks == 0
    compute(manager, range(6))
    assert pin.num_held_blocks == 1
    compute(manager, range(13))
    assert pin.num_held_blocks == 2
    flood(manager)
    assert num_hit(manager, range(13)) == 8


def test_lower_priorities_are_given_up_first_and_ends_before_beginnings() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(8))
    compute(manager, range(100, 108))
    low, high = manager.pins.pin(range(8), priority=10), manager.pins.pin(range(100, 108), priority=90)
    running = Sequence("big", range(500, 528))
    assert manager.allocate_slots(running) is not None  # 7 of the 10 blocks
    assert (low.num_held_blocks, high.num_held_blocks) == (1, 2)
    manager.append_slots(running, range(8))
    assert (low.num_held_blocks, high.num_held_blocks) == (0, 1)
    assert num_hit(manager, range(100, 108)) == 4
    manager.free(running)
    compute(manager, range(8))
    assert low.num_held_blocks == 2  # what had to be given up is held again when it is computed anew


def test_priority_100_is_never_given_up_and_a_refusal_says_so() -> None:
    manager = KVCacheManager(6, 4, debug=True)
    compute(manager, range(8))
    compute(manager, range(100, 104))
    manager.pins.pin(range(8), priority=100)
    manager.pins.pin(range(100, 104), priority=99)
    assert manager.last_refusal is None
    running = Sequence("big", range(500, 520))
    assert manager.allocate_slots(running) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert (refusal.num_blocks, refusal.num_free_blocks, refusal.num_given_blocks, refusal.num_kept_blocks) == (
        5,
        3,
        1,
        2,
    )
    assert refusal.is_due_to_pins
    assert num_hit(manager, range(100, 105)) == 4  # nothing was given up in vain
    assert manager.allocate_slots(Sequence("smaller", range(500, 516))) is not None
    assert manager.allocate_slots(Sequence("too big", range(900, 1000))) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert not refusal.is_due_to_pins


def test_priorities_by_range_never_rise_along_a_prefix() -> None:
    assert block_priorities([(0, 4, 10), (8, 12, 80)], 20, 4) == [80, 80, 80]
    assert block_priorities([(0, 16, 10), (0, 5, 80)], 18, 4) == [80, 80, 10, 10]
    assert block_priorities(30, 11, 4) == [30, 30]


def test_what_lies_behind_the_last_range_is_not_pinned() -> None:
    manager = KVCacheManager(10, 4)
    compute(manager, range(8))
    assert manager.pins.pin(range(8), priority=[(0, 4, 50)]).num_blocks == 1


def test_ends_of_low_priority_go_before_a_pin_between() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(12))
    compute(manager, range(100, 104))
    mixed = manager.pins.pin(range(12), priority=[(0, 4, 80), (4, 12, 10)])
    middle = manager.pins.pin(range(100, 104), priority=50)
    running = Sequence("big", range(500, 532))  # 8 blocks, 6 are free
    assert manager.allocate_slots(running) is not None
    assert (mixed.num_held_blocks, middle.num_held_blocks) == (1, 1)
    manager.append_slots(running, [1])
    assert (mixed.num_held_blocks, middle.num_held_blocks) == (1, 0)


def test_expiry_is_by_the_callers_clock() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(8))
    early, late = manager.pins.pin(range(4), expires_at=5.0), manager.pins.pin(range(8), expires_at=7)
    forever = manager.pins.pin(range(4))
    assert manager.pins.expire(4.9) == []
    assert manager.pins.expire(5.0) == [early]
    assert list(manager.pins) == [late, forever]
    assert manager.pins.expire(100) == [late]
    flood(manager)
    assert num_hit(manager, range(8)) == 4


def test_a_budget_bounds_all_pins_together() -> None:
    manager = KVCacheManager(10, 4, pin_budget=0.3)
    manager.pins.pin(range(8))
    with pytest.raises(
        PinBudgetError, match="pins of at most 3 blocks together, got 2 more than the 2 that are pinned"
    ):
        manager.pins.pin(range(100, 108))
    pin = manager.pins.pin(range(100, 104))
    manager.pins.unpin(pin)
    manager.pins.pin(range(200, 204))
    with pytest.raises(PinBudgetError):
        KVCacheManager(10, 4, pin_budget=0.0).pins.pin(range(4))


def test_a_reset_leaves_pins_standing() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(8))
    pin = manager.pins.pin(range(8))
    manager.reset_prefix_cache()
    assert (pin.num_held_blocks, manager.num_free_blocks) == (0, 10)
    compute(manager, range(8))
    assert pin.num_held_blocks == 2


def test_a_pin_lets_go_of_what_an_abort_takes_from_the_cache() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    sequence = Sequence("dies", range(12))
    manager.allocate_slots(sequence)
    pin = manager.pins.pin(range(12))
    assert pin.num_held_blocks == 3
    manager.abort(sequence, 5)
    assert pin.num_held_blocks == 1
    assert manager.num_free_blocks == 9


def test_a_pin_takes_over_what_another_one_lets_go_of() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(8))
    compute(manager, range(100, 104))
    keep, soft = manager.pins.pin(range(8), priority=100), manager.pins.pin(range(8), priority=0)
    manager.pins.pin(range(100, 104), priority=1)
    big = Sequence("big", range(500, 532))
    assert (
        manager.allocate_slots(big) is not None
    )  # the soft pin gives up in vain, since the other one keeps the blocks
    assert (keep.num_held_blocks, soft.num_held_blocks) == (2, 0)
    manager.pins.unpin(keep)
    assert soft.num_held_blocks == 2
    manager.free(big)
    flood(manager)
    assert num_hit(manager, range(9)) == 8


def test_a_refusal_counts_neither_the_hits_blocks_nor_running_ones() -> None:
    manager = KVCacheManager(6, 4, debug=True)
    compute(manager, range(8))
    manager.pins.pin(range(8), priority=100)
    compute(manager, range(100, 108))
    manager.pins.pin(range(100, 104), priority=100)
    holder = Sequence("holder", range(100, 105))
    manager.allocate_slots(holder, hit=manager.get_computed_blocks(holder))
    wanted = Sequence("wanted", range(24))
    assert manager.allocate_slots(wanted, hit=manager.get_computed_blocks(wanted)) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert (refusal.num_free_blocks, refusal.num_given_blocks, refusal.num_kept_blocks) == (2, 0, 0)


def test_a_pin_does_not_depend_on_the_callers_buffer() -> None:
    manager = KVCacheManager(10, 4, debug=True)
    compute(manager, range(8))
    tokens = array("I", range(8))
    pin = manager.pins.pin(tokens)
    tokens[0] = 99
    manager.check()
    assert pin.sequence.token_ids() == list(range(8))


def test_integers_are_exact_times() -> None:
    manager = KVCacheManager(10, 4)
    pin = manager.pins.pin(range(8), expires_at=2**53 + 1)
    assert manager.pins.expire(2**53) == []
    assert manager.pins.expire(2**53 + 1) == [pin]


@pytest.mark.parametrize("now", [float("nan"), "now", None, True])
def test_no_time(now: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="now: expected a number, got"):
        KVCacheManager(10, 4).pins.expire(now)


def test_a_budget_is_the_share_that_it_says() -> None:
    manager = KVCacheManager(100, 4, pin_budget=0.29)
    assert manager.pins.pin(range(29 * 4)).num_blocks == 29


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": range(3)}, "expected at least one full block of 4 tokens, got 3 tokens"),
        ({"priority": 101}, "priority: expected an int from 0 to 100, got 101"),
        ({"priority": [(0, 4, 1), (0, 4)]}, r"priority: expected \(start, end, priority\), got \(0, 4\)"),
        ({"priority": [(0, 9, 1)]}, "priority: end: expected an int from 1 to 8, got 9"),
        ({"priority": []}, "expected at least one full block of 4 tokens, got 0 tokens"),
        ({"expires_at": "soon"}, "expires_at: expected a number or None, got 'soon'"),
        ({"expires_at": float("nan")}, "expires_at: expected a number or None, got nan"),
        ({"salt": ""}, "salt: expected a non-empty str or None"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    manager = KVCacheManager(10, 4)
    with pytest.raises(InvalidArgumentError, match=message):
        manager.pins.pin(**({"token_ids": range(8)} | arguments))
    assert list(manager.pins) == []


def test_more_bad_arguments() -> None:
    manager = KVCacheManager(10, 4)
    with pytest.raises(InvalidTokensError):
        manager.pins.pin([])
    pin = manager.pins.pin(range(4))
    with pytest.raises(InvalidArgumentError, match="unpin: expected a pin of this manager"):
        KVCacheManager(10, 4).pins.unpin(pin)
    with pytest.raises(InvalidArgumentError, match="pin: expected enable_caching=True"):
        KVCacheManager(10, 4, enable_caching=False).pins.pin(range(4))
    for budget in (-0.1, 1.1, "half", True, float("nan")):
        with pytest.raises(InvalidArgumentError, match=r"pin_budget: expected a share of the pool from 0\.0 to 1\.0"):
            KVCacheManager(10, 4, pin_budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [None, [FullAttention(4), SlidingWindow(4, 100)]])
@pytest.mark.parametrize("way", ["truncate", "copy on write"])
def test_a_pin_takes_over_what_a_sequence_lets_go_of_on_its_way(groups: list[Group] | None, way: str) -> None:
    manager = KVCacheManager(16, None if groups else 4, groups=groups, pin_budget=1.0, debug=True)
    num_groups = len(manager.groups)
    compute(manager, [9] * 4)
    other = manager.pins.pin([9] * 4, priority=50)
    sequence = Sequence("s", range(4))
    manager.allocate_slots(sequence)
    manager.append_slots(sequence, [4, 5, 6, 7])
    pin = manager.pins.pin(range(8), priority=0)
    if way == "copy on write":
        manager.truncate(sequence, 5)
    rest = Sequence("rest", [8] * (4 * (manager.num_free_blocks // num_groups + 1)))
    assert manager.allocate_slots(rest) is not None  # nothing is left but what pins give up
    assert other.num_held_blocks == pin.num_held_blocks == 0  # all was given up, though the sequence holds it too
    manager.free(rest)
    if way == "truncate":
        manager.truncate(sequence, 4)
    else:
        manager.append_slots(sequence, [50])
        assert len(manager.take_copies()) == num_groups
    assert len(pin.blocks) == 2
    flood(manager)
    assert num_hit(manager, range(9)) == 8


def test_what_leaves_a_window_may_be_only_pinned_then() -> None:
    manager = KVCacheManager(40, groups=[FullAttention(4), SlidingWindow(4, 8)], debug=True)
    running = Sequence("running", range(60))
    manager.allocate_slots(running, 12)
    manager.pins.pin(range(12), priority=50)
    too_big = Sequence("too big", range(1000, 1400))
    num_given = []
    for _ in range(12):
        assert manager.allocate_slots(too_big) is None
        refusal = manager.last_refusal
        assert refusal is not None
        num_given.append(refusal.num_given_blocks)
        assert manager.allocate_slots(running, 4) is not None
    assert num_given == [0, 0, 1] + [2] * 9  # of the 5 that the pin holds, those that left the running one's window
    manager.free(running)
    assert manager.allocate_slots(too_big) is None
    assert manager.last_refusal is not None
    assert manager.last_refusal.num_given_blocks == 5


def test_asking_again_changes_no_answer() -> None:
    """A refusal may reuse the counts of the last one as long as they are valid."""
    manager = KVCacheManager(12, 4, debug=True)
    compute(manager, range(12))
    compute(manager, range(100, 108))
    kept, given = manager.pins.pin(range(12), priority=100), manager.pins.pin(range(100, 108), priority=10)
    holder = Sequence("holder", range(100, 105))
    too_big = Sequence("too big", range(500, 600))

    def answer() -> tuple[int, int, int]:
        for _ in range(2):
            assert manager.allocate_slots(too_big) is None
        refusal = manager.last_refusal
        assert refusal is not None
        return refusal.num_free_blocks, refusal.num_given_blocks, refusal.num_kept_blocks

    assert answer() == (7, 2, 3)
    manager.allocate_slots(holder, hit=manager.get_computed_blocks(holder))
    assert answer() == (6, 1, 3)
    child = manager.fork(holder, "child")
    assert answer() == (6, 1, 3)
    manager.free(holder)
    manager.free(child)
    assert answer() == (7, 2, 3)
    again = manager.pins.pin(range(100, 104), priority=100)
    assert answer() == (7, 1, 4)
    hit = Sequence("hit", [*range(100, 108), *range(900, 980)])
    assert manager.allocate_slots(hit, hit=manager.get_computed_blocks(hit)) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert (refusal.num_free_blocks, refusal.num_given_blocks, refusal.num_kept_blocks) == (7, 0, 3)
    manager.pins.unpin(again)
    assert manager.allocate_slots(Sequence("big", range(700, 732))) is not None  # 8: the pin gives one up
    assert given.num_held_blocks == 1
    assert answer() == (0, 1, 3)
    manager.pins.unpin(kept)
    assert answer() == (3, 1, 0)
