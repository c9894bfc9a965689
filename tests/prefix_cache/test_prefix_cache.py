"""The prefix cache: by example, against the reference model, and from eight threads at once."""

import contextlib
import gc
import pickle
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from model.history import RandomChooser
from model.prefix_history import OPERATIONS, PrefixHistory
from model.where import where

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    InvalidArgumentError,
    InvalidTokensError,
    KVCacheBlock,
    KVCacheManager,
    PinBudgetError,
    PinnedPrefix,
    PrefixCache,
    PrefixMatch,
    Sequence,
    StaleHitError,
)
from kvblocks.hashing.scheme import sha256_digest
from kvblocks.stats import HitCounts


def three_bit_hash(preimage: bytes) -> bytes:
    """Only eight different digests."""
    return bytes([sha256_digest(preimage)[0] & 7])


def filled(max_blocks: int = 8, *prefixes: tuple[list[int], list[int]]) -> PrefixCache:
    """A cache with blocks of two tokens that these prefixes were inserted in."""
    cache = PrefixCache(max_blocks, 2, pin_budget=1.0)
    for tokens, ids in prefixes:
        cache.insert_prefix(tokens, ids)
    cache.check()
    return cache


ABC = [1, 2, 3, 4, 5, 6]


# Looking up and inserting


def test_a_prompt_of_1060_tokens_matches_66_blocks_of_16():
    cache = PrefixCache(100, 16)
    tokens = list(range(1060))
    assert cache.insert_prefix(tokens, range(1000, 1066))[:4] == (66, 66, [], [])
    match = cache.match_prefix(tokens)
    assert match.match_length == 1056
    assert match.matched_kv_blocks == list(range(1000, 1066))
    assert match.matched_tokens == tokens[:1056]
    assert match.remaining_tokens == tokens[1056:]
    assert cache.match_prefix(tokens[:1000]).match_length == 992
    assert cache.match_prefix([*tokens[:500], 0, *tokens[501:]]).match_length == 496
    cache.check()


def test_ids_behind_the_full_blocks_stay_the_callers():
    """Eight tokens with three ids: whoever counts a partial block, too, need not cut its id off."""
    cache = PrefixCache(8, 3)
    tokens = list(range(8))
    assert cache.insert_prefix(tokens, [10, 20, 30])[:4] == (2, 2, [30], [])
    assert cache.match_prefix(tokens).matched_kv_blocks == [10, 20]
    assert cache.insert_prefix(tokens, [11, 20, 30, 40])[:4] == (2, 0, [11, 30, 40], [])
    assert cache.insert_prefix([7] * 3, [30])[:4] == (1, 1, [], [])  # the id is free for another prefix
    whole = PrefixCache(8)
    assert whole.insert_prefix(tokens, [1, 2, 3])[:4] == (0, 0, [1, 2, 3], [])
    for made in (cache, whole):
        made.check()


def test_a_miss_is_an_empty_match():
    match = filled().match_prefix([1, 2, 3])
    assert (match.match_length, match.matched_kv_blocks, match.matched_tokens) == (0, [], [])
    assert match.remaining_tokens == [1, 2, 3]
    assert match.payload is None
    with match:
        assert match.match_length == 0


@pytest.mark.parametrize("form", [list, tuple, lambda t: array("I", t), lambda t: array("q", t), iter])
def test_tokens_in_any_form(form):
    cache = filled(8, (ABC, [5, 6, 7]))
    assert cache.match_prefix(form(ABC)).matched_kv_blocks == [5, 6, 7]
    assert cache.query_match_len(form(ABC)) == 6
    assert cache.insert_prefix(form([*ABC, 9, 9]), iter([5, 6, 7, 8])).num_new_blocks == 1


def test_salt_lora_and_keys_separate_prefixes():
    cache = PrefixCache(8, 2)
    kinds: list[dict[str, Any]] = [{}, {"salt": "a"}, {"lora": "a"}, {"extra_keys": [(2, 3, "image")]}]
    for number, kind in enumerate(kinds):
        assert cache.insert_prefix([1, 2, 3, 4], [2 * number, 2 * number + 1], **kind).num_new_blocks == 2 - (
            number == 3
        )
    assert [cache.match_prefix([1, 2, 3, 4], **kind).matched_kv_blocks for kind in kinds] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [0, 7],
    ]
    assert cache.cached_block_count() == 7


def test_an_id_that_is_not_taken_is_handed_back():
    cache = filled(8, (ABC[:4], [0, 1]))
    result = cache.insert_prefix(ABC, [10, 1, 12])
    assert result[:4] == (3, 1, [10], [])
    assert cache.match_prefix(ABC).matched_kv_blocks == [0, 1, 12]
    assert not cache.inspect.contains_block(10) and cache.inspect.contains_block(12)


def test_a_full_cache_evicts_ends_first_and_says_so():
    cache = filled(4, (ABC, [0, 1, 2]))
    result = cache.insert_prefix([9, 9, 8, 8, 7, 7], [3, 4, 5])
    assert result[:4] == (3, 3, [], [2, 1])
    assert cache.match_prefix(ABC).matched_kv_blocks == [0]
    assert cache.cached_block_count() == 4


def test_what_is_extended_is_not_evicted_for_it():
    cache = filled(3, (ABC[:4], [0, 1]), ([9, 9], [2]))
    assert cache.insert_prefix([*ABC], [0, 1, 3])[:4] == (3, 1, [], [2])


def test_what_is_extended_goes_after_its_extension():
    """With and without an eviction for the extension, and with another prefix attached to the middle."""
    for max_blocks in (9, 5):
        cache = filled(max_blocks, ([*ABC[:2], 8, 8], [0, 7]), (ABC[:4], [0, 1]), ([9, 9, 9, 9], [10, 11]))
        result = cache.insert_prefix([*ABC, 5, 5], [0, 1, 2, 3])
        assert result.evicted_kv_blocks == ([] if max_blocks == 9 else [7, 11])
        cache.check()
        assert cache.evict(9) == [*([7, 11] if max_blocks == 9 else []), 10, 3, 2, 1, 0]


def test_the_longest_prefix_that_fits_is_inserted():
    cache = filled(4, (ABC, [0, 1, 2]))
    with cache.match_prefix(ABC):
        assert cache.insert_prefix([9, 9, 8, 8, 7, 7], [3, 4, 5])[:4] == (1, 1, [4, 5], [])
        assert cache.insert_prefix([7, 7, 7, 7], [4, 5], pin=True)[:4] == (1, 1, [5], [3])
        assert cache.insert_prefix([8, 8], [5], pin=True)[:4] == (0, 0, [5], [])
    assert len(cache.inspect.list_pinned()) == 1
    assert PrefixCache(2, 2).insert_prefix(ABC, [0, 1, 2])[:4] == (2, 2, [2], [])
    cache.check()


def test_a_prompt_without_a_full_block():
    cache = filled()
    assert cache.insert_prefix([1], [])[:4] == (0, 0, [], [])
    assert cache.insert_prefix([1], [], pin=True)[:4] == (0, 0, [], [])
    assert cache.inspect.list_pinned() == []
    assert cache.pin_prefix([1]) == cache.unpin_prefix([1]) == 0


def test_an_empty_prompt_is_an_empty_match():
    cache = filled(8, (ABC, [0, 1, 2]))
    for tokens in ([], (), iter([]), array("I"), array("q")):
        match = cache.match_prefix(tokens)
        assert (match.match_length, match.matched_kv_blocks, match.remaining_tokens) == (0, [], [])
        with match:
            assert cache.evictable_count() == 3
    assert cache.match_prefix(ABC).match_length == 6
    assert cache.query_match_len([], salt="a") == cache.pin_prefix([]) == cache.unpin_prefix([]) == 0
    assert cache.insert_prefix([], [], pin=True)[:4] == (0, 0, [], [])
    assert cache.inspect.block_hashes([]) == []
    assert cache.inspect.explain([]).cause == "no miss"
    with pytest.raises(InvalidArgumentError, match="expected none for a prompt without tokens, got 1"):
        cache.match_prefix([], extra_keys=[(0, 1, "image")])
    cache.check()


