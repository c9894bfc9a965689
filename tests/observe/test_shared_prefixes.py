"""Shared prefixes against a dict of prefixes, on batches that a manager made and on made-up block tables."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from model.history import History, RandomChooser, walk

from kvblocks import InvalidArgumentError, KVCacheBlock, KVCacheManager, Sequence, SequenceStateError, SharedPrefix
from kvblocks.observe.shared_prefixes import find_shared_prefixes

Group = tuple[Any, tuple[int, ...], int, tuple[int, ...], int]


def expected_groups(prefixes: list[list[int]], block_size: int, min_blocks: int) -> set[Group]:
    """Return the expected groups, by a dict. prefixes: block tables, cut to what may be shared."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i, table in enumerate(prefixes):
        for end in range(1, len(table) + 1):
            members.setdefault(tuple(table[:end]), []).append(i)
    shared = {prefix: indices for prefix, indices in members.items() if len(indices) > 1}
    # A group ends where no longer prefix has the same members.
    ends = {
        prefix
        for prefix in shared
        if not any(longer[:-1] == prefix and shared[longer] == shared[prefix] for longer in shared)
    }
    groups: dict[tuple[int, ...], Group] = {}
    for prefix in sorted(ends, key=len):
        above = [groups[prefix[:end]] for end in range(1, len(prefix)) if prefix[:end] in groups]
        parent = above[-1] if above else None
        start = 0 if parent is None else parent[2] + len(parent[3])
        if len(prefix) - start >= min_blocks:
            stretch = prefix[start:]
            groups[prefix] = (parent, tuple(shared[prefix]), start, stretch, len(stretch) * block_size)
    return set(groups.values())


def as_groups(found: list[SharedPrefix]) -> list[Group]:
    groups: list[Group] = []
    for i, group in enumerate(found):
        assert group.parent is None or group.parent < i
        assert group.num_blocks == len(group.block_ids)
        groups.append((None if group.parent is None else groups[group.parent], *group[1:]))
    return groups


