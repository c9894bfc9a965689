"""Workers, a mirror, and a network that loses, doubles, delays and reorders; in one process and without time."""

import heapq
from itertools import count
from random import Random
from typing import Any

from kvblocks import KVCacheManager, Sequence
from kvblocks.wire import Converter, EventMirror
from kvblocks.wire.convert import to_u64
from kvblocks.wire.frames import SnapshotChunk
from kvblocks.wire.holdings import Location
from kvblocks.wire.ledger import Ledger, Limits

BLOCK = 4
EPOCH_STEP = 1 << 40
MEDIUM = "GPU"


class Worker:
    """An engine with a real manager, and its publisher's ledger. `kill` starts both again."""

    def __init__(self, name: str, random: Random, limits: Limits, codec: str = "vllm") -> None:
        self.name = name
        self.random = random
        self.limits = limits
        self.codec = codec
        self.epochs = count(1)
        self.num_events = 0
        self.sent: list[Any] = []
        self.kill()

    def kill(self, epoch: int | None = None) -> None:
        self.epoch = next(self.epochs) * EPOCH_STEP if epoch is None else epoch
        self.manager = KVCacheManager(24, BLOCK, enable_events=True, hash_algorithm="sha256")
        self.ledger = Ledger(Converter(self.codec), self.limits, self.epoch, 0, 1.0)
        self.running: list[Sequence] = []
        self.names = count()

    def step(self) -> None:
        """One step of an engine: requests come and go, and what changed is published."""
        random = self.random
        for _ in range(random.randrange(1, 4)):
            prefix = [random.randrange(3)] * BLOCK * random.randrange(1, 4)
            tail = [random.randrange(50) for _ in range(random.randrange(1, 14))]
            sequence = Sequence(next(self.names), [*prefix, *tail], salt=random.choice([None, None, "s"]))
            hit = self.manager.get_computed_blocks(sequence)
            if self.manager.allocate_slots(sequence, hit=hit) is not None:
                self.running.append(sequence)
        while self.running and random.random() < 0.7:
            self.manager.free(self.running.pop(random.randrange(len(self.running))))
        if random.random() < 0.01 and not self.running:
            self.manager.reset_prefix_cache()
        events = self.manager.take_events()
        self.num_events += len(events)
        self.ledger.add(events, 1.0)

    def heartbeat(self) -> None:
        self.ledger.add_heartbeat(1.0)

    def send(self, at_most: int = 1 << 30) -> list[tuple[int, bytes]]:
        """Return what the publisher's thread would send now."""
        sent = []
        while len(sent) < at_most and (batch := self.ledger.take()) is not None:
            payload = self.ledger.encode(batch)
            self.ledger.keep(batch.number, payload)
            sent.append((batch.number, payload))
        return sent

    def cached(self) -> dict[Location, frozenset[int]]:
        """What is cached, asked of the manager itself."""
        digests = {block.block_hash for block in self.manager.blocks if block.block_hash is not None}
        held = frozenset(to_u64(digest) for digest in digests)
        group = Location(0, 0, MEDIUM)
        return {group: held} if held else {}


class Network:
    """Carries messages both ways. Its attributes say how badly."""

    def __init__(self, workers: list[Worker], mirror: EventMirror, random: Random, badness: float) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.mirror = mirror
        self.random = random
        self.badness = badness
        self.now = 0.0
        self.queue: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.order = count()
        self.last: dict[str, float] = {}
        for worker in workers:
            mirror.add(worker.name)

    def carry(self, line: str, deliver: Any, *arguments: Any) -> None:
        """Deliver a message later, never, or twice; in order on its line unless the network is bad."""
        random = self.random
        if random.random() < self.badness:
            return
        for _ in range(2 if random.random() < self.badness else 1):
            at = max(self.now + random.random(), self.last.get(line, 0.0))
            if random.random() < self.badness:
                at += random.choice([1, 5, 50]) * random.random()
            else:
                self.last[line] = at
            heapq.heappush(self.queue, (at, next(self.order), deliver, arguments))

    def publish(self, worker: Worker, at_most: int = 1 << 30) -> None:
        for number, payload in worker.send(at_most):
            is_broken = self.random.random() < self.badness / 3
            carried = self.random.randbytes(self.random.randrange(40)) if is_broken else payload
            is_misnumbered = self.random.random() < self.badness / 10
            said = number ^ (EPOCH_STEP >> self.random.randrange(1, 5)) if is_misnumbered else number
            self.carry(worker.name, self.mirror.receive, worker.name, said, carried)

    def ask(self) -> None:
        for ask in self.mirror.take_asks():
            self.carry(f"{ask.worker} asks", self.answer, ask)

    def answer(self, ask: Any) -> None:
        worker, line = self.workers[ask.worker], f"{ask.worker} answers"
        if ask.number is not None:
            for number, payload in worker.ledger.replay(ask.number):
                self.carry(line, self.mirror.receive_replayed, ask.worker, number, payload)
            self.carry(line, self.mirror.end_replay, ask.worker)
            return
        snapshot = worker.ledger.snapshot(1.0)
        head = worker.ledger.head(snapshot, ask.request, 0)
        for index in range(head.total):
            head = worker.ledger.head(snapshot, ask.request, index)
            chunk = SnapshotChunk(head, worker.ledger.chunk(snapshot, index))
            self.carry(line, self.mirror.receive_chunk, ask.worker, chunk)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.now, _, deliver, arguments = heapq.heappop(self.queue)
            deliver(*arguments)
            self.ask()
        self.now = until
        if self.random.random() < 0.3:
            for name in self.workers:
                self.mirror.give_up(name)
        self.ask()

    def settle(self) -> None:
        """Let all messages arrive, and the publishers send their heartbeats. Loses nothing from now on."""
        self.badness, badness = 0.0, self.badness
        for _ in range(60):
            for worker in self.workers.values():
                worker.heartbeat()
                self.publish(worker)
            self.pass_time(100)
            for name in self.workers:
                self.mirror.give_up(name)
            self.ask()
            if not self.queue and all(map(self.is_quiet, self.workers.values())):
                break
        self.badness = badness

    def is_quiet(self, worker: Worker) -> bool:
        return self.mirror.number(worker.name) == worker.ledger.next_number - 1 and self.mirror.is_complete(worker.name)
