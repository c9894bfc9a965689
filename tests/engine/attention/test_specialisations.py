"""Nothing is compiled while serving: what Triton specialises is counted, with a stand-in for the driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.every(3)
@pytest.mark.parametrize("model", ["plain", "windows", "plain, deterministic"])
def test_after_the_warm_up_nothing_is_compiled(model):
    script = Path(__file__).with_name("served_specialisations.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), model, "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["served"] == found["warm"]
    # A norm alone, a norm of a sum, and after the last layer a sum without a norm.
    assert found["served"].pop("norm_kernel") == 3
    # Kernels of attention: for prompts and for a few rows each, or with and without a window.
    assert max(found["served"].values()) <= (4 if model == "windows" else 2), found["served"]
    assert {"place_kernel", "gate_kernel"} <= found["served"].keys()
    assert found["launches"] > 100
    is_deterministic = "deterministic" in model
    assert (found["cascades"] > 0, found["replays"] > 0) == (not is_deterministic, not is_deterministic)
