"""A small router: it sends each prompt to the worker that has the least left to compute.

    kvblocks serve --port 8001 --kv-events tcp://127.0.0.1:5551 --kv-replay tcp://127.0.0.1:6551      # and 8002, 8003
    python examples/route_by_prefix.py --worker a=http://127.0.0.1:8001,tcp://127.0.0.1:5551,tcp://127.0.0.1:6551 \
        --worker b=… --worker c=… "Once upon a time"

An index knows what workers have cached. There are two, with the same calls: our own mirror of the workers' events, and
Dynamo's indexer (`python -m dynamo.indexer`, --dynamo http://127.0.0.1:8090), which listens to the same events.

`GatedRouter` has a session gate for each worker, for agents whose sessions together are larger than the workers' pools
(docs/gate.md). Without arguments the script shows both routers, on workers without a model. Needs `pip install
'.[wire]'`.
"""

import argparse
import json
import time
import urllib.request
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.error import HTTPError

from kvblocks import KVCacheManager, Sequence
from kvblocks.gate import SessionGate
from kvblocks.wire import EventPublisher, MirrorClient, Source

TIMEOUT_S = 600.0
CONFLICT = 409
RECOMPUTE_WEIGHT = 2
MOST_HOMES = 100_000


@dataclass(frozen=True)
class Worker:
    """A server: where it answers, and where it publishes what it caches."""

    url: str
    source: Source


class Index(Protocol):
    """Knows what workers have cached."""

    def find(self, tokens: list[int], salt: str | None) -> dict[str, int]:
        """Return, for each worker, how many leading tokens of a prompt it has cached.

        Workers with none may be left out.
        """

    def forget(self, worker: str) -> None:
        """Forget what a dead worker had cached, and listen to the worker that replaces it."""

    def close(self) -> None:
        """Stop listening."""


class MirrorIndex:
    """Our own mirror of the workers' events. Not safe to share between threads.

    hash_algorithm: how the workers name their blocks, such as "vllm:sha256_cbor" for vLLM servers.
    """

    def __init__(self, workers: Mapping[str, Worker], block_size: int, hash_algorithm: str = "xxh3_128") -> None:
        self._workers = workers
        self._names = KVCacheManager(1, block_size, hash_algorithm=hash_algorithm)  # it only names blocks
        self.client = MirrorClient({name: worker.source for name, worker in workers.items()}, patience=0.2)

    def find(self, tokens: list[int], salt: str | None) -> dict[str, int]:
        """As `Index` says. O(workers x blocks found)."""
        while self.client.receive():
            pass  # apply the events since the last call
        names = self._names.inspect.block_hashes(Sequence("prompt", tokens, salt=salt))
        found = self.client.mirror.overlaps(names)
        return {holder.worker: num_blocks * self._names.block_size for holder, num_blocks in found.items()}

    def forget(self, worker: str) -> None:
        """As `Index` says."""
        self.client.remove(worker)
        self.client.add(worker, self._workers[worker].source)

    def close(self) -> None:
        """As `Index` says."""
        self.client.close()


class DynamoIndex:
    """Dynamo's indexer at a URL. It identifies blocks by their tokens and ignores salts."""

    def __init__(self, url: str, workers: Mapping[str, Worker], block_size: int, model: str = "kvblocks") -> None:
        self._url, self._workers, self._model, self._block_size = url, workers, model, block_size
        # Dynamo numbers its workers across all models.
        self._numbers = {name: zlib.crc32(f"{model}/{name}".encode()) for name in workers}
        for name in workers:
            try:
                self._register(name)
            except HTTPError as error:
                if error.code != CONFLICT:  # another router has registered the worker
                    raise

    def find(self, tokens: list[int], salt: str | None) -> dict[str, int]:
        """As `Index` says. Its answer counts tokens."""
        del salt
        scores = post(f"{self._url}/query", {"token_ids": tokens, "model_name": self._model})["scores"]
        return {name: scores.get(str(number), {}).get("0", 0) for name, number in self._numbers.items()}

    def forget(self, worker: str) -> None:
        """As `Index` says."""
        post(f"{self._url}/unregister", {"instance_id": self._numbers[worker], "model_name": self._model})
        self._register(worker)

    def close(self) -> None:
        """Do nothing: the indexer keeps listening, for the next router."""

    def _register(self, worker: str) -> None:
        source = self._workers[worker].source
        about = {"instance_id": self._numbers[worker], "model_name": self._model, "block_size": self._block_size}
        where = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        post(f"{self._url}/register", {**about, **where})