@pytest.mark.parametrize("policy", [None, "lru", "slru", "s3fifo"])
def test_a_cache_of_no_blocks_finds_and_takes_nothing(policy):
    cache = PrefixCache(0, 2, eviction=policy)
    assert cache.insert_prefix(ABC, [0, 1, 2])[:4] == (0, 0, [0, 1, 2], [])
    with cache.match_prefix(ABC) as match:
        assert match.match_length == 0
    assert cache.evict(3) == cache.clear() == []
    assert cache.pin_prefix(ABC) == 0
    cache.check()


def test_several_lookups_are_of_one_moment_inside_exclusive():
    cache = filled(8, (ABC, [0, 1, 2]))
    with cache.exclusive():
        matches = [cache.match_prefix(tokens) for tokens in (ABC, [9], ABC[:3])]
    assert [match.match_length for match in matches] == [6, 0, 2]
    assert (cache.stats.mean_match_length, cache.stats.mean_hit_length) == (8 / 3, 8 / 2)
    assert (cache.stats.hit_rate, cache.stats.request_hit_rate) == (8 / 10, 2 / 3)
    assert cache.match_prefix(ABC, salt="a").match_length == 0
    cache.insert_prefix(ABC, [0, 11, 12], extra_keys=[(2, 4, "image")])
    assert cache.match_prefix(ABC, extra_keys=[(2, 4, "image")]).matched_kv_blocks == [0, 11, 12]
    assert cache.match_prefix(ABC).matched_kv_blocks == [0, 1, 2]


def test_a_query_of_the_length_changes_nothing():
    cache = filled(8, (ABC, [0, 1, 2]), ([7, 7], [3]))
    assert cache.query_match_len(ABC) == 6
    assert cache.stats.hit_rate == cache.stats.mean_match_length == 0.0
    assert cache.evict(3) == [2, 1, 0]


def test_a_match_or_an_insertion_makes_a_prefix_the_most_recently_used():
    cache = filled(8, (ABC, [0, 1, 2]), ([7, 7, 6, 6], [3, 4]), ([8, 8], [5]))
    cache.match_prefix(ABC[:4])
    cache.insert_prefix([7, 7], [3])
    assert cache.evict(99) == [2, 4, 5, 1, 0, 3]
    assert cache.cached_block_count() == 0
    assert cache.insert_prefix(ABC, [5, 4, 3]).num_new_blocks == 3  # all are the engine's again


def test_a_cache_in_steady_state_makes_no_blocks():
    def count() -> int:
        return sum(type(thing) is KVCacheBlock for thing in gc.get_objects())

    cache = filled(6, (ABC, [0, 1, 2]), ([9, 9, 8, 8, 7, 7], [3, 4, 5]))
    gc.collect()
    gc.disable()  # or what was made in vain would be gone again
    try:
        num_before = count()
        for number in range(50):
            ids = cache.evict(3)
            cache.insert_prefix([number] * 6, ids)
        assert count() == num_before
    finally:
        gc.enable()


# Block ids as a buffer


@pytest.mark.parametrize("typecode", ["i", "I", "q", "Q", "l", "L", "h", "H"])
def test_block_ids_in_a_buffer(typecode):
    cache = filled()
    assert cache.insert_prefix(ABC, array(typecode, [10, 11, 12])).match.matched_kv_blocks == [10, 11, 12]
    strided = memoryview(array(typecode, [10, 0, 11, 0, 5, 0]))[::2]
    assert cache.insert_prefix(ABC, strided)[:3] == (3, 0, [5])
    cache.check()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (array("q", [1, 2, -3]), "kv_block_ids: position 2: expected an int of at least 0, got -3"),
        (array("i", [-1, 2, 3]), "kv_block_ids: position 0: expected an int of at least 0, got -1"),
        (
            array("Q", [1, 2**63, 3]),
            "position 1: expected an int from 0 to 9223372036854775807, got 9223372036854775808",
        ),
        ([1, 2**63, 3], "position 1: expected an int from 0 to 9223372036854775807, got 9223372036854775808"),
        ([1, 2**64, 3], "position 1: expected an int from 0 to 9223372036854775807, got 18446744073709551616"),
        (array("q", [1, 2]), "expected at least 3, one for each full block of 2 tokens, got 2"),
        (array("q", [1, 2, 1]), "expected 3 different ones, got 2"),
        (array("d", [1, 2, 3]), "native integers of 2, 4 or 8 bytes, got format 'd' and shape .3,"),
        (bytearray(3), "native integers of 2, 4 or 8 bytes, got format 'B' and shape .3,"),
        (b"\1\2\3", "expected an iterable of ints, or a buffer of them, got b"),
        (
            memoryview(b"123456").cast("B", (2, 3)),
            "expected one dimension of native .*, got format 'B' and shape .2, 3",
        ),
    ],
)
def test_bad_block_ids_in_a_buffer(ids, message):
    cache = filled()
    with pytest.raises(InvalidArgumentError, match=message):
        cache.insert_prefix([*ABC, 7], ids)
    assert cache.cached_block_count() == 0


def test_a_view_that_was_released_is_no_buffer_of_ids():
    view = memoryview(array("q", [1, 2, 3]))
    view.release()
    with pytest.raises(
        InvalidArgumentError, match="kv_block_ids: expected a buffer of ints; it says operation forbidden"
    ):
        filled().insert_prefix(ABC, view)


def test_the_largest_id():
    cache = filled()
    assert cache.insert_prefix(ABC[:2], [2**63 - 1]).match.packed_kv_blocks == array("q", [2**63 - 1])


def test_a_match_s_ids_as_a_buffer():
    cache = filled(8, (ABC, [7, 5, 6]))
    match = cache.match_prefix(ABC)
    assert (match.packed_kv_blocks, match.packed_kv_blocks.typecode) == (array("q", [7, 5, 6]), "q")
    assert match.packed_kv_blocks is match.packed_kv_blocks
    assert cache.match_prefix([9]).packed_kv_blocks == array("q")
    early = cache.match_prefix(ABC)
    cache.evict(1)
    with early:
        assert early.packed_kv_blocks == array("q", [7, 5])


def test_numpy_and_torch_take_ids_and_give_them_without_a_copy():
    numpy, torch = (pytest.importorskip(name, reason="it comes with the engine") for name in ("numpy", "torch"))
    cache = filled(9, (ABC[:2], [7]))
    pages = torch.tensor([7, 0, 5, 0, 6, 0], dtype=torch.int32)[::2]
    packed = cache.insert_prefix(torch.tensor(ABC), pages).match.packed_kv_blocks
    of_numpy, of_torch = numpy.frombuffer(packed, "int64"), torch.frombuffer(packed, dtype=torch.int64)
    assert of_numpy.tolist() == of_torch.tolist() == [7, 5, 6]
    packed[0] = 8
    assert of_numpy[0] == of_torch[0] == 8
    for kind in ("int32", "uint32", "int64", "uint64"):
        assert cache.insert_prefix(ABC, numpy.array([7, 5, 6], kind))[:4] == (3, 0, [], [])
    refused = [
        (torch.tensor([7.0, 5.0, 6.0]), "expected one dimension of native integers .*, got format 'f'"),
        (torch.tensor([7, 5, 6]).bfloat16(), "expected a CPU tensor of ints; it says Got unsupported ScalarType"),
        (torch.ones(3, requires_grad=True), "expected a CPU tensor of ints; it says Can't call numpy"),
        (torch.tensor([[7, 5, 6]]), r"expected one dimension of native integers .*, got .* shape \(1, 3\)"),
        (torch.tensor(7), r"expected one dimension of native integers .*, got .* shape \(\)"),
        (numpy.array([7, 5, 6], ">i8"), "expected one dimension of native integers .*, got format '>.'"),
        (numpy.array([True, False, True]), "expected one dimension of native integers .*, got format '.'"),
        (numpy.array([7, 5, None]), "expected one dimension of native integers .*, got format 'O'"),
        (numpy.array([7, 5, 6], "M8[s]"), "position 0: expected an int of at least 0, got"),
    ]
    for ids, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            cache.insert_prefix(ABC, ids)


