"""A session on a GPU, with stand-ins for what it runs: nothing is lost, whatever a process does. No GPU is needed."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu_session import __main__ as command
from bench.gpu_session import cases as cases_module
from bench.gpu_session import session as session_module
from bench.gpu_session.cases import run_cases
from bench.gpu_session.items import OWN, SANITIZED, UNSANITIZED, items
from bench.gpu_session.results import Results
from bench.gpu_session.session import CANNOT, ITEM_VARIABLE, PATH_VARIABLE, POISONED, Item, Session

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
    command = (sys.executable, "-S", "-c", LINES + program)
    return Item(name, command=command, **{"limit_s": 300, "least_s": 0.1, "case_limit_s": 300} | more)


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
            item("dies with 1", "run('a'); run('b', lambda: os._exit(1)); run('c')"),
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
    assert states(results, "dies with 1") == [("a", "done"), ("b", "died"), ("c", "done"), (None, "failed")]
    assert states(results, "is no program") == [(None, "cannot")]
    assert states(results, "last") == [("a", "done"), (None, "done")]
    died = {line["item"]: line["why"] for line in results.lines() if line["state"] == "died"}
    assert died == {"dies": "exit status -11", "hangs": "no end within 0.3 s", "dies with 1": "exit status 1"}
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


def test_every_session_says_again_on_which_machine_it_runs(tmp_path):
    machine, other = item("facts", "put('device', 'began'); put('device', 'done')", is_repeated=True), item("other", "")
    for _ in range(2):
        assert Session(tmp_path, 600).run([machine, other]) == 0
    results = Results(tmp_path / "results.jsonl")
    assert states(results, "facts") == 2 * [(None, "anew"), ("device", "done"), (None, "done")]
    assert states(results, "other") == [(None, "done")]
    assert results.finished("facts") == {"device"}
    once = "mark = path + '.mark'; put('device', 'began'); os.path.exists(mark) or (open(mark, 'w'), os.abort())"
    dies = item("facts", once, is_repeated=True)
    assert Session(tmp_path, 600).run([dies, other]) == 1, "what an earlier session found doesn't count"
    assert (None, "done") not in states(results, "facts")[6:]
    results.begin_anew("facts")
    assert results.finished("facts") == set() and results.done_items() == {"other"}


def test_a_file_that_an_earlier_session_wrote_is_kept(tmp_path):
    bench = item(
        "bench", "open(os.path.dirname(path) + '/rows.json', 'w').write(f'{len(old)}')", overwrites="rows.json"
    )
    for _ in range(3):
        Session(tmp_path, 600).run([bench])
        Results(tmp_path / "results.jsonl").append("bench", state="anew")  # so that it isn't done
    written = {path.name: path.read_text() for path in tmp_path.glob("rows*")}
    assert written == {"rows-1.json": "0", "rows-2.json": "2", "rows.json": "4"}
    overwritten = [one.overwrites for one in items() if one.overwrites is not None]
    assert overwritten == ["attention.json", "engine-gpu.json"], "a sweep adds to its file"


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
        (["--out", str(tmp_path / "new"), "--items", "facts,speed"], "--items: expected some of facts, engine"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert message in capsys.readouterr().err and ended.value.code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("minutes", ["nan", "-1", "0", "inf", "ten"])
def test_a_session_takes_some_minutes(tmp_path, capsys, minutes):
    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path / "new"), "--minutes", minutes])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "argument --minutes: " in message and minutes in message
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    full = tmp_path / "full"
    full.mkdir()
    (full / "log.txt").symlink_to("/dev/full")
    for folder, why in (("file", "File exists"), ("file/below", "Not a directory"), ("full", "No space left")):
        if folder == "full" and not Path("/dev/full").exists():
            continue  # only Linux has it
        with pytest.raises(SystemExit) as ended:
            command.main(["--out", str(tmp_path / folder), "--rehearse", "--items", "facts"])
        message = capsys.readouterr().err
        assert ended.value.code == 2 and "--out: expected a folder that can be written, got " in message
        assert why in message and "Traceback" not in message


def test_what_the_items_run_exists():
    found = items()
    names = [one.name for one in found]
    assert names[:6] == ["facts", "engine", "tests-engine", "tests-kernels", "bench-attention", "smoke"]
    assert sum(one.limit_s for one in found[:3]) < 6 * 60, "the kernels' tests get a part of ten minutes"
    assert [one.name for one in found if one.is_needed and one.is_repeated] == ["facts"]
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
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False, timeout=390)


def test_the_sanitizer_is_spared_tests_that_capture():
    """Without torch's caching allocator a graph can't be captured, since nothing may be allocated meanwhile."""
    tests = [test for path in SANITIZED for test in (ROOT / path).read_text(encoding="utf-8").split("\ndef ")[1:]]
    names = [test.partition("(")[0] for test in tests if "CUDAGraph" in test]
    assert len(names) >= 3
    assert [name for name in names if not any(part in name for part in UNSANITIZED)] == []


@pytest.mark.exhaustive
def test_what_launches_nothing_is_right_on_a_gpu():
    """These kernels' tests as on a machine with a GPU, as far as one can be pretended."""
    program = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
