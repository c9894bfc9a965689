"""Routers: which prefixes can be gone on from, according to events."""

import pytest

from kvblocks import FullAttention, KVCacheManager, RecurrentState, Sequence

pytest.importorskip("msgspec")

from kvblocks.errors import InvalidArgumentError
from kvblocks.events import BlocksHit, EventOptions
from kvblocks.wire.codecs import BlockStored, EventBatch, decode, get_codec
from kvblocks.wire.convert import Converter
from kvblocks.wire.holdings import Holdings, changes_of
from kvblocks.wire.mirror import EventMirror


def read(manager: KVCacheManager) -> EventBatch:
    """What a router gets of a manager's events."""
    return decode(get_codec("vllm").encode(EventBatch(0.0, Converter().convert(manager.take_events()))))


def test_events_tell_usable_prefixes_from_kv_that_nobody_can_go_on_from() -> None:
    groups = [FullAttention(4), RecurrentState(4, 2, 3)]
    manager = KVCacheManager(64, groups=groups, enable_events=True)
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 20)
    manager.allocate_slots(sequence, 20)
    manager.states.take_copies()
    manager.allocate_slots(sequence)
    names = manager.inspect.block_hashes(sequence)
    held = Holdings()
    held.apply(changes_of(read(manager)))
    assert held.find(names, 0, 0, None) == 10
    assert held.find(names, 0, 0, None, 1) == 5
    assert held.find(names[:4], 0, 0, None, 1) == 0
    manager.evict_blocks(manager.get_computed_blocks(Sequence("b", range(40))).checkpoint_block_ids)
    held.apply(changes_of(read(manager)))
    assert (held.find(names, 0, 0, None), held.find(names, 0, 0, None, 1)) == (10, 0)


def test_a_hit_says_which_state_it_goes_on_from() -> None:
    groups = [RecurrentState(4, 2, 3), FullAttention(4)]
    manager = KVCacheManager(64, groups=groups, enable_events=EventOptions(hits=True))
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 20)
    manager.allocate_slots(sequence, 20)
    manager.states.take_copies()
    manager.allocate_slots(sequence)
    names = tuple(manager.inspect.block_hashes(sequence))
    manager.take_events()
    again = Sequence("b", range(40))
    manager.allocate_slots(again, 4, manager.get_computed_blocks(again))
    assert manager.take_events() == [
        BlocksHit(names[:5], 1, "GPU", "b"),
        BlocksHit(names[4:5], 0, "GPU", "b"),
    ]


def serve(*marks: int) -> tuple[list[bytes], bytes, EventBatch]:
    """The names of ten blocks, what a worker publishes that has saved states at `marks`, and the same read again."""
    manager = KVCacheManager(64, groups=[FullAttention(4), RecurrentState(8, 2, 3)], enable_events=True)
    sequence = Sequence("a", range(40))
    for mark in (*marks, 40):
        manager.states.mark(sequence, mark)
        manager.allocate_slots(sequence, mark - sequence.num_computed_tokens)
        if mark in marks:
            manager.states.take_copies()
    batch = EventBatch(0.0, Converter().convert(manager.take_events()))
    payload = get_codec("vllm").encode(batch)
    return list(manager.inspect.block_hashes(sequence)), payload, decode(payload)


def test_a_mirror_prefers_the_worker_that_can_go_on_furthest() -> None:
    mirror = EventMirror()
    names, first, _ = serve(8, 32)
    for worker, payload in (("far", first), ("near", serve(16)[1]), ("none", serve()[1])):
        mirror.add(worker, can_ask=False)
        mirror.receive(worker, 0, payload)
    assert {mirror.find(worker, names) for worker in mirror.workers} == {10}
    assert {holder.worker: found for holder, found in mirror.overlaps(names, states=1).items()} == {
        "far": 8,
        "near": 4,
        "none": 0,
    }
    assert mirror.best(names, states=1) == (("far", 0), 8)
    assert mirror.best(names[:7], states=1) == (("near", 0), 4)
    assert mirror.find("far", names[:1], states=1) == 0
    assert mirror.find("far", names, states=1, medium="CPU") == 0
    assert mirror.best(names[:1], states=1) is None


def test_a_checkpoint_is_one_block_of_the_kind_that_vllm_knows() -> None:
    batch = serve(24)[2]
    (state,) = [event for event in batch.events if isinstance(event, BlockStored) and event.group_idx == 1]
    assert (state.kv_cache_spec_kind, state.kv_cache_spec_sliding_window) == ("mamba", None)
    assert (len(state.block_hashes), state.block_size, state.token_ids) == (1, 8, [*range(16, 24)])
    kv = [event for event in batch.events if isinstance(event, BlockStored) and event.group_idx == 0]
    assert {event.kv_cache_spec_kind for event in kv} == {"full_attention"}
    names = [name for event in kv for name in event.block_hashes]
    assert state.block_hashes[0] == names[5]
    assert state.parent_block_hash == names[3]


def test_sglangs_events_have_no_place_for_states() -> None:
    manager = KVCacheManager(64, groups=[FullAttention(4), RecurrentState(4, 2, 3)], enable_events=True)
    manager.allocate_slots(Sequence("a", range(40)))
    with pytest.raises(InvalidArgumentError, match="SGLang's events have no groups"):
        Converter("sglang").convert(manager.take_events())
