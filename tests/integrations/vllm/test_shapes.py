"""Tiny models as people start them: all of vLLM, with all options at their defaults.

Gemma 3, gpt-oss and Mistral have windows: of their blocks vLLM caches few by default, so kvblocks finds more, and the
answers are equal. BERT has no KV cache, so vLLM's manager stays.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from integrations.vllm.shapes import MARK
from integrations.vllm.test_lifecycle import ENVIRONMENT, ROOT


@cache
def answers(*shapes):
    """What shapes answer under vLLM's scheduler and ours. One process, since importing vLLM takes longest."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "integrations.vllm.shapes", *shapes]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix(MARK))


def check_windows(theirs, ours, num_groups):
    assert (theirs["manager"], ours["manager"]) == ("KVCacheManager", "KVBlocksCacheManager")
    assert theirs["groups"] == ours["groups"] == num_groups
    assert theirs["interval"] == ours["interval"] == 0
    assert ours["tokens"] == theirs["tokens"]
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) > len(theirs["tokens"]) // 2  # they depend on the prompt
    assert sum(ours["cached"]) > sum(theirs["cached"]) > 0


@pytest.mark.timeout(1200)
def test_gemma_3_answers_as_under_vllm_and_finds_more():
    check_windows(*answers("gemma 3", "bert")["gemma 3"], num_groups=3)


@pytest.mark.timeout(1200)
def test_a_model_without_a_kv_cache_keeps_vllms_manager():
    theirs, ours = answers("gemma 3", "bert")["bert"]
    assert theirs["manager"] == ours["manager"] == "KVCacheManager"
    assert theirs["groups"] == ours["groups"] == 0
    assert ours["embeddings"] == theirs["embeddings"] and theirs["embeddings"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", ["lfm2", "qwen3-next"])
def test_a_model_with_recurrent_layers_answers_as_under_vllm(shape):
    """LFM2 has short convolutions, Qwen3-Next gated delta nets. States are cached, by default few of them in vLLM."""
    theirs, ours = answers("lfm2", "qwen3-next")[shape]
    assert (theirs["manager"], ours["manager"]) == ("KVCacheManager", "KVBlocksCacheManager")
    assert theirs["groups"] == ours["groups"] == 3
    assert ours["tokens"] == theirs["tokens"]
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) > len(theirs["tokens"]) // 2
    assert sum(ours["cached"]) >= sum(theirs["cached"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("shape", "num_groups"), [("gpt-oss", 2), ("mistral", 1)])
def test_other_models_with_windows_answer_as_under_vllm_and_find_more(shape, num_groups):
    check_windows(*answers("gpt-oss", "mistral")[shape], num_groups)