@dataclass(eq=False)
class Errand:
    """A prompt that was sent to a worker, until it is finished. num_cached: tokens that were expected there."""

    tokens: list[int]
    salt: str | None
    max_tokens: int
    worker: str = ""
    num_cached: int = 0

    @property
    def num_left(self) -> int:
        """The most tokens that the worker has to compute."""
        return len(self.tokens) - self.num_cached + self.max_tokens


class Router:
    """Chooses a worker for each prompt. Not safe to share between threads.

    The cost of a worker is a number of tokens: twice the prompt's uncached tokens, plus the worker's load. The load is
    the uncached tokens of its unfinished prompts, plus the tokens of their answers. What a worker is computing counts
    as cached, before an event says so.
    """

    def __init__(self, index: Index, workers: Iterable[str]) -> None:
        self.index = index
        self._up = dict.fromkeys(workers, True)
        self._errands: dict[str, list[Errand]] = {name: [] for name in self._up}

    def send(self, tokens: list[int], salt: str | None = None, *, max_tokens: int = 0) -> Errand:
        """Choose a worker, and count the prompt as its work until `finish`. Raises LookupError if all are down."""
        errand = Errand(tokens, salt, max_tokens)
        self._assign(errand, self.up)
        return errand

    def _assign(self, errand: Errand, workers: Iterable[str]) -> None:
        """Give an errand to the worker among these with the lowest cost. Raises LookupError if there are none."""
        tokens, found = errand.tokens, self.index.find(errand.tokens, errand.salt)
        cached = {name: max(found.get(name, 0), self._coming(name, tokens, errand.salt)) for name in workers}
        if not cached:
            raise LookupError("expected a worker that answers, got none")
        load = {name: sum(each.num_left for each in self._errands[name]) for name in cached}
        chosen = cheapest({name: len(tokens) - cached[name] for name in cached}, load)
        errand.worker, errand.num_cached = chosen, cached[chosen]
        self._errands[chosen] = [*self._errands.pop(chosen), errand]  # now last, so another worker wins the next tie

    def finish(self, errand: Errand) -> None:
        """Note that a prompt was answered or failed."""
        self._errands[errand.worker].remove(errand)

    @property
    def up(self) -> list[str]:
        """The workers that are not known to be down, the least recently used first."""
        return [name for name in self._errands if self._up[name]]

    def note_down(self, worker: str) -> None:
        """Note that a worker doesn't answer. It gets no prompts, and what it had cached is forgotten."""
        if self._up[worker]:
            self._up[worker] = False
            self.index.forget(worker)

    def note_up(self, worker: str) -> None:
        """Note that a worker answers again. Its events say what it has cached."""
        self._up[worker] = True

    def _coming(self, worker: str, tokens: list[int], salt: str | None) -> int:
        """Return how many of the prompt's first tokens a worker will have cached when its current prompts are done."""
        errands = [errand for errand in self._errands[worker] if errand.salt == salt]
        return max((num_common(tokens, errand.tokens) for errand in errands), default=0)


