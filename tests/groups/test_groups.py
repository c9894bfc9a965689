"""Groups of layers, one promise at a time. Long histories are in test_group_stateful.py."""

from dataclasses import dataclass
from typing import Any

import pytest
from model.sight import first_seen

from kvblocks import (
    BlockStored,
    CacheMetrics,
    ChunkedLocal,
    FullAttention,
    Group,
    GroupUsage,
    InvalidArgumentError,
    KVCacheManager,
    KVLayer,
    PinBudgetError,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StaleHitError,
    kind_of_layers,
    plan,
)
from kvblocks.core.layout import make_layout

FULL, WINDOW = FullAttention(4), SlidingWindow(4, 6)


def compute(manager: KVCacheManager, name: str, tokens: list[int], chunk: int | None = None, **keys: Any) -> int:
    """Run a request from start to end. Returns the number of hit tokens."""
    sequence = Sequence(name, tokens, **keys)
    hit = manager.get_computed_blocks(sequence)
    start = hit.num_tokens
    size = chunk or len(tokens)
    assert manager.allocate_slots(sequence, min(size, len(tokens) - start), hit=hit) is not None
    while sequence.num_computed_tokens < len(tokens):
        manager.allocate_slots(sequence, min(size, len(tokens) - sequence.num_computed_tokens))
    manager.free(sequence)
    manager.check()
    return start


def hit_tokens(manager: KVCacheManager, tokens: list[int], **keys: Any) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens, **keys)).num_tokens


def lost_window(**options: Any) -> KVCacheManager:
    """A manager whose full group has tokens 0 to 40 cached, and whose window lacks blocks for hits of up to 16."""
    manager = KVCacheManager(20, groups=[FULL, WINDOW], **options)
    compute(manager, "a", list(range(40)), chunk=8)
    compute(manager, "b", list(range(100, 108)))
    hit = manager.get_computed_blocks(Sequence("probe", range(13)))
    assert (hit.num_tokens, hit.num_matched_tokens) == (0, 12)
    return manager


class TestSpecs:
    @pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("step", [1, 3, 7])
    def test_num_blocks_is_the_most_that_is_ever_held(self, window: int, size: int, step: int) -> None:
        spec = SlidingWindow(size, window)
        manager = KVCacheManager(200, groups=[spec, FullAttention(size)])
        most = 0
        for first in range(1, step + 1):  # a first chunk of each length, so that chunks begin anywhere
            sequence = Sequence("a", range(40))
            manager.allocate_slots(sequence, first)
            while sequence.num_computed_tokens < 40:
                num_new = min(step, 40 - sequence.num_computed_tokens)
                manager.allocate_slots(sequence, num_new)
                held = len([block for block in sequence.group_blocks(0) if block is not None])
                assert held <= spec.num_blocks(sequence.num_computed_tokens, step)
                most = max(most, held)
            assert len(sequence.group_blocks(1)) == FullAttention(size).num_blocks(40, step) == -(-40 // size)
            manager.free(sequence)
        assert most == spec.num_blocks(40, step)

    def test_few_tokens_need_few_blocks(self) -> None:
        assert SlidingWindow(16, 512).num_blocks(5) == 1
        assert SlidingWindow(16, 512).num_blocks(0) == FullAttention(16).num_blocks(0) == 0
        assert SlidingWindow(16, 512).num_blocks(100_000) == 33
        assert SlidingWindow(16, 512).num_blocks(100_000, 2048) == 161

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "4", None, True])
    def test_bad_numbers(self, bad: Any) -> None:
        for make in (lambda: FullAttention(bad), lambda: SlidingWindow(bad, 4), lambda: SlidingWindow(4, bad)):
            with pytest.raises(InvalidArgumentError, match="expected an int of at least 1"):
                make()

    def test_the_kind_that_a_config_describes(self) -> None:
        assert kind_of_layers(4) == FULL and kind_of_layers(4, 6) == kind_of_layers(4, window=6) == WINDOW
        assert kind_of_layers(4, chunk_size=8) == ChunkedLocal(4, 8)
        with pytest.raises(InvalidArgumentError, match="expected a window or a chunk_size, got 6 and 8"):
            kind_of_layers(4, 6, 8)

    @pytest.mark.parametrize("groups", [[], [4], None.__class__, [FULL, "window"]])
    def test_bad_groups(self, groups: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="groups: expected Group items"):
            KVCacheManager(8, groups=groups)

    def test_block_sizes_divide_each_other(self) -> None:
        with pytest.raises(InvalidArgumentError, match="divides the next larger one, got 4 and 6"):
            KVCacheManager(8, groups=[FULL, SlidingWindow(2, 4), SlidingWindow(6, 4)])

    def test_a_block_size_beside_the_groups_agrees(self) -> None:
        assert KVCacheManager(8, 4, groups=[WINDOW, FULL]).block_size == 4
        with pytest.raises(InvalidArgumentError, match="expected None, or 4 as the groups have it, got 8"):
            KVCacheManager(8, 8, groups=[SlidingWindow(8, 4), FULL])


