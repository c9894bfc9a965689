"""Dynamo's own indexer, fed by our publisher, answers as the engine's cache does. `make test-wire` runs this."""

import json
import runpy
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence as Items
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("dynamo._core", reason="needs ai-dynamo-runtime: make test-wire")

from bench.ports import free_ports
from kvblocks import EventOptions, KVCacheManager, Sequence, Tier
from kvblocks.wire import Converter, EventPublisher, MirrorClient, Source
from kvblocks.wire.convert import to_u64

BLOCK = 4
LOCAL = "tcp://127.0.0.1:0"
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


class Indexer:
    """`python -m dynamo.indexer`, asked over HTTP."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(self.is_up)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def is_up(self) -> bool:
        assert self.process.poll() is None
        try:
            self.ask("/health")
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode() if body else None,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def listen(self, worker: int, model: str, publisher: EventPublisher) -> None:
        where = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        self.ask("/register", instance_id=worker, model_name=model, block_size=BLOCK, **where)

    def find(self, worker: int, model: str, tokens: list[int]) -> int:
        """How many blocks of a prompt a worker has cached, according to Dynamo."""
        scores = self.ask("/query", token_ids=tokens, model_name=model)["scores"]
        return scores.get(str(worker), {}).get("0", 0) // BLOCK


def wait_for(condition) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def indexer():
    running = Indexer()
    yield running
    running.process.kill()
    running.process.wait()


class Engine:
    """A manager, its publisher, and what its prompts were."""

    def __init__(self, seed: int, codec: str, *, tiers: Items[Tier] = (), **options: Any) -> None:
        self.random = Random(seed)
        self.tiers = tiers
        self.prompts: list[list[int]] = []
        self.options = {"heartbeat": 0.05, "converter": Converter(codec)} | options
        self.start(LOCAL, LOCAL)

    def start(self, *ends: str) -> None:
        self.publisher = EventPublisher(*ends, **self.options)
        self.manager = KVCacheManager(
            64, BLOCK, enable_events=EventOptions(tiers=True), hash_algorithm="sha256", tiers=self.tiers
        )

    def restart(self) -> None:
        ends = self.publisher.endpoint, self.publisher.replay_endpoint
        self.publisher.close()
        self.start(*ends)

    def run(self, num_steps: int) -> None:
        random = self.random
        for _ in range(num_steps):
            prompt = [random.randrange(3) for _ in range(random.randrange(BLOCK, 12 * BLOCK))]
            self.prompts.append(prompt)
            sequence = Sequence(len(self.prompts), prompt)
            if self.manager.allocate_slots(sequence, hit=self.manager.get_computed_blocks(sequence)) is not None:
                self.manager.free(sequence)
            for transfer in self.manager.tiers.take_transfers():
                self.manager.tiers.complete(transfer, ok=True)
            self.publisher.publish(self.manager.take_events())

    def expected_below(self, prompt: list[int]) -> int:
        """How many of its tokens are cached on the device or in a tier, asked of the manager."""
        hit = self.manager.get_computed_blocks(Sequence("probe", [*prompt, 0]))
        return max([hit.num_tokens, *(load.first_token + load.num_tokens for load in self.manager.tiers.find(hit))])

    def expected(self, prompt: list[int]) -> tuple[int, list[int]]:
        """How many blocks of a prompt are cached, and their names, asked of the manager."""
        probe = self.manager.get_computed_blocks(Sequence("probe", [*prompt, 0]))
        blocks = [] if probe is None else probe.blocks
        return len(blocks), [to_u64(block.block_hash or b"") for block in blocks]


@pytest.mark.parametrize(("worker", "codec"), [*enumerate(["vllm", "vllm:array", "sglang"])])
def test_dynamo_answers_as_the_cache_does(indexer, worker, codec):
    engine, model = Engine(7, codec), codec.replace(":", "-")
    with MirrorClient({"w": Source(engine.publisher.endpoint, engine.publisher.replay_endpoint)}) as client:
        indexer.listen(worker, model, engine.publisher)
        engine.run(150)
        check_all(indexer, worker, model, engine, client)
        engine.manager.reset_prefix_cache()
        engine.run(40)
        check_all(indexer, worker, model, engine, client)
    engine.publisher.close()


@pytest.mark.parametrize(("worker", "medium"), [(20, "CPU"), (21, "STORAGE")])
def test_dynamo_tells_tiers_from_the_device(indexer, worker, medium):
    engine, model = Engine(7, "vllm", tiers=[Tier("below", 1000, 100, medium=medium)]), medium
    with MirrorClient({"w": Source(engine.publisher.endpoint, engine.publisher.replay_endpoint)}) as client:
        indexer.listen(worker, model, engine.publisher)
        engine.run(150)
        check_all(indexer, worker, model, engine, client)
        num_below = 0
        for prompt in engine.prompts:
            found = indexer.ask("/query", token_ids=prompt, model_name=model)["instances"].get(str(worker), {})
            assert found.get("longest_matched", 0) == engine.expected_below(prompt)
            num_below += found.get("longest_matched", 0) > found.get("gpu", 0)
        assert num_below > 20
    engine.publisher.close()


def test_dynamo_follows_a_restart(indexer):
    """Numbers go on upwards, and the first batch clears. Numbers from 0 again would be taken for old ones."""
    engine = Engine(8, "vllm")
    with MirrorClient({"w": Source(engine.publisher.endpoint, engine.publisher.replay_endpoint)}) as client:
        indexer.listen(9, "restarted", engine.publisher)
        engine.run(100)
        check_all(indexer, 9, "restarted", engine, client)
        engine.restart()
        engine.run(30)
        check_all(indexer, 9, "restarted", engine, client)
    engine.publisher.close()


def test_dynamos_index_in_the_examples_router(indexer):
    """examples/route_by_prefix.py over Dynamo's indexer chooses as over our mirror, through a worker's death."""
    example = runpy.run_path(str(ROOT / "examples" / "route_by_prefix.py"))
    engines = {"a": Engine(3, "vllm"), "b": Engine(4, "vllm")}
    where = {name: Source(one.publisher.endpoint, one.publisher.replay_endpoint) for name, one in engines.items()}
    workers = {name: example["Worker"]("", source) for name, source in where.items()}
    index = example["DynamoIndex"](f"http://127.0.0.1:{indexer.port}", workers, BLOCK, "routed")
    mirror = example["MirrorIndex"](workers, BLOCK, "sha256")
    for engine in engines.values():
        engine.run(100)
    prompts = [prompt for engine in engines.values() for prompt in engine.prompts]

    def found(source: Any) -> list[dict[str, int]]:
        return [source.find(prompt, None) for prompt in prompts]

    def expected() -> list[dict[str, int]]:
        return [{name: BLOCK * one.expected(prompt)[0] for name, one in engines.items()} for prompt in prompts]

    wait_for(lambda: found(mirror) == expected())
    wait_for(lambda: found(index) == expected())
    chosen = [[example["Router"](one, workers).send(prompt).worker for prompt in prompts] for one in (index, mirror)]
    assert chosen[0] == chosen[1]
    assert {*chosen[0]} == {"a", "b"}
    again = example["DynamoIndex"](f"http://127.0.0.1:{indexer.port}", workers, BLOCK, "routed")  # another router
    assert found(again) == expected()
    index.forget("a")
    engines["a"].restart()
    engines["a"].run(5)
    wait_for(lambda: found(index) == expected())
    for engine in engines.values():
        engine.publisher.close()
    mirror.close()


def check_all(indexer: Indexer, worker: int, model: str, engine: Engine, client: MirrorClient) -> None:
    """Compare every prompt so far, once all events have arrived."""
    newest, last = engine.prompts[-1], engine.publisher.number
    wait_for(lambda: client.receive(0.01) >= 0 and (client.mirror.number("w") or 0) >= last)
    assert client.mirror.is_complete("w")
    wait_for(lambda: indexer.find(worker, model, newest) == engine.expected(newest)[0])
    expected = [engine.expected(prompt) for prompt in engine.prompts]
    numbers = [number for number, _ in expected]
    # The indexer doesn't confirm batches, so it is asked until it has them.
    wait_for(lambda: [indexer.find(worker, model, prompt) for prompt in engine.prompts] == numbers)
    assert sum(numbers) > 50 and 0 in numbers
    for _, names in expected:
        assert client.mirror.find("w", names) == len(names)
