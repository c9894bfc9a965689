"""What a few clients' largest request bodies cost all others: `kvblocks serve` with SmolLM2, without and with them.

    python -m bench.serving.bounds   # --json FILE, --rounds N, --bodies N, --pause S, --kinds "digits,near the bound"

In each turn, small chats of two tokens come one after another, and /health is asked every 50 ms. In a quiet turn that
is all. In a loud turn, `--bodies` clients send large bodies at once, each again `--pause` seconds (1) after its answer,
until the small chats are done. Quiet and loud turns alternate, since other work on the machine changes from minute to
minute. Of each turn the times to first token, the slowest /health, and the server's resident memory are kept. The ratio
compares the medians of loud and of quiet turns.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from bench.conditions import conditions, keep, print_conditions
from bench.serving.process import served

NUM_CHARS = 3_900_000
NUM_CHATS, TURN_S = 20, 60.0
"""How many small chats a turn has, and the seconds after which it begins no more."""
TIMEOUT_S = 900.0
HEALTH_S = 0.05
MAX_TTFT_RATIO, MAX_HEALTH_S, MAX_MORE_MB = 3.0, 1.0, 500.0

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def chat_of(text: str) -> bytes:
    """A chat of one message."""
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).encode()


KINDS: dict[str, tuple[str, bytes]] = {
    "digits": (CHAT, chat_of("1234567890" * (NUM_CHARS // 10))),
    "near the bound": (CHAT, chat_of("1234567890" * 66_000)),  # SmolLM2's bound: context x longest token = 663,552
    "empty lists": (COMPLETION, b'{"prompt": [' + b"[]," * (NUM_CHARS // 3) + b"[]]}"),
    "small messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}] * 110_000}).encode()),
}


@dataclass(frozen=True)
class Senders:
    """Clients with large bodies: how many, and how long each waits after an answer."""

    number: int
    pause_s: float


def resident_mb(pid: int) -> float:
    """Return a process's resident memory in MB. Linux only."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def small_chat(http: httpx2.AsyncClient, number: int) -> float:
    """Ask for two tokens, and return the time to the first. Each prompt is another one."""
    body = {"messages": [{"role": "user", "content": f"{number}: hello"}], "max_tokens": 2, "stream": True}
    start_s = time.perf_counter()
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"a small chat got {response.status_code}: {(await response.aread())!r:.300}")
        first_s = None
        async for line in response.aiter_lines():
            if (
                first_s is None
                and line.startswith("data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                first_s = time.perf_counter() - start_s
    return time.perf_counter() - start_s if first_s is None else first_s


async def watch(http: httpx2.AsyncClient, pid: int, seen: dict[str, Any]) -> None:
    """Ask /health, and look at the memory, until it is cancelled."""
    while True:
        start_s = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        seen["health_s"] = max(seen["health_s"], time.perf_counter() - start_s)
        seen["peak_mb"] = max(seen["peak_mb"], resident_mb(pid))
        await asyncio.sleep(HEALTH_S)


async def send_bodies(
    http: httpx2.AsyncClient, senders: Senders, kind: str, has_ended: asyncio.Event, outcomes: Counter[str]
) -> None:
    """Send a large body again and again, with a pause after each answer, and count what came of it."""
    while not has_ended.is_set():
        outcomes[await send_body(http, kind)] += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_ended.wait(), senders.pause_s)


async def send_body(http: httpx2.AsyncClient, kind: str) -> str:
    """Send a large body once, and return what came of it."""
    path, body = KINDS[kind]
    try:
        response = await http.post(path, content=body, headers={"content-type": "application/json"})
    except httpx2.HTTPError as error:
        return type(error).__name__
    code = response.json().get("error", {}).get("code") if response.status_code >= 400 else None
    return f"{response.status_code} {code}" if code else str(response.status_code)


async def turn(url: str, pid: int, kind: str | None, senders: Senders, first: int) -> dict[str, Any]:
    """Run a turn, quiet (kind None) or loud, until all bodies are answered. Returns what was seen."""
    seen: dict[str, Any] = {"kind": kind, "before_mb": resident_mb(pid), "health_s": 0.0, "peak_mb": 0.0}
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        watcher = asyncio.create_task(watch(http, pid, seen))
        start_s = time.perf_counter()
        outcomes: Counter[str] = Counter()
        has_ended, ttft_s = asyncio.Event(), list[float]()
        async with asyncio.TaskGroup() as group:
            for _ in range(0 if kind is None else senders.number):
                group.create_task(send_bodies(http, senders, str(kind), has_ended, outcomes))
            while len(ttft_s) < NUM_CHATS and time.perf_counter() - start_s < TURN_S:
                ttft_s.append(await small_chat(http, first + len(ttft_s)))
            has_ended.set()
        watcher.cancel()
        if watcher.done() and not watcher.cancelled():
            watcher.result()
    return {**seen, "ttft_s": ttft_s, "seconds": time.perf_counter() - start_s, "outcomes": dict(outcomes)}


async def measure(url: str, pid: int, kinds: Sequence[str], rounds: int, senders: Senders) -> list[dict[str, Any]]:
    """Return the turns, quiet and loud ones alternating."""
    turns: list[dict[str, Any]] = []
    await turn(url, pid, None, senders, 0)  # the first request also sets up libraries
    for number in range(rounds):
        for kind in kinds:
            for what in (None, kind):
                turns.append({"round": number, **await turn(url, pid, what, senders, 100_000 * (len(turns) + 1))})
                show(turns[-1])
    return turns


def show(one: dict[str, Any]) -> None:
    """Print a turn on a line."""
    ttft_s = one["ttft_s"]
    print(
        f"{one['kind'] or 'quiet':<16} TTFT p50 {statistics.median(ttft_s) * 1e3:7.0f} ms, max {max(ttft_s) * 1e3:7.0f}"
        f" ms of {len(ttft_s):3}; /health at most {one['health_s'] * 1e3:6.0f} ms;"
        f" memory {one['before_mb']:5.0f} -> {one['peak_mb']:5.0f} MB; {one['seconds']:5.1f} s; {one['outcomes']}",
        flush=True,
    )


def judge(turns: Sequence[dict[str, Any]]) -> list[str]:
    """Return what exceeds the bounds. Compares all turns of a kind with all quiet turns."""
    quiet = [turn for turn in turns if turn["kind"] is None]
    quiet_s = statistics.median([seconds for turn in quiet for seconds in turn["ttft_s"]])
    problems = []
    for kind in dict.fromkeys(turn["kind"] for turn in turns if turn["kind"] is not None):
        loud = [turn for turn in turns if turn["kind"] == kind]
        ratio = statistics.median([seconds for turn in loud for seconds in turn["ttft_s"]]) / quiet_s
        health_s = max(turn["health_s"] for turn in loud)
        more_mb = max(turn["peak_mb"] for turn in loud) - quiet[0]["before_mb"]
        print(f"{kind}: TTFT p50 x {ratio:.2f}, /health at most {health_s:.2f} s, memory {more_mb:+.0f} MB")
        if ratio >= MAX_TTFT_RATIO or health_s >= MAX_HEALTH_S or more_mb > MAX_MORE_MB:
            problems.append(kind)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep. Returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.bounds", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bodies", type=int, default=8)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between an answer and the next body")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = conditions(model=options.model, bodies=options.bodies, pause_s=options.pause, rounds=options.rounds)
    print_conditions(facts)
    kinds = options.kinds.split(",")
    with served(options.model) as (url, pid):
        turns = asyncio.run(measure(url, pid, kinds, options.rounds, Senders(options.bodies, options.pause)))
    problems = judge(turns)
    keep(options.json, facts, turns, problems=problems)
    print("Not shown: other models, and machines with more cores; clients and server share this one's.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