class TestOneFullGroup:
    def test_it_is_the_manager_without_groups(self) -> None:
        manager = KVCacheManager(8, groups=[FULL])
        assert manager.groups == KVCacheManager(8, 4).groups == (FULL,)
        assert (manager.block_size, manager.alignment) == (4, 4)
        sequence = Sequence("a", range(9))
        manager.allocate_slots(sequence)
        assert sequence.side_tables is None
        assert sequence.group_block_ids() == sequence.group_block_ids(0) == sequence.block_ids == [0, 1, 2]
        assert sequence.group_blocks(0) == sequence.blocks
        assert (sequence.first_live_block(0), sequence.new_group_blocks) == (0, [])
        assert manager.append_step([sequence], [5]) == []
        manager.append_slots(sequence, [6, 7])
        assert manager.append_step([sequence], [8]) == [(0, 0, 3, 3)]
        assert manager.take_copies() == []
        assert manager.inspect.group_usage() == [GroupUsage(0, 4, 3)]
        hit = manager.get_computed_blocks(Sequence("b", range(10)))
        assert (hit.num_matched_tokens, hit.group_blocks(0)) == (8, hit.blocks)

    @pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]])
    def test_a_group_that_there_is_not(self, groups: list[Group]) -> None:
        manager = KVCacheManager(8, groups=groups)
        sequence = Sequence("a", range(9))
        hit = manager.get_computed_blocks(sequence)
        manager.allocate_slots(sequence, hit=hit)
        for ask in (sequence.group_block_ids, sequence.group_blocks, sequence.first_live_block, hit.group_blocks):
            with pytest.raises(
                InvalidArgumentError, match=f"group: expected an int from 0 to {len(groups) - 1}, got 2"
            ):
                ask(2)


class TestTables:
    def test_what_leaves_the_window_is_reused(self) -> None:
        manager = KVCacheManager(9, groups=[FULL, WINDOW])
        sequence = Sequence("a", range(16))
        manager.allocate_slots(sequence, 8)
        assert (sequence.group_block_ids(0), sequence.group_block_ids(1)) == ([0, 1], [2, 3])
        manager.allocate_slots(sequence)
        assert (sequence.group_block_ids(0), sequence.group_block_ids(1)) == ([0, 1, 4, 5], [2, 3, 6, 7])
        assert [[block.block_id for block in part] for part in sequence.new_group_blocks] == [[4, 5], [6, 7]]
        manager.append_slots(sequence, [7])  # sees 11 and later: block 2 is free, then 3
        assert sequence.group_block_ids(1) == [0, 0, 6, 7, 2]
        assert (sequence.group_block_ids(0), sequence.first_live_block(1)) == ([0, 1, 4, 5, 8], 2)
        assert sequence.group_blocks(1)[:2] == [None, None]
        assert manager.inspect.free_block_ids() == [3]

    def test_a_call_can_use_what_it_lets_go_of(self) -> None:
        manager = KVCacheManager(9, groups=[FULL, WINDOW])
        sequence = Sequence("a", range(17))
        manager.allocate_slots(sequence, 16)
        assert manager.num_free_blocks == 1
        other = Sequence("b", [5])
        assert manager.allocate_slots(other) is None
        assert manager.allocate_slots(sequence) is not None
        assert manager.num_free_blocks == 1

    def test_it_can_not_use_what_others_hold_too(self) -> None:
        manager = KVCacheManager(8, groups=[FULL, WINDOW], debug=True)
        sequence = Sequence("a", range(16))
        manager.allocate_slots(sequence)
        child = manager.fork(sequence, "child")
        assert manager.num_free_blocks == 0
        assert manager.append_slots(sequence, [7]) is None  # two blocks leave its window, and the child's they stay
        assert manager.append_step([sequence], [7]) is None
        assert manager.append_step([sequence, child], [7, 8]) is None  # together they free two, and need four
        manager.free(child)
        assert manager.append_slots(sequence, [7]) is not None

    def test_append_step_says_the_group_of_each_change(self) -> None:
        manager = KVCacheManager(20, groups=[WINDOW, FULL])
        sequence = Sequence("a", range(8))
        manager.allocate_slots(sequence)
        assert manager.append_step([sequence], [1]) == [(0, 0, 2, 4), (0, 1, 2, 5)]
        assert manager.append_step([], []) == []

    def test_the_changes_of_one_window_alone_say_group_0(self) -> None:
        manager = KVCacheManager(20, groups=[WINDOW])
        sequence = Sequence("a", range(8))
        manager.allocate_slots(sequence)
        assert manager.append_step([sequence], [1]) == [(0, 0, 2, 2)]
        assert sequence.block_ids == sequence.group_block_ids(0) == [0, 1, 2]

    def test_truncate_goes_back_to_what_the_last_call_found(self) -> None:
        manager = KVCacheManager(20, groups=[FULL, WINDOW])
        sequence = Sequence("a", range(10))
        manager.allocate_slots(sequence)
        manager.append_slots(sequence, [1, 2, 3, 4])
        manager.append_slots(sequence, [5, 6, 7, 8])  # from 14 on: nothing before 9 is seen
        with pytest.raises(SequenceStateError, match="sees no token before 8, where the KV of group 1"):
            manager.truncate(sequence, 12)
        assert sequence.num_tokens == 18
        manager.truncate(sequence, 14)
        assert sequence.token_ids(10) == [1, 2, 3, 4]
        manager.append_slots(sequence, [6])
        manager.check()

    def test_copies_say_their_group(self) -> None:
        manager = KVCacheManager(30, groups=[SlidingWindow(2, 6), FULL])
        sequence = Sequence("a", range(7))
        manager.allocate_slots(sequence)
        child = manager.fork(sequence, "child")
        assert manager.append_step([sequence, child], [1, 2]) == [(0, 0, 3, 6), (0, 1, 1, 7)]
        assert manager.take_copies() == [(0, 3, 6), (1, 5, 7)]
        manager.free(child)
        manager.free(sequence)
        manager.check()

    def test_copies_are_told_once(self) -> None:
        manager = KVCacheManager(30, groups=[FULL, WINDOW])
        sequence = Sequence("a", range(6))
        manager.allocate_slots(sequence)
        child = manager.fork(sequence, "child")
        manager.append_slots(child, [1])
        assert manager.take_copies() == [(0, 1, 4), (1, 3, 5)]
        assert manager.take_copies() == []


