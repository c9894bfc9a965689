"""The serving bench runs on a tiny model, says what it measured, and judges it right. No test asks how long it took."""

import asyncio
import gc
import importlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvblocks import KVBlocksError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The module in bench/, which isn't installed."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)  # its servers are `python -m kvblocks`
    return importlib.import_module("bench.serving.serving")


@pytest.mark.exhaustive
def test_it_measures_all_workloads_and_draws_them(bench, roomy_folder, tmp_path, capsys, monkeypatch):
    """One pair of servers runs all workloads. Its pool is too small for the requests of one of them."""
    pressed = {"num_pressed_own_tokens": 224, "pressed_max_tokens": 96}  # four of them grow to 84 blocks
    monkeypatch.setattr(bench, "QUICK", replace(bench.QUICK, num_document_tokens=256, **pressed))
    make = bench.make_workloads
    monkeypatch.setattr(bench, "make_workloads", lambda *given: [replace(one, num_blocks=80) for one in make(*given)])
    kept, picture = tmp_path / "kept.json", tmp_path / "picture.png"
    options = ["--quick", "--rounds", "1", "--json", str(kept), "--plot", str(picture)]
    assert bench.main(["--model", str(roomy_folder), "--device", "cpu", *options]) == 0
    shown = capsys.readouterr().out
    results = json.loads(kept.read_text())
    assert {"model", "weights", "device", "cpu", "rate", "max_tokens", "threads", "mode"} <= results[
        "conditions"
    ].keys()
    rows = {row["workload"]: row for row in results["results"]}
    names = [
        "shared prefix",
        "full rate",
        "multi-turn chat",
        "mixed lengths",
        "long prompts",
        "pool pressure",
        "no sharing",
    ]
    assert list(rows) == names
    for row in rows.values():
        assert row["is_identical"], row["workload"]
        assert row["about"] in shown
        for name in ("without", "with"):
            run = row[name]
            assert run["num_answers"] == len(run["ttft_s"])
            assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"] <= run["latency_p99_s"] <= run["seconds"]
            assert 0 <= run["itl_p50_s"] <= run["itl_p99_s"]
        assert row["without"]["hit_rate"] == row["without"]["num_cached_tokens"] == 0
        assert row["ratios"]["num_computed_tokens"] >= 1
    assert {name: row["with"]["num_answers"] for name, row in rows.items()} == dict(
        zip(names, (6, 4, 4, 6, 4, 6, 2 * 3), strict=True)
    )
    assert rows["shared prefix"]["with"]["num_cached_tokens"] == 5 * 64  # all but the first hit the shared 64 tokens
    assert rows["shared prefix"]["without"]["num_computed_tokens"] == sum(
        (rows["shared prefix"]["without"]["num_prompt_tokens"], 6 * (4 - 1))  # the last token is never computed
    )
    assert rows["full rate"]["with"]["num_cached_tokens"] == 3 * 64
    assert rows["multi-turn chat"]["with"]["num_cached_tokens"] > 0
    assert rows["mixed lengths"]["with"]["num_cached_tokens"] > 0
    assert rows["long prompts"]["with"]["num_cached_tokens"] == 2 * 256  # each document but once
    assert rows["pool pressure"]["without"]["num_preemptions"] > 0
    assert rows["no sharing"]["with"]["num_cached_tokens"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "TTFT p50 of all but the first" in shown
    assert "Not shown:" in shown
    costs = results["costs"]
    assert [row["run"] for row in costs] == [case.name for case in bench.QUICK_CASES]
    assert all(row["about"] in shown for row in costs)
    assert not any(row["targets"] for row in (*results["results"], *costs))  # a quick run judges nothing
    assert "MISSED" not in shown and "No target was judged" in shown


@pytest.fixture
def overhead(bench):
    """The module that compares engines without and with caching where nothing can be shared."""
    return importlib.import_module("bench.serving.overhead")


@pytest.mark.exhaustive
def test_caching_computes_no_more_where_nothing_can_be_shared(overhead, roomy_folder):
    batched, pressed, chunked = overhead.measure_overhead(roomy_folder, torch.device("cpu"), overhead.QUICK_CASES, 2)
    for row in (batched, pressed, chunked):
        without, caching = row["without"], row["with"]
        assert row["is_identical"]
        assert row["num_rounds"] == 2
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
        assert 0 < caching["seconds_outside"] < caching["seconds"]
        assert without["num_evicted_blocks"] == 0
        assert caching["num_computed_tokens"] <= without["num_computed_tokens"]
        assert caching["num_steps"] <= without["num_steps"]
    for row in (batched, chunked):
        assert row["with"]["num_computed_tokens"] == row["without"]["num_computed_tokens"]
        assert row["with"]["num_steps"] == row["without"]["num_steps"]
        assert row["with"]["num_preemptions"] == row["without"]["num_preemptions"] == 0
    assert min(pressed[name]["num_preemptions"] for name in ("without", "with")) > 0
    assert pressed["with"]["num_evicted_blocks"] > 0
    # A prompt of 100 tokens or more takes two steps of at most 64. There are two rounds of two requests.
    assert chunked["with"]["num_steps"] > 2 * 2 * 2
    assert chunked["with"]["num_computed_tokens"] >= 2 * 2 * 100
    assert gc.isenabled()


def cost_of(ratio=1.0, outside=0.0, is_identical=True, **more):
    counts = {"num_steps": 9, "num_computed_tokens": 99, "num_preemptions": 1}
    row = {"without": counts, "with": counts | more, "is_identical": is_identical}
    return row | {"ratio": ratio, "loss_outside": outside}


@pytest.mark.parametrize(
    ("row", "is_pressed", "expected"),
    [
        (cost_of(1.02, 0.02), False, [True, True, True, True]),
        (cost_of(1.021, 0.021, is_identical=False), False, [False, True, False, False]),
        (cost_of(num_steps=8), False, [True, False, True, True]),
        (cost_of(num_computed_tokens=100), False, [True, False, True, True]),
        (cost_of(num_steps=8, num_computed_tokens=90), True, [True, True, True, True, True]),
        (cost_of(num_computed_tokens=100), True, [True, True, False, True, True]),
        (cost_of(num_preemptions=0), True, [True, False, True, True, True]),
    ],
)
def test_losses_are_said(overhead, row, is_pressed, expected):
    case = replace(overhead.QUICK_CASES[0], is_pressed=is_pressed)
    assert list(overhead.judge_case(case, row).values()) == expected


def test_a_round_that_fails_is_an_error(overhead, roomy_folder):
    """One of its requests never fits the pool."""
    case = replace(overhead.QUICK_CASES[0], num_blocks=2)
    with pytest.raises(KVBlocksError, match="expected"):
        overhead.measure_overhead(roomy_folder, torch.device("cpu"), [case])


def test_spread_is_said_where_it_hides_what_is_asked(overhead):
    row = {"ratio": 1.0, "ratio_least": 0.99, "ratio_most": 1.0, "num_rounds": 5, "loss_outside": 0.001}
    row |= {name: {"outside_us_per_step": 9.0} for name in ("without", "with")}
    assert "counts say more" not in overhead.spread_line(row)
    assert "counts say more" in overhead.spread_line(row | {"ratio_most": 1.02})


def test_a_gpu_gets_the_whole_rate_and_a_model_of_a_common_shape(bench, monkeypatch):
    """There is no GPU here, so only what is chosen for one is checked."""
    monkeypatch.setattr(bench, "choose_device", torch.device)
    given = bench.read_options(["--device", "cuda"])
    sizes, cases = bench.choose_sizes(given)
    assert (sizes.rate, given.cpu_scale, given.model) == (8.0, 1.0, "llama-3.2-1b")
    assert sizes.num_requests / sizes.rate == 32.0
    assert cases == bench.GPU_CASES
    flags = bench.server_flags(Path("m"), given, None)
    assert flags[flags.index("--device") + 1] == "cuda"
    assert flags[flags.index("--kv-cache-memory") + 1] == "8GiB"
    assert "--warm-up" in flags
    pressed = bench.server_flags(Path("m"), given, 1024)
    assert pressed[pressed.index("--num-blocks") + 1] == "1024"
    assert "--kv-cache-memory" not in pressed


def test_a_cpu_gets_a_rate_that_it_can_carry(bench):
    given = bench.read_options(["--device", "cpu", "--max-tokens", "5"])
    sizes, cases = bench.choose_sizes(given)
    assert (sizes.rate, sizes.max_tokens, given.model) == (8.0 / 24, 5, "smollm2")
    assert cases == bench.CPU_CASES
    assert bench.server_flags(Path("m"), given, None) == ("m", "--deterministic", "--threads", "1", "--device", "cpu")


def run_of(ttft_p50_s, hit_rate=0.0):
    keys = ("ttft_p50_s", "later_ttft_p50_s")
    return dict.fromkeys(keys, ttft_p50_s) | {"hit_rate": hit_rate, "saved": hit_rate, "num_preemptions": 1}


def row_of(name, without, caching, is_identical=True, shares=True, num_computed_tokens=1.0):
    ratios = {key: without[key] / caching[key] for key in ("ttft_p50_s", "later_ttft_p50_s")}
    ratios["num_computed_tokens"] = num_computed_tokens
    facts = {"workload": name, "shares": shares, "is_identical": is_identical}
    return facts | {"without": without, "with": caching, "ratios": ratios}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (row_of("shared prefix", run_of(5.0), run_of(1.0, 0.6)), [True, True, True, True]),
        (row_of("full rate", run_of(4.9), run_of(1.0, 0.59)), [True, False, True, False]),
        (row_of("shared prefix", run_of(5.0), run_of(1.0, 0.29), is_identical=False), [False, False, False, True]),
        (row_of("no sharing", run_of(1.0), run_of(1.09), shares=False), [True, True]),
        (row_of("no sharing", run_of(1.0), run_of(1.11), shares=False), [True, False]),
        (row_of("multi-turn chat", run_of(1.0), run_of(2.0)), [True]),
        (row_of("pool pressure", run_of(1.0), run_of(1.0), num_computed_tokens=1.1), [True, True, True]),
        (row_of("pool pressure", run_of(1.0) | {"num_preemptions": 0}, run_of(1.0)), [True, False, False]),
    ],
)
def test_targets_that_are_missed_are_said(bench, row, expected):
    assert list(bench.judge(row).values()) == expected
    judged = [{"targets": {}}, {"targets": bench.judge(row)}]
    assert bench.is_missed(judged) is not all(expected)