class GatedRouter(Router):
    """A router with a session gate for each worker. Not safe to share between threads.

    A session stays with its worker. Its prompts wait here until this worker's gate lets them in, so send no prompt
    before `release` returns it. num_tokens: the room of a worker, which is its pool plus half of its host tier.
    seconds_per_token: the time of a worker for one token of a prompt. clock: returns seconds.
    """

    def __init__(
        self,
        index: Index,
        workers: Iterable[str],
        num_tokens: int,
        seconds_per_token: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(index, workers)
        self.gates = {name: SessionGate(num_tokens) for name in self._up}
        self._seconds_per_token, self._clock = seconds_per_token, clock
        self._asked: dict[Errand, tuple[Hashable, SessionGate]] = {}  # by errand, its session, and whom it asked
        self._waiting: set[Errand] = set()
        self._ready: list[Errand] = []
        self._homes: dict[tuple[str | None, Hashable], str] = {}  # of the sessions that had turns last

    def send(
        self, tokens: list[int], salt: str | None = None, *, max_tokens: int = 0, session: Hashable = None
    ) -> Errand:
        """Choose a worker for a session's next prompt, or for a prompt without a session, which never waits."""
        errand = Errand(tokens, salt, max_tokens)
        self._ask(errand, session, self.up)
        return errand

    def release(self) -> tuple[list[Errand], float | None]:
        """Return the errands that may go to their workers now, and when to call this again if nothing else happens.

        Call it after `send`, `finish`, `end` and `note_down`, and at that time.
        """
        now, wake_times = self._clock(), []
        going, self._ready = self._ready, []
        for name, gate in self.gates.items():
            num_busy = sum(errand not in self._waiting for errand in self._errands[name])
            decision = gate.release(num_busy, self._seconds_per_token, now)
            going += [errand for errand in decision.admitted if isinstance(errand, Errand)]
            wake_times += [decision.wake_at] if decision.wake_at is not None else []
        self._waiting.difference_update(going)
        return going, min(wake_times, default=None)

    def finish(self, errand: Errand) -> None:
        """Note that a prompt failed or is withdrawn."""
        self.end(errand, 0, "error")

    def end(self, errand: Errand, num_answered: int, reason: str) -> None:
        """Note that a prompt was answered with `num_answered` tokens. reason: the answer's stop reason."""
        super().finish(errand)
        _, gate = self._asked.pop(errand)
        if errand in self._waiting:
            self._waiting.remove(errand)
            gate.cancel(errand)
        else:
            gate.ended(errand, len(errand.tokens) + num_answered, reason, self._clock())

    def note_down(self, worker: str) -> None:
        """As `Router` says. What waited for this worker waits for another one, if one is up. Its gate starts over."""
        super().note_down(worker)
        self.gates[worker] = SessionGate(self.gates[worker].num_tokens)
        for errand in [each for each in self._errands[worker] if each in self._waiting]:
            self._errands[worker].remove(errand)
            self._waiting.remove(errand)
            self._ask(errand, self._asked.pop(errand)[0], self.up or [worker])

    def _ask(self, errand: Errand, session: Hashable, workers: list[str]) -> None:
        """Assign an errand to one of these workers, and ask the worker's gate."""
        key = errand.salt, session
        home = self._homes.pop(key, None)
        self._assign(errand, [home] if home in workers else workers)
        gate = self.gates[errand.worker]
        self._asked[errand] = session, gate
        if session is not None:
            self._homes[key] = errand.worker
        if len(self._homes) > MOST_HOMES:
            del self._homes[next(iter(self._homes))]
        if gate.ask(errand, session, errand.salt, len(errand.tokens), errand.num_cached, self._clock()):
            self._ready.append(errand)
        else:
            self._waiting.add(errand)


def cheapest(missing: Mapping[str, int], load: Mapping[str, int]) -> str:
    """Return the worker with the lowest cost. Ties go to the least load, and then to the first worker.

    Uncached tokens count RECOMPUTE_WEIGHT times, since computing them also delays the prompts that follow.
    """
    return min(missing, key=lambda name: (RECOMPUTE_WEIGHT * missing[name] + load[name], load[name]))


def num_common(one: list[int], other: list[int]) -> int:
    """Return how many leading tokens two prompts have in common. O(tokens)."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def post(url: str, body: dict[str, Any], key: str | None = None) -> Any:
    """POST JSON to an HTTP server. Return the answer, parsed if it is JSON. Raises OSError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310  # the user gives the URL
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        text = answer.read()
    return json.loads(text) if text.startswith((b"{", b"[")) else text


def read_worker(text: str) -> tuple[str, Worker]:
    """Read `name=url,events,replay`."""
    name, _, rest = text.partition("=")
    parts = rest.split(",")
    if not name or len(parts) != 3:
        raise argparse.ArgumentTypeError(f"expected NAME=URL,EVENTS,REPLAY, got {text!r}")
    return name, Worker(parts[0].rstrip("/"), Source(parts[1], parts[2]))


def ask(
    router: Router, workers: Mapping[str, Worker], prompt: str, given: argparse.Namespace
) -> tuple[Errand, dict[str, Any]]:
    """Send a prompt to the worker that the router chooses, or to the next one if that doesn't answer.

    Raises LookupError if none does, and HTTPError if one refuses the prompt.
    """
    while router.up:
        name, errand = router.up[0], None
        try:
            tokens = post(f"{workers[name].url}/tokenize", {"prompt": prompt}, given.api_key)["tokens"]
            errand = router.send(tokens, given.salt, max_tokens=given.max_tokens)
            name = errand.worker
            body = {"model": given.model, "prompt": tokens, "max_tokens": given.max_tokens}
            return errand, post(f"{workers[name].url}/v1/completions", body, given.api_key)
        except HTTPError as error:
            if error.code not in (502, 503):
                raise
            router.note_down(name)
        except OSError as error:
            print(f"{name}: {error}")
            router.note_down(name)
        finally:
            if errand is not None:
                router.finish(errand)
    raise LookupError("expected a worker that answers, got none")


def demonstrate() -> None:
    """Show where prompts go, with three managers and their events in place of servers."""
    managers = {name: KVCacheManager(64, 4, enable_events=True) for name in "abc"}
    publishers = {name: EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0") for name in managers}
    workers = {name: Worker("", Source(one.endpoint, one.replay_endpoint)) for name, one in publishers.items()}
    index = MirrorIndex(workers, 4)
    router = Router(index, workers)
    handbook, novel = list(range(100, 180)), list(range(500, 540))
    for number, prompt in enumerate([handbook, novel, [*handbook, 1, 2], [*novel, 3], list(range(30))]):
        errand = router.send(prompt)
        print(f"{len(prompt)} tokens go to {errand.worker}, which has {errand.num_cached} of them")
        manager = managers[errand.worker]
        sequence = Sequence(number, prompt)
        manager.allocate_slots(sequence)
        manager.free(sequence)
        publishers[errand.worker].publish(manager.take_events())
        router.finish(errand)
        while index.client.mirror.number(errand.worker) != publishers[errand.worker].number:
            index.client.receive(0.1)
    index.close()
    for publisher in publishers.values():
        publisher.close()


class NoIndex:
    """An index that knows nothing."""

    def find(self, tokens: list[int], salt: str | None) -> dict[str, int]:
        """As `Index` says."""
        del tokens, salt
        return {}

    def forget(self, worker: str) -> None:
        """As `Index` says."""

    def close(self) -> None:
        """As `Index` says."""


def demonstrate_gates() -> None:
    """Show agents that take turns at two workers, on a clock of our own. A worker has room for one agent."""
    now = 0.0
    router = GatedRouter(NoIndex(), "ab", 1000, 0.05, lambda: now)
    prompts = {name: [number] * 700 for number, name in enumerate(("ann", "bob", "cid"))}
    names = {router.send(prompt, session=name): name for name, prompt in prompts.items()}
    going, _ = router.release()
    print(", ".join(f"{names[errand]} goes to {errand.worker}" for errand in going))
    for errand in going:
        now += 1.0
        router.end(errand, 20, "tool_use")
    again = router.send([*prompts["ann"], *range(40)], session="ann")
    (errand,), _ = router.release()
    assert errand is again
    print(f"ann goes on at {errand.worker} while {names[next(each for each in names if each not in going)]} waits")
    router.end(errand, 20, "end_turn")
    going, wake_at = router.release()
    while not going and wake_at is not None:
        now = wake_at
        going, wake_at = router.release()
    print(f"after {now:.1f} s {names[going[0]]} goes to {going[0].worker}")


def main(arguments: list[str] | None = None) -> None:
    """Send each prompt to a worker, one after the other, and say where it went and what was cached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="append", default=[], type=read_worker, help="NAME=URL,EVENTS,REPLAY")
    parser.add_argument("--dynamo", help="URL of a Dynamo indexer, to use instead of our own mirror")
    parser.add_argument("--block-size", type=int, default=16, help="the servers' block size (default 16)")
    parser.add_argument("--api-key", help="the servers' key")
    parser.add_argument("--salt", help="the servers' salt for the prompts; with --keys it is kvblocks/tenant/NAME")
    parser.add_argument("--model", default="smollm2", help="the model's name on the servers (default smollm2)")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("prompts", nargs="*")
    given = parser.parse_args(arguments)
    if not given.worker:
        demonstrate()
        demonstrate_gates()
        return
    workers = dict(given.worker)
    with closing(make_index(given, workers)) as index:
        router = Router(index, workers)
        time.sleep(1.0)  # an index needs a moment to learn what the workers have cached
        for prompt in given.prompts:
            errand, answer = ask(router, workers, prompt, given)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{errand.worker}: {cached} of {usage['prompt_tokens']} tokens cached, {errand.num_cached} expected")
            print(answer["choices"][0]["text"])


def make_index(given: argparse.Namespace, workers: Mapping[str, Worker]) -> Index:
    """Return the index that was asked for."""
    if given.dynamo:
        return DynamoIndex(given.dynamo, workers, given.block_size)
    return MirrorIndex(workers, given.block_size)


if __name__ == "__main__":
    main()
