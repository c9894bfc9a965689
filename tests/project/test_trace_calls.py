"""The tool that counts calls: it runs on this checkout, which has no more calls than before on any way."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "trace_calls.py"
MOST_CALLS = {
    "lookup": 3,
    "allocate": 15,
    "allocate, evicting": 21,
    "free": 7,
    "append, begins a block": 5,
    "append, fills a block": 5,
    "append, in mid-block": 1,
    "append_step": 13,
    "groups, allocate": 75,
    "groups, append": 53,
    "groups, free": 17,
}
SITUATIONS = list(MOST_CALLS)


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_table_has_a_row_for_each_situation() -> None:
    result = run_tool()
    assert result.returncode == 0, result.stderr
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["calls", "modules", "changes"]
    assert [row[:24].rstrip() for row in rows] == [*SITUATIONS, "modules loaded"]
    assert all(int(number) >= 0 for row in rows for number in row[24:].split())


def test_the_same_as_json() -> None:
    result = run_tool(str(TOOL.parents[1]), "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [row["situation"] for row in answer["calls"]] == SITUATIONS
    for row in answer["calls"]:
        assert row["calls"] >= row["modules"] >= 1
        assert row["modules"] - 1 <= row["changes"] < row["calls"]
    assert answer["modules_loaded"] > 1


def test_no_way_gets_longer() -> None:
    rows = {row["situation"]: row for row in json.loads(run_tool("--json").stdout)["calls"]}
    assert {name: row["calls"] for name, row in rows.items() if row["calls"] > MOST_CALLS[name]} == {}
    shortest = {"situation": "append, in mid-block", "calls": 1, "modules": 1, "changes": 0}
    assert rows["append, in mid-block"] == shortest  # 14 of 16 decoded tokens


def test_a_folder_without_kvblocks_is_refused(tmp_path: Path) -> None:
    result = run_tool(str(tmp_path))
    assert result.returncode != 0
    assert result.stdout == ""