def answer_at(client, *token_s):
    return (client.Answer(0.0, list(token_s)),)


def test_the_decodes_of_a_step_are_those_that_overlap(bench):
    client = importlib.import_module("bench.serving.client")
    for spans, expected in (
        ([(1.0, 2.0, 3.0), (5.0, 9.0)], 1.0),
        ([(1.0, 3.0), (1.0, 3.0), (1.0, 3.0)], 3.0),
        ([(1.0, 5.0), (2.0, 3.0), (4.0, 9.0)], 10.0 / 8.0),
        ([(1.0,)], 0.0),
    ):
        answers = tuple(answer_at(client, *span) for span in spans)
        assert client.Outcome(answers, 9.0, 0, 0, 0).num_decoding == pytest.approx(expected)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_so_many_clients_talk_at_once(bench, monkeypatch, num_clients):
    client = importlib.import_module("bench.serving.client")
    now, most = 0, 0

    async def talk(http, conversation):
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1
        return []

    async def run():
        free = asyncio.Semaphore(num_clients)
        conversations = [client.Conversation(0.0)] * 9
        await asyncio.gather(*(client._converse(None, one, 0.0, free) for one in conversations))  # noqa: SLF001

    monkeypatch.setattr(client, "_talk", talk)
    asyncio.run(run())
    assert (now, most) == (0, num_clients)