def check_batch(
    sequences: list[Sequence], block_size: int, min_blocks: int = 1, visible: Any = None
) -> list[SharedPrefix]:
    """Check that the groups are the dict's, parents first, and that each member's stretches begin at block 0."""
    limits = [sequence.num_computed_tokens for sequence in sequences] if visible is None else visible
    found = find_shared_prefixes(sequences, block_size, min_blocks, visible)
    prefixes = [list(s.block_ids[: limit // block_size]) for s, limit in zip(sequences, limits, strict=True)]
    groups = as_groups(found)
    assert len(set(groups)) == len(groups)
    assert set(groups) == expected_groups(prefixes, block_size, min_blocks)
    for i, prefix in enumerate(prefixes):
        ids: list[int] = []
        for group in found:
            if i in group.members:
                assert group.start_block == len(ids)
                ids += group.block_ids
        assert ids == prefix[: len(ids)]
    return found


def make_sequence(blocks: list[KVCacheBlock], num_computed_tokens: int, block_size: int) -> Sequence:
    """A sequence with a block table of the test's making."""
    sequence = Sequence("made up", [0] * max(1, len(blocks) * block_size))
    sequence.blocks = blocks
    sequence.num_computed_tokens = num_computed_tokens
    return sequence


def start(manager: KVCacheManager, name: str, tokens: list[int], num_new_tokens: int | None = None) -> Sequence:
    sequence = Sequence(name, tokens)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, num_new_tokens, hit=hit) is not None
    return sequence


@pytest.mark.parametrize(("num_blocks", "block_size"), [(24, 1), (30, 1), (24, 2), (40, 2), (30, 3)])
def test_walks_agree_with_a_dict_of_prefixes(num_blocks: int, block_size: int, met: Any) -> None:
    history, chooser = History(num_blocks, block_size), RandomChooser(num_blocks + block_size)
    counts: Counter[str] = Counter()
    for number in range(400):
        walk(history, chooser, num_operations=2)
        if number % 100 == 99:
            history.reset(chooser)
        sequences = [sequence for sequence, _ in history.pairs]
        found = check_batch(sequences, block_size)
        check_batch(sequences, block_size, min_blocks=chooser.integer(2, 4))
        check_batch(sequences, block_size, 1, [chooser.integer(0, s.num_computed_tokens) for s in sequences])
        allocated = [sequence for sequence in sequences if sequence.is_allocated]
        shared = history.manager.inspect.shared_prefixes(allocated)
        assert [group[2:] for group in shared] == [group[2:] for group in found]
        counts["found"] += len(found)
        counts["nested"] += sum(group.parent is not None for group in found)
        counts["free"] += len(sequences) - len(allocated)
        counts["uncomputed"] += sum(len(s.blocks) > s.num_computed_tokens // block_size for s in allocated)
    met["walks"].add(counts)


def test_the_walks_met_all_cases(met: Any) -> None:
    met["walks"].check(5, {"found": 1000, "nested": 320, "free": 4000, "uncomputed": 1900})


POOL = [[KVCacheBlock(10 * position + choice) for choice in range(3)] for position in range(6)]
TABLES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=9)


@given(TABLES, st.integers(1, 3), st.data())
def test_made_up_tables_agree_with_a_dict_of_prefixes(
    tables: list[list[int]], min_blocks: int, data: st.DataObject
) -> None:
    """Including forks whose shared last block isn't full, and equal blocks behind different ones."""
    sequences = []
    for choices in tables:
        blocks = [POOL[position][choice] for position, choice in enumerate(choices)]
        num_computed = data.draw(st.integers(max(0, 2 * len(blocks) - 3), 2 * len(blocks)))
        sequences.append(make_sequence(blocks, num_computed, 2))
    check_batch(sequences, 2, min_blocks)
    check_batch(sequences, 2, min_blocks, [data.draw(st.integers(0, s.num_computed_tokens)) for s in sequences])


@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3)), min_size=2, max_size=6))
def test_tables_longer_than_what_is_compared_at_once(num_main: int, branches: list[tuple[int, int]]) -> None:
    main = [KVCacheBlock(block_id) for block_id in range(num_main)]
    own = [KVCacheBlock(1000 + block_id) for block_id in range(3 * len(branches))]
    tables = [main[:end] + own[3 * i : 3 * i + num_own] for i, (end, num_own) in enumerate(branches)]
    check_batch([make_sequence(table, len(table), 1) for table in tables], 1)


def test_three_levels() -> None:
    manager = KVCacheManager(64, 4)
    system, tenant = list(range(8)), list(range(100, 112))
    batch = [
        start(manager, "a", [*system, *tenant, 1, 2, 3, 4, 5]),
        start(manager, "b", [*system, 7, 7, 7, 7, 7]),
        start(manager, "c", [*system, *tenant, 1, 2, 3, 4, 6]),
        start(manager, "d", [50, *system]),
        start(manager, "e", [*system, *tenant, 9]),
    ]
    ids = batch[0].block_ids
    expected = [
        SharedPrefix(None, (0, 1, 2, 4), 0, tuple(ids[0:2]), 8),
        SharedPrefix(0, (0, 2, 4), 2, tuple(ids[2:5]), 12),
        SharedPrefix(1, (0, 2), 5, tuple(ids[5:6]), 4),
    ]
    assert manager.inspect.shared_prefixes(batch) == expected
    # Two blocks aren't worth a group: those who have more go on in longer ones, "b" reads all by itself.
    assert manager.inspect.shared_prefixes(batch, min_blocks=3) == [
        SharedPrefix(None, (0, 2, 4), 0, tuple(ids[0:5]), 20)
    ]
    assert manager.inspect.shared_prefixes(batch, min_blocks=6) == [SharedPrefix(None, (0, 2), 0, tuple(ids[0:6]), 24)]
    assert manager.inspect.shared_prefixes(batch, min_blocks=7) == []
    assert manager.inspect.shared_prefixes(batch[:1]) == manager.inspect.shared_prefixes([]) == []


