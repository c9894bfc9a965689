"""`kvblocks replay --report`: writes the files asked for, or fails with a reason before it begins."""

import pytest
from replay.report.test_report import read

from kvblocks.cli import main


def test_the_sample_is_what_is_replayed_unless_a_trace_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--quick", "--sizes", "5%", "--policies", "lru", "--report", str(tmp_path / "report.html")])
    assert not ended.value.code
    assert "sample.jsonl.gz: 4,473 requests" in capsys.readouterr().out
    words = read((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert "Replay of sample.jsonl.gz" in words
    assert "897 blocks (5.0 %)" in words
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--report", str(tmp_path / "missing" / "report.html")])
    assert ended.value.code == 2
    assert "--report: expected a file in a folder that exists" in capsys.readouterr().err
