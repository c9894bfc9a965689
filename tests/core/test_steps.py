"""Decode steps, one at a time: sequences inside a block, sequences at a boundary, and failing calls.

Long histories are in test_stateful.py.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from kvblocks import (
    FullAttention,
    InvalidArgumentError,
    InvalidTokensError,
    KVCacheManager,
    RecurrentState,
    Sequence,
    SequenceStateError,
    SlidingWindow,
)


def started(manager: KVCacheManager, name: Any, tokens: Any) -> Sequence:
    sequence = Sequence(name, tokens)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    return sequence


def some(manager: KVCacheManager, *lengths: int) -> list[Sequence]:
    return [started(manager, n, range(100 * n, 100 * n + length)) for n, length in enumerate(lengths)]


def state(sequences: list[Sequence]) -> list[Any]:
    return [(s.token_ids(), s.num_computed_tokens, list(s.block_ids)) for s in sequences]


class Id:
    """An integer whose `__index__` answers so many times, then raises."""

    def __init__(self, num_answers: int) -> None:
        self.num_left = num_answers

    def __index__(self) -> int:
        if not self.num_left:
            raise TypeError("no more answers")
        self.num_left -= 1
        return 7


class Hesitating:
    """Answers the first time and from the third on."""

    num_asked = 0

    def __index__(self) -> int:
        self.num_asked += 1
        if self.num_asked == 2:
            raise AttributeError("not yet")
        return 7


class Hash:
    """Fails while `fails`."""

    fails = False

    def __call__(self, preimage: bytes) -> bytes:
        if self.fails:
            raise RuntimeError("no hash")
        return bytes(8)


@pytest.mark.parametrize("debug", [False, True])
def test_sixteen_steps_are_as_sixteen_tokens_each(debug: bool) -> None:
    manager, other = KVCacheManager(64, 4, debug=debug), KVCacheManager(64, 4)
    batch, singly = some(manager, *range(1, 9)), some(other, *range(1, 9))
    for step in range(16):
        tokens = [1000 + 10 * step + n for n in range(8)]
        changes = []
        for n, (sequence, token) in enumerate(zip(singly, tokens, strict=True)):
            position = len(sequence.blocks)
            changes += [(n, 0, position, block.block_id) for block in other.append_slots(sequence, [token]) or []]
        assert manager.append_step(batch, tokens) == changes
        assert state(batch) == state(singly)
        assert manager.stats.num_cached_blocks == other.stats.num_cached_blocks
        manager.check()
        other.check()
    assert manager.inspect.free_block_ids() == other.inspect.free_block_ids()


@pytest.mark.parametrize("lengths", [(5, 6), (7, 6), (6, 7), (8, 8), (4, 5)])
@pytest.mark.parametrize("ran_before", [False, True])
def test_whoever_comes_twice_is_found_wherever_it_stands(lengths: tuple[int, int], ran_before: bool) -> None:
    manager = KVCacheManager(16, 4)
    one, two = some(manager, *lengths)
    if ran_before:
        assert manager.append_step([one, two], [1, 2]) is not None
    before = state([one, two])
    for batch in ([one, one], [one, two, one], [two, one, one], [one, two, two]):
        with pytest.raises(InvalidArgumentError, match=f"got {len(batch)} sequences, {len(set(batch))} of them"):
            manager.append_step(batch, list(range(len(batch))))
        assert state([one, two]) == before
        manager.check()
    assert manager.append_step([two, one], [1, 2]) is not None


def test_places_are_those_of_this_batch() -> None:
    manager = KVCacheManager(32, 4)
    one, two, three = some(manager, 4, 4, 4)
    assert manager.append_step([one, two], [1, 2]) == [(0, 0, 1, 3), (1, 0, 1, 4)]
    assert manager.append_step([three], [3]) == [(0, 0, 1, 5)]
    for _ in range(3):
        assert manager.append_step([three, one, two], [1, 2, 3]) == []
    assert manager.append_step([two, three, one], [1, 2, 3]) == [(0, 0, 2, 6), (1, 0, 2, 7), (2, 0, 2, 8)]


def test_a_batch_is_looked_at_anew_when_its_sequences_have_changed() -> None:
    manager = KVCacheManager(32, 4)
    batch = one, two = some(manager, 5, 5)
    assert manager.append_step(batch, [1, 2]) == []
    one.append_tokens([3])
    before = state(batch)
    with pytest.raises(SequenceStateError, match="expected slots for all tokens"):
        manager.append_slots(one, [4])
    with pytest.raises(SequenceStateError, match="expected slots for all tokens"):
        manager.append_step(batch, [1, 2])
    assert state(batch) == before
    manager.allocate_slots(one)
    assert manager.append_step(batch, [1, 2]) == []
    assert manager.append_step(batch, [1, 2]) == [(0, 0, 2, 4)]
    manager.truncate(two, 6)
    assert manager.append_step(batch, [1, 2]) == [(1, 0, 1, 5)]  # the block that it went back to is cached
    child = manager.fork(two, "child")
    assert manager.append_step(batch, [1, 2]) == [(1, 0, 1, 6)]
    assert manager.take_copies() == [(0, 3, 5), (0, 5, 6)]
    manager.free(two)
    with pytest.raises(SequenceStateError, match="holds no blocks"):
        manager.append_step(batch, [1, 2])
    manager.allocate_slots(two)
    assert manager.append_step(batch, [1, 2]) is not None
    manager.free(child)
    manager.check()


def test_another_managers_sequence_is_refused_while_it_could_simply_be_added_to() -> None:
    manager, other = KVCacheManager(16, 4), KVCacheManager(16, 4)
    (one,), (two,) = some(manager, 5), some(other, 5)
    with pytest.raises(SequenceStateError, match="belongs to another manager"):
        manager.append_step([one, two], [1, 2])
    assert state([one, two]) == [(list(range(5)), 5, [0, 1])] * 2
    assert manager.append_step([one], [1]) == other.append_step([two], [1]) == []


def test_a_freed_sequence_is_let_go_of() -> None:
    manager = KVCacheManager(16, 4)
    batch = one, two = some(manager, 5, 5)
    manager.append_step(batch, [1, 2])
    manager.free(one)
    assert one.run is None
    assert one not in gc.get_referents(*gc.get_referents(manager))
    assert manager.append_step([two], [3]) == []


class Unsure:
    def __index__(self) -> int:
        raise ValueError("no idea")


BAD_IDS: dict[str, Any] = {
    "unsure": Unsure,
    "float": lambda: 2.5,
    "large": lambda: 2**32,
    "odd": lambda: Id(0),
    "odder": lambda: Id(1),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_a_bad_token_changes_nothing(kind: str) -> None:
    manager = KVCacheManager(16, 4)
    batch = some(manager, 5, 6, 7, 4)
    before = state(batch), manager.inspect.free_block_ids(), manager.stats
    for position in range(4):
        tokens = [1, 2, 3, 4]
        tokens[position] = BAD_IDS[kind]()
        with pytest.raises(InvalidTokensError, match=f"position {position}"):
            manager.append_step(batch, tokens)
        if kind != "odder" or position in (0, 1):  # elsewhere that one is asked only once
            with pytest.raises(InvalidTokensError, match="position 0"):
                manager.append_slots(batch[position], [BAD_IDS[kind]()])
        assert (state(batch), manager.inspect.free_block_ids(), manager.stats) == before
        manager.check()
    assert manager.append_step(batch, [1, 2, 3, 4]) == [(3, 0, 1, 7)]


def test_a_bad_token_is_told_even_if_there_is_no_room() -> None:
    manager = KVCacheManager(3, 4)
    batch = some(manager, 4, 4)
    with pytest.raises(InvalidTokensError, match="position 1"):
        manager.append_step(batch, [1, -1])
    assert manager.append_step(batch, [1, 1]) is None


def test_tokens_may_come_in_any_form() -> None:
    numpy = pytest.importorskip("numpy")
    manager = KVCacheManager(16, 4)
    batch = some(manager, 1, 1)
    forms: list[Any] = [(1, 2), range(3, 5), numpy.array([5, 6]), [numpy.int64(7), True], iter([9, 10])]
    for tokens in forms:
        assert manager.append_step(batch, tokens) is not None
    assert batch[0].token_ids() == [0, 1, 3, 5, 7, 9]
    assert batch[1].token_ids() == [100, 2, 4, 6, 1, 10]
    nothing: Iterator[int] = iter(())
    assert manager.append_step([], nothing) == manager.append_step([], ()) == []
    with pytest.raises(InvalidArgumentError, match="got 0 sequences, 0 of them different, and 1 tokens"):
        manager.append_step((), [1])


def test_a_prompt_in_a_buffer_becomes_the_sequences_own_without_losing_its_place() -> None:
    numpy = pytest.importorskip("numpy")
    manager = KVCacheManager(16, 4)
    buffer = numpy.arange(5, dtype=numpy.uint32)
    batch = [started(manager, 0, buffer), started(manager, 1, memoryview(buffer))]
    assert manager.append_step(batch, [5, 6]) == []
    assert [sequence.fits_below for sequence in batch] == [7, 7]
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    manager.check()


def test_a_block_filled_after_a_reset_is_cached_for_nobody() -> None:
    manager = KVCacheManager(16, 4)
    manager.free(started(manager, "first", range(4)))
    (old,) = some(manager, 7)
    child = manager.fork(old, "child")
    manager.reset_prefix_cache()
    manager.renew(child)  # caches the block that both hold anew
    manager.append_step([old, child], [1, 2])
    assert [block.is_cached for block in old.blocks] == [True, False]
    assert [block.is_cached for block in child.blocks] == [True, True]
    assert manager.get_computed_blocks(Sequence("probe", [*range(7), 1, 0])).num_tokens == 4
    manager.check()


def test_a_run_is_extended_only_from_its_end() -> None:
    manager = KVCacheManager(32, 4)
    one = started(manager, 1, range(7))
    two = started(manager, 2, range(7))
    manager.append_step([one, two], [7, 70])  # both are attached to the first block: the second of them opens a new run
    three = started(manager, 3, [*range(7), 70])
    for step in range(4):
        manager.append_step([one, two, three], [step, step, step])
    for tokens in ([*range(8), 0, 1, 2, 3, 9], [*range(7), 70, 0, 1, 2, 3, 9]):
        assert manager.get_computed_blocks(Sequence("probe", tokens)).num_tokens == 12
    manager.check()


def test_what_an_integer_leaves_half_done_is_taken_back() -> None:
    manager = KVCacheManager(16, 4)
    one, two = some(manager, 5, 5)
    assert manager.append_step([one, two], [1, Hesitating()]) == []
    assert [sequence.token_ids(5) for sequence in (one, two)] == [[1], [7]]
    manager.check()


def test_a_step_that_raises_is_no_refusal() -> None:
    manager = KVCacheManager(3, 4)
    batch = some(manager, 4, 4)
    with pytest.raises(InvalidTokensError):
        manager.append_step(batch, [1, -1])
    assert manager.last_refusal is None
    assert manager.append_step(batch, [1, 1]) is None
    assert manager.last_refusal is not None
    assert manager.last_refusal.num_blocks == 2


def test_a_step_that_is_refused_keeps_nobody() -> None:
    manager, other = KVCacheManager(16, 4), KVCacheManager(16, 4)
    (one,), (two,) = some(manager, 5), some(other, 5)
    with pytest.raises(SequenceStateError):
        manager.append_step([one, two], [1, 2])
    assert two not in gc.get_referents(*gc.get_referents(manager))


def test_an_append_that_raises_lets_nothing_leave_a_window() -> None:
    """A token that fits its block without filling it releases nothing from a window, whatever failed before it."""
    name = Hash()
    manager = KVCacheManager(16, groups=[SlidingWindow(4, 6)], hash_algorithm=name, enable_events=True)
    (one,) = some(manager, 8)
    assert manager.append_slots(one, [1]) is not None
    name.fails = True
    with pytest.raises(RuntimeError, match="no hash"):
        manager.append_slots(one, [2, 3, 4])
    assert manager.append_slots(one, [2]) == []
    assert one.first_live_block() == 0


def test_tokens_that_free_their_sequence_while_they_are_read_give_it_nothing() -> None:
    manager = KVCacheManager(8, 4)
    sequence = started(manager, "s", range(4))

    def tokens() -> Iterator[int]:
        manager.free(sequence)
        yield 7

    with pytest.raises(SequenceStateError, match="holds no blocks"):
        manager.append_slots(sequence, tokens())
    manager.check()
    assert manager.num_free_blocks == 8


def test_a_count_that_allocates_while_it_is_read_is_the_second_to_do_so() -> None:
    manager = KVCacheManager(8, 4)
    sequence = Sequence("s", range(8))

    class Count:
        def __index__(self) -> int:
            manager.allocate_slots(sequence, 4)
            return 4

    assert manager.allocate_slots(sequence, Count()) is not None
    assert (sequence.num_computed_tokens, manager.num_free_blocks) == (8, 6)
    manager.check()


TAKING: dict[str, Any] = {
    "one group": None,
    "windows": [FullAttention(2), SlidingWindow(2, 3)],
    "a state": [FullAttention(2), RecurrentState(2, 4, 2, num_kept=2)],
}


@pytest.mark.parametrize("name", TAKING)
def test_a_step_takes_all_its_blocks_before_it_gives_any_back(name: str) -> None:
    """The first sequence copies a duplicate, which then holds nothing, and so would be the next to be taken."""
    groups = TAKING[name]
    manager = KVCacheManager(24, groups=groups, debug=True) if groups else KVCacheManager(24, 2, debug=True)
    first, second = Sequence("first", range(6)), Sequence("second", range(6))
    for sequence in (first, second):  # without a hit: the same prefix twice
        assert manager.allocate_slots(sequence) is not None
        for token in (6, 7):
            assert manager.append_slots(sequence, [token]) is not None
    if name == "a state":
        manager.states.take_copies()
    manager.truncate(second, 7)
    source = second.block_ids[3]
    changes = manager.append_step([second, first], [9, 9])
    assert changes is not None
    assert [(index, group, position) for index, group, position, _ in changes if group == 0] == [(0, 0, 3), (1, 0, 4)]
    assert source not in [block for *_, block in changes]
    assert manager.inspect.free_block_ids()[0] == source
