"""The routing that bench.fleet compares: round robin, SGLang's router, and an index of cached blocks."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import httpx2

from bench.fleet.servers import Server
from bench.ports import free_ports
from examples.route_by_prefix import Errand, Index, MirrorIndex, Router

SGLANG_FLAGS = (
    "--health-check-interval-secs",
    "1",
    "--health-success-threshold",
    "1",
    "--cb-timeout-duration-secs",
    "2",
)
"""Options of SGLang's router that differ from its defaults. It checks its workers every second, as runs are short."""


@dataclass(frozen=True)
class Sent:
    """Where a request goes. worker: None if an external router decides. errand: for `Precise` to finish."""

    url: str
    worker: str | None = None
    errand: Errand | None = None


class Route(Protocol):
    """Says where each request goes."""

    needs_tokens: bool

    def send(self, tokens: list[int], max_tokens: int) -> Sent:
        """Choose a worker. Raises LookupError if none answers."""

    def finish(self, sent: Sent) -> None:
        """Note that a request was answered or failed."""

    def note(self, worker: str, *, is_up: bool) -> None:
        """Note that a worker doesn't answer, or answers again."""


class RoundRobin:
    """The workers in turn."""

    needs_tokens = False

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers, self._up = servers, dict.fromkeys(servers, True)
        self._order = list(servers)

    def send(self, tokens: list[int], max_tokens: int) -> Sent:
        """As `Route` says."""
        del tokens, max_tokens
        for name in self._order:
            if self._up[name]:
                self._order.remove(name)
                self._order.append(name)
                return Sent(self._servers[name].worker.url, name)
        raise LookupError("expected a worker that answers, got none")

    def finish(self, sent: Sent) -> None:
        """As `Route` says."""

    def note(self, worker: str, *, is_up: bool) -> None:
        """As `Route` says."""
        self._up[worker] = is_up


class Precise:
    """The worker with the least left to compute, chosen by the router of examples/."""

    needs_tokens = True

    def __init__(self, servers: Mapping[str, Server], index: Index) -> None:
        self._servers, self.index = servers, index
        self._router = Router(index, servers)

    def send(self, tokens: list[int], max_tokens: int) -> Sent:
        """As `Route` says."""
        errand = self._router.send(tokens, max_tokens=max_tokens)
        return Sent(self._servers[errand.worker].worker.url, errand.worker, errand)

    def finish(self, sent: Sent) -> None:
        """As `Route` says."""
        if sent.errand is not None:
            self._router.finish(sent.errand)

    def note(self, worker: str, *, is_up: bool) -> None:
        """As `Route` says."""
        if is_up:
            self._router.note_up(worker)
        else:
            self._router.note_down(worker)


class Routed:
    """An external router at a URL."""

    needs_tokens = False

    def __init__(self, url: str) -> None:
        self._sent = Sent(url)

    def send(self, tokens: list[int], max_tokens: int) -> Sent:
        """As `Route` says."""
        del tokens, max_tokens
        return self._sent

    def finish(self, sent: Sent) -> None:
        """As `Route` says."""

    def note(self, worker: str, *, is_up: bool) -> None:
        """As `Route` says."""


@contextmanager
def precise(servers: Mapping[str, Server], block_size: int) -> Iterator[Precise]:
    """Route by our own mirror. It knows all workers before this returns."""
    index = MirrorIndex({name: server.worker for name, server in servers.items()}, block_size)
    try:
        wait_until(lambda: index.find([0], None) is not None and all(map(index.client.mirror.is_complete, servers)))
        yield Precise(servers, index)
    finally:
        index.close()


@contextmanager
def sglang(servers: Mapping[str, Server], python: str) -> Iterator[Routed]:
    """SGLang's router, cache-aware. python: the interpreter of an environment that has it."""
    port, metrics = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "cache_aware", "--prometheus-port", str(metrics), "--log-level", "warn", *SGLANG_FLAGS]
    command += ["--worker-urls", *(server.worker.url for server in servers.values())]
    environment = {**os.environ, "PYTHONPATH": ""}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)}: ended with status {process.returncode}")
        try:
            workers = httpx2.get(f"{url}/workers", trust_env=False).json()["workers"]
        except httpx2.TransportError:
            return False
        return len(workers) == len(servers)

    try:
        wait_until(is_ready)
        yield Routed(url)
    finally:
        process.kill()
        process.wait()


def wait_until(is_so: object, seconds: float = 60.0) -> None:
    """Wait until `is_so` answers true. Raises RuntimeError after `seconds`."""
    assert callable(is_so)
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError(f"expected all workers to be known within {seconds:g} s")
        time.sleep(0.05)
