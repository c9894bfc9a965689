"""A session on a GPU, with stand-ins for what it runs: nothing is lost, whatever a process does. No GPU is needed."""

import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu_session import __main__ as command
from bench.gpu_session import cases as cases_module
from bench.gpu_session import session as session_module
from bench.gpu_session.cases import run_cases
from bench.gpu_session.items import items
from bench.gpu_session.results import Results
from bench.gpu_session.session import CANNOT, POISONED, Item, Session

ROOT = Path(__file__).resolve().parents[2]

# What every stand-in begins with: `began` and `ended` write lines as an item's cases do.
LINES = """
import json, os, sys, time
path, item = os.environ["KVBLOCKS_SESSION_RESULTS"], os.environ["KVBLOCKS_SESSION_ITEM"]
read = open(path, errors="replace").read().split("\\n") if os.path.exists(path) else []
old = [json.loads(line) for line in read if line[:8] == '{"item":' and line[-1] == "}"]
over = {line.get("case") for line in old if line["item"] == item and line.get("state") != "began"}
def put(case, state):
    with open(path, "a") as file: file.write(json.dumps({"item": item, "case": case, "state": state}) + "\\n")
def run(case, work=lambda: None):
    if case not in over: put(case, "began"); work(); put(case, "done")
"""


def item(name, program, **more):
    return Item(name, 300, (sys.executable, "-S", "-c", LINES + program), least_s=0.1, **{"case_limit_s": 300} | more)


def states(results, name):
    """The states of an item's cases, in order, without their beginnings; last the item's own."""
    lines = [line for line in results.lines() if line["item"] == name and line["state"] != "began"]
    return [(line.get("case"), line["state"]) for line in lines]


def test_no_process_takes_the_others_with_it(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    session = Session(out, 600)
    status = session.run(
        [
            item("fine", "run('a'); run('b')"),
            item("dies", "run('a'); run('b', lambda: os.kill(os.getpid(), 11)); run('c')"),
            item("hangs", "run('a'); run('b', lambda: time.sleep(1000))", case_limit_s=0.3),
            item("prints", "os.write(1, bytes(range(256)) * 99); open(path, 'ab').write(b'{\\xff half a line')"),
            item("poisoned", f"run('a'); 'b' in over or (put('b', 'failed'), os._exit({POISONED})); run('c')"),
            item("fails", "run('a'); sys.exit(1)"),
            Item("is no program", 9, ("/nothing/here",), least_s=0.1),
            item("last", "run('a')"),
        ]
    )
    assert status == 1
    results = session.results
    assert states(results, "fine") == [("a", "done"), ("b", "done"), (None, "done")]
    assert states(results, "dies") == [("a", "done"), ("b", "died"), ("c", "done"), (None, "failed")]
    assert states(results, "hangs") == [("a", "done"), ("b", "died"), (None, "failed")]
    assert states(results, "prints") == [(None, "done")]
    assert states(results, "poisoned") == [("a", "done"), ("b", "failed"), ("c", "done"), (None, "failed")]
    assert states(results, "fails") == [("a", "done"), (None, "failed")]
    assert states(results, "is no program") == [(None, "cannot")]
    assert states(results, "last") == [("a", "done"), (None, "done")]
    died = {line["item"]: line["why"] for line in results.lines() if line["state"] == "died"}
    assert died == {"dies": "exit status -11", "hangs": "no end within 0.3 s"}
    assert b"=== prints: " in (out / "log.txt").read_bytes()


def test_parts_share_the_cases_and_are_started_again_alone(tmp_path):
    program = """
part = int(sys.argv[1])
def put(case, state):
    with open(path, "a") as file:
        file.write(json.dumps({"item": item, "case": case, "state": state, "part": part}) + "\\n")
for case in "abcdef"[part::2]: run(case, (lambda: os.abort()) if case == "c" else (lambda: None))
"""
    stand_in = Item("parts", 300, (sys.executable, "-S", "-c", LINES + program, "{part}"), least_s=0.1, parts=2)
    session = Session(tmp_path, 600)
    assert session.run([stand_in]) == 1
    found = states(session.results, "parts")
    assert sorted(found[:-1]) == [(case, "died" if case == "c" else "done") for case in "abcdef"]
    assert found[-1] == (None, "failed")


def test_it_ends_in_time_and_the_next_session_goes_on(tmp_path, monkeypatch):
    ticks = count()
    # Each look at the clock is a tenth of a second, however slow this machine is.
    stand_in = SimpleNamespace(monotonic=lambda: next(ticks) / 10, sleep=lambda _: time.sleep(0.005), time=time.time)
    hangs = item("hangs", "'a' in over or (run('a'), time.sleep(1000))")
    later = item("later", "run('a')")
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "time", stand_in)
        session = Session(tmp_path, 12, grace_s=1)
        assert session.run([hangs, later]) == 1
        assert 9 < next(ticks) / 10 < 14
    assert states(session.results, "hangs")[-1] == (None, "cut")
    assert states(session.results, "later") == [(None, "skipped")]
    # The process may have been too slow to begin its case.
    again = Session(tmp_path, 600)
    if states(session.results, "hangs")[0] == ("a", "done"):
        assert again.run([hangs, later]) == 0
        assert again.run([hangs, later]) == 0, "nothing is left"
        assert states(again.results, "hangs") == [("a", "done"), (None, "cut"), (None, "done")]
    else:
        assert again.run([later]) == 0
    assert states(again.results, "later") == [(None, "skipped"), ("a", "done"), (None, "done")]


