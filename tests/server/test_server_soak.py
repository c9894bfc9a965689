"""A server under everything at once: a pool that is far too small, clients that leave, and bodies that are wrong.

KVBLOCKS_SOAK_SECONDS=600 makes it last longer; KVBLOCKS_SOAK_SEED chooses another history.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter

import httpx2
import pytest
from server.server_harness import running_server, tiny_loaded

from kvblocks.engine import Engine

MIN_SECONDS = float(os.environ.get("KVBLOCKS_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("KVBLOCKS_SOAK_SEED", "0"))
NUM_REQUESTS, NUM_CLIENTS = 1200, 24
SALTS = (None, "a", "b")
WORDS = ["the", "cat", "is", "in", "a", "hat", "and", "hen", "her", "den"]
MAX_BODY_BYTES = 20_000


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


async def exchange(url, body, *, method="POST", path="/v1/completions", leave_after=None):
    """Send a request; return status and body, or None if we left first.

    leave_after: close the connection after so many reads of the answer (0: as soon as the request is sent).
    """
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        answer = b""
        while leave_after is None or leave_after > 0:
            part = await reader.read(4096)
            answer += part
            if not part:
                head, _, rest = answer.partition(b"\r\n\r\n")
                text = _unchunk(rest) if b"chunked" in head.lower() else rest
                return int(head.split()[1]), text
            leave_after = None if leave_after is None else leave_after - 1
        await asyncio.sleep(random.random() * 0.02)
        return None
    finally:
        writer.close()


def _unchunk(data):
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


class Soak:
    """Clients that do anything, and an account of what came of it."""

    def __init__(self, server, seed):
        self.server = server
        self.url = httpx2.URL(server.url)
        self.random = random.Random(seed)
        self.counts = Counter()
        self.texts = {}
        self.num_sent = 0
        self.start_s = time.monotonic()
        families = [" ".join(self.random.choices(WORDS, k=30)) for _ in range(5)]
        self.prompts = [
            f"{family} {' '.join(self.random.choices(WORDS, k=n))}" for family in families for n in range(8)
        ]
        self.actions = {
            self.answer: 50,
            self.stream: 20,
            self.sample: 8,
            self.leave: 12,
            self.malformed: 4,
            self.oversized: 2,
            self.too_long: 2,
            self.administer: 4,
        }

    async def run(self):
        await asyncio.gather(*(self.client() for _ in range(NUM_CLIENTS)))

    async def client(self):
        while self.goes_on():
            self.num_sent += 1
            (action,) = self.random.choices(list(self.actions), list(self.actions.values()))
            outcome = await action()
            self.counts[outcome] += 1
            if outcome == "queue_full":
                await asyncio.sleep(0.01)

    def goes_on(self):
        return self.num_sent < NUM_REQUESTS or time.monotonic() - self.start_s < MIN_SECONDS

    def body(self, **more):
        prompt = self.random.choice(self.prompts)
        body = {"prompt": prompt, "temperature": 0, "max_tokens": self.random.choice([1, 2, 5, 12, 30])}
        return body | {"ignore_eos": True, "cache_salt": self.random.choice(SALTS)} | more

    async def post(self, body, **options):
        reply = await exchange(self.url, json.dumps(body).encode(), **options)
        return reply if reply is None else (reply[0], reply[1])

    def refused(self, status, text):
        """The name of an error that may come at any time; anything else is a failure of the test."""
        error = json.loads(text)["error"]
        allowed = {(429, "queue_full"), (500, "step_failed"), (503, "pool_exhausted")}
        assert (status, error["code"]) in allowed, (status, error)
        return error["code"]

    def check(self, body, text, usage):
        """Greedy and deterministic: whatever else went on, a prompt has one answer, shorter or longer."""
        known = self.texts.setdefault(body["prompt"], text)
        shorter, longer = sorted([known, text], key=len)
        # What ends in the middle of a character shows it as U+FFFD.
        assert longer.startswith(shorter.rstrip("\ufffd")), (known, text)
        self.texts[body["prompt"]] = longer
        assert usage["completion_tokens"] == body["max_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]

    async def answer(self):
        body = self.body()
        status, text = await self.post(body)
        if status != 200:
            return self.refused(status, text)
        answer = json.loads(text)
        self.check(body, answer["choices"][0]["text"], answer["usage"])
        return "answered"

    async def stream(self):
        body = self.body(stream=True, stream_options={"include_usage": True})
        status, text = await self.post(body)
        if status != 200:
            return self.refused(status, text)
        events = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
        if "error" in events[-1]:
            return self.refused(500, events[-1])
        assert events.pop() == "[DONE]"
        *chunks, usage = map(json.loads, events)
        self.check(body, "".join(chunk["choices"][0]["text"] for chunk in chunks), usage["usage"])
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        return "streamed"

    async def sample(self):
        n = self.random.choice([2, 3])
        body = self.body(n=n, temperature=self.random.choice([0, 1]), seed=3, stop=["zz", "hat "])
        status, text = await self.post(body)
        if status != 200:
            return self.refused(status, text)
        assert len(json.loads(text)["choices"]) == n
        return "sampled"

    async def leave(self):
        stream = self.random.random() < 0.7
        body = self.body(stream=stream, max_tokens=60, n=self.random.choice([1, 1, 2]))
        reply = await self.post(body, leave_after=self.random.choice([0, 1, 2]) if stream else 0)
        return "left" if reply is None else "stayed to the end"

    async def malformed(self):
        body = self.random.choice([b"{", b"\xff", b"[1]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b"[" * 9999])
        status, text = await exchange(self.url, body)
        assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
        return "malformed"

    async def oversized(self):
        status, text = await exchange(self.url, b"x" * self.random.choice([MAX_BODY_BYTES + 1, 3 * MAX_BODY_BYTES]))
        assert (status, json.loads(text)["error"]["code"]) == (413, "too_large")
        return "oversized"

    async def too_long(self):
        status, text = await self.post(self.body(prompt="x" * 2000))
        if status != 400:
            return self.refused(status, text)
        return "too long"

    async def administer(self):
        what = self.random.choice(["stats", "pin", "explain", "reset", "list", "warm"])
        if what in {"stats", "list"}:
            status, text = await exchange(
                self.url, b"", method="GET", path=f"/v1/cache/{'pins' if what == 'list' else 'stats'}"
            )
        elif what == "pin":
            text = self.random.choice(self.prompts)
            pin = {"text": text, "ttl_s": 0.05, "priority": self.random.choice([0, 50, 100])}
            status, text = await self.post(pin, path="/v1/cache/pins")
            status = 200 if status == 409 else status  # over the budget
            if status != 200:
                return self.refused(status, text)
        elif what == "warm":
            status, text = await self.post({"prompts": [self.random.choice(self.prompts)]}, path="/v1/cache/warm")
            if status != 200:
                return self.refused(status, text)
        else:
            body = {} if what == "reset" else {"text": self.random.choice(self.prompts)}
            status, text = await self.post(body, path=f"/v1/cache/{what}")
            if what == "explain" and status != 200:
                return self.refused(status, text)  # its text takes a slot while it is encoded
        assert status == 200, text
        return "administered"


def fail_now_and_then(engine, chance, seed):
    """Let steps of an engine fail by chance. Return the counts of failed steps and of preempted requests' steps."""
    run, chooser, seen = engine.runner.run, random.Random(seed), Counter()

    def run_or_fail(chunks):
        seen["preempted"] += any(chunk.request.num_preemptions for chunk in chunks)
        if chooser.random() < chance:
            seen["failed"] += 1
            raise RuntimeError("by chance")
        return run(chunks)

    engine.runner.run = run_or_fail
    return seen


