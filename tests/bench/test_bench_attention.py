"""The bench of the attention kernels runs as far as it can without a GPU. No test asks how long anything took."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine import fake_flash_attn

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments):
    """Run Python where there is no GPU, whatever this machine has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=150)


def run_bench(*arguments):
    return run_python("-m", "bench.attention", *arguments)


def test_without_a_gpu_it_says_what_it_needs():
    done = run_bench()
    assert done.returncode == 2 and done.stdout == ""
    assert "expected a GPU that torch can use, got none" in done.stderr and "--rehearse" in done.stderr


@pytest.mark.exhaustive
def test_the_rehearsal_runs_and_checks_every_workload(tmp_path):
    kept = tmp_path / "kept.json"
    done = run_bench("--rehearse", "--json", str(kept))
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())["results"]
    ours = [row for row in results if row["contestant"].startswith("kvblocks")]
    assert len({row["workload"] for row in ours}) == 9
    assert {row["contestant"].split(",")[0] for row in ours} == {
        *("kvblocks decode", "kvblocks extend", "kvblocks cascade_decode"),
    }
    assert all(row["is_right"] and 0 < row["error"] < 0.01 for row in ours)
    assert all("median_us" not in row for row in results), "nothing is timed on a CPU"
    assert "FlexAttention, contiguous" in {row["contestant"] for row in results}
    assert "FlashInfer" in done.stdout + done.stderr, "a peer that can't be imported is named"


@pytest.mark.exhaustive
def test_a_wrong_result_is_told_and_is_the_exit_status(tmp_path):
    program = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from bench.attention import attention, cases\n"
        "right = cases._extend\n"
        "cases._extend = lambda batch: right(batch) * 1.02\n"
        "sys.exit(attention.main(['--rehearse', '--only', 'prefill']))"
    )
    done = run_python("-c", program)
    assert done.returncode == 1 and "WRONG, not timed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["decode 64 mixed, 128 to 8,192", "prefill 8,192", "decode 64 x 4,096, 3,584 shared"])
def test_flash_attn_reads_the_same_tokens_in_its_own_pages(name, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from bench.attention import cases, peers

    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn.module())
    workload = next(cases.shrink(found) for found in cases.workloads() if found.name == name)
    batch = cases.build(workload, torch.device("cpu"), 0)
    attend = dict(peers.peers(workload))["flash-attn 2, pages of 256"](batch)
    assert cases.Checker(batch).error(attend()) <= cases.LARGEST_ERROR


def test_counting_machine_code_needs_the_compiler(monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from bench.attention import kernels_static

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels_static.main([]) == 2
    assert "expected TRITON_INTERPRET to be unset" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_case_is_counted_from_its_machine_code(tmp_path):
    file = tmp_path / "static.json"
    done = run_python(
        *("-m", "bench.attention.kernels_static", "--targets", "sm90", "--only", "decode, head_dim 64"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    rows = {row["kernel"]: row for row in json.loads(file.read_text())["results"]}
    assert set(rows) == {"decode_ends_kernel", "stream_kernel", "stream_merge_kernel"}
    stream = rows["stream_kernel"]
    assert stream["spilled"] == 0 and stream["registers"] > 50 and stream["grid"] == [132 * 3]
    assert any(kind.startswith("HMMA") for kind in stream["mma"]) and stream["loads"]["128"] > 0
    assert stream["instructions_a_tile"] > 100 and stream["bytes_in_flight"] > 30 << 10
    assert f"| {stream['registers']} |" in done.stdout


def test_the_hosts_time_for_a_step_is_timed_on_a_stand_in(tmp_path, capsys):
    from bench.attention import host_steps

    file = tmp_path / "steps.json"
    assert host_steps.main(["--quick", "--json", str(file)]) == 0
    times = json.loads(file.read_text())["milliseconds"]
    assert len(times) == 13 and all(0 < one["least"] <= one["median"] for one in times.values())
    assert capsys.readouterr().out.count(" ms, median ") == 13
    engine = host_steps.stand_in(4, overlaps=True)
    engine.generate([[1], [2, 3]], max_tokens=5, ignore_eos=True)
    assert engine.runner.num_replays == 4  # the steps that are timed are replays
