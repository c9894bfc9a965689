"""bench.fleet: traces over workers agree with the replay, and a fleet of real servers survives a kill."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from replay.independent import Ask
from replay.small_traces import asks, make_trace, run_trace

from kvblocks.replay.run import Setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    """The modules in bench/, which isn't installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        patch.chdir(ROOT)
        for name in ("fleet", "traces", "growth", "workload", "plot"):
            importlib.import_module(f"bench.fleet.{name}")
        yield importlib.import_module("bench.fleet")


@settings(max_examples=15)
@given(asks())
def test_one_worker_is_a_plain_replay(bench, given_asks):
    trace = make_trace(given_asks)
    plain = run_trace(trace, Setup("lru", 12))
    for router in bench.traces.ROUTERS:
        fleet = bench.traces.Fleet(trace, bench.traces.Case(router, 1, 12, None))
        row = fleet.replay()
        outcome = fleet.runs[0].outcome()
        assert outcome.order == plain.order
        assert np.array_equal(outcome.hits, plain.hits)
        assert outcome.refused == plain.refused
        assert row.computed_blocks == len(trace.blocks) - plain.hits.sum()
        if router == "precise":  # the mirror has what the manager has, and no worker has work left
            assert row.mirror_blocks == fleet.runs[0].manager.stats.num_cached_blocks
            assert fleet.todo == [{}]


def chats(num_sessions, num_turns):
    """Sessions over one system prompt of four blocks, turn by turn in random-looking order, a block more each turn."""
    order = [(turn, session * 3 % num_sessions) for turn in range(num_turns) for session in range(num_sessions)]
    return [
        Ask(f"s{session}", 10 * now, 0, 1, (*range(4), *(1000 * (session + 1) + block for block in range(turn + 1))))
        for now, (turn, session) in enumerate(order)
    ]


def test_what_is_cached_is_found_by_the_right_router(bench):
    trace = make_trace(chats(num_sessions=7, num_turns=6))
    rates = {
        (router, store): bench.traces.Fleet(trace, bench.traces.Case(router, 3, 60, store)).replay()
        for router in bench.traces.ROUTERS
        for store in (None, 500)
    }
    found = {name: row.hit_rate for name, row in rates.items()}
    assert found["precise", None] > 1.1 * found["round robin", None]
    assert found["precise", None] >= found["session", None]
    for router in bench.traces.ROUTERS:
        # The store has what any worker computed. So only what is asked for the first time is missing.
        assert found[router, 500] == pytest.approx(1 - trace.num_unique_blocks / len(trace.blocks))
    assert rates["round robin", 500].device_hit_rate < found["round robin", 500]
    num_bytes = trace.block_size * 4 * trace.num_unique_blocks
    assert rates["precise", None].bytes_per_s > num_bytes / rates["precise", None].modelled_s
    assert rates["round robin", None].messages_per_s == 0


def test_a_stores_blocks_are_of_one_salt(bench):
    both = [Ask(name, when, 0, 1, (1, 2, 3, 4)) for when, name in [(0, "x"), (10, "y"), (20, "x"), (30, "y")]]
    trace = make_trace(both, tenants={"x": "ann", "y": "bob"})
    row = bench.traces.Fleet(trace, bench.traces.Case("round robin", 4, 10, 100)).replay()
    assert row.hit_rate == 6 / 16  # the second of each, without the last block, each at a worker of its own


@pytest.mark.parametrize(("seconds", "num_left"), [(20, 3), (1, 0)], ids=["now and then", "too often to be told"])
def test_what_is_used_on_one_worker_s_device_stays_in_the_store(bench, seconds, num_left):
    """One worker has the same prompt again and again; the other fills the store, and has the prompt in the end."""
    prompt = (1, 2, 3, 4)
    chains = [chain for other in range(4) for chain in (prompt, tuple(range(100 * other + 100, 100 * other + 104)))]
    chains += [prompt, prompt]
    both = [Ask(f"s{n}", seconds * n, 0, 1, chain) for n, chain in enumerate(chains)]
    fleet = bench.traces.Fleet(make_trace(both), bench.traces.Case("round robin", 2, 100, 8))
    fleet.replay()
    last = len(chains) - 1
    assert fleet.runs[fleet.where[last]].outcome().loaded[last] == num_left


