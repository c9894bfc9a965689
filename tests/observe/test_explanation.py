"""`explain`, cause by cause."""

from typing import Any

import pytest

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, Sequence, SlidingWindow
from kvblocks.observe.removal_history import Removal, RemovalHistory


def compute(manager: KVCacheManager, name: Any, tokens: Any, **keys: Any) -> None:
    sequence = Sequence(name, tokens, **keys)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def test_no_miss() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(9))
    explanation = manager.inspect.explain(Sequence(1, range(10)))
    assert (explanation.cause, str(explanation)) == ("no miss", "2 of 2 full blocks are cached")


def test_never_cached() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(4))
    explanation = manager.inspect.explain(Sequence(1, range(8)))
    assert (explanation.cause, explanation.num_cached_blocks, explanation.num_full_blocks) == ("never cached", 1, 2)
    assert "block 1 was never cached" in str(explanation)


def test_evicted_by_whom_and_when() -> None:
    manager = KVCacheManager(4, 4, num_history_blocks=10)
    compute(manager, "old", range(12))
    compute(manager, "greedy", range(100, 108))  # takes the free block, and the end of the old one
    compute(manager, "later", range(200, 204))
    explanation = manager.inspect.explain(Sequence("again", range(12)))
    assert (explanation.cause, explanation.num_cached_blocks) == ("evicted", 1)
    assert explanation.removal is not None
    assert explanation.removal.sequence_id == "later"
    manager.inspect.explain(Sequence("again", range(12)))
    assert "block 1 was evicted for sequence 'later' (0 blocks taken from the pool since)" in str(explanation)


def test_aborted_and_reset() -> None:
    manager = KVCacheManager(8, 4, num_history_blocks=10)
    dies = Sequence("dies", range(8))
    manager.allocate_slots(dies)
    manager.abort(dies, 4)
    explanation = manager.inspect.explain(dies)
    assert (explanation.cause, explanation.num_cached_blocks) == ("aborted", 1)
    assert "was never computed" in str(explanation)
    manager.reset_prefix_cache()
    explanation = manager.inspect.explain(dies)
    assert (explanation.cause, explanation.num_cached_blocks) == ("reset", 0)
    assert "reset" in str(explanation)


@pytest.mark.parametrize(
    ("cached", "wanted", "block"),
    [
        ({"salt": "a"}, {"salt": "b"}, 0),
        ({"salt": "a"}, {}, 0),
        ({}, {"lora": "adapter"}, 0),
        ({"extra_keys": [(5, 6, "cat")]}, {"extra_keys": [(5, 6, "dog")]}, 1),
    ],
)
def test_the_same_tokens_under_other_keys(cached: dict[str, Any], wanted: dict[str, Any], block: int) -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(12), **cached)
    compute(manager, 1, [*range(4), 99, 99, 99, 99], **cached)
    explanation = manager.inspect.explain(Sequence(2, range(12), **wanted))
    assert (explanation.cause, explanation.num_cached_blocks, explanation.keys_block) == ("other keys", block, block)
    assert explanation.our_keys != explanation.their_keys
    assert "is cached with other keys" in str(explanation)


def test_what_the_other_keys_are() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(8), salt="a", lora="x")
    explanation = manager.inspect.explain(Sequence(1, range(8), salt="b"))
    assert explanation.our_keys == (("salt", None, "b"),)
    assert explanation.their_keys == (("salt", None, "a"), ("lora", None, "x"))


def test_a_block_that_begins_alike() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(8))
    assert manager.inspect.explain(Sequence(1, [0, 1, 2, 30])).num_common_tokens == 3
    explanation = manager.inspect.explain(Sequence(1, [0, 1, 2, 3, 4, 50, 6, 7]))
    assert (explanation.cause, explanation.num_cached_blocks, explanation.num_common_tokens) == ("partly equal", 1, 1)
    assert str(explanation).endswith("has only 1 token at its beginning in common with what is cached there")


def test_what_begins_alike_under_other_keys_does_not_count() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, 0, range(4), salt="a")
    assert manager.inspect.explain(Sequence(1, [0, 1, 2, 30], salt="b")).cause == "never cached"


def test_an_abort_is_nobodys_eviction() -> None:
    manager = KVCacheManager(8, 4, num_history_blocks=10)
    dies = Sequence("dies", range(8))
    manager.allocate_slots(dies)
    manager.abort(dies, 0)
    removal = manager.inspect.explain(dies).removal
    assert removal is not None
    assert removal.sequence_id is None


def test_a_step_says_for_whom_it_took_each_block() -> None:
    manager = KVCacheManager(4, 2, num_history_blocks=10)
    sequences = [Sequence(name, [ord(name), ord(name)]) for name in "ab"]
    for sequence in sequences:
        manager.allocate_slots(sequence)
    compute(manager, "old", [1, 2, 3, 4])
    manager.append_step(sequences, [5, 6])
    assert str(manager.inspect.explain(Sequence("x", [1, 2]))).endswith(
        "was evicted for sequence 'b' (0 blocks taken from the pool since)"
    )


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    manager = KVCacheManager(4, 4, num_history_blocks=2)
    for name in range(6):
        compute(manager, name, [name] * 16)
    assert manager.inspect.explain(Sequence("x", [4] * 16)).num_cached_blocks == 0
    assert manager.inspect.explain(Sequence("x", [4] * 4)).cause == "evicted"
    assert manager.inspect.explain(Sequence("x", [3] * 4)).cause == "never cached"  # forgotten by now
    history = RemovalHistory(2)
    history.note_removed([b"a", b"b", b"c"], "evicted")
    assert (len(history), history.find(b"a")) == (2, None)
    history.note_removed([b"b", b"d"], "reset")
    assert history.find(b"c") is None
    assert history.find(b"b") == Removal("reset", 0, None)


def test_explaining_changes_nothing() -> None:
    manager = KVCacheManager(8, 4, num_history_blocks=5)
    compute(manager, 0, range(8))
    before = manager.inspect.free_block_ids(), manager.stats
    running = Sequence(1, range(9))
    manager.allocate_slots(running, hit=manager.get_computed_blocks(running))
    manager.inspect.explain(running)  # one that is allocated may be asked about too
    manager.free(running)
    assert manager.stats.num_queries == before[1].num_queries + 1
    with pytest.raises(InvalidArgumentError, match="num_history_blocks: expected an int of at least 0, got -1"):
        KVCacheManager(8, 4, num_history_blocks=-1)


def test_hits_that_end_before_what_is_cached_since_blocks_are_larger() -> None:
    manager = KVCacheManager(64, groups=[FullAttention(16), SlidingWindow(64, 40)])
    cached = Sequence("cached", range(80))
    manager.allocate_slots(cached)
    answer = manager.inspect.explain(Sequence("other", [*range(80), *[9] * 30]))
    assert str(answer) == (
        "5 of 6 full blocks are cached, 4 of them can be hit: hits end where the largest blocks end;"
        " block 5 was never cached, as far as is remembered"
    )
    assert "4 of them can be hit" in str(manager.inspect.explain(Sequence("same", range(81))))
