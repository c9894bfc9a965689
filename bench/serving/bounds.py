"""What hostile clients cost others: `kvblocks serve` alone, and under each attack of bench.serving.hostile in turn.

    python -m bench.serving.bounds   # --json FILE, --rounds N, --clients N, --pause S, --attacks "tiny chunks,,digits"

In each turn, small chats of two tokens come one after another, each on a new connection, and so does a question for
/health every 50 ms. In a quiet turn that is all. In a loud turn, another process makes an attack at the same time: most
attacks have `--clients` clients (8), each of which tries again `--pause` seconds (1) after its answer. After every few
loud turns comes a quiet one, since other work on the machine changes from minute to minute. For each turn the bench
keeps the times to first token, all failures, the slowest /health and the server's resident memory, and for loud turns
what the attackers saw.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from bench.conditions import conditions, keep, print_conditions
from bench.random_model import open_model
from bench.serving.hostile import ATTACKS
from bench.serving.hostile_bodies import CHAT
from bench.serving.process import served

LEAST_CHATS, LEAST_S, TURN_S = 5, 3.0, 20.0
"""A turn ends after LEAST_CHATS small chats and LEAST_S seconds, or after TURN_S."""
QUIET_EVERY = 6
TIMEOUT_S = 60.0
HEALTH_S = 0.05
MAX_TTFT_RATIO, MAX_HEALTH_S, MAX_MORE_MB = 3.0, 0.2, 500.0
MAX_CROWDED_HEALTH_S = 3.0
"""The bound of /health under attacks that leave no room: hundreds of connections, which all ask at once."""


@dataclass(frozen=True)
class Clients:
    """The number of clients of an attack that doesn't set its own, and how long each waits after an answer."""

    number: int
    pause_s: float


