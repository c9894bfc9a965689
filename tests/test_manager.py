"""The manager's promises, one at a time. Long histories are in test_stateful.py."""

import pickle
from typing import Any

import pytest

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CorruptStateError,
    FullAttention,
    HeldBlocks,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StaleHitError,
    Tier,
)
from kvblocks.hashing.scheme import sha256_digest


def start(manager: KVCacheManager, sequence: Sequence) -> int:
    """Look up a sequence and allocate all of it. Returns the number of hit tokens."""
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit) is not None
    manager.check()
    return hit.num_tokens


def hit_tokens(manager: KVCacheManager, tokens: list[int], **keys: Any) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens, **keys)).num_tokens


class TestHits:
    def test_a_lookup_changes_nothing(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(9))
        start(manager, sequence)
        manager.free(sequence)
        before = manager.inspect.free_block_ids(), manager.stats
        assert hit_tokens(manager, list(range(9))) == 8
        assert (manager.inspect.free_block_ids(), manager.stats) == before

    def test_a_full_hit_computes_one_token_and_takes_no_block(self) -> None:
        manager = KVCacheManager(8, 4)
        start(manager, Sequence("a", range(8)))
        sequence = Sequence("b", range(8))
        hit = manager.get_computed_blocks(sequence)
        assert (hit.num_tokens, len(hit.blocks), hit.num_readonly_tokens) == (7, 2, 8)
        assert hit.is_full_hit and not hit.cut(7).is_full_hit
        longer = manager.get_computed_blocks(Sequence("c", range(9)))
        assert (longer.num_tokens, longer.is_full_hit) == (8, False)
        assert not manager.get_computed_blocks(Sequence("d", range(8)), max_tokens=7).is_full_hit
        assert manager.allocate_slots(sequence, hit=hit) == []
        assert (sequence.block_ids, sequence.num_computed_tokens) == ([0, 1], 8)
        assert sequence.num_readonly_tokens == 8  # so the recomputed token's slot, in block 1, is not to be written
        manager.append_slots(sequence, [8])
        assert sequence.block_ids == [0, 1, 2]
        manager.check()

    def test_a_block_is_hit_in_the_step_that_fills_it(self) -> None:
        manager = KVCacheManager(8, 4)
        assert [start(manager, Sequence(i, range(10))) for i in range(3)] == [0, 8, 8]

    def test_chunked_prefill_caches_block_by_block(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(14))
        start(manager, Sequence("first", range(5)))
        hit = manager.get_computed_blocks(sequence)
        assert [b.block_id for b in manager.allocate_slots(sequence, 3, hit=hit) or []] == [2]
        assert hit_tokens(manager, list(range(14))) == 4
        assert manager.allocate_slots(sequence, 1) == []
        assert hit_tokens(manager, list(range(14))) == 8
        manager.allocate_slots(sequence)
        assert hit_tokens(manager, list(range(14))) == 12
        assert sequence.num_computed_tokens == 14
        manager.check()

    def test_caching_off(self) -> None:
        manager = KVCacheManager(8, 4, enable_caching=False)
        start(manager, Sequence("a", range(8)))
        assert start(manager, Sequence("b", range(8))) == 0
        assert manager.stats.num_cached_blocks == 0

    def test_preemption_hits_generated_tokens_too(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(6))
        start(manager, sequence)
        manager.append_slots(sequence, [6, 7, 8])
        manager.free(sequence)
        sequence.append_tokens([9])  # sampled, but the pool had no room
        assert start(manager, sequence) == 8
        assert sequence.num_computed_tokens == 10

    def test_a_stale_hit_is_refused_and_a_fresh_one_is_not(self) -> None:
        manager = KVCacheManager(4, 4)
        old = Sequence("old", range(8))
        start(manager, old)
        manager.free(old)
        sequence = Sequence("new", range(9))
        hit = manager.get_computed_blocks(sequence)
        other = Sequence("other", range(100, 112))  # takes blocks 2, 3 and then 1, which the hit ends with
        start(manager, other)
        with pytest.raises(StaleHitError, match="look it up again"):
            manager.allocate_slots(sequence, hit=hit)
        manager.free(other)
        manager.check()
        assert start(manager, sequence) == 4

    @pytest.mark.parametrize("by_step", [False, True])
    def test_one_decoded_token_can_make_a_hit_stale(self, by_step: bool) -> None:
        manager = KVCacheManager(4, 4)
        running, old = Sequence("running", range(100, 104)), Sequence("old", range(12))
        start(manager, running)
        start(manager, old)
        manager.free(old)
        sequence = Sequence("new", range(13))
        hit = manager.get_computed_blocks(sequence)
        assert hit.num_tokens == 12
        if by_step:
            assert manager.append_step([running], [1]) == [(0, 0, 1, 3)]
        else:
            manager.append_slots(running, [1])  # takes block 3, with which the hit ends
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit)
        assert manager.get_computed_blocks(sequence).num_tokens == 8
        manager.check()

    def test_an_eviction_elsewhere_leaves_a_hit_good(self) -> None:
        manager = KVCacheManager(4, 4)
        running, gone = Sequence("running", range(8)), Sequence("gone", range(50, 58))
        start(manager, running)
        start(manager, gone)
        manager.free(gone)
        sequence = Sequence("new", range(9))
        hit = manager.get_computed_blocks(sequence)
        start(manager, Sequence("taker", [9]))
        assert manager.allocate_slots(sequence, hit=hit) is not None
        manager.check()


