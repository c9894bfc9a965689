"""What each built-in policy evicts, by itself and in a manager."""

from collections.abc import Iterable

import pytest

from kvblocks import FreeBlock, KVCacheManager, Sequence
from kvblocks.retention.policies import NAMED
from kvblocks.retention.policies.s3fifo import S3FIFO
from kvblocks.retention.policies.slru import SLRU


class View:
    """A cache in which each block holds what `holds` says."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.now = 0.0
        self.holds: dict[int, bytes] = {}

    def digest(self, block_id: int) -> bytes | None:
        return self.holds.get(block_id)


def free(policy: SLRU | S3FIFO, block_ids: Iterable[int], num_hits: int = 0) -> None:
    policy.free([FreeBlock(block_id, 0, None, None, num_hits) for block_id in block_ids])


def evict_all(policy: SLRU | S3FIFO) -> list[int]:
    order = []
    while (victim := policy.victim(1)) is not None:
        policy.remove([victim])
        order.append(victim)
    return order


def test_slru_evicts_what_was_never_hit_first() -> None:
    policy = SLRU(View(100))
    free(policy, range(10, 15))
    free(policy, [1, 2], num_hits=1)
    free(policy, range(15, 20))
    assert evict_all(policy) == [*range(10, 20), 1, 2]


def test_slru_protects_a_share_only() -> None:
    """The block that was protected longest goes to the end of the probation queue. Another hit protects it again."""
    policy = SLRU(View(100))
    free(policy, [10])
    free(policy, [1, 2, 3, 4, 5], num_hits=1)  # at most 4.8 of 6: 1 is on probation, behind 10
    free(policy, [11])
    policy.use([1])
    free(policy, [1], num_hits=2)
    assert evict_all(policy) == [10, 11, 2, 3, 4, 5, 1]


def test_slru_forgets_what_is_used() -> None:
    policy = SLRU(View(100))
    free(policy, [1, 2, 3])
    free(policy, [4, 5], num_hits=1)
    policy.use([2, 4])
    assert evict_all(policy) == [1, 3, 5]


def test_s3fifo_lets_newcomers_pass_the_main_queue() -> None:
    policy = S3FIFO(View(100))
    free(policy, [1, 2], num_hits=2)
    free(policy, range(10, 20))
    assert evict_all(policy)[:9] == list(range(10, 19))


def test_s3fifo_gives_another_round_for_each_hit() -> None:
    policy = S3FIFO(View(100))
    free(policy, [1], num_hits=3)
    free(policy, [2], num_hits=2)
    free(policy, [3], num_hits=9)  # counts as three
    assert evict_all(policy) == [2, 1, 3]


def test_s3fifo_remembers_what_it_evicted() -> None:
    view = View(10)
    policy = S3FIFO(view)
    view.holds = {1: b"one", 2: b"two"}
    free(policy, [1, 2])
    policy.remove([1])
    view.holds = {2: b"two", 7: b"one", 8: b"new"}
    free(policy, [7, 8])  # what 1 held is in 7 now
    assert policy.victim(1) == 2
    policy.use([2])
    policy.remove([8])
    assert policy.victim(1) == 7
    policy.remove([7])
    view.holds = {3: b"one"}
    free(policy, [3])  # a ghost is one once
    free(policy, [4], num_hits=2)
    assert policy.victim(1) == 3


def test_s3fifo_remembers_no_more_than_the_main_queue_may_hold() -> None:
    view = View(10)
    policy = S3FIFO(view)
    for number in range(100):
        view.holds = {number: bytes([number])}
        free(policy, [number])
        policy.remove([number])
    assert len(policy._ghosts) == 9  # type: ignore[attr-defined]  # noqa: SLF001


@pytest.mark.parametrize(("name", "num_cached"), [("lru", 0), ("slru", 24), ("s3fifo", 32)])
def test_a_scan_pushes_out_what_was_hit_or_does_not(name: str, num_cached: int) -> None:
    """Three requests with one system prompt, then a hundred prompts that come once.

    At first all free blocks were hit, so `slru` puts a fifth of them on probation: the end of the prompt.
    """
    manager = KVCacheManager(20, 4, eviction=name)

    def run(number: int, tokens: list[int]) -> int:
        sequence = Sequence(number, tokens)
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, hit=hit) is not None
        manager.free(sequence)
        return hit.num_tokens

    system = list(range(1000, 1032))
    for number in range(3):
        run(number, [*system, number])
    for number in range(100):
        run(number, [number] * 16)
    assert run(200, [*system, 7]) == num_cached
    assert manager.stats.num_eviction_failures == 0
    manager.check()


def test_every_policy_has_a_name_that_a_manager_takes() -> None:
    assert {"lru", "slru", "s3fifo", "sessions"} <= set(NAMED)
    for name in NAMED:
        assert KVCacheManager(4, eviction=name).stats.num_eviction_failures == 0
