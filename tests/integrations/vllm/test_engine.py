"""All of vLLM with a real model gives the same answers and cached tokens with kvblocks as with its own manager.

The other tests mock the model. Only here a wrong block would change a real model's answer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.vllm.schedulers import ADAPTER, ASYNC_SCHEDULER, SCHEDULER
from integrations.vllm.engine import PREFIX_TOKENS, Run

LARGE, SMALL = 400, 50
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(smollm2_folder):
    return str(smollm2_folder)


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_blocks", "is_async", "in_process"),
    [
        pytest.param(SMALL, False, True, id="a pool with preemptions"),
        pytest.param(LARGE, False, True, id="a large pool", marks=pytest.mark.slow),
        pytest.param(SMALL, True, True, id="a pool with preemptions, async", marks=pytest.mark.slow),
        pytest.param(LARGE, False, False, id="the core in its own process", marks=pytest.mark.slow),
    ],
)
def test_answers_and_cached_tokens_are_vllms(model, num_blocks, is_async, in_process, num_seeds):
    scheduler = f"{ADAPTER}.{ASYNC_SCHEDULER if is_async else SCHEDULER}"
    every = 1 if num_seeds > 1 else 4
    theirs = Run(model, num_blocks, None, is_async, in_process, every).start()
    ours = Run(model, num_blocks, scheduler, is_async, in_process, every).start()
    assert ours == theirs
    # Otherwise the comparison would prove nothing.
    num_requests = len(theirs["tokens"])
    assert num_requests == (41 if every == 1 else 11) and all(theirs["tokens"])
    assert sum(cached >= PREFIX_TOKENS for cached in theirs["cached"]) > num_requests // 2
    if in_process:
        assert (theirs["preempted"] > 0) == (num_blocks == SMALL)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_that_wait_for_the_gate_get_the_same_answers(model, is_async):
    """The pool has room for one session. The engine goes on asking while all that is unfinished waits."""
    scheduler = f"{ADAPTER}.{ASYNC_SCHEDULER if is_async else SCHEDULER}"
    plain = Run(model, LARGE, None, is_async, every=4).start()
    gated = Run(model, SMALL, scheduler, is_async, every=4, has_gate=True).start()
    assert gated["tokens"] == plain["tokens"]
    assert gated["gate"]["entries"] >= 5
    assert gated["gate"]["most_held"] > 0
    assert gated["gate"]["waiting"] == 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_compares(model):
    options = ["--num-requests", "6", "--block-size", "32", "--num-blocks", "200", "--dtype", "float32"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm" / "compare.py"), model, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all answers are identical" in done.stdout
    assert [line.split()[:1] for line in done.stdout.splitlines()[:3]] == [["KV"], ["vLLM's"], ["kvblocks"]]
