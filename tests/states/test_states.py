"""Recurrent states, one rule at a time: docs/states.md has them. Long histories are in tests/model."""

from typing import Any

import pytest

from kvblocks import (
    BlockRemoved,
    BlockStored,
    FullAttention,
    GroupUsage,
    InvalidArgumentError,
    KVCacheManager,
    KVLayer,
    RecurrentState,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StaleHitError,
    StateCopy,
    StateLayer,
    plan,
)

FULL = FullAttention(4)


def make(num_blocks: int = 64, *, every: int | None = None, num_kept: int = 0, **options: Any) -> KVCacheManager:
    """A manager with one group of full attention, and checkpoints of two blocks."""
    groups = [FULL, RecurrentState(4, options.pop("num_slots", 4), 2, every=every, num_kept=num_kept)]
    return KVCacheManager(num_blocks, groups=groups, debug=options.pop("debug", True), **options)


def start(manager: KVCacheManager, name: str, tokens: Any, **options: Any) -> Sequence:
    """Begin a request with what is cached, up to the first cut."""
    sequence = tokens if isinstance(tokens, Sequence) else Sequence(name, tokens)
    hit = manager.get_computed_blocks(sequence)
    end = manager.states.next_cut(sequence, sequence.num_tokens, hit)
    assert manager.allocate_slots(sequence, end - hit.num_tokens, hit, **options) is not None
    return sequence


def prefill(manager: KVCacheManager, name: str, tokens: Any, **options: Any) -> Sequence:
    """Compute a whole prompt, step by step."""
    sequence = start(manager, name, tokens, **options)
    manager.states.take_copies()
    while sequence.num_computed_tokens < sequence.num_tokens:
        end = manager.states.next_cut(sequence, sequence.num_tokens)
        manager.allocate_slots(sequence, end - sequence.num_computed_tokens, **options)
        manager.states.take_copies()
    return sequence


def hit_tokens(manager: KVCacheManager, tokens: Any) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens)).num_tokens


def test_a_new_slot_is_cleared_and_a_hit_is_restored() -> None:
    manager = make()
    first = start(manager, "a", range(22))
    assert first.state_slot == 0 and first.group_block_ids(1) == []
    assert manager.states.take_copies() == (
        [StateCopy("clear", 0, 0)],
        [StateCopy("save", 20, 0, -1, (5, 6))],
    )
    second = start(manager, "b", [*range(22), 50, 51])
    assert manager.states.take_copies()[0] == [StateCopy("restore", 20, 1, -1, (5, 6))]
    manager.free(second)
    assert second.state_slot is None and manager.states.num_free_slots == 3


def test_a_hit_ends_at_a_checkpoint_before_the_last_token() -> None:
    manager = make()
    manager.free(prefill(manager, "a", range(24)))
    assert [hit_tokens(manager, range(n)) for n in (20, 21, 24, 25)] == [0, 20, 20, 20]
    hit = manager.get_computed_blocks(Sequence("b", range(40)))
    assert (hit.num_tokens, hit.num_matched_tokens, len(hit.checkpoint_block_ids)) == (20, 24, 2)


def test_a_checkpoint_is_not_found_in_the_step_that_saves_it() -> None:
    manager = make()
    start(manager, "a", range(22))
    assert hit_tokens(manager, range(22)) == 0
    manager.states.take_copies()
    assert hit_tokens(manager, range(22)) == 20


def test_late_commit_finds_it_once_its_tokens_are_written() -> None:
    manager = make()
    sequence = start(manager, "a", range(22), delay_cache_blocks=True)
    (save,) = manager.states.take_copies()[1]
    assert hit_tokens(manager, range(22)) == 0
    assert GroupUsage(1, 2, 0) in manager.inspect.group_usage()
    manager.cache_blocks(sequence, 20)
    assert manager.get_computed_blocks(Sequence("b", range(22))).checkpoint_block_ids == save.block_ids


def test_a_waiting_save_is_held_for_a_step_in_flight() -> None:
    manager = make()
    sequence = start(manager, "a", range(22), delay_cache_blocks=True)
    (save,) = manager.states.take_copies()[1]
    hold = manager.holds.detach(sequence)
    assert hold.group_block_ids(1) == list(save.block_ids)
    assert not set(save.block_ids) & set(manager.inspect.free_block_ids())
    manager.holds.release(hold)
    assert manager.num_free_blocks == manager.num_blocks