def test_a_worker_whose_store_lost_a_prompt_stores_it_again(bench):
    prompt = (1, 2, 3, 4)
    both = [Ask(f"s{n}", 20 * n, 0, 1, prompt) for n in range(3)]
    fleet = bench.traces.Fleet(make_trace(both), bench.traces.Case("round robin", 1, 100, 8))
    happen = fleet.runs[0].happen

    def lose(when, kind, request):
        if request == 1:
            fleet.store._held.clear()  # noqa: SLF001
        happen(when, kind, request)

    fleet.runs[0].happen = lose
    fleet.replay()
    assert len(fleet.store) == 4


def test_the_command_keeps_and_draws(bench, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="draws: needs the extra kvblocks[bench]")
    lines = [{"session": "one", "block_size": 64}]
    lines += [
        {"t": 10.0 * n, "a": 1.0, "k": 9.0, "s": "", "in": 1280, "out": 1, "p": 0, "h": [[20 * (n % 3), 20]]}
        for n in range(9)
    ]
    trace, kept, picture = (tmp_path / name for name in ("trace.jsonl", "kept.json", "picture.svg"))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = [
        "--workers",
        "1",
        "2",
        "--block-size",
        "64",
        "--worker-blocks",
        "70",
        "--store-blocks",
        "90",
        "--no-growth",
    ]
    bench.traces.main([str(trace), *options, "--json", str(kept), "--picture", str(picture)])
    rows = json.loads(kept.read_text())["results"]
    assert len(rows) == 2 * 2 * 3
    assert {row["num_requests"] for row in rows} == {9}
    assert b"<svg" in picture.read_bytes()[:1000]
    drawn = picture.read_bytes()
    bench.plot.draw(json.loads(kept.read_text()), picture)
    assert picture.read_bytes() == drawn
    with pytest.raises(SystemExit, match="expected files of traces, got none at /nowhere"):
        bench.traces.main(["/nowhere"])
    assert "precise" in capsys.readouterr().out


def test_how_a_mirror_grows(bench):
    small, large = bench.growth.measure_growth(((1, 300), (4, 300)))
    assert (small["num_workers"], large["num_workers"]) == (1, 4)
    assert 0.7 < small["bytes_per_block"] / large["bytes_per_block"] < 1.5


def test_the_workload_is_what_it_says(bench):
    sizes = bench.workload.Sizes()
    talks = bench.workload.make_conversations(sizes)
    assert (len(talks), len({talk.system for talk in talks}), sum(len(talk.turns) for talk in talks)) == (12, 4, 60)
    assert talks == bench.workload.make_conversations(sizes)


def test_targets_are_judged(bench):
    def row(route, hit_rate, *, agrees=None, number=60, same=True):
        facts = {"route": route, "hit_rate": hit_rate, "mirror_agrees": agrees}
        return facts | {"num_requests": number, "is_identical": same}

    good = bench.fleet.targets([row("round robin", 0.4), row("precise, x", 0.61, agrees=True)], 60)
    bad = bench.fleet.targets(
        [row("round robin", 0.4, number=59), row("precise, x", 0.59, agrees=False, same=False)], 60
    )
    assert (len(good), *{*good.values()}) == (4, True)
    assert (len(bad), *{*bad.values()}) == (4, False)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_servers_of_a_tiny_model_one_of_which_dies(bench, roomy_folder, tmp_path):
    kept = tmp_path / "kept.json"
    assert not bench.fleet.main(["--quick", "--model", str(roomy_folder), "--num-blocks", "200", "--json", str(kept)])
    results = json.loads(kept.read_text())
    robin, precise = results["results"]
    for row in (robin, precise):
        assert row["num_requests"] == 12
        assert row["is_identical"]
        assert row["death"]["ready_s"] > row["death"]["killed_s"] > 0
    assert precise["mirror_agrees"]
    assert precise["num_computed_tokens"] < robin["num_computed_tokens"]
