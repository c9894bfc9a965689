"""Chunks that are computed by layers: which step has a slice, who comes in between, and what becomes of a chunk."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step

from kvblocks import Sequence
from kvblocks.engine.schedule.open_chunk import OpenChunk
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.undoing import undo, written_tokens

LAYERED = {"max_num_chunk_tokens": 8, "max_num_batched_tokens": 32, "num_layers": 8}
"""A chunk has 32 tokens, and a slice one layer of eight. Two slices are worth a step of 8 tokens."""


def make_open(num_blocks=80, deadline=None, **options):
    """A scheduler with the chunk of tokens 8 to 39 of a prompt of 60 open, of which one slice is complete."""
    scheduler, cache = make(num_blocks, **{**LAYERED, **options}), FakeCache(BLOCK_SIZE)
    long = add(scheduler, "long", [0] * 60, deadline=deadline)
    assert step(scheduler, cache) == [("long", 0, 8)]
    assert step(scheduler, cache) == [("long", 8, 32)]
    return scheduler, cache, long


def steps(scheduler, cache, number):
    """The names in each of the next steps."""
    return [[name for name, _, _ in step(scheduler, cache)] for _ in range(number)]


def finish(scheduler, cache):
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


def cached_tokens(scheduler, prompt, **keys):
    return scheduler.manager.get_computed_blocks(Sequence("probe", prompt, **keys)).num_tokens


# --- who gets which step ---------------------------------------------------------------------------------------------


def test_slices_take_a_chunk_through_all_layers():
    scheduler, cache, long = make_open()
    part = scheduler.long_prompts.open
    for number in range(1, 8):
        assert (part.layers, long.num_computed_tokens) == (range(number, number + 1), 8)
        assert step(scheduler, cache) == [("long", 8, 32)]
    assert (scheduler.long_prompts.open, long.num_computed_tokens) == (None, 40)
    # 20 tokens are left: 19 by layers, and the last one by a step that samples.
    assert [step(scheduler, cache) for _ in range(9)] == [*[[("long", 40, 19)]] * 8, [("long", 59, 1)]]
    finish(scheduler, cache)
    assert long.output_token_ids == answer_alone((None, 0), [0] * 60, 4)


def test_running_requests_get_a_step_whenever_slices_were_worth_one():
    scheduler, cache = make(80, **LAYERED), FakeCache(BLOCK_SIZE)
    add(scheduler, "old", [2] * 3, max_tokens=30)
    step(scheduler, cache)
    add(scheduler, "long", [0] * 60)
    assert steps(scheduler, cache, 7) == [["old", "long"], ["long"], ["long"], ["old"], ["long"], ["long"], ["old"]]


def test_a_new_request_waits_for_one_slice_at_most():
    scheduler, cache, _ = make_open()
    for number in range(3):
        add(scheduler, number, [1, number], max_tokens=1)
        assert steps(scheduler, cache, 1) == [[number]]
        add(scheduler, f"and {number}", [1, number, 2], max_tokens=1)
        assert steps(scheduler, cache, 2) == [["long"], [f"and {number}"]]
        assert steps(scheduler, cache, 1) == [["long"]]
    finish(scheduler, cache)


def test_nobody_gives_way_to_a_request_that_is_refused():
    scheduler, cache, _ = make_open(20, watermark=0.05)
    add(scheduler, "short", [1] * 24)  # the pool has no room for it beside the rest of the long prompt
    assert steps(scheduler, cache, 7) == [["long"]] * 7


def test_long_prompts_take_turns_chunk_by_chunk():
    scheduler, cache = make(200, **LAYERED), FakeCache(BLOCK_SIZE)
    for first in range(3):
        request = Request(Sequence(first, [first] * 80, salt=str(first)), 1)
        scheduler.add(request)
    assert steps(scheduler, cache, 1) == [[0, 1, 2]]
    names = [names for (names,) in steps(scheduler, cache, 3 * 8 + 3 * 9)]  # the last 8 tokens take one step
    assert names == [*[0] * 8, *[1] * 8, *[2] * 8, *[0] * 9, *[1] * 9, *[2] * 9]
    finish(scheduler, cache)


def test_a_prompt_that_is_scored_is_computed_by_tokens():
    """It needs the logits of all its tokens, and the head's product for a large chunk can't be cut by layers."""
    scheduler, cache = make(80, **LAYERED), FakeCache(BLOCK_SIZE)
    add(scheduler, "long", [0] * 60, max_hit_tokens=0)
    assert [step(scheduler, cache) for _ in range(3)] == [[("long", start, 8)] for start in (0, 8, 16)]
    finish(scheduler, cache)


def test_scored_prompts_take_one_step_in_turns_beside_slices():
    scheduler, cache, _ = make_open()
    for number in range(2):
        request = Request(Sequence(number, [1 + number] * 30, salt=str(number)), 1, max_hit_tokens=0)
        scheduler.add(request)
    seen = steps(scheduler, cache, 12)
    assert seen[0] == [0, 1] and seen.count([0]) == 3 and [0, 1] not in seen[1:]
    finish(scheduler, cache)


def test_without_room_for_a_chunk_the_oldest_goes_on_by_tokens():
    scheduler, cache = make(16, **LAYERED, enable_caching=False, watermark=0.0), FakeCache(BLOCK_SIZE)
    old, young = add(scheduler, "old", [0] * 50, max_tokens=4), add(scheduler, "young", [1] * 50, max_tokens=4)
    finish(scheduler, cache)
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
    for number, request in enumerate((old, young)):
        assert request.output_token_ids == answer_alone((None, 0), [number] * 50, 4)


@pytest.mark.parametrize("limits", [{"num_layers": 1}, {"max_num_chunk_tokens": None}, {"max_num_batched_tokens": 8}])
def test_by_tokens_where_layers_would_save_nothing(limits):
    scheduler, cache = make(80, **{**LAYERED, **limits}), FakeCache(BLOCK_SIZE)
    add(scheduler, "long", [0] * 60)
    while scheduler.has_work:
        step(scheduler, cache)
        assert scheduler.long_prompts.open is None


def test_no_layer_takes_longer_than_a_step():
    scheduler, cache = make(80, **{**LAYERED, "num_layers": 2}), FakeCache(BLOCK_SIZE)
    add(scheduler, "long", [0] * 60)
    assert step(scheduler, cache) == [("long", 0, 8)]
    assert [step(scheduler, cache) for _ in range(3)] == [[("long", 8, 16)], [("long", 8, 16)], [("long", 24, 16)]]


# --- nothing is cached before it is written --------------------------------------------------------------------------


def test_nobody_hits_an_open_chunk_and_who_has_the_same_prefix_waits():
    scheduler, cache, _ = make_open()
    same = add(scheduler, "same", [0] * 40)
    for _ in range(6):
        assert cached_tokens(scheduler, [0] * 60) == 8
        assert steps(scheduler, cache, 1) == [["long"]]
    step(scheduler, cache)
    assert cached_tokens(scheduler, [0] * 60) == 40
    finish(scheduler, cache)
    assert same.num_cached_tokens >= 36


ENDS = ["cancel", "expire", "abort", "interrupt"]


@pytest.mark.parametrize("num_slices", range(1, 8))
@pytest.mark.parametrize("end", ENDS)
def test_a_chunk_that_is_dropped_leaves_only_what_was_written(end, num_slices):
    scheduler, cache, long = make_open(deadline=1.0)
    other = add(scheduler, "other", [1] * 3, max_tokens=20)
    while scheduler.long_prompts.open.num_done_layers < num_slices:
        step(scheduler, cache)
    if end == "cancel":
        scheduler.cancel(long)
    elif end == "expire":
        assert scheduler.expire(1.0) == [long]
    else:
        written = written_tokens(scheduler)
        chunks = scheduler.schedule()
        while chunks[0].part is None:
            scheduler.complete(chunks, cache.run(chunks))
            written = written_tokens(scheduler)
            chunks = scheduler.schedule()
        cache.store(chunks, poison=True)
        if end == "abort":
            scheduler.abort(chunks)
        else:
            undo(scheduler, written)
    scheduler.manager.check()
    assert (scheduler.long_prompts.open, cached_tokens(scheduler, [0] * 60)) == (None, 8)
    assert long.sequence.is_allocated is False
    finish(scheduler, cache)
    if end in ("cancel", "expire"):
        assert long.output_token_ids == []
    else:
        assert long.output_token_ids == answer_alone((None, 0), [0] * 60, 4)
    assert other.output_token_ids == answer_alone((None, 0), [1] * 3, 20)


def test_an_open_chunk_counts_as_written_when_all_its_layers_are_done():
    scheduler, cache, long = make_open()
    for _ in range(6):
        assert (long.sequence.num_computed_tokens, written_tokens(scheduler)) == (40, {(long, 0): 8})
        step(scheduler, cache)
    written, chunks = written_tokens(scheduler), scheduler.schedule()
    assert chunks[0].part.layers == range(7, 8)
    scheduler.complete(chunks, cache.run(chunks))
    assert (cached_tokens(scheduler, [0] * 60), written_tokens(scheduler)) == (40, {(long, 0): 40})
    undo(scheduler, written)  # interrupted after all that: of this step's work nothing stays
    assert cached_tokens(scheduler, [0] * 60) == 8
    finish(scheduler, cache)


def test_a_step_of_others_that_dies_leaves_the_chunk_open():
    scheduler, cache, long = make_open()
    part = scheduler.long_prompts.open
    add(scheduler, "other", [1] * 3)
    chunks = scheduler.schedule()
    assert [chunk.request.sequence.sequence_id for chunk in chunks] == ["other"]
    scheduler.abort(chunks)
    assert scheduler.long_prompts.open is part and scheduler.running == [long]
    finish(scheduler, cache)


def test_a_reset_while_a_chunk_is_open():
    scheduler, cache, long = make_open()
    scheduler.manager.reset_prefix_cache()
    finish(scheduler, cache)
    assert cached_tokens(scheduler, [0] * 60) == 0
    assert long.output_token_ids == answer_alone((None, 0), [0] * 60, 4)


def test_growing_requests_take_the_blocks_of_a_younger_open_chunk():
    scheduler, cache = make(40, **LAYERED), FakeCache(BLOCK_SIZE)
    old = add(scheduler, "old", [2] * 7, max_tokens=40)
    step(scheduler, cache)
    long = add(scheduler, "long", [0] * 50, max_tokens=2)
    while scheduler.long_prompts.open is None:
        step(scheduler, cache)
    manager, rest = scheduler.manager, Sequence("rest", range(4 * scheduler.manager.num_free_blocks))
    manager.allocate_slots(rest)
    while not long.num_preemptions:
        assert scheduler.long_prompts.open is not None
        step(scheduler, cache)
    assert (scheduler.long_prompts.open, cached_tokens(scheduler, [0] * 50)) == (None, 8)
    manager.free(rest)
    finish(scheduler, cache)
    assert old.output_token_ids == answer_alone((None, 0), [2] * 7, 40)
    assert long.output_token_ids == answer_alone((None, 0), [0] * 50, 2)


# --- samples, and prompts that were remembered -----------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(1, 20))
def test_samples_are_forked_after_the_last_chunk_whoever_is_cancelled_before(num_steps):
    scheduler, cache = make(80, **LAYERED), FakeCache(BLOCK_SIZE)
    first, *others = add_samples(scheduler, "long", [0] * 60, 3)
    for _ in range(num_steps):
        step(scheduler, cache)
    scheduler.cancel(first)
    scheduler.manager.check()
    finish(scheduler, cache)
    for number, request in enumerate(others, 1):
        assert request.output_token_ids == answer_alone((None, number), [0] * 60, 4)


def test_the_heir_of_a_cancelled_prompt_waits_in_front():
    """What was computed for it is dropped with the open chunk, so it is admitted again, before all that came later."""
    scheduler, cache = make(80, **LAYERED, max_num_seqs=3), FakeCache(BLOCK_SIZE)
    first, heir, _ = add_samples(scheduler, "long", [0] * 60, 3)
    while scheduler.long_prompts.open is None:
        step(scheduler, cache)
    later = [add(scheduler, name, [1]) for name in ("b", "c")]
    scheduler.cancel(first)
    assert list(scheduler.waiting) == [heir, *later]
    finish(scheduler, cache)


def test_the_first_slice_copies_the_block_that_the_chunk_shares():
    scheduler, cache = make(80, **{**LAYERED, "max_num_chunk_tokens": 6}), FakeCache(BLOCK_SIZE)
    long = add(scheduler, "long", [0] * 60)
    step(scheduler, cache)
    child = scheduler.manager.fork(long.sequence, "child")
    assert long.sequence.block_ids[1] == child.block_ids[1]
    copies = []
    while long.num_computed_tokens == 6:
        chunks = scheduler.schedule()
        copies.append(chunks[0].copies)
        scheduler.complete(chunks, cache.run(chunks))
    assert copies[0] == ((child.block_ids[1], long.sequence.block_ids[1]),) and not any(copies[1:])
    assert [cache.slots[cache.slot(child, position)] for position in (4, 5)] == [(None, *[0] * 5), (None, *[0] * 6)]
    scheduler.manager.free(child)
    finish(scheduler, cache)


# --- an open chunk by itself -----------------------------------------------------------------------------------------


def test_what_slices_are_worth():
    part = OpenChunk(None, 0, 64, (), num_layers=5, num_slice_layers=2)
    worth = []
    while not part.is_done:
        worth.append(part.num_worth_tokens)
        part.num_done_layers = part.layers.stop
    assert worth == [25.6, 25.6, 12.8] and part.layers == range(5, 5)