class TestHits:
    def test_a_window_needs_its_last_tokens_only(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(32)), chunk=8)
        hit = manager.get_computed_blocks(Sequence("b", [*range(32), 5]))
        assert hit.num_tokens == 32
        assert [block is not None for block in hit.group_blocks(1)] == [False] * 6 + [True] * 2
        assert len([block for block in hit.group_blocks(0) if block is not None]) == 8

    def test_a_whole_prompt_needs_one_token_more(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, SlidingWindow(4, 5)])
        prompt = Sequence("a", range(16))
        manager.allocate_slots(prompt)
        manager.append_slots(prompt, [1])  # lets go of 0-11: token 16 sees 12 and later
        longer, whole = Sequence("b", [*range(16), 9]), Sequence("c", range(16))
        assert manager.get_computed_blocks(longer).group_blocks(1)[:3] == [None, None, None]
        hit = manager.get_computed_blocks(whole)
        assert (hit.num_tokens, hit.num_readonly_tokens) == (15, 16)
        assert [block is not None for block in hit.group_blocks(1)] == [False, False, True, True]  # 15 sees 11
        manager.allocate_slots(whole, hit=hit)
        assert whole.num_readonly_tokens == 16

    def test_hits_are_multiples_of_the_largest_block(self) -> None:
        manager = KVCacheManager(40, groups=[SlidingWindow(8, 4), FULL, SlidingWindow(2, 3)])
        assert manager.alignment == 8
        compute(manager, "a", list(range(30)))
        assert hit_tokens(manager, list(range(22))) == 16
        assert manager.get_computed_blocks(Sequence("b", range(22))).num_matched_tokens == 20

    def test_a_stale_attached_block_makes_a_stale_hit(self) -> None:
        manager = KVCacheManager(8, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(16)))
        probe = Sequence("b", [*range(16), 5])
        hit = manager.get_computed_blocks(probe)
        assert hit.num_tokens == 16
        compute(manager, "c", list(range(100, 108)))  # takes the prefix's end, and with it what is attached there
        with pytest.raises(StaleHitError):
            manager.allocate_slots(probe, hit=hit)

    def test_what_is_pending_comes_behind_what_the_full_group_has(self) -> None:
        manager = lost_window()
        tokens = [*range(12), *range(500, 520)]
        ahead = Sequence("ahead", tokens)
        manager.allocate_slots(ahead, 8)
        hit = manager.get_computed_blocks(Sequence("behind", tokens))
        assert (hit.num_tokens, hit.num_matched_tokens) == (8, 12)
        assert (hit.pending_tokens, hit.pending_sequence) == (20, ahead)

    def test_where_prefixes_part_is_kept_from_the_second_time_on(self) -> None:
        """Where a system prompt ends is known only once a second request differs there from the first."""
        manager = KVCacheManager(41, groups=[FULL, WINDOW])
        system = list(range(16))
        blocker = Sequence("blocker", range(900, 900 + 44))  # so that nothing is left but what is reused
        for number in range(3):
            tokens = [*system, *range(100 * number + 100, 100 * number + 132)]
            assert compute(manager, f"a{number}", tokens, chunk=8) == (16 if number == 2 else 0)
            if number == 1:
                assert manager.stats.num_limited_tokens == 16
            if number == 0:
                manager.allocate_slots(blocker)
        # Those of a later one reuse what left their windows, not what the system prompt's end needs.
        for number in range(3, 9):
            tokens = [*system, *range(100 * number + 100, 100 * number + 132)]
            assert compute(manager, f"a{number}", tokens, chunk=8) == 16

    def test_what_is_freed_at_an_end_outlives_what_left_a_window(self) -> None:
        manager = KVCacheManager(28, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(24)), chunk=8)
        sequence = Sequence("long", range(100, 140))
        for _ in range(5):
            assert manager.allocate_slots(sequence, 8) is not None
        assert hit_tokens(manager, [*range(24), 1]) == 24

    def test_the_newer_of_two_attached_blocks_stays(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(8)))
        older = manager.get_computed_blocks(Sequence("b", [*range(8), 1])).group_blocks(1)
        sequence = Sequence("c", range(8))
        manager.allocate_slots(sequence)  # without a hit: it computes the same again
        newer = manager.get_computed_blocks(Sequence("b", [*range(8), 1])).group_blocks(1)
        assert newer == sequence.group_blocks(1) != older
        first = [block.block_id for block in older if block is not None]
        assert manager.inspect.free_block_ids()[: len(first)] == sorted(first)  # they can be hit no more

    def test_an_abort_takes_attached_blocks_along_that_were_never_written(self) -> None:
        """The primary blocks of 0 to 12 stay cached, since another sequence wrote them; the window's blocks weren't."""
        manager = lost_window()
        probe = Sequence("probe", range(13))
        sequence = Sequence("c", range(12))
        manager.allocate_slots(sequence)
        assert manager.get_computed_blocks(probe).num_tokens == 12
        manager.abort(sequence, 0)
        hit = manager.get_computed_blocks(probe)
        assert (hit.num_tokens, hit.num_matched_tokens) == (0, 12)
        manager.check()


