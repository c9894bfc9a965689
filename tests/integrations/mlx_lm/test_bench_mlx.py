"""The benches run, and say what they should."""

import gzip
import json

from bench.mlx import replay
from bench.mlx.cases import measure


def test_all_cases_are_timed():
    found = measure(200, 1)
    assert set(found) == {"search, unknown", "search, edited", "hit", "insert 512"}
    assert all(spread.low > 0 for of in found.values() for spread in of.values())


def test_a_replay_counts_what_is_computed(tmp_path):
    lines = [{"session": "a", "block_size": 64, "tool_tokens": 0, "system_tokens": 0}]
    lines.append({"t": 0.0, "a": 1, "k": 0, "s": "tool_use", "in": 640, "out": 64, "sub": 0, "p": 0, "h": [[1, 10]]})
    lines.append({"t": 5.0, "a": 1, "k": 0, "s": "tool_use", "in": 832, "out": 70, "sub": 0, "p": 10, "h": [[11, 3]]})
    lines.append({"t": 9.0, "a": 1, "k": 0, "s": "end_turn", "in": 840, "out": 9, "sub": 0, "p": 11, "h": [[30, 2]]})
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines([json.dumps(line) + "\n" for line in lines])
    requests = replay.interleave(path, 1, 0, 10)
    assert [len(request.ids) for request in requests] == [10, 13, 13]
    assert requests[0].end == requests[1].ids[:11] and requests[1].end[:13] == requests[1].ids
    sizes = replay.Sizes(10, 1000)
    for cache in (replay.Theirs(sizes, 10**9, 10), replay.Theirs(sizes, 10**9, 10**6), replay.Ours(sizes, 10**9)):
        assert replay.run(cache, requests) == (640 + (832 - 704) + (840 - 704)) / 3
    assert replay.run(replay.Ours(sizes, 0), requests) == (640 + 832 + 840) / 3