def test_places_are_rounded_to_a_power_of_two_of_a_share_of_the_prompt() -> None:
    manager = make(2000)
    for length, place in ((8, 4), (9, 8), (127, 124), (300, 296), (1000, 992), (4200, 4096)):
        assert manager.states.next_cut(Sequence("a", [7] * length), length) == place
    manager.free(prefill(manager, "a", range(1000)))
    other = Sequence("b", [*range(500), *range(5000, 5500)])
    hit = manager.get_computed_blocks(other)
    assert (hit.num_tokens, hit.num_matched_tokens) == (0, 500)
    assert manager.states.next_cut(other, 1000, hit) == 496, "where two prompts parted"


def test_marks_stay_with_a_sequence_and_its_forks() -> None:
    manager = make()
    sequence = Sequence("a", range(40))
    assert [manager.states.mark(sequence, position) for position in (3, 15, 12)] == [0, 12, 12]
    start(manager, "a", sequence)
    assert sequence.num_computed_tokens == 12 and len(manager.states.take_copies()[1]) == 1
    assert manager.states.mark(sequence, 20) == 20 == manager.states.next_cut(sequence, 40)
    child = manager.fork(sequence, "b")
    assert manager.states.next_cut(child, 40) == 20
    for position in (0, 41):
        with pytest.raises(InvalidArgumentError, match="position"):
            manager.states.mark(sequence, position)


def test_a_mark_behind_what_is_known_at_a_start_counts_nevertheless() -> None:
    """A sequence that lost tokens was freed, and gets there again."""
    manager = make(num_kept=4)
    sequence = Sequence("a", range(6))
    sequence.append_tokens([6, 7])
    assert manager.states.mark(sequence, 8) == 8
    prefill(manager, "a", sequence)
    manager.truncate(sequence, 6)
    manager.free(sequence)
    prefill(manager, "a", sequence)
    manager.append_slots(sequence, [20, 21])
    assert [copy.position for copy in manager.states.take_copies()[1]] == [8]


def test_a_chunk_that_runs_over_a_place_is_counted() -> None:
    manager = make()
    sequence = Sequence("a", range(22))
    manager.allocate_slots(sequence)
    assert manager.states.take_copies()[1] == []
    assert manager.states.stats.num_passed == 1


def test_every_also_saves_while_decoding() -> None:
    manager = make(every=8, debug=False)
    sequence = prefill(manager, "a", range(5))
    saved = []
    for token in range(20):
        manager.append_slots(sequence, [token])
        saved += [copy.position for copy in manager.states.take_copies()[1]]
    assert saved == [8, 16, 24]
    manager.append_step([sequence], [1])
    for token in range(6):
        manager.append_step([sequence], [token])
        saved += [copy.position for copy in manager.states.take_copies()[1]]
    assert saved == [8, 16, 24, 32]
    manager.check()


def test_a_save_takes_only_what_the_step_leaves() -> None:
    manager = make(7)
    first = start(manager, "a", range(20))  # 16 tokens, saved at 16
    second = Sequence("b", range(100, 108))
    assert manager.allocate_slots(second) is not None, "the save took no block before"
    assert manager.states.take_copies()[1] == []
    assert manager.states.stats.num_without_room == 1
    manager.free(first)
    manager.free(second)
    manager.check()


def test_a_save_takes_no_checkpoint_of_the_same_step() -> None:
    manager = make(6)
    for first in (0, 100):
        start(manager, f"from {first}", range(first, first + 9))  # 8 tokens, saved at 8
    assert len(manager.states.take_copies()[1]) == 1, "there is room for one"
    assert manager.states.stats.num_without_room == 1
    assert (hit_tokens(manager, range(9)), hit_tokens(manager, range(100, 109))) == (8, 0)


def test_a_checkpoint_is_evicted_whole() -> None:
    manager = make(12)
    manager.free(prefill(manager, "a", range(18)))
    assert manager.inspect.group_usage()[1].num_cached_blocks == 2
    sequence = Sequence("b", range(100, 140))
    manager.allocate_slots(sequence)
    assert manager.inspect.group_usage()[1].num_cached_blocks in (0, 2)
    assert hit_tokens(manager, range(18)) == 0


def test_checkpoints_are_queued_behind_the_sequence_s_blocks() -> None:
    manager = make()
    sequence = start(manager, "a", range(22))
    (save,) = manager.states.take_copies()[1]
    manager.allocate_slots(sequence)
    manager.free(sequence)
    assert manager.inspect.free_block_ids()[-2:] == [*reversed(save.block_ids)]