def test_groups_that_begin_alike_come_in_the_order_of_the_batch() -> None:
    manager = KVCacheManager(64, 2)
    ends = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 1), (2, 1), (1, 2), (2, 2)]
    batch = [start(manager, str(i), [9, 9] * a + [b, b, i]) for i, (a, b) in enumerate(ends)]
    assert [(group.parent, group.members) for group in manager.inspect.shared_prefixes(batch)] == [
        (None, (0, 1, 2, 3, 4, 5, 6, 7)),
        (0, (1, 3, 5, 7)),  # those who go on with the longest, then those who part from it there
        (1, (1, 5)),
        (1, (3, 7)),
        (0, (0, 4)),
        (0, (2, 6)),
    ]
    others = [start(manager, f"other {i}", [i % 3 + 20] * 2 + [i]) for i in range(6)]
    assert [group.members for group in manager.inspect.shared_prefixes(others)] == [(0, 3), (1, 4), (2, 5)]


def test_blocks_that_only_equal_each_other_are_not_shared() -> None:
    manager = KVCacheManager(16, 4)
    first, second = Sequence("first", [1] * 8), Sequence("second", [1] * 8)
    manager.allocate_slots(first)
    manager.allocate_slots(second)  # without a hit: it has blocks of its own, with the same tokens
    assert manager.inspect.shared_prefixes([first, second]) == []


def test_what_a_member_does_not_see_wholly_is_not_shared() -> None:
    manager = KVCacheManager(16, 4)
    prompt = list(range(16))
    first = start(manager, "first", [*prompt, 1])
    second = start(manager, "second", [*prompt, 2])  # of the same step: hits what the first one is about to write
    assert [group.num_tokens for group in manager.inspect.shared_prefixes([first, second])] == [16]
    # In the step that computes the first one's prompt, its first query sees one token.
    assert manager.inspect.shared_prefixes([first, second], num_visible_tokens=[1, 17]) == []
    assert [g.num_tokens for g in manager.inspect.shared_prefixes([first, second], num_visible_tokens=[12, 17])] == [12]
    assert [g.num_tokens for g in manager.inspect.shared_prefixes([first, second], num_visible_tokens=[11, 17])] == [8]
    manager.allocate_slots(first, 0, num_total_tokens=first.num_tokens + 8)
    assert [group.num_tokens for group in manager.inspect.shared_prefixes([first, second])] == [16]


def test_a_full_hit_shares_all_that_it_has() -> None:
    manager = KVCacheManager(16, 4)
    first, second = start(manager, "first", [3] * 8), start(manager, "second", [3] * 8)
    assert manager.inspect.shared_prefixes([first, second]) == [SharedPrefix(None, (0, 1), 0, (0, 1), 8)]
    assert [g.num_tokens for g in manager.inspect.shared_prefixes([first, second], num_visible_tokens=[8, 7])] == [4]


def test_of_a_fork_the_full_blocks_are_shared() -> None:
    manager = KVCacheManager(16, 4)
    first = start(manager, "first", [3] * 8)
    manager.append_slots(first, [4, 4])
    child = manager.fork(first, "child")
    assert first.blocks == child.blocks  # the unfilled last one too
    assert [group.block_ids for group in manager.inspect.shared_prefixes([first, child])] == [(0, 1)]
    for sequence in (first, child):  # one of them gets a copy
        manager.append_slots(sequence, [5, 5])
    assert [group.block_ids for group in manager.inspect.shared_prefixes([first, child])] == [(0, 1)]
    third = manager.fork(first, "third")
    assert [group.block_ids for group in manager.inspect.shared_prefixes([first, third])] == [tuple(first.block_ids)]
    manager.truncate(third, 11)  # it reads no more than a part of what is full and shared
    assert third.blocks == first.blocks
    assert [group.block_ids for group in manager.inspect.shared_prefixes([first, third])] == [(0, 1)]


