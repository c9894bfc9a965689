"""Messages, part by part, and the frame that docs/design/wire.md takes apart."""

import re
from pathlib import Path

import msgspec
import pytest

from kvblocks.wire import CODECS, BlockStored, EventBatch, MalformedFrameError, decode
from kvblocks.wire.frames import (
    END,
    MAX_NUMBER,
    SNAPSHOT,
    Batch,
    ReplayEnd,
    SnapshotChunk,
    SnapshotHead,
    SnapshotRequest,
    pack_number,
    read_batch,
    read_reply,
    read_request,
    replay_request,
    snapshot_reply,
    snapshot_request,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "wire.md"
NUMBER = (7).to_bytes(8, "big")
HEAD = SnapshotHead(1, 2, 2**61, 2**61 + 5, 0, 1)


def test_the_page_takes_a_real_frame_apart():
    rows = re.findall(r"^\| (`[0-9a-f` ]+`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    payload = bytes.fromhex("".join(rows).replace("`", ""))
    stored = BlockStored(
        block_hashes=[0x1122334455667788],
        token_ids=[5, 300, 70000, 7],
        block_size=4,
        medium="GPU",
        extra_keys=[None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    batch = EventBatch(1.5, [stored], 0)
    assert decode(payload) == batch and CODECS["vllm"].encode(batch) == payload


def test_what_is_asked_is_read():
    assert read_request(replay_request(7)) == 7 and replay_request(7) == [b"", NUMBER]
    assert read_request(snapshot_request(9)) == SnapshotRequest(1, 9)
    assert len(snapshot_request(9)) == 3  # so with its client's name it has four, and vLLM refuses it


def test_what_is_answered_is_read():
    assert read_reply([b"", b"t", NUMBER, b"p"]) == Batch(b"t", 7, b"p")
    assert read_reply([b"", NUMBER, b"p"]) == Batch(b"", 7, b"p")  # of vLLM 0.11
    assert read_reply([b"", b"", END, b""]) == read_reply([b"", END, b""]) == ReplayEnd()
    assert read_reply(snapshot_reply(HEAD, b"p")) == SnapshotChunk(HEAD, b"p")


def test_newer_heads_and_requests_may_say_more():
    head = msgspec.msgpack.encode([2, 2, 3, 4, 0, 1, "more"])
    chunk = read_reply([b"", SNAPSHOT, head, b"p"])
    assert isinstance(chunk, SnapshotChunk) and chunk.head.version == 2
    assert read_request([b"", SNAPSHOT, msgspec.msgpack.encode([2, 9, {}])]) == SnapshotRequest(2, 9)


@pytest.mark.parametrize("read", [read_batch, read_reply, read_request])
@pytest.mark.parametrize(
    "parts",
    [[], [b""], [b"x"] * 2, [b"x"] * 3, [b""] * 3, [b"x"] * 4, [b""] * 4, [b""] * 5]
    + [[b"", SNAPSHOT, part, b""][:length] for part in (b"", b"\xc1", b"\x92\x01") for length in (3, 4)],
)
def test_what_is_malformed_is_one_error(read, parts):
    with pytest.raises(MalformedFrameError, match=r"expected .*, got"):
        read(parts)


@pytest.mark.parametrize("number", [-5, MAX_NUMBER + 1, 2**64 - 1])
def test_a_number_that_no_publisher_reaches_is_malformed(number):
    """A mirror would ask for the number after it, which has no place in a message."""
    head = msgspec.msgpack.encode([1, 2, 0, number, 0, 1])
    with pytest.raises(MalformedFrameError, match=r"expected .*, got"):
        read_reply([b"", SNAPSHOT, head, b"p"])
    if number > 0:
        with pytest.raises(
            MalformedFrameError, match=rf"frame: expected a number of at most {MAX_NUMBER}, got {number}"
        ):
            read_batch([b"", number.to_bytes(8, "big"), b"p"])
    assert read_batch([b"", pack_number(MAX_NUMBER), b"p"]) == Batch(b"", MAX_NUMBER, b"p")
