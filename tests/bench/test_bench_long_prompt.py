"""The bench of chats behind a long prompt runs on a tiny model, and says what it measured."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.serving.long_prompt")


def test_it_measures_both_engines(bench, roomy_folder, tmp_path, capsys):
    kept, sizes = tmp_path / "kept.json", ["--long", "200", "--chat", "8", "--chats", "2", "--gap", "0.001"]
    bench.main(["--model", str(roomy_folder), *sizes, "--rounds", "2", "--json", str(kept)])
    rows = {row["case"]: row for row in json.loads(kept.read_text())["results"]}
    assert list(rows) == [
        "chats alone",
        "chats behind the long prompt",
        "one chat behind the long prompt",
        "the long prompt alone",
    ]
    for case, row in rows.items():
        for name in ("before", "after"):
            assert len(row[name]["chat_ttft_s"]) == {
                "the long prompt alone": 0,
                "one chat behind the long prompt": 2,
            }.get(case, 4)
            assert len(row[name]["long_ttft_s"]) == (0 if case == "chats alone" else 2)
            assert all(value > 0 for values in row[name].values() for value in values)
    assert "chats' TTFT, times alone" in capsys.readouterr().out
