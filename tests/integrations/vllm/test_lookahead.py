"""EAGLE since vLLM 0.33: a block is found only if the token behind it is equal, too; then no block is dropped.

The draft model's keys and values at a block's last token depend on the token behind it.
"""

import pytest
import torch
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import LOOKS_AHEAD, Settings, make_scheduler, our_scheduler, own_scheduler
from integrations.vllm.configurations import EAGLE_SMALL
from integrations.vllm.decisions import decide, first_difference
from integrations.vllm.stand import BLOCK, WHOSE, Stand, image, request
from integrations.vllm.workload import make_asks
from kvblocks import Sequence, UnsupportedEngineError

pytestmark = pytest.mark.skipif(not LOOKS_AHEAD, reason="this vLLM drops EAGLE's last block instead")

EAGLE = Settings(num_drafts=3, is_eagle=True)
PROMPT = list(range(100, 100 + 4 * BLOCK))


def ask(name, tokens, max_tokens=1, **what):
    return request(name, tokens, max_tokens, num_ahead=1, **what)


@pytest.fixture(params=WHOSE)
def stand(request):
    return Stand(EAGLE, request.param)


def test_a_block_is_found_by_whoever_has_the_same_token_behind_it(stand):
    assert stand.cached(ask("first", [*PROMPT, 1])) == 0
    assert stand.cached(ask("same", [*PROMPT, 1])) == 4 * BLOCK  # all but the last token
    assert stand.cached(ask("other", [*PROMPT, 2])) == 3 * BLOCK
    assert stand.cached(ask("other again", [*PROMPT, 2, 3])) == 4 * BLOCK
    assert stand.cached(ask("first again", [*PROMPT, 1, 3])) == 4 * BLOCK  # both last blocks are there
    assert stand.cached(ask("nothing behind", PROMPT)) == 3 * BLOCK


def test_another_first_token_is_another_prompt(stand):
    stand.cached(ask("first", [1, *PROMPT]))
    assert stand.cached(ask("other", [2, *PROMPT])) == 0
    assert stand.cached(ask("same", [1, *PROMPT])) == 4 * BLOCK


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_an_image_belongs_to_the_block_before_it(stand, offset):
    def with_image(name, identifier):
        return ask(name, [*PROMPT, 1], mm_features=[image(identifier, offset, BLOCK)])

    stand.cached(with_image("first", "cat"))
    assert stand.cached(with_image("same", "cat")) == 4 * BLOCK
    assert stand.cached(with_image("other", "dog")) == (max(0, offset - 1) // BLOCK) * BLOCK


def test_an_image_of_one_token_at_the_beginning_is_seen(stand):
    stand.cached(ask("first", [*PROMPT, 1], mm_features=[image("cat", 0, 1)]))
    assert stand.cached(ask("other", [*PROMPT, 1], mm_features=[image("dog", 0, 1)])) == 0
    assert stand.cached(ask("same", [*PROMPT, 1], mm_features=[image("cat", 0, 1)])) == 4 * BLOCK


def test_an_embedding_belongs_to_the_block_before_it():
    """vLLM's own manager has whole blocks of embeddings in its hashes, so it finds less or as much."""
    stand = Stand(EAGLE)
    rows = torch.arange(4 * BLOCK + 1, dtype=torch.float32)[:, None].repeat(1, 2)

    def embedded(name, changed):
        mine = rows.clone()
        mine[changed] += 0.5
        return ask(name, None, prompt_embeds=mine)

    stand.cached(embedded("first", []))
    assert stand.cached(embedded("same", [])) == 4 * BLOCK
    assert stand.cached(embedded("in the middle", [2 * BLOCK + 1])) == 2 * BLOCK
    assert stand.cached(embedded("behind a block", [2 * BLOCK])) == BLOCK
    assert stand.cached(embedded("at the beginning", [0])) == 0


def test_a_prompt_of_one_token_is_answered(stand):
    for name in ("first", "second"):
        assert stand.cached(ask(name, [7], 3 * BLOCK)) == 0
    assert stand.result.tokens["first"] == stand.result.tokens["second"]
    assert stand.num_free == EAGLE.num_blocks - 1


def test_answers_are_found_by_the_next_turn(stand):
    stand.cached(ask("first", [*PROMPT, 1], 40))
    turn = [*PROMPT, 1, *stand.result.tokens["first"], 5, 6]
    assert stand.cached(ask("next", turn)) == (len(PROMPT) + 40) // BLOCK * BLOCK


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("length", [3 * BLOCK - 2, 3 * BLOCK - 5])
def test_nothing_is_cached_under_tokens_that_a_turn_has_dropped(is_async, length):
    """A turn drops the last token of the answer before it; here it is behind a block, or within one."""
    stand = Stand(Settings(num_drafts=3, is_eagle=True, is_async=is_async))
    session = stand.add(ask("session", PROMPT[:length], 3, resumable=True))
    answers = []
    for _ in range(2):
        for _ in range(100):
            if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ and not stand.in_flight:
                break
            stand.step()
        answers.append(list(session.all_token_ids))
        stand.add(ask("session", [7] * 3 * BLOCK, 3, resumable=True))
    stand.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    stand.run_all()
    said, now = answers
    assert stand.cached(ask("dropped", [*said, *[7] * 3 * BLOCK])) <= (len(said) - 1) // BLOCK * BLOCK
    assert stand.cached(ask("kept", now)) >= (len(now) - 1) // BLOCK * BLOCK - BLOCK
    assert stand.num_free == EAGLE.num_blocks - 1


def test_pins_and_explanations_take_what_the_manager_says():
    stand = Stand(EAGLE)
    pinned = [*PROMPT, 1]
    tokens, keys = stand.manager.as_prefix(pinned)
    pin = stand.manager.manager.pins.pin(tokens, extra_keys=keys)
    stand.cached(ask("first", pinned))
    assert len(pin.blocks) == 4
    explained = stand.manager.manager.inspect.explain(Sequence("why", tokens, extra_keys=keys))
    assert explained.num_cached_blocks == 4
    plain = Stand(Settings()).manager
    assert plain.as_prefix(pinned) == (pinned, [])


def test_several_groups_are_served():
    """With windows beside full attention; without lookahead hashes it isn't known which group drops a block."""
    settings = Settings(num_blocks=20_000, num_drafts=3, is_eagle=True, windows=(64,))
    asks = make_asks(EAGLE_SMALL[0].mix, 0, 100)
    theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
    assert ours.tokens == theirs.tokens and ours.num_cached > theirs.num_cached > 0


def test_in_a_full_pool_all_decisions_are_vllms(seed):
    """Nothing is computed twice, so there are no copies, and vLLM needs no mending."""
    for configuration in EAGLE_SMALL[:2]:
        settings, asks = configuration.settings, make_asks(configuration.mix, seed, 200)
        theirs, ours = decide(settings, asks, own_scheduler(settings)), decide(settings, asks, our_scheduler(settings))
        assert first_difference(theirs, ours) is None and theirs.num_preempted


def test_events_of_such_blocks_are_refused():
    settings = Settings(num_drafts=3, is_eagle=True, has_events=True)
    with pytest.raises(UnsupportedEngineError, match=r'KV events with lookahead hashes.*"disable_lookahead_block_ha'):
        make_scheduler(settings, our_scheduler(settings))
    make_scheduler(Settings(num_drafts=3, is_eagle=True, drops_block=True, has_events=True), our_scheduler(settings))
