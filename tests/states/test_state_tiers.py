"""Checkpoints in tiers, one rule at a time: a state moves as a whole, and no lookup ends where it is missing."""

from typing import Any

import pytest
from wire.hints_help import make as make_executor
from wire.hints_help import say

from kvblocks import (
    BlockRemoved,
    BlockStored,
    EventOptions,
    FullAttention,
    KVCacheManager,
    RecurrentState,
    Sequence,
    SequenceStateError,
    StaleHitError,
    StateCopy,
    Tier,
)
from kvblocks.tiers.disk import DiskStore

PROMPT = range(40)  # ten blocks of four tokens, and a checkpoint of three blocks after 36 tokens
LATER = range(44)
BYTES = 64


def make(*tiers: Tier, num_blocks: int = 64, **options: Any) -> KVCacheManager:
    groups = [FullAttention(4), RecurrentState(4, 4, 3)]
    below = tiers or (Tier("host", 256, BYTES),)
    return KVCacheManager(num_blocks, groups=groups, tiers=below, debug=True, **options)


def compute(manager: KVCacheManager, sequence: Sequence) -> Sequence:
    """Compute a prompt, or the rest of one, with all the cuts that the manager asks for."""
    hit = None if sequence.is_allocated else manager.get_computed_blocks(sequence)
    manager.states.take_copies()
    while sequence.num_computed_tokens < sequence.num_tokens:
        start = sequence.num_computed_tokens if hit is None else hit.num_tokens
        end = manager.states.next_cut(sequence, sequence.num_tokens, hit)
        assert manager.allocate_slots(sequence, end - start, hit) is not None
        manager.states.take_copies()
        hit = None
    return sequence


def settle(manager: KVCacheManager, *, fails: Any = ()) -> tuple[list[Any], list[Any]]:
    """Carry out all transfers until there are none. Those with numbers in `fails` fail. Returns them, and the loads."""
    taken: list[Any] = []
    ended: list[Any] = []
    while found := manager.tiers.take_transfers():
        for transfer in found:
            ended += manager.tiers.complete(transfer, len(taken) not in fails)
            taken.append(transfer)
    return taken, ended


def spill(manager: KVCacheManager) -> None:
    """Have everything be evicted from the device."""
    crowd = Sequence("crowd", range(1000, 1000 + 4 * manager.num_free_blocks))
    assert manager.allocate_slots(crowd) is not None
    manager.abort(crowd, 0)
    assert not any(block.is_cached for block in manager.blocks if not block.ref_cnt)


def stored(*tiers: Tier, **options: Any) -> KVCacheManager:
    """A manager whose tiers have PROMPT and its checkpoint, and whose device has nothing."""
    manager = make(*tiers, **options)
    first = compute(manager, Sequence("first", PROMPT))
    settle(manager)
    manager.free(first)
    settle(manager)
    spill(manager)
    return manager


def look_up(manager: KVCacheManager, tokens: Any = LATER) -> tuple[Sequence, Any, Any]:
    sequence = Sequence("later", tokens)
    hit = manager.get_computed_blocks(sequence)
    return sequence, hit, manager.tiers.find(hit)


def ends(manager: KVCacheManager, tokens: Any = LATER) -> list[int]:
    """Where a sequence of these tokens may go on, with loads."""
    return [load.first_token + load.num_tokens for load in look_up(manager, tokens)[2]]


def test_a_load_brings_one_checkpoint_whole_and_then_the_slot_is_restored() -> None:
    manager = stored()
    sequence, hit, loads = look_up(manager)
    assert (hit.num_tokens, [(load.num_tokens, load.num_bytes) for load in loads]) == (0, [(36, 12 * BYTES)])
    before = manager.states.stats
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    assert manager.states.take_copies() == ([], []), "there is nothing in the slot yet"
    (transfer,), (loaded,) = settle(manager)
    assert (len(transfer.slots), loaded.num_tokens, loaded.is_whole) == (12, 36, True)
    pages = tuple(transfer.block_ids[9:])
    assert manager.states.take_copies() == ([StateCopy("restore", 36, sequence.state_slot or 0, -1, pages)], [])
    assert manager.states.stats.num_restored == before.num_restored + 1
    other = manager.get_computed_blocks(Sequence("other", LATER))
    assert (other.num_tokens, other.checkpoint_block_ids) == (36, pages), "the device has it again"


def test_an_exact_repeat_and_a_shorter_prompt_find_only_what_they_can_go_on_from() -> None:
    manager = stored()
    assert (ends(manager, PROMPT), ends(manager, range(37)), ends(manager, range(36))) == ([36], [36], [])


