"""`kvblocks serve --kv-events`: what is cached, published as it changes, and as a snapshot."""

import re
import time

import pytest
import torch
from server.server_harness import MODEL, running_server, serving, start, tiny_loaded, wait_for

from bench.ports import free_ports
from kvblocks import InvalidArgumentError, Sequence
from kvblocks.server.run import make_publisher
from kvblocks.server.settings import EventSettings
from kvblocks.wire import MirrorClient, Source

LOCAL = "tcp://127.0.0.1:0"
PROMPT = [(7 * index) % 250 for index in range(300)]  # eighteen full blocks of sixteen


@pytest.fixture(scope="module")
def model(tiny_folder):
    torch.set_num_threads(1)
    return tiny_loaded(tiny_folder)


@pytest.fixture
def server(model):
    events = EventSettings(endpoint=LOCAL, replay=LOCAL, topic="kv@one@tiny")
    with running_server(model, cache={"num_blocks": 40, "host_cache": "16MiB"}, events=events) as running:
        yield running


def ask(server, prompt, **options):
    with server.client() as client:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0, **options)
    server.wait_until_idle()


def names_on_device(server):
    """What is cached, asked of the manager."""
    return server.on_thread(lambda: {block.block_hash for block in server.engine.manager.blocks if block.is_cached})


def source(publisher):
    return Source(publisher.endpoint, publisher.replay_endpoint)


def test_a_subscriber_knows_what_is_cached(server):
    publisher, manager = server.service.publisher, server.engine.manager
    with MirrorClient({"w": source(publisher)}) as client:
        for first in range(5):  # more than the pool holds
            ask(server, [first, *PROMPT])

        def agrees():
            client.receive(0.05)
            sequence = Sequence("probe", [4, *PROMPT])
            hashes = server.on_thread(lambda: manager.inspect.block_hashes(sequence))
            device = client.mirror.find("w", hashes, medium="GPU")
            return device == client.mirror.find("w", hashes, medium="CPU") == len(hashes) == 18

        wait_for(agrees)
        early = server.on_thread(lambda: manager.inspect.block_hashes(Sequence("probe", [0, *PROMPT])))
        wait_for(lambda: client.receive(0.05) >= 0 and client.mirror.find("w", early, medium="CPU") == 18)
        assert client.mirror.find("w", early, medium="GPU") == 0  # evicted
        with server.http() as http:
            http.post("/v1/cache/reset", json={})
        wait_for(lambda: client.receive(0.05) >= 0 and client.mirror.find("w", early, medium="CPU") == 0)
        assert client.mirror.is_complete("w")


def test_a_snapshot_is_what_is_cached(server):
    for first in range(5):
        ask(server, [first, *PROMPT], extra_body={"cache_salt": "ann"} if first == 4 else None)
    with server.http() as http:
        values = http.get("/v1/cache/snapshot").json()
    assert values["epoch"] == str(server.service.publisher.epoch)
    assert int(values["number"]) > int(values["epoch"])
    by_medium = {"GPU": set(), "CPU": set()}
    for stored in values["stored"]:
        by_medium[stored["medium"]] |= {bytes.fromhex(name) for name in stored["block_hashes"]}
        assert (stored["block_size"], stored["kind"], stored["window"]) == (16, "full_attention", None)
    assert by_medium["GPU"] == names_on_device(server)
    assert len(by_medium["CPU"]) == 5 * 18
    assert values["num_blocks"] == sum(map(len, by_medium.values()))
    assert {stored["cache_salt"] for stored in values["stored"]} == {None, "ann"}


def test_what_is_published_is_counted(server):
    ask(server, PROMPT)
    wait_for(lambda: server.service.publisher.num_sent >= 2)
    with server.http() as http:
        text = http.get("/metrics").text
    assert int(float(re.search(r"^kvblocks_event_batches_sent_total (\S+)$", text, re.MULTILINE)[1])) >= 2
    assert "kvblocks_event_batches_dropped_total 0.0" in text
    assert "kvblocks_event_requests_total 0.0" in text


def test_without_events_there_is_no_snapshot(model):
    with running_server(model) as server, server.http() as http:
        answer = http.get("/v1/cache/snapshot")
        assert answer.status_code == 404
        assert "--kv-events" in answer.json()["error"]["message"]
        assert "kvblocks_event" not in http.get("/metrics").text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": LOCAL}, "--kv-replay: expected --kv-events"),
        ({"topic": "t"}, "--kv-topic: expected --kv-events"),
        ({"allow_remote": True}, "--kv-allow-remote: expected --kv-events"),
        ({"endpoint": "tcp://0.0.0.0:0"}, "expected one that only this machine can reach"),
        ({"endpoint": "localhost:5557"}, "endpoint: expected 'tcp://HOST:PORT'"),
    ],
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_publisher(EventSettings(**options))


def test_the_command_publishes_and_a_restart_is_a_new_epoch(tiny_folder):
    """Real processes: one is killed, and the next one publishes at the same addresses."""
    torch.set_num_threads(1)
    ends = tuple(f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    prompt, epochs = PROMPT[:100], []
    with MirrorClient({"w": Source(*ends)}) as client:
        for _ in range(2):
            options = ["--kv-events", ends[0], "--kv-replay", ends[1], "--kv-topic", "kv@one@tiny"]
            with serving(tiny_folder, *options) as (process, url, lines):
                said = next(line for line in lines if line.startswith("events at "))
                assert tuple(re.findall(r"tcp://\S+\d", said)) == ends
                import httpx2

                with httpx2.Client(base_url=url.removesuffix("/v1"), timeout=60, trust_env=False) as http:
                    body = {"model": tiny_folder.name, "prompt": prompt, "max_tokens": 1}
                    assert http.post("/v1/completions", json=body).status_code == 200
                    values = http.get("/v1/cache/snapshot").json()
                epochs.append(int(values["epoch"]))
                hashes = [name for stored in values["stored"] for name in map(bytes.fromhex, stored["block_hashes"])]
                assert len(hashes) == 6
                end = time.monotonic() + 30
                while client.mirror.find("w", hashes) < 6 or not client.mirror.is_complete("w"):
                    client.receive(0.05)
                    assert time.monotonic() < end
                process.kill()
    assert epochs[0] < epochs[1]


def test_an_address_in_use_is_told_before_the_model_is_loaded(tiny_folder, server):
    process = start(
        "serve", "--model", "/no/such/model", "--port", "0", "--kv-events", server.service.publisher.endpoint
    )
    _, error = process.communicate(timeout=150)
    assert process.returncode == 1
    assert "expected a free address of this machine" in error
