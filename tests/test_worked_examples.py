"""The examples that vLLM's design document on automatic prefix caching walks through, step by step.

In the document, all freed blocks go to the end of the queue. Here, as in vLLM's code today, blocks that hold nothing
are taken first.
"""

from pathlib import Path
from typing import Any

from kvblocks import KVCacheManager, Sequence


def allocate(manager: KVCacheManager, sequence: Sequence) -> None:
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.check()


def cached_ids(manager: KVCacheManager, sequence: Sequence) -> list[int]:
    return [block.block_id for block in sequence.blocks if block.is_cached]


REQUEST_0 = list(range(14))


def first_two_requests() -> tuple[KVCacheManager, Sequence, Sequence]:
    manager = KVCacheManager(num_blocks=10, block_size=4)

    request_0 = Sequence("0", REQUEST_0)
    allocate(manager, request_0)
    assert request_0.block_ids == [0, 1, 2, 3]
    assert cached_ids(manager, request_0) == [0, 1, 2]

    assert manager.append_slots(request_0, [14]) == []
    assert cached_ids(manager, request_0) == [0, 1, 2]
    assert manager.append_slots(request_0, [15]) == []
    assert cached_ids(manager, request_0) == [0, 1, 2, 3]  # block 3 is full
    manager.append_slots(request_0, [16])
    assert request_0.block_ids == [0, 1, 2, 3, 4]

    request_1 = Sequence("1", [*REQUEST_0[:11], 100, 101, 102])
    hit = manager.get_computed_blocks(request_1)
    assert (hit.num_tokens, [block.block_id for block in hit.blocks]) == (8, [0, 1])
    allocate(manager, request_1)
    assert request_1.block_ids == [0, 1, 5, 6]
    return manager, request_0, request_1


def test_the_example() -> None:
    manager, request_0, request_1 = first_two_requests()
    manager.free(request_0)
    assert manager.inspect.free_block_ids() == [4, 7, 8, 9, 3, 2]  # block 4 isn't full, so it holds nothing
    manager.free(request_1)
    assert manager.inspect.free_block_ids() == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]

    request_2 = Sequence("2", [*REQUEST_0[:12], *range(200, 217)])
    assert request_2.num_tokens == 29
    allocate(manager, request_2)
    assert request_2.block_ids == [0, 1, 2, 6, 4, 7, 8, 9]

    manager.free(request_2)
    again = manager.get_computed_blocks(Sequence("3", [*range(17)]))
    assert again.num_tokens == 16  # there were enough empty blocks, so nothing was evicted


def test_the_page_of_the_example() -> None:
    """docs/worked-example.md runs, and its table says which blocks each order takes."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "worked-example.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    hit, document = set(names["request_2"].block_ids[:3]), [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    queues = {"here": [6, 4, 7, 8, 9, 3, 2, 5, 1, 0], "the document": document}
    for who, queue in queues.items():
        left = [block_id for block_id in queue if block_id not in hit]
        assert f"| {who} | {' '.join(map(str, left))} | {' '.join(map(str, left[:5]))} | " in page
    later = Sequence("later", range(17))
    assert names["manager"].get_computed_blocks(later).num_tokens == 16


def test_the_example_in_its_other_wording() -> None:
    """The document's text also has a variant in which block 3 is hit, too: 33 tokens, 16 of them shared."""
    manager, request_0, request_1 = first_two_requests()
    manager.free(request_0)
    manager.free(request_1)
    request_2 = Sequence("2", [*range(16), *range(200, 217)])
    assert request_2.num_tokens == 33
    allocate(manager, request_2)
    assert request_2.block_ids == [0, 1, 2, 3, 6, 4, 7, 8, 9]


def test_duplicate_blocks() -> None:
    """Block tables only grow, so two requests that fill the same block at the same time keep a block each."""
    manager = KVCacheManager(num_blocks=10, block_size=4)
    prompt = list(b"ABCDEF")
    first = Sequence("first", prompt)
    allocate(manager, first)
    for token in b"GHI":
        manager.append_slots(first, [token])
    assert first.block_ids == [0, 1, 2]

    second = Sequence("second", prompt)
    allocate(manager, second)
    assert second.block_ids == [0, 3]
    for token in b"GHI":
        manager.append_slots(second, [token])
    manager.check()
    assert second.block_ids == [0, 3, 4]

    one, three = first.blocks[1], second.blocks[1]
    assert one.block_hash == three.block_hash is not None  # cached under one key

    # The duplicate leaves the map when it is evicted. The prefix stays cached as long as one of the two blocks does.
    third = Sequence("third", list(b"ABCDEFGH"))
    assert [block.block_id for block in manager.get_computed_blocks(third).blocks] == [0, 1]
    manager.free(first)
    filler = Sequence("filler", list(range(1000, 1000 + 4 * 7)))
    allocate(manager, filler)  # takes every free block, 1 among them
    assert 1 in filler.block_ids
    assert [block.block_id for block in manager.get_computed_blocks(third).blocks] == [0, 3]
