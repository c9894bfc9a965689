"""The serving bench runs on a tiny model, says what it measured, and judges it right. No test asks how long it took."""

import importlib
import io
import itertools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)  # its servers are `python -m kvblocks`
    return importlib.import_module("bench.serving.serving")


def test_it_measures_three_workloads_and_draws_them(bench, roomy_folder, tmp_path, capsys):
    kept, picture = tmp_path / "kept.json", tmp_path / "picture.png"
    bench.main(["--model", str(roomy_folder), "--quick", "--json", str(kept), "--plot", str(picture)])
    shown = capsys.readouterr().out
    results = json.loads(kept.read_text())
    assert {"model", "cpu", "rate", "max_tokens", "threads", "mode"} <= results["conditions"].keys()
    shared, chats, alone = results["results"]
    assert [row["workload"] for row in (shared, chats, alone)] == ["shared prefix", "multi-turn chat", "no sharing"]
    for row in (shared, chats, alone):
        assert row["is_identical"], row["workload"]
        assert row["about"] in shown
        for name in ("without", "with"):
            run = row[name]
            assert run["num_answers"] == len(run["ttft_s"])
            assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"] <= run["latency_p99_s"] <= run["seconds"]
            assert 0 <= run["itl_p50_s"] <= run["itl_p99_s"]
        assert row["without"]["hit_rate"] == row["without"]["num_cached_tokens"] == 0
        assert row["ratios"]["num_computed_tokens"] >= 1
    assert shared["with"]["num_cached_tokens"] == 5 * 64  # all but the first request hit the shared 64 tokens
    assert shared["with"]["num_answers"] == 6
    assert chats["with"]["num_cached_tokens"] > 0
    assert chats["with"]["num_answers"] == 4
    assert alone["with"]["num_cached_tokens"] == 0
    assert alone["with"]["num_answers"] == 2 * 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "TTFT p50 of all but the first" in shown
    assert "Not shown:" in shown


def run_of(ttft_p50_s, hit_rate=0.0):
    keys = ("ttft_p50_s", "later_ttft_p50_s")
    return dict.fromkeys(keys, ttft_p50_s) | {"hit_rate": hit_rate, "saved": hit_rate}


def row_of(name, without, caching, is_identical=True, shares=True):
    ratios = {key: without[key] / caching[key] for key in ("ttft_p50_s", "later_ttft_p50_s")}
    facts = {"workload": name, "shares": shares, "is_identical": is_identical}
    return facts | {"without": without, "with": caching, "ratios": ratios}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (row_of("shared prefix", run_of(5.0), run_of(1.0, 0.6)), [True, True, True, True]),
        (row_of("shared prefix", run_of(4.9), run_of(1.0, 0.59)), [True, False, True, False]),
        (row_of("shared prefix", run_of(5.0), run_of(1.0, 0.29), is_identical=False), [False, False, False, True]),
        (row_of("no sharing", run_of(1.0), run_of(1.09), shares=False), [True, True]),
        (row_of("no sharing", run_of(1.0), run_of(1.11), shares=False), [True, False]),
        (row_of("multi-turn chat", run_of(1.0), run_of(2.0)), [True]),
    ],
)
def test_targets_that_are_missed_are_said(bench, row, expected):
    assert list(bench.judge(row).values()) == expected


def test_percentiles(bench):
    assert bench.percentile([3.0], 99) == 3.0
    assert bench.percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert bench.percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)


def test_workloads_are_as_large_as_they_say(bench):
    sizes = bench.slowed(bench.Sizes(), 4.0)
    shared, chats, alone = bench.make_workloads(sizes, lambda text: [len(word) for word in text.split()])
    prompts = [talk.prompt for talk in shared.conversations]
    assert len(prompts) == 48
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:] for prompt in prompts}) == 48
    assert {32 <= len(prompt) - 1024 <= 128 for prompt in prompts} == {True}
    assert [talk.start_s for talk in shared.conversations[:3]] == [0.0, 0.5, 1.0]
    assert {len(talk.turns) for talk in chats.conversations} == {4}
    assert {len(talk.prompt) for talk in alone.conversations} == {384}
    assert len({talk.prompt[:16] for talk in alone.conversations}) == 12
    assert "2 a second" in shared.about


def test_a_server_that_does_not_start_is_an_error(bench):
    served = importlib.import_module("bench.serving.process").served
    with pytest.raises(RuntimeError, match="ended with status 1 before it served"), served("tiny", "--num-blocks", "0"):
        pass


@pytest.fixture
def bounds(monkeypatch):
    """The module that holds a server against its bounds."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)
    return importlib.import_module("bench.serving.bounds")


def test_it_measures_a_server_under_large_bodies(bounds, roomy_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bounds, "NUM_CHATS", 3)
    kept = tmp_path / "kept.json"
    options = ["--rounds", "1", "--bodies", "2", "--kinds", "digits,empty lists", "--json", str(kept)]
    bounds.main(["--model", str(roomy_folder), *options])
    turns = json.loads(kept.read_text())["results"]
    assert [turn["kind"] for turn in turns] == [None, "digits", None, "empty lists"]
    for turn in turns:
        assert len(turn["ttft_s"]) == 3
        assert min(turn["ttft_s"]) > 0
        assert turn["peak_mb"] > 0
        assert turn["health_s"] > 0
    assert turns[0]["outcomes"] == {}
    assert set(turns[1]["outcomes"]) == {"400 context_length_exceeded"}
    assert sum(turns[1]["outcomes"].values()) >= 2
    assert set(turns[3]["outcomes"]) == {"400"}
    shown = capsys.readouterr().out
    assert "digits: TTFT p50 x " in shown
    assert "Not shown:" in shown


def turn_of(kind, ttft_s=0.1, health_s=0.1, peak_mb=1000.0):
    return {"kind": kind, "ttft_s": [ttft_s] * 3, "health_s": health_s, "before_mb": 900.0, "peak_mb": peak_mb}


@pytest.mark.parametrize(
    ("loud", "is_beyond"),
    [({}, False), ({"ttft_s": 0.31}, True), ({"health_s": 1.1}, True), ({"peak_mb": 1500.0}, True)],
)
def test_it_says_which_bounds_are_not_held(bounds, loud, is_beyond):
    turns = [turn_of(None), turn_of("digits", **loud), turn_of("lists")]
    assert bounds.judge(turns) == (["digits"] if is_beyond else [])


def test_labels_of_the_picture_stand_apart(bench):
    """Of ranges narrow and wide, as they come: measured on the picture itself."""
    plot = importlib.import_module("bench.serving.plot")
    for low, high in ((0.2, 60.0), (1.05, 1.9), (1.0, 1.001), (0.0004, 900.0), (5.0, 5.0), (0.09, 0.31)):
        times = [low * (high / low) ** (place / 20) for place in range(21)]
        row = {"without": {"ttft_s": times}, "with": {"ttft_s": times}}
        row |= {"workload": "one", "ratios": {"ttft_p50_s": 1.0}}
        figure = plot.draw({"results": [row] * 3, "conditions": {"model": "m", "cpu": "c", "rate": 1 / 3}})
        figure.savefig(io.BytesIO())
        for panel in figure.axes:
            shown = [label for label in panel.get_xticklabels(which="both") if label.get_text()]
            boxes = [label.get_window_extent() for label in shown]
            assert 2 <= len(boxes) <= 8, (low, high)
            assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(boxes)), (low, high)