# Misuse


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "expected at least 3, one for each full block of 2 tokens, got 2"),
        ([1, 2, -3], "kv_block_ids: position 2: expected an int of at least 0, got -3"),
        ([1, 2.0, 3], "kv_block_ids: position 1: expected an int of at least 0, got 2.0"),
        ([True, 2, 3], "kv_block_ids: position 0: expected an int of at least 0, got True"),
        ([1, 2, 1], "expected 3 different ones, got 2"),
        ("123", "expected an iterable of ints, or a buffer of them, got '123'"),
        (7, "expected an iterable of ints, or a buffer of them, got 7"),
    ],
)
def test_bad_block_ids(ids, message):
    cache = filled()
    with pytest.raises(InvalidArgumentError, match=message):
        cache.insert_prefix([*ABC, 7], ids)
    assert cache.cached_block_count() == 0


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_id_holds_one_prefix(wrong):
    """Refused whether or not the block would have been taken, and also for ids of this prefix at another position."""
    cache = filled(8, (ABC[:4], [0, 1]), ([9, 9], [2]))
    for ids in ([wrong, 3, 2], [2, 1, 3], [1, 0, 3], [0, 1, wrong + 0] if wrong == 2 else [5, wrong, 2]):
        with pytest.raises(BlockStateError, match=r"expected ids that hold no other prefix, got \d at position \d"):
            cache.insert_prefix(ABC, ids)
        assert cache.cached_block_count() == 3
        cache.check()
    assert cache.evict(1) == [1]  # nor was anything used


@pytest.mark.parametrize("bad", [(-1, 16), (1, 0), (1.5, 16), ("8", 16), (True, 16)])
def test_bad_sizes(bad):
    with pytest.raises(InvalidArgumentError, match=r"expected an int of at least [01]"):
        PrefixCache(*bad)


def test_bad_arguments():
    cache = filled()
    for call in (cache.match_prefix, cache.query_match_len, cache.pin_prefix, cache.unpin_prefix):
        with pytest.raises(InvalidTokensError, match="expected integers, got str"):
            call(["1"])
        with pytest.raises(InvalidArgumentError, match="salt: expected a non-empty str"):
            call([1], salt="")
    with pytest.raises(InvalidArgumentError, match="num_blocks: expected an int of at least 0, got -1"):
        cache.evict(-1)
    with pytest.raises(InvalidArgumentError, match="kv_block_id: expected an int of at least 0"):
        cache.inspect.contains_block(-1)
    with pytest.raises(InvalidArgumentError, match="description: expected"):
        cache.pin_prefix([1], 3)


# Holding


def test_a_match_that_is_entered_keeps_its_blocks_until_it_is_left():
    cache = filled(8, (ABC, [0, 1, 2]))
    with cache.match_prefix(ABC[:4]) as match:
        assert match.matched_kv_blocks == [0, 1]
        assert cache.evictable_count() == 1
        assert cache.evict(3) == [2]
        assert "4 of 4 tokens, held" in repr(match)
        cache.check()
    assert cache.evictable_count() == 2
    assert cache.evict(3) == [1, 0]
    assert match.matched_kv_blocks == [0, 1]  # the value stays


def test_a_match_is_left_when_the_body_raises():
    cache = filled(8, (ABC, [0, 1, 2]))
    with pytest.raises(ZeroDivisionError), cache.match_prefix(ABC) as match:
        _ = match.match_length / cache.evictable_count()
    assert cache.evictable_count() == 3
    cache.check()


def test_a_match_that_is_dropped_while_it_is_held_lets_go_and_warns():
    cache = filled(8, (ABC, [0, 1, 2]), ([9, 9], [3]))
    match = cache.match_prefix(ABC)
    match.__enter__()
    match.__enter__()
    assert cache.evictable_count() == 1
    with pytest.warns(ResourceWarning, match=r"PrefixMatch\(6 of 6 tokens, held\) was entered and never left"):
        del match
    assert cache.evictable_count() == 4
    cache.check()
    with cache.match_prefix(ABC):
        pass  # no warning, which would be an error here
    cache.match_prefix(ABC)


def test_a_match_may_be_entered_again():
    cache = filled(8, (ABC, [0, 1, 2]))
    match = cache.match_prefix(ABC)
    with match:
        with match:
            assert cache.evictable_count() == 0
        assert cache.evictable_count() == 0
        cache.check()
    with match:
        assert cache.evictable_count() == 0
    assert cache.evictable_count() == 3


def test_leaving_a_match_that_was_not_entered():
    match = filled(8, (ABC, [0, 1, 2])).match_prefix(ABC)
    with pytest.raises(BlockStateError, match="expected a match that was entered, got PrefixMatch"):
        match.__exit__(None, None, None)


def test_a_match_that_was_read_and_is_not_true_any_more_is_stale():
    cache = filled(8, (ABC, [0, 1, 2]))
    match = cache.match_prefix(ABC)
    assert match.match_length == 6
    assert cache.evict(1) == [2]
    with pytest.raises(StaleHitError, match="match again"), match:
        pass
    assert cache.evictable_count() == 2
    cache.check()
    cache.insert_prefix(ABC, [0, 1, 2])  # the same ids hold the same prefix again
    with match:
        assert cache.evictable_count() == 0
    cache.insert_prefix([*ABC, 7, 7], [0, 1, 2, 3])
    cache.insert_prefix([9], [])
    with match:  # more is cached now, but what it says is true
        assert match.matched_kv_blocks == [0, 1, 2]
        assert cache.evictable_count() == 1


def test_a_match_holds_what_has_its_ids_now():
    """An id that was evicted and inserted again may have another block object."""
    cache = filled(4, (ABC, [0, 1, 2]))
    match = cache.match_prefix(ABC)
    assert match.matched_kv_blocks == [0, 1, 2]
    assert cache.evict(2) == [2, 1]
    cache.insert_prefix([9, 9], [9])
    cache.insert_prefix(ABC, [0, 1, 2])
    with match:
        cache.check()
        assert cache.evict(4) == [9]


def test_a_match_that_was_read_keeps_its_payload():
    cache = filled(8, (ABC, [0, 1, 2]), ([9, 9], [3]))
    cache.attach(ABC, "then")
    match = cache.match_prefix(ABC)
    assert match.payload == "then"
    assert cache.evict(1) == [3]
    cache.attach(ABC, "now")
    with match:
        assert match.payload == "then"
    assert cache.match_prefix(ABC).payload == "now"


def test_what_was_left_counts_at_once():
    """For each call that needs it, right after the match was left."""
    cache = filled(3, (ABC, [0, 1, 2]))
    with cache.match_prefix(ABC):
        pass
    assert cache.evict(1) == [2]
    with cache.match_prefix(ABC):
        pass
    assert cache.insert_prefix([9, 9, 8, 8], [3, 4]).evicted_kv_blocks == [1]
    with cache.match_prefix(ABC) as match:
        cache.match_prefix([9, 9, 8, 8])
    cache.match_prefix([9, 9, 8, 8])
    assert cache.evict(1) == [0]
    with match:
        pass
    with cache.match_prefix([9, 9, 8, 8]):
        pass
    assert sorted(cache.clear()) == [3, 4]


@pytest.mark.parametrize(
    "field",
    ["match_length", "matched_kv_blocks", "packed_kv_blocks", "matched_tokens", "remaining_tokens", "payload"],
)
def test_any_field_counts_as_reading(field):
    cache = filled(8, (ABC, [0, 1, 2]))
    match = cache.match_prefix(ABC)
    assert "6 of 6" in repr(match)  # this doesn't
    getattr(match, field)
    cache.evict(1)
    with pytest.raises(StaleHitError), match:
        pass


