"""What the server keeps of past requests is bounded in bytes, whatever one client asks for, and can be forgotten."""

import asyncio
import gc
import os
import sys
from pathlib import Path

import httpx2
import pytest
from server.server_harness import MODEL, running_server, serving, tiny_loaded

from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.server.access.callers import ANYONE
from kvblocks.server.answer import Answer
from kvblocks.server.arrivals import MAX_BYTES as ARRIVAL_BYTES
from kvblocks.server.kept import BoundedStore, size_of
from kvblocks.server.misses.prompts import MAX_BYTES as PROMPT_BYTES
from kvblocks.server.protocols.messages_body import parse_message
from kvblocks.server.protocols.messages_voice import MessagesVoice
from kvblocks.server.protocols.response_store import MAX_BYTES as RESPONSE_BYTES
from kvblocks.server.protocols.response_store import ResponseStore
from kvblocks.server.protocols.responses_body import parse_response
from kvblocks.server.protocols.responses_voice import ResponsesVoice
from kvblocks.server.requests import parse_chat, parse_completion, parse_warm
from kvblocks.server.run import make_engine
from kvblocks.server.service import Service
from kvblocks.server.settings import CacheSettings, ServerSettings

CONTEXT = 12_482  # with 20 alternatives each, as many log probabilities as one answer may have
FIRST = 50
MOST_MORE_MB = 64.0
LONG = "\N{SNOWMAN}" * 500_000
NAME = "\N{SNOWMAN}" * 1000
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 10_000, "parameters": {"type": "object"}}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory, as Linux tells it")


def resident_mb(pid="self"):
    gc.collect()
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class StubEngine:
    """An engine that computes nothing: each answer is as large as it may be, and done with the next step."""

    def __init__(self, engine):
        self._engine = engine
        self._due = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    @property
    def has_work(self):
        return bool(self._due)

    def submit(self, prompt, *, prompt_index=0, **options):
        read = self._engine._intake.read  # noqa: SLF001
        generations = read(prompt, GenerationOptions(**options), "prompt", prompt_index)
        self._due += generations
        return generations

    def cancel(self, generation):
        self._due.remove(generation)

    def step(self):
        due, self._due = self._due, []
        for generation in due:
            answer = generation.completion = largest(generation)
            if answer.token_ids:
                generation.pieces.append(Piece(generation.prompt_index, 7, answer.text, answer))
        self._engine.scheduler.lookups.forget()
        return due


def largest(generation):
    num_prompt, most = generation.request.sequence.num_prompt_tokens, generation.request.max_tokens
    has_logprobs = generation.sampler.params.logprobs is not None

    def scored(number):
        return [TokenLogprobs(float(token)) for token in range(number)] if has_logprobs else None

    return Completion(
        text="x" * most,
        token_ids=[7] * most,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=0,
        num_computed_tokens=num_prompt,
        ttft_s=0.0,
        finish_reason="length",
        logprobs=scored(most),
        prompt_logprobs=None if generation.scores is None else [TokenLogprobs(float(n)) for n in range(num_prompt)],
    )


def chat(number):
    return [{"role": "user", "content": f"{number}{LONG}"}]


STORE = ResponseStore()
# By kind: the path, the parser, what is sent, and the number of tokens of each prompt.
KINDS = {
    "echoes": (
        parse_completion,
        lambda _: {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 20},
        [CONTEXT],
    ),
    "log probabilities": (
        parse_chat,
        lambda number: {"messages": chat(number), "max_tokens": CONTEXT - 100, "logprobs": True, "top_logprobs": 20},
        [100],
    ),
    "chats with tools": (
        parse_chat,
        lambda number: {"messages": chat(number), "tools": [TOOL] * 20, "max_tokens": 100},
        [CONTEXT - 100],
    ),
    "responses": (
        lambda body: parse_response(body, STORE, ANYONE),
        lambda number: {"input": f"{number}{LONG}", "max_output_tokens": CONTEXT - 100},
        [100],
    ),
    "messages": (
        parse_message,
        lambda number: {"model": MODEL, "max_tokens": CONTEXT - 100, "messages": chat(number)},
        [100],
    ),
    "names": (
        parse_completion,
        lambda number: {"prompt": ["a"] * 99, "cache_salt": f"{number}{NAME}", "prompt_cache_key": f"{number}{NAME}"},
        [64] * 99,
    ),
    "warmed": (
        parse_warm,
        lambda number: {"prompts": [{"token_ids": [1]}] * 99, "cache_salt": f"{number}{NAME}"},
        [64] * 99,
    ),
}