@pytest.mark.slow
@pytest.mark.timeout(180 + MIN_SECONDS)
@pytest.mark.parametrize("has_tiers", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_thousands_of_requests_with_everything_that_can_go_wrong(model, caplog, tmp_path, has_tiers):
    caplog.set_level("CRITICAL", logger="kvblocks.server")  # hundreds of steps fail on purpose
    tiers = (
        {"host_cache": "256KiB", "disk_cache": str(tmp_path / "disk"), "disk_cache_size": "4MiB"} if has_tiers else {}
    )
    cache = tiers | {"num_blocks": 40, "deterministic": True, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    limits = {"max_requests": 30, "max_body_bytes": MAX_BODY_BYTES}
    with running_server(model, cache=cache, **limits) as server:
        seen = fail_now_and_then(server.engine, 0.008, SEED)
        soak = Soak(server, SEED)
        asyncio.run(soak.run())
        time.sleep(0.06)
        server.wait_until_idle()
        server.on_thread(server.service.thread.pins.expire)
        server.wait_until_idle()
        manager, scheduler = server.engine.manager, server.engine.scheduler
        assert manager.num_free_blocks == 40
        assert (scheduler.running, list(scheduler.waiting)) == ([], [])
        outcomes = server.service.metrics.counts()
        stats = manager.stats
        with server.http() as http:
            assert http.get("/health").status_code == 200
    counts = soak.counts
    assert sum(counts.values()) == soak.num_sent >= NUM_REQUESTS  # every one has been accounted for
    assert outcomes["finished"] >= counts["answered"] + counts["streamed"] + counts["sampled"]
    assert outcomes["cancelled"] > 0
    assert outcomes["timed_out"] == 0
    names = {"answered", "streamed", "sampled", "left", "malformed", "oversized", "too long", "administered"}
    assert all(counts[name] > 0 for name in names), counts  # the history had everything in it
    assert counts["queue_full"] > 0
    assert seen["failed"] > 0
    assert seen["preempted"] > 30
    assert counts["step_failed"] > 0
    assert stats.num_evicted_blocks > 300
    assert stats.num_hit_tokens > 1000
    assert all(tier.num_loaded_blocks > 0 for tier in manager.tiers)


def test_tenants_never_see_each_others_prefixes(model):
    """A tenant asks what another one asked, again and again, and learns nothing by it: no hit, no other answer."""
    reference = Engine(model, num_blocks=64, deterministic=True, enable_prefix_caching=False)
    chooser = random.Random(1)
    secrets = [f"{number} " + " ".join(chooser.choices(WORDS, k=25)) for number in range(40)]
    expected = [completion.text for completion in reference.generate(secrets, max_tokens=6, ignore_eos=True)]

    async def ask(url, number, salt):
        body = {"prompt": secrets[number], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        status, text = await exchange(url, json.dumps(body).encode())
        assert status == 200
        answer = json.loads(text)
        assert answer["choices"][0]["text"] == expected[number]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def run(url):
        numbers = range(len(secrets))
        first = await asyncio.gather(*(ask(url, number, "owner") for number in numbers))
        guesses = await asyncio.gather(*(ask(url, number, "thief") for number in numbers))
        unsalted = await asyncio.gather(*(ask(url, number, None) for number in numbers))
        again = await asyncio.gather(*(ask(url, number, "owner") for number in numbers))
        mixed = await asyncio.gather(
            *(ask(url, number, salt) for number in numbers for salt in ("owner", "thief", f"new-{number}"))
        )
        return first, guesses, unsalted, again, mixed[2::3]

    with running_server(model, cache={"num_blocks": 3000, "deterministic": True}) as server:
        first, guesses, unsalted, again, new = asyncio.run(run(httpx2.URL(server.url)))
        server.wait_until_idle()
    assert set(first) == set(guesses) == set(unsalted) == set(new) == {0}
    assert min(again) >= 48