def test_a_match_that_nobody_has_read_is_brought_up_to_date():
    cache = filled(8, (ABC, [0, 1, 2]))
    shorter, longer = cache.match_prefix(ABC), cache.match_prefix([*ABC, 7, 7])
    assert cache.evict(1) == [2]
    with shorter:
        assert shorter.matched_kv_blocks == [0, 1]
        cache.insert_prefix([*ABC, 7, 7], [0, 1, 5, 6])
        with longer:
            assert longer.matched_kv_blocks == [0, 1, 5, 6]
    cache.check()


# The match of an insertion


def test_an_insertion_s_match_is_of_what_is_cached_then():
    cache = filled(4, (ABC[:4], [0, 1]))
    result = cache.insert_prefix([*ABC, 7, 7, 8, 8, 9], [10, 1, 12, 13, 14])
    assert (result.num_cached_blocks, result.num_new_blocks) == (4, 2)
    assert (result.unused_kv_blocks, result.evicted_kv_blocks) == ([10, 14], [])
    match = result.match
    assert match.matched_kv_blocks == [0, 1, 12, 13]
    assert match.match_length == 8
    assert match.matched_tokens == [*ABC, 7, 7]
    assert match.remaining_tokens == [8, 8, 9]
    assert match.payload is None
    assert cache.attach([*ABC, 7, 7], "next")
    assert cache.insert_prefix([*ABC, 7, 7], [0, 1, 12, 13]).match.payload == "next"
    assert filled().insert_prefix([1], []).match.match_length == 0


def test_an_insertion_is_no_query():
    cache = filled(8, (ABC, [0, 1, 2]))
    cache.match_prefix([*ABC, 9, 9])
    with cache.insert_prefix([*ABC, 7, 7], [0, 1, 2, 3]).match as match:
        assert match.match_length == 8
    assert (cache.stats.hit_rate, cache.stats.mean_match_length) == (6 / 8, 6)


def test_an_insertion_s_match_keeps_its_blocks_while_it_is_entered():
    cache = filled(4, ([9, 9], [9]))
    match = cache.insert_prefix(ABC, [0, 1, 2]).match
    assert cache.evictable_count() == 4  # it owns nothing before
    with match, match:
        assert "6 of 6 tokens, held" in repr(match)
        assert cache.evict(4) == [9]
        with pytest.raises(BlockStateError, match="expected no match to be held"):
            cache.clear()
        cache.check()
    assert cache.evict(4) == [2, 1, 0]


def test_an_insertion_s_match_gets_stale_or_is_brought_up_to_date():
    cache = filled()
    read, unread = (cache.insert_prefix(ABC, [0, 1, 2]).match for _ in range(2))
    assert read.match_length == 6
    assert cache.evict(1) == [2]
    with pytest.raises(StaleHitError, match="match again"), read:
        pass
    assert cache.evictable_count() == 2
    with unread:
        assert unread.matched_kv_blocks == [0, 1]
        assert cache.evictable_count() == 0
    cache.check()


def test_an_insertion_s_match_of_a_pin_may_outlive_it():
    cache = filled()
    match = cache.insert_prefix(ABC, [0, 1, 2], pin=True).match
    with match:
        assert cache.unpin_prefix(ABC) == 6
        assert cache.evict(9) == []
    assert cache.evict(9) == [2, 1, 0]


@pytest.mark.parametrize("typecode", ["I", "i", "q"])
def test_a_buffer_of_tokens_is_the_caller_s_again_after_an_insertion(typecode):
    """Even while the match is kept. An array can't grow while a view of it exists."""
    cache, tokens = filled(), array(typecode, ABC)
    result = cache.insert_prefix(tokens, [0, 1, 2])
    tokens.append(7)
    tokens[0] = 9
    cache.evict(1)
    with result.match as match:
        assert match.matched_tokens == ABC[:4]
        assert match.remaining_tokens == ABC[4:]


# What people and other systems look at


def test_rates_by_request_and_by_token():
    cache = filled(8, (ABC, [0, 1, 2]))
    assert cache.stats == HitCounts()
    assert (cache.stats.mean_hit_length, cache.stats.mean_match_length, cache.stats.request_hit_rate) == (0, 0, 0)
    for prompt in (ABC, [*ABC[:4], 9, 9], [9, 9, 9, 9]):
        cache.match_prefix(prompt)
    assert cache.stats == HitCounts(3, 2, 16, 10)
    assert cache.stats.request_hit_rate == 2 / 3
    assert cache.stats.hit_rate == 10 / 16
    assert cache.stats.mean_match_length == 10 / 3
    assert cache.stats.mean_hit_length == 5


def test_events_follow_what_is_cached():
    """In order, with the names that `block_hashes` and `find_block` use."""
    cache = PrefixCache(3, 2, enable_events=True)
    cache.insert_prefix(ABC, [10, 11, 12], salt="a", lora="pirate")
    one, two, three = cache.inspect.block_hashes(ABC, salt="a", lora="pirate")
    (stored,) = cache.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ((one, two, three), None)
    assert (stored.block_ids, stored.token_ids, stored.salt, stored.lora) == ((10, 11, 12), ABC, "a", "pirate")
    assert [cache.inspect.find_block(name) for name in (one, two, three, b"other")] == [10, 11, 12, None]
    cache.insert_prefix([*ABC[:4], 9, 9], [10, 11, 13], salt="a", lora="pirate")
    removed, stored = cache.take_events()
    assert removed == BlockRemoved((three,))
    assert stored.parent_block_hash == two and stored.block_ids == (13,)
    assert cache.evict(1) == [13]
    assert cache.take_events() == [BlockRemoved(stored.block_hashes)]
    cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.take_events() == []
    with pytest.raises(InvalidArgumentError, match="expected enable_events=True when the cache was made, got False"):
        PrefixCache(3, 2).take_events()


def test_names_are_those_of_a_manager_with_the_same_algorithm():
    for algorithm in ("xxh3_128", "sha256"):
        cache = PrefixCache(8, 2, hash_algorithm=algorithm)
        manager = KVCacheManager(8, 2, hash_algorithm=algorithm)
        sequence = Sequence("s", ABC, salt="a", extra_keys=[(1, 3, "image")])
        names = cache.inspect.block_hashes(ABC, salt="a", extra_keys=[(1, 3, "image")])
        assert names == manager.inspect.block_hashes(sequence)
        manager.allocate_slots(sequence)
        assert [manager.inspect.find_block(name) for name in names] == sequence.blocks
        assert manager.inspect.find_block(b"other") is None
        cache.insert_prefix(ABC, [7, 8, 9], salt="a", extra_keys=[(1, 3, "image")])
        assert [cache.inspect.find_block(name) for name in names] == [7, 8, 9]


def test_a_hash_function_that_raises_changes_nothing():
    def broken(preimage: bytes) -> bytes:
        if b"\x09" in preimage:
            raise RuntimeError("broken")
        return sha256_digest(preimage)

    cache = PrefixCache(3, 2, hash_algorithm=broken, enable_events=True)
    cache.insert_prefix(ABC, [0, 1, 2])
    with pytest.raises(RuntimeError, match="broken"):
        cache.insert_prefix([9, 9], [3])
    assert cache.cached_block_count() == 3 and len(cache.take_events()) == 1
    cache.check()


