"""`python -m kvblocks.wire tail tcp://…`: shows a publisher's events as they come, one line per event."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from kvblocks.arguments import counted
from kvblocks.wire.client import MirrorClient, Source
from kvblocks.wire.codecs import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hash,
    UnknownEvent,
    WireEvent,
    decode,
)
from kvblocks.wire.errors import MalformedFrameError, missing
from kvblocks.wire.frames import Batch, ReplayEnd, SnapshotChunk, read_batch, read_reply, replay_request

try:
    import msgspec
    import zmq
except ImportError as _error:
    raise missing(_error.name or "pyzmq", _error) from _error

_NUM_SHOWN: Final = 4  # hashes shown per event
_SILENCE: Final = 10.0  # seconds without messages after which the user is told
_PATIENCE: Final = 3.0  # seconds to wait for the first answer of a replay
_NO_ENDPOINT: Final = (zmq.EINVAL, zmq.EPROTONOSUPPORT)  # errors of a text that is no endpoint
_WORKER: Final = "publisher"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. arguments: None: those of the process."""
    options = make_parser().parse_args(arguments)
    try:
        tail(options, print)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the lines has gone; otherwise Python would report that once more
        return 0
    except (zmq.ZMQError, ConnectionError, MalformedFrameError) as error:
        is_wrong = isinstance(error, zmq.ZMQError) and error.errno in _NO_ENDPOINT
        said = f"expected tcp://HOST:PORT, got {error}" if is_wrong else str(error)
        print(f"kvblocks.wire: {options.endpoint}: {said}", file=sys.stderr)
        return 2 if is_wrong else 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvblocks.wire", description="Show the events of a KV cache.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tail", help="show events as they come, a line per event")
    command.add_argument("endpoint", help="where it publishes: tcp://HOST:PORT")
    command.add_argument(
        "--replay", metavar="ENDPOINT", help="where replays are asked for: first show all batches that are kept"
    )
    command.add_argument("--topic", default="", help="only topics that begin with this")
    command.add_argument("--json", action="store_true", help="a JSON object per event, with all fields")
    command.add_argument("--mirror", action="store_true", help="after each batch, a line on what is cached now")
    command.add_argument("--count", type=int, metavar="N", help="stop after N batches")
    return parser


def tail(options: argparse.Namespace, out: Callable[[str], None]) -> None:
    """Pass each line to `out`, until `--count` batches have come. Raises zmq.ZMQError for a bad endpoint."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    sources = {_WORKER: Source(options.endpoint, options.replay, options.topic)} if options.mirror else {}
    num_batches, last = 0, None
    with context.socket(zmq.SUB) as live, MirrorClient(sources) as client:
        live.setsockopt(zmq.LINGER, 0)
        live.subscribe(options.topic.encode())
        live.connect(options.endpoint)
        for batch in batches(live, options):
            if last is not None and batch.number > last + 1 and not options.json:
                out(f"! {batch.number - last - 1} batches before the next one are missing, or the publisher restarted")
            if last is not None and batch.number <= last and not options.json:
                out(f"! number {batch.number} after {last}: the publisher was restarted")
            last = batch.number
            for line in lines(batch, as_json=options.json):
                out(line)
            if options.mirror:
                client.receive(0.2)
                out(summary(client, as_json=options.json))
            num_batches += 1
            if options.count is not None and num_batches >= options.count:
                return


def batches(live: "zmq.Socket[bytes]", options: argparse.Namespace) -> Iterator[Batch]:
    """Yield kept batches, if a replay was asked for, then live batches that the replay didn't have."""
    last = -1
    if options.replay is not None:
        for batch in replayed(options.replay, 0):
            last = batch.number
            yield batch
    until, waited = last, 0.0
    while True:
        if not live.poll(1000):
            waited += 1.0
            if waited == _SILENCE:
                print(f"# nothing has come from {options.endpoint} for {_SILENCE:.0f} s", file=sys.stderr)
            continue
        waited = 0.0
        try:
            batch = read_batch(live.recv_multipart())
        except MalformedFrameError as error:
            print(f"# {error}", file=sys.stderr)
            continue
        if options.replay is not None and batch.number > last + 1:
            missed = [kept for kept in replayed(options.replay, last + 1) if kept.number < batch.number]
            yield from missed
        if batch.number > until:  # otherwise the replay had it
            until = -1
            if batch.number != last:
                last = batch.number
                yield batch


