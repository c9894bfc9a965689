"""Traces over many workers, without a model: hit rates of routing in turn, by session, and by what is cached.

    python -m bench.fleet.traces TRACE [TRACE ...] [--workers 8 16 32 64] [--json FILE] [--picture FILE.svg]

Each trace is replayed on a modelled clock, as `kvblocks replay` does it (docs/replay.md). Each worker has its own
manager, all of the same size. There are three routers:

    round robin   the next worker in turn
    session       the worker that the hash of the request's session names
    precise       the worker with the least left to compute: the request's blocks that aren't cached there, and the
                  blocks that are being computed there (examples/route_by_prefix.py). A mirror that follows the
                  workers' events, encoded and decoded as on the wire, knows what is cached.

Each router runs without and with a store that all workers share. It is a tier of each manager, as with `kvblocks serve
--store`.

If a trace has no times between sessions, they begin every 480 seconds / workers on average, so that more workers have
more to do. Otherwise the trace's times are kept. Without a TRACE the bench replays the sample that ships with kvblocks,
which shows that it runs but proves nothing.

Not shown: time. A request holds its blocks for as long as the trace says, whatever was cached. A load takes no time.
Events arrive before the next request. A request's answer is cached only when the next request has it in its prompt.
"""

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from bench.fleet.growth import measure_growth
from examples.route_by_prefix import RECOMPUTE_WEIGHT, cheapest
from kvblocks import KVCacheManager, Tier
from kvblocks import Sequence as Prompt
from kvblocks.errors import KVBlocksError
from kvblocks.replay.options import parse_range
from kvblocks.replay.pools import STORE, SharedBlocks
from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import ARRIVAL, Agenda, FleetMember, Setup, TraceRun, push_arrivals
from kvblocks.replay.sample import SAMPLE
from kvblocks.replay.trace import Trace, arrival_times, think_times
from kvblocks.wire.codecs import EventBatch
from kvblocks.wire.convert import Converter
from kvblocks.wire.mirror import EventMirror

MEAN_S = 480.0
"""Mean seconds between the beginnings of two sessions with one worker. With n workers it is an n-th of that."""

TOKEN_BYTES = 4
"""Average bytes of a token id in msgpack: 3 or 5 each, in a vocabulary of 128,000."""


@dataclass(frozen=True)
class Case:
    """What to replay. worker_blocks: the blocks of each worker's pool.

    store_blocks: those of the shared store, or None.
    """

    router: str
    num_workers: int
    worker_blocks: int
    store_blocks: int | None
    seed: int = 1


@dataclass
class Row:
    """The results of a case.

    hit_rate, device_hit_rate: shares of the blocks of all prompts, with and without what the store had. balance: the
    computation of the busiest worker, divided by the workers' mean. messages_per_s, bytes_per_s: events of all workers,
    by modelled time. mirror_blocks: what the mirror knew at the end. lookup_us: the router's processor time for a
    request.
    """

    trace: str
    router: str
    num_workers: int
    worker_blocks: int
    store_blocks: int | None
    num_requests: int
    hit_rate: float
    device_hit_rate: float
    computed_blocks: int
    balance: float
    mean_wait_s: float
    p99_wait_s: float
    num_refused: int
    modelled_s: float
    messages_per_s: float
    bytes_per_s: float
    mirror_blocks: int
    lookup_us: float
    wall_s: float