@dataclass(frozen=True)
class NoTable(Group):
    """A kind whose layers keep nothing in blocks, as recurrent layers do."""

    label = event_kind = "states"
    has_table = False

    def first_seen(self, position: int) -> int:
        return position

    def num_blocks(self, num_tokens: Any, num_step_tokens: Any = 1) -> int:
        return 0 * num_tokens * num_step_tokens


@pytest.mark.parametrize(
    ("groups", "tables"),
    [
        ([FullAttention(4), NoTable(8)], [0]),
        ([NoTable(4), SlidingWindow(4, 6), FullAttention(2)], [1, 2]),
        ([SlidingWindow(2, 3), NoTable(4)], [0]),
    ],
)
def test_a_group_may_have_no_table(groups: list[Group], tables: list[int]) -> None:
    manager = KVCacheManager(64, groups=groups, debug=True)
    assert not make_layout(None, groups).is_single and make_layout(None, groups[:1]).is_single == (groups[0].sees_all)
    alone = KVCacheManager(64, groups=[groups[group] for group in tables])
    first, same = Sequence("first", range(21)), Sequence("first", range(21))
    for each, sequence in ((manager, first), (alone, same)):
        assert each.allocate_slots(sequence, num_total_tokens=30) is not None
    assert manager.num_free_blocks == alone.num_free_blocks
    for group in range(len(groups)):
        there = tables.index(group) if group in tables else None
        assert sequence_tables(first, group) == ([], [], 0, []) if there is None else sequence_tables(same, there)
    second = Sequence("second", range(23))
    hit = manager.get_computed_blocks(second)
    assert hit.num_tokens % manager.alignment == 0 and hit.num_tokens
    assert [len(hit.group_blocks(group)) > 0 for group in range(len(groups))] == [
        g in tables for g in range(len(groups))
    ]
    assert manager.allocate_slots(second, hit=hit) is not None
    fork = manager.fork(second, "fork")
    changes = manager.append_step([first, second, fork], [7, 8, 9])
    assert changes and {group for _, group, _, _ in changes} <= set(tables)
    assert {group for group, _, _ in manager.take_copies()} <= set(tables)
    usage = manager.inspect.group_usage()
    assert [bool(used.num_owned_blocks) for used in usage] == [group in tables for group in range(len(groups))]
    for sequence in (first, second, fork):
        manager.free(sequence)
    assert manager.num_free_blocks == 64


