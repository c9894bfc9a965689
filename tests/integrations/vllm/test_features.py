"""Features of vLLM's scheduler one by one, most of them with vLLM's manager and with kvblocks.

Images, embeddings, statistics, resets, EAGLE, context parallelism, watermarks and evictions must mean the same in both.
"""

import pytest
import torch
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import Settings, make_vllm_config
from integrations.vllm.stand import BLOCK, WHOSE, Stand, image, request

PROMPT = range(100, 100 + 5 * BLOCK)
NUM_PROMPT_BLOCKS = 5


@pytest.mark.parametrize("whose", WHOSE)
def test_the_same_placeholders_of_another_image_are_another_prefix(whose):
    stand = Stand(Settings(), whose)
    text, pads = [1] * BLOCK, [2] * 3 * BLOCK
    stand.cached(request("cat", text + pads, mm_features=[image("cat", BLOCK, 3 * BLOCK)]))
    assert stand.cached(request("dog", text + pads, mm_features=[image("dog", BLOCK, 3 * BLOCK)])) == BLOCK
    assert stand.cached(request("none", text + pads)) == BLOCK
    assert stand.cached(request("again", text + pads, mm_features=[image("cat", BLOCK, 3 * BLOCK)])) == 3 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_the_same_image_at_another_offset_is_another_prefix(whose):
    stand = Stand(Settings(), whose)
    pads = [2] * 4 * BLOCK
    stand.cached(request("first", pads, mm_features=[image("cat", BLOCK, 2 * BLOCK)]))
    assert stand.cached(request("later", pads, mm_features=[image("cat", BLOCK + 3, 2 * BLOCK)])) == BLOCK
    assert stand.cached(request("same", pads, mm_features=[image("cat", BLOCK, 2 * BLOCK)])) == 3 * BLOCK
    stand = Stand(Settings(), whose)
    stand.cached(request("first", pads, mm_features=[image("cat", BLOCK, 2 * BLOCK)]))
    stand.scheduler.reset_encoder_cache()  # which knows an image by its name alone
    assert stand.cached(request("less", pads, mm_features=[image("cat", BLOCK + 3, 2 * BLOCK - 3)])) == BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_prompts_of_other_embeddings_share_what_is_equal(whose):
    stand = Stand(Settings(), whose)
    embeddings = torch.arange(4 * BLOCK, dtype=torch.float32).reshape(-1, 1).repeat(1, 4)
    other = embeddings.clone()
    other[2 * BLOCK, 1] += 1
    assert stand.cached(request("first", None, prompt_embeds=embeddings)) == 0
    assert stand.cached(request("other", None, prompt_embeds=other)) == 2 * BLOCK
    assert stand.cached(request("same", None, prompt_embeds=embeddings.clone())) == 3 * BLOCK


def test_embeddings_of_another_type_with_the_same_bytes_are_others():
    stand = Stand(Settings())
    embeddings = torch.ones(2 * BLOCK, 4, dtype=torch.float16)
    stand.cached(request("first", None, prompt_embeds=embeddings))
    assert stand.cached(request("other", None, prompt_embeds=embeddings.view(torch.bfloat16))) == 0


@pytest.mark.parametrize("whose", WHOSE)
def test_prompts_of_tokens_and_embeddings_depend_on_both(whose):
    stand = Stand(Settings(), whose)
    tokens, is_token = [7] * 3 * BLOCK, [position % 2 == 0 for position in range(3 * BLOCK)]
    embeddings = torch.ones(3 * BLOCK, 4)
    what = {"prompt_is_token_ids": is_token, "prompt_embeds": embeddings}
    other = embeddings.clone()
    other[BLOCK + 1] = 5
    stand.cached(request("first", tokens, **what))
    assert stand.cached(request("same", tokens, **what)) == 2 * BLOCK
    assert stand.cached(request("token", [*tokens[:BLOCK], 8, *tokens[BLOCK + 1 :]], **what)) == BLOCK
    assert stand.cached(request("embedding", tokens, **(what | {"prompt_embeds": other}))) == BLOCK


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize(
    "params", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=lambda p: next(iter(p))
)
def test_who_wants_all_logits_reads_nothing_and_is_read(whose, params):
    stand = Stand(Settings(), whose)
    assert stand.cached(request("before", PROMPT)) == 0
    assert stand.take_prefix_stats() == (1, 5 * BLOCK, 0, False)
    assert stand.cached(request("all", PROMPT, params=params)) == 0
    assert stand.take_prefix_stats() == (0, 0, 0, False)
    assert stand.cached(request("after", PROMPT)) == 4 * BLOCK
    only = Stand(Settings(), whose)
    only.cached(request("all", PROMPT, params=params))
    assert only.cached(request("after", PROMPT)) == 4 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_prefix_cache_stats_count_admissions_and_resets(whose):
    stand = Stand(Settings(), whose)
    stand.cached(request("first", PROMPT))
    stand.cached(request("second", PROMPT))
    assert stand.take_prefix_stats() == (2, 2 * 5 * BLOCK, 4 * BLOCK, False)
    assert stand.scheduler.reset_prefix_cache()
    assert stand.take_prefix_stats() == (0, 0, 0, True)
    assert stand.take_prefix_stats() == (0, 0, 0, False)
    assert stand.cached(request("third", PROMPT)) == 0


@pytest.mark.parametrize("whose", WHOSE)
def test_without_statistics_there_are_none(whose):
    stand = Stand(Settings(), whose, log_stats=False)
    stand.add(request("first", PROMPT))
    stand.step()
    assert stand.manager.make_prefix_cache_stats() is None
    assert stand.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("whose", WHOSE)
