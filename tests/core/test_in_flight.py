"""A hit reports tokens that another sequence is about to compute."""

from typing import Any

import pytest

from kvblocks import KVCacheManager, Sequence
from kvblocks.core.change import Change
from kvblocks.core.in_flight import InFlight
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.by_name import get_hash_scheme


def look_up(manager: KVCacheManager, tokens: Any, **keys: Any) -> tuple[int, int, Any]:
    hit = manager.get_computed_blocks(Sequence("probe", tokens, **keys))
    pending = hit.pending_sequence
    return hit.num_tokens, hit.pending_tokens, None if pending is None else pending.sequence_id


def test_a_chunked_prefill_tells_how_much_of_a_prompt_it_will_compute() -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(100))
    manager.allocate_slots(first, 10)
    assert look_up(manager, range(100)) == (8, 92, "first")
    assert look_up(manager, [*range(50), *range(900, 950)]) == (8, 40, "first")
    assert look_up(manager, [*range(10), 999, 999]) == (8, 0, None)
    manager.allocate_slots(first, 60)
    assert look_up(manager, range(100)) == (68, 32, "first")
    manager.allocate_slots(first)
    assert look_up(manager, range(100)) == (99, 0, None)


def test_long_prompts_that_part_late() -> None:
    manager = KVCacheManager(1000, 4)
    first = Sequence("first", range(3000))
    manager.allocate_slots(first, 1)
    for parts_at in (1, 257, 600, 1024, 1999, 2999):
        tokens = [*range(parts_at), 5000, *range(parts_at + 1, 3000)]
        assert look_up(manager, tokens)[1] == parts_at // 4 * 4


def test_it_waits_for_whoever_computes_most() -> None:
    manager = KVCacheManager(64, 4)
    short, long = Sequence("short", range(30)), Sequence("long", range(60))
    for sequence in (short, long):
        manager.allocate_slots(sequence, 2, hit=manager.get_computed_blocks(sequence))
    assert look_up(manager, range(61)) == (0, 60, "long")
    manager.free(long)
    assert look_up(manager, range(61)) == (0, 28, "short")


@pytest.mark.parametrize("keys", [{"salt": "a"}, {"lora": "a"}, {"extra_keys": [(9, 10, "image")]}])
def test_keys_must_agree(keys: dict[str, Any]) -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(40), **keys)
    manager.allocate_slots(first, 4)
    assert look_up(manager, range(40), **keys) == (4, 36, "first")
    assert look_up(manager, range(40))[1] == (4 if "extra_keys" in keys else 0)


def test_what_will_not_be_cached_is_not_waited_for() -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(40))
    manager.allocate_slots(first, 8)
    manager.reset_prefix_cache()
    assert look_up(manager, range(40)) == (0, 0, None)
    manager.renew(first)
    assert look_up(manager, range(40)) == (8, 32, "first")
    manager.abort(first, 8)
    assert look_up(manager, range(40)) == (8, 0, None)
    uncached = KVCacheManager(64, 4, enable_caching=False)
    uncached.allocate_slots(Sequence("first", range(40)), 8)
    assert look_up(uncached, range(40)) == (0, 0, None)


def test_a_detached_sequence_is_not_waited_for() -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(40))
    manager.allocate_slots(first, 8)
    second = Sequence("second", range(60))
    manager.allocate_slots(second, 2, hit=manager.get_computed_blocks(second))
    manager.abort(first, 0)  # takes the blocks that the second hit from the cache
    assert look_up(manager, range(60)) == (0, 0, None)


def test_truncated_and_forked_prefills() -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(20))
    manager.allocate_slots(first, 6)
    first.append_tokens(range(20, 40))
    manager.fork(first, "child")
    assert look_up(manager, range(40))[1] == 36
    manager.truncate(first, 24)
    assert look_up(manager, range(40)) == (4, 36, "child")


