"""The commands as users run them: processes of their own, signals, exit codes."""

import os
import re
import signal
import subprocess
import sys

import openai
import pytest
from server.server_harness import ROOT, serving, start, wait_until_synced

from kvblocks.cli import app as cli
from kvblocks.retention.policies import NAMED

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals to processes, which POSIX systems have")


def test_serve_until_sigterm(tiny_folder):
    with serving(tiny_folder, "--grace-period", "20", "--warm-up") as (process, url, lines):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            (model,) = client.models.list().data
            assert model.id == tiny_folder.name
            stream = client.completions.create(
                model=model.id, prompt="hello", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            process.send_signal(signal.SIGTERM)
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
            assert reasons[-1] == "length"  # it was let finish
        assert process.wait(30) == 0
        assert process.stdout.read() == ""
    assert lines[0].startswith("KV cache: 64 blocks of 16 tokens")
    assert "256 tokens together" in lines[0]
    assert re.fullmatch(r"warmed up in \d+\.\d s", lines[1].strip())  # plain torch has no kernels
    assert len(lines) == 3


def test_chat_with_a_server_whose_port_is_taken_until_ctrl_c(tiny_folder, capsys):
    with serving(tiny_folder) as (process, url, lines):
        chat = start("chat", "--url", url, "--max-tokens", "5", stdin=subprocess.PIPE)
        output, error = chat.communicate("hello\nand the hen?\n\nnever\n", timeout=150)
        assert (chat.returncode, error) == (0, "")
        notes = re.findall(r"^\[first token after .* from the cache \(\d+%\)\]$", output, re.MULTILINE)
        assert len(notes) == 2
        assert " 0 of " in notes[0]
        assert " 0 of " not in notes[1]
        port = re.search(r":(\d+)/", url)[1]
        with pytest.raises(SystemExit) as raised:
            cli.main(["serve", "--model", str(tiny_folder), "--port", port])
        assert f"expected a free address of this machine, got 127.0.0.1 port {port}" in capsys.readouterr().err
        assert raised.value.code == 1  # it may be free later
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "Traceback" not in "".join(lines)


def test_chat_in_process_until_the_input_ends(tiny_folder):
    process = start("chat", "--model", str(tiny_folder), "--max-tokens", "5", "--system", "hi", stdin=subprocess.PIPE)
    output, error = process.communicate("hello\n", timeout=150)
    assert (process.returncode, error) == (0, "")
    assert len(re.findall(r"first token after", output)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-blocks", "4", "--kv-cache-memory", "1GiB"], "expected --num-blocks or --kv-cache-memory"),
        (["--host", "0.0.0.0"], "expected --api-key"),
        (["--no-prefix-caching", "--schedule", "grouped"], "--schedule fcfs with --no-prefix-caching"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory: expected bytes"),
        (["--kv-cache-memory", "1KB"], "kv_cache_memory: expected at least"),
        (["--kv-cache-memory", "900TB"], "kv_cache_memory: expected a KV cache within the"),
        (["--num-blocks", "1000000000000"], "num_blocks: expected a KV cache within the"),
        (["--host-cache", "1KB"], "tiers: host: expected at least"),
        (["--disk-cache-size", "1GiB"], "--disk-cache-size: expected --disk-cache, the folder, with it; got none"),
        (
            ["--disk-cache", "kv", "--disk-cache-secret-file", "/no/such"],
            "--disk-cache-secret-file: expected a file that can be read",
        ),
        (["--disk-cache", "/dev/null"], "/dev/null: expected a folder to read and write"),
        (
            ["--model", "org/a-Model.1"],
            "`hf download org/a-Model.1 --local-dir a-Model.1`, and then given as the folder",
        ),
        (["--remember-next-token", "--no-prefix-caching"], "--remember-next-token: expected prefix caching"),
        (["--log-level", "loud"], "--log-level: expected one of debug, info, warning, error, got 'loud'"),
        (["--eviction", "nonsense"], f"--eviction: expected one of {', '.join(NAMED)}, got 'nonsense'"),
        (
            ["--attention", "fast"],
            "--attention: expected one of auto, triton, torch, flash-attn, flashinfer, got 'fast'",
        ),
        (["--attention", "flash-attn"], "attention='flash-attn': expected a CUDA device, got 'cpu'"),
        (["--device", "tpu"], "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        (
            ["--model", "nonsense"],
            "expected a known model (smollm2), a Hugging Face folder or a GGUF file, got 'nonsense'",
        ),
        (["--host", "192.0.2.1", "--api-key", "k"], "expected a free address of this machine, got 192.0.2.1 port"),
    ],
)
def test_what_cannot_be_served_is_an_error_at_start(tiny_folder, arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve", "--model", str(tiny_folder), "--port", "0", *arguments])
    assert raised.value.code == (1 if arguments[-1] == "/dev/null" else 2)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("kvblocks: ")
    assert words in message


@pytest.mark.parametrize("missing", ["starlette", "httpx2"])
def test_without_the_server_extra_it_says_what_to_install(tiny_folder, missing):
    command = ["cache", "stats"] if missing == "httpx2" else ["serve", "--model", str(tiny_folder), "--port", "0"]
    code = f"import sys; sys.modules[{missing!r}] = None; from kvblocks.cli.app import main; main({command!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=150
    )
    assert result.returncode == 1
    assert "pip install 'kvblocks[engine,server]'" in result.stderr
    assert missing in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_salt_is_for_servers(tiny_folder, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["chat", "--model", str(tiny_folder), "--salt", "a"])
    assert raised.value.code == 2
    assert "expected --salt with --url only" in capsys.readouterr().err


def ask(url, prompt):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)
    return answer.choices[0].text, answer.usage.prompt_tokens_details


def test_what_a_killed_server_had_stored_is_found_by_the_next_one(roomy_folder, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    folder = ("--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "8MiB")
    disk = (*folder, "--disk-cache-secret-file", str(secret))
    prompt = [(7 * index) % 250 for index in range(300)]
    with serving(roomy_folder, *disk) as (process, url, lines):
        text, before = ask(url, prompt)
        assert before.cached_tokens == 0
        assert any(re.fullmatch(r"disk cache: \d+ blocks, 0 of them found in .*disk\n", line) for line in lines)
        second = start("serve", "--model", str(roomy_folder), "--port", "0", "--num-blocks", "64", *disk)
        output, error = second.communicate(timeout=150)
        assert (second.returncode, output) == (1, "")
        assert re.fullmatch(r"kvblocks: .*disk: expected a folder that nobody uses, got one of process \d+\n", error)
        wait_until_synced(url, 18)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    monkeypatch.setenv("KVBLOCKS_DISK_CACHE_SECRET", "0123456789abcdef")
    with serving(roomy_folder, *folder) as (process, url, lines):
        assert any(re.fullmatch(r"disk cache: \d+ blocks, 18 of them found in .*disk\n", line) for line in lines)
        again, after = ask(url, prompt)
        assert again == text
        assert (after.cached_tokens, after.cached_tokens_by_tier) == (288, {"device": 0, "disk": 288})
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    monkeypatch.delenv("KVBLOCKS_DISK_CACHE_SECRET")
    with serving(roomy_folder, *folder) as (process, url, lines):  # without the secret nothing of it is trusted
        assert "kept for its return" in "".join(lines)
        assert ask(url, prompt)[1].cached_tokens == 0