class TestKeys:
    def test_tenants_never_share_a_block(self) -> None:
        manager = KVCacheManager(32, 4)
        tables = []
        for number, keys in enumerate([{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"salt": "a", "lora": "a"}]):
            sequence = Sequence(number, range(12), **keys)
            assert start(manager, sequence) == 0
            tables.append(set(sequence.block_ids))
            assert hit_tokens(manager, list(range(12)), **keys) == 11
        assert len(set().union(*tables)) == sum(len(table) for table in tables)

    def test_another_image_misses_from_the_first_block_that_it_touches(self) -> None:
        manager = KVCacheManager(32, 4)
        prompt = [1, 2, 3, 4, 5, 6, *[99] * 5, 7, 8, 9, 10, 11]  # the image's placeholders are positions 6 to 10
        start(manager, Sequence("cat", prompt, extra_keys=[(6, 11, "cat")]))
        assert hit_tokens(manager, prompt, extra_keys=[(6, 11, "cat")]) == 15
        assert hit_tokens(manager, prompt, extra_keys=[(6, 11, "dog")]) == 4
        assert hit_tokens(manager, prompt) == 4
        assert hit_tokens(manager, prompt, extra_keys=[(6, 11, b"cat")]) == 4
        assert hit_tokens(manager, prompt, extra_keys=[(8, 11, "cat")]) == 4
        assert hit_tokens(manager, prompt, extra_keys=[(6, 11, "cat"), (13, 14, "dog")]) == 12

    def test_keys_hold_in_the_middle_of_one_run(self) -> None:
        manager = KVCacheManager(64, 2)
        start(manager, Sequence("long", [0] * 40, extra_keys=[(20, 21, "x")]))
        assert hit_tokens(manager, [0] * 40, extra_keys=[(20, 21, "y")]) == 20
        assert hit_tokens(manager, [0] * 40, extra_keys=[(30, 31, "x")]) == 20
        assert hit_tokens(manager, [0] * 20) == 19


class TestFullPool:
    def test_none_and_nothing_changed(self) -> None:
        manager = KVCacheManager(3, 4)
        sequence, other = Sequence("a", range(8)), Sequence("b", range(20, 26))
        start(manager, sequence)
        before = manager.inspect.free_block_ids(), manager.stats
        assert manager.allocate_slots(other) is None
        assert manager.append_slots(sequence, [0] * 5) is None
        assert manager.allocate_slots(sequence, 0, num_total_tokens=13) is None
        assert (manager.inspect.free_block_ids(), manager.stats) == before
        assert (sequence.num_tokens, other.is_allocated, other.block_ids) == (8, False, [])
        manager.free(sequence)
        assert manager.allocate_slots(other) is not None
        manager.check()

    def test_a_hit_s_own_free_blocks_are_not_counted_as_room(self) -> None:
        manager = KVCacheManager(4, 4)
        sequence = Sequence("a", range(12))
        start(manager, sequence)
        manager.free(sequence)
        longer = Sequence("b", range(20))  # needs its 3 hit blocks and 2 more; 4 are free
        hit = manager.get_computed_blocks(longer)
        assert manager.allocate_slots(longer, hit=hit) is None
        assert len(manager.allocate_slots(longer, 4, hit=hit) or []) == 1
        manager.check()

    def test_usage(self) -> None:
        manager = KVCacheManager(4, 4)
        assert (manager.usage, manager.num_blocks, manager.num_free_blocks) == (0.0, 4, 4)
        sequence = Sequence("a", range(12))
        start(manager, sequence)
        assert (manager.usage, manager.num_free_blocks) == (0.75, 1)
        manager.free(sequence)
        assert manager.usage == 0.0  # though three blocks are cached

    def test_reserved_slots_are_filled_first_and_never_cached_early(self) -> None:
        manager = KVCacheManager(4, 4)
        sequence = Sequence("a", range(3))
        start(manager, sequence)
        assert len(manager.allocate_slots(sequence, 0, num_total_tokens=9) or []) == 2
        assert manager.stats.num_cached_blocks == 0
        assert manager.append_slots(sequence, [3, 4, 5]) == []
        assert manager.stats.num_cached_blocks == 1
        manager.check()


