"""The recorder: it writes what was asked, without texts, in whole lines, whatever happens."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvblocks import InvalidArgumentError, KVCacheManager, Sequence
from kvblocks.replay.readers import read_trace
from kvblocks.replay.recorder import TraceRecorder

ROOT = Path(__file__).resolve().parents[2]


def lines(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def record(recorder, tokens, arrived_s=0.0, **options):
    return recorder.record(Sequence(0, tokens, **options), arrived_s=arrived_s, seconds=1.5, stop="stop")


def prompts(trace):
    return [trace.blocks_of(request).tolist() for request in range(trace.num_requests)]


def test_what_was_recorded_is_replayed(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 4)
    assert record(recorder, range(10), 100.0, session="s", salt="t")
    assert record(recorder, [*range(8), *range(50, 54)], 101.0, session="s", salt="t")
    assert record(recorder, range(10), 102.0, session="s")  # another tenant's: shares nothing
    assert record(recorder, [1, 2, 3], 103.0)
    answered = Sequence(0, range(4), lora="a")
    answered.append_tokens([7, 8, 9, 10, 11])
    assert recorder.record(answered, arrived_s=104.0, seconds=2.0, stop="length", think_s=0.25)
    recorder.close()
    assert recorder.num_recorded == 5
    trace = read_trace(path)
    assert prompts(trace) == [[0, 1], [0, 1, 2], [3, 4], [], [5]]
    assert trace.times.tolist() == [0, 1, 2, 3, 4]
    assert trace.durations.tolist() == [1.5, 1.5, 1.5, 1.5, 2.0]
    assert trace.outputs.tolist() == [0, 0, 0, 0, 5]
    assert trace.stops == ["stop"] * 4 + ["length"]
    assert trace.sessions.tolist() == [0, 0, 1, 2, 3]
    assert trace.thinks[-1] == 0.25
    assert len({*trace.tenants}) == 2


def test_blocks_are_equal_where_the_cache_says_so(tmp_path):
    cat, dog = [(2, 6, "cat")], [(2, 6, "dog")]
    asked = [{}, {"lora": "a"}, {"extra_keys": cat}, {"extra_keys": dog}, {"extra_keys": cat}, {"salt": "x"}]
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 4)
    manager = KVCacheManager(100, 4)
    hits, seen, known = [], set(), []
    for number, options in enumerate(asked):
        sequence = Sequence(number, [*range(12), 99], **options)
        hits.append(len(manager.get_computed_blocks(sequence).blocks))
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        recorder.record(sequence, arrived_s=number, seconds=0)
    for prompt in prompts(read_trace(tmp_path / "trace.jsonl")):
        known.append(sum(block in seen for block in prompt))
        seen.update(prompt)
    assert known == hits == [0, 0, 0, 0, 3, 0]


def test_a_line_names_each_block_once(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 2)
    for length in (2, 4, 4, 9):
        record(recorder, range(length))
    _, *rows = lines(path)
    assert [len(row["ids"]) for row in rows] == [1, 1, 0, 2]
    assert [row.get("after") for row in rows] == [None, rows[0]["ids"][0], rows[1]["ids"][0], rows[1]["ids"][0]]


def test_names_depend_on_the_key_alone(tmp_path):
    key = bytes(range(16))
    for name, given in (("a", None), ("b", None), ("c", key), ("d", key)):
        record(TraceRecorder(tmp_path / name, 4, key=given), range(40), session="s", salt="t")
    a, b, c, d = ((tmp_path / name).read_text() for name in "abcd")
    assert c == d
    assert len({a, b, c}) == 3


def test_no_text_and_no_token_is_written(tmp_path):
    path = tmp_path / "trace.jsonl"
    record(TraceRecorder(path, 4), range(123456, 123476), session="secret session", salt="secret tenant")
    assert "secret" not in path.read_text()
    assert "123456" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_the_next_process_goes_on_behind_the_last_whole_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    first = TraceRecorder(path, 4)
    record(first, range(8))
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"t":1.0,"tok')
    record(TraceRecorder(path, 4), range(8), 5.0)
    assert [*map(len, lines(path))] == [2, 6, 2, 6]
    assert prompts(read_trace(path)) == [[0, 1], [2, 3]]  # a new key


@pytest.mark.parametrize(
    "content",
    [
        b'{"important": "no line"}',
        b"two\nlines",
        b"\n",
        b"\xff\x00",
        b"[" * 5000 + b"\n",
        b'{"kvblocks_trace":1,"blocks',
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(
        InvalidArgumentError, match="path: expected a new file, or a trace with blocks of 4 tokens, got"
    ):
        TraceRecorder(path, 4)
    assert path.read_bytes() == content


def test_a_trace_of_other_blocks_is_refused_and_one_that_was_never_begun_is_begun(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"kvblocks_trace": 1, "block_size": 8}\n')  # written by somebody else
    with pytest.raises(InvalidArgumentError, match=r"blocks of 4 tokens, got .*, which begins with .* 8}"):
        TraceRecorder(path, 4)
    TraceRecorder(path, 8).close()
    path.write_bytes(b'{"kvblocks_trace":1,"bl')
    recorder = TraceRecorder(path, 4)
    record(recorder, range(8))
    assert prompts(read_trace(path)) == [[0, 1]]


def test_a_file_that_was_emptied_begins_anew(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 4)
    record(recorder, range(8))
    os.truncate(path, 0)  # as logrotate's copytruncate does
    record(recorder, range(12))
    record(recorder, range(12))
    assert prompts(read_trace(path)) == [[0, 1, 2], [0, 1, 2]]
    assert recorder.num_lost == 0


def test_a_file_has_one_recorder(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 4)
    with pytest.raises(InvalidArgumentError, match="path: expected a file that can be written"):
        TraceRecorder(path, 4)
    recorder.close()
    recorder.close()
    assert not record(recorder, range(8))
    assert recorder.num_lost == 0
    TraceRecorder(path, 4).close()


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"path: expected a file that can be written, got .*: No such file"):
        TraceRecorder(tmp_path / "no" / "trace", 4)
    with pytest.raises(InvalidArgumentError, match="block_size: expected"):
        TraceRecorder(tmp_path / "trace", 0)
    with pytest.raises(InvalidArgumentError, match="key: expected None or 16 to 64 bytes, got 'something else'"):
        TraceRecorder(tmp_path / "trace", 4, key=b"short")
    recorder = TraceRecorder(tmp_path / "trace", 4)
    with pytest.raises(InvalidArgumentError, match="record: expected a Sequence"):
        recorder.record([1, 2], arrived_s=0, seconds=0)
    nan, good = float("nan"), {"arrived_s": 1, "seconds": 1.0}
    for wrong in ({"arrived_s": nan}, {"arrived_s": "now"}, {"seconds": 1e300}, {"think_s": nan}, {"stop": None}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}: expected "):
            recorder.record(Sequence(0, range(8)), **good | wrong)
    assert len(lines(tmp_path / "trace")) == 1  # what would make the file unreadable isn't in it


FULL = """
import resource, sys
from kvblocks import Sequence
from kvblocks.replay.recorder import TraceRecorder
recorder = TraceRecorder(sys.argv[1], 4)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))  # a write that goes beyond stops there, as on a full disk
print([recorder.record(Sequence(0, range(4 * n)), arrived_s=n, seconds=0) for n in (2, 80, 3, 90, 4)])
print(recorder.num_recorded, recorder.num_lost)
"""


def test_a_full_disk_costs_whole_lines_and_raises_nothing(tmp_path):
    path = tmp_path / "trace.jsonl"
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines() == ["[True, False, True, False, True]", "3 2"]
    assert "1 request could not be recorded, the last one since:" in done.stderr
    assert prompts(read_trace(path)) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_what_goes_wrong_is_logged_once_a_minute(tmp_path, monkeypatch, caplog):
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 4)

    def fail(*_):
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(os, "write", fail)
    with caplog.at_level(logging.WARNING):
        assert [record(recorder, range(8)) for _ in range(3)] == [False, False, False]
    assert recorder.num_lost == 3
    assert len(caplog.records) == 1


def test_what_it_remembers_is_bounded(tmp_path, monkeypatch):
    from kvblocks.replay import recorder as module

    monkeypatch.setattr(module, "_MAX_REMEMBERED", 3)
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, 4)
    for number in (0, 1, 0, 1, 1):
        record(recorder, range(100 * number, 100 * number + 8))
    assert prompts(read_trace(path)) == [[0, 1], [2, 3], [0, 1], [2, 3], [2, 3]]
    assert "after" in lines(path)[-1]


@pytest.mark.parametrize("content", [b'{"layers": 30}', b"a line\nand one without an end", b"\n", b'{"kvblocks'])
def test_a_file_that_is_no_trace_stays_as_it_is(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    if b'{"kvblocks_trace":'.startswith(content):  # a recorder was killed in its first line
        TraceRecorder(path, 4).close()
        assert lines(path) == [{"kvblocks_trace": 1, "block_size": 4}]
        return
    with pytest.raises(InvalidArgumentError, match=r"got .*config.json', which begins with"):
        TraceRecorder(path, 4)
    assert path.read_bytes() == content