class Fleet:
    """Workers on one clock, and the router that sends them requests."""

    def __init__(self, trace: Trace, case: Case) -> None:
        self.trace, self.case = trace, case
        mean_s = MEAN_S / case.num_workers if trace.times_are_relative else None
        self.arrivals, thinks = arrival_times(trace, mean_s, case.seed), think_times(trace)
        self.agenda = Agenda()
        self.store = None if case.store_blocks is None else SharedBlocks(case.store_blocks)
        setup = Setup("lru", case.worker_blocks)
        self.runs = [
            TraceRun(trace, self.arrivals, thinks, setup, place=FleetMember(self.agenda, self.manager(), self.store))
            for _ in range(case.num_workers)
        ]
        self.choose: Callable[[int], int] = {
            "round robin": self.in_turn,
            "session": self.by_session,
            "precise": self.by_prefix,
        }[case.router]
        self.events = Events(trace.block_size, case.num_workers) if case.router == "precise" else None
        self.where: dict[int, int] = {}
        self.todo: list[dict[int, int]] = [{} for _ in self.runs]  # by worker: blocks that its running requests compute
        self.num_refused = [0] * case.num_workers
        self.names = KVCacheManager(1, 1)  # gives blocks the names that the workers' managers give them
        self.next = 0
        self.lookup_s = 0.0

    def manager(self) -> KVCacheManager:
        """Return a worker's manager."""
        tiers = []
        if self.case.store_blocks is not None:
            tiers = [Tier(STORE, self.case.store_blocks, num_block_bytes=1, is_shared=True)]
        return KVCacheManager(self.case.worker_blocks, 1, enable_events=self.case.router == "precise", tiers=tiers)

    def replay(self) -> Row:
        """Replay the trace."""
        began = time.perf_counter()
        push_arrivals(self.agenda, self.arrivals.tolist())
        while self.agenda:
            when, kind, request = self.agenda.pop()
            if kind == ARRIVAL:
                self.where[request] = self.choose(request)
            worker = self.where[request]
            self.runs[worker].happen(when, kind, request)
            if self.events is not None:
                for done in self.runs[worker].refused[self.num_refused[worker] :] if kind == ARRIVAL else [request]:
                    self.todo[worker].pop(done, None)
                self.num_refused[worker] = len(self.runs[worker].refused)
                self.events.publish(worker, self.runs[worker].manager)
        return self.row(time.perf_counter() - began)

    def in_turn(self, request: int) -> int:
        """Choose the next worker."""
        del request
        self.next = (self.next + 1) % len(self.runs)
        return self.next

    def by_session(self, request: int) -> int:
        """Always choose the same worker for a session; a request without one counts as a session."""
        return zlib.crc32(f"session {self.trace.sessions[request]}".encode()) % len(self.runs)

    def by_prefix(self, request: int) -> int:
        """Choose the worker with the least left to compute. Ties go to the next in turn."""
        assert self.events is not None
        began = time.thread_time()
        path = self.trace.blocks_of(request)
        found: dict[str, int] = {}
        if len(path):
            salt = self.trace.tenants[self.trace.sessions[request]]
            names = self.names.inspect.block_hashes(Prompt(request, path, salt=salt))
            found = {holder.worker: number for holder, number in self.events.mirror.overlaps(names).items()}
        in_turn = [(self.next + number) % len(self.runs) for number in range(1, len(self.runs) + 1)]
        missing = {str(worker): len(path) - found.get(str(worker), 0) for worker in in_turn}
        chosen = cheapest(missing, {str(worker): sum(self.todo[worker].values()) for worker in in_turn})
        self.next = int(chosen)
        self.lookup_s += time.thread_time() - began
        self.todo[self.next][request] = missing[chosen]
        return self.next

    def row(self, wall_s: float) -> Row:
        """Return the results."""
        outcomes = [run.outcome() for run in self.runs]
        total = max(1, len(self.trace.blocks))
        device = sum(int(one.hits.sum()) for one in outcomes)
        loaded = sum(int(one.loaded.sum()) for one in outcomes)
        lengths = self.trace.ends[1:] - self.trace.ends[:-1]
        computed = [0] * len(self.runs)
        for request, worker in self.where.items():
            one = outcomes[worker]
            computed[worker] += int(lengths[request] - one.hits[request] - one.loaded[request])
        waits = [(one.waits.mean_s, len(one.order), one.waits.p99_s) for one in outcomes]
        num_admitted = max(1, sum(number for _, number, _ in waits))
        modelled_s = max(1.0, max(run.now for run in self.runs) - float(self.arrivals.min()))
        events = self.events
        return Row(
            trace=self.trace.name,
            router=self.case.router,
            num_workers=self.case.num_workers,
            worker_blocks=self.case.worker_blocks,
            store_blocks=self.case.store_blocks,
            num_requests=self.trace.num_requests,
            hit_rate=(device + loaded) / total,
            device_hit_rate=device / total,
            computed_blocks=sum(computed),
            balance=max(computed) / max(1e-9, sum(computed) / len(computed)),
            mean_wait_s=sum(mean * number for mean, number, _ in waits) / num_admitted,
            p99_wait_s=max(p99 for _, _, p99 in waits),
            num_refused=sum(len(one.refused) for one in outcomes),
            modelled_s=modelled_s,
            messages_per_s=0.0 if events is None else events.num_messages / modelled_s,
            bytes_per_s=0.0 if events is None else events.num_bytes / modelled_s,
            mirror_blocks=0 if events is None else sum(map(events.mirror.count, events.mirror.workers)),
            lookup_us=1e6 * self.lookup_s / self.trace.num_requests,
            wall_s=wall_s,
        )


