"""Every form of token ids that is accepted, and every form that is refused."""

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from ctypes import c_int16
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvblocks import InvalidTokensError, KVCacheManager, Sequence
from kvblocks.core.tokens import pack_tokens

IDS = [0, 1, 300, 70_000, 2**31, 2**32 - 1]
SMALL = [0, 1, 127]


class HasNumpyMethod:
    """What a torch CPU tensor looks like to the core."""

    def numpy(self) -> Any:
        return array("q", SMALL)


class OnAnotherDevice:
    def numpy(self) -> Any:
        raise TypeError("it is on cuda:0")


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        (IDS, IDS),
        (tuple(IDS), IDS),
        (iter(IDS), IDS),
        (range(5), [0, 1, 2, 3, 4]),
        (array("I", IDS), IDS),
        (memoryview(array("I", IDS).tobytes()).cast("I"), IDS),
        (memoryview(array("I", IDS)), IDS),
        (memoryview(array("I", IDS))[::2], IDS[::2]),
        (array("Q", IDS), IDS),
        (array("q", IDS), IDS),
        (array("i", SMALL), SMALL),
        (array("H", SMALL), SMALL),
        (array("h", SMALL), SMALL),
        (array("l", SMALL), SMALL),
        (HasNumpyMethod(), SMALL),
        (deque(IDS), IDS),
        (dict.fromkeys(IDS, 0).values(), [0] * len(IDS)),
        ([5, True, False], [5, 1, 0]),  # only the first is looked at
    ],
)
def test_accepted(token_ids: Any, expected: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert packed.tolist() == expected
    assert bytes(packed) == b"".join(token.to_bytes(4, "little") for token in expected)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "uint16"])
def test_numpy_arrays(dtype: str) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    assert pack_tokens(numpy.array(SMALL, dtype=dtype)).tolist() == SMALL
    assert pack_tokens(numpy.arange(10, dtype=dtype)[::3]).tolist() == [0, 3, 6, 9]
    assert pack_tokens(list(numpy.array(SMALL, dtype=dtype))).tolist() == SMALL


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch comes with the engine's dependencies")
    assert pack_tokens(torch.tensor(SMALL)).tolist() == SMALL
    assert pack_tokens(torch.tensor(SMALL, dtype=torch.int32)).tolist() == SMALL


def test_four_byte_buffers_are_packed_without_a_copy() -> None:
    for buffer in (array("I", IDS), array("i", SMALL)):
        view = pack_tokens(buffer)
        assert isinstance(view, memoryview)
        assert view.obj is buffer
        assert view.format == "I"


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "expected at least one, got none"),
        (b"", "got bytes, which may be text"),
        (b"a prompt", r"got bytes, which may be text; for packed u32, pass memoryview\(packed\).cast\(\"I\"\)"),
        (bytearray(8), "got bytearray, which may be text"),
        ({30, 7, 19}, "expected integers in order, got a set, which has none"),
        (frozenset([1]), "expected integers in order, got a frozenset"),
        ({5: 0, 3: 1}, "expected integers in order, got a dict"),
        ({5: 0, 3: 1}.keys(), "expected integers in order, got a dict_keys"),
        (Counter([5, 3]), "expected integers in order, got a Counter"),
        (set(), "expected integers in order, got a set"),
        ([True, False], "expected integers, got bool True at position 0"),
        ((False, 1), "expected integers, got bool False at position 0"),
        (iter([True]), "expected integers, got bool True at position 0"),
        ([1, 2**62], f"got {2**62} at position 1: ids have 32 bits, so give a wider one .* as an extra key"),
        (array("Q", [2**62]), f"got {2**62} at position 0: ids have 32 bits"),
        (array("I"), "expected at least one, got none"),
        ([1, -1], "expected 0 to 4294967295, got -1 at position 1"),
        ([2**32], "expected 0 to 4294967295, got 4294967296 at position 0"),
        ([1, 2, 1.5], "expected integers, got float 1.5 at position 2"),
        ([1, "2"], "expected integers, got str '2' at position 1"),
        ([None], "expected integers, got NoneType"),
        ("text", "expected integers, got a str"),
        (5, "expected an iterable or buffer, got int"),
        (None, "expected an iterable or buffer, got NoneType"),
        (array("i", [1, -7]), "got -7 at position 1"),
        (array("q", [1, 2, -9]), "got -9 at position 2"),
        (array("q", [2**32]), "got 4294967296 at position 0"),
        (array("h", [-3]), "got -3 at position 0"),
        (array("f", [1.0]), "native integers of 2, 4 or 8 bytes, got format 'f'"),
        (array("B", [1, 0, 0, 0]), "got format 'B'"),  # ids, text or packed ids?
        (memoryview(b"1234"), "got format 'B'"),
        ((c_int16 * 2)(1, 2), "got format '<h'"),
        (OnAnotherDevice(), "expected a CPU tensor of integers, got one that says: it is on cuda:0"),
        (memoryview(bytes(16)).cast("B", (4, 4)), r"expected one dimension, got shape \(4, 4\)"),
    ],
)
def test_refused(token_ids: Any, message: str) -> None:
    with pytest.raises(InvalidTokensError, match=message):
        Sequence("s", token_ids)


@given(st.lists(st.integers(-(2**33), 2**33), min_size=1))
def test_lists_and_buffers_are_refused_alike(token_ids: list[int]) -> None:
    fits = all(0 <= token <= 2**32 - 1 for token in token_ids)
    for form in (token_ids, array("q", token_ids)):
        if fits:
            assert pack_tokens(form).tolist() == token_ids
        else:
            with pytest.raises(InvalidTokensError):
                pack_tokens(form)


def test_all_forms_of_a_prompt_hit_each_other() -> None:
    manager = KVCacheManager(64, 4)
    tokens = list(range(9))
    forms = [tokens, array("I", tokens), array("q", tokens), memoryview(array("I", tokens))]
    for number, form in enumerate(forms):
        sequence = Sequence(number, form)
        hit = manager.get_computed_blocks(sequence)
        assert hit.num_tokens == (8 if number else 0)
        manager.allocate_slots(sequence, hit=hit)
        manager.append_slots(sequence, [100 + number])
        assert sequence.token_ids() == [*tokens, 100 + number]
        manager.check()


def test_an_iterable_s_own_error_is_not_hidden() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        Sequence("s", broken())


def test_numbers_of_any_kind_can_be_appended() -> None:
    """Inside a block and at its end, which take two paths through the code."""
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    manager = KVCacheManager(8, 4)
    sequence = Sequence("s", [1])
    manager.allocate_slots(sequence)
    for number in (numpy.int64(5), numpy.uint32(6), numpy.int64(7), numpy.int32(8), 9):
        manager.append_slots(sequence, [number])
    assert sequence.token_ids() == [1, 5, 6, 7, 8, 9]
    for bad in (-1, 2**32, 2**62, 1.5, None, "5", True, numpy.bool_(1)):
        with pytest.raises(InvalidTokensError):
            manager.append_slots(sequence, [bad])  # type: ignore[list-item]
        with pytest.raises(InvalidTokensError):
            manager.append_step([sequence], [bad])  # type: ignore[list-item]
        with pytest.raises(InvalidTokensError):
            sequence.append_tokens([bad])  # type: ignore[list-item]
    assert sequence.num_tokens == sequence.num_computed_tokens == 6
    manager.check()
