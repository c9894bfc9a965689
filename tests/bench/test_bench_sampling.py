"""The bench of sampling runs on small vocabularies and says what it measured. No test asks how long it took."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.sampling")


@pytest.mark.exhaustive
def test_every_item_is_measured_at_every_shape(bench, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    assert bench.main(["--rounds", "1", "--scale", "0.02", "--json", str(kept)]) == 0
    results, shown = json.loads(kept.read_text()), capsys.readouterr().out
    assert {"cpu", "threads", "num_rounds", "load_average", "clock", "torch"} <= results["conditions"].keys()
    rows = results["results"]
    assert [(row["rows"], row["item"]) for row in rows] == [
        (rows, item) for rows, _ in bench.SHAPES for item in bench.ITEMS
    ]
    for row in rows:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["item"] in shown
    sorted_shares = {row["item"]: row["sorted"] for row in rows if row["rows"] == 64}
    assert sorted_shares["temperature"] == 0
    assert sorted_shares["top_p of a flat distribution"] > 0.9


def test_a_missed_target_is_told(bench, monkeypatch, capsys):
    row = {"item": "x", "rows": 1, "vocabulary": 2, "min_ms": 2.0, "median_ms": 2.0, "max_ms": 2.0, "sorted": 0.0}
    for target, options, code in ((1.0, [], 1), (3.0, [], 0), (None, [], 0), (1.0, ["--scale", "0.5"], 0)):
        monkeypatch.setattr(bench, "measure_shape", lambda *_, wanted=target: [{**row, "target_ms": wanted}])
        capsys.readouterr()
        assert bench.main(options) == code
        shown = capsys.readouterr().out
        assert ("target 1 missed" in shown) == bool(code)
        assert ("No target was judged" in shown) == bool(options)
