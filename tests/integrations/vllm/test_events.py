"""KV events: they are of vLLM's own classes, say what vLLM's own manager would say, and can be replayed."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.pooling_params import PoolingParams
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from bench.vllm import schedulers
from bench.vllm.schedulers import Settings, make_vllm_config
from integrations.vllm.configurations import CACHED_STATES_SMALL, CONFIGURATIONS, WINDOWS_SMALL
from integrations.vllm.stand import BLOCK, WHOSE, Stand, adapter, image, request
from integrations.vllm.workload import make_asks
from kvblocks import FullAttention, KVCacheManager, Sequence, SlidingWindow
from kvblocks.integrations.vllm.events import _as_stored

PROMPT = range(100, 100 + 3 * BLOCK + 5)

SMALL = {each.name: each for each in [*CONFIGURATIONS, *WINDOWS_SMALL, *CACHED_STATES_SMALL]}


@pytest.fixture(params=["sha256", "sha256_cbor", "xxhash_cbor"])
def algorithm(request, monkeypatch):
    """Have schedulers, and the hasher of requests, use one of vLLM's hash algorithms."""
    monkeypatch.setenv("PYTHONHASHSEED", "a seed of all")
    monkeypatch.setattr(schedulers, "HASH", request.param)
    schedulers.request_hasher.cache_clear()
    make_config = schedulers.make_vllm_config

    def configure(settings: Settings) -> Any:
        config = make_config(settings)
        config.cache_config.prefix_caching_hash_algo = request.param
        return config

    monkeypatch.setattr(sys.modules[__name__], "make_vllm_config", configure)
    yield request.param
    schedulers.request_hasher.cache_clear()


class Recorder:
    """Stands where a scheduler's publisher stands, and keeps what it gets, encoded and decoded as on a wire."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events

    def shutdown(self) -> None: ...


def make_stand(settings: Settings | None = None, whose: str = "ours") -> tuple[Stand, list[Any]]:
    """Return a stand, and the list of the events that its scheduler publishes."""
    settings = settings or Settings()
    config = make_vllm_config(settings)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    stand = Stand(settings, whose, config=config)
    scheduler: Any = stand.scheduler
    recorder = scheduler.kv_event_publisher = Recorder()
    return stand, recorder.events


class Replay:
    """What an indexer knows from events: by group, the prefixes that are cached, by their tokens."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, Any], list[int]] = {}
        self.prefixes: dict[Any, tuple[list[int], Any]] = {}

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.tokens.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.tokens[event.group_idx, name]
        else:
            parent = event.parent_block_hash
            before, keys = ([], ()) if parent is None else self.prefixes[parent]
            for number, name in enumerate(event.block_hashes):
                start = number * event.block_size
                before = before + event.token_ids[start : start + event.block_size]
                keys = (*keys, (event.extra_keys or {})[number])
                self.prefixes[name] = before, keys
                assert (event.group_idx, name) not in self.tokens
                self.tokens[event.group_idx, name] = before


def cached(manager: Any) -> set[tuple[int, Any]]:
    """Return what is cached in the only group, asked of the pool itself: (group, name)."""
    found = set()
    for block in manager.manager.blocks:
        if block.block_hash is not None:
            found.add((0, maybe_convert_block_hash(block.block_hash)))
    return found


def events_of_steps(stand: Any, events: list[Any], asks: list[Any], settings: Any) -> Iterator[list[Any]]:
    """Let requests come, step until all have ended, and yield what each step told."""
    number = 0
    while asks or stand.scheduler.has_unfinished_requests():
        while asks and asks[0].arrival <= number:
            stand.add(asks.pop(0).make_request(settings))
        stand.step()
        number += 1
        told = [*events, *stand.manager.take_events()]
        events.clear()
        yield told


