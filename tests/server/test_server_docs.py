"""The guides to the server: their code runs and their commands are taken, as somebody would type them beside one."""

import re
import shlex
from pathlib import Path

import pytest
from server.server_harness import running_server, tiny_loaded

from kvblocks.cli import app as cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "server.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"


def test_the_guide_to_the_server_runs(tiny_folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('"hello"\n{"system": "You are brief."}\n')
    (tmp_path / "hints.json").write_text('{"protocol_version": "0.1", "message_id": "m", "actions": []}')
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    commands = re.findall(r"^    kvblocks (cache .*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 6
    namespace = {"__name__": "guide"}
    with running_server(tiny_loaded(tiny_folder), name="smollm2") as server:
        monkeypatch.setenv("KVBLOCKS_URL", server.url)
        for block in blocks:
            exec(compile(block.replace(URL, server.url), "server.md", "exec"), namespace)
        for command in commands:
            with pytest.raises(SystemExit) as raised:
                cli.main(shlex.split(command))
            assert not raised.value.code, command
        namespace["client"].close()
        namespace["cache"].close()
        namespace["server"].close()
    assert "tokens were cached" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["agents.md", "misses.md"])
def test_other_guides_to_the_server_run(tiny_folder, monkeypatch, capsys, name):
    page = (DOCS / name).read_text(encoding="utf-8")
    namespace = {"__name__": "guide"}
    with running_server(tiny_loaded(tiny_folder, 4096), name="smollm2") as server:
        monkeypatch.setenv("KVBLOCKS_URL", server.url)
        blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block.replace(URL, server.url), name, "exec"), namespace)
        for command in re.findall(r"^    kvblocks (cache .*)$", page, re.MULTILINE):
            with pytest.raises(SystemExit) as raised:
                cli.main(shlex.split(command))
            assert not raised.value.code, command
        for client in ("client", "server"):
            if client in namespace:
                namespace[client].close()
    assert "Traceback" not in capsys.readouterr().err


def test_the_flags_that_the_guide_names_exist(capsys):
    known = set()
    for command in ([], ["serve"], ["chat"], *(["cache", name] for name in ("stats", "pin", "explain", "warm", "top"))):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    pages = [PAGE, *((DOCS / name).read_text(encoding="utf-8") for name in ("agents.md", "limits.md", "misses.md"))]
    named = set(re.findall(r"--[a-z][a-z-]+", "\n".join(pages)))
    assert named <= known, named - known
