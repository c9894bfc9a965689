"""The last part of the demo on a tiny model: a real server, really killed."""

import io
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvblocks.cli import restart
from kvblocks.cli.restart import FirstAnswer, RestartReport, run_restart
from kvblocks.engine.demo.script import DemoScript
from kvblocks.errors import KVBlocksError

SCRIPT = DemoScript("You answer for a shop that sells kettles. " * 12, ("Is it in?",), "And then?")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="a disk tier locks its folder with fcntl, which POSIX systems have"
)


@pytest.fixture(autouse=True)
def processes_find_kvblocks(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVBLOCKS_API_KEY", "of another server")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()


def test_the_first_answer_after_a_kill_comes_from_the_disk(roomy_folder, tmp_path):
    screen = io.StringIO()
    report = run_restart(str(roomy_folder), Console(file=screen, width=200), script=SCRIPT)
    assert report.is_identical
    assert report.before.num_cached_tokens == report.before.num_disk_tokens == 0
    assert report.before.num_prompt_tokens > 256
    assert report.after.num_disk_tokens == report.after.num_cached_tokens
    assert report.after.num_cached_tokens >= (report.after.num_prompt_tokens - 1) // 16 * 16
    shown = screen.getvalue()
    assert shown.count("> Is it in?") == 2
    assert "[0 of " in shown
    assert f"[{report.after.num_cached_tokens} of " in shown
    assert "identical: yes" in shown
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_server_that_does_not_start_ends_the_act_with_what_it_said(tmp_path):
    with pytest.raises(KVBlocksError, match=r"its end with status \d+\. It said: .*/no/such/folder"):
        run_restart("/no/such/folder", Console(file=io.StringIO()), script=SCRIPT)
    assert list((tmp_path / "temp").iterdir()) == []


def test_what_is_not_stored_in_time_is_told(roomy_folder, monkeypatch, tmp_path):
    wait = restart._wait_until_stored  # noqa: SLF001
    monkeypatch.setattr(restart, "_wait_until_stored", lambda client, _: wait(client, 1000))
    monkeypatch.setattr(restart, "_STORED_S", 0.3)
    with pytest.raises(KVBlocksError, match=r"expected 1000 blocks on the disk within 0\.3 s, got {"):
        run_restart(str(roomy_folder), Console(file=io.StringIO()), script=SCRIPT)
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_kill_waits_for_a_sync_however_long_that_takes(monkeypatch):
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    def ask(method, path):
        place = {"num_syncs": 3, "num_synced_blocks": 20 if now[0] >= 110 else 4}
        return {"tiers": [{"num_stored_blocks": 20, "place": place}]}

    monkeypatch.setattr(restart, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    restart._wait_until_stored(SimpleNamespace(ask=ask), 18)  # noqa: SLF001
    assert now[0] >= 110


def test_an_interrupt_leaves_no_process_and_no_folder(monkeypatch, tmp_path):
    killed = []

    class Process(restart.subprocess.Popen):
        def kill(self):
            super().kill()
            killed.append(self)

    def interrupt(process, log):
        raise KeyboardInterrupt

    monkeypatch.setattr(restart.subprocess, "Popen", Process)
    monkeypatch.setattr(restart, "_find_url", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_restart("smollm2", Console(file=io.StringIO()), script=SCRIPT)
    (process,) = killed
    assert process.returncode is not None
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_difference_is_told():
    one = FirstAnswer("a", 10, 0, 0, 1.0)
    other = FirstAnswer("b", 10, 8, 8, 0.5)
    assert not RestartReport(one, other).is_identical
    assert RestartReport(one, other).to_json()["identical_output"] is False