class TestAppendStep:
    def test_tells_just_the_new_blocks(self) -> None:
        manager = KVCacheManager(16, 4)
        sequences = [Sequence(number, range(number, number + 3 + number)) for number in range(4)]  # 3 to 6 tokens
        for sequence in sequences:
            start(manager, sequence)
        assert manager.append_step(sequences, [7, 8, 9, 10]) == [(1, 0, 1, 6)]
        assert [sequence.block_ids for sequence in sequences] == [[0], [1, 6], [2, 3], [4, 5]]
        assert [sequence.token_ids()[-1] for sequence in sequences] == [7, 8, 9, 10]
        assert manager.append_step([], []) == []
        manager.check()

    def test_none_and_nothing_changed(self) -> None:
        manager = KVCacheManager(3, 4)
        sequences = [Sequence(0, range(4)), Sequence(1, range(10, 14))]
        for sequence in sequences:
            start(manager, sequence)
        before = manager.inspect.free_block_ids(), manager.stats
        assert manager.append_step(sequences, [1, 2]) is None
        assert (manager.inspect.free_block_ids(), manager.stats) == before
        assert [sequence.num_tokens for sequence in sequences] == [4, 4]
        assert manager.append_step(sequences[:1], [1]) == [(0, 0, 1, 2)]

    def test_misuse_changes_nothing(self) -> None:
        manager = KVCacheManager(16, 4)
        one, two, chunked = Sequence(1, range(5)), Sequence(2, range(5)), Sequence(3, range(50, 60))
        start(manager, one)
        start(manager, two)
        manager.allocate_slots(chunked, 3)
        bad_calls: list[tuple[list[Sequence], Any, type[Exception], str]] = [
            ([one, two], [1], InvalidArgumentError, "and 1 tokens"),
            ([one, one], [1, 2], InvalidArgumentError, "got 2 sequences, 1 of them different"),
            ([one, two], [1, -1], InvalidArgumentError, "got -1 at position 1"),
            ([one, chunked], [1, 2], SequenceStateError, "expected slots for all tokens"),
            ([], [1], InvalidArgumentError, "got 0 sequences"),
            ([one, Sequence(4, [1])], [1, 2], SequenceStateError, "holds no blocks"),
        ]
        for sequences, tokens, error, message in bad_calls:
            with pytest.raises(error, match=message):
                manager.append_step(sequences, tokens)
            assert (one.num_tokens, two.num_tokens, chunked.num_tokens) == (5, 5, 10)
            manager.check()

    def test_a_hash_function_that_raises_changes_nothing(self) -> None:
        def hash_function(preimage: bytes) -> bytes:
            if preimage.endswith(b"\x63\x00\x00\x00"):
                raise OSError("bad luck")
            return preimage[-8:].rjust(8, b"x")

        manager = KVCacheManager(16, 4, hash_algorithm=hash_function, enable_events=True)
        one, two = Sequence(1, range(7)), Sequence(2, range(7))
        start(manager, one)
        start(manager, two)
        with pytest.raises(OSError, match="bad luck"):
            manager.append_step([one, two], [1, 99])
        assert (one.token_ids(), two.token_ids()) == (list(range(7)), list(range(7)))
        manager.check()
        assert manager.append_step([one, two], [1, 2]) == []