def test_explanations_of_misses():
    cache = PrefixCache(4, 2, num_history_blocks=8)
    why = "0 of 3 full blocks are cached; block 0 was never cached, as far as is remembered"
    assert str(cache.inspect.explain(ABC)) == why
    cache.insert_prefix(ABC, [0, 1, 2])
    assert cache.inspect.explain(ABC).cause == "no miss"
    assert cache.inspect.explain(ABC, salt="a").cause == "other keys"
    assert cache.inspect.explain([*ABC[:3], 9]).cause == "partly equal"
    cache.insert_prefix([7, 7, 8, 8], [5, 6])
    explanation = cache.inspect.explain(ABC)
    assert (explanation.cause, explanation.num_cached_blocks, explanation.num_blocks_since) == ("evicted", 2, 2)
    cache.insert_prefix([9, 9], [7])
    assert str(cache.inspect.explain(ABC)).endswith("block 1 was evicted (1 block taken from the pool since)")
    assert "block 2" not in str(cache.inspect.explain(ABC[:4]))
    cache.clear()
    assert cache.inspect.explain([9, 9]).cause == "reset"
    assert PrefixCache(4, 2).inspect.explain(ABC).cause == "never cached"


def test_a_picture_of_what_is_cached():
    cache = filled(8, (ABC, [0, 1, 2]), ([*ABC[:4], 9, 9], [0, 1, 3]))
    with cache.match_prefix(ABC[:4]):
        rows = cache.inspect.prefix_rows()
        assert [(row.num_blocks, row.num_owned, row.first_tokens) for row in rows] == [
            (2, 2, (1, 2, 3, 4)),
            (1, 0, (5, 6)),
            (1, 0, (9, 9)),
        ]
        assert "4 blocks (2 owned, 2 free)" in cache.inspect.to_dot()
        assert "left out: 2 nodes" in cache.inspect.to_dot(max_nodes=1)
    assert [row.num_owned for row in cache.inspect.prefix_rows()] == [0, 0, 0]
    assert [(row.num_pinned, row.num_ahead) for row in cache.inspect.prefix_rows()] == [(0, 3), (0, 0), (0, 1)]
    cache.pin_prefix([*ABC[:4], 9, 9])
    assert [(row.num_pinned, row.num_ahead) for row in cache.inspect.prefix_rows()] == [(2, None), (0, 0), (1, None)]
    assert "4 blocks (3 owned, 1 free, 3 pinned)" in cache.inspect.to_dot()


# Payloads


def test_a_payload_comes_back_for_exactly_its_tokens():
    cache = filled(8, (ABC, [0, 1, 2]))
    tokens = [*ABC, 7]
    assert cache.attach(tokens, "next")
    assert cache.match_prefix(tokens).payload == "next"
    others = [ABC, [*ABC, 8], [*tokens, 8], ABC[:5], ABC[:4]]
    assert [cache.match_prefix(other).payload for other in others] == [None] * 5
    assert cache.match_prefix(tokens, salt="a").payload is None
    assert cache.match_prefix(tokens, extra_keys=[(6, 7, "image")]).payload is None
    assert cache.attach(tokens, "of an image", extra_keys=[(6, 7, "image")])  # beside the other, with the same block
    assert cache.match_prefix(tokens, extra_keys=[(6, 7, "image")]).payload == "of an image"
    assert cache.match_prefix(tokens).payload == "next"
    assert cache.attach(ABC, "whole blocks") and cache.match_prefix(ABC).payload == "whole blocks"
    assert cache.attach(ABC, None) and cache.match_prefix(ABC).payload is None


def test_prompts_that_end_in_one_block_keep_their_payloads_up_to_sixteen():
    cache = filled(8, (ABC, [0, 1, 2]))
    for token in range(17):
        assert cache.attach([*ABC, token], token)
    assert [cache.match_prefix([*ABC, token]).payload for token in range(17)] == [None, *range(1, 17)]
    cache.attach([*ABC, 1], "again")  # the latest now
    cache.attach([*ABC, 0], 0)
    assert [cache.match_prefix([*ABC, token]).payload for token in range(4)] == [0, "again", None, 3]
    assert cache.attach([*ABC, 3], None)
    assert cache.match_prefix([*ABC, 3]).payload is None
    cache.check()


def test_a_prompt_below_a_block_keeps_its_payload_until_there_are_too_many():
    cache = filled(3, (ABC, [0, 1, 2]))
    assert cache.attach([1], "one") and cache.attach([1], "salted", salt="a") and cache.attach([], "nothing")
    assert cache.match_prefix([1]).payload == "one"
    assert cache.match_prefix([1], salt="a").payload == "salted"
    assert cache.match_prefix([1], salt="b").payload is None
    assert cache.match_prefix([]).payload == "nothing"
    assert cache.match_prefix([7, 7]).payload is None  # a full block that isn't cached
    cache.attach([2], "two")  # a fourth, of three at most
    assert cache.match_prefix([1]).payload is None
    assert cache.match_prefix([2]).payload == "two"
    cache.evict(3)
    assert cache.match_prefix([2]).payload == "two"
    cache.check()
    cache.clear()
    assert cache.match_prefix([2]).payload is None
    assert not PrefixCache(0, 2).attach([2], "two")


def test_a_payload_needs_all_full_blocks():
    cache = filled(8, (ABC, [0, 1, 2]))
    assert not cache.attach([*ABC, 7, 7], "next")
    assert not cache.attach(ABC, "next", salt="a")


def test_a_match_says_where_the_last_payload_is():
    """For engines that keep recurrent states: only what is before the last state can be gone on from."""
    cache = PrefixCache(16, 4)
    tokens = list(range(40))
    cache.insert_prefix(tokens, list(range(10)))
    assert cache.match_prefix(tokens).last_payload == (0, None)
    assert cache.attach(tokens[:8], "after 8") and cache.attach(tokens[:24], "after 24")
    assert cache.match_prefix(tokens).last_payload == (24, "after 24")
    assert cache.match_prefix(tokens[:23]).last_payload == (8, "after 8")
    assert cache.match_prefix([*tokens[:24], 7]).last_payload == (24, "after 24")
    assert cache.match_prefix(tokens[:26]).payload is None
    assert cache.match_prefix(tokens[:7]).last_payload == cache.match_prefix([]).last_payload == (0, None)
    assert cache.match_prefix(tokens, salt="bob").last_payload == (0, None)
    assert cache.insert_prefix([*tokens[:24], *range(90, 98)], [*range(6), 20, 21]).match.last_payload == (
        24,
        "after 24",
    )
    read = cache.match_prefix(tokens)
    assert read.last_payload == (24, "after 24")
    cache.attach(tokens[:24], None)
    assert cache.match_prefix(tokens).last_payload == (8, "after 8")
    with read:
        assert read.last_payload == (24, "after 24")  # as of the lookup, as all of a match that was read
    cache.evict(12)
    assert cache.match_prefix(tokens).last_payload == (0, None)


def test_a_payload_goes_with_its_block():
    class Payload:
        num_alive = 0

        def __init__(self) -> None:
            Payload.num_alive += 1

        def __del__(self) -> None:
            Payload.num_alive -= 1

    cache = filled(3, (ABC, [0, 1, 2]))
    cache.attach(ABC, Payload())
    cache.attach(ABC[:4], Payload())
    cache.attach(ABC[:4], Payload())
    assert Payload.num_alive == 2
    assert cache.evict(1) == [2]
    assert Payload.num_alive == 1
    cache.insert_prefix([9, 9, 8, 8, 7, 7], [4, 5, 6])
    assert Payload.num_alive == 0
    cache.insert_prefix(ABC, [0, 1, 2])
    assert cache.match_prefix(ABC).payload is None
    cache.attach(ABC, Payload())
    cache.clear()
    assert Payload.num_alive == 0


def test_a_payloads_finalizer_may_use_the_cache():
    """The finalizer finds a consistent cache, also if it drops another payload or if a match was the last owner."""
    seen: list[int] = []

    class Payload:
        def __del__(self) -> None:
            cache.check()
            seen.append(cache.evictable_count())
            seen.extend(cache.evict(1))

    cache = filled(3, (ABC, [0, 1, 2]))
    cache.attach(ABC, Payload())
    cache.attach(ABC[:4], Payload())
    cache.attach(ABC[:2], Payload())
    assert cache.insert_prefix([9, 9], [3])[:4] == (1, 1, [], [2])
    assert seen == [3, 1, 2, 0, 1, 3]  # each counts, and then evicts what the next one is attached to
    cache.check()
    seen.clear()
    cache.insert_prefix(ABC, [0, 1, 2])
    cache.attach(ABC, Payload())
    match = cache.match_prefix(ABC)
    assert cache.evict(1) == [2]
    assert seen == []
    with match:
        assert seen == [0]
        assert match.matched_kv_blocks == [0, 1]
        cache.check()


