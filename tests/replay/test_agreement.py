"""The replay of production and the independent simulator agree to the block under LRU, request by request."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.independent import Ask, simulate
from replay.test_independent import chains

from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import Setup, run
from kvblocks.replay.sample import SAMPLE
from kvblocks.replay.trace import arrival_times, think_times

requests = st.lists(
    st.tuples(chains(), st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 6), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)
"""Chain, session, time, duration, think time: whole seconds, so that much happens at the same time."""


def check(path: Path, asks: list[Ask], num_blocks: int, *, is_closed: bool) -> None:
    """Compare a replay of a trace in a file with the simulator's of `asks`, which are the same requests."""
    trace = read_trace(path)
    setup = Setup("lru", num_blocks, is_closed=is_closed)
    outcome = run(trace, arrival_times(trace, None, 0), think_times(trace), setup)
    expected = simulate(asks, num_blocks, closed_loop=is_closed)
    assert outcome.hits.tolist() == [served.num_hit for served in expected]
    assert sorted(outcome.refused) == [number for number, served in enumerate(expected) if served.admitted is None]
    waits = [served.admitted - served.arrived for served in expected if served.admitted is not None]
    assert outcome.waits.count == sum(wait > 0 for wait in waits)
    assert outcome.waits.max_s == max(waits, default=0)


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
@given(asked=requests, num_blocks=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_random_traces(asked, num_blocks, is_closed, tmp_path_factory):
    asked = sorted(asked, key=lambda request: request[2])
    rows: list[dict[str, object]] = [{"kvblocks_trace": 1, "block_size": 16}]
    asks = []
    for chain, session, time, duration, think in asked:
        row = {"t": time, "a": duration, "think": think, "session": session, "tokens": 16 * len(chain) + 3}
        rows.append(row | {"ids": [str(name) for name in chain]})
        asks.append(Ask(session, time, think, duration, chain))
    path = tmp_path_factory.mktemp("agreement", numbered=True) / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(path, asks, num_blocks, is_closed=is_closed)


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("num_blocks", [170, 900])
def test_the_sample(num_blocks, is_closed):
    """Read here by other code than the replay's, ids as they stand in the file."""
    parents: dict[str, str | None] = {}
    asks = []
    _, *lines = gzip.decompress(SAMPLE.read_bytes()).splitlines()
    for row in map(json.loads, lines):
        name = row.get("after")
        for following in row["ids"]:
            parents[following] = name
            name = following
        chain = []
        while name is not None:
            chain.append(name)
            name = parents[name]
        asks.append(Ask(row["session"], row["t"], row["think"], row["a"], tuple(reversed(chain))))
    check(SAMPLE, asks, num_blocks, is_closed=is_closed)