class TestAbort:
    def test_what_was_never_written_leaves_the_map_with_all_that_hangs_from_it(self) -> None:
        manager = KVCacheManager(16, 4)
        dead = Sequence("dead", range(12))
        manager.allocate_slots(dead, 4)
        manager.allocate_slots(dead)  # the step that dies: blocks 1 and 2
        sharer = Sequence("sharer", [*range(12), 12, 13, 14, 15])
        assert start(manager, sharer) == 12
        manager.abort(dead, 4)
        manager.check()
        assert hit_tokens(manager, [*range(16)]) == 4
        manager.append_slots(sharer, [16, 17, 18, 19])  # goes on, but is attached to nothing now
        manager.check()
        assert hit_tokens(manager, [*range(20)]) == 4
        manager.abort(sharer, 12)
        assert manager.num_free_blocks == 16
        assert start(manager, dead) == 4

    def test_a_duplicate_keeps_the_prefix(self) -> None:
        manager = KVCacheManager(16, 4)
        one, two = Sequence("one", range(6)), Sequence("two", range(6))
        start(manager, one)
        start(manager, two)
        manager.append_slots(one, [6, 7])
        manager.append_slots(two, [6, 7])
        manager.abort(one, 6)
        manager.check()
        found = manager.get_computed_blocks(Sequence("probe", range(9)))
        assert [block.block_id for block in found.blocks] == [0, two.block_ids[1]]

    def test_blocks_that_were_hit_stay_cached(self) -> None:
        manager = KVCacheManager(16, 4)
        start(manager, Sequence("one", range(8)))
        two = Sequence("two", range(12))
        assert start(manager, two) == 8
        manager.abort(two, 0)
        assert hit_tokens(manager, list(range(12))) == 8

    def test_a_last_token_that_no_step_computes(self) -> None:
        """The token fills a block, which is cached at once. The request ends before any step writes the slot."""
        manager = KVCacheManager(16, 4)
        ended, cancelled = Sequence("ended", range(7)), Sequence("cancelled", range(50, 57))
        for sequence in (ended, cancelled):
            start(manager, sequence)
            manager.append_slots(sequence, [7])
            manager.abort(sequence, sequence.num_tokens - 1)
            manager.check()
        assert hit_tokens(manager, [*range(8), 8]) == 4
        assert hit_tokens(manager, [*range(50, 57), 7, 8]) == 4


class TestReset:
    def test_nothing_from_before_is_hit_and_running_sequences_go_on(self) -> None:
        manager = KVCacheManager(16, 4)
        running, starting = Sequence("running", range(10)), Sequence("starting", range(100, 103))
        start(manager, running)
        start(manager, starting)
        manager.reset_prefix_cache()
        manager.check()
        assert hit_tokens(manager, list(range(10))) == 0
        manager.append_slots(running, [10, 11])
        manager.append_slots(starting, [103, 104])
        assert manager.stats.num_cached_blocks == 0  # what they fill now is attached to KV of before
        manager.free(running)
        manager.free(starting)
        assert start(manager, running) == 0
        assert hit_tokens(manager, list(range(12))) == 11
        manager.check()

    def test_a_hit_from_before_is_stale(self) -> None:
        manager = KVCacheManager(16, 4)
        start(manager, Sequence("a", range(8)))
        sequence = Sequence("b", range(9))
        hit = manager.get_computed_blocks(sequence)
        manager.reset_prefix_cache()
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit)

    def test_a_hash_function_that_fails_later_does_no_harm(self) -> None:
        calls = 0

        def hash_function(preimage: bytes) -> bytes:
            nonlocal calls
            calls += 1
            if calls > 2:
                raise OSError("bad luck")
            return b"digest"

        manager = KVCacheManager(8, 4, hash_algorithm=hash_function)
        start(manager, Sequence("a", range(9)))
        manager.reset_prefix_cache()
        manager.check()
        assert hit_tokens(manager, list(range(9))) == 0

    def test_old_blocks_are_reused_without_a_trace(self) -> None:
        manager = KVCacheManager(6, 4)
        for number in range(5):
            long, short = Sequence("long", range(12)), Sequence("short", [*range(4), number])
            start(manager, long)
            assert start(manager, short) == 4
            manager.reset_prefix_cache()
            manager.free(long)
            manager.free(short)
            manager.check()
        assert manager.num_free_blocks == 6
        assert manager.stats.num_cached_blocks == 0


