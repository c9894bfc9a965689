"""Real servers for tests: uvicorn in a thread of this process, on a free port of the loopback, with a tiny model."""

import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx2
import openai

from kvblocks.engine import LoadedModel
from kvblocks.server import service_metrics
from kvblocks.server.run import KVBlocksServer, bind, make_engine, make_publisher, make_recorder
from kvblocks.server.service import Service
from kvblocks.server.settings import NO_EVENTS, CacheSettings, ServerSettings

MODEL = "tiny"
ROOT = Path(__file__).resolve().parents[2]
HELLO = {"model": MODEL, "prompt": "hello", "temperature": 0}

service_metrics.PAGE_S = 0.0  # so that a test needn't wait to see what it has done


def tiny_loaded(folder, context=1024):
    """The tiny model with room for longer chats than its folder says."""
    model = LoadedModel.load(folder)
    return replace(model, config=replace(model.config, max_position_embeddings=context))


class RunningServer:
    """A server and how to reach it. `engine` belongs to its thread: look at it when nothing runs."""

    def __init__(self, service, url, server):
        self.service = service
        self.engine = service.engine
        self.url = url
        self.server = server

    def client(self, **options):
        """The real client of OpenAI's; it doesn't retry unless a test wants that."""
        key = self.service.settings.api_key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_client(self, **options):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def http(self):
        return httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def on_thread(self, function):
        """Run a function on the engine's thread, between two steps."""
        return self.service.thread.call(function).result(timeout=60)

    def wait_until_idle(self, seconds=60):
        """Wait until the engine has nothing left, then say whether all is as it should be."""
        end = time.monotonic() + seconds
        while self.service.num_open or self.on_thread(lambda: self.engine.has_work):
            assert time.monotonic() < end, f"{self.service.num_open} answers are still open"
            time.sleep(0.005)
        manager = self.engine.manager
        self.on_thread(manager.check)
        pinned = {block for pin in manager.pins for block in pin.blocks}
        assert manager.num_free_blocks == manager.num_blocks - len(pinned)


@contextmanager
def running_server(model, *, cache=None, events=NO_EVENTS, keep_reasons=True, name=MODEL, **settings):
    """Start a server, and stop it at the end. cache: of `CacheSettings`; settings: of `ServerSettings`."""
    cache_settings = CacheSettings(**({"num_blocks": 256, "num_history_blocks": 100} | (cache or {})))
    server_settings = ServerSettings(**({"port": 0, "grace_s": 5.0} | settings))
    with (
        make_publisher(events) or nullcontext() as publisher,
        make_recorder(server_settings, cache_settings) as recorder,
    ):
        engine = make_engine(model, cache_settings, publisher)
        service = Service(engine, server_settings, keep_reasons=keep_reasons, publisher=publisher, recorder=recorder)
        yield from _run_server(service, server_settings, name)


def _run_server(service, server_settings, name):
    listener = bind(server_settings)
    ready, urls = threading.Event(), []

    def note(url):
        urls.append(url)
        ready.set()

    server = KVBlocksServer(service, name, note)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="uvicorn")
    thread.start()
    assert ready.wait(60)
    try:
        yield RunningServer(service, urls[0], server)
    finally:
        server.stop(0.0)
        thread.join(60)
        assert not thread.is_alive()
        assert not service.thread.is_alive


class Gate:
    """Stands before an engine's model: while it is shut no step gets through. `failure` is raised by the next step."""

    def __init__(self, engine):
        self._run = engine.runner.run
        self._open = threading.Event()
        self._open.set()
        self.failure = None
        self.num_waiting = 0
        self.num_steps = 0
        engine.runner.run = self

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()

    def __call__(self, chunks):
        self.num_steps += 1
        self.num_waiting += 1
        assert self._open.wait(60)
        self.num_waiting -= 1
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self._run(chunks)

    def wait_for_step(self):
        """Wait until a step stands before the gate."""
        wait_for(lambda: self.num_waiting > 0)


def wait_for(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.002)


def start(*arguments, stdin=subprocess.DEVNULL):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "kvblocks", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def serving(folder, *arguments):
    """A `kvblocks serve` of a tiny model, as `serving_as`."""
    return serving_as("--model", str(folder), "--port", "0", "--threads", "1", "--num-blocks", "64", *arguments)


@contextmanager
def serving_as(*arguments):
    """A `kvblocks serve` with these options: its process, its URL, and its lines on stderr."""
    process = start("serve", *arguments)
    lines = []
    found = queue.Queue()

    def read():
        for line in process.stderr:
            lines.append(line)
            match = re.search(r"serving \S+ at (http://\S+)", line)
            if match:
                found.put(match[1])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, found.get(timeout=150), lines  # on a busy machine torch alone takes a minute
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        reader.join(60)
        process.stdout.close()
        process.stderr.close()


def series(url):
    """The values of all series on the metrics' page, by name with labels."""
    page = httpx2.get(f"{url.removesuffix('/v1')}/metrics", timeout=60, trust_env=False).text
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"}


def wait_until_stored(url, tier, num_blocks=1):
    wait_for(lambda: series(url)[f'kvblocks_tier_stored_blocks_total{{tier="{tier}"}}'] >= num_blocks)


def wait_until_synced(url, num_blocks):
    """Wait until a kill loses none of so many blocks. Their disk is the only tier."""

    def is_synced():
        (tier,) = httpx2.get(f"{url}/cache/stats", timeout=60, trust_env=False).json()["tiers"]
        return tier["place"]["num_synced_blocks"] >= num_blocks

    wait_for(is_synced)


def outcomes(server):
    return server.service.metrics.counts()


def in_background(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def raw_request(body, path="/v1/completions", close=False):
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return (head + ("Connection: close\r\n" if close else "") + "\r\n").encode() + body


def connect(server):
    url = httpx2.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=60)


def read_all(connection):
    """All that comes until the other side closes."""
    parts = []
    while part := connection.recv(10_000):
        parts.append(part)
    return b"".join(parts)


@contextmanager
def slow_encoder(server, monkeypatch, error=None):
    """Keep all texts from being encoded until the end; then raise `error`, if there is one. Gives those that wait."""
    encode, gate, begun = server.engine.model.tokenizer.encode, threading.Event(), []

    def wait_and_encode(*arguments, **options):
        begun.append(arguments)
        assert gate.wait(60)
        if error is not None:
            raise error
        return encode(*arguments, **options)

    monkeypatch.setattr(server.engine.model.tokenizer, "encode", wait_and_encode)
    try:
        yield begun
    finally:
        gate.set()
