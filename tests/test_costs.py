"""Histories that are bad for a call: its cost grows as its docstring says. `bench.core.worst_cases` times them too."""

import importlib
from array import array
from pathlib import Path

import pytest
from model.bytecodes import count_bytecodes, uncompiled

from kvblocks import FullAttention, KVCacheBlock, KVCacheManager, PrefixCache, RecurrentState, Sequence, SlidingWindow

ROOT = Path(__file__).resolve().parents[1]


def tokens(first_block: int, num_blocks: int) -> "array[int]":
    return array("I", range(4 * first_block, 4 * (first_block + num_blocks)))


@uncompiled
def test_objects_of_the_hot_path_are_read_fast() -> None:
    """CPython keeps up to 29 attributes in an array, at known places. With one more, each read searches a dict."""
    managers = [KVCacheManager(8), KVCacheManager(8, groups=[FullAttention(16), SlidingWindow(16, 32)])]
    parts = [vars(manager)[name] for manager in managers for name in ("_slots", "_pool", "_index")]
    for part in (*managers, *parts, PrefixCache(8, 16)):
        assert len(vars(part)) < 30, f"{type(part).__name__}: {sorted(vars(part))}"


@pytest.fixture
def worst_cases(monkeypatch):
    """The cases by name, each of which makes a history of a size and returns the work."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.core.worst_cases").CASES


@uncompiled
@pytest.mark.parametrize(
    "case", ["evict", "evict-duplicate", "evict-copies", "free-copies", "chunks-keys-events", "chunks-groups"]
)
def test_work_grows_with_what_is_done(worst_cases, case: str) -> None:
    few, many = (count_bytecodes(worst_cases[case].make(size)) for size in (100, 400))
    assert many < 4.2 * few


@uncompiled
@pytest.mark.parametrize("case", ["tenants", "refused", "left-holds", "abort-storing"])
def test_work_does_not_grow_with_what_is_not_touched(worst_cases, case: str) -> None:
    few, many = (count_bytecodes(worst_cases[case].make(size)) for size in (100, 400))
    assert many < 1.1 * few


@uncompiled
def test_blocks_that_leave_a_window_are_compared_with_few_others(monkeypatch) -> None:
    """A list that is searched for each block compares it with all before it. Only this counts that, as work in C."""
    num_compared = 0

    def compare(self: KVCacheBlock, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return self is other

    monkeypatch.setattr(KVCacheBlock, "__eq__", compare)
    groups = [FullAttention(4), SlidingWindow(4, 8)]
    manager = KVCacheManager(1000, groups=groups, eviction="lru")
    sequence = Sequence("prompt", tokens(0, 400))
    manager.allocate_slots(sequence)
    num_compared = 0
    manager.append_slots(sequence, [0])
    assert sequence.first_live_block(1) > 390
    assert num_compared < 400


def test_the_oldest_of_many_copies_is_the_one_that_is_hit() -> None:
    manager = KVCacheManager(64, 4)
    copies = [Sequence(number, tokens(0, 1)) for number in range(64)]
    for sequence in copies:
        manager.allocate_slots(sequence)
    order = [*range(0, 64, 3), *range(1, 64, 3), *range(2, 64, 3)]
    probe = Sequence("probe", tokens(0, 1))
    for i, number in enumerate(order):
        manager.free(copies[number])
        manager.allocate_slots(Sequence(("evicts", number), tokens(1 + number, 1)))
        left = sorted(order[i + 1 :])
        assert [block.block_id for block in manager.get_computed_blocks(probe).blocks] == left[:1]
        manager.check()


def test_keys_of_a_growing_run_are_added_where_they_are_kept() -> None:
    manager = KVCacheManager(64, 4)
    sequence = Sequence("prompt", tokens(0, 40), extra_keys=[(0, 160, "image")])
    manager.allocate_slots(sequence, 4)
    run = sequence.blocks[0].run
    assert run is not None
    kept = run.extra_keys
    for _ in range(39):
        manager.allocate_slots(sequence, 4)
    assert run.extra_keys is kept  # not a copy for each call
    assert kept == sequence.encoded_keys(4)


@uncompiled
@pytest.mark.parametrize("is_running", [False, True])
def test_a_state_saved_in_the_place_of_another_takes_time_for_its_blocks(*, is_running: bool) -> None:
    """is_running: another sequence owns the K and V before the other checkpoint; else these go with it."""

    def save(num_parts: int) -> int:
        manager = KVCacheManager(6 + num_parts, groups=[FullAttention(4), RecurrentState(4, 2, num_parts)])
        first, other, second = (Sequence(number, tokens(number, 4)) for number in (0, 0, 100))
        manager.allocate_slots(first, 12)
        manager.states.take_copies()
        manager.free(first)
        if is_running:
            manager.allocate_slots(other, 0, manager.get_computed_blocks(other))
            manager.states.take_copies()
        manager.allocate_slots(second, 12)
        count = count_bytecodes(manager.states.take_copies)
        assert (manager.states.stats.num_saved, manager.stats.num_evicted_blocks) == (2, num_parts + (not is_running))
        return count

    few, many = save(100), save(400)
    assert few < many < 4.2 * few