def test_bad_batches_are_refused() -> None:
    manager, other = KVCacheManager(16, 4), KVCacheManager(16, 4)
    ours, theirs, free = start(manager, "a", [1] * 9), start(other, "a", [1] * 9), Sequence("b", [1] * 9)
    with pytest.raises(SequenceStateError, match=r"shared_prefixes: .* belongs to another manager"):
        manager.inspect.shared_prefixes([ours, theirs])
    with pytest.raises(SequenceStateError, match=r"shared_prefixes: .* holds no blocks"):
        manager.inspect.shared_prefixes([free])
    with pytest.raises(InvalidArgumentError, match="min_blocks: expected an int of at least 1, got 0"):
        manager.inspect.shared_prefixes([ours], min_blocks=0)
    with pytest.raises(InvalidArgumentError, match="num_visible_tokens: expected one for each of 1 sequences, got 2"):
        manager.inspect.shared_prefixes([ours], num_visible_tokens=[1, 2])
    with pytest.raises(InvalidArgumentError, match="num_visible_tokens: expected an int from 0 to 9, got 10"):
        manager.inspect.shared_prefixes([ours], num_visible_tokens=[10])
    with pytest.raises(AttributeError):
        manager.inspect.shared_prefixes([ours, start(manager, "c", [1] * 9)])[0].parent = 3  # type: ignore[misc]


@pytest.mark.parametrize("is_longest_first", [True, False])
def test_thousands_of_levels(is_longest_first: bool) -> None:
    num_levels = 1500
    main = [KVCacheBlock(block_id) for block_id in range(num_levels + 1)]
    sequences = [make_sequence(main[: length + 1], length + 1, 1) for length in range(num_levels + 1)]
    if is_longest_first:
        sequences.reverse()
    found = find_shared_prefixes(sequences, 1)
    assert [group.parent for group in found] == [None, *range(num_levels - 1)]
    assert [group.start_block for group in found] == list(range(num_levels))
    assert [len(group.members) for group in found] == list(range(num_levels + 1, 1, -1))


class CountingList(list[KVCacheBlock]):
    """Counts the items that are read of all such lists."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        items = super().__getitem__(key)
        CountingList.num_read += len(items) if isinstance(key, slice) else 1
        return items


def num_read(num_sequences: int, num_blocks: int, shape: str) -> int:
    """How many blocks are looked at to find the groups of a batch."""
    made: dict[tuple[int, int], KVCacheBlock] = {}
    sequences = []
    for number in range(num_sequences):
        shares = {"all": [0] * num_blocks, "nothing": [number] * num_blocks}
        third = num_blocks // 3
        shares["three levels"] = [0] * third + [number // 32] * third + [number // 4] * (num_blocks - 2 * third)
        keys = [*enumerate(shares[shape]), (num_blocks, -number - 1)]
        blocks = [made.setdefault(key, KVCacheBlock(len(made))) for key in keys]
        sequences.append(make_sequence(CountingList(blocks), len(blocks), 1))
    CountingList.num_read = 0
    found = find_shared_prefixes(sequences, 1)
    assert bool(found) == (shape != "nothing")
    return CountingList.num_read


@pytest.mark.parametrize("shape", ["all", "nothing", "three levels"])
def test_the_work_grows_with_the_batch_and_not_faster(shape: str) -> None:
    small = num_read(64, 240, shape)
    assert small <= 2.5 * 64 * 240
    assert num_read(256, 240, shape) <= 4.2 * small
    assert num_read(64, 960, shape) <= 4.2 * small
    if shape == "nothing":
        assert num_read(64, 960, shape) == small <= 2 * 64


def test_each_block_is_read_about_once_however_deep_it_lies() -> None:
    main = [KVCacheBlock(block_id) for block_id in range(300)]
    sequences = [make_sequence(CountingList(main[: length + 1]), length + 1, 1) for length in range(300)]
    CountingList.num_read = 0
    assert len(find_shared_prefixes(sequences, 1)) == 299
    assert CountingList.num_read < 1.1 * sum(len(sequence.blocks) for sequence in sequences)


def test_little_is_read_of_long_tables_that_share_little() -> None:
    first = KVCacheBlock(0)
    tables = [[first, *[KVCacheBlock(1 + 2000 * number + i) for i in range(2000)]] for number in range(20)]
    sequences = [make_sequence(CountingList(table), len(table), 1) for table in tables]
    CountingList.num_read = 0
    assert [group.block_ids for group in find_shared_prefixes(sequences, 1)] == [(0,)]
    assert CountingList.num_read < 20 * 150
