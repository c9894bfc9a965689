"""`kvblocks serve --record`: a line a request, and no request fails for it."""

import os
import signal

import httpx2
import pytest
from server.server_harness import running_server, serving, tiny_loaded

from kvblocks.replay.readers import read_trace


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


def ask(url, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True} | more
    return httpx2.post(f"{url}/completions", json=body, timeout=60)


def test_each_prompt_is_a_line_with_its_prefix_and_its_end(model, tmp_path):
    path = tmp_path / "trace.jsonl"
    with running_server(model, name="tiny", record=path) as server:
        url = f"{server.url}/v1"
        for prompt in ([*range(5, 45)], [*range(5, 37), 99, 98], [7]):
            assert ask(url, prompt).status_code == 200
        assert ask(url, [*range(5, 45)], n=2, temperature=1).status_code == 200
        assert ask(url, [*range(5, 45)], cache_salt="own").status_code == 200
        server.wait_until_idle()
        metrics = httpx2.get(f"{server.url}/metrics", timeout=60).text
    assert "kvblocks_recorded_requests_total 5.0" in metrics
    assert "kvblocks_unrecorded_requests_total 0.0" in metrics
    trace = read_trace(path)
    prompts = [trace.blocks_of(request).tolist() for request in range(trace.num_requests)]
    assert prompts == [[0, 1], [0, 1], [], [0, 1], [2, 3]]
    assert trace.block_size == 16
    assert trace.outputs.tolist() == [3] * 5
    assert trace.stops == ["length"] * 5
    assert (trace.durations > 0).all()
    assert [tenant is None for tenant in trace.tenants] == [True] * 4 + [False]


def test_a_disk_that_is_gone_costs_the_record_and_no_request(model, tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    with running_server(model, name="tiny", record=path) as server:
        monkeypatch.setattr("kvblocks.replay.recorder.os.fstat", broken)
        for _ in range(2):
            assert ask(f"{server.url}/v1", [*range(5, 45)]).status_code == 200
        server.wait_until_idle()
        metrics = httpx2.get(f"{server.url}/metrics", timeout=60).text
        monkeypatch.undo()
    assert "kvblocks_unrecorded_requests_total 2.0" in metrics
    assert len(path.read_text().splitlines()) == 1  # what the file is


def broken(_):
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(os.name != "posix", reason="kills a process as POSIX systems do")
def test_kill_9_leaves_whole_lines(tiny_folder, tmp_path):
    path = tmp_path / "trace.jsonl"
    with serving(tiny_folder, "--record", str(path)) as (process, url, lines):
        for number in range(3):
            assert ask(url, [*range(5 + number, 45)], model=tiny_folder.name).status_code == 200
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert any("requests are recorded in" in line for line in lines)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert read_trace(path).num_requests == 3


def test_a_record_that_cannot_be_written_ends_the_command(tiny_folder, tmp_path):
    with (
        pytest.raises(Exception, match="path: expected a file that can be written"),
        running_server(tiny_loaded(tiny_folder), record=tmp_path / "no" / "trace"),
    ):
        pass
