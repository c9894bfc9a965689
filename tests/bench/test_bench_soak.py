"""The soak of a server: what counts as growing, and a run of a minute or so in which servers are killed."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)  # its servers are `python -m kvblocks`
    return importlib.import_module("bench.serving.soak")


def rest(minute, **more):
    return {"minute": minute, "life": 0, "resident_mb": 900.0, "num_descriptors": 12, "num_threads": 7} | more


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("resident_mb", 940.0, None),
        ("resident_mb", 960.0, "resident_mb: expected at most 48 more, got +60"),
        ("num_descriptors", 16, "num_descriptors: expected at most 3 more, got +4"),
        ("num_threads", 11, "num_threads: expected at most 3 more, got +4"),
    ],
)
def test_what_grows_is_told(soak, name, value, problem):
    rests = [rest(1, **{name: 1}), rest(2), rest(3), rest(4, **{name: value}), rest(5, life=1, **{name: 10_000})]
    assert soak.judge(rests) == ([] if problem is None else [problem])


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the soak asks /proc for memory and descriptors, which Linux has")
def test_a_short_soak_kills_a_server_and_finds_nothing(soak, roomy_folder, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    status = soak.main(["--model", str(roomy_folder), "--minutes", "0.2", "--clients", "4", "--json", str(kept)])
    shown = capsys.readouterr().out
    assert status == 0, shown
    results = json.loads(kept.read_text())
    assert [one["life"] for one in results["results"]] == [0, 0, 1]
    assert [death["by"] for death in results["restarts"]] == ["SIGKILL", "SIGTERM"]
    assert all(one["num_free_blocks"] == 256 for one in results["results"])
    assert results["counts"]["ask: 200"] > 10
    assert results["problems"] == []