def test_a_payload_of_any_beginning_is_found():
    cache = PrefixCache(16, 4)
    tokens = list(range(40))
    new = [(6, "after 6", 0), (12, "after 12", 0), (19, "after 19", 0), (40, "after 40", 0)]
    result = cache.insert_prefix(tokens, range(10), payloads=new)
    assert result.unused_payloads == [] and result.match.payload == "after 40"
    match = cache.match_prefix([*tokens[:30], 7])
    assert match.last_payload == (19, "after 19")
    assert match.payloads == [(6, "after 6"), (12, "after 12"), (19, "after 19")]
    assert cache.match_prefix([*tokens[:18], 7]).last_payload == (12, "after 12")
    assert cache.match_prefix([*tokens[:6], 7, 7]).last_payload == (6, "after 6")
    assert cache.match_prefix([*tokens[:6], 7, 7], extra_keys=[(4, 6, "image")]).last_payload == (0, None)
    assert cache.match_prefix(tokens[:6]).payload == "after 6"


def test_a_payload_inside_a_span_is_of_the_whole_span():
    """What was computed of an image's first tokens depends on all of it."""
    cache = PrefixCache(16, 4)
    tokens, image = list(range(20)), [(5, 11, "image")]
    cache.insert_prefix(tokens, range(5), payloads=[(6, "inside", 0), (8, "at a block's end", 0)], extra_keys=image)
    assert cache.match_prefix(tokens, extra_keys=image).last_payload == (8, "at a block's end")
    assert cache.match_prefix([*tokens[:10], 7, 7], extra_keys=image).last_payload == (8, "at a block's end")
    assert cache.match_prefix(tokens[:7], extra_keys=[(5, 7, "image")]).last_payload == (0, None)
    assert cache.match_prefix(tokens).last_payload == (0, None)


def test_new_blocks_alone_are_inserted():
    cache = filled(8, (ABC, [0, 1, 2]))
    longer = [*ABC, 7, 7, 8, 8]
    assert cache.insert_prefix(longer, [5, 6], num_cached_tokens=6)[:4] == (5, 2, [], [])
    assert cache.insert_prefix(longer, [9], num_cached_tokens=8)[:4] == (5, 0, [9], [])
    assert cache.match_prefix(longer).matched_kv_blocks == [0, 1, 2, 5, 6]
    cache.evict(3)
    with pytest.raises(StaleHitError, match="expected num_cached_tokens=6 to be cached, got 4 tokens"):
        cache.insert_prefix(longer, [5, 6], num_cached_tokens=6)
    for number, message in [(3, "whole blocks of 2 tokens, got 3"), (12, "0 to 10"), (-2, "0 to 10")]:
        with pytest.raises(InvalidArgumentError, match=f"num_cached_tokens: expected .*{message}"):
            cache.insert_prefix(longer, [5, 6], num_cached_tokens=number)
    assert cache.query_match_len(longer) == 4


def test_blocks_and_payloads_share_one_budget_and_one_order_of_use():
    cache = PrefixCache(100, 2, max_bytes=20)
    state = {name: f"state of {name}" for name in "abc"}
    done = cache.insert_prefix([1, 1, 2, 2], [0, 1], block_bytes=2, payloads=[(4, state["a"], 6)])
    assert (done.evicted_kv_blocks, done.evicted_kv_blocks.payloads) == ([], [])
    cache.insert_prefix([3, 3], [2], block_bytes=2, payloads=[(2, state["b"], 6)])
    assert cache.inspect.num_bytes() == 18
    cache.match_prefix([1, 1, 2, 2])  # used last, with its payload
    done = cache.insert_prefix([4, 4, 5, 5], [3, 4], block_bytes=2, payloads=[(3, state["c"], 5)])
    assert (done.evicted_kv_blocks, done.evicted_kv_blocks.payloads) == ([2], [state["b"]])
    assert cache.match_prefix([1, 1, 2, 2, 9]).last_payload == (4, state["a"])
    assert cache.match_prefix([4, 4, 5, 9]).last_payload == (3, state["c"]) and cache.inspect.num_bytes() == 19
    done = cache.insert_prefix([1, 1, 2, 2, 6, 6], [5], num_cached_tokens=4, block_bytes=3)
    assert (done.evicted_kv_blocks, done.evicted_kv_blocks.payloads) == ([4], [])  # the last match ended before it
    assert cache.evict(num_bytes=4).payloads == [state["a"]]  # older than its blocks
    gone = cache.evict(1)
    assert (gone, gone.payloads) == ([3], [state["c"]])
    assert cache.evict(2, num_bytes=1) == [5, 1]
    assert (cache.inspect.num_bytes(), cache.clear()) == (2, [0])
    cache.check()


def test_what_is_larger_than_the_budget_is_not_taken():
    cache = PrefixCache(100, 2, max_bytes=10)
    cache.insert_prefix([1, 1], [0], block_bytes=4)
    done = cache.insert_prefix([2, 2, 3, 3, 4, 4], [1, 2, 3], block_bytes=4, payloads=[(6, "end", 1), (3, "large", 11)])
    assert done[:4] == (2, 2, [3], [0]) and done.unused_payloads == ["end", "large"]
    assert not cache.attach([2, 2], "payload", num_bytes=3)  # it would have to evict
    assert cache.attach([2, 2], "payload", num_bytes=2) and cache.inspect.num_bytes() == 10
    with cache.match_prefix([2, 2, 3, 3]) as held:
        done = cache.insert_prefix([5, 5], [6], block_bytes=1)
        assert (done.num_new_blocks, done.evicted_kv_blocks.payloads) == (1, ["payload"])  # blocks are held, not it
        assert held.last_payload == (2, "payload")
    cache.check()


def test_bytes_need_a_bound_and_a_bound_needs_the_order_of_use():
    plain, bound = PrefixCache(8, 2), PrefixCache(8, 2, max_bytes=9)
    for call in (
        lambda: PrefixCache(8, 2, max_bytes=9, eviction="slru"),
        lambda: PrefixCache(8, 2, max_bytes=-1),
        lambda: plain.insert_prefix(ABC, [0, 1, 2], block_bytes=1),
        lambda: plain.insert_prefix(ABC, [0, 1, 2], payloads=[(6, "x", 1)]),
        lambda: plain.attach([1], "x", num_bytes=1),
        lambda: plain.evict(num_bytes=1),
        lambda: bound.attach([1], "x"),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], payloads=[(6, "x", 0)]),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], payloads=[(6, "x", 1), (6, "y", 1)]),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], payloads=[(7, "x", 1)]),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], payloads=[(6, None, 1)]),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], payloads=[6]),
        lambda: bound.insert_prefix(ABC, [0, 1, 2], block_bytes=-1),
    ):
        with pytest.raises(InvalidArgumentError, match="expected"):
            call()
    assert plain.cached_block_count() == bound.cached_block_count() == 0


# Pins


def test_pins_keep_prefixes_and_nest():
    cache = filled(8, (ABC, [0, 1, 2]), ([9, 9], [3]))
    assert cache.pin_prefix(ABC[:4], "system prompt") == 4
    assert cache.pin_prefix([*ABC, 7]) == 6
    assert cache.pin_prefix([5, 5]) == 0
    assert cache.inspect.list_pinned() == [
        PinnedPrefix([1, 2, 3, 4], [0, 1], "system prompt"),
        PinnedPrefix(ABC, [0, 1, 2], None),
    ]
    assert cache.evict(9) == [3]
    assert cache.unpin_prefix(ABC) == 6  # the partial block makes no difference
    assert cache.unpin_prefix(ABC) == 0
    assert cache.evict(9) == [2]
    assert cache.unpin_prefix(ABC[:4], salt="a") == 0
    assert cache.unpin_prefix(ABC[:4]) == 4
    assert cache.evict(9) == [1, 0]
    assert cache.inspect.list_pinned() == []


