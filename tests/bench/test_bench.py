"""The benches run, also without peers, and evaluate their samples correctly. No test asks how long it took."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch) -> SimpleNamespace:
    """Modules of bench/, which isn't installed; importing it reorders sys.path, until the test ends."""
    monkeypatch.syspath_prepend(ROOT)
    names = ("core.compare", "core.driver", "core.items", "report", "timing")
    return SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(f"bench.{name}") for name in names})


def run_bench(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NANO_SRC"}
    command = [sys.executable, "-m", f"bench.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return done


def test_micro_prints_json_and_nothing_else():
    printed = json.loads(run_bench("core.micro", "--quick", "--json").stdout)
    assert {"build", "cpu", "python", "num_blocks", "num_rounds", "collector"} <= printed["conditions"].keys()
    items = {result["item"] for result in printed["results"]}
    assert {"allocate", "free", "evict", "touch", "append, a call a token", "append, a call a step"} <= items
    assert sum(item.startswith("match") for item in items) == 3
    for result in printed["results"]:
        assert 0 < result["min"] <= result["median"] <= result["max"], result
        assert result["units_per_second"] > 0


def test_micro_prints_a_table():
    printed = run_bench("core.micro", "--quick", "--blocks", "5000").stdout
    assert "# num_blocks: 5000" in printed
    assert "units/s" in printed and "evict" in printed


def test_compare_without_peers_says_so_and_measures_ours(tmp_path):
    kept = tmp_path / "kept.json"
    arguments = ("--quick", "--peers", "nano", "--items", "allocate_16", "--json", str(kept))
    printed = run_bench("core.compare", *arguments).stdout
    assert "peer nano: not available (ImportError: set NANO_SRC" in printed
    assert "no peer is installed" in printed
    assert "No target was judged" in printed
    (row,) = json.loads(kept.read_text())["results"]
    assert row["item"] == "allocate_16" and row["contestant"] == "kvblocks" and row["ratio"] is None
    assert 0 < row["low"] <= row["median"] <= row["high"]


def run_without_engines(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    lines = "import sys, runpy; sys.modules.update(mlx=None, mlx_lm=None, vllm=None, torch=None); "
    lines += f"sys.argv[1:] = {arguments}; runpy.run_module('bench.{module}', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", lines]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.parametrize("module", ["mlx", "mlx.replay", "vllm", "vllm.disk_tier"])
def test_benches_of_other_engines_help_without_them(module):
    done = run_without_engines(module, "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: bench.{module}")


@pytest.mark.parametrize("module", ["mlx", "vllm", "vllm.disk_tier"])
def test_benches_of_other_engines_say_which_environment_they_need(module):
    name = module.partition(".")[0]
    done = run_without_engines(module)
    said = f"bench.{name}: expected the environment that `make test-{name}` makes, .venv-{name}/bin/python; got "
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_free_order_shows_what_empty_blocks_first_and_one_copy_are_worth(tmp_path):
    kept = tmp_path / "kept.json"
    printed = run_bench("replay.free_order", "--requests", "400", "--seeds", "2", "--json", str(kept)).stdout
    assert "times as many tokens" in printed
    first, by_use, one_copy, copies = json.loads(kept.read_text())["results"]
    assert (first["order"], by_use["order"]) == ("empty first", "all by last use")
    assert first["hit_rate"] > by_use["hit_rate"] + 0.03
    assert first["prompt_tokens"] == by_use["prompt_tokens"]
    assert (one_copy["order"], copies["order"]) == ("one copy", "all copies")
    assert one_copy["hit_rate"] > copies["hit_rate"] + 0.2


def test_hybrid_compares_groups_with_none_on_the_same_bytes(tmp_path):
    kept = tmp_path / "kept.json"
    printed = run_bench("replay.hybrid", "--requests", "200", "--gib", "8", "--json", str(kept)).stdout
    assert "# trace: generated" in printed
    rows = {row["manager"]: row for row in json.loads(kept.read_text())["results"]}
    full, groups, by_use = rows["all full"], rows["groups"], rows["groups, by last use"]
    assert groups["num_blocks"] == by_use["num_blocks"] > full["num_blocks"]
    assert groups["bytes_per_token"] < 0.5 * full["bytes_per_token"]
    assert groups["hit_rate"] > max(full["hit_rate"], by_use["hit_rate"])
    assert full["limited_rate"] == 0 < groups["limited_rate"]


def test_hybrid_reads_a_trace(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1300, "output_length": 40, "hash_ids": [1, 2, number]} for number in (3, 4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    printed = run_bench("replay.hybrid", "--trace", str(trace), "--gib", "2").stdout
    assert "# trace: trace.jsonl" in printed and "# num_requests: 2" in printed


def test_contestants_take_turns_in_changing_order(bench):
    calls: list[str] = []
    cases = {name: bench.timing.Case(lambda _, name=name: calls.append(name), 1) for name in "ab"}
    spreads = bench.timing.measure(cases, num_rounds=3, num_samples=1)
    warm_ups = "".join(calls[: 2 * bench.timing.NUM_WARM_UPS])
    assert sorted(warm_ups) == ["a", "a", "b", "b"]
    assert "".join(calls[len(warm_ups) :]) == "aabb" + "bbaa" + "aabb"  # an untimed run opens each turn
    assert all(len(spread.samples) == 3 for spread in spreads.values())


def test_a_case_hands_its_state_on_and_counts_its_units(bench):
    seen: list[object] = []
    clock = iter([1000, 1600]).__next__
    case = bench.timing.Case(lambda state: [state], 4, prepare=lambda: "made", tidy=seen.append, clock=clock)
    assert case.time_once() == 150
    assert seen == [["made"]]


def test_a_peer_that_fails_is_left_out_and_ours_is_not(bench, capsys):
    item = bench.items.Item("touch", 4, "touch", "ns/block")
    driver = bench.driver.Driver()
    driver.touch = lambda _: {"way": bench.timing.Case(lambda _: 1 / 0, 1)}
    driver.label = "peer"
    assert bench.compare.cases_of(driver, item) == {}
    assert "peer peer: failed at touch_4: ZeroDivisionError" in capsys.readouterr().err
    driver.label = "kvblocks"
    with pytest.raises(ZeroDivisionError):
        bench.compare.cases_of(driver, item)


def test_targets_are_judged_against_the_first_way_of_the_baseline(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench.compare, "is_compiled", lambda: False)
    rows = [
        bench.compare.Row("free_16", "ns/block", "kvblocks", "pool", 50.0, 50.0, 50.0, 1, None),
        bench.compare.Row("free_16", "ns/block", "sglang", "pool", 1.0, 1.0, 1.0, 1, 0.02),
        bench.compare.Row("free_16", "ns/block", "vllm", "pool", 110.0, 110.0, 110.0, 1, 2.2),
        bench.compare.Row("step_1024", "ns/token", "vllm", "sha256", 900.0, 900.0, 900.0, 1, 9.0),
        bench.compare.Row("step_1024", "ns/token", "vllm", "xxhash", 9000.0, 9000.0, 9000.0, 1, 90.0),
    ]
    memory = [{"contestant": "kvblocks", "share": 0.7}, {"contestant": "vllm", "share": 1.0}]
    judged = {entry["item"]: entry["reached"] for entry in bench.compare.compare_targets(rows, memory)}
    assert judged == {"free_16": True, "step_1024": False, "bytes_per_block_cached": True}
    assert capsys.readouterr().out.count("missed") == 1


def test_every_item_is_a_method_of_the_contract(bench):
    for item in bench.items.ITEMS:
        assert getattr(bench.driver.Driver(), item.kind)(item.size) == {}
    names = [item.name for item in bench.items.ITEMS]
    assert len(set(names)) == len(names)
    assert {target.name for target in bench.items.TARGETS} <= set(names)


def test_the_page_shows_the_kept_results(bench):
    page = bench.report.PAGE.read_text(encoding="utf-8")
    assert bench.report.render(page) == page, "run: python -m bench.report"
    assert "| allocate, N=16 | ns/block |" in page
