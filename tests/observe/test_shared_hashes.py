"""Prefixes that share a name: `BlockStored` comes with the first, `BlockRemoved` with the last.

Random histories over the reference model, with an oracle for the names. Two versions of an adapter share names in
vLLM's scheme, and so do spans with different ends.
"""

from typing import Any

import pytest
from model.group_history import GroupHistory
from model.history import MAX_TOKENS, Chooser, History, RandomChooser, walk
from model.tier_machine import TierMachine
from model.vllm_reference import block_hashes, block_keys

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventOptions,
    FullAttention,
    Group,
    KVCacheManager,
    Sequence,
    SlidingWindow,
    Tier,
)
from kvblocks.hashing.vllm import VllmHashScheme, split_lora

ONE, TWO = "ad\0/path\0one", "ad\0/path\0two"
LORAS = [ONE, TWO, ONE, TWO, "ad\0/other", None]


def name_of(prefix: Any, block_size: int) -> bytes:
    """Return what vLLM would call the last block of a model's prefix."""
    salt, lora, tokens, spans = prefix[:4]
    path = None if lora is None else split_lora(lora)
    keys = block_keys(salt, path, spans, block_size, len(tokens) // block_size)
    return block_hashes("sha256_cbor", "seed", tokens, keys, block_size)[-1]


class Named:
    """The names that events report as cached, and operations that make prefixes share names."""

    num_shared = 0

    def new(self: Any, chooser: Chooser) -> None:
        num_tokens = chooser.integer(1, 14)
        tokens = [chooser.integer(0, 1) for _ in range(num_tokens)]
        start = chooser.integer(0, num_tokens - 1)
        spans = {(start, chooser.integer(start + 1, num_tokens), "x")} if chooser.integer(0, 1) else set()
        self.add(tokens, chooser.choose([None, None, "salt"]), chooser.choose(LORAS), spans)

    def new_like_another(self: Any, chooser: Chooser) -> None:
        """Mostly the same prompt, under another adapter of the same name or with a span that ends elsewhere."""
        if not self.pairs:
            return
        _, other = chooser.choose(self.pairs)
        tokens = other.tokens[: chooser.integer(len(other.tokens) // 2, len(other.tokens))] or [0]
        tokens = (tokens + [chooser.integer(0, 1) for _ in range(chooser.integer(0, 4))])[:MAX_TOKENS]
        spans = {
            (start, chooser.integer(start + 1, len(tokens)), key) for start, _, key in other.keys if start < len(tokens)
        }
        self.add(tokens, other.salt, chooser.choose(LORAS) if chooser.integer(0, 1) else other.lora, spans)

    def replay(self: Any, told: set[Any], contents: list[Any], by_group: bool) -> None:
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                told.clear()
                continue
            names = {(event.group_idx, name) for name in event.block_hashes}
            assert len(names) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not told & names
                assert len(event.tokens) == 4 * event.block_size * len(names) and len(event.block_ids) == len(names)
                parent = event.parent_block_hash
                assert by_group or parent is None or (None, parent) in told
                told |= names
            else:
                assert isinstance(event, BlockRemoved) and told >= names
                told -= names
        expected = [
            (content[4] if len(content) == 6 else None if not by_group else self.model.primary, name_of(content, size))
            for content in contents
            for size in [self.manager.block_size]
        ]
        assert told == set(expected)
        self.num_shared += len(expected) - len(told)


def named(operations):
    """Operations of a history, with the two above instead of those of the base class."""
    ours = {"new": Named.new, "new_like_another": Named.new_like_another}
    return tuple((ours.get(operation.__name__, operation), number) for operation, number in operations)


class NamedHistory(Named, History):
    operations = named(History.operations)

    def replay_events(self) -> None:
        self.replay(self.stored, list(self.model.cached), by_group=False)


class NamedGroupHistory(Named, GroupHistory):
    operations = named(GroupHistory.operations)

    def replay_events(self) -> None:
        contents = [content for content in self.model.cached if len(content) == 6 or not self.model.has_virtual]
        self.replay(self.group_stored, contents, by_group=True)


@pytest.mark.every(2)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(24, 1), (18, 2), (14, 3)])
def test_replayed_hashes_are_those_of_all_cached_prefixes(num_blocks, block_size, met):
    scheme = VllmHashScheme("sha256_cbor", seed="seed")
    history = NamedHistory(num_blocks, block_size, enable_events=True, hash_algorithm=scheme)
    walk(history, RandomChooser(num_blocks), num_operations=2500, reset_every=300, forget_every=500)
    met["one group"].add(history.met())


@pytest.mark.every(2)
@pytest.mark.parametrize("groups", [[FullAttention(2), SlidingWindow(2, 3)], [SlidingWindow(2, 3)]])
def test_replayed_hashes_are_those_of_each_group(groups: list[Group], met: Any):
    scheme = VllmHashScheme("sha256_cbor", seed="seed")
    history = NamedGroupHistory(14 * len(groups), groups, enable_events=True, hash_algorithm=scheme)
    walk(history, RandomChooser(3), num_operations=2500, reset_every=300, forget_every=500)
    met["groups"].add(history.met())


class SharingMachine(TierMachine):
    are_names_shared = True

    def add(self, tokens: list[int], salt: str | None, spans: list[Any]) -> None:
        """With one image at the beginning, that ends anywhere."""
        super().add(tokens, salt, [(0, self.random.randint(1, len(tokens)), "image")])


@pytest.mark.parametrize("groups", [None, [FullAttention(2), SlidingWindow(2, 4)]])
def test_replayed_hashes_are_those_of_each_tier(groups, met):
    """Images with the same beginning and different ends share hashes, on the device and in tiers."""
    scheme = VllmHashScheme("sha256_cbor", seed="seed")
    tiers = [Tier("host", 40, 100, store="computed", medium="CPU"), Tier("disk", 90, 100, medium="DISK")]
    for seed in range(6):
        machine = SharingMachine(
            seed,
            40,
            None if groups else 2,
            tiers,
            groups=groups,
            hash_algorithm=scheme,
            enable_events=EventOptions(tiers=True, hits=True),
        )
        num_shared = 0
        for _ in range(30):
            machine.walk(10)
            prefixes = sum(pool.pool.num_cached_blocks for pool in machine.manager._transfers.pools)  # noqa: SLF001
            num_shared += prefixes > sum(medium != "GPU" for medium, _, _ in machine.told.blocks)
        machine.finish()
        met["tiers"].add({"shared": num_shared})


def test_the_walks_met_all_cases(met: Any):
    met["one group"].check(3, {"shared": 1000, "evicted": 140, "hits": 90})
    met["groups"].check(2, {"shared": 400, "evicted": 280, "hits": 50})
    met["tiers"].check(12, {"shared": 90})


def run(manager: KVCacheManager, name: str, tokens: Any, **keys: Any) -> Sequence:
    sequence = Sequence(name, tokens, **keys)
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def test_a_record_is_cut_where_hashes_are_told_already():
    manager = KVCacheManager(32, 2, hash_algorithm="vllm:sha256", enable_events=True)
    one = run(manager, "one", [1, 2, 3, 4, 5, 6], lora="ad\0p\0one")
    two = run(manager, "two", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], lora="ad\0p\0two", extra_keys=[(9, 10, "image")])
    first, second = manager.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (
        one.blocks[0] is not two.blocks[0]
        and manager.inspect.block_hashes(one) == manager.inspect.block_hashes(two)[:3]
    )
    assert second.block_hashes == tuple(manager.inspect.block_hashes(two)[3:]) and second.token_ids == [7, 8, 9, 10]
    assert second.parent_block_hash == first.block_hashes[-1]
    assert [index for index, _ in second.extra_keys] == [1]
    assert second.block_ids == tuple(block.block_id for block in two.blocks[3:])
    manager.evict_blocks([two.blocks[1].block_id])
    (removed,) = manager.take_events()
    assert isinstance(removed, BlockRemoved) and set(removed.block_hashes) == set(second.block_hashes)
    manager.evict_blocks([one.blocks[1].block_id])
    (removed,) = manager.take_events()
    assert removed.block_hashes == tuple(manager.inspect.block_hashes(one)[:0:-1])
    manager.evict_blocks([one.blocks[0].block_id])
    assert manager.take_events() == []  # the other's first block still has the hash
    manager.reset_prefix_cache()
    run(manager, "three", [1, 2, 3], lora="ad\0p\0three")
    cleared, stored = manager.take_events()
    assert cleared == AllBlocksCleared() and isinstance(stored, BlockStored)


def test_names_of_ours_are_not_counted():
    for manager in (KVCacheManager(8, 2, enable_events=True), KVCacheManager(8, 2, hash_algorithm="vllm:sha256")):
        recording: Any = manager._recording  # noqa: SLF001
        assert recording is None or recording._shared_hashes is None  # noqa: SLF001
