"""Compares cache-aware routers with round robin: three servers of a real model, one of which is killed half-way.

    python -m bench.fleet [--sglang PYTHON] [--dynamo PYTHON] [--model smollm2] [--num-blocks 120] [--json FILE]

60 requests of 12 conversations over 4 system prompts, seeded, go over HTTP to three `kvblocks serve`. A server is
chosen in turn (round robin), by SGLang's router (its cache_aware policy), or as the one with the least left to compute,
which `examples/route_by_prefix.py` knows from the servers' events (by our mirror, or by Dynamo's indexer). Each way has
servers of its own, and their caches begin empty. When half of the requests are answered, one server is killed with
SIGKILL in the middle of its work, and started again on the same ports. A request that fails is sent again. Its time
counts from the first try.

PYTHON: the interpreter of an environment that has `sglang-router`, or `ai-dynamo-runtime`: those of `make test-clients`
and `make test-wire`, say. Without it, that router is left out.
"""

import argparse
import asyncio
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx2

from bench.conditions import UNJUDGED, conditions, keep, print_conditions
from bench.fleet.drive import Drive, Outcome
from bench.fleet.routes import SGLANG_FLAGS, Precise, RoundRobin, Route, precise, sglang, wait_until
from bench.fleet.servers import Server, fleet
from bench.fleet.workload import QUICK, Conversation, Sizes, make_conversations
from bench.ports import free_ports
from bench.serving.serving import percentile
from examples.route_by_prefix import RECOMPUTE_WEIGHT, DynamoIndex
from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
from kvblocks.wire.convert import to_u64

BLOCK_SIZE, NUM_SERVERS, MIN_RATIO = 16, 3, 1.5
Way = Callable[[Mapping[str, Server]], AbstractContextManager[Route]]


@contextmanager
def dynamo(servers: Mapping[str, Server], python: str) -> Iterator[Precise]:
    """The router of examples/ over Dynamo's indexer, which runs as a process of its own."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "dynamo.indexer", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)}: ended with status {process.returncode}")
        try:
            httpx2.get(f"{url}/health", trust_env=False)
        except httpx2.TransportError:
            return False
        return True

    try:
        wait_until(is_up)
        workers = {name: server.worker for name, server in servers.items()}
        yield Precise(servers, DynamoIndex(url, workers, BLOCK_SIZE))
    finally:
        process.kill()
        process.wait()


def ways(given: argparse.Namespace) -> dict[str, Way]:
    """Return the available ways to route."""
    found: dict[str, Way] = {"round robin": lambda servers: nullcontext(RoundRobin(servers))}
    found["precise, our mirror"] = lambda servers: precise(servers, BLOCK_SIZE)
    if given.sglang:
        found["sglang-router, cache_aware"] = lambda servers: sglang(servers, given.sglang)
    if given.dynamo:
        found["precise, Dynamo's indexer"] = lambda servers: dynamo(servers, given.dynamo)
    return found


def measure(
    way: Way, talks: Sequence[Conversation], sizes: Sizes, flags: tuple[str, ...]
) -> tuple[Outcome, bool | None]:
    """Run the conversations over new servers. Also return whether a mirror equals the caches at the end."""
    with fleet(NUM_SERVERS, flags) as servers, way(servers) as route:
        outcome = asyncio.run(Drive(route, servers, sizes, victim="b").run(talks))
        client = getattr(getattr(route, "index", None), "client", None)
        return outcome, None if client is None else all(agrees(client, server) for server in servers.values())


def agrees(client: Any, server: Server) -> bool:
    """Whether a mirror has the same blocks as a worker reports, within a few quiet seconds."""
    for _ in range(100):
        client.receive(0.1)
        said = httpx2.get(f"{server.worker.url}/v1/cache/snapshot", trust_env=False).json()
        names = {to_u64(bytes.fromhex(name)) for stretch in said["stored"] for name in stretch["block_hashes"]}
        if names == {name for held in client.mirror.places(server.name).values() for name in held}:
            return bool(client.mirror.is_complete(server.name))
    return False


def summarize(name: str, outcome: Outcome, *, mirror_agrees: bool | None) -> dict[str, Any]:
    """Return a way's row."""
    answers = [answer for talk in outcome.answers for answer in talk]
    ttft_s = [answer.ttft_s for answer in answers]
    num_prompt, num_cached = sum(a.num_prompt_tokens for a in answers), sum(a.num_cached_tokens for a in answers)
    return {
        "route": name,
        "num_requests": len(answers),
        "num_retries": sum(answer.num_tries - 1 for answer in answers),
        "num_retried_requests": sum(answer.num_tries > 1 for answer in answers),
        "hit_rate": num_cached / num_prompt,
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "ttft_s": [round(value, 3) for value in ttft_s],
        "num_prompt_tokens": num_prompt,
        "num_computed_tokens": num_prompt - num_cached,
        "seconds": outcome.seconds,
        "by_worker": {name: sum(answer.worker == name for answer in answers) for name in "abc"}
        if any(answer.worker for answer in answers)
        else None,
        "death": None if outcome.death is None else vars(outcome.death),
        "mirror_agrees": mirror_agrees,
    }


