"""Readers: what each format says, and errors that name line, field, what was expected and what was there."""

import gzip
import json
import logging

import numpy as np
import pytest

from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.replay.readers import read_trace
from kvblocks.replay.sample import SAMPLE
from kvblocks.replay.trace import TraceError, arrival_times, think_times

OPENING = {"session": "one", "block_size": 64, "tool_tokens": 1, "system_tokens": 2}
CALL = {"t": 0.0, "a": 1.5, "k": 0.0, "s": "tool_use", "in": 200, "out": 9, "sub": 0, "p": 0, "h": [[1, 3]]}
MOONCAKE = {"timestamp": 2000, "input_length": 1500, "output_length": 7, "hash_ids": [5, 6, 7]}
TWO_BLOCKS = {"input_length": 1024}
HEADER = {"kvblocks_trace": 1, "block_size": 16}
OURS = {"t": 0.5, "a": 2.0, "session": "s", "tenant": "x", "tokens": 40, "output": 3, "stop": "stop", "ids": ["p", "q"]}


def write(path, *rows):
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def prompts(trace):
    return [trace.blocks_of(request).tolist() for request in range(trace.num_requests)]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake(tmp_path, name):
    second = MOONCAKE | {"timestamp": 500, "input_length": 1024, "hash_ids": [5, 8]}
    trace = read_trace(write(tmp_path / name, MOONCAKE, second))
    assert prompts(trace) == [[0, 2], [0, 1]]  # in the order of their times; the partial last block isn't one
    assert trace.times.tolist() == [0.0, 1.5]  # from the first one on
    assert trace.tokens.tolist() == [1024, 1500]
    assert (trace.block_size, trace.source_format, trace.session_names) == (512, "mooncake", [None, None])
    assert np.isnan(trace.durations).all()
    assert trace.with_durations(0.5).durations.tolist() == [3.5, 3.5]
    facts = trace.facts(arrival_times(trace, None, 1))
    assert (facts.num_references, facts.num_unique_blocks, facts.num_other_tokens) == (4, 3, 1500 - 1024)
    assert (facts.duration_s, facts.infinite_hit_rate) == (1.5, 0.25)


def test_sessions(tmp_path):
    calls = [CALL, CALL | {"t": 9.0, "a": None, "k": 7.5, "s": "end_turn", "p": 2, "h": [[7, 1], [9, 1]]}]
    other = OPENING | {"session": "two"}
    trace = read_trace(write(tmp_path / "trace.jsonl", OPENING, *calls, other, CALL))
    assert prompts(trace) == [[0, 1, 2], [0, 1, 3, 4], [5, 6, 7]]  # ids are local to their session
    assert trace.session_names == ["one", "two"]
    assert trace.sessions.tolist() == [0, 0, 1]
    assert trace.stops == ["tool_use", "end_turn", "tool_use"]
    assert trace.times_are_relative
    assert think_times(trace).tolist() == [0, 7.5, 0]
    starts = arrival_times(trace, 60.0, 1)
    assert starts[1] - starts[0] == pytest.approx(9.0)
    assert 0 < starts[0] < starts[2]
    assert arrival_times(trace, None, 1).tolist() == [0, 9, 0]
    alone = trace.take_sessions(1, 2)
    assert prompts(alone) == [[0, 1, 2]]
    assert alone.session_names == ["two"]
    with pytest.raises(InvalidArgumentError, match="sessions: expected FROM:TO with 0 <= FROM < TO <= 2, got 1:3"):
        trace.take_sessions(1, 3)


def test_larger_blocks_join_the_traces(tmp_path):
    long = CALL | {"in": 640, "h": [[1, 9]]}
    parting = CALL | {"t": 3.0, "in": 512, "p": 5, "h": [[20, 3]]}
    trace = read_trace(write(tmp_path / "trace.jsonl", OPENING, long, parting), 256)
    assert trace.block_size == 256
    assert prompts(trace) == [[0, 1], [0, 2]]
    with pytest.raises(
        InvalidArgumentError, match="expected a block size that is a multiple of its 64 tokens, got 100"
    ):
        read_trace(tmp_path / "trace.jsonl", 100)


def test_our_own_format(tmp_path):
    follower = {"t": 5.0, "session": "s", "tenant": "x", "tokens": 70, "after": "q", "ids": ["r"]}
    early = {"t": 0.25, "tokens": 15, "ids": []}
    trace = read_trace(write(tmp_path / "trace.jsonl", HEADER, OURS, follower, early))
    assert prompts(trace) == [[], [0, 1], [0, 1, 2]]
    assert trace.session_names == [None, "s"]
    assert trace.tenants == [None, "x"]
    assert think_times(trace).tolist() == [0, 0, 2.5]
    assert trace.outputs.tolist() == [0, 3, 0]


