"""Runs a server for an hour with clients of all kinds, kills and restarts it, and checks that no resource grows.

    python -m bench.serving.soak --minutes 60      # --model, --clients N, --seed N, --json FILE

`kvblocks serve` with a host tier, a disk tier and a pool that is too small gets requests of all kinds: answers,
streams, samples, hostile bodies, slow heads and readers, connections that are reset during an answer, pins, and resets.
A life is the time of one server process. The first life takes half of the run, and has rests. In a rest the clients
stop; when nothing runs any more, the server's resident memory, descriptors, threads and free blocks are read. Then come
lives that end by kill -9 and by SIGTERM in turns. Each uses the disk folder of the previous one. In every rest the same
prompt is sent, and must get the same answer.

Nothing grows if, from the rest after a third of the first life to the last rest of that life, memory grows by at most
MAX_MORE_MB, and descriptors and threads by at most MAX_MORE. In each rest all blocks have to be free. Linux only.
"""

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from bench.conditions import conditions, keep, print_conditions
from bench.serving.bounds import resident_mb
from bench.serving.soak_clients import Clients

MAX_MORE_MB, MAX_MORE = 48.0, 3
MAX_RESTS = 12
"""The most rests that the first life has."""
MAX_LIVES = 8
REST_S = 120.0
"""How many seconds running requests may go on after a rest begins."""
WATCHED = "The kettle holds 1.2 litres. It is sold in slate, sand and sea green. " * 20
FLAGS = (
    *("--port", "0", "--threads", "1", "--deterministic", "--num-blocks", "256", "--max-requests", "24"),
    *("--max-connections", "64", "--request-timeout", "120", "--grace-period", "10"),
    *("--host-cache", "64MiB", "--disk-cache-size", "512MiB", "--disk-cache"),
)


@dataclass
class Server:
    """A `kvblocks serve` on a disk's folder: its process, its URL, what it said. Make it with `start`."""

    process: "subprocess.Popen[str]"
    url: str = ""
    lines: list[str] = field(default_factory=list)
    _is_ready: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, model: str, disk: Path) -> "Server":
        """Start one and wait until it serves. Raises RuntimeError if it doesn't."""
        command = [sys.executable, "-m", "kvblocks", "serve", "--model", model, *FLAGS, str(disk)]
        server = cls(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        threading.Thread(target=server._read, daemon=True).start()
        if not server._is_ready.wait(120) or not server.url:
            server.process.kill()
            raise RuntimeError(f"the server didn't begin: {server.lines[-5:]}")
        return server

    def stop(self, how: signal.Signals) -> int:
        """Send a signal, and return the status that it ended with."""
        self.process.send_signal(how)
        return self.process.wait(120)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip())
                found = re.search(r" at (http://\S+)/v1$", line.rstrip())
                if found:
                    self.url = found[1]
                    self._is_ready.set()
        self._is_ready.set()


