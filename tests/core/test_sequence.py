"""The arguments that a sequence accepts, and its attributes."""

import copy
import pickle
from typing import Any

import pytest

from kvblocks import InvalidArgumentError, InvalidTokensError, KVCacheManager, Sequence


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


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sequence_is_not_copied(duplicate: Any) -> None:
    """A copy would share the block table, and free it a second time."""
    manager = KVCacheManager(8, 2)
    sequence = Sequence("s", [1, 2, 3])
    manager.allocate_slots(sequence)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        duplicate(sequence)
