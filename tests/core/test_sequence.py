"""The arguments that a sequence accepts, and its attributes."""

from array import array
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any

import pytest

from kvblocks import InvalidArgumentError, InvalidTokensError, KVCacheManager, Sequence, SequenceStateError


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"salt": ""}, "salt: expected a non-empty str or None, got ''"),
        ({"salt": 5}, "salt: expected a non-empty str or None, got 5"),
        ({"lora": b"x"}, "lora: expected a non-empty str or None, got b'x'"),
        ({"extra_keys": [(0, 1)]}, r"expected \(start, end, key\), got \(0, 1\)"),
        ({"extra_keys": None}, "expected an iterable of"),
        ({"extra_keys": [(0, 1, "\ud800")]}, "expected text that UTF-8 can encode"),
        ({"salt": "\ud800"}, "salt: expected text that UTF-8 can encode"),
        ({"lora": "a\udc00"}, "lora: expected text that UTF-8 can encode"),
        ({"extra_keys": ["abc"]}, r"expected \(start, end, key\), got 'abc'"),
        ({"extra_keys": [(2, 2, "x")]}, "end: expected an int from 3 to 4, got 2"),
        ({"extra_keys": [(-1, 2, "x")]}, "start: expected an int from 0 to 3, got -1"),
        ({"extra_keys": [(0, 5, "x")]}, "end: expected an int from 1 to 4, got 5"),
        ({"extra_keys": [(0, 1.0, "x")]}, "end: expected an int from 1 to 4, got 1.0"),
        ({"extra_keys": [(0, 1, "")]}, "expected a non-empty str or bytes as key, got ''"),
        ({"extra_keys": [(0, 1, 7)]}, "expected a non-empty str or bytes as key, got 7"),
    ],
)
def test_bad_keys(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Sequence("s", [1, 2, 3, 4], **keywords)


def test_tokens_slots_and_computed_tokens_are_three_numbers() -> None:
    manager = KVCacheManager(8, 4)
    sequence = Sequence("s", range(6))
    assert (sequence.num_tokens, len(sequence.block_ids), sequence.num_computed_tokens) == (6, 0, 0)
    manager.allocate_slots(sequence, 3)
    assert (sequence.num_tokens, len(sequence.block_ids), sequence.num_computed_tokens) == (6, 1, 3)
    manager.allocate_slots(sequence, 0, num_total_tokens=13)
    assert (sequence.num_tokens, len(sequence.block_ids), sequence.num_computed_tokens) == (6, 4, 3)
    sequence.append_tokens([6])
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.num_computed_tokens) == (7, 6, 3)
    assert sequence.token_ids(2) == [2, 3, 4, 5, 6]
    assert sequence.token_ids(2, 4) == [2, 3]
    assert sequence.is_allocated
    manager.free(sequence)
    assert (sequence.num_tokens, sequence.block_ids, sequence.num_computed_tokens) == (7, [], 0)
    assert not sequence.is_allocated


def buffers(num_tokens: int) -> list[tuple[Any, Callable[[], None]]]:
    """Buffers of the tokens 0, 1, … of every form that could be used without a copy, and what overwrites each by 7."""
    found: list[tuple[Any, Callable[[], None]]] = []
    for kind in "iIqQ":
        for form in (memoryview, lambda ids: ids):
            own, sevens = array(kind, range(num_tokens)), array(kind, [7] * num_tokens)
            found.append((form(own), lambda own=own, sevens=sevens: own.__setitem__(slice(None), sevens)))
    raw = bytearray(array("I", range(num_tokens)).tobytes())
    found.append((memoryview(raw).cast("I"), lambda: raw.__setitem__(slice(None), b"\7\0\0\0" * num_tokens)))
    if find_spec("numpy") is not None:  # which comes with the engine's dependencies
        numpy = import_module("numpy")
        for kind in ("int32", "uint32", "int64"):
            ids = numpy.arange(num_tokens, dtype=kind)
            found.append((ids, lambda ids=ids: ids.fill(7)))
    return found


def test_a_prompt_is_its_sequence_s_own() -> None:
    """The caller reuses a buffer while its sequence waits, runs and has ended."""
    for when in ("waiting", "running", "freed"):
        for buffer, overwrite in buffers(12):
            manager = KVCacheManager(64, 4)
            sequence = Sequence("a", buffer)
            fork = sequence.fork("fork")
            if when == "waiting":
                overwrite()
            manager.allocate_slots(sequence, 4)
            if when == "running":
                overwrite()
            manager.allocate_slots(sequence)
            manager.free(sequence)
            overwrite()
            assert sequence.token_ids() == fork.token_ids() == [*range(12)]
            assert manager.get_computed_blocks(Sequence("b", [*range(12), 1])).num_tokens == 12
            assert manager.get_computed_blocks(Sequence("c", [7] * 13)).num_tokens == 0


def test_appended_tokens_are_the_sequence_s_own() -> None:
    for buffer, overwrite in buffers(12):
        manager = KVCacheManager(64, 4)
        one, two, three = Sequence("one", [1]), Sequence("two", [1]), Sequence("three", [1])
        one.append_tokens(buffer)
        for sequence in (one, two, three):
            manager.allocate_slots(sequence)
        manager.append_slots(two, buffer)
        manager.append_slots(three, buffer, delay_cache_blocks=True)
        overwrite()
        for sequence in (one, two, three):
            assert sequence.token_ids() == [1, *range(12)]


