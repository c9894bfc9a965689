"""The report in a real browser, if there is one: no errors, on phones and larger screens."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from replay.results import NASTY, make_result

from kvblocks.replay.report import render_report

TOOL = Path(__file__).resolve().parents[3] / "tools" / "look_at_report.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

pytestmark = pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs chromium: apt-get install chromium")


def look(path: Path, *options: str) -> list[dict]:
    command = [sys.executable, str(TOOL), str(path), "--json", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_there_is_nothing_to_stumble_over(tmp_path):
    (tmp_path / "report.html").write_text(render_report(make_result(NASTY[0])), encoding="utf-8")
    views = look(tmp_path / "report.html", "--pictures", str(tmp_path))
    assert [(view["width"], view["scheme"]) for view in views] == [
        (390, "light"),
        (390, "dark"),
        (1280, "light"),
        (1280, "dark"),
    ]
    for view in views:
        assert view["errors"] == view["requests"] == view["faults"] == []
        assert view["sideways"] <= 0
    assert [view["background"] for view in views] == ["rgb(255, 255, 255)", "rgb(18, 22, 27)"] * 2
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["report-1280-dark.png", "report-1280-light.png", "report-390-dark.png", "report-390-light.png"]


def test_the_tool_sees_what_is_wrong(tmp_path):
    """A check of the check: without it, a tool that sees nothing would pass the other test."""
    bad = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>bad</title>
    <svg viewBox="0 0 100 50" width="100"><text x="90" y="20">outside</text><text x="10" y="40">one</text>
    <text x="12" y="41">other</text></svg><img src="http://kvblocks.invalid/x.png" alt="">
    <details><summary>more</summary><div style="width: 2000px">wide</div></details>
    <script>throw new Error("thrown")</script>"""
    (tmp_path / "bad.html").write_text(bad)
    views = look(tmp_path / "bad.html")
    assert len(views) == 4
    for view in views:
        assert any("Uncaught" in error for error in view["errors"])
        assert view["requests"] == ["http://kvblocks.invalid/x.png"]
        assert [fault.split(":")[0] for fault in view["faults"]] == ["cut off", "overlap"]
        assert view["sideways"] > 400
