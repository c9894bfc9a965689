"""States in place: the block at a table's end has a sequence's live state, and stays behind where a call ended.

The walks have a memory in which a block holds a number for the tokens that went into its state. A step computes from
the state that the table says, and no state may be another one than that of the tokens before it.
"""

from random import Random

import pytest

from kvblocks import (
    FullAttention,
    Group,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StateInPlace,
    Tier,
)

SIZE = 4
SETS: dict[str, list[Group]] = {
    "full": [FullAttention(SIZE), StateInPlace(SIZE)],
    "two": [FullAttention(SIZE), StateInPlace(SIZE), StateInPlace(SIZE)],
    "smaller blocks": [StateInPlace(SIZE), FullAttention(2)],
    "windows": [FullAttention(SIZE), SlidingWindow(2, 5), StateInPlace(SIZE)],
    "states only": [StateInPlace(SIZE)],
}


def state_behind(tokens: list[int]) -> int:
    return hash(tuple(tokens))


class Walk:
    """An engine whose steps are of random sequences. num_blocks: of the pool."""

    def __init__(self, groups: list[Group], num_blocks: int, seed: int) -> None:
        self.random = Random(seed)
        self.manager = KVCacheManager(num_blocks, groups=groups, debug=True)
        self.states = [number for number, group in enumerate(groups) if isinstance(group, StateInPlace)]
        self.memory: dict[int, int] = {}
        self.running: list[Sequence] = []
        self.goals: dict[Sequence, int] = {}
        self.documents = [[self.random.randrange(9) for _ in range(60)] for _ in range(2)]
        self.saved: set[tuple[int, ...]] = set()  # the prefixes behind which a call ended, at the end of a block
        self.stale: set[Sequence] = set()  # from before a reset, so that they cache nothing
        self.number = self.num_hits = self.num_refused = self.num_forks = self.num_renewed = 0

    def step(self) -> None:
        """Make room for some sequences, and compute what they got slots for."""
        starts: dict[Sequence, int] = {}
        fresh: set[int] = set()  # blocks that this step writes
        for sequence in list(self.running):
            if self.random.random() < 0.7:
                self.go_on(sequence, starts)
                fresh |= self.last_blocks(sequence)
        if self.random.random() < 0.5:
            self.begin(starts, fresh)
        self.compute(starts)
        for sequence in list(self.running):
            chance = self.random.random()
            if chance < 0.1 or self.goals[sequence] <= sequence.num_computed_tokens:
                self.running.remove(sequence)
                self.manager.free(sequence)
            elif chance < 0.15:
                self.fork(sequence)
            elif chance < 0.2 and sequence.num_computed_tokens > SIZE:
                with pytest.raises(SequenceStateError, match="expected to keep"):
                    self.manager.rewind(sequence, sequence.num_computed_tokens - 1)
        if self.random.random() < 0.05:
            self.reset()

    def reset(self) -> None:
        """Forget what is cached. Some sequences cache again what they hold."""
        self.manager.reset_prefix_cache()
        self.saved.clear()
        self.stale = set(self.running)
        for sequence in self.running:
            if self.random.random() < 0.4:
                self.manager.renew(sequence)
                self.stale.remove(sequence)
                self.num_renewed += 1
                self.note_states(sequence)

    def note_states(self, sequence: Sequence) -> None:
        tokens = list(sequence.token_ids())
        for index, block in enumerate(sequence.group_blocks(self.states[0])):
            prefix = tuple(tokens[: (index + 1) * SIZE])
            if block is not None and self.memory.get(block.block_id) == hash(prefix) and len(prefix) % SIZE == 0:
                self.saved.add(prefix)

    def last_blocks(self, sequence: Sequence) -> set[int]:
        return set() if sequence.owner is None else {sequence.group_block_ids(group)[-1] for group in self.states}

    def end_of_chunk(self, start: int, goal: int) -> int:
        """Mostly the end of a block, or within the block of `start`; sometimes anywhere, so that nothing is saved."""
        end = min(goal, start + self.random.randrange(1, 14))
        if end // SIZE > start // SIZE and self.random.random() < 0.8:
            end = end // SIZE * SIZE
        return end

    def begin(self, starts: dict[Sequence, int], fresh: set[int]) -> None:
        document = self.random.choice(self.documents)
        tokens = document[: self.random.randrange(1, 50)] + [self.random.randrange(9) for _ in range(3)]
        sequence = Sequence(self.number, tokens)
        self.number += 1
        hit = self.manager.get_computed_blocks(sequence)
        held = {block.block_id for group in self.states for block in hit.group_blocks(group) if block is not None}
        if held & fresh:
            return
        for block_id in held:
            assert self.memory[block_id] == state_behind(tokens[: hit.num_tokens])
        self.num_hits += bool(held)
        assert hit.num_tokens % SIZE == 0 and hit.num_tokens < len(tokens)
        if self.manager.stats.num_evicted_blocks == 0:
            known = [end for end in range(0, len(tokens), SIZE) if tuple(tokens[:end]) in self.saved]
            if self.num_renewed and any(isinstance(group, SlidingWindow) for group in self.manager.groups):
                assert hit.num_tokens in {0, *known}  # the window before an earlier state may be gone
            else:
                assert hit.num_tokens == max(known, default=0)
        end = self.end_of_chunk(hit.num_tokens, len(tokens))
        if self.manager.allocate_slots(sequence, end - hit.num_tokens, hit=hit) is None:
            self.num_refused += 1
            return
        self.running.append(sequence)
        self.goals[sequence] = len(tokens) + self.random.randrange(12)
        starts[sequence] = hit.num_tokens

    def go_on(self, sequence: Sequence, starts: dict[Sequence, int]) -> None:
        start = sequence.num_computed_tokens
        if start < sequence.num_tokens:
            room = self.manager.allocate_slots(sequence, self.end_of_chunk(start, sequence.num_tokens) - start)
        else:
            room = self.manager.append_slots(sequence, [self.random.randrange(9)])
        if room is None:
            self.num_refused += 1
            self.running.remove(sequence)
            self.manager.free(sequence)
        else:
            starts[sequence] = start

    def fork(self, sequence: Sequence) -> None:
        child = self.manager.fork(sequence, ("child", self.number))
        self.number += 1
        self.num_forks += 1
        if sequence in self.stale:
            self.stale.add(child)
        self.running.append(child)
        self.goals[child] = self.goals[sequence]

    def compute(self, starts: dict[Sequence, int]) -> None:
        for _, source, destination in self.manager.take_copies():
            if source in self.memory:
                self.memory[destination] = self.memory[source]
        writes = {}
        for sequence, start in starts.items():
            if sequence.owner is None:
                continue
            tokens, end = list(sequence.token_ids()), sequence.num_computed_tokens
            for group in self.states:
                table = sequence.group_blocks(group)
                assert sum(block is not None for block in table) <= 2 and len(table) == -(-end // SIZE)
                if start:
                    before = table[(start - 1) // SIZE]
                    assert before is not None and self.memory[before.block_id] == state_behind(tokens[:start])
                assert table[-1] is not None and table[-1].block_id not in writes
                writes[table[-1].block_id] = state_behind(tokens[:end])
            if end % SIZE == 0 and sequence not in self.stale:
                self.saved.add(tuple(tokens[:end]))
        self.memory |= writes


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed > 0)) for seed in range(20)]
)
@pytest.mark.parametrize("num_blocks", [24, 1500])
@pytest.mark.parametrize("name", SETS)
def test_no_token_is_computed_from_a_wrong_state(name: str, num_blocks: int, seed: int) -> None:
    walk = Walk(SETS[name], num_blocks, seed)
    for _ in range(120):
        walk.step()
    assert walk.num_hits > 5 and walk.num_forks
    is_small = num_blocks < 100
    assert (walk.manager.stats.num_evicted_blocks > 0) == is_small
    assert (walk.num_refused > 0) == (is_small and name != "states only")
    for sequence in walk.running:
        walk.manager.free(sequence)
    assert walk.manager.num_free_blocks == num_blocks