def replayed(endpoint: str, number: int) -> Iterator[Batch]:
    """Yield all that a publisher keeps from a number on. Raises ConnectionError if it doesn't answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as asks:
        asks.setsockopt(zmq.LINGER, 0)
        asks.connect(endpoint)
        asks.send_multipart(replay_request(number))
        until = time.monotonic() + _PATIENCE
        while asks.poll(int(1000 * max(0.0, until - time.monotonic()))):
            until = time.monotonic() + _PATIENCE
            reply = read_reply(asks.recv_multipart())
            if isinstance(reply, ReplayEnd):
                return
            if not isinstance(reply, SnapshotChunk):
                yield reply
    raise ConnectionError(f"expected a replay from {endpoint} within {_PATIENCE:.0f} s, got none")


def lines(batch: Batch, *, as_json: bool) -> Iterator[str]:
    """Yield one line per event of a batch, and one line for an empty batch or one that can't be read."""
    topic = batch.topic.decode(errors="replace")
    try:
        said = decode(batch.payload)
    except MalformedFrameError as error:
        yield (
            as_text({"number": batch.number, "topic": topic, "malformed": str(error)})
            if as_json
            else _plain(f"! {error}")
        )
        return
    if as_json:
        events: list[WireEvent | None] = [*said.events] or [None]
        for event in events:
            yield as_text(_row(batch, topic, said, event))
        return
    when = datetime.fromtimestamp(said.ts).astimezone().strftime("%H:%M:%S.%f")[:-3] if 0 <= said.ts < 1e11 else "?"
    head = f"{when} {batch.number}" + (f" {topic}" if topic else "")
    head += f" rank {said.data_parallel_rank}" if said.data_parallel_rank else ""
    for event in said.events:
        yield _plain(f"{head}  {describe(event)}")
    if not said.events:
        yield _plain(f"{head}  heartbeat")


def describe(event: WireEvent) -> str:
    """Return a short description of an event. Tokens are private: only their number is shown."""
    if isinstance(event, AllBlocksCleared):
        return "cleared    all blocks"
    if isinstance(event, UnknownEvent):
        return f"unknown    {event.type!r}"
    if isinstance(event, BlockRemoved):
        return f"removed    {_blocks(event)}"
    notes = [counted(len(event.token_ids), "token")]
    if event.parent_block_hash is not None:
        notes.append(f"after {_name(event.parent_block_hash)}")
    named: dict[str, Any] = {"lora": event.lora_name, "window": event.kv_cache_spec_sliding_window}
    named |= {"session": event.session_id, "locality": event.locality}
    notes += [f"{name} {value}" for name, value in named.items() if value is not None]
    if any(event.extra_keys or ()):
        notes.append("extra keys")
    return f"stored     {_blocks(event)}, {', '.join(notes)}"


def summary(client: MirrorClient, *, as_json: bool) -> str:
    """Return what the mirror has now."""
    mirror = client.mirror
    held = {f"rank {p.rank} group {p.group} {p.medium}": len(names) for p, names in mirror.places(_WORKER).items()}
    counts = msgspec.to_builtins(mirror.stats)
    state = {"number": mirror.number(_WORKER), "is_complete": mirror.is_complete(_WORKER), "blocks": held} | counts
    if as_json:
        return as_text({"mirror": state})
    blocks = ", ".join(f"{number} in {place}" for place, number in held.items()) or "nothing"
    known = "complete" if state["is_complete"] else "not complete"
    notes = "".join(f", {number} {name.removeprefix('num_')}" for name, number in counts.items() if number)
    return _plain(f"= cached: {blocks}; {known}{notes}")


def as_text(row: Any) -> str:
    """Return a row as JSON; bytes as hexadecimal digits."""
    return json.dumps(_texts(row), default=repr)


def _texts(value: Any) -> Any:
    """Return a value with all bytes, including those in keys, as hexadecimal digits."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(_texts(key)): _texts(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(held) for held in value]
    return value.hex() if isinstance(value, bytes) else value


def _plain(text: object) -> str:
    """Return a publisher's text without control characters of a terminal."""
    return "".join([letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text)])


def _row(batch: Batch, topic: str, said: EventBatch, event: WireEvent | None) -> dict[str, Any]:
    row = {"ts": said.ts, "number": batch.number, "topic": topic, "rank": said.data_parallel_rank}
    if event is None:
        return row | {"event": None}
    if isinstance(event, UnknownEvent):
        return row | {"event": event.type, "content": event.content}
    fields = {name: value for name in event.__struct_fields__ if (value := getattr(event, name)) is not None}
    return row | {"event": type(event).__name__} | fields


def _blocks(event: BlockStored | BlockRemoved) -> str:
    names = event.block_hashes
    more = " …" if len(names) > _NUM_SHOWN else ""
    place = f"{event.medium or '?'}" + (f" group {event.group_idx}" if event.group_idx else "")
    return f"{counted(len(names), 'block')} in {place}: {' '.join(map(_name, names[:_NUM_SHOWN]))}{more}"


def _name(name: Hash) -> str:
    return (name.hex() if isinstance(name, bytes) else f"{name & 2**64 - 1:016x}")[-12:]