def test_nobody_waits_for_itself() -> None:
    manager = KVCacheManager(64, 4)
    first = Sequence("first", range(40))
    hit = manager.get_computed_blocks(first)
    manager.allocate_slots(first, 8, hit=hit)
    assert (hit.pending_tokens, hit.pending_sequence) == (0, None)


def test_it_forgets_who_has_finished() -> None:
    manager = KVCacheManager(64, 4)
    in_flight = InFlight(PrefixIndex(4, get_hash_scheme("xxh3_128")), Change("manager"))
    one, other = Sequence(1, range(8)), Sequence(2, range(8))
    manager.allocate_slots(one, 3)
    in_flight.note(one)
    in_flight.note(other)
    assert len(in_flight.sequences) == 2
    manager.allocate_slots(one)
    in_flight.note(one)
    in_flight.drop(other)
    assert len(in_flight.sequences) == 0


def test_it_speaks_of_now_when_the_sequence_got_more_tokens_since_the_lookup() -> None:
    """Tokens that are cached by now aren't pending any more, though the hit is older."""
    manager = KVCacheManager(64, 4)
    ahead = Sequence("ahead", range(40))
    manager.allocate_slots(ahead, 12)
    behind = Sequence("behind", range(10))
    hit = manager.get_computed_blocks(behind)
    assert (hit.num_tokens, hit.pending_tokens) == (8, 0)  # its third block isn't full
    behind.append_tokens(range(10, 20))
    assert hit.pending_tokens == 8  # two blocks: the third is cached
    manager.allocate_slots(ahead, 4)
    assert hit.pending_tokens == 4
    manager.allocate_slots(ahead, 4)
    assert (hit.pending_tokens, hit.pending_sequence) == (0, None)
    assert manager.allocate_slots(behind, hit=hit) is not None
    manager.check()


WAYS: dict[str, Any] = {
    "allocate_slots": lambda manager, sequence: manager.allocate_slots(sequence, delay_cache_blocks=True),
    "append_slots": lambda manager, sequence: manager.append_slots(sequence, [3], delay_cache_blocks=True),
    "append_step": lambda manager, sequence: manager.append_step([sequence], [3], delay_cache_blocks=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_delayed_call_is_told_to_others(way: str) -> None:
    manager, sequence = KVCacheManager(8, 4, debug=True), Sequence("a", range(3))
    manager.allocate_slots(sequence)
    if way == "allocate_slots":
        sequence.append_tokens([3])
    WAYS[way](manager, sequence)
    hit = manager.get_computed_blocks(Sequence("b", range(4)))
    assert (hit.pending_tokens, hit.pending_sequence) == (4, sequence)
    manager.cache_blocks(sequence, 4)
    assert (hit.pending_tokens, num_in_flight(manager)) == (0, 0)


def test_what_is_rewound_will_be_computed_anew() -> None:
    manager, sequence = KVCacheManager(8, 4, debug=True), Sequence("a", range(8))
    manager.allocate_slots(sequence)
    hit = manager.get_computed_blocks(Sequence("b", range(8)))
    manager.rewind(sequence, 4)
    assert (hit.pending_tokens, hit.pending_sequence) == (4, sequence)
    child = manager.fork(sequence, "child")
    manager.free(sequence)
    assert hit.pending_sequence is child
    manager.allocate_slots(child)
    assert (hit.pending_tokens, num_in_flight(manager)) == (0, 0)


def test_going_back_to_what_is_written_leaves_nothing_in_flight() -> None:
    manager, sequence = KVCacheManager(8, 4, debug=True), Sequence("a", range(4))
    manager.allocate_slots(sequence)
    manager.append_slots(sequence, [4, 5], delay_cache_blocks=True)
    assert num_in_flight(manager) == 1
    manager.truncate(sequence, 4)
    assert num_in_flight(manager) == 0


def num_in_flight(manager: KVCacheManager) -> int:
    return len(manager._in_flight.sequences)  # noqa: SLF001