@pytest.mark.parametrize("name", ["80 blocks, priority", "80 blocks, async", "80 blocks, speculation"])
@pytest.mark.parametrize("seed_of_asks", range(2))
def test_replayed_events_are_what_is_cached_at_every_step(name, seed_of_asks):
    configuration = SMALL[name]
    stand, events = make_stand(configuration.settings)
    asks = make_asks(replace(configuration.mix, num_salts=2), seed_of_asks, 80)
    replay, num_removed = Replay(), 0
    for told in events_of_steps(stand, events, asks, configuration.settings):
        for event in told:
            num_removed += isinstance(event, BlockRemoved)
            replay.apply(event)
        assert set(replay.tokens) == cached(stand.manager)
    assert num_removed > 100
    assert stand.scheduler.reset_prefix_cache()
    for event in stand.manager.take_events():
        replay.apply(event)
    assert not replay.tokens


@pytest.mark.parametrize("name", [each.name for each in CACHED_STATES_SMALL])
def test_replayed_events_of_states_are_as_many_as_are_cached_at_every_step(name):
    """A state is told of with the name of its prefix, which full attention has cached."""
    configuration = SMALL[name]
    stand, events = make_stand(configuration.settings)
    asks = make_asks(configuration.mix, 0, 80)
    replay, num_removed = Replay(), 0
    for told in events_of_steps(stand, events, asks, configuration.settings):
        for event in told:
            num_removed += isinstance(event, BlockRemoved) and event.group_idx == 1
            replay.apply(event)
        names = [{name for told, name in replay.tokens if told == group} for group in (0, 1)]
        assert names[1] <= names[0]
        assert len(replay.tokens) <= stand.manager.manager.stats.num_cached_blocks  # which has copies, too
        for asked in stand.scheduler.waiting:
            hit = stand.manager.manager.get_computed_blocks(stand.manager._sequence(asked))  # noqa: SLF001
            found = maybe_convert_block_hash(hit.blocks[-1].block_hash) if hit.blocks else None
            assert found is None or found in names[1], "a hit starts from a state that no event told of"
    assert num_removed > 10
    assert stand.scheduler.reset_prefix_cache()
    for event in stand.manager.take_events():
        replay.apply(event)
    assert not replay.tokens


def test_replayed_prefixes_are_those_of_their_requests():
    stand, events = make_stand()
    for number in range(3):
        stand.cached(
            request(f"r{number}", [*range(number * BLOCK + 20), 1, 2, 3], 2 * BLOCK, cache_salt="s" * number or None)
        )
    replay = Replay()
    for event in events:
        replay.apply(event)
    known = [list(r.all_token_ids) for r in stand.requests.values()]
    assert replay.tokens and all(any(k[: len(t)] == t for k in known) for t in replay.tokens.values())
    parents = [event.parent_block_hash for event in events if isinstance(event, BlockStored)]
    assert parents.count(None) == 3 and len(parents) > 6


def make_requests() -> list[Request]:
    """Return requests with all that events tell of."""
    pads = [2] * 3 * BLOCK
    embeddings = torch.arange(3 * BLOCK * 4, dtype=torch.float32).reshape(-1, 4)
    return [
        request("plain", PROMPT, 2 * BLOCK),
        request("salt", PROMPT, BLOCK, cache_salt="salt", session_id="one"),
        request("lora", PROMPT, BLOCK, lora_request=adapter("a", 7), cache_salt="salt"),
        request("lora again", [*PROMPT, 1, 2], BLOCK, lora_request=adapter("a", 7), session_id="two"),
        request("image", [1] * BLOCK + pads, BLOCK, mm_features=[image("cat", BLOCK, 3 * BLOCK)], cache_salt="x"),
        request("images", pads + pads, 1, mm_features=[image("bird", 3, 2 * BLOCK), image("dog", 2 * BLOCK + 4, 20)]),
        request("embeddings", None, 2 * BLOCK, prompt_embeds=embeddings, cache_salt="y"),
        request("hit", [*PROMPT, 3], 2 * BLOCK, session_id="three"),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(is_async=True),
        Settings(long_prefill_token_threshold=BLOCK + 3),
        Settings(num_drafts=3),
        Settings(windows=(64,), keeps_windows=True),  # by default vLLM caches fewer blocks of windows
    ],
    ids=["plain", "async", "chunks", "drafts", "windows"],
)
@pytest.mark.parametrize("mode", ["incremental", "full"])
@pytest.mark.usefixtures("algorithm")
def test_events_say_what_vllms_own_say(settings, mode):
    """Block by block, names included."""
    said = []
    for whose in WHOSE:
        stand, events = make_stand(settings, whose)
        for made in make_requests():
            made.kv_cache_report_mode = mode
            stand.cached(made)
        said.append([msgspec.structs.asdict(event) for event in events])
    theirs, ours = ([one for event in events for one in blocks_of(event)] for events in said)
    assert ours == theirs
    assert len({one["name"] for one in ours}) > 20


