"""How many kernels each layer launches, counted with a stand-in for the driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

MOST = {"decode": 10, "prompts": 10, "decodes and prompts": 12, "cascade": 12}
"""The numbers include the four products. Attention itself takes 2, 2, 4 and 4."""


def count(*arguments):
    script = Path(__file__).with_name("count_launches.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: found["ours"] + found["torch"] for name, found in json.loads(done.stdout).items()}


def test_launches_a_layer_whatever_the_model():
    counted = count()
    assert len(counted) == 3 * len(MOST)
    assert counted == {name: MOST[name.split(", ")[1]] for name in counted}


@pytest.mark.exhaustive
def test_the_count_sees_what_plain_torch_launches():
    counted = count("--torch")
    assert [counted[f"{model}, decode"] for model in ("Llama", "Qwen3", "Gemma 3")] == [27, 33, 45]