def test_a_buffer_that_is_lent_is_used_as_it_is_until_a_token_is_appended() -> None:
    for buffer in (array("I", range(8)), array("i", range(8)), memoryview(array("I", range(8)))):
        sequence = Sequence("s", buffer, copy=False)
        fork = sequence.fork("fork")
        assert sequence.packed_tokens().obj is fork.packed_tokens().obj is getattr(buffer, "obj", buffer)
        sequence.append_tokens([8])
        buffer[0] = 5
        assert (sequence.token_ids(), fork.token_ids()) == ([*range(9)], [5, *range(1, 8)])
    assert Sequence("s", [1, 2], copy=False).token_ids() == [1, 2]
    with pytest.raises(InvalidArgumentError, match="copy: expected True or False, got 0"):
        Sequence("s", array("I", [1]), copy=0)  # type: ignore[arg-type]


def test_the_block_table_grows_in_place() -> None:
    manager = KVCacheManager(8, 2)
    sequence = Sequence("s", [1, 2, 3])
    manager.allocate_slots(sequence)
    table = sequence.block_ids
    assert table == [0, 1]
    manager.append_slots(sequence, [4, 5])
    assert sequence.block_ids is table
    assert table == [0, 1, 2]


def test_bad_tokens_are_not_appended() -> None:
    sequence = Sequence("s", [1])
    with pytest.raises(InvalidTokensError, match="got -2 at position 1"):
        sequence.append_tokens([1, -2])
    assert sequence.token_ids() == [1]


def test_repr_says_what_it_holds() -> None:
    manager = KVCacheManager(8, 2)
    sequence = Sequence("s", [1, 2, 3])
    assert repr(sequence) == "Sequence('s', 3 tokens, not allocated)"
    hit = manager.get_computed_blocks(sequence)
    assert repr(hit) == "CacheHit('s', 0 tokens in 0 blocks)"
    manager.allocate_slots(sequence, hit=hit)
    assert repr(sequence) == "Sequence('s', 3 tokens, 2 blocks)"
    one = Sequence("t", [7])
    manager.allocate_slots(one, hit=manager.get_computed_blocks(one))
    assert repr(one) == "Sequence('t', 1 token, 1 block)"
    assert repr(sequence.blocks[0]) == "KVCacheBlock(0, ref_cnt=1, cached at 0)"
    assert repr(sequence.blocks[1]) == "KVCacheBlock(1, ref_cnt=1, not cached)"


def test_a_view_of_the_tokens_never_stands_in_the_way() -> None:
    sequence = Sequence("s", [1, 2])
    view = sequence.packed_tokens()
    sequence.append_tokens([3])
    assert sequence.token_ids() == [1, 2, 3]
    assert bytes(view) == bytes([1, 0, 0, 0, 2, 0, 0, 0])


def test_keys_may_come_as_lists_and_numbers_of_any_kind() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    sequence = Sequence("s", [1, 2, 3, 4], extra_keys=[[numpy.int64(1), numpy.int32(3), "x"]])  # type: ignore[list-item]
    assert sequence.extra_keys == ((1, 3, "x"),)


def test_an_id_must_be_hashable() -> None:
    with pytest.raises(InvalidArgumentError, match="sequence_id: expected something hashable, got \\[1\\]"):
        Sequence([1], [1])  # type: ignore[arg-type]
    assert Sequence(("request", 7), [1]).sequence_id == ("request", 7)


class Moody:
    """An id whose hash is `number`, and another one at each call while that is None."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self._random = Random(0)

    def __hash__(self) -> int:
        return self._random.getrandbits(32) if self.number is None else self.number


def test_an_id_has_one_hash() -> None:
    for name in ("sequence_id", "session"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected something whose hash stays the same, got"):
            Sequence(**{"sequence_id": "s", "prompt_token_ids": [1], name: Moody(None)})


@pytest.mark.parametrize("later", [2, None])
def test_an_id_whose_hash_changes_later_is_reported_and_nothing_changes(later: int | None) -> None:
    manager = KVCacheManager(16, 4)
    moody = Moody(1)
    sequence, other = Sequence(moody, range(6)), Sequence("other", range(6))
    manager.allocate_slots(sequence)
    manager.allocate_slots(other)
    calls: list[Callable[[], object]] = [
        lambda: manager.free(sequence),
        lambda: manager.abort(sequence, 0),
        lambda: manager.fork(sequence, "fork"),
        lambda: manager.truncate(sequence, 6),
        lambda: manager.rewind(sequence, 0),
        lambda: manager.cache_blocks(sequence, 6),
        lambda: manager.holds.detach(sequence),
    ]
    for call in calls:
        moody.number = later
        with pytest.raises(SequenceStateError, match="whose sequence_id, or the id's hash, isn't what it was"):
            call()
        moody.number = 1
        manager.check()
    manager.free(sequence)
    manager.free(other)
    assert manager.num_free_blocks == 16


class Fickle(Moody):
    """An id whose hash is 1 until it was asked `number` times."""

    def __hash__(self) -> int:
        assert self.number is not None
        self.number -= 1
        return int(self.number >= 0)


@pytest.mark.parametrize(("call", "num_looks"), [("free", 2), ("abort", 2), ("detach", 3)])
def test_an_id_whose_hash_changes_between_two_looks_is_reported(call: str, num_looks: int) -> None:
    """A dict that finds the id at the first look only would raise a KeyError, which says nothing to the caller."""
    manager = KVCacheManager(16, 4)
    fickle = Fickle(1000)
    sequence = Sequence(fickle, range(6))
    manager.allocate_slots(sequence)
    calls: dict[str, Callable[[], object]] = {
        "free": lambda: manager.free(sequence),
        "abort": lambda: manager.abort(sequence, 0),
        "detach": lambda: manager.holds.detach(sequence),
    }
    for number in range(num_looks):
        fickle.number = number
        with pytest.raises(SequenceStateError, match="whose sequence_id, or the id's hash, isn't what it was"):
            calls[call]()
        fickle.number = 1000
        manager.check()
    calls[call]()
    assert not sequence.is_allocated