def test_a_line_that_was_cut_is_left_out_and_logged(tmp_path, caplog):
    path = write(tmp_path / "trace.jsonl", HEADER, OURS, json.dumps(OURS)[:-5])
    with caplog.at_level(logging.WARNING):
        assert read_trace(path).num_requests == 1
    assert "trace.jsonl, line 3: left out, since it was cut" in caplog.text
    write(path, HEADER, json.dumps(OURS)[:-5] + "\n", OURS)
    with pytest.raises(TraceError, match="line 2: expected JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "trace.jsonl: expected requests, got an empty file"),
        ([[1]], r"line 1: expected an object, got \[1\]"),
        ([{"a": 1}], "line 1: expected one of the fields 'kvblocks_trace', 'session', 'hash_ids', got \\['a'\\]"),
        ([HEADER], "expected requests, got none"),
        ([MOONCAKE | {"hash_ids": 3}], "line 1, field 'hash_ids': expected a list, got 3"),
        ([MOONCAKE, MOONCAKE | {"hash_ids": [1, True, 2]}], "line 2, field 'hash_ids': expected ids .*, got True"),
        ([MOONCAKE | {"hash_ids": [1]}], "'hash_ids': expected 2 ids for input_length 1500, or one more, got 1"),
        (
            [MOONCAKE, MOONCAKE | {"hash_ids": [9, 6, 7]}],
            "line 2, field 'hash_ids': .* one prefix each; 6 had another id before it",
        ),
        ([MOONCAKE | {"timestamp": "now"}], "line 1, field 'timestamp': expected a number, got 'now'"),
        ([MOONCAKE | {"timestamp": None}], "line 1, field 'timestamp': expected a number, got None"),
        ([MOONCAKE | {"input_length": -1}], "field 'input_length': expected an integer of at least 0, got -1"),
        ([MOONCAKE | {"timestamp": float("nan")}], "field 'timestamp': expected a number, got nan"),
        ([OPENING | {"block_size": 0}], "field 'block_size': expected an integer of at least 1, got 0"),
        ([OPENING, CALL, OPENING], "line 3, field 'session': expected a name that no session before has, got 'one'"),
        ([OPENING, CALL, {"session": "b", "block_size": 32}], "line 3, field 'block_size': expected 64, .*, got 32"),
        ([OPENING, CALL | {"p": 4}], "line 2, field 'p': expected at most the 0 ids of the request before it, got 4"),
        ([OPENING, CALL | {"h": [[1]]}], r"line 2, field 'h': expected ranges \[start, count\] of ids .*, got \[1\]"),
        ([OPENING, CALL | {"h": [[1, 2**30]]}], "line 2, field 'h': expected a prompt of at most 16777216 ids"),
        ([OPENING, CALL | {"h": [[1, 2**23], [2**24, 2**23], [7, 1]]}], "a prompt of at most 16777216 ids, got"),
        ([OPENING, CALL, CALL | {"p": 3, "h": [[9, 2**24 - 2]]}], "line 3, field 'h': expected a prompt of at most"),
        ([OPENING, CALL | {"h": [[1, 2], [1, 1]]}], "line 2, field 'h': expected ids that stand for one prefix each"),
        ([OPENING, CALL, CALL | {"p": 1}], "line 3, field 'h': expected ids that stand for one prefix each"),
        ([OPENING, {"t": 1}], "line 2, field 'p': expected an integer of at least 0, got none"),
        ([HEADER | {"kvblocks_trace": 2}, OURS], "line 1, field 'kvblocks_trace': expected version 1, got 2"),
        ([HEADER, OURS | {"after": "z"}], "line 2, field 'after': expected an id of a line before, got 'z'"),
        (
            [HEADER, OURS | {"ids": ["a", "b", "c"]}],
            "field 'ids': expected at most 2 blocks of 16 tokens in all, got 3",
        ),
        ([HEADER, OURS, OURS | {"ids": ["q"]}], "line 3, field 'ids': expected ids that stand for one prefix each"),
        ([HEADER, OURS | {"ids": [1]}], "line 2, field 'ids': expected strings, got 1"),
        ([MOONCAKE | {"output_length": 2**64}], "'output_length': expected an integer of at most 2\\*\\*40, got 1844"),
        ([OPENING, CALL | {"a": -0.5}], "line 2, field 'a': expected a number of at least 0, got -0.5"),
        ([HEADER, OURS | {"a": -1}], "line 2, field 'a': expected a number of at least 0, got -1"),
        (
            [HEADER, OURS | {"tenant": "\ud800"}],
            "line 2, field 'tenant': expected a string without lone surrogates",
        ),
        (["[" * 200_000], "line 1: expected JSON, got "),
        ([HEADER, OURS | {"session": 3}], "line 2, field 'session': expected a string, got 3"),
    ],
)
def test_errors_say_where_and_what(tmp_path, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "trace.jsonl", *(row if isinstance(row, dict) else f"{row}\n" for row in rows)))
    assert issubclass(TraceError, KVBlocksError)


def test_ids_may_be_any_numbers(tmp_path):
    large = [MOONCAKE | {"hash_ids": [2**48 - 1, 3, 2**47]}, MOONCAKE | {"hash_ids": [2**48 - 1, 2**46]} | TWO_BLOCKS]
    assert prompts(read_trace(write(tmp_path / "trace.jsonl", *large))) == [[2, 0], [2, 1]]
    sessions = [OPENING, CALL | {"h": [[2**32 - 2, 1]]}, OPENING | {"session": "two"}, CALL]
    assert prompts(read_trace(write(tmp_path / "trace.jsonl", *sessions))) == [[0], [1, 2, 3]]


def test_a_file_that_is_no_gzip_or_half_of_one_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(b"plain")
    with pytest.raises(TraceError, match="expected a whole gzip file"):
        read_trace(path)
    path.write_bytes(gzip.compress(b"".join(json.dumps(MOONCAKE).encode() + b"\n" for _ in range(999)))[:-9])
    with pytest.raises(TraceError, match=r"after line \d+: expected a whole gzip file"):
        read_trace(path)


def test_the_sample_is_read_and_its_sessions_keep_their_tenants():
    trace = read_trace(SAMPLE)
    assert trace.source_format == "kvblocks"
    assert len({*trace.tenants}) == 4
    assert trace.num_requests > 1000
    assert not trace.times_are_relative
    assert (np.diff(trace.times) >= 0).all()
