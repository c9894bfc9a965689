"""The sampler against histories computed by hand, and against a log of all blocks."""

import random
from typing import Any

import pytest
from model.where import where

from kvblocks import KVCacheManager, Sequence
from kvblocks.core.block import KVCacheBlock
from kvblocks.errors import InvalidArgumentError
from kvblocks.observe.block_sampler import BlockSampler, Histogram, choose_sample

BOUNDS = tuple([float(n) for n in range(2000)])  # a value a bucket: what was recorded can be read back


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(manager: KVCacheManager, every: int = 1) -> tuple[BlockSampler, Clock]:
    clock = Clock()
    return manager._start_sampling(every, clock, BOUNDS), clock  # noqa: SLF001


def recorded(histogram: Histogram) -> list[float]:
    values = histogram.values()
    assert values.counts[-1] == 0, "a value is above the bounds"
    found = [bound for bound, count in zip(values.bounds, values.counts, strict=False) for _ in range(count)]
    assert sum(found) == values.total
    assert values.num_values == len(found)
    return found


def start(manager: KVCacheManager, tokens: Any, name: str = "passing", salt: str | None = None) -> Sequence:
    sequence = Sequence(name, tokens, salt=salt)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    return sequence


def test_a_value_counts_for_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.0, 4.5, 100.0):
        histogram.record(value)
    values = histogram.values()
    assert values.counts == (2, 2, 1, 2)
    assert values.total == 113.0
    assert values.num_values == 7
    assert values.mean == 113 / 7
    histogram.record(3.0)
    assert values.counts == (2, 2, 1, 2)  # a snapshot
    assert Histogram((1.0,)).values().mean is None


def test_the_life_of_a_block() -> None:
    manager = KVCacheManager(2, 4)
    sampler, clock = watch(manager)
    clock.now = 10
    first = start(manager, range(4))  # block 0
    clock.now = 13
    manager.free(first)
    clock.now = 20
    again = start(manager, range(5))  # hits block 0 and takes block 1
    assert recorded(sampler.reuse_gaps) == [7]
    clock.now = 22
    manager.free(again)
    assert sampler.oldest_release == 22
    clock.now = 30
    manager.free(
        start(manager, range(100, 108))
    )  # takes both; block 1 held no full block, so nothing was evicted there
    assert recorded(sampler.lifetimes) == [20]
    assert recorded(sampler.idle_times) == [8]
    assert sampler.last_idle_time == 8
    assert manager.stats.num_evicted_blocks == 1
    clock.now = 35
    start(manager, range(200, 204))  # evicts the end of the last, taken at 30
    assert recorded(sampler.lifetimes) == [5, 20]
    assert recorded(sampler.idle_times) == [5, 8]
    assert sampler.oldest_release == 30


def test_a_hit_on_a_block_in_use_is_no_reuse() -> None:
    manager = KVCacheManager(8, 4)
    sampler, clock = watch(manager)
    one = start(manager, range(4), "one")
    clock.now = 5
    two = start(manager, range(5), "two")
    manager.free(one)
    clock.now = 6
    three = start(manager, range(5), "three")
    assert recorded(sampler.reuse_gaps) == []
    clock.now = 8
    manager.free(two)
    manager.free(three)
    clock.now = 9
    start(manager, range(5))
    assert recorded(sampler.reuse_gaps) == [1]  # since the last owner let go


def test_what_was_aborted_or_reset_was_not_evicted() -> None:
    manager = KVCacheManager(2, 4)
    sampler, _ = watch(manager)
    manager.abort(start(manager, range(8)), 0)
    manager.free(start(manager, range(100, 108)))
    assert recorded(sampler.lifetimes) == []
    manager.reset_prefix_cache()
    manager.free(start(manager, range(200, 208)))
    assert recorded(sampler.lifetimes) == recorded(sampler.idle_times) == []
    assert sampler.last_idle_time is None
    manager.free(start(manager, range(300, 308)))
    assert recorded(sampler.lifetimes) == [0, 0]


def test_what_began_before_the_sampler_is_left_out() -> None:
    manager = KVCacheManager(2, 4)
    manager.free(start(manager, range(4)))
    running = start(manager, range(10, 14))
    sampler, clock = watch(manager)
    assert sampler.oldest_release is None
    clock.now = 3
    manager.free(running)
    clock.now = 7
    start(manager, range(100, 108))
    assert recorded(sampler.lifetimes) == []
    assert recorded(sampler.idle_times) == [4]  # of the one whose release was seen