def test_unpinning_undoes_the_last_pin_of_these_tokens():
    """Also when more of these tokens are cached by then."""
    cache = filled(8, (ABC[:2], [0]))
    assert cache.pin_prefix(ABC, "first") == 2
    cache.insert_prefix(ABC, [0, 1, 2], pin=True)
    assert [pin.description for pin in cache.inspect.list_pinned()] == ["first", None]
    assert cache.evictable_count() == 0
    assert cache.unpin_prefix(ABC) == 6
    assert cache.evictable_count() == 2
    assert cache.unpin_prefix(ABC) == 2
    assert cache.evictable_count() == 3


def test_keys_tell_pins_apart():
    cache = PrefixCache(8, 2)
    cache.insert_prefix(ABC, [0, 1, 2], pin=True, extra_keys=[(1, 3, "x")])
    assert cache.unpin_prefix(ABC) == cache.unpin_prefix(ABC, extra_keys=[(1, 3, "y")]) == 0
    assert cache.unpin_prefix(ABC, extra_keys=[(1, 3, "x")]) == 6


def test_pins_stay_within_their_budget():
    """So pins can't fill the cache, and the next insertion finds room."""
    cache = PrefixCache(4, 2)
    cache.insert_prefix([*ABC, 7, 7], [0, 1, 2, 3])
    assert cache.pin_prefix(ABC[:2]) == 2
    with pytest.raises(PinBudgetError, match="of at most 2 blocks together, got 3 more than the 1 that are pinned"):
        cache.pin_prefix(ABC)
    with pytest.raises(PinBudgetError, match="got 2 more than the 1 that are pinned"):
        cache.insert_prefix([9, 9, 8, 8], [4, 5], pin=True)
    assert cache.query_match_len([9, 9]) == 0
    assert cache.pin_prefix(ABC[:2], "again") == 2  # it counts for each pin
    with pytest.raises(PinBudgetError):
        cache.pin_prefix(ABC[:2])
    assert cache.unpin_prefix(ABC[:2]) == 2
    assert cache.insert_prefix([9, 9], [4], pin=True)[:4] == (1, 1, [], [3])
    cache.clear()
    assert cache.insert_prefix([9, 9, 8, 8], [4, 5], pin=True).num_cached_blocks == 2
    assert PrefixCache(100, 2, pin_budget=0.29)._pins._max_blocks == 29  # noqa: SLF001
    with pytest.raises(InvalidArgumentError, match="pin_budget: expected a share of the cache from"):
        PrefixCache(4, 2, pin_budget=2)


def test_clear_unpins_and_evicts_everything():
    cache = filled(8, (ABC, [0, 1, 2]), ([9, 9], [3]))
    cache.pin_prefix(ABC)
    cache.pin_prefix(ABC[:2])
    match = cache.match_prefix(ABC)
    with match, pytest.raises(BlockStateError, match="expected no match to be held, got 1"):
        cache.clear()
    assert len(cache.inspect.list_pinned()) == 2
    assert sorted(cache.clear()) == [0, 1, 2, 3]
    assert cache.cached_block_count() == cache.evictable_count() == cache.query_match_len(ABC) == 0
    assert cache.inspect.list_pinned() == []
    with match:  # nobody has read it
        assert match.match_length == 0
    cache.check()


def test_a_record_of_a_pin_can_be_pickled():
    cache = filled(8, (ABC, [0, 1, 2]))
    cache.pin_prefix(ABC)
    record = cache.inspect.list_pinned()[0]
    assert pickle.loads(pickle.dumps(record)) == record


# Against the reference model