@pytest.mark.usefixtures("algorithm")
def test_events_of_states_have_vllms_names_and_their_own_tokens():
    """vLLM gives a state the tokens of all that its request computed before it, and no parent."""
    said = []
    for whose in WHOSE:
        stand, events = make_stand(Settings(num_states=1, keeps_windows=True), whose)
        for made in make_requests():
            stand.cached(made)
        said.append([event for event in events if isinstance(event, BlockStored)])
    theirs, ours = (
        [(event.group_idx, name, event.lora_id, event.session_id) for event in stored for name in event.block_hashes]
        for stored in said
    )
    assert ours == theirs and sum(group for group, *_ in ours) >= 8
    told = {
        block["name"]: block
        for event in said[1]
        if not event.group_idx
        for block in blocks_of(msgspec.structs.asdict(event))
    }
    for event in said[1]:
        if event.group_idx == 1:
            (state,) = blocks_of(msgspec.structs.asdict(event))
            of_attention = told[state["name"]]
            assert (state["parent"], state["tokens"]) == (of_attention["parent"], of_attention["tokens"])
            assert len(event.token_ids) == BLOCK and event.kv_cache_spec_kind == "mamba"


@pytest.mark.usefixtures("algorithm")
def test_batches_are_vllms_byte_for_byte():
    """The batches of a scheduler with one group, of steps and of evictions. Their times are not compared."""
    said = []
    for whose in WHOSE:
        stand, _ = make_stand(Settings(num_blocks=30, reserves_full_prompt=False), whose)
        stand.scheduler.kv_event_publisher = batches = Batches()
        for made in make_requests():
            stand.cached(made)
        said.append(batches.encoded)
    theirs, ours = said
    assert ours == theirs
    assert sum(b"BlockRemoved" in batch for batch in ours) > 2 and len(ours) >= 20


class Batches:
    """Stands where a publisher stands, and keeps what it would send."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def publish(self, batch: Any) -> None:
        batch.ts, batch.data_parallel_rank = 0.0, 0
        self.encoded.append(msgspec.msgpack.encode(batch))

    def shutdown(self) -> None: ...


def blocks_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an event for each block, since vLLM puts more or fewer blocks into one by its groups and calls."""
    event = dict(event)
    names, tokens = event.pop("block_hashes"), event.pop("token_ids")
    keys, parent, size = event.pop("extra_keys"), event.pop("parent_block_hash"), event["block_size"]
    return [
        event
        | {"name": name, "parent": parent if not number else names[number - 1], "keys": keys[number]}
        | {"tokens": tokens[number * size : (number + 1) * size]}
        for number, name in enumerate(names)
    ]


def test_a_pooling_request_has_no_mode_of_reports():
    stand, _ = make_stand()
    stand.cached(request("first", PROMPT))
    pooling = Request("pools", list(PROMPT), None, PoolingParams(task="embed"))
    assert not hasattr(pooling, "kv_cache_report_mode")
    stand.scheduler.add_request(pooling)
    assert stand.scheduler.schedule().num_scheduled_tokens == {"pools": len(PROMPT) - 3 * BLOCK}


def test_a_report_of_a_hit_comes_behind_what_was_stored_before_it():
    stand, events = make_stand()
    stand.add(request("first", PROMPT))
    stand.add(request("second", PROMPT, params={"extra_args": {"kv_cache_report_mode": "full"}}))
    stand.step()
    first, second = events
    assert first.block_hashes == second.block_hashes and first.token_ids == second.token_ids
    assert stand.result.decided[0]["new"][1][1] == 3 * BLOCK


