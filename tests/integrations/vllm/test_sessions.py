"""Streaming sessions: a turn changes the last tokens of a request that keeps its blocks, and adds to them."""

from contextlib import nullcontext

import pytest
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import VLLM_VERSION, Settings
from integrations.vllm.stand import BLOCK, WHOSE, Stand, image, request
from integrations.vllm.worker import WrongReadError
from integrations.vllm.workload import continuation, num_accepted

PROMPT = list(range(100, 100 + 3 * BLOCK - 2))
MODES = [(False, 0), (True, 0), (False, 3), (True, 3)]
IS_MENDED = VLLM_VERSION >= (0, 33)  # an answer's end, and a session that is preempted behind it


def turn(tokens, max_tokens=5, **what):
    return request("session", tokens, max_tokens, resumable=True, **what)


def wait_for_turn(stand):
    for _ in range(400):
        if stand.requests["session"].status == RequestStatus.WAITING_FOR_STREAMING_REQ and not stand.in_flight:
            return
        stand.step()
    raise AssertionError("the turn never ends")


@pytest.mark.parametrize(("is_async", "num_drafts"), MODES)
def test_nothing_is_cached_under_tokens_that_a_turn_has_dropped(is_async, num_drafts):
    """A turn drops the last token of the answer before it. No prompt with that token may hit what the turn computed."""
    stand = Stand(Settings(is_async=is_async, num_drafts=num_drafts))
    session = stand.add(turn(PROMPT))
    wait_for_turn(stand)
    said = list(session.all_token_ids)
    stand.add(turn([7] * 3 * BLOCK))
    wait_for_turn(stand)
    now = list(session.all_token_ids)
    assert now[: len(said)] != said[: len(said)] or num_drafts
    (table,) = stand.manager.get_block_ids("session")
    held = [block for block in stand.manager.block_pool.blocks if block.block_id in table and block.block_hash]
    assert len(held) >= (len(now) - 1) // BLOCK - 1
    stand.add(request("dropped", [*said, *[7] * 3 * BLOCK]))
    stand.add(request("kept", now))
    stand.step()  # the worker reads what they hit
    stand.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    while stand.in_flight:
        stand.step()
    assert stand.cached(request("later", now)) == (len(now) - 1) // BLOCK * BLOCK
    assert stand.num_free == stand.settings.num_blocks - 1


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize(("is_async", "num_drafts"), [(False, 0), (True, 0)])
def test_a_session_decides_as_vllms(whose, is_async, num_drafts):
    stand = Stand(Settings(is_async=is_async, num_drafts=num_drafts), whose)
    session = stand.add(turn(PROMPT))
    for number in range(3):
        wait_for_turn(stand)
        stand.add(turn([number] * (BLOCK + 3)))
    wait_for_turn(stand)
    stand.add(request("session", [1], 1))  # not resumable: the end
    stand.run_all()
    assert session.is_finished()
    assert stand.num_free == stand.settings.num_blocks - 1
    expected = Stand(Settings(is_async=is_async), "vLLM's")
    expected.add(turn(PROMPT))
    for number in range(3):
        wait_for_turn(expected)
        expected.add(turn([number] * (BLOCK + 3)))
    wait_for_turn(expected)
    assert stand.result.decided[: len(expected.result.decided)] == expected.result.decided


def run_cut_short(whose):
    """Take a session through an answer that ends amid accepted drafts, and a turn behind it."""
    stand = Stand(Settings(num_drafts=3), whose)
    prompt = next(p for p in ([*PROMPT, n] for n in range(1000)) if accepts_all(p))
    answer = continuation(prompt, 8)
    session = stand.add(turn(prompt, 8, params={"stop_token_ids": [answer[2]]}))
    wait_for_turn(stand)
    assert (session.num_computed_tokens < session.num_tokens) == IS_MENDED, "drafts behind the end were accepted"
    stand.add(turn([7] * 3 * BLOCK))
    wait_for_turn(stand)
    return stand


