"""Finds the clients that others wrote, and runs SGLang's router. `make test-clients` installs them."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from server.server_harness import wait_for

from bench.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(os.environ.get("KVBLOCKS_CLIENTS_VENV", ROOT / ".venv-clients"))
GUIDELLM = Path(os.environ.get("KVBLOCKS_GUIDELLM_VENV", ROOT / ".venv-guidellm"))
INSTRUCTOR = Path(os.environ.get("KVBLOCKS_INSTRUCTOR_VENV", ROOT / ".venv-instructor"))
VLLM = Path(os.environ.get("KVBLOCKS_VLLM_VENV", ROOT / ".venv-vllm"))
IS_REQUIRED = os.environ.get("KVBLOCKS_CLIENTS") == "required"


def python(venv):
    """The interpreter of an environment, or a skip."""
    path = venv / "bin" / "python"
    if not path.is_file():
        assert not (IS_REQUIRED and venv != VLLM), f"{path}: `make test-clients` should have made it"
        pytest.skip(f"needs {venv}, which `make test-{'vllm' if venv == VLLM else 'clients'}` makes")
    return str(path)


@contextmanager
def routed(policy, *servers):
    """SGLang's router before servers: its URL. It sends a client's key on, and has none of its own."""
    port, metrics = free_ports(2)
    command = [python(CLIENTS), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--prometheus-port", str(metrics), "--log-level", "warn"]
    command += ["--worker-urls", *(server.url for server in servers)]
    environment = {**os.environ, "PYTHONPATH": ""}
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        assert router.poll() is None
        try:
            return len(httpx2.get(f"{url}/workers", trust_env=False).json()["workers"]) == len(servers)
        except httpx2.TransportError:
            return False

    try:
        wait_for(is_ready, 60)
        yield url
    finally:
        router.terminate()
        router.wait(30)
