"""The cost of events for routers in the engine, in the publisher's thread, and in a consumer.

    python -m bench.wire [--rounds 5] [--samples 20] [--json FILE] [--quick]

Times are microseconds per block of 16 tokens; a batch has 4 events of 32 blocks. Our codecs are compared with plain
msgspec classes in the shape of vLLM's ("classes"), which check only types and drop unknown fields. `publish` is all
that the engine's thread does. The stream is over TCP on one machine. Publisher and consumer share one process and
Python's lock; with a consumer in another process it is faster.

What it does not show: a network; consumers that decode in another language.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from tracemalloc import get_traced_memory, start, stop
from typing import Any

import msgspec

from bench.conditions import conditions, keep, print_conditions
from bench.timing import Case, Spread, measure
from kvblocks import BlockRemoved, BlockStored
from kvblocks.wire import CODECS, Converter, EventBatch, EventMirror, EventPublisher, MirrorClient, Source, decode
from kvblocks.wire.ledger import Ledger, Limits

BLOCK_SIZE = 16
EVENT_BLOCKS = 32
BATCH_EVENTS = 4
NUM_BLOCKS = EVENT_BLOCKS * BATCH_EVENTS
LOCAL = "tcp://127.0.0.1:0"


class TheirEvent(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """vLLM's BlockStored, as far as it is filled in here."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's batch."""

    ts: float
    events: list[TheirEvent]
    data_parallel_rank: int | None = None


def make_events(random: Random, num_events: int = BATCH_EVENTS) -> list[BlockStored]:
    """Return events of random blocks, each after a different prefix."""
    events = []
    for _ in range(num_events):
        digests = tuple(random.randbytes(32) for _ in range(EVENT_BLOCKS))
        tokens = b"".join(random.randrange(128_000).to_bytes(4, "little") for _ in range(EVENT_BLOCKS * BLOCK_SIZE))
        events.append(BlockStored(digests, random.randbytes(32), tokens, BLOCK_SIZE))
    return events


def codec_cases(events: list[BlockStored]) -> dict[str, dict[str, Case]]:
    """Return what to time of the codecs, by item and contestant."""
    cases: dict[str, dict[str, Case]] = {"encode": {}, "decode": {}, "convert": {}}
    said = Converter().convert(events)
    fields = [{name: getattr(event, name) for name in TheirEvent.__struct_fields__} for event in said]
    theirs = TheirBatch(1.0, [TheirEvent(**one) for one in fields], 0)
    their_decoder = msgspec.msgpack.Decoder(TheirBatch)
    payload = msgspec.msgpack.encode(theirs)
    cases["encode"]["classes"] = Case(lambda _: msgspec.msgpack.encode(theirs), NUM_BLOCKS)
    cases["decode"]["classes"] = Case(lambda _: their_decoder.decode(payload), NUM_BLOCKS)
    for name, codec in CODECS.items():
        converter = Converter(name)
        batch = EventBatch(1.0, converter.convert(events), 0)
        cases["encode"][name] = Case(_encoding(codec.encode, batch), NUM_BLOCKS)
        cases["decode"][name] = Case(_encoding(decode, codec.encode(batch)), NUM_BLOCKS)
        cases["convert"][name] = Case(_encoding(converter.convert, events), NUM_BLOCKS)
    return cases


def _encoding(function: Callable[[Any], Any], argument: Any) -> Callable[[Any], Any]:
    return lambda _: function(argument)


def ledger_cases(events: list[BlockStored]) -> dict[str, dict[str, Case]]:
    """Return what to time of the publisher's ledger: what the engine waits for."""
    removals = [BlockRemoved(event.block_hashes) for event in events]
    ledger = Ledger(Converter(), Limits(), 0, 0, 1.0)

    def publish(_: None) -> None:
        ledger.add(events, 1.0)

    def tidy(_: None) -> None:
        ledger.add(removals, 1.0)
        while ledger.take():
            pass

    large = Ledger(Converter(), Limits(max_queued_batches=0), 0, 0, 1.0)
    random, num_cached = Random(3), 100_000 - 100_000 % NUM_BLOCKS
    for _ in range(num_cached // NUM_BLOCKS):
        large.add(make_events(random), 1.0)
    snapshot = large.snapshot(1.0)
    return {
        "publish, in the engine": {"kvblocks": Case(publish, NUM_BLOCKS, tidy=tidy)},
        "snapshot of 100,000: the engine may wait": {"kvblocks": Case(lambda _: large.snapshot(1.0), num_cached)},
        "snapshot of 100,000: a chunk": {"kvblocks": Case(lambda _: large.chunk(snapshot, 5), 1024)},
    }


def mirror_cases(events: list[BlockStored]) -> dict[str, dict[str, Case]]:
    """Return what to time of a consumer."""
    converter = Converter()
    stored = CODECS["vllm"].encode(EventBatch(1.0, converter.convert(events), 0))
    removed = CODECS["vllm"].encode(
        EventBatch(1.0, converter.convert([BlockRemoved(event.block_hashes) for event in events]), 0)
    )
    mirror = EventMirror()
    mirror.add("w")
    numbers = iter(range(1 << 40))

    def apply(_: None) -> None:
        mirror.receive("w", next(numbers), stored)

    def remove(_: None) -> None:
        mirror.receive("w", next(numbers), removed)

    held = EventMirror()
    held.add("w")
    held.receive("w", 0, stored)
    names = [name for event in converter.convert(events) for name in event.block_hashes]  # type: ignore[union-attr]
    return {
        "apply what is stored": {"kvblocks": Case(apply, NUM_BLOCKS, tidy=remove)},
        "apply what is removed": {"kvblocks": Case(remove, NUM_BLOCKS, prepare=lambda: apply(None))},
        "find": {"kvblocks": Case(lambda _: held.find("w", names), NUM_BLOCKS)},
    }


def time_stream(num_batches: int) -> Spread:
    """Return the nanoseconds per block from `publish` until a mirror has everything, over sockets."""
    random = Random(4)
    batches = [make_events(random) for _ in range(num_batches)]
    with (
        EventPublisher(LOCAL, LOCAL, heartbeat=0.05) as publisher,
        MirrorClient({"w": Source(publisher.endpoint, publisher.replay_endpoint)}) as client,
    ):
        while not client.mirror.is_complete("w"):
            client.receive(0.01)
        began = time.perf_counter_ns()
        for events in batches:
            publisher.publish(events)
        last = publisher.number
        while (client.mirror.number("w") or 0) < last:
            client.receive(0.01)
        elapsed = time.perf_counter_ns() - began
        if client.mirror.count("w") != num_batches * NUM_BLOCKS:
            raise RuntimeError(f"expected {num_batches * NUM_BLOCKS} blocks, got {client.mirror.count('w')}")
    return Spread([elapsed / (num_batches * NUM_BLOCKS)])


def mirror_bytes(num_batches: int) -> float:
    """Return the bytes that a mirror takes for a block."""
    random, converter = Random(5), Converter()
    mirror = EventMirror()
    mirror.add("w")
    start()
    before = get_traced_memory()[0]
    for number in range(num_batches):
        mirror.receive("w", number, CODECS["vllm"].encode(EventBatch(1.0, converter.convert(make_events(random)), 0)))
    taken = get_traced_memory()[0] - before
    stop()
    return taken / mirror.count("w")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    given = parser.parse_args(arguments)
    num_rounds, num_samples = (1, 2) if given.quick else (given.rounds, given.samples)
    facts = conditions(num_rounds=num_rounds, num_samples=num_samples, event_blocks=EVENT_BLOCKS, batch=NUM_BLOCKS)
    facts |= {"block_size": BLOCK_SIZE, "msgspec": msgspec.__version__}
    facts = {key: value for key, value in facts.items() if key != "num_blocks"}
    print_conditions(facts)
    events = make_events(Random(1))
    results: list[dict[str, object]] = []
    print(f"\n{'us a block':44}{'':12}{'min':>9}{'median':>9}{'max':>9}{'ratio':>8}")
    for items in (codec_cases(events), ledger_cases(events), mirror_cases(events)):
        for item, cases in items.items():
            found = measure(cases, num_rounds, num_samples)
            for contestant, spread in found.items():
                baseline = found.get("classes")
                ratio = None if baseline is None else spread.low / baseline.low
                results.append(row(item, contestant, spread, ratio))
    streams = [time_stream(20 if given.quick else 2000) for _ in range(num_rounds)]
    results.append(row("publish to mirror, over TCP", "kvblocks", Spread([one.low for one in streams]), None))
    num_bytes = mirror_bytes(8 if given.quick else 500)
    print(f"\nA mirror takes {num_bytes:.0f} bytes a block.")
    print("Not shown: a network, and consumers in other languages.")
    keep(given.json, facts, results, mirror_bytes_a_block=round(num_bytes, 1))


def row(item: str, contestant: str, spread: Spread, ratio: float | None) -> dict[str, object]:
    """Print a row of the table, and return it."""
    low, median, high = (value / 1000 for value in (spread.low, spread.median, spread.high))
    share = "" if ratio is None else f"{ratio:8.2f}"
    print(f"{item:44}{contestant:12}{low:9.3f}{median:9.3f}{high:9.3f}{share}", flush=True)
    return {"item": item, "contestant": contestant, "unit": "us a block", "ratio": ratio} | {
        "min": low,
        "median": median,
        "max": high,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
