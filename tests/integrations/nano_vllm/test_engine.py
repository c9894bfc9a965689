"""nano-vllm as a whole, on a CPU: see `engine`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.nano_vllm import sources


@pytest.mark.slow
@pytest.mark.skipif(not sources.SOURCES, reason=sources.REASON)
def test_tokens_steps_and_prefills_are_its_own():
    script = Path(__file__).with_name("engine.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("result: "))
    runs = json.loads(line.removeprefix("result: "))
    assert runs["own"]["manager"] == "BlockManager"
    assert runs["late"]["manager"] == "KVBlocksBlockManager"
    for name in ("tokens", "steps"):  # a step is how many tokens of prompts it computed, or minus how many it decoded
        assert runs["late"][name] == runs["own"][name]
        assert runs["late greedy"][name] == runs["own greedy"][name]
    early, own = runs["early greedy"], runs["own greedy"]
    assert early["tokens"] == own["tokens"]
    assert sum(step for step in early["steps"] if step > 0) < sum(step for step in own["steps"] if step > 0)
    examples = runs["example"]  # examples/nano_vllm/compare.py, with each block manager
    assert examples[0]["tokens"] == examples[1]["tokens"] == examples[2]["tokens"]
    assert examples[0]["computed"] == examples[1]["computed"] >= examples[2]["computed"]
    assert len({*map(str, own["tokens"])}) > 10  # the model says different things