def wait_until(is_so):
    end = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < end, "it doesn't happen"
        time.sleep(0.02)


def is_alive(process_id):
    """Whether a process is there and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_session_that_is_killed_leaves_no_process_and_is_resumed(tmp_path):
    program = """
run('a')
run('b', lambda: (open(os.path.dirname(path) + "/pid", "w").write(str(os.getpid())), time.sleep(1000)))
"""
    outer = (
        "import sys; from pathlib import Path; from bench.gpu_session.session import Item, Session\n"
        "Session(Path(sys.argv[1]), 600).run([Item('one', 300, tuple(sys.argv[2:]), case_limit_s=300)])"
    )
    stand_in = item("one", program)
    process = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path), *stand_in.command], cwd=ROOT)
    noted = tmp_path / "pid"
    wait_until(lambda: noted.exists() and noted.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_alive(int(noted.read_text())))
    results = Results(tmp_path / "results.jsonl")
    with results.path.open("ab") as file:
        file.write(b'{"item": "one", "ca')  # killed within a write
    assert results.finished("one") == {"a"}, "b is begun again"
    results.append("other", state="done")
    assert len(results.lines()) == 4, "a line behind half a line is a line of its own"
    quick = item("one", program.replace("time.sleep(1000)", "None"))
    assert Session(tmp_path, 600).run([quick]) == 0
    assert [line["state"] for line in results.lines() if line.get("case") == "a"] == ["began", "done"]
    assert [line["state"] for line in results.lines() if line.get("case") == "b"] == ["began", "began", "done"]


def test_a_case_that_never_ends_is_begun_twice_at_most(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.append("one", "a", state="began")
    assert results.finished("one") == set()
    results.append("one", "a", state="began")
    results.append("two", "b", state="failed")
    assert results.finished("one") == {"a"} and results.finished("two") == {"b"}


def test_cases_are_written_one_by_one(tmp_path, monkeypatch):
    results = Results(tmp_path / "results.jsonl")
    seen = []

    def broken():
        raise RuntimeError("first line\nsecond line")

    def look():
        seen.append([(line["case"], line["state"]) for line in results.lines()])
        return {"error": 0.5, "is_right": False}

    some = [("good", lambda: {"number": 1}), ("broken", broken), ("wrong", look)]
    assert run_cases("one", some, results) == 1
    assert seen == [
        [("good", "began"), ("good", "done"), ("broken", "began"), ("broken", "failed"), ("wrong", "began")]
    ]
    by_name = {line["case"]: line for line in results.lines()}
    assert by_name["good"]["number"] == 1 and by_name["wrong"]["state"] == "wrong"
    assert by_name["broken"]["error"] == "RuntimeError: first line" and "broken()" not in by_name["broken"]["error"]
    assert run_cases("one", some, results) == 0, "all are finished"
    monkeypatch.setattr(cases_module, "is_poisoned", lambda: True)
    assert run_cases("two", [("broken", broken), ("next", look)], results) == POISONED
    assert results.finished("two") == {"broken"}


def test_a_session_needs_a_new_folder_or_resume(tmp_path, capsys):
    Results(tmp_path / "results.jsonl").append("one", state="done")
    for arguments, message in (
        (["--out", str(tmp_path)], "--out: expected a folder without results, or --resume"),
        (["--out", str(tmp_path / "new"), "--items", "facts,speed"], "--items: expected some of facts, smoke"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_the_items_run_exists():
    found = items()
    names = [one.name for one in found]
    assert names[:6] == ["facts", "smoke", "engine", "tests-engine", "hybrids", "tests-kernels"]
    assert sum(one.limit_s for one in found[:4]) < 9 * 60, "the first four fit into ten minutes"
    for one in found:
        for word in one.command:
            if word.startswith(("tests/", "--ignore=")):
                assert (ROOT / word.removeprefix("--ignore=")).exists(), word
            elif word.startswith("bench."):
                path = ROOT / word.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), word


def run_module(*arguments, **environment):
    """Run Python where there is no GPU, whatever this machine has."""
    unset = ("TRITON_INTERPRET", "KVBLOCKS_SESSION_RESULTS")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    kept |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False, timeout=170)


def test_without_a_gpu_it_says_what_it_needs(tmp_path):
    done = run_module("-m", "bench.gpu_session", "--out", str(tmp_path / "out"), "--minutes", "3")
    assert done.returncode == CANNOT
    assert "expected a GPU that torch can use, got none" in done.stderr and "--rehearse" in done.stderr
    assert done.stdout.startswith("facts: cannot")


PYTEST_CASES = """
import os, pytest
def test_good(): pass
def test_bad(): assert 1 == 2
def test_skipped(): pytest.skip("its reason is recorded")
def test_dies():
    if os.environ.get("DIES"): os._exit(9)
