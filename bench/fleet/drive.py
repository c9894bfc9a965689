"""Drives a fleet: holds conversations over HTTP, kills a worker half-way, and resends failed requests."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from bench.fleet.routes import Route, Sent
from bench.fleet.servers import Server
from bench.fleet.workload import Conversation, Sizes

PAUSE_S, MAX_TRIES, TIMEOUT_S = 0.2, 500, 600.0
CHAT = "/v1/chat/completions"


class FailedError(Exception):
    """A request got no complete answer, and is sent again."""


@dataclass
class Answer:
    """One answer. asked_s: when it was asked for the first time. num_tries: how often it was asked."""

    asked_s: float
    first_s: float = 0.0
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_tries: int = 0
    worker: str | None = None

    @property
    def ttft_s(self) -> float:
        """From the first try to the first token of the complete answer."""
        return self.first_s - self.asked_s


@dataclass
class Death:
    """What happened to the worker that was killed, in seconds since the run's beginning."""

    worker: str
    killed_s: float | None = None
    ready_s: float | None = None


@dataclass
class Outcome:
    """The results of a run: each conversation's answers."""

    answers: list[list[Answer]] = field(default_factory=list)
    seconds: float = 0.0
    death: Death | None = None


class Drive:
    """One run. victim: the worker to kill when half of the requests are answered, or None."""

    def __init__(self, route: Route, servers: Mapping[str, Server], sizes: Sizes, victim: str | None) -> None:
        self._route, self._servers, self._sizes = route, servers, sizes
        self._death = None if victim is None else Death(victim)
        self._num_done = 0
        self._killing: asyncio.Task[None] | None = None
        self._start_s = 0.0

    async def run(self, conversations: Sequence[Conversation]) -> Outcome:
        """Run all conversations. Raises RuntimeError for a request that isn't answered at all."""
        # Every request has its own connection, so none is left to a server that died.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as self._http:
            await asyncio.gather(*(self._warm_up(server) for server in self._servers.values()))
            self._start_s = time.perf_counter()
            watcher = asyncio.create_task(self._watch())
            try:
                answers = await asyncio.gather(*map(self._converse, conversations))
                seconds = time.perf_counter() - self._start_s
                if self._killing is not None:
                    await self._killing
            finally:
                watcher.cancel()
        return Outcome(list(answers), seconds, self._death)

    async def _warm_up(self, server: Server) -> None:
        """Send a first request, since that one also sets up a process's libraries, and empty the cache again."""
        url = server.worker.url
        body = {"model": "any", "prompt": [5] * 64, "max_tokens": 2}
        body["model"] = (await self._http.get(f"{url}/v1/models")).json()["data"][0]["id"]
        self._model = body["model"]
        (await self._http.post(f"{url}/v1/completions", json=body)).raise_for_status()
        (await self._http.post(f"{url}/v1/cache/reset", json={})).raise_for_status()

    async def _watch(self) -> None:
        """Look which workers answer, as a router would."""
        while True:
            for name, server in self._servers.items():
                try:
                    status = (await self._http.get(f"{server.worker.url}/health", timeout=5.0)).status_code
                except httpx2.TimeoutException:
                    continue  # it is busy
                except httpx2.TransportError:
                    status = 0
                self._route.note(name, is_up=status == 200)
            await asyncio.sleep(PAUSE_S)

    async def _converse(self, talk: Conversation) -> list[Answer]:
        await asyncio.sleep(talk.start_s)
        messages = [{"role": "system", "content": talk.system}]
        answers = []
        for turn, think_s in zip(talk.turns, (*talk.thinks_s, 0.0), strict=True):
            messages.append({"role": "user", "content": turn})
            answer = await self._ask(messages)
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            self._note_done()
            await asyncio.sleep(think_s)
        return answers

    def _note_done(self) -> None:
        self._num_done += 1
        if self._death is not None and self._num_done == self._sizes.num_requests // 2:
            self._killing = asyncio.create_task(self._kill(self._death))

    async def _kill(self, death: Death) -> None:
        """Kill a worker while it seems to have work, and start it again at once."""
        server = self._servers[death.worker]
        for _ in range(200):
            metrics = (await self._http.get(f"{server.worker.url}/metrics")).text
            if re.search(r"^kvblocks_server_running [1-9]", metrics, re.MULTILINE):
                break
            await asyncio.sleep(0.05)
        death.killed_s = time.perf_counter() - self._start_s
        await asyncio.to_thread(server.kill)
        server.start()
        await asyncio.to_thread(server.wait)
        death.ready_s = time.perf_counter() - self._start_s

    async def _ask(self, messages: list[dict[str, str]]) -> Answer:
        """Ask until there is a whole answer."""
        asked_s, limit = time.perf_counter(), self._sizes.max_tokens
        for number in range(1, MAX_TRIES + 1):
            sent: Sent | None = None
            answer = Answer(asked_s, num_tries=number)
            try:
                tokens = await self._tokenize(messages) if self._route.needs_tokens else []
                sent = self._route.send(tokens, limit)
                answer.worker = sent.worker
                await self._stream(sent.url, messages, answer)
            except (httpx2.TransportError, FailedError, LookupError) as error:
                if sent is not None and sent.worker is not None and isinstance(error, httpx2.TransportError):
                    self._route.note(sent.worker, is_up=False)
                await asyncio.sleep(PAUSE_S)
            else:
                return answer
            finally:
                if sent is not None:
                    self._route.finish(sent)
        raise RuntimeError(f"expected an answer, got none in {MAX_TRIES} tries")

    async def _tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """Ask the workers in turn for a chat's tokens, until one answers."""
        for server in self._servers.values():
            with suppress(httpx2.TransportError):
                response = await self._http.post(f"{server.worker.url}/tokenize", json={"messages": messages})
                if response.status_code == 200:
                    tokens: list[int] = response.json()["tokens"]
                    return tokens
        raise FailedError("expected a worker that answers, got none")

    async def _stream(self, url: str, messages: list[dict[str, str]], answer: Answer) -> None:
        """Ask for a greedy answer as a stream. Raises FailedError unless it comes to its end."""
        body = {"model": self._model, "messages": messages, "max_tokens": self._sizes.max_tokens, "temperature": 0}
        more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        has_ended = False
        async with self._http.stream("POST", url + CHAT, json={**body, **more}) as response:
            if response.status_code != 200:
                raise FailedError(f"status {response.status_code}: {(await response.aread())!r:.300}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _note(answer, json.loads(line.removeprefix("data: ")))
                has_ended = has_ended or line == "data: [DONE]"
        if not has_ended or answer.num_generated_tokens != self._sizes.max_tokens:
            raise FailedError(f"the stream broke off after {answer.text!r}")


def _note(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise FailedError(str(event["error"]))
    for choice in event["choices"]:
        text = choice["delta"].get("content") or ""
        if text and not answer.first_s:
            answer.first_s = time.perf_counter()
        answer.text += text
    usage = event.get("usage")
    if usage:
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        answer.num_generated_tokens = usage["completion_tokens"]
