"""What the server logs of requests, from which level on, and that it counts them by whose mistake they were."""

import logging
import re
import subprocess
import sys

import httpx2
import pytest
from server.server_harness import (
    ROOT,
    connect,
    outcomes,
    read_all,
    running_server,
    serving,
    tiny_loaded,
    wait_for,
)

from kvblocks.server.access.access_log import configure_logging

SECRET = "the cat is in the hat"
LINE = re.compile(r"127\.0\.0\.1 (GET|POST) (\S+) (\d+|gone) \d+\.\d{3}s id=(\S+) tenant=(\S+) client_id=(\S+)")


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), api_key="a-key-of-clients") as running:
        yield running


@pytest.fixture
def http(server):
    headers = {"authorization": "Bearer a-key-of-clients"}
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers) as http:
        yield http
    server.wait_until_idle()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "kvblocks.access"]


def test_each_request_is_a_line_without_prompts_and_keys(http, caplog):
    caplog.set_level("INFO", logger="kvblocks.access")
    body = {"prompt": SECRET, "max_tokens": 2, "request_id": "mine\n2026 INFO forged \x1b[31m"}
    answer = http.post("/v1/completions", json=body).json()
    http.post("/v1/completions", json={**body, "stream": True})
    http.get("/nowhere%0Aforged%20line")
    http.get("/v1/models", headers={"authorization": "Bearer another"})
    wait_for(lambda: len(lines(caplog)) == 4)  # a line comes when the answer has gone out
    said = lines(caplog)
    assert all(LINE.fullmatch(line) for line in said), said
    found = [LINE.fullmatch(line).groups() for line in said]
    assert [(path, status) for _, path, status, *_ in found] == [
        ("/v1/completions", "200"),
        ("/v1/completions", "200"),
        ("/nowhere\\nforged\\x20line", "404"),
        ("/v1/models", "401"),
    ]
    assert found[0][3] == answer["id"]
    assert found[0][5] == "mine\\n2026\\x20INFO\\x20forged\\x20\\x1b[31m"
    everything = "".join(said)
    assert SECRET not in everything
    assert "a-key" not in everything


def test_by_default_no_request_is_logged(http, caplog):
    http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 1})
    assert lines(caplog) == []


def test_a_client_that_asks_for_websockets_is_answered_and_nothing_is_said(server, caplog):
    with connect(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_clients_mistake_is_no_failure(server, http):
    before = outcomes(server)
    wrong = [
        {"prompt": "hello", "max_tokens": 5000},  # found by the engine
        {"prompt": [5000]},
        {"prompt": "the cat " * 100_000},  # before it is encoded
        {"prompt": "a", "colour": "red"},  # before anything
        {"prompt": "a", "model": "gpt-5"},
    ]
    statuses = [http.post("/v1/completions", json=body).status_code for body in wrong]
    assert statuses == [400, 400, 400, 400, 404]
    assert http.post("/v1/chat/completions", content=b"{").status_code == 415
    after = outcomes(server)
    assert after["rejected"] == before["rejected"] + 6
    assert {name: after[name] for name in after if name != "rejected"} == {
        name: before[name] for name in before if name != "rejected"
    }


def test_the_level_says_what_comes_on_stderr(tiny_folder):
    with serving(tiny_folder, "--log-level", "info") as (_, url, said):
        assert httpx2.get(f"{url.removesuffix('/v1')}/health", trust_env=False).status_code == 200
        wait_for(lambda: any("GET /health" in line for line in said))
    (ours,) = [line for line in said if "kvblocks.access" in line]
    assert re.match(r"\d{4}-\d\d-\d\d .* INFO kvblocks\.access: 127\.0\.0\.1 GET /health 200 ", ours)


def test_an_exception_is_logged_with_its_traceback_and_once(capsys):
    configure_logging("warning")
    configure_logging("warning")
    logging.getLogger("kvblocks.server").error("it failed", exc_info=RuntimeError("by chance"))
    error = capsys.readouterr().err
    assert error.count("ERROR kvblocks.server: it failed") == 1
    assert "RuntimeError: by chance" in error


def test_an_engine_without_torch_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvblocks.engine\n"
        "try:\n    kvblocks.engine.Engine\n"
        "except ModuleNotFoundError as error:\n    print(error.name, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == (
        "torch kvblocks.engine: expected the package torch, got none: pip install 'kvblocks[engine]' (in a checkout"
        " that isn't installed: '.[engine]')\n"
    )
