"""The clients of bench.serving.soak: ordinary, slow, disconnecting, killed and hostile ones.

Each does one thing after another until it is stopped, and counts the outcomes.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from bench.serving.hostile_bodies import NEW_BODIES, OLD_BODIES

_WORDS = (
    "kettle",
    "lid",
    "cable",
    "filter",
    "boils",
    "litre",
    "colour",
    "clean",
    "warranty",
    "litres",
    "sand",
    "slate",
)
_NUM_FAMILIES = 6
_TIMEOUT_S = 150.0
_JSON = "Content-Type: application/json\r\n"
# The server must answer each of them with a status other than 500, or close the connection.
_HOSTILE = {name: make for name, (_, make) in {**OLD_BODIES, **NEW_BODIES}.items()}


class Clients:
    """The clients of a run. url: the URL of the current server. counts: how often each outcome came."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_restarting = False
        self._random = random.Random(seed)
        self._prefixes = [" ".join(self._random.choices(_WORDS, k=220)) for _ in range(_NUM_FAMILIES)]
        self._asking = {self._ask, self._stream, self._sample, self._featured}
        self._actions: dict[Callable[[httpx2.AsyncClient], Awaitable[str]], int] = {
            self._ask: 34,
            self._stream: 20,
            self._sample: 6,
            self._featured: 8,
            self._hostile: 14,
            self._slow_head: 3,
            self._slow_reader: 4,
            self._killed: 12,
            self._half_a_body: 4,
            self._administer: 3,
        }

    async def run(self, number: int, has_ended: asyncio.Event) -> None:
        """Run `number` clients, each doing one thing after another until `has_ended` is set."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=number)
        async with (
            httpx2.AsyncClient(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(number):
                group.create_task(self._client(http, has_ended))

    async def _client(self, http: httpx2.AsyncClient, has_ended: asyncio.Event) -> None:
        while not has_ended.is_set():
            (action,) = self._random.choices(list(self._actions), list(self._actions.values()))
            url = self.url
            try:
                outcome = await action(http)
            except (httpx2.HTTPError, OSError, EOFError) as error:
                outcome = f"{action.__name__.strip('_')}: {type(error).__name__}"
                if not self.is_restarting and url == self.url and action in self._asking:
                    self.problems.append(f"{outcome}: {error}")
            self.counts[outcome] += 1
            has_room = not outcome.endswith(("429", "503", "ConnectError", "ConnectionRefusedError"))
            await asyncio.sleep(0.01 if has_room else 0.5)

    def _prompt(self) -> str:
        tail = self._random.choices(_WORDS, k=self._random.randrange(1, 30))
        return " ".join([self._random.choice(self._prefixes), *tail])

    def _body(self, **more: Any) -> dict[str, Any]:
        salt = self._random.choice([{}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}])
        return {"max_tokens": self._random.randrange(1, 24), "temperature": self._random.choice([0, 1]), **salt, **more}

    async def _ask(self, http: httpx2.AsyncClient) -> str:
        if self._random.random() < 0.5:
            messages = [{"role": "system", "content": self._prompt()}, {"role": "user", "content": "How much?"}]
            path, body = "/v1/chat/completions", self._body(messages=messages)
        else:
            path, body = "/v1/completions", self._body(prompt=self._prompt())
        return self._status("ask", await http.post(f"{self.url}{path}", json=body))

    async def _sample(self, http: httpx2.AsyncClient) -> str:
        body = self._body(prompt=[self._prompt(), "the kettle"], n=2, temperature=1, stop=["lid"])
        return self._status("sample", await http.post(f"{self.url}/v1/completions", json=body))

    async def _featured(self, http: httpx2.AsyncClient) -> str:
        """Ask for something that costs a server more than a plain answer."""
        schema = {"type": "object", "properties": {"colour": {"enum": ["sand", "slate", self._random.choice(_WORDS)]}}}
        form = {"type": "json_schema", "json_schema": {"name": "kettle", "schema": schema}}
        more: dict[str, Any] = self._random.choice(
            [
                {"response_format": form, "prompt_cache_key": self._random.choice(_WORDS)},
                {"response_format": {"type": "json_object"}, "n": 2, "stream": True},
                {"structured_outputs": {"regex": "(sand|slate) [0-9]{1,3}"}, "logprobs": 2},
                {"logprobs": 5, "echo": True, "prompt_cache_key": self._random.choice(_WORDS)},
                {"logprobs": 20, "stream": True, "presence_penalty": 0.5, "frequency_penalty": 0.5},
                {"min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 1},
            ]
        )
        if self._random.random() < 0.2:
            return self._status("featured", await http.post(f"{self.url}/tokenize", json={"prompt": self._prompt()}))
        return self._status(
            "featured", await http.post(f"{self.url}/v1/completions", json=self._body(prompt=self._prompt(), **more))
        )

    async def _stream(self, http: httpx2.AsyncClient) -> str:
        body = self._body(prompt=self._prompt(), stream=True, stream_options={"include_usage": True})
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            last = ""
            async for line in response.aiter_lines():
                last = line or last
            if response.status_code == 200 and last != "data: [DONE]" and '"error"' not in last:
                self.problems.append(f"a stream ended with {last:.200}")
            return self._status("stream", response, last)

    async def _hostile(self, http: httpx2.AsyncClient) -> str:
        name = self._random.choice(list(_HOSTILE))
        path = self._random.choice(["/v1/completions", "/v1/chat/completions", "/v1/cache/warm", "/v1/cache/pins"])
        headers = {"content-type": "application/json"}
        if self._random.random() < 0.2:
            headers["host"] = "evil.example"
        response = await http.post(f"{self.url}{path}", content=_HOSTILE[name](), headers=headers)
        return self._status("hostile", response)

    async def _administer(self, http: httpx2.AsyncClient) -> str:
        kind = self._random.choice(["pin", "explain", "stats", "metrics", "forget", "warm", "reset"])
        if kind in {"stats", "metrics"}:
            path = "/v1/cache/stats" if kind == "stats" else "/metrics"
            return self._status("administer", await http.get(f"{self.url}{path}"))
        if kind == "reset" and self._random.random() < 0.8:
            kind = "explain"
        bodies: dict[str, tuple[str, dict[str, Any]]] = {
            "pin": ("pins", {"text": self._random.choice(self._prefixes), "ttl_s": 5}),
            "explain": ("explain", {"text": self._prompt()}),
            "forget": ("forget", {"cache_salt": "b"}),
            "warm": ("warm", {"prompts": [self._prompt()]}),
            "reset": ("reset", {}),
        }
        path, body = bodies[kind]
        return self._status("administer", await http.post(f"{self.url}/v1/cache/{path}", json=body))

    async def _killed(self, http: httpx2.AsyncClient) -> str:
        """Reset the connection during an answer, as the system does for a client that is killed."""
        del http
        reader, writer = await self._connect()
        self._send(writer, self._body(prompt=self._prompt(), stream=True, max_tokens=200, ignore_eos=True))
        await asyncio.wait_for(reader.read(200 if self._random.random() < 0.7 else 2000), _TIMEOUT_S)
        _reset(writer)
        return "killed"

    async def _half_a_body(self, http: httpx2.AsyncClient) -> str:
        del http
        _, writer = await self._connect()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{_JSON}Content-Length: 100000\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": "')
        await writer.drain()
        await asyncio.sleep(self._random.random() * 3)
        _reset(writer)
        return "half a body"

    async def _slow_head(self, http: httpx2.AsyncClient) -> str:
        """Send a request's head byte by byte, until the server closes the connection."""
        del http
        reader, writer = await self._connect()
        with contextlib.suppress(OSError):
            for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)
                if reader.at_eof():
                    break
        writer.close()
        return "slow head"

    async def _slow_reader(self, http: httpx2.AsyncClient) -> str:
        """Read an answer a few bytes at a time, and leave before its end."""
        del http
        reader, writer = await self._connect()
        self._send(writer, self._body(prompt=self._prompt(), stream=True, n=2, max_tokens=60, ignore_eos=True))
        for _ in range(self._random.randrange(5, 60)):
            if not await asyncio.wait_for(reader.read(40), _TIMEOUT_S):
                break
            await asyncio.sleep(0.1)
        writer.close()
        return "slow reader"

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = httpx2.URL(self.url)
        return await asyncio.open_connection(url.host, url.port)

    def _send(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{_JSON}Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    def _status(self, kind: str, response: httpx2.Response, said: str | None = None) -> str:
        """Return a word for what came of a request, and note a problem. said: a stream's text."""
        status, said = response.status_code, response.text if said is None else said
        if status == 500 or (kind != "hostile" and status in {400, 404, 413, 422}):
            self.problems.append(f"{kind}: {status} {said:.300}")
        return f"{kind}: {status}"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection as the system does for a process that is killed with data unread."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