def test_an_eviction_by_a_connector_is_said():
    stand, events = make_stand()
    stand.add(request("runs", PROMPT, 2))
    stand.step()
    (ids,) = stand.manager.get_block_ids("runs")
    stand.run_all()
    stand.manager.evict_blocks({ids[1]})
    stand.add(request("wants all", PROMPT, params={"extra_args": {"kv_cache_report_mode": "full"}}))
    stand.run_all()
    stored, reported = [event for event in events if isinstance(event, BlockStored)][:2]
    assert reported.block_hashes == stored.block_hashes[:1]
    assert [type(event) for event in events[:3]] == [BlockStored, BlockRemoved, BlockStored]  # in order
    removed = [name for event in events if isinstance(event, BlockRemoved) for name in event.block_hashes]
    assert sorted(removed) == sorted(stored.block_hashes[1:])


@pytest.mark.parametrize("rank", [0, 3])
def test_a_publisher_tells_of_each_data_parallel_rank(rank, tmp_path):
    """A rank's scheduler differs in its publisher alone: another endpoint, and its number in each batch."""
    settings = Settings()
    config = make_vllm_config(settings)
    endpoint = f"inproc://{tmp_path.name}"
    config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv"
    )
    config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank = rank
    stand = Stand(settings, config=config)
    publisher: Any = stand.scheduler.kv_event_publisher
    found = publisher.get_publisher_config()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(found.endpoint)
    socket.subscribe(b"kv")
    socket.RCVTIMEO = 10_000
    time.sleep(1)  # a subscription takes its time
    try:
        stand.cached(request("first", PROMPT))
        topic, number, payload = socket.recv_multipart()
    finally:
        stand.scheduler.shutdown()
        socket.close(linger=0)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (topic, int.from_bytes(number, "big"), batch.data_parallel_rank) == (b"kv", 0, rank)
    (stored,) = batch.events
    assert stored.token_ids == list(PROMPT)[: 3 * BLOCK] and stored.medium == "GPU"


def test_a_scheduler_without_events_has_none_to_take():
    stand = Stand(Settings())
    stand.cached(request("first", PROMPT))
    assert stand.manager.take_events() == []


def random_run(stand: Stand, random: Random) -> None:
    """Let a few requests begin and end."""
    for number in range(20):
        stand.add(
            request(
                f"r{number} {len(stand.requests)}",
                [random.randrange(9)] * random.randrange(1, 90),
                random.randrange(1, 40),
            )
        )
        stand.step()
    stand.run_all()


@pytest.mark.parametrize("windows", [(), (64,)])
def test_each_group_is_replayed_for_itself(windows):
    stand, events = make_stand(Settings(num_blocks=41, windows=windows, reserves_full_prompt=False))
    random_run(stand, Random(1))
    random_run(stand, Random(2))
    replay = Replay()
    for event in events:
        replay.apply(event)
    assert {group for group, _ in replay.tokens} == set(range(1 + len(windows)))
    assert {name for _, name in replay.tokens} == {name for _, name in cached(stand.manager)}
    assert stand.manager.manager.stats.num_evicted_blocks


def test_a_reported_hit_says_only_what_each_group_has_cached():
    """vLLM's own reports the whole prefix for a window too, although its beginning is gone."""
    groups = [FullAttention(4), SlidingWindow(4, 8), FullAttention(8)]
    manager = KVCacheManager(64, groups=groups, enable_events=True)
    first = Sequence("first", range(40))
    manager.allocate_slots(first, 20)
    manager.allocate_slots(first, 20)
    stored: dict[int, set[bytes]] = {0: set(), 1: set(), 2: set()}
    for event in manager.take_events():
        stored[event.group_idx] |= set(event.block_hashes)
    hit = manager.get_computed_blocks(Sequence("second", range(40)), 32)
    said = {event.group_idx: event for event in _as_stored(hit, [4, 4, 8])}
    assert said.keys() == {0, 1}
    assert all(set(event.block_hashes) <= stored[group] for group, event in said.items())
    assert (len(said[0].block_hashes), said[0].parent_block_hash, said[0].token_ids) == (8, None, [*range(32)])
    assert said[1].block_hashes == said[0].block_hashes[-len(said[1].block_hashes) :]
    assert len(said[1].block_hashes) < 8
    assert said[1].parent_block_hash == said[0].block_hashes[-len(said[1].block_hashes) - 1]
    assert said[1].token_ids == [*range(32 - 4 * len(said[1].block_hashes), 32)]