class TestMisuse:
    def test_states(self) -> None:
        manager, other = KVCacheManager(8, 4), KVCacheManager(8, 4)
        sequence = Sequence("a", range(6))
        for call in (manager.free, lambda s: manager.abort(s, 0), lambda s: manager.append_slots(s, [1])):
            with pytest.raises(SequenceStateError, match=r"holds no blocks \(never allocated, or freed\)"):
                call(sequence)
        start(other, sequence)
        for call in (manager.free, manager.allocate_slots, lambda s: manager.append_slots(s, [1])):
            with pytest.raises(SequenceStateError, match="belongs to another manager"):
                call(sequence)
        other.free(sequence)
        with pytest.raises(SequenceStateError, match="free: expected a sequence allocated here"):
            other.free(sequence)
        other.check()

    def test_an_id_in_use(self) -> None:
        manager = KVCacheManager(8, 4)
        start(manager, Sequence("a", [1]))
        with pytest.raises(SequenceStateError, match="expected another sequence_id than 'a'"):
            manager.allocate_slots(Sequence("a", [2]))

    def test_hits_in_the_wrong_place(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence, other = Sequence("a", range(6)), Sequence("b", range(6))
        hit = manager.get_computed_blocks(sequence)
        with pytest.raises(SequenceStateError, match="expected a hit of Sequence"):
            manager.allocate_slots(other, hit=hit)
        start(manager, sequence)
        with pytest.raises(SequenceStateError, match="expected a sequence without blocks"):
            manager.get_computed_blocks(sequence)
        with pytest.raises(SequenceStateError, match="expected no hit, since Sequence"):
            manager.allocate_slots(sequence, hit=hit)

    def test_another_manager_s_hit(self) -> None:
        """A hit of another manager is refused, even if both managers are in the same state."""
        one, two = KVCacheManager(8, 4), KVCacheManager(8, 4)
        cached = Sequence("cached", range(8))
        start(two, cached)
        two.free(cached)
        sequence = Sequence("new", range(12))
        hit = two.get_computed_blocks(sequence)
        with pytest.raises(SequenceStateError, match="expected a hit of this manager's cache, got another's"):
            one.allocate_slots(sequence, hit=hit)
        assert one.num_free_blocks == two.num_free_blocks == 8

    def test_a_renamed_sequence(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(6))
        start(manager, sequence)
        sequence.sequence_id = "b"
        for call in (manager.free, lambda s: manager.abort(s, 0), lambda s: manager.rewind(s, 0)):
            with pytest.raises(SequenceStateError, match="whose sequence_id, or the id's hash, isn't what it was"):
                call(sequence)
        sequence.sequence_id = "a"
        manager.free(sequence)
        manager.check()

    def test_what_goes_by_order_is_no_set(self) -> None:
        manager = KVCacheManager(8, 4)
        one, other = Sequence("a", range(6)), Sequence("b", range(6))
        start(manager, one)
        start(manager, other)
        for batch in ({one, other}, {one: 1, other: 2}):
            with pytest.raises(InvalidArgumentError, match="sequences: expected an iterable of sequences, in order"):
                manager.append_step(batch, [7, 8])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="groups: expected Group items, in order, got"):
            KVCacheManager(8, groups={FullAttention(4), SlidingWindow(4, 8)})
        with pytest.raises(InvalidArgumentError, match="tiers: expected an iterable of Tier, in order, got"):
            KVCacheManager(8, tiers={Tier("cpu", 4, 1), Tier("disk", 4, 1)})
        assert (one.num_tokens, other.num_tokens) == (6, 6)

    def test_a_call_in_the_middle_of_a_call_names_threads_as_a_cause(self) -> None:
        manager, messages = KVCacheManager(8, 4), []

        def call(_: object) -> None:
            try:
                manager.take_copies()
            except CorruptStateError as error:
                messages.append(str(error))

        manager._watch_blocks(call, call)  # noqa: SLF001
        start(manager, Sequence("a", range(6)))
        assert messages and all("by several threads at once" in message for message in messages)

    @pytest.mark.parametrize("num_new_tokens", [0, -1, 7, 1.5, "2"])
    def test_bad_numbers_of_tokens(self, num_new_tokens: Any) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(6))
        with pytest.raises(InvalidArgumentError, match="num_new_tokens: expected an int from 1 to 6"):
            manager.allocate_slots(sequence, num_new_tokens)
        assert not sequence.is_allocated
        start(manager, sequence)
        with pytest.raises(InvalidArgumentError, match="with none left"):
            manager.allocate_slots(sequence)

    def test_appending_before_the_prompt_has_slots(self) -> None:
        manager = KVCacheManager(8, 4)
        sequence = Sequence("a", range(6))
        manager.allocate_slots(sequence, 3)
        with pytest.raises(SequenceStateError, match="expected slots for all tokens"):
            manager.append_slots(sequence, [1])
        with pytest.raises(InvalidArgumentError, match="num_computed_tokens: expected an int from 0 to 3"):
            manager.abort(sequence, 4)

    @pytest.mark.parametrize("call", ["allocate", "append"])
    def test_a_hash_function_that_raises_changes_nothing(self, call: str) -> None:
        """A call computes digests only when events need them, and before it changes anything."""
        broken = False

        def hash_function(preimage: bytes) -> bytes:
            if broken:
                raise OSError("no entropy left")
            return preimage[-8:].rjust(8, b"x")

        manager = KVCacheManager(8, 4, hash_algorithm=hash_function, enable_events=True)
        sequence = Sequence("a", range(7))
        if call == "append":
            start(manager, sequence)
        manager.take_events()
        grow = {
            "allocate": lambda: manager.allocate_slots(sequence),
            "append": lambda: manager.append_slots(sequence, [7]),
        }[call]
        before = manager.inspect.free_block_ids(), manager.stats, sequence.num_tokens
        broken = True
        with pytest.raises(OSError, match="no entropy left"):
            grow()
        manager.check()
        assert (manager.inspect.free_block_ids(), manager.stats, sequence.num_tokens) == before
        assert manager.take_events() == []
        broken = False
        assert grow() is not None
        assert len(manager.take_events()) == 1