async def ask(service, kind, number):
    """Have one request answered, below HTTP."""
    parse, body, lengths = KINDS[kind]
    asked = parse(body(number)).asked_by(ANYONE)
    answer = Answer(asked, MODEL, (), service.engine.model.tokenizer)
    service.open(asked.slots)
    service.submit(answer, [[(number * 7 + token) % 250 for token in range(length)] for length in lengths])
    while await answer.take():
        pass
    if kind == "responses":
        ResponsesVoice(STORE, answer).whole()
    elif kind == "messages":
        MessagesVoice(answer).whole()


async def grow(service, kind, number):
    """Return how many MB so many requests take, beyond the first ones."""
    service.start()
    try:
        before = 0.0
        for at in range(number):
            if at == FIRST:
                before = resident_mb()
            await ask(service, kind, at)
        return resident_mb() - before
    finally:
        assert await service.stop(60)


@pytest.mark.parametrize("number", [150, pytest.param(2000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_answers_take_no_more_memory_than_is_kept(tiny_folder, kind, number):
    engine = make_engine(tiny_loaded(tiny_folder, CONTEXT + 1), CacheSettings(num_blocks=1000))
    service = Service(StubEngine(engine), ServerSettings(port=0, max_requests=100))
    assert asyncio.run(grow(service, kind, number)) < MOST_MORE_MB


@pytest.mark.exhaustive
def test_sixty_real_answers_take_no_more_memory_than_is_kept(tiny_folder):
    """Each has 60,000 log probabilities: sixty kept whole would be 400 MB, and 115 MB as text."""
    body = {"max_tokens": 0, "echo": True, "logprobs": 20, "model": tiny_folder.name}
    with serving(tiny_folder, "--max-requests", "64") as (process, url, _), httpx2.Client(timeout=120) as http:
        before = 0.0
        for number in range(FIRST + 60):
            if number == FIRST:
                before = resident_mb(process.pid)
            prompts = [[(number + index) % 250] * 250 for index in range(12)]
            response = http.post(f"{url}/completions", json={**body, "prompt": prompts})
            assert response.status_code == 200, response.text[:500]
        assert resident_mb(process.pid) - before < MOST_MORE_MB


def test_all_that_is_kept_is_less_than_the_growth_that_is_allowed():
    assert ARRIVAL_BYTES + PROMPT_BYTES + RESPONSE_BYTES < MOST_MORE_MB * 1e6


def test_values_are_kept_within_both_bounds_and_in_the_order_in_which_they_came():
    kept = BoundedStore(3, 1000)
    for key in "abcd":
        kept.keep(key, "x")
    assert [key for key in "abcd" if kept.get(key) is not None] == ["b", "c", "d"]
    kept.keep("c", "y" * 10)  # it grows, and stays where it is
    assert list(kept.newest_first()) == ["x", "y" * 10, "x"]
    kept.keep("e", "z" * 700)
    assert list(kept.newest_first()) == ["z" * 700, "x"]
    kept.keep("f", "z" * 1000)  # too large by itself: no reason to drop the others
    assert kept.get("f") is None and len(kept) == 2
    kept.keep("e", "z" * 1000)
    assert kept.get("e") is None
    kept.forget(lambda value: value == "x")
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_a_size_counts_what_a_value_refers_to():
    assert size_of(LONG) > 1_000_000
    assert size_of([("a", LONG)]) > size_of(LONG) + sys.getsizeof(()) + sys.getsizeof([])
    assert size_of(TokenLogprobs(0.5, tuple((n, float(n)) for n in range(100)))) > 100 * 56


def test_what_is_forgotten_is_forgotten_everywhere(tiny_folder):
    with running_server(tiny_loaded(tiny_folder)) as server, server.http() as http:
        body = {"model": MODEL, "prompt": [1] * 40, "max_tokens": 1}
        ids = {
            salt: http.post("/v1/completions", json={**body, "cache_salt": salt}).json()["id"] for salt in ("a", "b")
        }
        warmed = {"prompts": [{"token_ids": [2] * 40}], "cache_salt": "a"}
        ids["warmed"] = http.post("/v1/cache/warm", json=warmed).headers["x-request-id"]
        server.wait_until_idle()
        assert http.post("/v1/cache/forget", json={"cache_salt": "a"}).status_code == 200
        found = {name: http.post("/v1/cache/explain", json={"request_id": ids[name]}).status_code for name in ids}
        assert found == {"a": 404, "b": 200, "warmed": 404}
        arrivals = server.service.thread.arrivals
        takers = server.on_thread(lambda: list(arrivals._takers.newest_first()))  # noqa: SLF001
        assert {taker.salt for taker in takers} == {"b"}
