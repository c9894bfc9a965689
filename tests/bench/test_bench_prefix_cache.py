"""The bench of the prefix cache runs, and says whether its targets are met. No test asks how long it took."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch) -> ModuleType:
    """The module in bench/, which isn't installed; importing it reorders sys.path, until the test ends."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench.core.prefix_cache")


def test_it_prints_a_table_and_keeps_the_same(tmp_path):
    kept = tmp_path / "kept.json"
    command = [sys.executable, "-m", "bench.core.prefix_cache", "--quick", "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    results = json.loads(kept.read_text())
    assert {"build", "cpu", "python", "num_blocks", "num_tokens", "num_rounds"} <= results["conditions"].keys()
    assert {row["target"] for row in results["results"]} == {None}  # a quick run judges nothing
    for row in results["results"]:
        assert 0 < row["min"] <= row["median"] <= row["max"], row
        assert row["item"] in done.stdout
        assert row["is_met"] is None, row
    items = [row["item"] for row in results["results"]]
    assert len([item for item in items if item.startswith("page 1, kvblocks: ")]) == 7
    assert "Not shown:" in done.stdout


def test_a_missed_target_is_said(bench, capsys):
    spread = bench.Spread([9_000.0, 10_500.0, 11_000.0])
    rows = [bench.to_row("slow", spread, "us/call", 1000, 10.0), bench.to_row("fast", spread, "us/call", 1000, 50.0)]
    assert [(row["median"], row["is_met"]) for row in rows] == [(10.5, False), (10.5, True)]
    bench.print_rows(rows)
    slow, fast = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("slow", "fast")))
    assert slow.endswith("< 10.0   missed") and fast.endswith("< 50.0")


def test_the_verdict_is_the_exit_status(bench, monkeypatch, capsys):
    spread = bench.Spread([9_000.0, 10_500.0, 11_000.0])
    for target, options, status in ((10.0, [], 1), (50.0, [], 0), (10.0, ["--quick"], 0)):
        row = bench.to_row("match", spread, "us/call", 1000, target)
        monkeypatch.setattr(bench, "run", lambda *_, row=row: [row])
        assert bench.main(options) == status
        shown = capsys.readouterr().out
        assert ("missed" in shown) == bool(status)
        assert ("No target was judged" in shown) == ("--quick" in options)


def test_the_ratio_to_a_tree_is_of_the_same_work(bench):
    minima = {"page 1, mini-sglang: a": 2.0, "page 1, kvblocks: a": 3.0, "page 1, kvblocks: b": 4.0, "match": 5.0}
    assert bench.ratios(minima) == {"a": 1.5}


def test_all_work_on_pages_leaves_as_much_cached_as_before(bench):
    page_one = importlib.import_module("bench.core.page_one")
    for case in page_one.page_cases().values():
        for _ in range(3):
            assert case.time_once() > 0
    pages = page_one.Pages(page_one.ours())
    cache = pages.contestant.evict.__self__
    pages.insert(pages.extended())
    assert cache.cached_block_count() == (page_one.PAGE_PROMPTS + page_one.PAGE_CALLS) * page_one.PAGE_TOKENS
    pages.make_room(None)
    pages.fill_again(pages.evict(None))
    assert cache.cached_block_count() == page_one.PAGE_PROMPTS * page_one.PAGE_TOKENS
    cache.check()


def test_memory_is_that_of_a_thousand_blocks(bench):
    assert 50_000 < bench.measure_memory() < 2_000_000
