"""The bench of repeats runs on a tiny model and says what it measured. No test asks how long it took."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    yield importlib.import_module("bench.repeats")
    torch.set_num_threads(threads)


def test_repeats_are_measured_with_and_without(bench, monkeypatch, tiny_folder, tmp_path, capsys):
    monkeypatch.setattr(bench, "LENGTHS", (32, 41))
    kept = tmp_path / "kept.json"
    assert bench.main(["--model", str(tiny_folder), "--rounds", "1", "--json", str(kept)]) == 0
    results = json.loads(kept.read_text())
    assert {"cpu", "threads", "num_rounds", "model"} <= results["conditions"].keys()
    computed = {
        (row["tokens"], row["item"], row["remember_next_token"]): row["computed_tokens"] for row in results["results"]
    }
    assert computed == {
        (32, "new", False): 32,
        (32, "new", True): 32,
        (32, "repeat", False): 1,
        (32, "repeat", True): 0,
        (41, "new", False): 41,
        (41, "new", True): 41,
        (41, "repeat", False): 9,
        (41, "repeat", True): 0,
    }
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in results["results"])
    assert "repeat" in capsys.readouterr().out