def test_without_a_slot_a_sequence_is_refused() -> None:
    manager = make(num_slots=1)
    sequence = prefill(manager, "a", range(5))
    assert manager.allocate_slots(Sequence("b", range(5))) is None
    refusal = manager.last_refusal
    assert refusal is not None and refusal.reason == "slots" and not refusal.is_due_to_pins
    with pytest.raises(SequenceStateError, match="slot"):
        manager.fork(sequence, "b")
    manager.check()


def test_a_fork_copies_the_slot_only_between_steps() -> None:
    manager = make()
    sequence = start(manager, "a", range(22))
    with pytest.raises(SequenceStateError, match="all computed"):
        manager.fork(sequence, "b")
    manager.states.take_copies()
    child = manager.fork(sequence, "b")
    third = manager.fork(child, "c")  # of a copy that isn't made yet
    manager.free(child)
    first, second = manager.states.take_copies()[0]
    assert first == StateCopy("fork", 20, second.source, sequence.state_slot or 0)
    assert second == StateCopy("fork", 20, third.state_slot or 0, first.slot)


def test_a_copy_that_nobody_needs_any_more_is_not_made() -> None:
    manager = make()
    sequence = prefill(manager, "a", range(22))
    child = manager.fork(sequence, "b")
    third = manager.fork(child, "c")
    manager.free(child)
    manager.free(third)
    assert manager.states.take_copies()[0] == []


def test_a_fork_behind_a_rewind_gets_the_same_checkpoint() -> None:
    manager = make()
    sequence = prefill(manager, "a", range(22))
    assert manager.rewind(sequence, 21) == 20
    child = manager.fork(sequence, "b")
    manager.free(sequence)
    num_free = manager.num_free_blocks
    restore, fork = manager.states.take_copies()[0]
    assert (restore.kind, fork.kind, fork.position) == ("restore", "fork", 20)
    assert (fork.source, fork.slot) == (restore.slot, child.state_slot)
    assert manager.num_free_blocks == num_free + 2, "it owned the checkpoint that the copy reads"


def test_a_slot_that_a_copy_still_reads_is_written_behind_it() -> None:
    """Its sequence has ended, and the slot is given to the child of one whose own state isn't there yet."""
    manager = make()
    other, parent = prefill(manager, "other", range(100, 105)), prefill(manager, "a", range(22))
    assert manager.rewind(other, 0) == 0
    child = manager.fork(parent, "b")
    slot = parent.state_slot
    manager.free(parent)
    late = manager.fork(other, "late")
    assert late.state_slot == slot
    copies = manager.states.take_copies()[0]
    reads = [index for index, copy in enumerate(copies) if copy.kind == "fork" and copy.slot == child.state_slot]
    writes = [index for index, copy in enumerate(copies) if copy.slot == slot]
    assert len(reads) == len(writes) == 1 and reads < writes


def test_an_abort_takes_the_checkpoints_of_its_step_back() -> None:
    manager = make()
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 12)
    start(manager, "a", sequence)
    manager.states.take_copies()
    manager.allocate_slots(sequence, 24)
    manager.states.take_copies()
    assert hit_tokens(manager, range(40)) == 36
    manager.abort(sequence, 12)
    assert hit_tokens(manager, range(40)) == 12


def test_a_save_whose_prefix_another_abort_took_back_is_skipped() -> None:
    manager = make()
    first = start(manager, "a", range(22))
    second = Sequence("b", range(30))
    hit = manager.get_computed_blocks(second)
    manager.allocate_slots(second, 28, hit)  # computes the same again, into blocks of its own
    manager.abort(first, 0)
    manager.evict_blocks(second.block_ids[:1])
    assert manager.states.take_copies()[1] == []
    assert manager.states.stats.num_taken_back == 1


def test_a_second_sequence_does_not_save_where_one_has() -> None:
    manager = make()
    start(manager, "a", range(22))
    start(manager, "b", range(22))
    assert len(manager.states.take_copies()[1]) == 1
    assert manager.states.stats.num_present == 1


def test_a_rewind_goes_back_to_the_last_checkpoint() -> None:
    manager = make()
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 12)
    prefill(manager, "a", sequence)
    assert manager.rewind(sequence, 40) == 40 and manager.states.take_copies() == ([], [])
    assert manager.rewind(sequence, 30) == 12
    assert manager.states.take_copies()[0][0].kind == "restore"
    assert manager.rewind(sequence, 8) == 0
    assert manager.states.take_copies()[0] == [StateCopy("clear", 0, 0)]