@pytest.mark.exhaustive
def test_one_client_makes_one_decode_a_step_with_and_without_caching(bench, roomy_folder, capsys):
    options = ["--device", "cpu", "--quick", "--clients", "1", "--workloads", "full rate"]
    assert bench.main(["--model", str(roomy_folder), *options]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("requests decoding at once"))
    assert line.split()[-2:] == ["1.000", "1.000"]
    with pytest.raises(SystemExit):
        bench.read_options(["--clients", "0"])
    assert "--clients: expected at least 1, got 0" in capsys.readouterr().err


def test_percentiles(bench):
    assert bench.percentile([3.0], 99) == 3.0
    assert bench.percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert bench.percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)


def test_workloads_are_as_large_as_they_say(bench):
    sizes = bench.slowed(bench.Sizes(), 4.0)
    workloads = bench.make_workloads(sizes, lambda text: [len(word) for word in text.split()])
    shared, full_rate, chats, mixed, long, pressed, alone = workloads
    prompts = [talk.prompt for talk in shared.conversations]
    assert len(prompts) == 32
    assert [talk.start_s for talk in full_rate.conversations] == [number / 8 for number in range(48)]
    assert {talk.prompt[:1024] for talk in full_rate.conversations} == {prompts[0][:1024]}
    assert {32 <= len(talk.prompt) - 1024 <= 128 for talk in full_rate.conversations} == {True}
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:] for prompt in prompts}) == 32
    assert {32 <= len(prompt) - 1024 <= 128 for prompt in prompts} == {True}
    assert [talk.start_s for talk in shared.conversations[:3]] == [0.0, 0.5, 1.0]
    assert {len(talk.turns) for talk in chats.conversations} == {4}
    assert {len(talk.prompt) for talk in alone.conversations} == {384}
    assert len({talk.prompt[:16] for talk in alone.conversations}) == 8
    assert "2 a second" in shared.about
    lengths = {len(talk.prompt) for talk in mixed.conversations}
    assert len(lengths) > 9
    assert 64 + 16 <= min(lengths) < max(lengths) <= 512 + 256
    assert len({talk.prompt[:64] for talk in mixed.conversations}) == 3
    assert len({talk.max_tokens for talk in mixed.conversations}) > 6
    assert [len(talk.prompt) > 2048 for talk in long.conversations] == [True] * 6
    documents = [talk.prompt[:2048] for talk in long.conversations]
    assert documents == documents[:2] * 3
    assert documents[0] != documents[1]
    assert {(talk.start_s, len(talk.prompt), talk.max_tokens) for talk in pressed.conversations} == {(0.0, 128, 48)}
    assert pressed.num_blocks * 16 < sum(len(talk.prompt) for talk in pressed.conversations)
    assert {workload.num_blocks for workload in workloads} == {None, pressed.num_blocks}