def test_where_the_device_has_the_kv_only_the_state_is_loaded() -> None:
    manager = make()
    manager.free(compute(manager, Sequence("first", PROMPT)))
    settle(manager)
    (page, *_) = manager.get_computed_blocks(Sequence("probe", LATER)).checkpoint_block_ids  # type: ignore[attr-defined]
    manager._pool.uncache([manager.blocks[page]])  # noqa: SLF001  # as if it were evicted
    sequence, hit, loads = look_up(manager)
    assert (hit.num_tokens, hit.num_matched_tokens, [load.num_bytes for load in loads]) == (0, 40, [3 * BYTES])
    manager.tiers.allocate(sequence, hit, loads)
    (transfer,), (loaded,) = settle(manager)
    assert (len(transfer.slots), loaded.num_tokens) == (3, 36)
    assert manager.states.take_copies()[0][0].block_ids == tuple(transfer.block_ids)


def test_a_state_that_turns_out_bad_is_forgotten_below_and_its_kv_is_not() -> None:
    manager = make()
    manager.free(compute(manager, Sequence("first", PROMPT)))
    settle(manager)
    (page, *_) = manager.get_computed_blocks(Sequence("probe", LATER)).checkpoint_block_ids  # type: ignore[attr-defined]
    manager.evict_blocks([page])
    (tier,) = manager.tiers
    assert (ends(manager), tier.num_cached_blocks) == ([], 10)


def test_a_load_that_fails_in_part_goes_back_to_the_hit_and_its_state() -> None:
    for failing in (0, 2, 3):
        manager = stored(Tier("host", 256, BYTES, max_transfer_blocks=2))
        manager.free(compute(manager, Sequence("short", range(20))))
        sequence, hit, loads = look_up(manager)
        assert (hit.num_tokens, [load.num_tokens for load in loads]) == (16, [20])
        free = manager.num_free_blocks
        assert manager.tiers.allocate(sequence, hit, loads) is not None
        _, (loaded,) = settle(manager, fails=[failing])
        assert (loaded.num_tokens, loaded.is_whole, sequence.num_computed_tokens) == (16, False, 16)
        before, _ = manager.states.take_copies()
        assert [(copy.kind, copy.position, copy.block_ids) for copy in before] == [
            ("restore", 16, hit.checkpoint_block_ids)
        ]
        assert ends(manager) in ([], [36])
        manager.free(compute(manager, sequence))
        assert manager.num_free_blocks >= free


def test_a_sequence_that_gives_up_after_a_reset_still_has_the_state_of_its_hit() -> None:
    manager = stored()
    manager.free(compute(manager, Sequence("short", range(20))))
    sequence, hit, loads = look_up(manager)
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    manager.reset_prefix_cache()
    assert manager.tiers.give_up(sequence) == 16
    (copy,), _ = manager.states.take_copies()
    assert (copy.kind, copy.position, copy.block_ids) == ("restore", 16, hit.checkpoint_block_ids)


def test_a_store_that_moves_in_part_answers_no_hit_without_its_state() -> None:
    manager = make(Tier("host", 256, BYTES, max_transfer_blocks=4))
    manager.free(compute(manager, Sequence("first", PROMPT)))
    moved = 0
    while found := manager.tiers.take_transfers():
        for transfer in found:
            parts = [identity.column for identity in transfer.identities() if identity.column]
            manager.tiers.complete(transfer, ok=not parts or parts[-1] != 3)
            moved += bool(parts)
    spill(manager)
    assert moved and (ends(manager), next(iter(manager.tiers)).num_cached_blocks) == ([], 10)


def test_a_checkpoint_moves_in_one_job_however_little_room_there_is() -> None:
    manager = make(num_blocks=24)  # stores hold at most three blocks at once
    manager.free(compute(manager, Sequence("first", PROMPT)))
    jobs: dict[int, list[int]] = {}
    number = 0
    while found := manager.tiers.take_transfers():
        for transfer in found:
            jobs[number] = [identity.column for identity in transfer.identities()]
            manager.tiers.complete(transfer, ok=True)
            number += 1
    assert [columns for columns in jobs.values() if any(columns)] == [[1, 2, 3]]


def test_a_tier_without_room_for_a_state_stores_the_kv_alone() -> None:
    manager = make(Tier("host", 2, BYTES))
    manager.free(compute(manager, Sequence("first", PROMPT)))
    settle(manager)
    spill(manager)
    assert ends(manager) == [] and not manager.tiers.is_busy


def test_what_is_evicted_below_is_evicted_as_a_whole() -> None:
    manager = stored(Tier("host", 13, BYTES))
    assert ends(manager) == [36]
    manager.free(compute(manager, Sequence("other", range(500, 505))))  # one more block of KV, and a checkpoint
    settle(manager)
    (tier,) = manager.tiers
    assert ends(manager) == [] and tier.num_moving_blocks == 0
    manager.check()