def test_a_sequence_from_before_a_reset_goes_back_to_its_beginning() -> None:
    """Even if its blocks are cached again, since another sequence that shares them was renewed."""
    manager = make()
    first = prefill(manager, "a", range(40))
    child = manager.fork(first, "b")
    manager.reset_prefix_cache()
    manager.renew(child)
    third = Sequence("c", range(40))
    manager.states.mark(third, 12)
    prefill(manager, "c", third)
    assert first.blocks[0].is_cached
    assert manager.rewind(child, 30) == 12
    assert manager.rewind(first, 30) == 0


def test_a_truncation_goes_back_no_further_than_kept_states() -> None:
    manager = make(num_kept=2)
    sequence = prefill(manager, "a", range(22))
    for token in range(4):
        manager.append_slots(sequence, [token])
    with pytest.raises(SequenceStateError, match="rewind it first"):
        manager.truncate(sequence, 23)
    manager.truncate(sequence, 24)
    assert manager.allocate_slots(sequence, num_total_tokens=26) is not None
    with pytest.raises(InvalidArgumentError, match="num_total_tokens"):
        manager.allocate_slots(sequence, num_total_tokens=27)


def test_a_sequence_that_went_back_to_a_kept_state_can_be_forked() -> None:
    """Also when debugging, which refuses forks of tokens that no step has computed."""
    manager = make(num_kept=2)
    sequence = prefill(manager, "a", range(22))
    manager.append_slots(sequence, [1, 2])
    manager.states.take_copies()
    manager.truncate(sequence, 23)
    child = manager.fork(sequence, "b")
    assert manager.states.take_copies()[0] == [StateCopy("fork", 23, child.state_slot or 0, sequence.state_slot or 0)]
    manager.append_slots(sequence, [3])
    with pytest.raises(SequenceStateError, match="all computed"):
        manager.fork(sequence, "c")


def test_kept_states_begin_where_the_slot_does() -> None:
    manager = make(num_kept=4)
    manager.free(prefill(manager, "a", range(10)))
    sequence = Sequence("b", range(5))
    sequence.append_tokens(range(5, 10))
    hit = manager.get_computed_blocks(sequence)
    assert hit.num_tokens == 8
    manager.allocate_slots(sequence, None, hit)
    with pytest.raises(SequenceStateError, match="at least 8"):
        manager.truncate(sequence, 7)
    manager.truncate(sequence, 8)


def test_after_a_preemption_the_end_of_what_is_known_counts() -> None:
    manager = make()
    sequence = prefill(manager, "a", range(6))
    for token in range(10):
        manager.append_slots(sequence, [token])
        manager.states.take_copies()
    manager.free(sequence)
    hit = manager.get_computed_blocks(sequence)
    assert (hit.num_tokens, hit.num_matched_tokens) == (4, 16)
    assert manager.states.next_cut(sequence, 16, hit) == 12


def test_a_reset_keeps_the_slots_and_forgets_the_checkpoints() -> None:
    manager = make()
    sequence = start(manager, "a", range(22))
    manager.states.take_copies()
    manager.reset_prefix_cache()
    assert hit_tokens(manager, range(22)) == 0 and sequence.state_slot == 0
    manager.allocate_slots(sequence)
    assert manager.states.take_copies() == ([], [])
    assert manager.rewind(sequence, 20) == 0, "no checkpoint is cached"
    manager.free(sequence)
    manager.check()


def test_forgetting_a_salt_forgets_its_checkpoints() -> None:
    manager = make()
    manager.free(prefill(manager, "a", Sequence("a", range(22), salt="s")))
    assert manager.inspect.group_usage()[1].num_cached_blocks == 2
    assert manager.forget_salt("s") == 7
    assert manager.inspect.group_usage()[1].num_cached_blocks == 0


def test_windows_and_states_limit_hits_together() -> None:
    groups = [FULL, SlidingWindow(4, 6), RecurrentState(8, 2, 1)]
    manager = KVCacheManager(64, groups=groups, debug=True)
    manager.free(prefill(manager, "a", range(30)))
    assert manager.get_computed_blocks(Sequence("b", range(30))).num_tokens == 24
    assert manager.alignment == 8


