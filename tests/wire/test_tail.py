"""`python -m kvblocks.wire tail`: what a person sees."""

import json
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from wire.test_publisher import SlowConverter

from kvblocks import AllBlocksCleared, BlockRemoved, BlockStored
from kvblocks.wire import CODECS, Converter, EventBatch, EventPublisher, UnknownEvent
from kvblocks.wire import tail as tail_module
from kvblocks.wire.codecs import BlockStored as Said
from kvblocks.wire.frames import Batch
from kvblocks.wire.tail import lines, main, make_parser

LOCAL = "tcp://127.0.0.1:0"
EVENTS = [
    AllBlocksCleared(),
    BlockStored((b"\xab" * 32, b"\xcd" * 32), None, bytes(32), 4, lora="adapter"),
    BlockRemoved((b"\xab" * 32,)),
]


def batch_of(*events, codec: str = "vllm", rank: int = 0) -> Batch:
    return Batch(b"kv", 7, CODECS[codec].encode(EventBatch(0.5, list(events), rank)))


def first_line(batch: Batch, *, as_json: bool) -> str:
    return next(lines(batch, as_json=as_json))


@pytest.mark.parametrize("codec", CODECS)
def test_each_event_is_a_line_in_every_encoding(codec):
    shown = [*lines(batch_of(*Converter(codec).convert(EVENTS), codec=codec, rank=3), as_json=False)]
    assert [line.partition(" 7 kv rank 3  ")[2] for line in shown] == [
        "cleared    all blocks",
        "stored     2 blocks in GPU: abababababab cdcdcdcdcdcd, 8 tokens, lora adapter"
        + (", extra keys" if codec != "sglang" else ""),
        "removed    1 block in GPU: abababababab",
    ]


def test_other_batches_have_their_lines_too():
    long = Said(block_hashes=[*range(9)], parent_block_hash=b"\xee" * 9, token_ids=[77777], block_size=1, group_idx=2)
    batch = batch_of(UnknownEvent("Pinned", {"type": "Pinned", "x": 1}), long)
    first, second = lines(batch, as_json=False)
    assert first.endswith("unknown    'Pinned'")
    assert "9 blocks in ? group 2: 000000000000" in second and " …, 1 token, after eeeeeeeeeeee" in second
    assert "77777" not in second
    assert first_line(batch_of(), as_json=False).endswith(" 7 kv  heartbeat")
    assert first_line(Batch(b"", 1, b"\xc1"), as_json=False).startswith("! payload: expected a batch of events")
    assert [*lines(Batch(b"", 1, msgspec.msgpack.encode([1e300, [], 0])), as_json=False)] == ["? 1  heartbeat"]


def test_json_says_all():
    events = [Said(block_hashes=[b"\xff", 1], token_ids=[5], block_size=1, unknown={"new": b"\x01"})]
    (line,) = lines(batch_of(*events), as_json=True)
    row = json.loads(line)
    assert row == {"ts": 0.5, "number": 7, "topic": "kv", "rank": 0, "event": "BlockStored"} | {
        "block_hashes": ["ff", 1],
        "token_ids": [5],
        "block_size": 1,
        "unknown": {"new": "01"},
    }
    assert json.loads(first_line(batch_of(UnknownEvent("New", ["New", 2])), as_json=True))["content"] == ["New", 2]
    assert json.loads(first_line(batch_of(), as_json=True))["event"] is None
    assert "malformed" in json.loads(first_line(Batch(b"", 1, b"\xc1"), as_json=True))


class EnoughError(Exception):
    """Ends a tail."""


def test_it_shows_what_is_kept_and_what_comes(capsys):
    converter, shown = SlowConverter(), []
    converter.may_go.clear()  # else a heartbeat could come before the events

    def show(line):
        shown.append(line)
        if line.startswith("= cached: 1 in rank 0 group 0 GPU; complete") and "heartbeat" in shown[-2]:
            raise EnoughError

    with EventPublisher(LOCAL, LOCAL, topic="kv@pod@m", heartbeat=0.05, converter=converter) as publisher:
        publisher.publish(EVENTS)
        converter.may_go.set()
        options = ["tail", publisher.endpoint, "--replay", publisher.replay_endpoint, "--mirror", "--topic", "kv@"]
        with pytest.raises(EnoughError):
            tail_module.tail(make_parser().parse_args(options), show)
    assert [line.split("  ")[1].split()[0] for line in shown if line[0] != "="][:5] == [
        *("cleared", "cleared", "stored", "removed", "heartbeat")
    ]
    assert not [line for line in shown if line[0] == "!"] and not capsys.readouterr().err


