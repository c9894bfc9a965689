"""A server that takes time, against times computed by hand, and its gate and caps."""

import json

import numpy as np
import pytest
from replay.independent import Ask
from replay.small_traces import BLOCK_SIZE, make_trace

from kvblocks.cli import main
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.report.loads import render_loads
from kvblocks.replay.served.entrances import Cap, GateEntrance, make_entrance
from kvblocks.replay.served.loads import LoadOptions, caps_of, delays
from kvblocks.replay.served.run import Served, ServedRun, ServerModel
from kvblocks.replay.trace import think_times

SERVER = ServerModel(prefill_rate=16.0, decode_step_s=1.0)  # a block of a prompt takes a second


def agents(number: int, turns: int, blocks: int = 4):
    """Sessions of prompts that grow by a block a turn; each pauses for 3 s."""
    return make_trace(
        [
            Ask(
                chain=tuple(100 * agent + block for block in range(blocks + turn)),
                session=str(agent),
                arrival=agent,
                seconds=0,
                think=3,
            )
            for turn in range(turns)
            for agent in range(number)
        ]
    )


def serve(
    trace, num_blocks: int, entrance: str = "none", server: ServerModel = SERVER, host: int | None = None
) -> Served:
    return ServedRun(trace, (trace.times, think_times(trace)), num_blocks, entrance, server, host).run()


def test_a_prompt_takes_its_tokens_and_a_hit_shortens_it():
    row = serve(agents(1, 2), 10)
    # 4 blocks: a step of 1 + 4 s, then 3 s of thinking. The next prompt has 4 of 5 blocks: 1 + 1 s.
    assert row.ttft_p99_s == pytest.approx(5, rel=0.02)
    assert row.delay_mean_s == 5 + 2
    assert row.hours * 3600 == 5 + 3 + 2
    assert row.computed_share == 5 / 9
    assert row.recomputed_share == 0


def test_a_step_has_a_budget_and_each_answer_gets_a_token_a_step():
    trace = make_trace([Ask(chain=(1, 2, 3), session="a", arrival=0, seconds=0, think=0)])
    trace.outputs[:] = 3
    row = serve(trace, 10, server=ServerModel(16.0, 1.0, num_step_tokens=32, num_running=32))
    assert row.ttft_p50_s == (1 + 2) + (1 + 1)
    assert row.delay_mean_s == row.ttft_p50_s + 2  # two tokens more
    slower = serve(trace, 10, server=ServerModel(16.0, 1.0, read_s=0.5, num_step_tokens=32, num_running=32))
    assert slower.delay_mean_s == row.delay_mean_s + 2 * 0.5 * 49  # two steps as one: with the context of the first


def test_a_prompt_that_is_computed_holds_up_those_that_decode():
    asks = [Ask(chain=(1,), session="a", arrival=0, seconds=0, think=0)]
    asks.append(Ask(chain=(2, 3, 4), session="b", arrival=1, seconds=0, think=0))
    trace = make_trace(asks)
    trace.outputs[0] = 2
    row = serve(trace, 10)
    # 0 to 2: the first prompt. 2 to 6: the second one, and the first one's second token.
    assert row.hours * 3600 == 6
    assert row.delay_mean_s == (6 + 5) / 2


def test_without_room_a_request_waits_and_what_was_evicted_is_computed_again():
    trace = agents(2, 3)
    row = serve(trace, 7)
    assert row.longest_wait_s > 0
    assert row.recomputed_share > 0
    assert serve(trace, 7, "infinite").recomputed_share == serve(trace, 100).recomputed_share == 0


def test_what_a_host_tier_has_is_loaded_over_one_link():
    trace = agents(2, 3)
    rates = [SERVER, ServerModel(16.0, 1.0, load_rate=8.0)]
    fast, slow = (serve(trace, 7, server=server, host=50) for server in rates)
    assert fast.recomputed_share == slow.recomputed_share < serve(trace, 7).recomputed_share
    assert fast.delay_mean_s < serve(trace, 7).delay_mean_s
    assert slow.delay_mean_s > fast.delay_mean_s


def test_a_gate_lets_in_whom_the_pool_can_remember():
    trace = agents(4, 8)
    none, gate, infinite = (serve(trace, 24, entrance) for entrance in ("none", "gate", "infinite"))
    assert none.num_sessions == gate.num_sessions == infinite.num_sessions == 4
    assert gate.recomputed_share < none.recomputed_share
    assert infinite.delay_mean_s < gate.delay_mean_s < none.delay_mean_s
    assert gate.num_paused > 0 == none.num_paused


def test_a_gate_with_room_for_all_changes_nothing():
    trace = agents(4, 6)
    rows = [serve(trace, 100, entrance).to_row() | {"entrance": ""} for entrance in ("none", "gate", "cap 4")]
    assert rows[0] == rows[1] == rows[2]


def test_a_cap_lets_so_many_sessions_in_until_they_have_ended():
    cap = Cap(1)
    assert cap.ask(0, None, (16, 0), 0.0), "it has no session"
    assert not cap.ask(1, 7, (16, 0), 0.0)
    assert not cap.ask(2, 8, (16, 0), 0.0)
    assert cap.let_in(0, 0.0, lambda _: 0) == [1]
    assert cap.ask(3, 7, (16, 0), 0.0), "it is inside"
    assert cap.let_in(0, 0.0, lambda _: 0) == []
    cap.end_session(7)
    assert cap.let_in(0, 0.0, lambda _: 0) == [2]
    row = serve(agents(3, 2), 100, "cap 1")
    assert row.longest_wait_s == pytest.approx(2 * (7 + 3) - 2)  # the other two, less its arrival


