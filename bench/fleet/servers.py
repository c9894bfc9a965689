"""The servers of a fleet: processes of their own, which can be killed and started again on the same ports."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.ports import free_ports
from examples.route_by_prefix import Worker
from kvblocks.wire import Source

READY_S = 300.0


class Server:
    """A `kvblocks serve` that publishes events. It has the same ports whenever it is started."""

    def __init__(self, name: str, flags: tuple[str, ...]) -> None:
        self.name = name
        port, events, replay = free_ports(3)
        self.worker = Worker(
            f"http://127.0.0.1:{port}", Source(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        )
        ends = ("--kv-events", self.worker.source.endpoint, "--kv-replay", self.worker.source.replay_endpoint or "")
        self._command = [sys.executable, "-m", "kvblocks", "serve", *flags, "--port", str(port), *ends]
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = threading.Event()
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start it, and return at once: see `wait`."""
        self._is_ready.clear()
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def wait(self) -> None:
        """Wait until it answers. Raises RuntimeError if it doesn't."""
        if not self._is_ready.wait(READY_S) or self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{' '.join(self._command)}: expected a server, got none")

    def kill(self) -> None:
        """Kill it at once, without a clean shutdown."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut it down cleanly."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)
            self._process.wait(READY_S)
            self._process = None
        if self._reader is not None:
            self._reader.join(READY_S)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if re.search(r" at http://\S+/v1$", line.rstrip()):
                    self._is_ready.set()
        self._is_ready.set()  # it has ended: wake the waiter, which checks that


@contextmanager
def fleet(num_servers: int, flags: tuple[str, ...]) -> Iterator[dict[str, Server]]:
    """Start `num_servers` servers, and stop them at the end. By name."""
    with ExitStack() as stack:
        servers = {name: Server(name, flags) for name in "abcdefgh"[:num_servers]}
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        for server in servers.values():
            server.wait()
        yield servers
