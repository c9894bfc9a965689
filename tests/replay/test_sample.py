"""The shipped sample is what its generator makes, and has the properties that its docstring names."""

import gzip
import itertools
import json

import pytest
from replay.independent import Ask, simulate

from kvblocks.replay.readers import read_trace
from kvblocks.replay.run import Setup, run
from kvblocks.replay.sample import BLOCK_SIZE, SAMPLE, lines, make_sample, write_sample
from kvblocks.replay.trace import arrival_times, think_times


def test_the_generator_writes_the_sample_again(tmp_path):
    """The trace's uncompressed bytes: how gzip packs them depends on the version of zlib."""
    write_sample(tmp_path / "again.jsonl.gz")
    assert gzip.decompress((tmp_path / "again.jsonl.gz").read_bytes()) == gzip.decompress(SAMPLE.read_bytes())


def test_it_is_small():
    assert SAMPLE.stat().st_size < 300_000


def test_equal_ids_mean_equal_prefixes_and_lines_name_new_blocks_only():
    _, *rows = [json.loads(line) for line in lines(make_sample())]
    parents: dict[str, str | None] = {}
    for row in rows:
        before = row.get("after")
        assert before is None or before in parents
        for name in row["ids"]:
            assert name not in parents
            parents[name] = before
            before = name
        num_blocks = 0
        while before is not None:
            before, num_blocks = parents[before], num_blocks + 1
        assert num_blocks == row["tokens"] // BLOCK_SIZE


def test_it_has_what_makes_traces_hard():
    requests = make_sample()
    assert [request.start_s for request in requests] == sorted(request.start_s for request in requests)
    prompts: dict[str, list[list[int]]] = {}
    tenants: dict[str, str] = {}
    for request in requests:
        prompts.setdefault(request.session, []).append(request.blocks)
        assert tenants.setdefault(request.session, request.tenant) == request.tenant
    assert len(prompts) > 300
    assert sum("/" in session for session in prompts) > 50  # sub-agents
    assert {request.stop_reason for request in requests} == {"tool_use", "end_turn"}
    owners: dict[int, set[str]] = {}
    for session, own in prompts.items():
        for block in own[-1]:
            owners.setdefault(block, set()).add(session)
    shared = {tenants[session] for sessions in owners.values() if len(sessions) > 40 for session in sessions}
    assert len(shared) == 4  # each tenant's system prompt
    assert all(len({tenants[session] for session in sessions}) == 1 for sessions in owners.values())
    compacted = [
        session
        for session, own in prompts.items()
        if any(len(after) < len(before) for before, after in itertools.pairwise(own))
    ]
    assert len(compacted) > 20


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("num_blocks", [170, 900])
def test_a_replay_of_it_agrees_with_the_independent_simulator(num_blocks, is_closed):
    """The file is read by code of this test. Times count from the first request, as in the replay.

    Otherwise sums of floats would be rounded differently, and so change which of two events at the same hundredth of a
    second comes first.
    """
    parents: dict[str, str | None] = {}
    asks = []
    _, *lines = gzip.decompress(SAMPLE.read_bytes()).splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        name = row.get("after")
        for following in row["ids"]:
            parents[following] = name
            name = following
        chain = []
        while name is not None:
            chain.append(name)
            name = parents[name]
        asks.append(Ask(row["session"], row["t"] - rows[0]["t"], row["think"], row["a"], tuple(reversed(chain))))
    served = simulate(asks, num_blocks, closed_loop=is_closed)
    trace = read_trace(SAMPLE)
    setup = Setup("lru", num_blocks, is_closed=is_closed)
    outcome = run(trace, arrival_times(trace, None, 0), think_times(trace), setup)
    assert outcome.hits.tolist() == [each.num_hit for each in served]
    assert sorted(outcome.refused) == [number for number, each in enumerate(served) if each.admitted is None]
    assert outcome.waits.count == sum(each.admitted is not None and each.admitted > each.arrived for each in served)