class DataChooser:
    """Asks hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def choose(self, options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


def make_history(max_blocks: int, block_size: int, weak_hash: bool, max_bytes: int | None = None) -> PrefixHistory:
    options: dict[str, Any] = {"hash_algorithm": three_bit_hash} if weak_hash else {}
    if max_bytes is not None:
        options["max_bytes"] = max_bytes
    return PrefixHistory(max_blocks, block_size, pin_budget=0.75, **options)


class CacheMachine(RuleBasedStateMachine):
    weak_hash: bool

    @initialize(
        max_blocks=st.integers(1, 8),
        block_size=st.integers(1, 3),
        max_bytes=st.none() | st.integers(0, 24),
        data=st.data(),
    )
    def make(self, max_blocks: int, block_size: int, max_bytes: int | None, data: st.DataObject) -> None:
        self.history = make_history(max_blocks, block_size, self.weak_hash, max_bytes)
        for _ in range(3):
            self.history.new(DataChooser(data))

    @rule(data=st.data(), operation=st.sampled_from([op for op, weight in OPERATIONS for _ in range(weight)]))
    def do(self, data: st.DataObject, operation: Any) -> None:
        operation(self.history, DataChooser(data))

    @rule(data=st.data(), really=st.integers(0, 20))
    def clear(self, data: st.DataObject, really: int) -> None:
        if really == 20:  # seldom, or nothing would live long enough to be hit
            self.history.clear(DataChooser(data))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "history"):
            self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.end()


@pytest.mark.parametrize("weak_hash", [False, True])
def test_machine_agrees_with_the_reference_model(weak_hash):
    machine = type("Machine", (CacheMachine,), {"weak_hash": weak_hash})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50))


@pytest.mark.every(3)
@pytest.mark.parametrize("weak_hash", [False, True])
@pytest.mark.parametrize(
    ("max_blocks", "block_size", "max_bytes"),
    [(3, 2, None), (6, 2, None), (12, 1, 30), (7, 3, None), (12, 1, None), (6, 2, 14), (20, 2, 18), (7, 3, 12)],
)
def test_long_walks_agree_with_the_reference_model(max_blocks, block_size, max_bytes, weak_hash, met):
    history = make_history(max_blocks, block_size, weak_hash, max_bytes)
    chooser = RandomChooser(seed=max_blocks * 10 + block_size)
    operations = [operation for operation, weight in OPERATIONS for _ in range(weight)]
    for number in range(1, 2501):
        operation = chooser.choose(operations)
        with where(chooser.seed, number, operation):
            operation(history, chooser)
            if number % 300 == 0:
                history.clear(chooser)
            if chooser.integer(0, 2):  # not always: it lets go of what was left, so that other calls needn't
                history.check()
    history.end()
    met["walks"].add(history.met)


def test_the_long_walks_met_all_cases(met):
    least = {"hits": 4000, "payloads": 700, "stale": 260, "conflicts": 650, "evicting": 1750, "cut short": 1300}
    least |= {"too few evictable": 400, "unpinned": 380, "stale, of an insertion": 220, "held, of an insertion": 950}
    least |= {"dropped": 80, "beyond the pin budget": 280, "payloads of beginnings": 1900, "new blocks alone": 190}
    least |= {"payloads evicted alone": 140, "no room for a payload": 800}
    met["walks"].check(16, least)


# Threads


class HammeredEngine:
    """Memory of 40 blocks, each of which remembers the prefix that it was written for; and a smaller cache of it."""

    block_size = 4
    num_requests = 600

    def __init__(self) -> None:
        self.cache = PrefixCache(24, self.block_size, pin_budget=0.2)
        self.all_ids = [100 + 3 * i for i in range(40)]
        self.free = deque(self.all_ids)
        self.written: dict[int, list[int]] = {}
        self.num_hits = self.num_evicted = self.num_pins = self.num_refused = 0
        self.errors: list[BaseException] = []

    def prompt(self, random: Random) -> list[int]:
        system = [random.randrange(3)] * 8
        return system + [random.randrange(2) for _ in range(random.randrange(14))]

    def work(self, seed: int) -> None:
        random = Random(seed)
        try:
            for number in range(self.num_requests):
                self.serve(self.prompt(random))
                self.meddle(random, self.prompt(random))
                if number % 25 == 0:
                    self.cache.check()
        except BaseException as error:  # noqa: BLE001  # a thread's error is the test's
            self.errors.append(error)

    def serve(self, tokens: list[int]) -> None:
        """Run a request: read the cached blocks, write and insert the rest."""
        with self.cache.match_prefix(tokens) as match:
            ids = match.matched_kv_blocks
            assert match.payload in (None, tokens)
            self.read(ids, tokens)
            num_missing = len(tokens) // self.block_size - len(ids)
            own = self.take(num_missing)
            if len(own) < num_missing:
                self.free.extend(own)
                return
            for num_blocks, kv_block_id in enumerate(own, len(ids) + 1):
                self.written[kv_block_id] = tokens[: num_blocks * self.block_size]
            time.sleep(0)
            self.read([*ids, *own], tokens)
            with contextlib.ExitStack() as stack:
                with self.cache.exclusive():
                    result = self.cache.insert_prefix(tokens, array("q", [*ids, *own]))
                    stack.enter_context(result.match)
                time.sleep(0)
                cached = result.match.matched_kv_blocks
                assert len(cached) == result.num_cached_blocks
                self.read([*cached, *[*ids, *own][len(cached) :]], tokens)
        assert set(result.unused_kv_blocks) <= set(own)
        self.free.extend(result.unused_kv_blocks + result.evicted_kv_blocks)
        self.cache.attach(tokens, tokens)
        self.num_hits += bool(ids)
        self.num_evicted += len(result.evicted_kv_blocks)

    def read(self, ids: list[int], tokens: list[int]) -> None:
        for num_blocks, kv_block_id in enumerate(ids, 1):
            assert self.written[kv_block_id] == tokens[: num_blocks * self.block_size]

    def take(self, num_blocks: int) -> list[int]:
        own = []
        while len(own) < num_blocks:
            try:
                own.append(self.free.popleft())
            except IndexError:
                evicted = self.cache.evict(num_blocks - len(own))
                if not evicted:
                    return own
                self.free.extend(evicted)
        return own

    def meddle(self, random: Random, tokens: list[int]) -> None:
        """The other calls."""
        cache, kind = self.cache, random.randrange(8)
        if kind == 0:
            try:
                num_tokens = cache.pin_prefix(tokens, "by a thread")
            except PinBudgetError:  # of a long prompt, or while other threads have pins
                self.num_refused += 1
                return
            self.num_pins += bool(num_tokens)
            time.sleep(0)
            assert all(pin.description == "by a thread" for pin in cache.inspect.list_pinned())
            assert not num_tokens or cache.unpin_prefix(tokens)
        elif kind == 1:
            self.free.extend(cache.evict(random.randrange(4)))
        elif kind == 2:
            with cache.exclusive():
                matches = cache.match_prefix(tokens), cache.match_prefix(tokens[:8])
            assert matches[1].matched_kv_blocks == matches[0].matched_kv_blocks[:2]
        elif kind == 3:
            assert 0 <= cache.query_match_len(tokens) <= len(tokens)
            assert 0 <= cache.evictable_count() <= cache.max_blocks
        elif kind == 4:
            assert cache.cached_block_count() <= cache.max_blocks
            assert 0 <= cache.stats.hit_rate <= 1 and cache.stats.mean_match_length >= 0
            cache.inspect.contains_block(random.choice(self.all_ids))
        elif kind == 5:
            match = cache.match_prefix(tokens)
            length = match.match_length
            time.sleep(0)
            with contextlib.suppress(StaleHitError), match:
                assert match.match_length == length
                self.read(match.matched_kv_blocks, tokens)


def test_eight_threads_and_an_audit():
    engine = HammeredEngine()
    threads = [threading.Thread(target=engine.work, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert engine.errors == []
    assert not any(thread.is_alive() for thread in threads)
    cache = engine.cache
    cache.check()
    assert cache.inspect.list_pinned() == []
    assert cache.evictable_count() == cache.cached_block_count()
    cached = [kv_block_id for kv_block_id in engine.all_ids if cache.inspect.contains_block(kv_block_id)]
    assert sorted([*engine.free, *cached]) == engine.all_ids  # no id was lost, or is in two hands
    assert sorted(cache.clear()) == cached
    assert engine.num_hits > 200 and engine.num_evicted > 200
    assert engine.num_pins > 100 and engine.num_refused


def test_nobody_evicts_between_two_calls_that_are_exclusive():
    """While another thread evicts, a match that is entered right after its insertion holds all inserted blocks."""
    cache, stop, num_evictions = PrefixCache(64, 1), threading.Event(), [0]

    def evict() -> None:
        while not stop.is_set():
            cache.evict(64)
            num_evictions[0] += 1

    def insert(number: int) -> PrefixMatch:
        return cache.insert_prefix([number] * 8, range(8 * number, 8 * number + 8)).match

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        for number in range(20):
            with cache.exclusive(), cache.exclusive():
                match = insert(number)
                time.sleep(0.002)
                match.__enter__()
            wait_for(lambda after=num_evictions[0] + 2: num_evictions[0] >= after)
            assert match.match_length == 8
            assert cache.query_match_len([number] * 8) == 8
            match.__exit__()
            match = insert(100 + number)
            wait_for(lambda after=num_evictions[0] + 2: num_evictions[0] >= after)
            with match:  # what there is to guard against
                assert match.match_length == 0
    finally:
        stop.set()
        thread.join(60)
    cache.check()
    assert cache.evictable_count() == cache.cached_block_count()


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0)


def test_leaving_a_match_waits_for_nobody():
    """Even while another thread is in a call, here in a payload's finalizer, leaving doesn't wait."""
    is_inside, has_left = threading.Event(), threading.Event()
    seen: list[bool] = []

    class Payload:
        def __del__(self) -> None:
            is_inside.set()
            seen.append(has_left.wait(60))

    cache = filled(8, (ABC, [0, 1, 2]), ([9, 9], [3]))
    cache.attach([9, 9], Payload())
    match = cache.match_prefix(ABC)
    with match:
        thread = threading.Thread(target=cache.evict, args=(1,))
        thread.start()
        assert is_inside.wait(60)
    has_left.set()
    thread.join(60)
    assert seen == [True]
    assert cache.evictable_count() == 3
    cache.check()


@pytest.mark.parametrize("kind", ["I", "i"])
def test_a_match_and_a_pin_have_tokens_of_their_own(kind):
    cache = filled(8, (ABC, [0, 1, 2]))
    tokens, other = array(kind, ABC), array(kind, [token + 100 for token in ABC])
    match = cache.match_prefix(tokens)
    assert cache.pin_prefix(tokens) == 6
    cache.attach(tokens, "state")
    tokens[:] = other
    cache.insert_prefix(list(other), [3, 4, 5])
    with match:
        assert (match.matched_tokens, match.matched_kv_blocks) == (ABC, [0, 1, 2])
    cache.evict(3)  # the cached set has changed, so entering looks the tokens up again
    with match:
        assert (match.matched_tokens, match.matched_kv_blocks) == (ABC, [0, 1, 2])
    assert cache.inspect.list_pinned()[0].token_ids == ABC
    assert cache.unpin_prefix(ABC) == 6
    assert cache.match_prefix(ABC).payload == "state"
    assert cache.match_prefix(other).payload is None


@pytest.mark.parametrize("ids", [{0, 1, 2}, {0: 5, 1: 6, 2: 7}])
def test_block_ids_need_an_order(ids):
    cache = PrefixCache(8, 2)
    with pytest.raises(InvalidArgumentError, match=r"kv_block_ids: expected an iterable of ints, .*, in order, got"):
        cache.insert_prefix(ABC, ids)
    assert cache.cached_block_count() == 0