def test_a_chunk_of_many_blocks_takes_one() -> None:
    manager = KVCacheManager(20, groups=SETS["full"], debug=True)
    sequence = Sequence("a", range(17))
    assert manager.get_num_blocks_to_allocate(sequence, 16) == 4 + 1
    manager.allocate_slots(sequence, 16)
    assert manager.num_free_blocks == 20 - 4 - 1
    assert [block is not None for block in sequence.group_blocks(1)] == [False, False, False, True]
    assert sequence.group_block_ids(1)[:3] == [0, 0, 0]
    manager.allocate_slots(sequence)
    assert [block is not None for block in sequence.group_blocks(1)] == [False, False, False, True, True]
    manager.free(sequence)
    hit = manager.get_computed_blocks(Sequence("b", range(17)))
    assert hit.num_tokens == 16 and [block is not None for block in hit.group_blocks(1)] == [False] * 3 + [True]
    assert manager.get_computed_blocks(Sequence("c", range(16))).num_tokens == 0  # its last token has to be computed


def test_a_state_within_a_block_is_not_found() -> None:
    manager = KVCacheManager(20, groups=SETS["full"], debug=True)
    sequence = Sequence("a", range(20))
    for number in (6, 6):
        manager.allocate_slots(sequence, number)
    manager.free(sequence)
    assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 12


