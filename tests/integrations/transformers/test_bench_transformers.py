"""The bench of transformers with its cache and ours runs and meets its targets; so does the example."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.transformers.__main__ import main
from bench.transformers.workload import CONTESTANTS
from integrations.transformers.batching import make_model

ROOT = Path(__file__).resolve().parents[3]


def test_the_bench_measures_all_and_meets_its_targets(tmp_path, capsys):
    path = tmp_path / "results.json"
    assert main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [row["num_blocks"] for row in kept["results"]] == [400, 60]
    assert kept["conditions"]["transformers"]
    for row in kept["results"]:
        assert [row[name]["answered"] for name in CONTESTANTS] == [20, 20, 20]
    printed = capsys.readouterr().out
    assert printed.count("met: ") == 3
    assert "MISSED" not in printed


@pytest.mark.exhaustive
def test_the_example_runs_for_any_model(tmp_path):
    make_model().save_pretrained(tmp_path)
    command = [sys.executable, ROOT / "examples" / "transformers" / "compare.py", tmp_path, "--num-requests", "6"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "all answers are identical" in done.stdout
