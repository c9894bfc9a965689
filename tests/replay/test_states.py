"""Ways to keep recurrent states, replayed: what each of them hits, and the command that compares them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from replay.independent import Ask
from replay.report.test_report import read
from replay.small_traces import BLOCK_SIZE, asks, make_trace

from kvblocks.cli import app as cli
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.options import parse_bytes, parse_memory
from kvblocks.replay.report.states import render_states
from kvblocks.replay.states import (
    DESIGNS,
    IN_EACH,
    SPLITS,
    StateJob,
    StateModel,
    StateOptions,
    StateWorkload,
    compare_states,
)

MODEL = StateModel(kv_bytes=10, state_bytes=300, large_block=2 * BLOCK_SIZE)  # a state is as large as two blocks
PLENTY = 10**6


def hits_with_plenty_of_memory(requests: list[Ask], size: int) -> list[int]:
    """How many tokens each request hits if nothing is ever evicted. size: tokens in a block."""
    saved: set[tuple[object, ...]] = set()  # the prefixes that have a state, as tuples of the trace's blocks
    known: set[tuple[object, ...]] = set()
    step, hits = size // BLOCK_SIZE, []
    for ask in requests:
        ends = [tuple(ask.chain[:end]) for end in range(step, len(ask.chain), step)]
        usable = [end for end in ends if end in saved]
        hits.append(len(usable[-1]) * BLOCK_SIZE if usable else 0)
        saved.update(ends[-1:] + [end for end in ends if end in known][-1:])
        known.update(tuple(ask.chain[:end]) for end in range(len(ask.chain) + 1))
    return hits


@settings(max_examples=10, deadline=None)
@given(asks(max_blocks=7))
def test_with_plenty_of_memory_all_designs_hit_what_their_places_allow(requests):
    trace = make_trace(requests)
    found = {
        design: StateWorkload(trace, StateOptions(MODEL, ())).do(StateJob(design, PLENTY), lambda _: None)
        for design in DESIGNS
    }
    expected = sum(hits_with_plenty_of_memory(requests, BLOCK_SIZE))
    large = sum(hits_with_plenty_of_memory(requests, 2 * BLOCK_SIZE))
    assert found["free states"].num_hit == found["free states"].num_cached >= expected
    assert found["in each block"].num_hit == found["free states"].num_hit >= found["in each 64"].num_hit
    for design, row in found.items():
        if design != "free states" and not design.startswith(IN_EACH):
            assert row.num_hit == (large if design == "large blocks" else expected), design
            assert row.num_hit <= row.num_cached <= row.num_tokens == trace.tokens.sum()
            assert not row.num_without_room


def turns(num_turns: int, num_blocks: int) -> list[Ask]:
    """A conversation in which each prompt has one block more, and a second one that comes in between."""
    talks = [("a", 1000), ("b", 2000)]
    return [
        Ask(session, number, 1.0, 0.0, tuple(range(first, first + num_blocks + number)))
        for number in range(num_turns)
        for session, first in talks
    ]


def test_states_and_kv_share_the_memory_that_there_is():
    """Two conversations, whose prompts have 50 to 54 blocks: more than half of the smaller memory."""
    trace, small = make_trace(turns(5, 50)), 80 * MODEL.kv_bytes * BLOCK_SIZE
    result = compare_states(trace, StateOptions(MODEL, (PLENTY, small)), 1)
    rows = {(row.design, row.num_bytes): row for row in result.rows}
    assert [row.design for row in result.rows[: len(DESIGNS)]] == [*DESIGNS]
    assert len({row.num_bytes for row in result.rows[: len(DESIGNS)]}) == 1
    for design in ("kvblocks", "exact", "split 47 %"):
        # Each turn finds the state that the one before saved, one block before its end.
        assert rows[design, PLENTY].num_hit == 2 * sum(16 * (number - 1) for number in range(50, 54))
        assert rows[design, PLENTY].num_saved == 2 * 5, design
    for design in DESIGNS:
        assert rows[design, small].num_hit < rows[design, PLENTY].num_hit


def test_a_prompt_larger_than_the_pool_leaves_its_beginning():
    chain = tuple(range(20))
    trace = make_trace([Ask("a", number, 1.0, 0.0, chain) for number in range(3)])
    size = 10 * MODEL.kv_bytes * BLOCK_SIZE
    workload = StateWorkload(trace, StateOptions(MODEL, ()))
    assert workload.do(StateJob("free states", size), lambda _: None).num_hit == 2 * 10 * BLOCK_SIZE
    row = workload.do(StateJob("kvblocks", size), lambda _: None)
    assert row.num_hit == 2 * 7 * BLOCK_SIZE  # 8 blocks beside a state of 2, which is in front of the last of them


def test_tenants_share_nothing():
    requests = [Ask(session, number, 1.0, 0.0, tuple(range(1, 10))) for number, session in enumerate("abab")]
    for design in DESIGNS:
        job = StateJob(design, PLENTY)
        alone = StateWorkload(make_trace(requests, tenants={"a": "x", "b": "y"}), StateOptions(MODEL, ()))
        shared = StateWorkload(make_trace(requests), StateOptions(MODEL, ()))
        assert 2 * shared.do(job, lambda _: None).num_hit == 3 * alone.do(job, lambda _: None).num_hit > 0, design


def test_what_can_not_be_compared_is_refused_before_anything_runs():
    trace = make_trace(turns(2, 3))
    with pytest.raises(InvalidArgumentError, match="room for a block and a state by 'kvblocks', got 400 bytes"):
        compare_states(trace, StateOptions(MODEL, (400,)))
    with pytest.raises(InvalidArgumentError, match="room for a block and a state by 'split 5 %', got 5,000 bytes"):
        compare_states(trace, StateOptions(MODEL, (5000,)))
    with pytest.raises(InvalidArgumentError, match="sizes: expected some, got none"):
        compare_states(trace, StateOptions(MODEL, ()))
    for model, name in (((0, 1), "kv_bytes"), ((1, 2**50), "state_bytes"), ((1, 1, 0), "large_block")):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected 1 to "):
            StateModel(*model)


def test_sizes_may_be_bytes():
    assert [parse_bytes("--x", text) for text in ("24576", "39.5MB", "60G", "1.1k")] == [
        24576,
        39500000,
        60 * 10**9,
        1100,
    ]
    assert parse_memory("--sizes", "60GB, 5%,2,60GB", 100, 50) == (60 * 10**9, 250, 100)
    for text in ("", "0", "0.1", "5%", "-1", "many", "1P", "2000TB"):
        with pytest.raises(
            InvalidArgumentError, match=f"--x: expected bytes such as 24576, 39.5MB or 60GB, got '{text}'"
        ):
            parse_bytes("--x", text)


def test_the_command_writes_the_same_rows_with_any_number_of_processes(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 600 * n, "output_length": 1, "hash_ids": [*range(n)]} for n in range(1, 6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for jobs in ("1", "2"):
        rows, report = tmp_path / f"rows{jobs}.json", tmp_path / f"report{jobs}.html"
        options = ["--state-bytes", "300k", "--kv-bytes", "100", "--sizes", "30MB", "--jobs", jobs]
        with pytest.raises(SystemExit) as ended:
            cli.main(["replay", str(trace), *options, "--json", str(rows), "--report", str(report)])
        assert not ended.value.code
        found.append([row | {"wall_s": 0.0} for row in json.loads(rows.read_text())])
        printed = capsys.readouterr().out
        assert "5 requests, one after another; a state has 300,000 bytes" in printed
        page = read(report.read_text(encoding="utf-8"))
        assert "Recurrent states: trace.jsonl" in page.words
        for name in SPLITS:
            assert name in page.words
            assert name in printed
    assert found[0] == found[1]
    large = {name for name in DESIGNS if name == "large blocks" or name.startswith(IN_EACH)}
    assert [row["design"] for row in found[0]] == [name for name in DESIGNS if name not in large]
    assert {"hit_rate", "num_bytes", "trace", "conditions"} <= found[0][0].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-bytes", "5"], "expected --state-bytes and --kv-bytes"),
        (["--state-bytes", "5"], "expected --state-bytes and --kv-bytes"),
        (["--large-block", "5"], "expected --state-bytes and --kv-bytes"),
        (["--state-bytes", "x", "--kv-bytes", "5"], "--state-bytes: expected bytes such as"),
        (["--state-bytes", "5", "--kv-bytes", "5", "--quick"], "expected none of --policies"),
        (["--state-bytes", "5", "--kv-bytes", "5", "--policies", "lru"], "expected none of --policies"),
        (["--state-bytes", "1G", "--kv-bytes", "5", "--sizes", "1MB"], "room for a block and a state"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", "--sessions", "0:2", *options])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_report_of_nothing_but_names_shows_no_markup():
    result = compare_states(make_trace(turns(2, 3)), StateOptions(MODEL, (PLENTY,)), 1)
    nasty = replace(result, trace=replace(result.trace, name="<script>alert(1)</script>"))
    words = read(render_states(nasty)).words
    assert "<script>alert(1)</script>" in words