def test_an_abort_takes_back_what_a_tier_has_of_the_step() -> None:
    manager = make(Tier("host", 256, BYTES, store="computed"))
    sequence = Sequence("first", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    manager.allocate_slots(sequence, 36, hit)
    manager.states.take_copies()
    settle(manager)
    assert ends(manager) == [] and next(iter(manager.tiers)).num_cached_blocks == 12
    manager.abort(sequence, 0)
    assert next(iter(manager.tiers)).num_cached_blocks == 0


def test_an_abort_takes_back_a_state_whose_kv_the_tier_has_from_an_earlier_time() -> None:
    manager = stored(Tier("host", 256, BYTES, store="computed"))
    pool = manager._transfers.pools[0]  # type: ignore[union-attr]  # noqa: SLF001
    (checkpoint,) = pool.index.attached.checkpoints.all()
    pool.drop(checkpoint.blocks[:1])
    compute(manager, Sequence("filler", range(600, 620)))  # so that the next one gets other blocks than the first
    settle(manager)
    again = Sequence("again", PROMPT)
    manager.allocate_slots(again, 36, manager.get_computed_blocks(again))
    manager.states.take_copies()
    settle(manager)
    assert pool.index.attached.checkpoints.num_blocks == 2 * 3
    manager.abort(again, 0)
    assert ends(manager) == [], "the step that was to write this state died"
    assert len(pool.match(memoryview(again.tokens), None, 10)) == 10, "the tier's KV is good"
    manager.check()


def test_a_load_whose_state_has_left_the_tier_is_stale() -> None:
    manager = stored()
    sequence, hit, loads = look_up(manager)
    pool = manager._transfers.pools[0]  # type: ignore[union-attr]  # noqa: SLF001
    (checkpoint,) = pool.index.attached.checkpoints.all()
    pool.drop(checkpoint.blocks[1:2])
    with pytest.raises(StaleHitError):
        manager.tiers.allocate(sequence, hit, loads)
    assert not sequence.is_allocated and manager.states.num_free_slots == 4


def test_a_fork_of_a_loading_sequence_waits_for_the_same_state() -> None:
    manager = stored()
    sequence, hit, loads = look_up(manager)
    manager.tiers.allocate(sequence, hit, loads)
    child = manager.fork(sequence, "child")
    settle(manager)
    before, _ = manager.states.take_copies()
    assert [(copy.kind, copy.position) for copy in before] == [("restore", 36)] * 2
    assert {copy.slot for copy in before} == {sequence.state_slot, child.state_slot}
    manager.free(sequence)
    manager.free(child)
    later = Sequence("behind", range(50))
    hit = manager.get_computed_blocks(later)
    assert hit.num_tokens == 36


def test_a_fork_with_slots_behind_its_loads_is_refused() -> None:
    manager = stored()
    sequence, hit, loads = look_up(manager)
    manager.tiers.allocate(sequence, hit, loads, 4)
    with pytest.raises(SequenceStateError, match="end of its loads, at token 36"):
        manager.fork(sequence, "child")
    assert manager.states.num_free_slots == 3


def test_quotas_of_a_tier_count_the_slots_of_checkpoints() -> None:
    manager = make()
    manager.tiers.set_quota("host", "s", 100)
    manager.free(compute(manager, Sequence("first", PROMPT, salt="s")))
    settle(manager)
    assert [usage.num_cached_blocks for usage in manager.tiers.quotas("host")] == [13]
    assert manager.forget_salt("s") == 26


def test_events_tell_which_checkpoints_a_tier_has() -> None:
    manager = stored(Tier("host", 256, BYTES), enable_events=EventOptions(tiers=True))
    events = [event for event in manager.take_events() if getattr(event, "medium", "") == "CPU"]
    told = [event for event in events if isinstance(event, BlockStored) and event.group_idx == 1]
    assert [(event.kind, len(event.block_hashes), len(event.block_ids)) for event in told] == [("mamba", 1, 3)]
    manager.tiers.set_quota("host", None, 0)
    manager.forget_salt(None)
    gone = [event for event in manager.take_events() if isinstance(event, BlockRemoved) and event.group_idx == 1]
    assert [event.medium for event in gone if event.medium == "CPU"] == ["CPU"]


def test_a_pin_holds_the_checkpoint_that_a_load_brought() -> None:
    manager = stored()
    pin = manager.pins.pin(range(36))
    assert (pin.num_held_blocks, pin.num_wanted_blocks) == (0, 12)
    sequence, hit, loads = look_up(manager)
    manager.tiers.allocate(sequence, hit, loads)
    settle(manager)
    manager.states.take_copies()
    manager.free(sequence)
    assert pin.num_held_blocks == 12
    spill(manager)
    assert manager.get_computed_blocks(Sequence("again", LATER)).num_tokens == 36


def test_a_prefetch_brings_the_state_too_and_leaves_the_last_slot() -> None:
    manager = stored(num_blocks=96)
    executor = make_executor(manager, max_prefetch_share=0.5)
    free = manager.num_free_blocks
    answer = say(executor, "prefetch", token_ids=[*PROMPT])
    assert (answer["outcome"], answer["num_loading_blocks"], manager.states.num_free_slots) == ("clipped", 9, 3)
    (load,) = executor._prefetches.loads  # noqa: SLF001
    assert free - manager.num_free_blocks == 12 <= load.num_held_blocks
    settle(manager)
    executor.step(1.0)
    hit = manager.get_computed_blocks(Sequence("later", LATER))
    assert (hit.num_tokens, manager.states.num_free_slots, manager.states.take_copies()) == (36, 4, ([], []))
    spill(manager)
    for number in range(3):
        compute(manager, Sequence(number, range(number, number + 5)))
    assert say(executor, "prefetch", token_ids=[*PROMPT])["outcome"] == "deferred"
    assert manager.states.num_free_slots == 1


def page(identity: Any) -> bytes:
    """What a block of the device holds in these tests: a text that is its identity's."""
    return identity.digest() * (BYTES // 32)


def open_disk(folder: Any) -> DiskStore:
    return DiskStore(folder, fingerprint=bytes(32), num_block_bytes=BYTES, block_size=4, max_bytes=2**22)


def test_a_disk_keeps_states_with_their_identities_over_a_restart(tmp_path: Any) -> None:
    tier = Tier("disk", 100, BYTES, is_persistent=True)
    with open_disk(tmp_path / "kv") as disk:
        manager = make(tier)
        manager.free(compute(manager, Sequence("first", PROMPT)))
        while found := manager.tiers.take_transfers():
            for transfer in found:
                identities = transfer.identities()
                disk.write(transfer.slots, identities, b"".join(map(page, identities)))
                manager.tiers.complete(transfer, ok=True)
        disk.remember(manager.tiers.take_changes()["disk"])
        disk.sync()
    with open_disk(tmp_path / "kv") as disk:
        manager = make(tier)
        remembered = disk.remembered()
        assert [identity.column for _, identity in remembered if identity.column] == [1, 2, 3]
        assert manager.tiers.restore("disk", remembered) == 13
        sequence, hit, loads = look_up(manager)
        assert manager.tiers.allocate(sequence, hit, loads) is not None
        (transfer,) = manager.tiers.take_transfers()
        out = bytearray(BYTES * len(transfer.slots))
        assert disk.read(transfer.slots, transfer.identities(), out) == 12
        assert out == b"".join(map(page, transfer.identities())), "each part is its own"
        (loaded,) = manager.tiers.complete(transfer, ok=True)
        assert loaded.num_tokens == 36 and manager.states.take_copies()[0][0].kind == "restore"
    manager = make(tier)
    assert manager.tiers.restore("disk", [pair for pair in remembered if pair[1].column != 2]) == 10
    assert ends(manager) == [], "a part is lost"
    assert len(manager.tiers.take_changes()["disk"]) == 2, "and so the others are"
    manager.check()


def test_where_a_prompt_parts_from_what_only_a_tier_has_its_state_is_saved() -> None:
    """The second such prompt finds K and V in the tier, and no state in reach. The third one begins where they part."""
    manager = stored()
    parted = [*range(24), *range(500, 516)]
    sequence, hit, loads = look_up(manager, parted)
    assert (hit.num_tokens, hit.num_matched_tokens, loads) == (0, 0, [])
    assert manager.states.next_cut(sequence, 40, hit) == 24
    assert manager.allocate_slots(sequence, 24, hit) is not None
    assert [copy.position for copy in manager.states.take_copies()[1]] == [24]
    third = Sequence("third", [*range(24), 7, 8])
    assert manager.get_computed_blocks(third).num_tokens == 24


def test_behind_a_load_chunks_end_where_the_state_is_to_be_saved() -> None:
    """Also where the sequence parts from K and V that the tier has behind the load."""
    manager = stored()
    sequence, hit, loads = look_up(manager, range(60))
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    assert settle(manager)[1][0].num_tokens == sequence.num_computed_tokens == 36
    assert manager.states.next_cut(sequence, 60) == 40, "the tier has ten blocks"
    assert manager.allocate_slots(sequence, 4) is not None
    assert [copy.position for copy in manager.states.take_copies()[1]] == [40]
    assert (manager.states.next_cut(sequence, 60), manager.states.next_cut(sequence, 50)) == (56, 50)