def test_a_hit_whose_checkpoint_is_gone_is_stale() -> None:
    manager = make()
    manager.free(prefill(manager, "a", range(22)))
    sequence = Sequence("b", range(22))
    hit = manager.get_computed_blocks(sequence)
    manager.evict_blocks(hit.checkpoint_block_ids[:1])
    with pytest.raises(StaleHitError):
        manager.allocate_slots(sequence, None, hit)
    assert hit_tokens(manager, range(22)) == 0
    manager.free(prefill(manager, "c", range(22)))
    assert hit_tokens(manager, range(22)) == 20
    with pytest.raises(StaleHitError):
        manager.allocate_slots(sequence, None, hit)
    assert sequence.state_slot is None


def test_a_hit_that_lost_its_end_can_be_cut_to_what_is_left() -> None:
    """Also if a block that it lost holds another prefix meanwhile, with a state."""
    manager = make(16)
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 12)
    manager.free(prefill(manager, "a", sequence))
    probe = Sequence("b", range(50))
    hit = manager.get_computed_blocks(probe)
    assert hit.num_tokens == 36
    manager.free(prefill(manager, "c", range(100, 112)))
    assert [hit.cut(number).num_tokens for number in (35, 12, 11, 0)] == [12, 12, 0, 0]
    manager.evict_blocks([block.block_id for block in hit.blocks])
    assert hit.cut(35).num_tokens == 0
    assert manager.allocate_slots(probe, 1, hit.cut(35)) is not None


def test_explain_names_the_state_as_the_limit() -> None:
    manager = make(num_history_blocks=64)
    manager.free(prefill(manager, "a", range(22)))
    manager.evict_blocks(manager.get_computed_blocks(Sequence("b", range(22))).checkpoint_block_ids)
    explained = manager.inspect.explain(Sequence("b", range(30)))
    assert (explained.cause, explained.group, explained.missing_tokens) == ("state", 1, (0, 20))
    assert str(explained) == (
        "20 tokens of KV are cached, but group 1 (a recurrent state) has no checkpoint after any of them;"
        " one was dropped (0 blocks taken from the pool since)"
    )
    assert manager.stats.num_limited_tokens == 0
    start(manager, "c", range(30))
    assert manager.stats.num_limited_tokens == 20


def test_explain_says_where_the_last_state_is() -> None:
    manager = make()
    sequence = Sequence("a", range(40))
    manager.states.mark(sequence, 12)
    prefill(manager, "a", sequence)
    manager.evict_blocks(manager.get_computed_blocks(Sequence("b", range(40))).checkpoint_block_ids)
    assert str(manager.inspect.explain(Sequence("b", range(50)))) == (
        "40 tokens of KV are cached, but group 1 (a recurrent state) has no checkpoint after token 12, where the hit"
        " ends; as far as is remembered none was saved there"
    )


def test_events_carry_checkpoints() -> None:
    manager = make(enable_events=True)
    prefill(manager, "a", range(22))
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored) and event.group_idx == 1]
    assert [(event.kind, event.block_size, len(event.block_ids)) for event in stored] == [("mamba", 4, 2)]
    manager.evict_blocks(stored[0].block_ids)
    removed = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert [(event.group_idx, event.block_hashes) for event in removed] == [(1, stored[0].block_hashes)]


def test_a_pin_has_its_checkpoint_made_and_holds_it() -> None:
    manager = make()
    pin = manager.pins.pin(range(12))
    assert pin.num_wanted_blocks == 5
    passing = Sequence("over it", range(40))
    manager.allocate_slots(passing)
    manager.abort(passing, 16)
    assert repr(pin).endswith("3 of 3 blocks, 0 of 2 of side groups and states)"), "it has all K and V, and no state"
    sequence = Sequence("a", range(40))
    assert manager.states.next_cut(sequence, 40) == 12, "where the pin ends"
    manager.free(prefill(manager, "a", sequence))
    assert pin.num_held_blocks == 5 and len(pin.attached_blocks) == 2
    assert repr(pin).endswith("3 of 3 blocks, 2 of 2 of side groups and states)")
    manager.reset_prefix_cache()
    assert pin.num_held_blocks == 0


@pytest.mark.parametrize("debug", [False, True])
def test_a_pin_holds_at_once_what_decoded_tokens_fill(*, debug: bool) -> None:
    manager = make(debug=debug)
    pin = manager.pins.pin(range(16))
    sequence = prefill(manager, "a", range(11))
    assert pin.num_held_blocks == 2
    manager.append_slots(sequence, [11])
    assert pin.num_held_blocks == 3
    for token in range(12, 16):
        manager.append_step([sequence], [token])
    assert pin.num_held_blocks == 4