def test_decoding_and_quotas_take_single_blocks_and_are_seen() -> None:
    manager = KVCacheManager(4, 2)
    sampler, clock = watch(manager)
    manager.quotas.set("greedy", 1)
    manager.free(start(manager, range(4), salt="modest"))
    clock.now = 10
    manager.free(start(manager, range(4), salt="greedy"))
    clock.now = 30
    decoding = start(manager, [1, 2], salt="modest")  # takes the greedy one's end
    assert recorded(sampler.idle_times) == [20]
    clock.now = 40
    manager.append_slots(decoding, [3])  # the greedy one is within its quota now: the least recently used goes
    assert recorded(sampler.idle_times) == [20, 40]
    assert recorded(sampler.lifetimes) == [20, 40]
    assert sampler.last_idle_time == 40


def test_a_pin_ends_the_wait_of_its_blocks() -> None:
    manager = KVCacheManager(4, 2)
    sampler, clock = watch(manager)
    manager.free(start(manager, range(4)))
    clock.now = 6
    pin = manager.pins.pin(range(4))
    assert recorded(sampler.reuse_gaps) == [6, 6]
    assert sampler.oldest_release is None
    clock.now = 9
    manager.pins.unpin(pin)
    assert sampler.oldest_release == 9


@pytest.mark.parametrize(("num_blocks", "every"), [(1, 64), (1000, 1), (4096, 64), (100_000, 64), (5000, 7)])
def test_the_sample_is_a_share_of_the_pool_and_always_the_same(num_blocks: int, every: int) -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    sample = choose_sample(blocks, every)
    assert sample == choose_sample(blocks, every)
    assert abs(len(sample) - num_blocks / every) <= 3
    assert sample[0].block_id == 0
    for period in (2, 16, every):
        if len(sample) >= 60 * period and every > 1:  # prompts of `period` blocks are seen at each of their positions
            counts = [sum(1 for block in sample if block.block_id % period == i) for i in range(period)]
            assert min(counts) > len(sample) / period / 2


def test_only_the_sample_is_recorded() -> None:
    manager = KVCacheManager(256, 1)
    sampler, _ = watch(manager, every=16)
    for n in range(4):
        manager.free(start(manager, range(n * 256, (n + 1) * 256)))
    assert sampler.num_blocks == len(choose_sample([KVCacheBlock(i) for i in range(256)], 16))
    assert manager.stats.num_evicted_blocks == 3 * 256
    assert len(recorded(sampler.lifetimes)) == 3 * sampler.num_blocks


def test_one_sampler_at_a_time() -> None:
    manager = KVCacheManager(2, 4)
    sampler, clock = watch(manager)
    with pytest.raises(InvalidArgumentError, match="nobody samples"):
        manager._start_sampling(1, clock, BOUNDS)  # noqa: SLF001
    manager._stop_sampling(sampler)  # noqa: SLF001
    other = manager._start_sampling(1, clock, BOUNDS)  # noqa: SLF001
    manager._stop_sampling(sampler)  # it has stopped; the other goes on  # noqa: SLF001
    start(manager, range(4))
    clock.now = 3
    manager._stop_sampling(other)  # noqa: SLF001
    manager._stop_sampling(other)  # noqa: SLF001
    assert other.oldest_release is None


