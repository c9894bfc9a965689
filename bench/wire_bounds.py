"""What consumers that ask for replays and don't read cost a publisher and others, and whether that is bounded.

    python -m bench.wire_bounds [--peers 40] [--json FILE] [--quick]

A publisher keeps batches of random blocks. A new mirror is fed from it, before, and then while `--peers` consumers have
asked for replays and for snapshots and read nothing, and after messages that are no requests. Each row has the seconds
until the new mirror is complete, the longest call of `MirrorClient.receive(0.1)`, and, at most while it is fed, the
memory that the process has taken since the start and the bytes of answers on their way. The exit status is 1 if a bound
isn't held.

What it does not show: a network, and who floods the PUB socket, whose waiting batches have no limit in bytes. All run
in one process, so its memory includes the consumers'. It reads /proc, so it runs on Linux.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Self

import zmq

from bench.conditions import conditions, keep, print_conditions
from bench.wire import LOCAL, make_events
from kvblocks.wire import EventPublisher, MirrorClient, Source
from kvblocks.wire.frames import replay_request, snapshot_request

MAX_MEMORY_BYTES = 128 << 20  # 64 MiB of answers at most, and what a mirror takes
MAX_MORE_S = 10.0  # than while nobody else asks: twice the time after which who reads nothing goes
_MOST_S = 60.0
MAX_CALL_S = 1.0
_NUM_ASKS = 20  # of each consumer
_CALL_S = 0.1
_JUNK = (
    [b""],
    [b"", b""],
    [b"", b"x"],
    [b"", b"\xff" * 8],
    [b"", b"a" * 60_000],
    [b"x"] * 50,
    [b"", b"\x92" + b"\x91" * 5000],
    [b"", b"a" * 70_000],
)


def resident_bytes() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


class Deaf:
    """Consumers that ask and never read. Close it."""

    def __init__(self, publisher: EventPublisher) -> None:
        assert publisher.replay_endpoint is not None
        self._endpoint = publisher.replay_endpoint
        self._epoch = publisher.epoch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []  # a socket that nobody holds is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def ask(self, num_peers: int, *, snapshots: bool) -> None:
        """Ask from so many new connections, `_NUM_ASKS` times from each."""
        for _ in range(num_peers):
            peer = self._connect()
            for request in range(_NUM_ASKS):
                peer.send_multipart(snapshot_request(request) if snapshots else replay_request(self._epoch))

    def send_junk(self) -> None:
        """Send what is no request, each from a connection of its own."""
        for parts in _JUNK:
            self._connect().send_multipart(parts)

    def _connect(self) -> "zmq.Socket[bytes]":
        peer = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
        peer.connect(self._endpoint)
        self._peers.append(peer)
        return peer


def follow(publisher: EventPublisher) -> dict[str, float]:
    """Feed a new mirror until it is complete, or for a minute, and return what a row has."""
    row = {"complete_s": 0.0, "longest_call_s": 0.0, "memory_bytes": 0, "answer_bytes": 0}
    start_s = time.monotonic()
    with MirrorClient({"w": Source(publisher.endpoint, publisher.replay_endpoint)}) as client:
        while (now_s := time.monotonic()) - start_s < _MOST_S:
            client.receive(_CALL_S)
            call_s, answer_bytes = time.monotonic() - now_s, publisher.num_answer_bytes
            found = {"longest_call_s": call_s, "memory_bytes": resident_bytes(), "answer_bytes": answer_bytes}
            row |= {name: max(row[name], value) for name, value in found.items()}
            if client.mirror.is_complete("w") and (client.mirror.number("w") or 0) >= publisher.number:
                break
    return row | {"complete_s": time.monotonic() - start_s}


def attack(num_peers: int, num_batches: int) -> list[dict[str, Any]]:
    """Run all attacks, one after another, and return a row for each."""
    rows: list[dict[str, Any]] = []
    random = Random(1)
    with ExitStack() as stack:
        publisher = stack.enter_context(EventPublisher(LOCAL, LOCAL))
        for _ in range(num_batches):
            while publisher.num_queued > 100:
                time.sleep(0.001)
            publisher.publish(make_events(random))
        while publisher.num_queued:
            time.sleep(0.001)
        follow(publisher)  # which sets up the process's libraries
        before, deaf = resident_bytes(), stack.enter_context(Deaf(publisher))

        def measure(name: str, num_asked: int) -> None:
            until_s = time.monotonic() + _MOST_S
            while publisher.num_requests < num_asked and time.monotonic() < until_s:
                time.sleep(0.01)
            row: dict[str, Any] = {"item": name, **follow(publisher)}
            row["memory_bytes"] -= before
            rows.append(row)
            print(
                f"{name:<44}{row['complete_s']:>12.2f}{row['longest_call_s']:>12.3f}"
                f"{row['memory_bytes'] / 1e6:>10.0f}{row['answer_bytes'] / 1e6:>10.1f}",
                flush=True,
            )

        measure("nobody else asks", 0)
        for snapshots in (False, True):
            what = "snapshots" if snapshots else "replays"
            num_asked = publisher.num_requests + num_peers * _NUM_ASKS
            deaf.ask(num_peers, snapshots=snapshots)
            measure(f"{num_peers} ask for {what} and read nothing", num_asked)
            measure("the same, a little later", 0)
        deaf.send_junk()
        measure("after messages that are no requests", 0)
    return rows


def problems_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return which bounds the rows don't hold."""
    bounds = {
        "complete_s": rows[0]["complete_s"] + MAX_MORE_S,
        "longest_call_s": MAX_CALL_S,
        "memory_bytes": MAX_MEMORY_BYTES,
    }
    return [
        f"{row['item']}: expected {name} of at most {most:g}, got {row[name]:g}"
        for row in rows
        for name, most in bounds.items()
        if row[name] > most
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print, and return the exit status: 1 if a bound isn't held."""
    parser = argparse.ArgumentParser(
        prog="bench.wire_bounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=40, help="consumers that read nothing, of each kind (40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    parser.add_argument("--quick", action="store_true", help="few batches: only checks that it runs")
    given = parser.parse_args(arguments)
    num_batches = 100 if given.quick else 1500
    facts = conditions(num_peers=given.peers, asks_a_peer=_NUM_ASKS, num_batches=num_batches)
    facts = {key: value for key, value in facts.items() if key != "num_blocks"}
    print_conditions(facts)
    print(f"\n{'':<44}{'complete, s':>12}{'call, s':>12}{'MB more':>10}{'on way':>10}")
    rows = attack(given.peers, num_batches)
    problems = problems_of(rows)
    for problem in problems:
        print(f"NOT HELD: {problem}")
    keep(given.json, facts, rows, problems=problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