"""


def run_pytest(folder, *arguments, **environment):
    (folder / "test_some.py").write_text(PYTEST_CASES)
    told = {"KVBLOCKS_SESSION_RESULTS": str(folder / "results.jsonl"), "KVBLOCKS_SESSION_ITEM": "tests"}
    told |= {} if "-n" in arguments else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ("-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider")
    plugin = ("-p", "bench.gpu_session.pytest_recorder")
    return run_module("-m", "pytest", *options, *plugin, *arguments, str(folder), **told, **environment)


def test_tests_are_recorded_and_finished_ones_left_out(tmp_path):
    done = run_pytest(tmp_path)
    assert done.returncode == 1, done.stderr
    lines = [line for line in Results(tmp_path / "results.jsonl").lines() if line["state"] != "began"]
    found = {line["case"].partition("::")[2]: line for line in lines}
    assert {name: line["state"] for name, line in found.items()} == {
        **dict.fromkeys(("test_good", "test_skipped", "test_dies"), "done"),
        "test_bad": "failed",
    }
    assert "assert 1 == 2" in found["test_bad"]["where"]
    assert "its reason is recorded" in found["test_skipped"]["skipped"]
    again = run_pytest(tmp_path)
    assert again.returncode == 0 and "4 deselected" in again.stdout, again.stdout


@pytest.mark.exhaustive
def test_a_worker_that_dies_costs_one_test(tmp_path):
    done = run_pytest(tmp_path, "-n", "2", "--max-worker-restart", "9", DIES="1")
    assert done.returncode == 1, done.stderr
    lines = Results(tmp_path / "results.jsonl").lines()
    last = {line["case"].partition("::")[2]: line["state"] for line in lines}
    assert last == {"test_good": "done", "test_bad": "failed", "test_skipped": "done", "test_dies": "failed"}


@pytest.mark.exhaustive
def test_the_rehearsal_runs_every_kind_of_case(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    out = tmp_path / "out"
    done = run_module("-m", "bench.gpu_session", "--out", str(out), "--minutes", "9", "--rehearse")
    lines = Results(out / "results.jsonl").lines()
    assert done.returncode == 0, (out / "log.txt").read_text()
    assert {line["item"] for line in lines if line["state"] == "done"} == {"facts", "smoke", "engine"}
    assert not [line for line in lines if line["state"] in ("failed", "wrong", "died")]


@pytest.mark.exhaustive
def test_kernels_compiled_ahead_are_found_in_the_cache(tmp_path):
    """By Triton itself, when the same call compiles again with a stand-in for the driver."""
    pytest.importorskip("triton", reason="triton is not installed")
    packed = tmp_path / "kernels.tar.xz"
    only = "decodes: kvblocks decode, head_dim 64, bf16"
    done = run_module("-m", "bench.gpu_session.ahead", "--only", only, "--processes", "1", "--to", str(packed))
    assert done.returncode == 0 and done.stdout.startswith("3 kernels"), done.stdout + done.stderr
    program = f"""
import sys, os, torch
from pathlib import Path
from bench.gpu_session.ahead import unpack, record_smokes
os.environ["TRITON_CACHE_DIR"] = str(unpack(Path({str(packed)!r}), Path({str(tmp_path)!r})))
import triton
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: hits.append(cache_hit)
from bench.attention import sass
for one in record_smokes("sm90", only={only!r}).specialisations.values(): sass.build(one, "sm90")
print(hits)
"""
    found = run_module("-c", program)
    assert found.stdout.strip() == "[True, True, True]", found.stdout + found.stderr


def test_a_cache_of_other_versions_is_told(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from bench.gpu_session import ahead

    cache = tmp_path / "cache"
    (cache / "key").mkdir(parents=True)
    (cache / "key" / "kernel.cubin").write_bytes(b"machine code")
    ahead.pack(cache, tmp_path / "kernels.tar.xz")
    found = ahead.unpack(tmp_path / "kernels.tar.xz", tmp_path)
    assert (found / "key" / "kernel.cubin").read_bytes() == b"machine code" and capsys.readouterr().out == ""
    monkeypatch.setattr(ahead, "manifest", lambda: {"triton": "3.6.0", "python": "3.12"})
    ahead.unpack(tmp_path / "kernels.tar.xz", tmp_path)
    assert "everything is compiled anew" in capsys.readouterr().out
