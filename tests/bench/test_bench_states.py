"""The bench of recurrent states: it reads texts, and compares all designs."""

import json

import pytest

pytest.importorskip("numpy", reason="numpy comes with kvblocks[replay]")

from bench.replay import states


def test_texts_are_cut_into_tokens_and_all_designs_are_compared(tmp_path, capsys):
    trace, kept = tmp_path / "texts.jsonl", tmp_path / "kept.json"
    talk, lines = "", []
    for number in range(20):
        talk += f"Turn {number} says something new, and no word of it is short. " * 4
        lines.append(json.dumps({"timestamp": 10**6 * number, "input": talk, "session_id": "one"}))
    trace.write_text("\n".join(lines))
    states.main([str(trace), "--gb", "1", "--processes", "1", "--json", str(kept)])
    printed = capsys.readouterr().out
    rows = {row["design"]: row for row in json.loads(kept.read_text())["results"]}
    assert 0.8 < rows["kvblocks"]["hit_rate"] <= rows["free states"]["hit_rate"] < 1
    assert rows["large blocks"]["hit_rate"] < rows["kvblocks"]["hit_rate"]
    assert all(name in printed for name in rows)
