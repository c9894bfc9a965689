"""The bench of what retention by sessions is worth runs in each of its worlds, and keeps its rows."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy comes with kvblocks[replay]")

from bench.replay import sessions


def test_it_prints_and_keeps_a_row_for_each_world_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "rows.json"
    sample = str(files("kvblocks.replay") / "sample.jsonl.gz")
    sessions.main([sample, "--sessions", "0:12", "--sizes", "5%,40", "--worlds", *sessions.WORLDS, "--json", str(kept)])
    rows = json.loads(kept.read_text())["results"]
    assert [(row["world"], row["size"]) for row in rows] == [(w, s) for w in sessions.WORLDS for s in ("5%", "40")]
    for row in rows:
        is_one_order = not sessions.WORLDS[row["world"]][1]
        assert set(row["hit_rates"]) == {*sessions.POLICIES, sessions.KNOWN} | (
            {sessions.NEXT} if is_one_order else set()
        )
        if is_one_order and row["size"] == "40":
            assert row["hit_rates"]["lru-drop"] < row["hit_rates"][sessions.NEXT] <= row["hit_rates"][sessions.KNOWN]
        assert all(0 <= rate <= 1 for rate in row["hit_rates"].values())
    assert capsys.readouterr().out.count("gap") == len(sessions.WORLDS)


def test_the_gap_is_the_share_of_the_way() -> None:
    assert sessions.gap_of({"lru-drop": 0.2, "sessions": 0.3, sessions.NEXT: 0.6}) == pytest.approx(0.25)
    assert sessions.gap_of({"lru-drop": 0.2, "sessions": 0.3, sessions.NEXT: 0.2}) is None
    assert sessions.gap_of({"lru": 0.2, "sessions": 0.3}) is None