def sequence_tables(sequence: Sequence, group: int) -> Any:
    blocks = [None if block is None else block.block_id for block in sequence.group_blocks(group)]
    new = [block.block_id for block in sequence.new_group_blocks[group]] if sequence.new_group_blocks else blocks
    return sequence.group_block_ids(group), blocks, sequence.first_live_block(group), new


@pytest.mark.parametrize("num_step_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "kind",
    [
        *[SlidingWindow(size, window) for size in (1, 4) for window in (1, 2, 5, 8)],
        *[ChunkedLocal(size, chunk) for size in (1, 4, 6) for chunk in (1, 3, 4, 8, 12)],
        FullAttention(4),
    ],
)
def test_a_kind_sees_and_holds_what_it_says(kind: Group, num_step_tokens: int) -> None:
    seen = [first_seen(kind, position) for position in range(60)]
    assert [kind.first_seen(position) for position in range(60)] == seen
    assert [kind.first_needed(position) for position in range(60)] == [first // kind.block_size for first in seen]
    for num_tokens in (1, 3, 10, 48):
        held = [  # what a step holds that ends at `end`
            (end - 1) // kind.block_size - first_seen(kind, max(0, end - num_step_tokens)) // kind.block_size + 1
            for end in range(1, num_tokens + 1)
        ]
        most = kind.num_blocks(num_tokens, num_step_tokens)
        assert max(held) <= most and (num_tokens < 48 or max(held) == most)


class TestChunks:
    """Blocks of 4 tokens, chunks of 8."""

    KINDS = (FullAttention(4), ChunkedLocal(4, 8))

    def test_a_hit_between_chunks_needs_nothing_of_them(self) -> None:
        manager = KVCacheManager(32, groups=self.KINDS, debug=True)
        compute(manager, "first", list(range(17)), chunk=8)
        for num_tokens, needed in ((9, []), (14, [2]), (17, []), (13, [2])):
            hit = manager.get_computed_blocks(Sequence("probe", list(range(num_tokens))))
            assert hit.num_tokens == num_tokens // 4 * 4
            table = hit.group_blocks(1)
            assert [number for number, block in enumerate(table) if block is not None] == needed

    def test_an_exact_repeat_computes_the_last_token_of_a_chunk_again(self) -> None:
        manager = KVCacheManager(32, groups=self.KINDS, debug=True)
        compute(manager, "first", list(range(16)))
        hit = manager.get_computed_blocks(Sequence("again", list(range(16))))
        assert (hit.num_tokens, [block is not None for block in hit.group_blocks(1)]) == (
            15,
            [False, False, True, True],
        )

    def test_a_chunk_is_released_when_the_next_one_begins(self) -> None:
        manager = KVCacheManager(32, groups=self.KINDS, debug=True)
        sequence = Sequence("first", list(range(15)))
        assert manager.allocate_slots(sequence) is not None
        assert sequence.first_live_block(1) == 0  # it was one step, whose first tokens see the first chunk
        manager.append_slots(sequence, [15])
        assert sequence.first_live_block(1) == 2
        manager.append_slots(sequence, [16])
        assert sequence.first_live_block(1) == 4
        with pytest.raises(SequenceStateError, match=r"sees no token before 16, where .*chunks of 8"):
            manager.truncate(sequence, 15)

    def test_what_people_and_events_see(self) -> None:
        manager = KVCacheManager(9, groups=self.KINDS, enable_events=True, num_history_blocks=32)
        compute(manager, "first", list(range(14)))
        stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
        assert {(e.group_idx, e.kind, e.window) for e in stored} == {
            (0, "full_attention", None),
            (1, "chunked_local_attention", None),
        }
        compute(manager, "second", list(range(100, 120)), chunk=4)
        assert "chunks of 8" in str(plan(self.KINDS, [KVLayer(0, 1, 8), KVLayer(1, 1, 8)], 2, 2**20))


class TestAnswers:
    def test_explain_names_the_group(self) -> None:
        manager = KVCacheManager(22, groups=[FULL, WINDOW], num_history_blocks=100)
        compute(manager, "a", list(range(32)), chunk=8)
        assert manager.inspect.explain(Sequence("b", range(32))).cause == "no miss"
        compute(manager, "b", list(range(100, 120)))
        explanation = manager.inspect.explain(Sequence("c", range(18)))
        assert (explanation.cause, explanation.group, explanation.kind) == ("group", 1, "a window of 6")
        assert explanation.num_matched_blocks == 4
        assert explanation.missing_tokens is not None
        assert "group 1 (a window of 6) lacks tokens" in str(explanation)
        assert explanation.removal is not None and explanation.removal.cause == "evicted"
        assert "they were evicted" in str(explanation)
        other = manager.inspect.explain(Sequence("d", range(500, 520)))
        assert (other.cause, other.group) == ("never cached", 0)

    def test_explain_without_a_history(self) -> None:
        text = str(lost_window().inspect.explain(Sequence("c", range(13))))
        assert text.startswith("0 of 3 full blocks are cached in all groups; 3 are in the primary one")
        assert text.endswith("lacks tokens 8 to 11; as far as is remembered they were never cached")

    def test_events_name_groups_and_columns(self) -> None:
        manager = KVCacheManager(40, groups=[SlidingWindow(2, 5), FULL, SlidingWindow(8, 9)], enable_events=True)
        sequence = Sequence("a", range(8), salt="s")
        manager.allocate_slots(sequence)
        stored = {group: [] for group in range(3)}
        for event in manager.take_events():
            assert isinstance(event, BlockStored) and event.group_idx is not None
            stored[event.group_idx].append(event)
        (full,) = stored[1]
        first, second = full.block_hashes
        names = [first + b"\1\0\0\0", second + b"\0\0\0\0", second + b"\1\0\0\0"]
        assert [event.block_hashes for event in stored[0]] == [(name,) for name in names]  # 0 and 1: of no use to a hit
        assert [event.parent_block_hash for event in stored[0]] == [first + b"\0\0\0\0", *names[:2]]
        assert [event.token_ids for event in stored[0]] == [[2, 3], [4, 5], [6, 7]]
        assert [(e.block_hashes, e.parent_block_hash, e.block_size) for e in stored[2]] == [((second,), None, 8)]
        assert len(full.extra_keys) == 1
        manager.abort(sequence, 0)
        removed = [(event.group_idx, name) for event in manager.take_events() for name in event.block_hashes]
        assert set(removed) == {*[(0, name) for name in names], (1, first), (1, second), (2, second)}
        assert removed.index((0, names[1])) < removed.index((1, second))

    def test_events_of_equal_blocks_have_their_keys(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, WINDOW], enable_events=True)
        manager.allocate_slots(Sequence("a", range(8), extra_keys=[(5, 7, "image")]))
        events = [event for event in manager.take_events() if isinstance(event, BlockStored)]
        keys = {event.group_idx: event.extra_keys for event in events}
        assert keys[1][0][1] == keys[0][0][1]

    def test_virtual_blocks_make_no_events(self) -> None:
        manager = KVCacheManager(40, groups=[WINDOW], enable_events=True)
        compute(manager, "a", list(range(8)))
        assert {event.group_idx for event in manager.take_events() if isinstance(event, BlockStored)} == {0}
        manager.reset_prefix_cache()
        assert [type(event).__name__ for event in manager.take_events()] == ["AllBlocksCleared"]

    def test_usage_and_metrics(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, WINDOW])
        metrics = CacheMetrics(manager, sample_every=1)
        sequence = Sequence("a", range(20))
        manager.allocate_slots(sequence, 10)
        manager.allocate_slots(sequence)
        assert manager.inspect.group_usage() == [GroupUsage(0, 5, 5), GroupUsage(1, 4, 5)]
        assert manager.stats.num_cached_blocks == 10
        assert manager.inspect.prefix_rows()[0].num_blocks == 5
        manager.free(sequence)
        compute(manager, "b", list(range(300, 420)), chunk=8)
        assert metrics.snapshot().lifetimes.num_values > 0
        assert metrics.snapshot().stats.num_evicted_blocks > 0

    def test_cascades_are_of_the_full_group(self) -> None:
        manager = KVCacheManager(40, groups=[WINDOW, FULL])
        a, b = Sequence("a", [*range(8), 1]), Sequence("b", [*range(8), 2])
        for sequence in (a, b):
            manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        (shared,) = manager.inspect.shared_prefixes([a, b])
        assert list(shared.block_ids) == a.group_block_ids(1)[:2] == b.group_block_ids(1)[:2]

    @pytest.mark.parametrize(
        ("call", "ask"),
        [
            ("shared_prefixes", lambda manager: manager.inspect.shared_prefixes([])),
            ("quotas.set", lambda manager: manager.quotas.set("a", 1)),
            ("quotas.set_default", lambda manager: manager.quotas.set_default(1)),
            ("prefix_rows", lambda manager: manager.inspect.prefix_rows()),
            ("prefix_rows", lambda manager: manager.inspect.to_dot()),
        ],
    )
    def test_what_needs_a_full_group_says_so(self, call: str, ask: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=f"{call}: expected a manager with a group of full attention"):
            ask(KVCacheManager(8, groups=[WINDOW]))


