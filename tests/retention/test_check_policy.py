"""`check_policy`: which policies it refuses and in which words, and that it tells them what docs/policies.md says."""

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any, ClassVar

import pytest
from model.policy_contract import Malicious, Random

from kvblocks import CacheView, FreeBlock, InvalidArgumentError, KVCacheManager, Sequence
from kvblocks.retention.policies import check_policy
from kvblocks.retention.policies.check import PlainCache


class Good:
    """Names the lowest id that it knows."""

    def __init__(self, cache: CacheView) -> None:
        self.cache = cache
        self.known: dict[int, FreeBlock] = {}

    def free(self, blocks: list[FreeBlock]) -> None:
        self.known.update((block.block_id, block) for block in blocks)

    def use(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.known.pop(block_id, None)

    def remove(self, block_ids: list[int]) -> None:
        self.use(block_ids)

    def victim(self, num_blocks: int) -> Any:
        return min(self.known, default=None)


class Raises(Good):
    def victim(self, num_blocks: int) -> Any:
        raise RuntimeError("boom")


class NamesUnknown(Good):
    def victim(self, num_blocks: int) -> Any:
        return 10**6


class NamesNothingUseful(Good):
    def victim(self, num_blocks: int) -> Any:
        return str(super().victim(num_blocks))


class HasATypo(Good):
    def free(self, blocks: list[FreeBlock]) -> None:
        self.known.update((block.id, block) for block in blocks)  # type: ignore[attr-defined]


class NeverForgets(Good):
    def use(self, block_ids: list[int]) -> None:
        pass


class ForgetsNoUse(Good):
    def use(self, block_ids: list[int]) -> None:
        pass

    def remove(self, block_ids: list[int]) -> None:
        super().use(block_ids)


class ForgetsOnlyItsVictims(Good):
    """Forgets what it named, and not what was forgotten for other reasons."""

    named: int | None = None

    def remove(self, block_ids: list[int]) -> None:
        if self.named in block_ids:
            self.use(block_ids)

    def victim(self, num_blocks: int) -> Any:
        self.named = super().victim(num_blocks)
        return self.named


class SharesItsMemory(Good):
    """Its instances, those of the pool and of a tenant, know the same blocks."""

    shared: ClassVar[dict[int, FreeBlock]] = {}

    def __init__(self, cache: CacheView) -> None:
        super().__init__(cache)
        self.known = self.shared


class AsksForNoPause(Good):
    def pause(self, session: Hashable, tenant: str | None) -> None:
        pass


class NeedsItsDigest(Good):
    """A view says nothing of blocks that were forgotten."""

    def remove(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            assert self.cache.digest(block_id) is not None, "no digest"
        super().remove(block_ids)


class LacksMethods:
    def __init__(self, cache: CacheView) -> None:
        pass


class CannotBeMade(Good):
    def __init__(self) -> None:
        pass


BROKEN: list[tuple[Any, str]] = [
    (Raises, r"victim\(\d+\): expected no exception; got RuntimeError\('boom'\)"),
    (NamesUnknown, r"victim\(\d+\): expected None or the id of .*; got 1000000, of which it was never told"),
    (NamesNothingUseful, r"victim\(\d+\): expected None or the id of a block that it knows, one of \[.*; got '\d+'"),
    (HasATypo, r"free\(.*\): expected no exception; got AttributeError"),
    (NeverForgets, r"expected .* that it knows, one of \[.*; got \d+, which left by (use|remove)\(\) in step \d+"),
    (ForgetsNoUse, r"got \d+, which left by use\(\) in step \d+"),
    (ForgetsOnlyItsVictims, r"got \d+, which left by remove\(\) in step \d+"),
    (SharesItsMemory, r"expected None or the id of a block that it knows"),
    (AsksForNoPause, r"pause\('[abc]', .*\): expected no exception; got TypeError"),
    (NeedsItsDigest, r"remove\(\[.*\]\): expected no exception; got AssertionError\(.no digest"),
    (LacksMethods, "making the policy: expected an object with the methods free, use, remove, victim, and perhaps"),
    (CannotBeMade, "making the policy: expected no exception; got TypeError"),
    (Malicious, "expected"),
]


@pytest.mark.parametrize(("policy", "expected"), BROKEN, ids=[policy.__name__ for policy, _ in BROKEN])
def test_a_policy_that_breaks_a_promise_is_refused(policy: Any, expected: str) -> None:
    for seed in (0, 1, 2, 7):
        SharesItsMemory.shared.clear()
        with pytest.raises(AssertionError, match=rf"^check_policy: seed {seed}, step \d+: .*{expected}"):
            check_policy(policy, seed=seed)


def test_the_step_comes_again() -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(AssertionError) as caught:
            check_policy(NeverForgets, seed=5)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    step = int(messages[0].split("step ")[1].split(":")[0])
    check_policy(NeverForgets, 12, step - 1, 5)
    with pytest.raises(AssertionError):
        check_policy(NeverForgets, 12, step, 5)


def test_what_a_policy_raised_is_the_cause() -> None:
    with pytest.raises(AssertionError) as caught:
        check_policy(Raises)
    assert repr(caught.value.__cause__) == "RuntimeError('boom')"


def test_what_it_refuses_fails_in_a_manager_too() -> None:
    """The same promise, `num_eviction_failures == 0`, is broken there."""
    for policy in (Raises, NamesUnknown, NamesNothingUseful, HasATypo, NeverForgets, AsksForNoPause):
        manager = KVCacheManager(6, 1, eviction=policy)
        for number in range(30):
            sequence = Sequence(number, [number % 5, 7, number % 3], session="a")
            manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
            manager.free(sequence)
            manager.sessions.pause("a", "stop")
        assert manager.stats.num_eviction_failures, policy


class Counting(Random):
    """`Random` is strict: it raises for what it doesn't know, and for what it is told twice."""

    counts: ClassVar[Counter[str]] = Counter()

    def free(self, blocks: list[FreeBlock]) -> None:
        assert all(block.depth >= 0 and block.tenant in {None, "tenant"} for block in blocks)
        self.counts["hit"] += sum(block.num_hits > 0 for block in blocks)
        self.counts["of sessions"] += sum(len({block.session, *block.others}) > 1 for block in blocks)
        super().free(blocks)

    def remove(self, block_ids: list[int]) -> None:
        digests = [self.cache.digest(block_id) for block_id in block_ids]
        self.counts["forgotten"] += digests.count(None)
        self.counts["evicted"] += len(digests) - digests.count(None)
        self.use(block_ids)

    def begin(self, session: Hashable, tenant: str | None) -> None:
        self.counts["begin"] += 1

    def end(self, session: Hashable, tenant: str | None) -> None:
        self.counts["end"] += 1

    def victim(self, num_blocks: int) -> int | None:
        self.counts["several wanted"] += num_blocks > 1
        self.counts["of tenants"] += self.cache.num_blocks < 12
        answer = super().victim(num_blocks)
        self.counts["the least recently used"] += answer is None
        self.counts["below"] += answer is not None and num_blocks > 1
        return answer


def test_the_walk_meets_all_cases() -> None:
    Counting.counts.clear()
    for seed in range(3):
        check_policy(Counting, seed=seed)
    least = {"hit": 300, "of sessions": 300, "forgotten": 90, "evicted": 900, "begin": 900, "end": 200}
    least |= {"several wanted": 300, "of tenants": 60, "the least recently used": 100, "below": 200}
    assert not {what: number for what, number in least.items() if Counting.counts[what] < number}, Counting.counts


@pytest.mark.parametrize("num_blocks", [2, 3, 12])
def test_no_block_of_the_plain_cache_is_lost(num_blocks: int) -> None:
    cache = PlainCache(Random, num_blocks, seed=3)
    for _ in range(600):
        cache.walk(1)
        owned = {block for _, _, blocks in cache.running for block in blocks}
        assert sorted([*cache.queue, *cache.empty, *owned]) == list(range(num_blocks))
        assert cache.main.known.keys() == {*cache.queue} <= cache.prefixes.keys()
        assert sorted(block for holders in cache.holders.values() for block in holders) == sorted(cache.prefixes)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("lru",), "make: expected a policy's class, or a function that makes a policy, got 'lru'"),
        ((Good, 1), "num_blocks: expected an int of at least 2, got 1"),
        ((Good, 12, 0), "num_steps: expected an int of at least 1, got 0"),
        ((Good, 12, 10, -1), "seed: expected an int of at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_policy(*arguments)
    assert str(caught.value) == expected


def test_a_good_policy_passes() -> None:
    check_policy(Good)
    check_policy(partial(Good), num_blocks=3, num_steps=500, seed=11)
