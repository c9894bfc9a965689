"""The whole of vLLM on a CPU, with the tier below its host memory and, for want of a GPU, a worker of our own."""

import pytest

from integrations.vllm.disk.engine import NUM_PROMPTS, PROMPT_TOKENS, Run
from integrations.vllm.one_after_another import model_folder

BLOCKS = PROMPT_TOKENS // 32
OURS = "kvblocks.integrations.vllm.KVBlocksScheduler"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheduler", [None, OURS])
def test_an_engine_that_is_started_again_finds_its_blocks_and_answers_alike(tmp_path, scheduler):
    model, folder = model_folder(), str(tmp_path)
    alone = Run(model).start()
    first = Run(model, folder, scheduler).start()
    again = Run(model, folder, scheduler).start()
    assert alone["cached"] == [0] * (2 * NUM_PROMPTS)  # the pool holds none of a prompt until it comes again
    assert first["cached"] == [0] * NUM_PROMPTS + [32 * BLOCKS] * NUM_PROMPTS
    assert again["cached"] == [32 * BLOCKS] * (2 * NUM_PROMPTS)
    assert first["tokens"] == again["tokens"] == alone["tokens"]
    assert first["written"] == NUM_PROMPTS * BLOCKS and again["written"] == 0
    assert first["read"] > 0 and again["read"] >= NUM_PROMPTS * BLOCKS
    assert first["bad"] == again["bad"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllms_own_worker_needs_a_gpu(tmp_path):
    with pytest.raises(RuntimeError, match="CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"):
        Run(model_folder(), str(tmp_path), is_plain=True).start()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hashes_that_the_tier_was_not_told_of_end_the_engine_with_the_reason(tmp_path):
    with pytest.raises(RuntimeError, match=r"expected hashes by 'sha256' .*, got 'sha256_cbor'; say the same"):
        Run(model_folder(), str(tmp_path), algorithm="sha256_cbor").start()