files = (f"tests/kernels/test_{name}.py" for name in ("table", "layout"))
sys.exit(pytest.main(["-q", "-n0", "-pno:cacheprovider", *files]))
"""
    done = run_module("-c", program)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


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


@pytest.mark.exhaustive
def test_a_test_that_hangs_costs_one_test(tmp_path):
    """Without workers, too, where the timeout ends the only process, with the status of failed tests."""
    hangs, others = "import time\ndef test_hangs(): time.sleep(1000)\n", "def test_c(): pass\ndef test_d(): 1 / 0\n"
    (tmp_path / "test_some.py").write_text(f"def test_first(): pass\n{hangs}{others}")
    options = ("-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--timeout", "5")
    plugin = ("--timeout-method", "thread", "-p", "bench.gpu_session.pytest_recorder")
    command = (sys.executable, "-m", "pytest", *options, *plugin, str(tmp_path / "test_some.py"))
    session = Session(tmp_path, 600)
    assert session.run([Item("sanitizer", 300, command, case_limit_s=300)]) == 1
    found = {(case or "").partition("::")[2]: state for case, state in states(session.results, "sanitizer")}
    assert found == {"test_first": "done", "test_hangs": "died", "test_c": "done", "test_d": "failed", "": "failed"}


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
    assert {line["item"] for line in lines if line["state"] == "done"} == set(OWN)
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
assert unpack(Path({str(packed)!r}), Path({str(tmp_path / "cache")!r}))
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "cache")!r}
import triton
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: hits.append(cache_hit)
from bench.attention import sass
from bench.attention.kernel_keys import fix_keys
fix_keys()
for one in reversed(record_smokes("sm90", only={only!r}).specialisations.values()): sass.build(one, "sm90")
print(hits)
"""
    found = run_module("-c", program)
    assert found.stdout.strip() == "[True, True, True]", found.stdout + found.stderr


KEYS = """
from pathlib import Path
from types import SimpleNamespace
from bench.gpu_session import ahead, facts, items, pytest_recorder, results

def nothing(): pass
def compile_ahead(): ahead._compile_share("sm90", "no such kernel", 1, 0)
def run_item(): items.run_item("facts", results.Results(Path("none")), 0, is_rehearsal=True)
def configure_tests():
    manager, given = SimpleNamespace(register=lambda *_: None), {"kvblocks_finished_tests": []}
    pytest_recorder.pytest_configure(SimpleNamespace(pluginmanager=manager, workerinput=given))

facts.cases = lambda **_: iter(())
FIRST()
from kvblocks.kernels.device import decode, pieces
print(decode.stream_kernel.cache_key, pieces.add_part.cache_key)
"""


@pytest.mark.exhaustive
def test_all_processes_of_a_session_look_for_kernels_by_the_same_keys(tmp_path):
    """Triton's keys depend on which kernel's key a process computes first."""
    pytest.importorskip("triton", reason="triton is not installed")
    known = {}
    for first in ("compile_ahead", "run_item", "configure_tests", "nothing"):
        variables = {"TRITON_CACHE_DIR": str(tmp_path), PATH_VARIABLE: str(tmp_path / "none"), ITEM_VARIABLE: "facts"}
        done = run_module("-c", KEYS.replace("FIRST", first), **variables)
        assert done.returncode == 0, done.stderr
        known.setdefault(done.stdout, []).append(first)
    assert [*known.values()] == [["compile_ahead", "run_item", "configure_tests"], ["nothing"]]