class TestQuotas:
    def test_attached_blocks_count_and_go_with_their_prefix(self) -> None:
        manager = KVCacheManager(24, groups=[FULL, SlidingWindow(4, 100)])
        manager.quotas.set("greedy", 4)
        compute(manager, "a", list(range(16)), salt="greedy")
        compute(manager, "b", list(range(16)), salt="modest")
        assert {usage.salt: usage.num_cached_blocks for usage in manager.quotas} == {"greedy": 8}
        manager.quotas.set("modest", 100)
        assert {usage.salt: usage.num_cached_blocks for usage in manager.quotas} == {"greedy": 8, "modest": 8}
        compute(manager, "c", list(range(100, 124)))
        assert hit_tokens(manager, [*range(16), 1], salt="modest") == 16
        assert hit_tokens(manager, [*range(16), 1], salt="greedy") < 16
        manager.check()


class TestPins:
    def test_a_pin_keeps_what_its_hit_needs(self) -> None:
        manager = KVCacheManager(24, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(16)))
        pin = manager.pins.pin(range(16), priority=100)
        assert (pin.num_blocks, pin.num_held_blocks, pin.num_wanted_blocks) == (4, 6, 6)
        for number in range(5):
            compute(manager, f"b{number}", list(range(100 * number + 100, 100 * number + 130)))
        assert hit_tokens(manager, [*range(16), 1]) == 16
        manager.pins.unpin(pin)
        assert manager.num_free_blocks == 24
        manager.check()

    def test_a_pin_takes_hold_before_the_window_has_passed(self) -> None:
        manager = KVCacheManager(40, groups=[FULL, WINDOW])
        pin = manager.pins.pin(range(16))
        compute(manager, "a", [*range(16), *range(100, 140)], chunk=8)
        assert pin.num_held_blocks == pin.num_wanted_blocks == 6
        assert hit_tokens(manager, [*range(16), 1]) == 16

    def test_under_pressure_it_first_gives_up_what_hangs(self) -> None:
        manager = KVCacheManager(12, groups=[FULL, WINDOW])
        compute(manager, "a", list(range(16)))
        pin = manager.pins.pin(range(16), priority=10)
        sequence = Sequence("b", range(100, 116))
        assert manager.allocate_slots(sequence) is not None
        assert (len(pin.blocks), pin.attached_blocks) == (4, [])
        manager.check()

    def test_the_budget_counts_all_groups(self) -> None:
        manager = KVCacheManager(10, groups=[FULL, WINDOW])
        with pytest.raises(PinBudgetError, match="at most 5 blocks together, got 6 more"):
            manager.pins.pin(range(16))

    def test_without_a_full_group_only_windows_count(self) -> None:
        manager = KVCacheManager(8, groups=[WINDOW])
        compute(manager, "a", list(range(24)))
        pin = manager.pins.pin(range(24), priority=100)
        assert (pin.num_wanted_blocks, len(pin.attached_blocks)) == (2, 2)
        compute(manager, "b", list(range(100, 124)))
        assert hit_tokens(manager, [*range(24), 1]) == 24
        assert CacheMetrics(manager).snapshot().pins.num_pinned_blocks == 2


