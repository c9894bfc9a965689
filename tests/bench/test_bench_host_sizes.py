"""The bench of sizes of a host tier: what it prints, keeps and draws of a small trace."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_finds_more_with_a_host_and_draws_it(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="draws: needs the extra kvblocks[bench]")
    rows = [{"session": "one", "block_size": 64}]
    rows += [
        {"t": 10.0 * n, "a": 1.0, "k": 9.0, "s": "", "in": 1280, "out": 1, "p": 0, "h": [[20 * (n % 3), 20]]}
        for n in range(9)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kept, picture = tmp_path / "kept.json", tmp_path / "picture.png"
    arguments = ["bench", str(trace), "--device", "24", "--host", "0", "60", "--json", str(kept)]
    monkeypatch.syspath_prepend(ROOT)  # bench isn't installed
    monkeypatch.setattr("sys.argv", [*arguments, "--picture", str(picture)])
    importlib.import_module("bench.replay.host_sizes").main()
    without, beside = json.loads(kept.read_text(encoding="utf-8"))["results"]
    assert (without["num_blocks"], without["host_blocks"], beside["host_blocks"]) == (24, 0, 60)
    # Of 180 references the pool keeps four blocks of each prompt too few; the host has all but the last of each.
    assert without["hit_rate"] == without["device_hit_rate"] < 0.2
    assert beside["hit_rate"] == pytest.approx(6 * 19 / 180)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "found" in capsys.readouterr().out