def test_quotas_count_the_blocks_of_checkpoints() -> None:
    manager = make()
    manager.quotas.set("s", 100)
    manager.free(prefill(manager, "a", Sequence("a", range(22), salt="s")))
    assert [usage.num_cached_blocks for usage in manager.quotas] == [7]


def test_a_tenant_over_its_quota_gives_a_checkpoint_whole() -> None:
    manager = make(20)
    manager.quotas.set("s", 7)
    for first in (0, 100, 200):
        manager.free(prefill(manager, "a", Sequence("a", range(first, first + 22), salt="s")))
        manager.free(prefill(manager, "b", Sequence("b", range(first, first + 6))))
    kept = [hit_tokens(manager, range(first, first + 6)) for first in (0, 100, 200)]
    assert kept == [4, 4, 4], "others' checkpoints stay while the tenant has more than its quota"
    assert manager.inspect.group_usage()[1].num_cached_blocks % 2 == 0


def test_what_is_not_supported_says_so() -> None:
    state = RecurrentState(4, 2)
    for groups in ([state], [SlidingWindow(4, 8), state], [FULL, state, state]):
        with pytest.raises(InvalidArgumentError, match="groups"):
            KVCacheManager(8, groups=groups)
    with pytest.raises(InvalidArgumentError, match="every"):
        KVCacheManager(8, groups=[FullAttention(16), RecurrentState(4, 2, every=8)])
    with pytest.raises(InvalidArgumentError, match="every"):
        RecurrentState(4, 2, every=6)
    with pytest.raises(InvalidArgumentError, match="num_external_computed_tokens"):
        make().allocate_slots(Sequence("a", range(9)), 1, None, 8)
    plain = KVCacheManager(8)
    for call in (plain.states.take_copies, lambda: plain.states.next_cut(Sequence("a", [1]), 1)):
        with pytest.raises(InvalidArgumentError, match="RecurrentState"):
            call()


def test_a_plan_counts_the_blocks_and_slots_of_states() -> None:
    kinds = [FullAttention(16), RecurrentState(16, num_slots=64)]
    layers = [KVLayer(0, 2, 256)] * 12  # Qwen3-Next: 24,576 bytes a token
    states = [StateLayer(1_097_728)] * 36
    found = plan(kinds, layers, "bfloat16", 20 * 10**9, states=states)
    assert (found.block_bytes, found.state_bytes, found.state_blocks) == (393_216, 39_518_208, 101)
    assert found.slot_bytes == 64 * 39_518_208
    assert found.num_blocks == (20 * 10**9 - found.slot_bytes) // 393_216
    assert found.groups == (FullAttention(16), RecurrentState(16, 64, 101))
    assert "101 blocks a checkpoint" in found.table()
    KVCacheManager(found.num_blocks, groups=found.groups)
    for wrong, match in (([kinds[0]], "RecurrentState"), (kinds, "num_bytes")):
        with pytest.raises(InvalidArgumentError, match=match):
            plan(wrong, layers, "bfloat16", found.slot_bytes + 10**7, states=states)
    with pytest.raises(InvalidArgumentError, match="layers for it"):
        plan(kinds, layers, "bfloat16", 10**10)


def test_a_child_can_go_back_no_further_than_its_parent() -> None:
    manager = make(num_kept=2)
    manager.free(prefill(manager, "first", range(9)))
    parent = Sequence("parent", range(7))
    parent.append_tokens([7, 8])
    prefill(manager, "", parent)  # starts with the state after 8 tokens, so that the one after 7 was never there
    child = manager.fork(parent, "child")
    manager.states.take_copies()
    for sequence in (parent, child):
        with pytest.raises(SequenceStateError, match="at least 8 tokens"):
            manager.truncate(sequence, 7)
        manager.truncate(sequence, 8)


def test_a_state_that_waited_before_a_reset_is_found_once_its_sequence_is_renewed() -> None:
    manager = make()
    sequence = start(manager, "late", range(9), delay_cache_blocks=True)
    (save,) = manager.states.take_copies()[1]
    manager.reset_prefix_cache()
    manager.cache_blocks(sequence, save.position)
    assert (hit_tokens(manager, range(20)), manager.states.stats.num_saved) == (0, 0)
    manager.renew(sequence)  # its KV is valid, and so is its state
    assert (hit_tokens(manager, range(20)), manager.states.stats.num_saved) == (8, 1)
    manager.free(sequence)
    assert manager.stats.num_free_blocks == manager.num_blocks