class TestWhatASequenceKeeps:
    """A freed sequence keeps no reference to a manager of several groups."""

    def test_a_freed_sequence_may_go_to_a_manager_of_one_group(self) -> None:
        windows = KVCacheManager(8, groups=[SlidingWindow(4, 8)])
        single = KVCacheManager(16, 4, debug=True)
        sequence = Sequence("a", range(12))
        windows.allocate_slots(sequence)
        windows.free(sequence)
        assert sequence.side_tables is None
        single.allocate_slots(Sequence("other", range(50, 62)))
        single.allocate_slots(sequence)
        assert sequence.block_ids == [block.block_id for block in sequence.blocks] == [3, 4, 5]
        single.append_slots(sequence, list(range(8)))
        single.truncate(sequence, 12)

    def test_a_refused_or_freed_one_has_no_further_tables(self) -> None:
        manager = KVCacheManager(4, groups=[FullAttention(4), SlidingWindow(4, 8)])
        sequence = Sequence("a", range(40))
        assert manager.allocate_slots(sequence) is None
        small = Sequence("b", range(4))
        manager.allocate_slots(small)
        manager.free(small)
        for without in (sequence, small):
            with pytest.raises(InvalidArgumentError, match="group"):
                without.group_block_ids(1)
            assert without.new_group_blocks == []

    def test_an_interrupted_free_leaves_it_to_nobody(self) -> None:
        num_calls = 0

        def clock() -> float:
            nonlocal num_calls
            num_calls += 1
            if num_calls == interrupted_at:
                raise KeyboardInterrupt
            return 0.0

        interrupted_at = 0
        manager = KVCacheManager(16, groups=[FullAttention(4), SlidingWindow(4, 8)])
        manager._start_sampling(1, clock, (1.0,))  # noqa: SLF001
        sequence = Sequence("a", range(12))
        manager.allocate_slots(sequence)
        interrupted_at = num_calls + 2  # when its second table is given back
        with pytest.raises(KeyboardInterrupt):
            manager.free(sequence)
        with pytest.raises(SequenceStateError, match="another manager"):
            KVCacheManager(16, 4).allocate_slots(sequence)


