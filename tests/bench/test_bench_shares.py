"""The benches that say where time goes run, and count right. No test asks how long anything took."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch):
    """Imports a module of bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def test_shares_of_time_are_summed_by_kinds_of_steps(load, monkeypatch, roomy_folder, tmp_path, capsys):
    bench, sizes = load("bench.serving.shares"), load("bench.serving.workloads").QUICK
    monkeypatch.setattr(bench, "SIZES", replace(sizes, num_pressed_own_tokens=48, num_pressed_blocks=20))
    kept = tmp_path / "kept.json"
    assert bench.main(["--model", str(roomy_folder), "--json", str(kept)]) == 0
    rows = {row["workload"]: row for row in json.loads(kept.read_text())["results"]}
    assert list(rows) == ["shared prefix", "multi-turn chat", "pool pressure"]
    for row in rows.values():
        assert row["is_identical"]
        for name in ("without", "with"):
            run = row[name]
            assert run["seconds"] == pytest.approx(run["prompt_s"] + run["decode_s"] + run["outside_s"])
            assert run["num_decode_steps"] > 0
            assert 1 <= run["rows_a_step"] <= 6
        assert row["with"]["num_prompt_tokens"] < row["without"]["num_prompt_tokens"]
    shared = rows["shared prefix"]
    assert shared["without"]["num_prompt_tokens"] - shared["with"]["num_prompt_tokens"] == 5 * 64
    assert "if prompts cost nothing" in capsys.readouterr().out


def test_steps_are_told_apart(load):
    passes = [(4.0, [64, 1]), (1.0, [1, 1]), (2.0, [1])]
    found = load("bench.serving.shares").summarize(8.0, passes, passes)
    assert (found["prompt_s"], found["decode_s"], found["outside_s"]) == (4.0, 3.0, 1.0)
    assert (found["num_prompt_tokens"], found["num_decode_steps"], found["rows_a_step"]) == (64, 2, 1.5)
    assert found["step_p50_s"] == 1.5  # of tokens: 4, 1, 1 and 2


def test_cold_lookups_are_of_prompts_that_are_cached_and_were_never_looked_up(load, monkeypatch, tmp_path, capsys):
    bench = load("bench.cold_lookup")
    monkeypatch.setattr(bench, "WIDTH", 32)
    kept = tmp_path / "kept.json"
    assert bench.main(["--quick", "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())["results"]
    assert len(rows) == 9
    assert all(row["min"] <= row["median"] <= row["max"] for row in rows)
    assert all(row["item"] in capsys.readouterr().out for row in rows[:1])
    for salt in (None, "tenant"):
        for case in bench.make_cases(salt).values():
            first, second = case.prepare(), case.prepare()
            assert first.token_ids(1024) != second.token_ids(1024)
            assert case.run(first).num_tokens == 1024
