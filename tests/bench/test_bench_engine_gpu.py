"""The bench of the engine on a GPU runs as far as it can without one. No test asks how long anything took."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=150)


def test_without_a_gpu_it_says_what_it_needs():
    done = run_bench("-m", "bench.attention.engine_gpu")
    assert done.returncode == 2 and done.stdout == ""
    assert "expected a GPU that torch can use, got none" in done.stderr and "--rehearse" in done.stderr


@pytest.mark.exhaustive
def test_the_rehearsal_runs_every_case(tmp_path):
    kept = tmp_path / "kept.json"
    done = run_bench("-m", "bench.attention.engine_gpu", "--rehearse", "--json", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(kept.read_text())["results"]
    assert len({row["case"] for row in results}) == 3
    assert len(results) == 11
    ours = [row for row in results if row["contestant"].startswith("triton")]
    assert all(row["transfers_per_step"] == 1 and row["uploaded_bytes_per_step"] < 100 for row in ours)
    assert all("median_ms" not in row for row in results), "nothing is timed on a CPU"


@pytest.mark.exhaustive
def test_a_wrong_token_is_told_and_is_the_exit_status():
    program = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from bench.attention import engine_gpu\n"
        "engine_gpu.TINY_CASES = engine_gpu.TINY_CASES[:1]\n"
        "right, count = engine_gpu.run_case, iter(range(100))\n"
        "def wrong(*arguments):\n"
        "    row, tokens = right(*arguments)\n"
        "    return row, [[next(count), *tokens[0]]]\n"
        "engine_gpu.run_case = wrong\n"
        "sys.exit(engine_gpu.main(['--rehearse']))"
    )
    done = run_bench("-c", program)
    assert done.returncode == 1 and "WRONG, other tokens" in done.stdout, done.stdout + done.stderr