def test_the_history_keeps_the_primary_groups_block_longest() -> None:
    """Since an explanation looks for the primary group's block first."""
    manager = KVCacheManager(8, groups=[FullAttention(4), SlidingWindow(4, 8)], num_history_blocks=1)
    sequence = Sequence("a", range(4))
    manager.allocate_slots(sequence)
    manager.free(sequence)
    manager.allocate_slots(Sequence("b", range(100, 116)))
    assert manager.inspect.explain(Sequence("c", range(4))).cause == "evicted"


class TestWindowsThatAreNotCached:
    """A hit consists of the other groups' blocks. The sequence gets new blocks for what the next token sees."""

    GROUPS = (FullAttention(4), SlidingWindow(4, 8, is_cached=False), SlidingWindow(4, 8))

    def test_a_hit_does_not_wait_for_them(self):
        manager = KVCacheManager(64, groups=self.GROUPS[:2], debug=True, enable_events=True)
        first, second = Sequence("first", range(30)), Sequence("second", [*range(24), 98, 99])
        manager.allocate_slots(first)
        hit = manager.get_computed_blocks(second)
        assert (hit.num_tokens, hit.group_blocks(1)) == (24, [None] * 4)
        assert manager.get_num_blocks_to_allocate(second, 26, hit=hit) == 1 + 3
        assert len(manager.allocate_slots(second, hit=hit)) == 4
        assert second.block_ids[:6] == first.block_ids[:6]
        assert second.first_live_block(1) == 4  # position 24 sees 17 to 24
        assert not set(second.group_block_ids(1)[4:]) & set(first.group_block_ids(1))
        assert [usage.num_cached_blocks for usage in manager.inspect.group_usage()] == [7, 0]
        assert {event.group_idx for event in manager.take_events()} == {0}

    def test_its_blocks_are_free_and_empty_when_it_ends(self):
        manager = KVCacheManager(64, groups=self.GROUPS[:2], debug=True)
        sequence = Sequence("a", range(30))
        manager.allocate_slots(sequence)
        ids = sequence.group_block_ids(1).copy()
        manager.free(sequence)
        assert set(manager.inspect.free_block_ids()[: len(ids)]) >= set(ids[:-1])

    def test_a_group_beside_it_that_is_cached_is_asked_all_the_same(self):
        manager = KVCacheManager(64, groups=self.GROUPS, debug=True)
        first = Sequence("first", range(24))
        manager.allocate_slots(first)
        hit = manager.get_computed_blocks(Sequence("second", range(25)))
        assert (hit.num_tokens, len([block for block in hit.group_blocks(2) if block])) == (24, 2)
        manager.evict_blocks([hit.group_blocks(2)[-1].block_id])
        assert manager.get_computed_blocks(Sequence("second", range(25))).num_tokens == 20

    def test_windows_pass_and_hits_are_cut_as_ever(self):
        manager = KVCacheManager(64, groups=self.GROUPS, debug=True)
        sequence = Sequence("a", range(40))
        for _ in range(5):
            manager.allocate_slots(sequence, 8)
        assert sequence.first_live_block(1) == sequence.first_live_block(2) > 0
        manager.pins.pin(range(16))
        hit = manager.get_computed_blocks(Sequence("b", range(41)))
        assert [hit.cut(most).num_tokens for most in (40, 39)] == [
            40,
            manager.get_computed_blocks(hit.sequence, 39).num_tokens,
        ]
        manager.free(sequence)
        manager.reset_prefix_cache()
        assert manager.stats.num_cached_blocks == 0