class TestEventsAndStats:
    def test_events_tell_the_story_in_order(self) -> None:
        manager = KVCacheManager(4, 2, enable_events=True)
        sequence = Sequence("a", [1, 2, 3, 4, 5], salt="s")
        start(manager, sequence)
        manager.append_slots(sequence, [6])
        one, two, three = (block.block_hash for block in sequence.blocks)
        assert one is not None
        assert two is not None
        assert three is not None
        stored, extended = manager.take_events()
        keys, told = ((0, b"\x01\x01\x00\x00\x00s"),), {"kind": "full_attention", "sequence_id": "a"}
        assert stored == BlockStored((one, two), None, stored.tokens, 2, keys, block_ids=(0, 1), salt="s", **told)  # type: ignore[union-attr]
        assert stored.token_ids == [1, 2, 3, 4]  # type: ignore[union-attr]
        assert isinstance(extended, BlockStored)
        assert (extended.block_hashes, extended.parent_block_hash, extended.token_ids) == ((three,), two, [5, 6])
        assert (extended.extra_keys, extended.block_ids, extended.salt, extended.lora) == ((), (2,), "s", None)
        manager.free(sequence)
        assert manager.take_events() == []
        start(manager, Sequence("b", [9, 9, 9, 9, 9]))
        removed, stored = manager.take_events()
        assert removed == BlockRemoved((three, two))
        assert isinstance(stored, BlockStored)
        manager.reset_prefix_cache()
        assert manager.take_events() == [AllBlocksCleared()]

    def test_nothing_is_hashed_when_nothing_will_be_cached(self) -> None:
        num_hashed = 0

        def hash_function(preimage: bytes) -> bytes:
            nonlocal num_hashed
            num_hashed += 1
            return sha256_digest(preimage)

        def decode(manager: KVCacheManager, sequence: Sequence) -> int:
            before = num_hashed
            for _ in range(8):
                manager.append_slots(sequence, [1])
                manager.append_step([sequence], [1])
            return num_hashed - before

        off = KVCacheManager(64, 4, hash_algorithm=hash_function, enable_caching=False, enable_events=True)
        sequence = Sequence("a", range(40))
        start(off, sequence)
        assert decode(off, sequence) == 0
        manager = KVCacheManager(64, 4, hash_algorithm=hash_function, enable_events=True)
        sequence, sharer = Sequence("a", range(40)), Sequence("b", range(41))
        start(manager, sequence)
        start(manager, sharer)
        assert decode(manager, sharer) == 4  # a digest for each block that it filled
        manager.abort(sequence, 0)
        assert decode(manager, sharer) == 0  # it is attached to nothing now
        manager.reset_prefix_cache()
        assert decode(manager, sharer) == 0

    def test_events_and_stats_can_be_sent_to_another_process(self) -> None:
        manager = KVCacheManager(4, 2, enable_events=True)
        start(manager, Sequence("a", [1, 2, 3]))
        manager.reset_prefix_cache()
        events = manager.take_events()
        assert len(events) == 2
        assert pickle.loads(pickle.dumps((events, manager.stats))) == (events, manager.stats)

    def test_a_duplicate_is_no_event(self) -> None:
        manager = KVCacheManager(8, 2, enable_events=True)
        one, two = Sequence("one", [1]), Sequence("two", [1])
        start(manager, one)
        start(manager, two)
        manager.append_slots(one, [2])
        assert len(manager.take_events()) == 1
        manager.append_slots(two, [2])
        assert manager.take_events() == []
        manager.abort(one, 0)
        assert manager.take_events() == []
        manager.abort(two, 0)
        assert [type(event) for event in manager.take_events()] == [BlockRemoved]

    def test_events_must_be_asked_for(self) -> None:
        with pytest.raises(InvalidArgumentError, match="enable_events=True"):
            KVCacheManager(8, 2).take_events()

    def test_stats(self) -> None:
        manager = KVCacheManager(4, 4)
        assert manager.stats.hit_rate == 0.0
        first, second = Sequence("a", range(10)), Sequence("b", range(10))
        start(manager, first)
        start(manager, second)
        manager.free(first)
        manager.free(second)
        start(manager, Sequence("c", range(50, 60)))
        stats = manager.stats
        assert (stats.num_queries, stats.num_hits) == (3, 1)
        assert (stats.num_queried_tokens, stats.num_hit_tokens) == (30, 8)
        assert stats.hit_rate == pytest.approx(8 / 30)
        assert (stats.num_taken_blocks, stats.num_evicted_blocks) == (7, 1)
        assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (4, 1, 3)