class Soak:
    """One run. rests: what was read in each rest; problems: what went wrong."""

    def __init__(self, model: str, seed: int, num_clients: int, disk: Path) -> None:
        self.rests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.deaths: list[dict[str, Any]] = []
        self._model = model
        self._num_clients = num_clients
        self._disk = disk
        self._begin_s = time.monotonic()
        self._answer: str | None = None
        self.server = Server.start(model, disk)
        self.clients = Clients(self.server.url, seed)

    async def run(self, minutes: float) -> None:
        """The first life, and then others. Raises RuntimeError if a server can't be started."""
        half_s = minutes * 30
        num_rests = max(2, min(MAX_RESTS, int(minutes / 2)))
        for number in range(1, num_rests + 1):
            await self._work(half_s * number / num_rests)
            await self._rest(life=0)
        num_lives = max(1, min(MAX_LIVES, int(minutes / 2)))
        for life in range(1, num_lives + 1):
            begin_s, share_s = half_s * (1 + (life - 1) / num_lives), half_s / num_lives
            await self._work(begin_s + share_s * 0.3, ends_by=signal.SIGKILL if life % 2 else signal.SIGTERM)
            await self._rest(life=life)
            await self._work(begin_s + share_s * 0.8)
        self._end(signal.SIGTERM)

    async def _work(self, until_s: float, *, ends_by: signal.Signals | None = None) -> None:
        """Let the clients work, for at least a few seconds. until_s: seconds since the beginning of the run.

        ends_by: a signal that ends the server at that time; the clients go on with the next server for a while.
        """
        seconds = max(5.0, self._begin_s + until_s - time.monotonic())
        has_ended = asyncio.Event()
        work = asyncio.create_task(self.clients.run(self._num_clients, has_ended))
        await asyncio.sleep(seconds)
        if ends_by is not None:
            self.clients.is_restarting = True
            await asyncio.to_thread(self._restart, ends_by)
            await asyncio.sleep(1.0)
            self.clients.is_restarting = False
            await asyncio.sleep(min(10.0, seconds))
        has_ended.set()
        await work

    def _restart(self, ends_by: signal.Signals) -> None:
        self._end(ends_by)
        self.server = Server.start(self._model, self._disk)
        self.clients.url = self.server.url
        found = [line for line in self.server.lines if line.startswith("disk cache")]
        self.deaths[-1]["next"] = found[0].partition(" in ")[0] if found else "no disk cache"

    def _end(self, ends_by: signal.Signals) -> None:
        if self.server.process.poll() is not None:
            self.problems.append(f"the server had ended with {self.server.process.returncode}")
        status = self.server.stop(ends_by)
        expected = 0 if ends_by is signal.SIGTERM else -ends_by
        if status != expected:
            self.problems.append(f"{ends_by.name}: the server ended with {status}")
        for place, line in enumerate(self.server.lines):
            if line.startswith("Traceback"):
                said = " | ".join(self.server.lines[place - 1 : place + 40])
                self.problems.append(f"the server said: {said}")
        self.deaths.append({"minute": self.minute(), "by": ends_by.name, "num_lines": len(self.server.lines)})

    async def _rest(self, life: int) -> None:
        """Wait until nothing runs, ask the watched prompt, and read what the server has."""
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=REST_S, trust_env=False) as http:
            end_s = time.monotonic() + REST_S
            while _gauge((await http.get("/metrics")).text, "kvblocks_server_open_answers"):
                if time.monotonic() > end_s:
                    self.problems.append(f"minute {self.minute()}: answers were open {REST_S:g} s after their clients")
                    break
                await asyncio.sleep(0.2)
            await asyncio.sleep(6.0)  # pins last 5 seconds
            body = {"prompt": WATCHED, "max_tokens": 16, "temperature": 0}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            stats = await self._settled(http)
        pid, text = self.server.process.pid, answer["choices"][0]["text"]
        self._answer = self._answer or text
        if text != self._answer:
            self.problems.append(f"minute {self.minute()}: expected the answer {self._answer!r}, got {text!r}")
        if stats["num_free_blocks"] != stats["num_blocks"]:
            self.problems.append(f"minute {self.minute()}: {stats['num_blocks'] - stats['num_free_blocks']} not free")
        self.rests.append(
            {
                "minute": self.minute(),
                "life": life,
                "resident_mb": round(resident_mb(pid), 1),
                "num_descriptors": num_entries(f"/proc/{pid}/fd"),
                "num_threads": num_entries(f"/proc/{pid}/task"),
                "num_free_blocks": stats["num_free_blocks"],
                "num_cached_blocks": stats["num_entries"],
                "cached_by_tier": answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"],
                "requests": stats["requests"],
                "tiers": {tier["name"]: tier["num_cached_blocks"] for tier in stats["tiers"]},
            }
        )
        show(self.rests[-1])

    async def _settled(self, http: httpx2.AsyncClient) -> dict[str, Any]:
        """Wait a while until all blocks are free, since tiers store after the answers. Returns the cache's numbers."""
        end_s = time.monotonic() + REST_S
        while True:
            stats: dict[str, Any] = (await http.get("/v1/cache/stats")).json()
            if stats["num_free_blocks"] == stats["num_blocks"] or time.monotonic() > end_s:
                return stats
            await asyncio.sleep(0.2)

    def minute(self) -> float:
        """Minutes since the beginning."""
        return round((time.monotonic() - self._begin_s) / 60, 2)


def num_entries(folder: str) -> int:
    """Return how many entries a folder has."""
    return sum(1 for _ in Path(folder).iterdir())


def _gauge(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def show(rest: dict[str, Any]) -> None:
    """Print a rest on a line."""
    print(
        f"{rest['minute']:6.2f} min, life {rest['life']}: {rest['resident_mb']:7.1f} MB,"
        f" {rest['num_descriptors']} descriptors, {rest['num_threads']} threads, {rest['num_free_blocks']} blocks free,"
        f" {rest['num_cached_blocks']} cached,"
        f" watched {rest['cached_by_tier']}, {rest['requests']}",
        flush=True,
    )


def judge(rests: Sequence[dict[str, Any]]) -> list[str]:
    """Return what grew in the first life, from the rest after a third of it to the last."""
    first = [rest for rest in rests if rest["life"] == 0]
    begin, end = first[len(first) // 3], first[-1]
    problems = []
    for name, most in (("resident_mb", MAX_MORE_MB), ("num_descriptors", MAX_MORE), ("num_threads", MAX_MORE)):
        more = end[name] - begin[name]
        before = f"{begin[name]:g} after {begin['minute']:g} minutes"
        print(f"{name}: {before}, {end[name]:g} after {end['minute']:g}: {more:+g}")
        if more > most:
            problems.append(f"{name}: expected at most {most:g} more, got {more:+g}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and keep. Returns 1 if something grew or went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    asked = {"minutes": options.minutes, "model": options.model, "clients": options.clients, "seed": options.seed}
    facts = conditions(**asked, flags=" ".join(FLAGS))
    facts["num_blocks"] = int(FLAGS[FLAGS.index("--num-blocks") + 1])
    print_conditions(facts)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options.model, options.seed, options.clients, Path(folder))
        try:
            asyncio.run(soak.run(options.minutes))
        finally:
            soak.server.process.kill()
            soak.server.process.wait(60)
            problems = [*soak.problems, *soak.clients.problems, *(judge(soak.rests) if soak.rests else [])]
            counts = dict(sorted(soak.clients.counts.items()))
            print(json.dumps(counts, indent=1))
            more = {"counts": counts, "restarts": soak.deaths, "minutes": soak.minute(), "problems": problems[:50]}
            keep(options.json, facts, soak.rests, num_problems=len(problems), **more)
    for problem in problems[:50]:
        print(f"PROBLEM: {problem}")
    print("Not shown: other models, GPUs, more than one server. Clients and server share this machine's cores.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
