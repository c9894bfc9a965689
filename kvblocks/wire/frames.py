"""The messages of the wire, part by part. No input or output.

Live (PUB): [topic, number, payload]; a batch's number is a big-endian u64. To get all batches from a number on, a
consumer sends ["", number] to the replay socket (ROUTER). Each batch comes as ["", topic, number, payload], and the end
as ["", "", -1, ""]. These are vLLM's messages; before 2026 its answers had no topic.

The snapshot is ours, on the same socket: ["", SNAPSHOT, request] is answered by as many chunks as needed, ["",
SNAPSHOT, head, payload]. vLLM doesn't know this request: it logs that, and answers nothing.
"""

from typing import Annotated, Final, NamedTuple, TypeAlias

from kvblocks.wire.errors import MalformedFrameError, missing

try:
    import msgspec
except ImportError as _error:
    raise missing("msgspec", _error) from _error

VERSION: Final = 1
"""Version of the snapshot's messages."""

SNAPSHOT: Final = b"\0kvblocks.snapshot"
"""Stands where a replay's answer has its topic. None of our topics begins with a NUL."""

MAX_NUMBER: Final = 2**63 - 1
"""The highest number of a batch that is read. No publisher gets so far, and the number after it can still be sent."""

END: Final = b"\xff" * 8
_NUM_PARTS: Final = 3
_NUM_BYTES: Final = 8


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]


class SnapshotHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The head of a snapshot's chunk. Later versions may add fields at the end.

    - request: the number in the request.
    - epoch: the number of the first batch that this publisher ever made.
    - number: that of the last batch that the snapshot includes.
    - index, total: this chunk's index, and the number of chunks. A total of 0 is a refusal: ask again later.
    """

    version: int
    request: int
    epoch: _Number
    number: _Number
    index: int
    total: int


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request for a snapshot. request: any number; the answer repeats it."""

    version: int
    request: int


class Batch(NamedTuple):
    """A batch's number and payload, live or replayed."""

    topic: bytes
    number: int
    payload: bytes


class ReplayEnd(NamedTuple):
    """The end of a replay: all batches that the publisher keeps were sent."""


class SnapshotChunk(NamedTuple):
    """A part of a snapshot."""

    head: SnapshotHead
    payload: bytes


_head_decoder: Final = msgspec.msgpack.Decoder(SnapshotHead)
_request_decoder: Final = msgspec.msgpack.Decoder(SnapshotRequest)
_encoder: Final = msgspec.msgpack.Encoder()


def pack_number(number: int) -> bytes:
    """Return a batch's number as its bytes on the wire."""
    return number.to_bytes(_NUM_BYTES, "big")


def read_batch(parts: list[bytes]) -> Batch:
    """Return the batch in a live message. Raises MalformedFrameError."""
    if len(parts) != _NUM_PARTS or len(parts[1]) != _NUM_BYTES:
        raise MalformedFrameError(f"frame: expected [topic, 8 bytes, payload], got {_shown(parts)}")
    number = int.from_bytes(parts[1], "big")
    if number > MAX_NUMBER:
        raise MalformedFrameError(f"frame: expected a number of at most {MAX_NUMBER}, got {number}")
    return Batch(parts[0], number, parts[2])


def replay_request(number: int) -> list[bytes]:
    """Return the message that asks for all batches from `number` on."""
    return [b"", pack_number(number)]


def snapshot_request(request: int) -> list[bytes]:
    """Return the message that asks for a snapshot."""
    return [b"", SNAPSHOT, _encoder.encode(SnapshotRequest(VERSION, request))]


def snapshot_reply(head: SnapshotHead, payload: bytes) -> list[bytes]:
    """Return the message with a chunk."""
    return [b"", SNAPSHOT, _encoder.encode(head), payload]


def read_request(parts: list[bytes]) -> int | SnapshotRequest:
    """Return what a message asks for: a number to replay from, or a snapshot. Raises MalformedFrameError."""
    if len(parts) == 2 and not parts[0] and len(parts[1]) == _NUM_BYTES:
        return int.from_bytes(parts[1], "big")
    if len(parts) == _NUM_PARTS and not parts[0] and parts[1] == SNAPSHOT:
        try:
            return _request_decoder.decode(parts[2])
        except msgspec.MsgspecError as error:
            raise MalformedFrameError(f"request: expected a snapshot's, got {_shown(parts)}: {error}") from error
    raise MalformedFrameError(f"request: expected a replay's or a snapshot's, got {_shown(parts)}")


def read_reply(parts: list[bytes]) -> Batch | ReplayEnd | SnapshotChunk:
    """Return the content of an answer. Raises MalformedFrameError."""
    if len(parts) == _NUM_PARTS and not parts[0]:
        parts = [b"", b"", *parts[1:]]  # an answer of vLLM before 2026
    if len(parts) != 4 or parts[0]:
        raise MalformedFrameError(f"reply: expected a batch or a chunk, got {_shown(parts)}")
    if parts[1] == SNAPSHOT:
        try:
            return SnapshotChunk(_head_decoder.decode(parts[2]), parts[3])
        except msgspec.MsgspecError as error:
            raise MalformedFrameError(f"reply: expected a chunk, got {_shown(parts)}: {error}") from error
    return ReplayEnd() if parts[2] == END else read_batch(parts[1:])


def _shown(parts: list[bytes]) -> str:
    return repr([part[:20] for part in parts[:6]])
