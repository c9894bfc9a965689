"""The clients of bench.serving: they send requests over HTTP and note when each token came."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from bench.serving.workloads import Conversation, Workload

TIMEOUT_S = 1800.0


@dataclass
class Answer:
    """One answer, with the times of the request, of each token, and of the end, in seconds on one clock."""

    asked_s: float
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From asking to the first token."""
        return self.token_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Outcome:
    """The results of a workload: the answers of each conversation, and the server's counters for it."""

    answers: tuple[tuple[Answer, ...], ...]
    seconds: float
    num_queries: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def num_decoding(self) -> float:
        """How many requests decode at once, on average over the time in which any does: the decodes of a step.

        A request decodes from its first token to its last.
        """
        spans = sorted((one.token_s[0], one.token_s[-1]) for talk in self.answers for one in talk)
        until_s = any_s = 0.0
        for first_s, last_s in spans:
            any_s += max(0.0, last_s - max(first_s, until_s))
            until_s = max(until_s, last_s)
        return sum(last_s - first_s for first_s, last_s in spans) / any_s if any_s else 0.0

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks. Each time it is looked up again when it gets new ones."""
        return self.num_queries - sum(map(len, self.answers))


async def drive(url: str, workload: Workload, num_clients: int | None = None) -> Outcome:
    """Run a workload against the server at `url`, after emptying its cache. Raises RuntimeError for an error.

    num_clients: how many conversations may be under way at once; a further one begins when another has ended.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx2.Timeout(TIMEOUT_S)
    async with httpx2.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False) as http:
        await _warm_up(http)
        before = (await http.get("/v1/cache/stats")).json()
        start_s = time.perf_counter()
        talks = workload.conversations
        client = asyncio.Semaphore(num_clients or len(talks))
        answers = await asyncio.gather(*(_converse(http, talk, start_s, client) for talk in talks))
        seconds = time.perf_counter() - start_s
        after = (await http.get("/v1/cache/stats")).json()
    counts = (after[name] - before[name] for name in ("num_queries", "num_queried_tokens", "num_hit_tokens"))
    return Outcome(tuple(map(tuple, answers)), seconds, *counts)


async def _warm_up(http: httpx2.AsyncClient) -> None:
    """Send a first request, since that one also sets up a process's libraries, and empty the cache again."""
    await _ask(http, "/v1/completions", {"prompt": [5] * 64, "max_tokens": 3})
    (await http.post("/v1/cache/reset", json={})).raise_for_status()


async def _converse(
    http: httpx2.AsyncClient, talk: Conversation, start_s: float, client: asyncio.Semaphore
) -> list[Answer]:
    await asyncio.sleep(max(0.0, start_s + talk.start_s - time.perf_counter()))
    async with client:
        return await _talk(http, talk)


async def _talk(http: httpx2.AsyncClient, talk: Conversation) -> list[Answer]:
    limit = {"max_tokens": talk.max_tokens}
    if not talk.turns:
        return [await _ask(http, "/v1/completions", {"prompt": list(talk.prompt), **limit})]
    messages = [{"role": "system", "content": talk.system}]
    answers = []
    for turn in talk.turns:
        messages.append({"role": "user", "content": turn})
        answer = await _ask(http, "/v1/chat/completions", {"messages": messages, **limit})
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def _ask(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Send a greedy request whose answer streams, a token an event."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(time.perf_counter())
    async with http.stream("POST", path, json={**body, **options, "return_token_ids": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{path}: status {response.status_code}: {(await response.aread())!r:.500}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _note(answer, json.loads(line.removeprefix("data: ")), time.perf_counter())
    answer.end_s = time.perf_counter()
    if len(answer.token_ids) != body["max_tokens"]:
        raise RuntimeError(f"{path}: expected {body['max_tokens']} tokens, got {len(answer.token_ids)}")
    return answer


def _note(answer: Answer, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        raise RuntimeError(f"the server answered with an error: {event['error']}")
    for choice in event["choices"]:
        token_ids = choice.get("token_ids", [])
        answer.token_ids += token_ids
        answer.token_s += [now_s] * len(token_ids)
        answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    usage = event.get("usage")
    if usage:
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