def pack_by_hand(tmp_path):
    """A packed cache of one kernel, as Triton's own cache manager writes it. The folder is gone afterwards."""
    from triton.runtime.cache import FileCacheManager

    from bench.gpu_session import ahead

    folder = tmp_path / "before"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        manager = FileCacheManager("KEY")
        parts = {name: manager.put(content, name) for name, content in (("k.json", "{}"), ("k.cubin", b"machine code"))}
        manager.put_group("k.json", parts)
    ahead.pack(folder, tmp_path / "kernels.tar.xz")
    shutil.rmtree(folder)
    return tmp_path / "kernels.tar.xz"


def test_an_unpacked_cache_is_found_where_it_is_now(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime.cache import FileCacheManager

    from bench.gpu_session import ahead

    packed, folder = pack_by_hand(tmp_path), tmp_path / "after"
    monkeypatch.chdir(tmp_path)
    assert ahead.unpack(packed, Path("after")) and capsys.readouterr().out == ""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    group = FileCacheManager("KEY").get_group("k.json")
    assert group == {name: str(folder / "KEY" / name) for name in ("k.json", "k.cubin")}
    assert Path(group["k.cubin"]).read_bytes() == b"machine code"


@pytest.mark.exhaustive
def test_draws_are_compiled_ahead():
    """The engine's warm-up draws, too. Nothing is compiled here."""
    pytest.importorskip("triton", reason="triton is not installed")
    program = "from bench.gpu_session import ahead\nprint(*ahead.record_engine('sm90', max_num_seqs=1).specialisations)"
    found = run_module("-c", program)
    assert "draw_kernel" in found.stdout, found.stdout + found.stderr


def test_a_cache_that_is_no_use_is_told(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from bench.gpu_session import ahead

    packed = pack_by_hand(tmp_path)
    whole = packed.read_bytes()
    broken = {"half": whole[: len(whole) // 2], "empty": b"", "text": b"not packed"}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "no manifest", "w:xz") as archive:
        archive.add(tmp_path / "text", "KEY/k.cubin")
    for name in (*broken, "no manifest", "missing"):
        assert not ahead.unpack(tmp_path / name, tmp_path / f"{name}, unpacked")
        told = capsys.readouterr().out
        assert told.startswith(f"--cache: expected a file of bench.gpu_session.ahead, got {tmp_path / name} (")
        assert told.endswith("): everything is compiled anew\n")
    monkeypatch.setattr(ahead, "manifest", lambda: {"triton": "3.6.0", "python": "3.12"})
    assert not ahead.unpack(packed, tmp_path / "other")
    assert "--cache: expected one made by {'triton': '3.6.0'" in capsys.readouterr().out


def test_a_session_unpacks_its_cache_outside_of_its_results(tmp_path, monkeypatch, capsys):
    """And runs without it if there is none."""
    pytest.importorskip("triton", reason="triton is not installed")
    packed, places = pack_by_hand(tmp_path), []

    def run(session, wanted):
        cache = os.environ.get("TRITON_CACHE_DIR")
        content = sorted(one.name for one in Path(cache).iterdir()) if cache else []
        places.append((cache, [one.name for one in wanted], content))
        return 0

    monkeypatch.setattr(Session, "run", run)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for name in ("missing", packed.name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            options = ("--items", "engine", "--cache", str(tmp_path / name))
            assert command.main(["--out", str(tmp_path / "out"), *options]) == 0
    (without, wanted, _), (cache, _, content) = places
    assert without is None and wanted == ["facts", "engine"], "every session says where it runs"
    assert content == ["KEY", "kvblocks-session.json"] and not Path(cache).exists(), "it is deleted at the end"
    assert list((tmp_path / "out").iterdir()) == []
    assert "everything is compiled anew" in capsys.readouterr().out