def resident_mb(pid: int) -> float:
    """Return a process's resident memory in MB. Linux only."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def small_chat(http: httpx2.AsyncClient, number: int) -> float | None:
    """Ask for two tokens, and return the time to the first one; None without an answer. Each prompt is different."""
    body = {"messages": [{"role": "user", "content": f"{number}: hello"}], "max_tokens": 2, "stream": True}
    start_s = time.perf_counter()
    try:
        async with http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                return None
            first_s = None
            async for line in response.aiter_lines():
                if first_s is None and line.startswith("data: {") and '"content"' in line:
                    first_s = time.perf_counter() - start_s
    except httpx2.HTTPError:
        return None
    return first_s


async def watch(http: httpx2.AsyncClient, pid: int, seen: dict[str, Any]) -> None:
    """Request /health and read the memory, until it is cancelled."""
    while True:
        start_s = time.perf_counter()
        try:
            seen["num_failed_health"] += (await http.get("/health")).status_code != 200
        except httpx2.HTTPError:
            seen["num_failed_health"] += 1
        finally:  # also of one that is under way at the end
            seen["health_s"].append(time.perf_counter() - start_s)
        seen["peak_mb"] = max(seen["peak_mb"], resident_mb(pid))
        await asyncio.sleep(HEALTH_S)


@asynccontextmanager
async def under_attack(url: str, name: str, clients: Clients) -> AsyncIterator[dict[str, int]]:
    """Context manager in which a process makes an attack. Yields its outcomes, which are filled in at the end."""
    command = ["-m", "bench.serving.hostile", url, name, str(clients.number), str(clients.pause_s)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    outcomes: dict[str, int] = {}
    try:
        await process.stdout.readline()
        yield outcomes
        process.stdin.close()
        outcomes.update(json.loads(await process.stdout.read()))
    except BaseException:
        process.kill()
        raise
    finally:
        await process.wait()


async def turn(url: str, pid: int, name: str | None, clients: Clients, first: int) -> dict[str, Any]:
    """Run a turn, quiet (name None) or loud. first: the first unused chat number. Returns what was seen."""
    if name is not None:
        async with under_attack(url, name, clients) as outcomes:
            seen = await turn(url, pid, None, clients, first)
        return {**seen, "attack": name, "is_new": ATTACKS[name].is_new, "outcomes": outcomes}
    before_mb = resident_mb(pid)
    seen: dict[str, Any] = {"before_mb": before_mb, "peak_mb": before_mb, "health_s": [], "num_failed_health": 0}
    limits = httpx2.Limits(max_keepalive_connections=0)
    ttft_s: list[float | None] = []
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        watcher = asyncio.create_task(watch(http, pid, seen))
        start_s = time.perf_counter()
        while (seconds := time.perf_counter() - start_s) < TURN_S and (seconds < LEAST_S or len(ttft_s) < LEAST_CHATS):
            ttft_s.append(await small_chat(http, first + len(ttft_s)))
            if ttft_s[-1] is None:
                await asyncio.sleep(HEALTH_S)
        watcher.cancel()
        await asyncio.wait({watcher})
        if not watcher.cancelled():
            watcher.result()
    answered = [one for one in ttft_s if one is not None]
    health_s = seen.pop("health_s")
    rest = {"ttft_s": answered, "num_failed_chats": len(ttft_s) - len(answered), "seconds": seconds}
    median_s = statistics.median(health_s)
    return {"attack": None, **seen, "health_s": max(health_s), "median_health_s": median_s, **rest}


async def measure(url: str, pid: int, names: Sequence[str], rounds: int, clients: Clients) -> list[dict[str, Any]]:
    """Return the turns."""
    turns: list[dict[str, Any]] = []
    await turn(url, pid, None, clients, 0)  # the first request also sets up libraries
    for number in range(rounds):
        for index, name in enumerate(names):
            for what in [name] if index % QUIET_EVERY else [None, name]:
                turns.append({"round": number, **await turn(url, pid, what, clients, 100_000 * (len(turns) + 1))})
                show(turns[-1])
    return turns


def show(one: dict[str, Any]) -> None:
    """Print a turn on a line."""
    ttft_s = one["ttft_s"] or [float("nan")]
    failed = f"; failed: {one['num_failed_health']} /health, {one['num_failed_chats']} chats"
    print(
        f"{one['attack'] or 'quiet':<34} /health at most {one['health_s'] * 1e3:6.0f} ms; TTFT p50"
        f" {statistics.median(ttft_s) * 1e3:6.0f}, max {max(ttft_s) * 1e3:6.0f} ms of {len(one['ttft_s']):3};"
        f" {one['peak_mb']:5.0f} MB{failed if one['num_failed_health'] or one['num_failed_chats'] else ''}"
        f" {one.get('outcomes', '')}",
        flush=True,
    )


def judge(turns: Sequence[dict[str, Any]]) -> list[str]:
    """Return the attacks under which a bound was exceeded. Compares all turns of an attack with all quiet turns."""
    quiet = [turn for turn in turns if turn["attack"] is None]
    quiet_s = statistics.median([seconds for turn in quiet for seconds in turn["ttft_s"]])
    problems = []
    for name in dict.fromkeys(turn["attack"] for turn in turns if turn["attack"] is not None):
        loud = [turn for turn in turns if turn["attack"] == name]
        all_s = [seconds for turn in loud for seconds in turn["ttft_s"]]
        leaves_room = ATTACKS[name].leaves_room
        ratio = statistics.median(all_s) / quiet_s if all_s else 0.0
        has_failed = sum(turn["num_failed_health"] + leaves_room * turn["num_failed_chats"] for turn in loud) > 0
        health_s = max(turn["health_s"] for turn in loud)
        more_mb = max(turn["peak_mb"] - turn["before_mb"] for turn in loud)
        is_late = (
            ratio >= MAX_TTFT_RATIO or health_s >= MAX_HEALTH_S if leaves_room else health_s >= MAX_CROWDED_HEALTH_S
        )
        if has_failed or is_late or more_mb > MAX_MORE_MB:
            print(f"beyond: {name}: /health at most {health_s:.2f} s, TTFT p50 x {ratio:.2f}, {more_mb:+.0f} MB")
            problems.append(name)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep. Returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.bounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between an answer and the next try")
    parser.add_argument("--attacks", default=",,".join(ATTACKS), help="names of attacks, separated by two commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = conditions(model=options.model, clients=options.clients, pause_s=options.pause, rounds=options.rounds)
    print_conditions(facts)
    names = options.attacks.split(",,")
    with open_model(options.model) as folder, served(str(folder)) as (url, pid):
        turns = asyncio.run(measure(url, pid, names, options.rounds, Clients(options.clients, options.pause)))
    problems = judge(turns)
    keep(options.json, {**facts, "load_average_at_the_end": round(os.getloadavg()[0], 2)}, turns, problems=problems)
    print("Not shown: other models, machines with more cores (attackers and server share this one's), many addresses.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