def test_the_gate_is_asked_only_when_something_has_changed():
    gate = GateEntrance(1000, 1.0)
    assert not gate.ask(0, 1, (900, 0), 0.0)
    looked_up = []
    assert gate.let_in(0, 0.0, lambda request: looked_up.append(request) or 0) == [0]
    assert not gate.ask(1, 2, (900, 0), 1.0)
    assert gate.let_in(1, 1.0, lambda request: looked_up.append(request) or 0) == []
    assert looked_up == [0, 1]
    assert gate.let_in(1, 2.0, lambda request: looked_up.append(request) or 0) == []
    assert looked_up == [0, 1], "nothing has changed"
    gate.ended(0, 950, "tool_use", 3.0)
    gate.let_in(0, 3.0, lambda _: 0)
    assert gate.wake_at is not None
    assert gate.has_waiting
    assert gate.let_in(0, gate.wake_at, lambda _: 0) == [1]


def test_sessions_that_the_pool_cannot_hold_are_left_out_everywhere():
    trace = agents(2, 3, blocks=4)
    row = serve(trace, 6)
    assert (row.num_sessions, row.num_left_out) == (0, 2)
    assert serve(trace, 6, "infinite").num_left_out == 2


def test_a_trace_without_sessions_passes_every_entrance():
    trace = agents(3, 1)
    trace.session_names[:] = [None] * 3
    rows = [serve(trace, 6, entrance).to_row() | {"entrance": ""} for entrance in ("none", "gate", "cap 1")]
    assert rows[0] == rows[1] == rows[2]


def test_delays_has_a_row_for_each_load_and_entrance():
    trace = agents(4, 6)
    options = LoadOptions(sizes=(24, 60), server=SERVER, loads=(1.0, 2.0), caps=(1, 3))
    shown = []
    result = delays(trace, options, 1, shown.append)
    assert [share for _, share in shown[-1]] == [1.0] * 20
    assert shown[-1][0][0].title == "none, load 1, 24 blocks"
    names = [row.entrance.split()[0] for row in result.rows]
    assert names == ["none", "cap", "gate", "infinite"] * 4
    for row in result.rows[1::4]:
        tried = [
            ServedRun(trace, (trace.times / row.load, think_times(trace)), row.num_blocks, f"cap {cap}", SERVER).run()
            for cap in (1, 3)
        ]
        assert row.delay_mean_s == min(each.delay_mean_s for each in tried)
    rows = result.to_rows()
    assert json.loads(json.dumps(rows))[0]["conditions"]["server"]["prefill_rate"] == 16.0
    html = render_loads(result)
    for words in ("24 blocks", "session gate", "best cap", "infinite cache", "Mean delay of a session", "made"):
        assert words in html


@pytest.mark.slow
def test_processes_find_the_same_as_one():
    options = LoadOptions(sizes=(24,), server=SERVER, loads=(1.0,), caps=(2,))
    assert delays(agents(4, 6), options, 2).rows == delays(agents(4, 6), options, 1).rows


def test_caps_are_tried_around_what_fits():
    trace = agents(4, 5)  # its longest prompts have 8 blocks
    assert caps_of(trace, 64) == (4, 8, 16, 32)
    assert caps_of(trace, 8)[0] == 1


@pytest.fixture
def small_file(tmp_path):
    """A trace of twelve requests."""
    path = tmp_path / "small.jsonl"
    line = '{"timestamp": %d, "input_length": 1200, "output_length": 3, "hash_ids": [%d, %d, %d]}\n'
    path.write_text("".join([line % (100 * number, number, number + 20, number + 40) for number in range(12)]))
    return path


def test_the_command_writes_what_it_compares(tmp_path, small_file, capsys):
    small = tmp_path / "rows.json"
    page = tmp_path / "gate.html"
    words = "replay --gate --prefill-rate 3000 --decode-step 0.02 --sizes 9 --loads 1 --jobs 1"
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--json", str(small), "--report", str(page), str(small_file)])
    assert not ended.value.code
    assert "longest" in capsys.readouterr().out
    rows = json.loads(small.read_text(encoding="utf-8"))
    assert [row["entrance"].split()[0] for row in rows] == ["none", "cap", "gate", "infinite"]
    assert rows[0]["trace"]["num_sessions"] == 12
    assert "Session gate: small.jsonl" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--gate --prefill-rate 3000",
            "--gate: expected --prefill-rate and --decode-step with it, got no --decode-step",
        ),
        ("--gate --prefill-rate 0 --decode-step 1", "prefill_rate: expected a number above 0"),
        ("--gate --prefill-rate 1 --decode-step nan", "decode_step_s: expected a number above 0"),
        ("--gate --prefill-rate 1 --decode-step 1 --loads 1,x", "--loads: expected numbers with commas"),
        ("--gate --prefill-rate 1 --decode-step 1 --loads 0", "load: expected a number above 0"),
        (
            "--gate --prefill-rate 1 --decode-step 1 --groups gemma3-4b",
            "--session-ends, --groups, --quick with it, got --groups",
        ),
        ("--decode-step 0.1", "expected --gate with --prefill-rate, --decode-step and --loads, got none"),
    ],
)
def test_the_command_says_what_is_wrong(words, message, small_file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", *words.split(), str(small_file)])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_entrance_has_one_of_four_names():
    for name in ("cap", "cap 0", "cap x", "door"):
        with pytest.raises(InvalidArgumentError):
            make_entrance(name, 100, 0.1)
    assert BLOCK_SIZE == 16
    assert np.isfinite(serve(agents(1, 1), 10).delay_p99_s)