class Events:
    """The workers' events, as batches on the wire, and the mirror that follows them.

    A block of the replay has one token. A real one would have `block_size` of them. The mirror is sent blocks of one
    token, and the bytes of the other tokens are added to the count.
    """

    def __init__(self, block_size: int, num_workers: int) -> None:
        self.mirror = EventMirror()
        self.num_messages = self.num_bytes = 0
        self._converter = Converter()
        self._numbers = [0] * num_workers
        self._more_bytes = (block_size - 1) * TOKEN_BYTES
        for worker in range(num_workers):
            self.mirror.add(str(worker), can_ask=False)
            self._send(worker, [])

    def publish(self, worker: int, manager: KVCacheManager) -> None:
        """Send a worker's events to the mirror."""
        events = manager.take_events()
        if events:
            records = self._converter.convert(events)
            self.num_bytes += self._send(worker, records)
            stored = sum(len(record.token_ids) for record in records if hasattr(record, "token_ids"))
            self.num_bytes += int(stored * self._more_bytes)
            self.num_messages += 1

    def _send(self, worker: int, records: list[Any]) -> int:
        payload = self._converter.codec.encode(EventBatch(0.0, records, 0))
        self.mirror.receive(str(worker), self._numbers[worker], payload)
        self._numbers[worker] += 1
        return len(payload)


ROUTERS = ("round robin", "session", "precise")


def replay(trace: Trace, given: argparse.Namespace) -> Iterator[Row]:
    """Replay a trace in all cases, and print each row as it comes."""
    for num_workers in given.workers:
        for store_blocks in (None, given.store_blocks):
            for router in ROUTERS:
                row = Fleet(trace, Case(router, num_workers, given.worker_blocks, store_blocks)).replay()
                print(
                    f"{row.num_workers:8}{'shared' if store_blocks else 'none':>8}  {row.router:<12}{row.hit_rate:9.3f}"
                    f"{row.device_hit_rate:9.3f}{row.balance:9.2f}{row.mean_wait_s:9.1f}{row.num_refused:9,}"
                    f"{row.messages_per_s:9.2f}{row.bytes_per_s / 1000:9.1f}{row.lookup_us:9.0f}",
                    flush=True,
                )
                yield row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.fleet.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--workers", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--sessions", help="FROM:TO, of each trace that has them, as `kvblocks replay` takes it")
    parser.add_argument(
        "--decode-time",
        type=float,
        default=0.02,
        help="seconds for each token of an answer, where the trace doesn't say how long a request ran (default 0.02)",
    )
    parser.add_argument("--block-size", type=int, default=512, help="tokens; joins the trace's blocks (default 512)")
    parser.add_argument("--worker-blocks", type=int, default=2000, help="blocks of each worker's pool (default 2000)")
    parser.add_argument("--store-blocks", type=int, default=50_000, help="blocks of the shared store (default 50,000)")
    parser.add_argument("--no-growth", action="store_true", help="don't measure how the mirror grows")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--picture", type=Path, help="draw hit rates over workers (SVG; needs kvblocks[bench])")
    given = parser.parse_args(arguments)
    missing = [str(path) for path in given.traces if not path.is_file()]
    if missing:
        sys.exit(
            f"bench.fleet.traces: expected files of traces, got none at {', '.join(missing)}. docs/replay.md says where"
            " there are some; without a TRACE the sample that ships with kvblocks is replayed."
        )
    if not given.traces:
        print("# no TRACE: the made-up sample that ships with kvblocks, which proves nothing")
    facts = conditions(
        traces=[path.name for path in given.traces] or [SAMPLE.name],
        sessions=given.sessions,
        recompute_weight=RECOMPUTE_WEIGHT,
        decode_time_s=given.decode_time,
        block_size=given.block_size,
        num_blocks=given.worker_blocks,
        store_blocks=given.store_blocks,
        mean_seconds_between_sessions=f"{MEAN_S:g} / workers, where the trace says only times inside a session",
        events="one-token blocks on the mirror's wire; bytes counted with block_size tokens of 4 bytes each",
    )
    print_conditions(facts)
    results: list[dict[str, Any]] = []
    growth = [] if given.no_growth else measure_growth()
    for line in growth:
        print(line, flush=True)
    for path in given.traces or [SAMPLE]:
        try:
            trace = read_trace(path, given.block_size)
            trace = trace.with_durations(given.decode_time)
            if given.sessions is not None and trace.times_are_relative:
                trace = trace.take_sessions(*parse_range(given.sessions))
        except KVBlocksError as error:
            sys.exit(f"bench.fleet.traces: {error}")
        print(f"\n{trace.name}: {trace.num_requests:,} requests, {trace.num_unique_blocks:,} different blocks")
        print(
            f"{'workers':>8}{'store':>8}  {'router':<12}{'hits':>9}{'device':>9}{'balance':>9}{'wait s':>9}"
            f"{'refused':>9}{'msg/s':>9}{'kB/s':>9}{'look us':>9}"
        )
        for row in replay(trace, given):
            results.append(asdict(row))
            keep(given.json, facts, results, growth=growth)  # hours of work aren't lost
    if given.picture is not None:
        from bench.fleet.plot import draw

        draw({"conditions": facts, "results": results}, given.picture)


if __name__ == "__main__":
    main()