def test_a_sequence_is_found_by_its_id_while_it_holds_blocks():
    """So a sequence can be freed even if the caller has lost the object."""
    manager = KVCacheManager(8, 2)
    manager.allocate_slots(Sequence(("lost", 1), [1, 2, 3]))
    lost = manager.sequence(("lost", 1))
    assert lost is not None and lost.token_ids() == [1, 2, 3]
    assert manager.sequence("other") is None
    manager.free(lost)
    assert manager.sequence(("lost", 1)) is None and manager.num_free_blocks == 8
    with pytest.raises(InvalidArgumentError, match="sequence_id: expected something hashable"):
        manager.sequence([])


def test_leaks_are_the_sequences_that_nobody_freed_with_their_ages():
    manager = KVCacheManager(16, 2)
    lost, kept = Sequence("lost", [1, 2, 3]), Sequence("kept", [4])
    manager.allocate_slots(lost)
    for number in range(3):  # each begins and ends, and makes the lost one older
        passing = Sequence(number, [5, 6])
        manager.allocate_slots(passing)
        manager.free(passing)
    manager.allocate_slots(kept)
    child = manager.fork(kept, "child")
    assert manager.sequences() == [lost, kept, child]
    assert manager.inspect.leaks() == [HeldBlocks(lost, 2, 5), HeldBlocks(kept, 1, 1), HeldBlocks(child, 1, 0)]
    assert [held.sequence for held in manager.inspect.leaks(min_age=2)] == [lost]
    for sequence in manager.sequences():
        manager.free(sequence)
    assert manager.inspect.leaks() == manager.sequences() == []


def test_a_block_is_found_by_its_digest_while_it_is_cached():
    """With duplicates it finds the block that hits get, and never one that was cached before a reset."""
    manager = KVCacheManager(8, 2)
    first, second = Sequence("first", [1, 2, 3]), Sequence("second", [1, 2, 4])
    manager.allocate_slots(first)
    manager.allocate_slots(second, num_new_tokens=3, hit=None)
    (name,) = manager.inspect.block_hashes(first)
    assert manager.inspect.find_block(name) is first.blocks[0] is not second.blocks[0]
    assert manager.inspect.find_block(name[::-1]) is None
    manager.free(first)
    assert manager.inspect.find_block(name) is first_cached(manager, [1, 2])
    manager.reset_prefix_cache()
    assert manager.inspect.find_block(name) is None
    with pytest.raises(InvalidArgumentError, match="digest: expected bytes, got 'name'"):
        manager.inspect.find_block("name")


def first_cached(manager: KVCacheManager, tokens: list[int]) -> object:
    return manager.get_computed_blocks(Sequence("look", tokens)).blocks[0]
