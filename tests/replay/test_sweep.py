"""A sweep, its options and its command: the same rows in one process and in several, and an end at Ctrl-C."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from replay.independent import Ask
from replay.small_traces import Waiting, make_trace

from kvblocks.cli import app as cli
from kvblocks.cli.replay import commands as replay_command
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.replay.options import parse_arrivals, parse_range, parse_size, parse_sizes
from kvblocks.replay.prefixes import prefix_tree
from kvblocks.replay.readers import read_trace
from kvblocks.replay.result import Row
from kvblocks.replay.sample import SAMPLE
from kvblocks.replay.sweep import SweepOptions, do_all, sweep

ROOT = Path(__file__).resolve().parents[2]


def small_trace():
    requests = []
    for number in range(60):
        chain = (1, 2, *(100 * (1 + number % 5) + step for step in range(number // 5 + 1)))
        requests.append(Ask("abcde"[number % 5], number, 1.0, 3.0, chain))
    return make_trace(requests, stops=["tool_use", "end_turn"] * 30)


def untimed(row: Row) -> Row:
    return replace(row, wall_s=0.0)


def test_processes_find_what_one_finds():
    options = SweepOptions(policies=("lru", "slru"), sizes=(16, 40), mean_arrival_s=5.0, is_closed=True)
    shown = []
    alone = sweep(small_trace(), options, 1, lambda jobs: shown.append([share for _, share in jobs]))
    together = sweep(small_trace(), options, 2)
    assert [(row.policy, row.num_blocks) for row in alone.rows] == [
        ("lru", 16),
        ("slru", 16),
        ("lru", 40),
        ("slru", 40),
    ]
    assert [untimed(row) for row in alone.rows] == [untimed(row) for row in together.rows]
    assert replace(alone, rows=[]) == replace(together, rows=[])
    assert shown[-1] == [1.0] * 6
    for row in alone.rows:
        assert row.hit_rate <= row.bound <= 1
        assert row.fixed_order.hit_rate <= row.fixed_order.bound
        assert row.fixed_order.attainable <= min(row.fixed_order.bound, row.attainable)
        assert row.tokens.prompt == row.tokens.computed + row.tokens.saved
        assert row.tokens.saved == round(row.hit_rate * alone.trace.num_references) * 16
    assert json.loads(json.dumps(alone.to_json()))["rows"] == alone.to_json()["rows"]


def test_without_the_optima_there_are_none():
    options = SweepOptions(policies=("lru",), sizes=(16,), optima=False)
    (row,) = sweep(small_trace(), options, 1).rows
    assert row.attainable is row.fixed_order is None
    assert row.hit_rate <= row.bound


def test_what_nobody_waited_for_is_the_fixed_order():
    (row,) = sweep(small_trace(), SweepOptions(policies=("lru",), sizes=(400,)), 1).rows
    assert row.fixed_order.hit_rate == row.hit_rate
    assert row.attainable == row.hit_rate


def test_a_sweep_of_nothing_or_of_a_policy_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgumentError, match="expected policies and sizes"):
        sweep(small_trace(), SweepOptions(policies=(), sizes=(1,)), 1)
    with pytest.raises(InvalidArgumentError, match="policy: expected one of"):
        sweep(small_trace(), SweepOptions(policies=("lru", "magic"), sizes=(1,)), 1)


def test_the_prefix_tree_has_every_reference_once():
    trace = small_trace()
    whole = prefix_tree(trace)
    assert (whole.num_requests, whole.num_sessions, whole.num_blocks) == (60, 5, 0)
    (shared,) = whole.children
    assert (shared.num_blocks, shared.num_requests, shared.label, shared.depth) == (2, 60, "5 sessions", 0)
    assert sorted(child.label for child in shared.children) == [*"abcde"]

    def total(node):
        own = node.num_blocks * node.num_requests if node.depth or node.num_blocks else 0
        return own + node.num_hidden_references + sum(total(child) for child in node.children)

    def blocks(node):
        return node.num_blocks + node.num_hidden_blocks + sum(blocks(child) for child in node.children)

    for most in (1, 2, 7, 2000):
        tree = prefix_tree(trace, most)
        assert total(tree) == len(trace.blocks)
        assert blocks(tree) == trace.num_unique_blocks


def test_sizes_are_blocks_or_shares():
    assert parse_sizes("--sizes", "1%, 2.5%,5000,1%", 1000) == (10, 25, 5000)
    assert parse_size("--sizes", "0.001%", 1000) == 1
    for text in ("", "5%%", "-1", "2.5", "0", "0%", "many"):
        with pytest.raises(InvalidArgumentError, match=f"--sizes: expected .*, got '{text}'"):
            parse_size("--sizes", text, 1000)


def test_arrivals_are_recorded_or_a_mean():
    trace = small_trace()
    assert parse_arrivals(None, trace) is parse_arrivals("recorded", trace) is None
    assert parse_arrivals(None, replace(trace, times_are_relative=True)) == 60.0
    assert parse_arrivals("2.5", trace) == 2.5
    for text in ("0", "-3", "soon", "nan", "inf"):
        with pytest.raises(InvalidArgumentError, match="--arrivals: expected 'recorded' or seconds above 0"):
            parse_arrivals(text, trace)
    assert parse_range("20:355") == (20, 355)
    with pytest.raises(InvalidArgumentError, match="expected FROM:TO"):
        parse_range("20")


def command(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["replay", *arguments])
    return raised.value.code or 0, capsys.readouterr()


def test_the_command_prints_a_table_and_writes_the_rows(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = [str(SAMPLE), "--sizes", "2%", "--policies", "lru", "--quick", "--jobs", "1", "--json", str(path)]
    code, printed = command(arguments, capsys)
    assert code == 0
    assert "17,944 blocks of 512 tokens" in printed.out
    (row,) = json.loads(path.read_text(encoding="utf-8"))
    assert row["policy"] == "lru"
    assert 0.5 < row["hit_rate"] < row["bound"]
    assert {"num_blocks", "attainable", "tokens", "waits", "trace", "conditions"} <= row.keys()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_what_was_found_is_written_whoever_reads_the_table_and_whatever_else_fails(tmp_path, monkeypatch, capsys):
    """Rows that took an hour are in their file even if the table's reader has gone. One failed file costs no other."""
    trace = tmp_path / "t\udcff.jsonl"  # a name that is no UTF-8
    lines = [{"timestamp": n, "input_length": 512, "output_length": 1, "hash_ids": [n % 2]} for n in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, report = tmp_path / "rows.json", tmp_path / "report.html"
    arguments = [str(trace), "--sizes", "2", "--policies", "lru", "--quick", "--jobs", "1", "--json", str(rows)]

    def leave(_):
        raise BrokenPipeError(32, "nobody reads")

    def fail(*_, **__):
        raise MemoryError("the rows")

    with monkeypatch.context() as patch:
        patch.setattr(replay_command, "_print", leave)
        command([*arguments, "--report", str(report)], capsys)
    assert json.loads(rows.read_text(encoding="utf-8"))[0]["hit_rate"] == 0.5
    assert "</html>" in report.read_text(encoding="utf-8")
    rows.unlink()
    report.unlink()
    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(MemoryError):
        cli.main(["replay", *arguments, "--report", str(report)])
    assert "</html>" in report.read_text(encoding="utf-8")
    assert "2 blocks of 512 tokens" in capsys.readouterr().out
    assert {entry.name for entry in tmp_path.iterdir()} == {trace.name, report.name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "TRACE: expected a file that can be read, got missing.jsonl: No such file"),
        ([str(SAMPLE), "--sizes", "x"], "--sizes: expected"),
        ([str(SAMPLE), "--policies", "lru,magic", "--sizes", "9"], "policy: expected one of"),
        ([str(SAMPLE), "--json", "/no/such/folder/x"], "--json: expected a file in a folder that exists"),
        (
            [str(SAMPLE), "--report", "/proc/x"],
            "--report: expected a file that can be written, got /proc/x: No such file",
        ),
        ([str(SAMPLE), "--json", "n" * 300], "--json: expected a file that can be written, got nnn"),
        ([str(SAMPLE), "--json", "/dev/null"], "--json: expected a file in a folder that exists, got /dev/null"),
        ([str(SAMPLE), "--sizes", "9" * 5000], "--sizes: expected a number of blocks, or a share such as 2%, got '999"),
        ([str(SAMPLE), "--sessions", "5:2"], "sessions: expected FROM:TO"),
        ([str(SAMPLE), "--groups", "gpt", "--sizes", "9"], "groups: expected one of gemma3-4b"),
        ([str(SAMPLE), "--block-size", "700"], "multiple of its 512 tokens, got 700"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    code, printed = command(arguments, capsys)
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("kvblocks: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_no_file_is_written_over_another_one(tmp_path, capsys):
    trace, rows, link = tmp_path / "trace.jsonl.gz", tmp_path / "rows", tmp_path / "link"
    trace.write_bytes(SAMPLE.read_bytes())
    link.hardlink_to(trace)
    (tmp_path / "here").symlink_to(tmp_path)
    for outputs, message in (
        (["--json", str(trace)], f"--json: expected another file than TRACE, got {trace} for both"),
        (["--report", str(link)], f"--report: expected another file than TRACE, got {link} for both"),
        (["--json", str(rows), "--report", f"{tmp_path}/here/rows"], "--report: expected another file than --json"),
    ):
        code, printed = command([str(trace), "--sizes", "2", *outputs], capsys)
        assert code == 2
        assert message in printed.err
    assert trace.read_bytes() == SAMPLE.read_bytes()
    assert not rows.exists()


def is_alive(process):
    """Whether a process runs. One that has ended and waits to be reaped doesn't."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_it_and_its_processes(tmp_path):
    """In its own session, as at a terminal: all of its processes get the signal."""
    script = [sys.executable, "-m", "kvblocks", "replay", str(SAMPLE), "--jobs", "2", "--json", str(tmp_path / "rows")]
    process = subprocess.Popen(
        script, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs /proc to see the processes")
    deadline = time.monotonic() + 60
    while len(children.read_text().split()) < 3 and time.monotonic() < deadline:  # two, and one that tracks resources
        time.sleep(0.05)
    workers = children.read_text().split()
    assert len(workers) >= 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    while any(map(is_alive, workers)) and time.monotonic() < deadline:  # the one that tracks resources ends by itself
        time.sleep(0.05)
    assert not [worker for worker in workers if is_alive(worker)]
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_garbage_collector_rests_while_a_job_runs_and_is_as_it_was_after_that(was_enabled):
    class Source:
        def do(self, job, progress):
            seen.append(gc.isenabled())
            if job == "bad":
                raise KVBlocksError("a job that fails")
            return job

    seen = []
    if not was_enabled:
        gc.disable()
    try:
        assert do_all(Source(), ["good", "other"], 1, None) == {"good": "good", "other": "other"}
        assert gc.isenabled() is was_enabled
        with pytest.raises(KVBlocksError, match="a job that fails"):
            do_all(Source(), ["bad"], 2, None)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
    assert seen == [False] * 3


def test_a_process_that_is_killed_when_there_is_no_job_for_it_costs_nothing(tmp_path):
    """It has read from what may be shared, and waits for more."""
    quick, slow = str(tmp_path / "quick" / "job"), str(tmp_path / "job")
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "go").touch()
    killed = []

    def kill(shares):
        if not killed and dict(shares)[quick] == 1.0 and Path(slow).exists() and Path(slow).read_text():
            time.sleep(0.2)  # in which it begins to wait
            busy = int(Path(slow).read_text())
            killed.extend({child.pid for child in multiprocessing.active_children()} - {busy})
            for process in killed:
                os.kill(process, signal.SIGKILL)
            (tmp_path / "go").touch()

    assert do_all(Waiting(None, None), [quick, slow], 2, kill) == {quick: quick, slow: slow}
    assert len(killed) == 1
    assert not multiprocessing.active_children()


def test_what_a_job_raises_in_a_process_ends_the_sweep(tmp_path):
    (tmp_path / "go").touch()
    nowhere = str(tmp_path / "no" / "job")
    with pytest.raises(FileNotFoundError, match="no/job"):
        do_all(Waiting(None, None), [nowhere, str(tmp_path / "job")], 2, None)
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_ends_the_sweep():
    def kill(_):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(KVBlocksError, match="got one that was killed"):
        sweep(
            read_trace(SAMPLE), SweepOptions(("slru", "s3fifo"), (200,)), 2, kill
        )  # it takes long enough to be killed
    assert not multiprocessing.active_children()
