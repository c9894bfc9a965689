"""The bench of vLLM's scheduler keeps a row for each item and judges its targets. No test asks how long it took."""

import json

from bench.vllm.__main__ import main


def test_the_bench_measures_all_and_says_what_it_found(tmp_path, capsys):
    path = tmp_path / "results.json"
    assert main(["--quick", "--rounds", "2", "--json", str(path)]) == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    items = [row["item"] for row in kept["results"]]
    assert items[:2] == ["step, 1 sequences, 1,024 shared, sync", "step, 64 sequences, 1,024 shared, sync"]
    assert len(items) == 8
    assert kept["conditions"]["vllm"]
    for row in kept["results"]:
        assert row["ratio"] > 0
        assert 0 < row["vllm"]["min"] <= row["vllm"]["median"] <= row["vllm"]["max"]
    printed = capsys.readouterr().out
    assert "No target was judged" in printed, "a quick run is too small"
