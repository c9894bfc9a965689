"""An engine's own functions that are told which blocks are taken and which get one more owner."""

import pytest

from kvblocks import CorruptStateError, KVBlocksError, KVCacheManager, Sequence, SlidingWindow

PROMPT = list(range(10))


class Told:
    """Records what a manager tells, in order: ("taken" or "touched", ids)."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.callbacks = manager._watch_blocks(  # noqa: SLF001
            lambda blocks: self.calls.append(("taken", [block.block_id for block in blocks])),
            lambda blocks: self.calls.append(("touched", [block.block_id for block in blocks])),
        )

    def take(self) -> list[tuple[str, list[int]]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(6, 4, debug=True)


def test_what_is_taken_and_what_is_touched(manager):
    told = Told(manager)
    sequence = Sequence("a", PROMPT)
    manager.allocate_slots(sequence)
    assert told.take() == [("taken", [0, 1, 2])]
    other = Sequence("b", PROMPT)
    manager.allocate_slots(other, hit=manager.get_computed_blocks(other))
    assert told.take() == [("touched", [0, 1]), ("taken", [3])]
    child = manager.fork(sequence, "child")
    assert told.take() == [("touched", [0, 1, 2])]
    manager.append_slots(child, [10])
    assert told.take() == [("taken", [4])]
    hold = manager.holds.read(sequence)
    assert told.take() == [("touched", [0, 1])]
    manager.append_step([other], [10])
    manager.holds.release(hold)
    manager.free(child)
    assert told.take() == []


def test_a_decoded_token_that_begins_a_block_is_told():
    manager = KVCacheManager(6, 4)
    told = Told(manager)
    sequence = Sequence("a", PROMPT[:8])
    manager.allocate_slots(sequence)
    manager.append_slots(sequence, [8])
    assert told.take() == [("taken", [0, 1]), ("taken", [2])]


def test_nothing_is_told_of_no_blocks(manager):
    told = Told(manager)
    sequence = Sequence("a", PROMPT[:3])
    manager.allocate_slots(sequence)
    manager.holds.read(sequence)
    assert told.take() == [("taken", [0])]


def test_nor_of_what_has_no_memory():
    manager = KVCacheManager(6, groups=[SlidingWindow(4, 4)], debug=True)
    told = Told(manager)
    sequence = Sequence("a", PROMPT)
    manager.allocate_slots(sequence)
    manager.fork(sequence, "child")
    assert told.take() == [("taken", [0]), ("taken", [1]), ("taken", [2]), ("touched", [0, 1, 2])]


def test_it_ends_and_others_go_on(manager):
    first, second = Told(manager), Told(manager)
    first.callbacks.stop()
    first.callbacks.stop()
    manager.allocate_slots(Sequence("a", PROMPT))
    assert first.take() == []
    assert second.take() == [("taken", [0, 1, 2])]


def test_one_that_raises_leaves_a_corrupt_manager():
    manager = KVCacheManager(6, 4)

    def fail(blocks: object) -> None:
        raise KeyError

    manager._watch_blocks(fail, print)  # noqa: SLF001
    with pytest.raises(KeyError):
        manager.allocate_slots(Sequence("a", PROMPT))
    with pytest.raises(CorruptStateError):
        manager.inspect.free_block_ids()


def test_one_that_calls_the_manager_is_refused(manager):
    errors: list[str] = []

    def call_back(blocks: object) -> None:
        try:
            manager.get_computed_blocks(Sequence("b", PROMPT))
        except KVBlocksError as error:
            errors.append(type(error).__name__)

    manager._watch_blocks(call_back, print)  # noqa: SLF001
    manager.allocate_slots(Sequence("a", PROMPT))
    assert errors == ["CorruptStateError"]