def test_a_token_that_is_not_known_yet_is_computed_nevertheless() -> None:
    """As with asynchronous scheduling: the state is behind all slots, and found when the tokens are known."""
    manager = KVCacheManager(20, groups=SETS["full"], debug=True)
    sequence = Sequence("a", range(7))
    manager.allocate_slots(sequence, 7, num_total_tokens=8)
    with pytest.raises(SequenceStateError, match="expected to keep all 8 tokens"):
        manager.rewind(sequence, 7)
    with pytest.raises(SequenceStateError, match="fork: expected to keep all 8 tokens"):
        manager.fork(sequence, "child")
    sequence.append_tokens([7])
    assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 0
    manager.allocate_slots(sequence, 1, num_total_tokens=9)
    assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 8
    sequence.append_tokens([8, 9, 10, 11, 12])
    manager.allocate_slots(sequence, 3, num_total_tokens=13)
    manager.allocate_slots(sequence, 1)
    assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 8  # none of these ended at 12


def test_what_a_dead_step_should_have_written_is_not_found() -> None:
    manager = KVCacheManager(20, groups=SETS["full"], debug=True)
    sequence = Sequence("a", range(20))
    manager.allocate_slots(sequence, 8)
    manager.allocate_slots(sequence, 4)
    manager.abort(sequence, 8)
    assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 8


def test_a_child_caches_what_its_parent_computed() -> None:
    """After a reset that only the child is renewed for, and where blocks are cached after the step."""
    for is_late in (False, True):
        manager = KVCacheManager(20, groups=SETS["full"], debug=True)
        sequence = Sequence("a", range(20))
        manager.allocate_slots(sequence, 8, delay_cache_blocks=is_late)
        child = manager.fork(sequence, "child")
        if is_late:
            manager.cache_blocks(child, 8)
        else:
            manager.reset_prefix_cache()
            manager.renew(child)
        manager.free(sequence)
        manager.allocate_slots(child, 3)
        assert manager.get_computed_blocks(Sequence("b", range(20))).num_tokens == 8


def test_a_hit_is_cached_again_by_who_has_it() -> None:
    manager = KVCacheManager(20, groups=SETS["full"], debug=True)
    first, second = (Sequence(name, range(20)) for name in "ab")
    manager.allocate_slots(first, 8)
    manager.allocate_slots(second, 3, hit=manager.get_computed_blocks(second))
    manager.reset_prefix_cache()
    manager.renew(second)
    assert manager.get_computed_blocks(Sequence("c", range(20))).num_tokens == 8


def test_states_in_place_and_tiers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tiers: expected groups with KV for each token"):
        KVCacheManager(20, groups=SETS["full"], tiers=[Tier("host", 10, 1)])
