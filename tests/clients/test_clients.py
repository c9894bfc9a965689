"""Clients that others wrote, each run to its end against a server: those of versions.txt and of docs/server.md.

`make test-clients` installs them in .venv-clients, .venv-guidellm and .venv-instructor; vLLM's bench is that of
.venv-vllm, where `make test-vllm` has made it. Without these the tests are skipped. Other folders:
KVBLOCKS_CLIENTS_VENV, KVBLOCKS_GUIDELLM_VENV, KVBLOCKS_INSTRUCTOR_VENV, KVBLOCKS_VLLM_VENV.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest
from clients.clients_help import CLIENTS, GUIDELLM, INSTRUCTOR, IS_REQUIRED, ROOT, VLLM, python, routed
from server.server_harness import MODEL, outcomes, running_server, tiny_loaded

HERE = Path(__file__).resolve().parent
VERSIONS = HERE / "versions.txt"


def run(*command, **more):
    """What a client said, once it has ended well."""
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", **more}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=360, env=environment, cwd=HERE)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(roomy_folder):
    return tiny_loaded(roomy_folder, 4096)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, cache={"deterministic": True}) as running:
        yield running


@pytest.fixture
def asked(server):
    """How many requests a test had finished; none may have failed."""
    before = outcomes(server)
    yield lambda: outcomes(server)["finished"] - before["finished"]
    server.wait_until_idle()
    assert outcomes(server)["failed"] == before["failed"]


@pytest.mark.parametrize("name", ["openai", "langchain", "litellm", "tools_openai", "anthropic"])
def test_a_library_of_pypi(server, asked, name):
    run(python(CLIENTS), str(HERE / f"ask_{name}.py"), f"{server.url}/v1", MODEL)
    assert asked() >= 5


@pytest.mark.parametrize("name", ["langchain", "instructor", "pydantic-ai", "openai-agents"])
def test_a_framework_of_agents_at_its_default(server, asked, name):
    venv = INSTRUCTOR if name == "instructor" else CLIENTS
    run(python(venv), str(HERE / "ask_frameworks.py"), name, f"{server.url}/v1", MODEL)
    assert asked() >= 1


def test_the_command_llm_with_a_tool(server, asked, tmp_path):
    entry = {"model_id": "ours", "model_name": MODEL, "api_base": f"{server.url}/v1", "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    path = str(Path(python(CLIENTS)).with_name("llm"))
    options = ("-m", "ours", "--key", "none", "-T", "llm_version", "-o", "max_tokens", "6", "Which version?")
    run(path, *options, LLM_USER_PATH=str(tmp_path))
    assert asked() >= 1


def test_the_library_of_npm(server, asked):
    python(CLIENTS)
    node = shutil.which("node")
    if node is None:
        assert not IS_REQUIRED, "node: `make test-clients` installs a client with npm, which comes with it"
        pytest.skip("needs Node.js on the path, which runs the client that npm serves")
    run(node, str(HERE / "ask_openai.mjs"), f"{server.url}/v1", MODEL, str(CLIENTS / "npm"))
    assert asked() == 2


def test_the_command_llm(server, asked, tmp_path):
    entry = {"model_id": "ours", "model_name": MODEL, "api_base": f"{server.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    path = str(Path(python(CLIENTS)).with_name("llm"))
    options = ("-m", "ours", "--key", "none", "-o", "max_tokens", "6", "-o", "temperature", "0", "How much?")
    streamed = run(path, *options, LLM_USER_PATH=str(tmp_path))
    whole = run(path, *options, "--no-stream", LLM_USER_PATH=str(tmp_path))
    assert streamed == whole != ""
    assert asked() == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(server, asked, roomy_folder, tmp_path, path):
    command = Path(python(GUIDELLM)).with_name("guidellm")
    kept = tmp_path / "kept.json"
    run(
        *(str(command), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={roomy_folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=5"),
        *("--output", f"kind=json,path={kept}"),
    )
    assert asked() >= 6
    (benchmark,) = json.loads(kept.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 6
    assert not benchmark["metrics"]["request_totals"]["errored"]


_BENCH = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(server, asked, roomy_folder, backend, path):
    """vLLM's own code without its command line, which needs the metadata of a package that isn't for CPUs."""
    said = run(
        *(python(VLLM), "-c", _BENCH, "--backend", backend, "--base-url", server.url, "--endpoint", path),
        *("--model", str(roomy_folder), "--served-model-name", MODEL, "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "40", "--random-output-len", "5", "--num-prompts", "6", "--request-rate", "20"),
    )
    assert re.search(r"Successful requests:\s+6\b", said)
    assert re.search(r"Failed requests:\s+0\b", said)
    assert re.search(r"Total generated tokens:\s+30\b", said)
    assert asked() >= 6


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_sglangs_router_before_two_servers(model, server, policy):
    with running_server(model, cache={"deterministic": True}) as other, routed(policy, server, other) as url:
        before = [outcomes(one)["finished"] for one in (server, other)]
        if policy == "cache_aware":  # the same prompts go to the same server
            run(python(CLIENTS), str(HERE / "ask_openai.py"), f"{url}/v1", MODEL, "routed")
        with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
            for number in range(12):  # nothing in common: to either of them
                body = {"model": MODEL, "prompt": f"{number} {'xyz'[number % 3] * 40}", "max_tokens": 2}
                assert http.post("/v1/completions", json=body).status_code == 200
        after = [outcomes(one)["finished"] for one in (server, other)]
        gained = [late - early for late, early in zip(after, before, strict=True)]
        assert gained == [6, 6] if policy == "round_robin" else sum(gained) >= 12 + 7
        for one in (server, other):
            one.wait_until_idle()
            assert outcomes(one)["failed"] == 0


def test_the_guides_table_has_the_versions_that_are_tested():
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `?([A-Za-z_ -]+?)`?(?: \([^|]*\))? ([\d.]+) \|", page, re.MULTILINE))
    wanted = dict(re.findall(r"^([a-z-]+)==(\S+)$", VERSIONS.read_text(encoding="utf-8"), re.MULTILINE))
    (npm,) = re.findall(r"^# npm: openai@(\S+)$", VERSIONS.read_text(encoding="utf-8"), re.MULTILINE)
    (vllm,) = re.findall(r"^VLLM_VERSION := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    del wanted["torch"]
    assert table == {**wanted, "openai for Node": npm, "vllm bench serve": vllm}