def test_a_server_that_does_not_start_is_an_error(bench):
    served = importlib.import_module("bench.serving.process").served
    with pytest.raises(RuntimeError, match="ended with status 2 before it served"), served("tiny", "--num-blocks", "0"):
        pass


@pytest.fixture
def bounds(monkeypatch):
    """The module that compares a server under attack with its bounds."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)
    return importlib.import_module("bench.serving.bounds")


@pytest.mark.exhaustive
def test_it_measures_a_server_under_attack(bounds, roomy_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bounds, "LEAST_CHATS", 2)
    monkeypatch.setattr(bounds, "LEAST_S", 0.5)
    kept = tmp_path / "kept.json"
    names = {
        "digits": {"400 context_length_exceeded"},
        "390,000 keys": {"400 too_many_values"},
        "tiny chunks": {"not answered", "400 too_much"},  # by how long the turn takes
        "two lengths": {"400"},
        "half a body": {"held to the end"},
    }
    options = ["--clients", "2", "--attacks", ",,".join(names), "--json", str(kept)]
    bounds.main(["--model", str(roomy_folder), *options])
    turns = json.loads(kept.read_text())["results"]
    assert [turn["attack"] for turn in turns] == [None, *names]
    for turn in turns:
        assert len(turn["ttft_s"]) >= 2
        assert min(turn["ttft_s"]) > 0
        assert turn["peak_mb"] > 0
        assert turn["health_s"] >= turn["median_health_s"] > 0
        assert turn["num_failed_health"] == turn["num_failed_chats"] == 0
        expected = names.get(turn["attack"], set())
        assert expected & set(turn.get("outcomes", ())) or turn["attack"] is None, turn
    assert "Not shown:" in capsys.readouterr().out


def test_every_attack_that_is_a_body_is_made(bounds):
    """All bodies can be made, and are what their names say."""
    bodies = importlib.import_module("bench.serving.hostile_bodies")
    for name, (path, make) in {**bodies.OLD_BODIES, **bodies.NEW_BODIES}.items():
        assert path.startswith("/v1/")
        assert name == "nothing" or make()
    calls = json.loads(bodies.NEW_BODIES["63,000 tool calls"][1]())["messages"][1]["tool_calls"]
    assert len(calls) == 63_000
    assert len(json.loads(bodies.NEW_BODIES["390,000 keys"][1]())) == 390_000
    assert len(bodies.NEW_BODIES["a schema of 3 MB"][1]()) > 2_900_000
    for name in ("an array for the template", "an array in a tool call"):
        assert 3_800_000 < len(bodies.NEW_BODIES[name][1]()) < 2**22
    assert len(bounds.ATTACKS) == 64


def test_what_is_under_way_at_the_end_of_an_attack_is_an_outcome(bounds, monkeypatch):
    hostile = importlib.import_module("bench.serving.hostile")
    monkeypatch.setattr("sys.stdin", io.StringIO())

    closed = asyncio.Semaphore(0)

    async def only_read(reader, writer):
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.release()

    async def attack_what_answers_nothing():
        async with await asyncio.start_server(only_read, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            outcomes = await hostile.attack(f"http://127.0.0.1:{port}", "nothing", 3, 0.0)
            for _ in range(3):
                await closed.acquire()
            return outcomes

    assert asyncio.run(attack_what_answers_nothing()) == {"not answered": 3}


def turn_of(name, ttft_s=0.1, **more):
    seen = {"health_s": 0.1, "before_mb": 900.0, "peak_mb": 1000.0, "num_failed_health": 0, "num_failed_chats": 0}
    return {"attack": name, "ttft_s": [ttft_s] * 3, **seen, **more}


@pytest.mark.parametrize(
    ("loud", "is_beyond"),
    [
        ({}, False),
        ({"ttft_s": 0.31}, True),
        ({"health_s": 0.21}, True),
        ({"peak_mb": 1401.0}, True),
        ({"num_failed_health": 1}, True),
        ({"num_failed_chats": 1}, True),
    ],
)
def test_it_says_which_bounds_are_not_held(bounds, loud, is_beyond):
    turns = [turn_of(None), turn_of("digits", **loud), turn_of("nested")]
    assert bounds.judge(turns) == (["digits"] if is_beyond else [])


@pytest.mark.parametrize("name", ["1,000 halves of a body", "the largest answers"])
def test_an_attack_that_takes_all_room_may_refuse_chats(bounds, name):
    alone = turn_of(None)
    assert bounds.judge([alone, turn_of(name, num_failed_chats=9)]) == []
    assert bounds.judge([alone, turn_of(name, num_failed_health=1)]) == [name]


@pytest.mark.parametrize("number", [1, 3, 5])
def test_the_picture_has_a_panel_for_each_workload(bench, number):
    plot = importlib.import_module("bench.serving.plot")
    kinds = {"without": {"ttft_s": [0.4, 0.2]}, "with": {"ttft_s": [0.1, 0.2]}}
    rows = [kinds | {"workload": f"w{place}", "ratios": {"ttft_p50_s": 2.0}} for place in range(number)]
    figure = plot.draw({"results": rows, "conditions": {"model": "m", "cpu": "c", "rate": 8.0}})
    assert [panel.get_title() for panel in figure.axes] == [f"w{place}: median x2.0" for place in range(number)]
    for panel in figure.axes:
        lines = {line.get_label(): list(line.get_xdata()) for line in panel.get_lines()}
        assert lines == {"without caching": [0.2, 0.4], "with caching": [0.1, 0.2]}


@pytest.mark.exhaustive
def test_labels_of_the_picture_stand_apart(bench):
    """For narrow and wide ranges. The labels are measured in the picture itself."""
    plot = importlib.import_module("bench.serving.plot")
    for low, high in ((0.2, 60.0), (1.05, 1.9), (1.0, 1.001), (0.0004, 900.0), (5.0, 5.0), (0.09, 0.31)):
        times = [low * (high / low) ** (place / 20) for place in range(21)]
        row = {"without": {"ttft_s": times}, "with": {"ttft_s": times}}
        row |= {"workload": "one", "ratios": {"ttft_p50_s": 1.0}}
        figure = plot.draw({"results": [row] * 3, "conditions": {"model": "m", "cpu": "c", "rate": 1 / 3}})
        figure.savefig(io.BytesIO())
        for panel in figure.axes:
            shown = [label for label in panel.get_xticklabels(which="both") if label.get_text()]
            boxes = [label.get_window_extent() for label in shown]
            assert 2 <= len(boxes) <= 8, (low, high)
            assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(boxes)), (low, high)