def targets(rows: Sequence[dict[str, Any]], num_requests: int) -> dict[str, bool]:
    """Return, by the targets' names, whether the rows meet them."""
    base = next(row for row in rows if row["route"] == "round robin")
    met = {"no request is lost": all(row["num_requests"] == num_requests for row in rows)}
    met["answers are the same, whatever the way"] = all(row["is_identical"] for row in rows)
    for row in rows:
        if row["route"].startswith("precise"):
            met[f"{row['route']}: at least {MIN_RATIO} times round robin's hit rate"] = (
                row["hit_rate"] >= MIN_RATIO * base["hit_rate"]
            )
        if row["mirror_agrees"] is not None:
            met[f"{row['route']}: the mirror equals the caches at the end"] = row["mirror_agrees"]
    return met


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows so far."""
    print(f"\n{'':<30}{'hit rate':>9}{'computed':>10}{'TTFT p50':>10}{'p99, s':>9}{'retries':>9}{'whole, s':>10}")
    for row in rows:
        print(
            f"{row['route']:<30}{row['hit_rate']:9.1%}{row['num_computed_tokens']:10,}{row['ttft_p50_s']:10.2f}"
            f"{row['ttft_p99_s']:9.2f}{row['num_retries']:9}{row['seconds']:10.1f}",
            flush=True,
        )


NOT_SHOWN = """\
Not shown: a network, GPUs, other loads. Servers, router and clients share this machine's cores, so times depend on
what else runs; hit rates and computed tokens hardly do. What the killed server had computed of its requests is not
counted."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument("--num-blocks", type=int, default=120, help="blocks of each server's pool (default 120)")
    parser.add_argument("--sglang", help="a Python interpreter with sglang-router")
    parser.add_argument("--dynamo", help="a Python interpreter with ai-dynamo-runtime")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each server (default 1)")
    parser.add_argument("--quick", action="store_true", help="a few short requests: only checks that it runs")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status: 1 if a target was missed."""
    given = read_options(arguments)
    folder = fetch_model(given.model) if given.model in KNOWN_MODELS else Path(given.model)
    sizes = QUICK if given.quick else Sizes()
    talks = make_conversations(sizes)
    facts = conditions(
        model=folder.name,
        num_servers=NUM_SERVERS,
        num_blocks=given.num_blocks,
        block_size=BLOCK_SIZE,
        collector="on",
        threads=given.threads,
        mode="deterministic, greedy",
        workload=vars(sizes) | {"num_requests": sizes.num_requests},
        recompute_weight=RECOMPUTE_WEIGHT,
        sglang_flags=" ".join(SGLANG_FLAGS),
    )
    print_conditions(facts)
    flags = ("--model", str(folder), "--num-blocks", str(given.num_blocks), "--threads", str(given.threads))
    rows: list[dict[str, Any]] = []
    expected: list[list[str]] | None = None
    for name, way in ways(given).items():
        outcome, mirror_agrees = measure(way, talks, sizes, (*flags, "--deterministic"))
        texts = [[answer.text for answer in talk] for talk in outcome.answers]
        expected = expected or texts
        rows.append(summarize(name, outcome, mirror_agrees=mirror_agrees) | {"is_identical": texts == expected})
        show(rows)
        keep(given.json, facts, rows)  # minutes of work aren't lost
    met = {} if given.quick else targets(rows, sizes.num_requests)
    print(f"\n{UNJUDGED}" if given.quick else "")
    for name, is_met in met.items():
        print(f"{'met' if is_met else 'MISSED'}: {name}")
    print(f"\n{NOT_SHOWN}")
    keep(given.json, facts, rows, targets=met)
    return int(not all(met.values()))
