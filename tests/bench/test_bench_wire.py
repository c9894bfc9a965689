"""The bench of the wire runs and keeps what it prints. No test asks how long it took."""

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