def test_gaps_and_restarts_are_shown(capsys):
    with zmq.Context.instance().socket(zmq.PUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        is_done = threading.Event()

        def publish():
            """Publish again and again, since a subscription takes its time."""
            while not is_done.is_set():
                for number in (3, 5, 1):
                    pub.send_multipart([b"", number.to_bytes(8, "big"), CODECS["vllm"].encode(EventBatch(0.0, [], 0))])
                pub.send_multipart([b"x"])
                time.sleep(0.01)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            assert main(["tail", f"tcp://127.0.0.1:{port}", "--count", "9"]) == 0
        finally:
            is_done.set()
            thread.join()
    printed = capsys.readouterr()
    assert "! 1 batches before the next one are missing" in printed.out
    assert "! number 1 after 5: the publisher was restarted" in printed.out
    assert "# frame: expected [topic, 8 bytes, payload]" in printed.err


def test_bad_endpoints_are_one_line(capsys):
    assert main(["tail", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("kvblocks.wire: nowhere: expected tcp://HOST:PORT, got ")
    with pytest.raises(SystemExit):
        main(["head"])


def test_a_replay_that_does_not_come_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("kvblocks.wire.tail._PATIENCE", 0.1)
    assert main(["tail", "tcp://127.0.0.1:9", "--replay", "tcp://127.0.0.1:9"]) == 1
    assert "expected a replay from tcp://127.0.0.1:9 within" in capsys.readouterr().err


WITHOUT = """
import sys
sys.modules[{package!r}] = None
sys.argv = ["kvblocks.wire", "tail", "tcp://127.0.0.1:9"]
from kvblocks.wire.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named(package):
    command = [sys.executable, "-c", WITHOUT.format(package=package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "pip install 'kvblocks[wire]'" in done.stderr and package in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_terminal_would_obey_is_shown():
    said = Said(block_hashes=[1], token_ids=[1], block_size=1, lora_name="x\x1b[2J\nforged")
    (line,) = lines(batch_of(said), as_json=False)
    assert "\x1b" not in line
    assert "\n" not in line
    assert r"lora x\x1b[2J\nforged" in line


def test_keys_that_are_bytes_are_shown_in_json():
    payload = msgspec.msgpack.encode([1.0, [{"type": "Other", "x": {b"k": b"v"}}], 0])
    (line,) = lines(Batch(b"", 1, payload), as_json=True)
    assert json.loads(line)["content"] == {"type": "Other", "x": {"6b": "76"}}


def test_live_batches_that_a_replay_showed_are_not_shown_again(monkeypatch):
    """A publisher that was busy when it was asked: live copies reach the subscriber after the replay."""
    kept = [Batch(b"", number, b"") for number in (1, 2, 3)]
    waiting = [(b"", number.to_bytes(8), b"") for number in (1, 2, 3, 4)]

    class Live:
        def poll(self, timeout):
            return bool(waiting)

        def recv_multipart(self):
            return list(waiting.pop(0))

    monkeypatch.setattr(tail_module, "replayed", lambda endpoint, number: iter(kept))
    options = make_parser().parse_args(["tail", LOCAL, "--replay", LOCAL])
    shown = tail_module.batches(Live(), options)
    assert [next(shown).number for _ in range(4)] == [1, 2, 3, 4]


def test_a_reply_that_is_none_ends_it_with_a_message(capsys):
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.bind(LOCAL)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)

        def answer():
            client = router.recv_multipart()[0]
            router.send_multipart((client, b"junk"))

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["tail", LOCAL.replace(":0", ":9"), "--replay", endpoint]) == 1
        thread.join(10)
    assert "kvblocks.wire: " in capsys.readouterr().err