def accepts_all(prompt):
    first = [*prompt, *continuation(prompt, 1)]
    return num_accepted(first, 3) == 3


def test_vllm_takes_drafts_behind_an_answers_end_for_the_next_turn():
    """This is why our adapter leaves them out. vLLM does since 0.33."""
    with nullcontext() if IS_MENDED else pytest.raises(WrongReadError):
        run_cut_short("vLLM's")


def test_drafts_behind_an_answers_end_are_not_taken_for_the_next_turn():
    stand = run_cut_short("ours")
    tokens = list(stand.requests["session"].all_token_ids)
    assert stand.cached(request("same", tokens)) >= 5 * BLOCK


def test_an_image_that_ends_in_a_block_which_the_next_turn_fills_stays_part_of_it():
    stand = Stand(Settings())
    session = stand.add(turn(PROMPT))
    for name in ("cat", "dog"):
        wait_for_turn(stand)
        stand.add(turn([9] * 4 * BLOCK, mm_features=[image(name, 0, 4 * BLOCK)]))
    wait_for_turn(stand)
    tokens = list(session.all_token_ids)
    cat, dog = (feature.mm_position.offset for feature in session.mm_features)
    assert (cat + 4 * BLOCK) // BLOCK == dog // BLOCK
    seen = [image("cat", cat, 4 * BLOCK), image("dog", dog, 4 * BLOCK)]
    assert stand.cached(request("both", tokens, mm_features=seen)) == (len(tokens) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [0, 2 * BLOCK])
def test_images_of_a_later_turn_are_part_of_its_prefix(chunk):
    stand = Stand(Settings(long_prefill_token_threshold=chunk))
    session = stand.add(turn(PROMPT))
    wait_for_turn(stand)
    stand.add(turn([9] * 4 * BLOCK, mm_features=[image("cat", 0, 4 * BLOCK)]))
    wait_for_turn(stand)
    tokens = list(session.all_token_ids)
    (seen,) = session.mm_features
    assert stand.cached(request("text", tokens)) == seen.mm_position.offset // BLOCK * BLOCK
    other = image("dog", seen.mm_position.offset, 4 * BLOCK)
    assert stand.cached(request("dog", tokens, mm_features=[other])) == seen.mm_position.offset // BLOCK * BLOCK
    same = image("cat", seen.mm_position.offset, 4 * BLOCK)
    assert stand.cached(request("cat", tokens, mm_features=[same])) == (len(tokens) - 1) // BLOCK * BLOCK


def test_a_preempted_session_is_looked_up_with_its_turns_tokens():
    stand = Stand(Settings(num_blocks=14, reserves_full_prompt=False))
    session = stand.add(turn(PROMPT, 3))
    wait_for_turn(stand)
    stand.add(request("other", range(2000, 2000 + 4 * BLOCK), 4 * BLOCK))
    stand.step()
    stand.add(turn([7] * BLOCK, 5 * BLOCK))
    wait_for_turn(stand)  # the worker reads what is hit
    assert session.num_preemptions


@pytest.mark.parametrize("whose", WHOSE)
def test_a_session_preempted_with_its_last_step_in_flight_is_looked_up_with_its_next_turns_tokens(whose):
    """vLLM 0.32 forgets what such a session was told before, since none of it is computed. So all tokens change."""
    stand = Stand(Settings(is_async=True), whose)
    session = stand.add(turn(PROMPT, 2))
    stand.step()
    stand.step()
    stand.preempt(session)
    stand.finish()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ and not session.num_computed_tokens
    stand.add(turn([7] * 8 * BLOCK, 2))
    assert session.num_tokens == 8 * BLOCK + (len(PROMPT) + 1 if IS_MENDED else 0)
    # vLLM's scheduler forgets to ask for it.
    assert stand.manager.get_computed_blocks(session)[1] == (len(PROMPT) // BLOCK * BLOCK if IS_MENDED else 0)