def test_nothing_is_reset_while_blocks_are_in_use(whose):
    stand = Stand(Settings(), whose)
    stand.add(request("runs", PROMPT, 3))
    stand.step()
    assert not stand.scheduler.reset_prefix_cache()
    assert not stand.take_prefix_stats()[3]
    stand.run_all()
    assert stand.scheduler.reset_prefix_cache()
    assert stand.cached(request("after", PROMPT)) == 0


@pytest.mark.parametrize("whose", WHOSE)
def test_a_reset_of_running_requests_computes_all_anew(whose):
    stand = Stand(Settings(), whose)
    stand.add(request("runs", PROMPT, 4))
    stand.step()
    assert stand.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = stand.step()
    assert output.num_scheduled_tokens == {"runs": len(PROMPT) + 1}
    stand.run_all()
    assert len(stand.result.tokens["runs"]) == 4


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("is_async", [False, True])
def test_eagle_drops_the_last_block_of_a_hit(whose, is_async):
    stand = Stand(Settings(num_drafts=3, is_eagle=True, drops_block=True, is_async=is_async), whose)
    stand.cached(request("first", PROMPT))
    assert stand.cached(request("same", PROMPT)) == 3 * BLOCK
    assert stand.cached(request("longer", [*PROMPT, 1])) == 4 * BLOCK
    assert stand.cached(request("short", PROMPT[:BLOCK])) == 0


@pytest.mark.parametrize("whose", WHOSE)
def test_a_context_parallel_block_has_the_tokens_of_all_ranks(whose):
    settings = Settings()
    config = make_vllm_config(settings)
    config.parallel_config.decode_context_parallel_size = 2
    stand = Stand(settings, whose, config=config, block_size=2 * BLOCK, worker_block_size=2 * BLOCK)
    assert stand.manager.coordinator.single_type_managers[0].block_size == 2 * BLOCK
    stand.add(request("first", PROMPT, block_size=2 * BLOCK))
    stand.step()
    assert stand.result.decided[0]["new"] == [("first", 0, [3])]
    stand.run_all()
    assert stand.cached(request("same", PROMPT, block_size=2 * BLOCK)) == 4 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_the_watermark_keeps_blocks_free_for_those_who_run(whose):
    settings = Settings(num_blocks=21, watermark=0.25, reserves_full_prompt=False)
    stand = Stand(settings, whose)
    stand.add(request("first", range(10 * BLOCK), 2))
    stand.step()
    stand.add(request("second", range(1000, 1000 + 6 * BLOCK), 1))
    assert "second" not in stand.step().num_scheduled_tokens  # 5 of 20 blocks stay free: 10 + 1 + 6 + 5 > 20
    assert "second" in stand.step().num_scheduled_tokens  # nobody else runs any more


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("reserves", [False, True])
def test_a_prompt_starts_when_all_of_it_fits_if_that_is_asked(whose, reserves):
    settings = Settings(num_blocks=21, max_num_batched_tokens=2 * BLOCK, reserves_full_prompt=reserves)
    stand = Stand(settings, whose)
    stand.add(request("first", range(10 * BLOCK), 4))
    for _ in range(6):
        stand.step()
    stand.add(request("second", range(1000, 1000 + 12 * BLOCK), 1))
    assert ("second" in stand.step().num_scheduled_tokens) == (not reserves)


@pytest.mark.parametrize("whose", WHOSE)
def test_evicted_blocks_are_hit_no_more_and_those_behind_them_neither(whose):
    stand = Stand(Settings(), whose)
    stand.add(request("runs", PROMPT, 2))
    stand.step()
    (ids,) = stand.manager.get_block_ids("runs")
    stand.manager.evict_blocks({ids[2], 0} if whose == "ours" else {ids[2]})
    assert stand.manager.get_block_ids("runs") == (ids,)
    stand.run_all()
    assert stand.cached(request("same", PROMPT)) == 2 * BLOCK


def test_the_common_prefix_is_of_all_who_have_blocks():
    """vLLM always says 0 now, since it has no use for it; schedulers of others may."""
    stand = Stand(Settings())
    assert stand.manager.get_num_common_prefix_blocks("nobody") == [0]
    stand.cached(request("before", PROMPT))
    stand.add(request("first", PROMPT, 9))
    stand.step()
    assert stand.manager.get_num_common_prefix_blocks("first") == [5]
    stand.add(request("second", [*PROMPT, 1, 2], 9))
    stand.step()
    assert stand.manager.get_num_common_prefix_blocks("second") == [4]
    third = stand.add(request("third", [*PROMPT[: 2 * BLOCK], 5], 9))
    stand.step()
    assert stand.manager.get_num_common_prefix_blocks("first") == [2]
    stand.scheduler.finish_requests(third.request_id, RequestStatus.FINISHED_ABORTED)
    assert stand.manager.get_num_common_prefix_blocks("first") == [4]


def test_a_lookup_may_be_bounded():
    """As vLLM 0.33 does for requests whose other outputs begin at a token."""
    stand = Stand(Settings())
    stand.cached(request("first", PROMPT))
    found = [stand.manager.get_computed_blocks(request("same", PROMPT), number)[1] for number in (2 * BLOCK + 3, 0)]
    assert found == [2 * BLOCK, 0]
    assert stand.manager.get_computed_blocks_for_connector(request("same", PROMPT), 3 * BLOCK)[1] == 3 * BLOCK
