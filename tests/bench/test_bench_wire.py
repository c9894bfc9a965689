"""The bench of the wire runs and keeps what it prints. No test asks how long it took."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_a_table_and_keeps_the_same(tmp_path):
    pytest.importorskip("zmq", reason="needs the extra kvblocks[wire]")
    kept = tmp_path / "kept.json"
    command = [sys.executable, "-m", "bench.wire", "--quick", "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())
    assert {"cpu", "python", "msgspec", "num_rounds", "block_size"} <= results["conditions"].keys()
    assert 20 < results["mirror_bytes_a_block"] < 2000
    rows = {(row["item"], row["contestant"]): row for row in results["results"]}
    for item in ("encode", "decode"):
        assert {who for what, who in rows if what == item} == {"classes", "vllm", "vllm:array", "sglang"}
        assert rows[item, "classes"]["ratio"] == 1.0
    assert ("find", "kvblocks") in rows and ("publish, in the engine", "kvblocks") in rows
    for (item, _), row in rows.items():
        assert 0 < row["min"] <= row["median"] <= row["max"] and item in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the attack asks /proc for memory, which Linux has")
def test_the_attack_on_the_replay_socket_runs_and_its_bounds_are_said(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zmq", reason="needs the extra kvblocks[wire]")
    monkeypatch.syspath_prepend(ROOT)
    bench = importlib.import_module("bench.wire_bounds")
    kept = tmp_path / "kept.json"
    status = bench.main(["--quick", "--peers", "3", "--json", str(kept)])
    results, shown = json.loads(kept.read_text()), capsys.readouterr().out
    assert len(results["results"]) == 6 and status == bool(results["problems"])
    for row in results["results"]:
        assert row["item"] in shown and row["memory_bytes"] < bench.MAX_MEMORY_BYTES
    quiet = {"item": "quiet", "complete_s": 20.0, "longest_call_s": 0.1, "memory_bytes": 0}
    row = {"item": "x", "complete_s": 30.1, "longest_call_s": 11.5, "memory_bytes": 4 << 30}
    assert [problem.partition(" of ")[0] for problem in bench.problems_of([quiet, row])] == [
        "x: expected complete_s",
        "x: expected longest_call_s",
        "x: expected memory_bytes",
    ]