class BlockLog:
    """The lives of all blocks, derived from their owners before and after each call."""

    def __init__(self, manager: KVCacheManager, clock: Clock) -> None:
        self.manager = manager
        self.clock = clock
        everything = start(manager, range(manager.num_blocks * manager.block_size))
        self.blocks = sorted(everything.blocks, key=lambda block: block.block_id)
        manager.free(everything)
        manager.reset_prefix_cache()
        self.taken: dict[int, float] = {}
        self.released: dict[int, float] = {}
        self.lifetimes: list[float] = []
        self.idle_times: list[float] = []
        self.reuse_gaps: list[float] = []

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        self.clock.now += 1
        before = [(block.ref_cnt, block.is_cached) for block in self.blocks]
        num_taken = self.manager.stats.num_taken_blocks
        free = self.manager.inspect.free_block_ids()
        unwritten = unwritten_blocks(*arguments) if function == self.manager.abort else []
        firsts = {block: first_of(block) for block in self.blocks if block.is_cached and block not in unwritten}
        result = function(*arguments, **options)
        took = free_at_head(free, self.blocks, self.manager.stats.num_taken_blocks - num_taken, function)
        for block, (num_owners, was_cached) in zip(self.blocks, before, strict=True):
            self.note(block, num_owners, was_cached, block.block_id in took)
            first = firsts.get(block, block)
            if num_owners and not block.ref_cnt and first is not block and not first.ref_cnt:
                self.released[first.block_id] = self.clock.now  # a duplicate was released: the first block is renewed
        return result

    def note(self, block: KVCacheBlock, num_owners: int, was_cached: bool, is_taken: bool) -> None:
        name, now = block.block_id, self.clock.now
        if is_taken:
            if was_cached:
                self.lifetimes.append(now - self.taken[name])
                self.idle_times.append(now - self.released[name])
            self.taken[name] = now
            self.released.pop(name, None)
        elif num_owners == 0 and block.ref_cnt:
            self.reuse_gaps.append(now - self.released.pop(name))
        elif num_owners and block.ref_cnt == 0:
            self.released[name] = now


def first_of(block: KVCacheBlock) -> KVCacheBlock:
    """Return the block that hits get of a cached block's prefix."""
    assert block.run is not None
    return block.run.blocks[block.index]


def unwritten_blocks(sequence: Sequence, num_computed: int) -> list[KVCacheBlock]:
    """Return the blocks that an abort takes back."""
    return sequence.blocks[max(sequence.num_readonly_tokens, num_computed) // 2 :]


def free_at_head(free: list[int], blocks: list[KVCacheBlock], num_taken: int, function: Any) -> set[int]:
    """Return the blocks that a call took: the first of the queue, without those that its hit took before."""
    hit = function.hit_ids if hasattr(function, "hit_ids") else set()
    return set([block_id for block_id in free if block_id not in hit][:num_taken])


class Allocation:
    """`allocate_slots` with what it will hit."""

    def __init__(self, manager: KVCacheManager, sequence: Sequence) -> None:
        self.manager, self.sequence = manager, sequence
        self.hit = manager.get_computed_blocks(sequence)
        self.hit_ids = {block.block_id for block in self.hit.blocks}

    def __call__(self) -> Any:
        return self.manager.allocate_slots(self.sequence, hit=self.hit)


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_agree_with_the_log(seed: int) -> None:
    """Starts, decoding, forks, truncation, aborts and ends on a pool that is always full."""
    chooser = random.Random(seed)
    manager, clock = KVCacheManager(40, 2), Clock()
    log = BlockLog(manager, clock)
    sampler = manager._start_sampling(1, clock, BOUNDS)  # noqa: SLF001
    running: list[Sequence] = []
    for number in range(4000):
        action = chooser.choice(["start", "start", "append", "append", "free", "fork", "truncate", "abort"])
        with where(seed, number, action):
            if action == "start" or not running:
                family = chooser.randrange(6)
                tokens = [family] * 4 + [chooser.randrange(2) for _ in range(chooser.randrange(1, 12))]
                sequence = Sequence(number, tokens)
                if log.call(Allocation(manager, sequence)) is not None:
                    running.append(sequence)
                continue
            sequence = chooser.choice(running)
            if action == "append":
                log.call(
                    manager.append_slots, sequence, [chooser.randrange(2) for _ in range(chooser.choice([1, 1, 3]))]
                )
            elif action == "fork":
                running.append(log.call(manager.fork, sequence, (number, "fork")))
            elif action == "truncate":
                length = chooser.randint(sequence.num_prompt_tokens, sequence.num_tokens)
                log.call(manager.truncate, sequence, length)
            else:
                running.remove(sequence)
                if action == "abort" and chooser.random() < 0.2:
                    log.call(manager.abort, sequence, chooser.randint(0, sequence.num_computed_tokens))
                else:
                    log.call(manager.free, sequence)
            assert sampler.oldest_release == min(log.released.values(), default=None)
    manager.check()
    assert recorded(sampler.lifetimes) == sorted(log.lifetimes)
    assert recorded(sampler.idle_times) == sorted(log.idle_times)
    assert recorded(sampler.reuse_gaps) == sorted(log.reuse_gaps)
    assert sampler.last_idle_time in log.idle_times[-40:]
    assert 200 < len(log.lifetimes) <= manager.stats.num_evicted_blocks
    assert len(log.reuse_gaps) > 100
