"""A server with tiers: what it tells of them, prompts that are warmed, and how it ends."""

import asyncio
import errno
import json
import time

import pytest
import torch
from server.server_harness import MODEL, Gate, running_server, tiny_loaded, wait_for

from kvblocks.cli import app as cli
from kvblocks.engine.tiers.places import DiskPlace
from kvblocks.server.errors import ApiError
from kvblocks.server.requests import parse_warm
from kvblocks.tiers.disk.arena import Arena

PROMPT = [(7 * index) % 250 for index in range(300)]  # long enough for the disk to store it at once
SYSTEM = "the cat is in the hat. " * 10


@pytest.fixture(scope="module")
def model(tiny_folder):
    torch.set_num_threads(1)
    return tiny_loaded(tiny_folder)


@pytest.fixture
def server(model, tmp_path):
    """The pool has three blocks for each twenty of the prompt, so that blocks of ended requests move to the tiers."""
    cache = {"num_blocks": 24, "host_cache": "128KiB", "disk_cache": str(tmp_path / "disk"), "disk_cache_size": "8MiB"}
    with running_server(model, cache=cache, max_requests=4) as running:
        yield running


@pytest.fixture
def kvblocks(server, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", *arguments, "--url", server.url])
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out, captured.err

    return run


def complete(http, prompt, **options):
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **options})
    assert response.status_code == 200, response.text
    return response.json()


def details(answer):
    return answer["usage"]["prompt_tokens_details"]


def fill(server, http):
    """Push everything out of the pool and out of host memory, once all is stored."""
    server.wait_until_idle()
    for number in range(3):
        complete(http, [(11 * index + number) % 250 for index in range(300)], cache_salt="other")
    server.wait_until_idle()


# --- what is told ----------------------------------------------------------------------------------------------------


def test_usage_says_where_tokens_were_found(server):
    with server.http() as http:
        first = complete(http, PROMPT)
        assert details(first) == {"cached_tokens": 0, "cached_tokens_by_tier": {"device": 0, "host": 0, "disk": 0}}
        again = details(complete(http, PROMPT))
        assert again["cached_tokens_by_tier"] == {"device": again["cached_tokens"], "host": 0, "disk": 0}
        fill(server, http)
        loaded = complete(http, PROMPT)
        by_tier = details(loaded)["cached_tokens_by_tier"]
        assert sum(by_tier.values()) == details(loaded)["cached_tokens"] >= 288
        assert by_tier["disk"] > 0
        assert loaded["choices"] == first["choices"]


@pytest.mark.parametrize("kind", ["chat", "stream", "chat stream"])
def test_all_kinds_of_answers_say_it(server, kind):
    options = {"stream": True, "stream_options": {"include_usage": True}} if "stream" in kind else {}
    with server.client() as client:
        if "chat" in kind:
            messages = [{"role": "user", "content": SYSTEM}]
            ask = client.chat.completions.create
            answers = [ask(model=MODEL, messages=messages, max_tokens=2, **options) for _ in range(2)]
        else:
            answers = [client.completions.create(model=MODEL, prompt=SYSTEM, max_tokens=2, **options) for _ in range(2)]
        usage = [list(answer)[-1].usage if options else answer.usage for answer in answers][1]
    found = usage.prompt_tokens_details
    assert found.cached_tokens_by_tier == {"device": found.cached_tokens, "host": 0, "disk": 0}
    assert found.cached_tokens > 100


def test_a_server_without_tiers_has_a_device(model):
    with running_server(model) as server, server.http() as http:
        assert details(complete(http, PROMPT))["cached_tokens_by_tier"] == {"device": 0}
        assert http.get("/v1/cache/stats").json()["tiers"] == []
        assert "kvblocks_tier" not in http.get("/metrics").text


def test_stats_and_metrics_show_tiers(server, kvblocks):
    with server.http() as http:
        complete(http, PROMPT)
        fill(server, http)
        complete(http, PROMPT)
        server.wait_until_idle()
        host, disk = http.get("/v1/cache/stats").json()["tiers"]
        page = http.get("/metrics").text
    block_bytes = server.engine.plan.block_bytes
    assert (host["name"], disk["name"], host["place"]) == ("host", "disk", None)
    assert disk["num_bytes"]["load"] == disk["num_loaded_blocks"] * block_bytes > 0
    assert disk["num_bytes"]["store"] >= disk["num_stored_blocks"] * block_bytes > 0
    assert disk["seconds"]["load"] > 0
    assert (disk["place"]["num_damaged_blocks"], disk["place"]["num_failed_writes"]) == (0, 0)
    assert disk["place"]["num_read_blocks"] == disk["num_loaded_blocks"]
    assert host["num_evicted_blocks"] > 0
    names = ("num_loaded_blocks", "num_stored_blocks", "num_failed_blocks", "num_dropped_blocks", "num_evicted_blocks")
    for tier in (host, disk):
        for name in names:
            line = f'kvblocks_tier_{name.removeprefix("num_")}_total{{tier="{tier["name"]}"}} {float(tier[name])}'
            assert line in page, line
    assert f'kvblocks_tier_slots{{tier="host"}} {float(host["num_blocks"])}' in page
    code, output, error = kvblocks("stats")
    assert (code, error) == (0, "")
    assert f"tier disk       {disk['num_cached_blocks']} of {disk['num_blocks']} slots used; loaded" in output
    assert f"stored {disk['num_stored_blocks']} (" in output
    assert "0 damaged, 0 writes and 0 syncs failed" in output


def test_a_full_disk_costs_no_answer_and_is_told_of_once_in_a_while(server, monkeypatch, caplog):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Arena, "write", fail)
    with server.http() as http:
        first = complete(http, PROMPT)
        assert complete(http, PROMPT)["choices"] == first["choices"]
        fill(server, http)
        _, disk = http.get("/v1/cache/stats").json()["tiers"]
    assert (disk["num_cached_blocks"], disk["num_bytes"]["store"]) == (0, 0)
    assert disk["num_failed_blocks"] > 0
    assert disk["place"]["num_failed_writes"] > 1
    assert len([record for record in caplog.records if "no room" in record.message]) == 1
    assert not any(record.exc_info for record in caplog.records)


# --- warming ---------------------------------------------------------------------------------------------------------


def warm(http, *prompts, **options):
    return http.post("/v1/cache/warm", json={"prompts": list(prompts), **options})


def test_what_is_warmed_is_cached(server):
    with server.http() as http:
        response = warm(http, {"system": SYSTEM}, {"token_ids": PROMPT})
        assert response.status_code == 200
        assert response.headers["x-request-id"].startswith("warm-")
        second, first = response.json()["prompts"]
        assert (first["num_prompt_tokens"], first["num_cached_tokens"], first["num_computed_tokens"]) == (300, 0, 300)
        assert first["num_cached_tokens_by_tier"] == {"device": 0, "host": 0, "disk": 0}
        assert first["seconds"] > 0
        assert second["num_computed_tokens"] == second["num_prompt_tokens"] > 100
        (again,) = warm(http, {"token_ids": PROMPT}).json()["prompts"]
        assert (again["num_cached_tokens"], again["num_computed_tokens"]) == (288, 12)
        assert details(complete(http, PROMPT))["cached_tokens"] == 288
        fill(server, http)
        (loaded,) = warm(http, {"token_ids": PROMPT}).json()["prompts"]
        assert loaded["num_cached_tokens_by_tier"]["disk"] > 0
        assert loaded["num_cached_tokens"] + loaded["num_computed_tokens"] == 300


def test_every_prompt_may_have_its_salt(server):
    with server.http() as http:
        prompts = [{"text": SYSTEM}, {"text": SYSTEM, "cache_salt": "a"}, SYSTEM]
        costs = warm(http, *prompts, cache_salt="b").json()["prompts"]
        assert [cost["num_computed_tokens"] for cost in costs[:2]] == [costs[0]["num_prompt_tokens"]] * 2
        assert costs[2]["num_computed_tokens"] < costs[0]["num_computed_tokens"]
        for salt, is_cached in (("a", True), ("b", True), (None, False)):
            assert (details(complete(http, SYSTEM, cache_salt=salt))["cached_tokens"] > 0) is is_cached


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompts: expected a list of prompts, got none"),
        ({"prompts": []}, "prompts: expected a list of prompts, got []"),
        ({"prompts": "text"}, "prompts: expected a list of prompts"),
        ({"prompts": [7]}, "prompts[0]: expected a JSON object, got 7"),
        ({"prompts": ["a", {}]}, "prompts[1]: expected one of text, system, messages, token_ids, got none"),
        ({"prompts": [{"text": "a", "system": "b"}]}, "prompts[0]: expected one of"),
        ({"prompts": [{"text": ""}]}, "prompts[0].text: expected a text that is not empty"),
        ({"prompts": [{"token_ids": [-1]}]}, "prompt: expected a text"),
        ({"prompts": [{"text": "a", "n": 2}]}, "got 'prompts[0].n'"),
        ({"prompts": ["a"], "max_tokens": 2}, "expected known fields (cache_salt, prompts), got 'max_tokens'"),
    ],
)
def test_what_cannot_be_read_is_refused(body, words):
    with pytest.raises(ApiError) as raised:
        parse_warm(body)
    assert words in raised.value.message
    assert raised.value.status == 400


def test_warming_is_bounded_as_answers_are(server):
    with server.http() as http:
        too_many = warm(http, *["a"] * 5)
        assert too_many.status_code == 400
        assert "at most 4 answers at once, got 5" in too_many.text
        too_long = warm(http, {"token_ids": [1] * 400})
        assert too_long.status_code == 400
        assert "at most 384 tokens" in too_long.text
        assert warm(http, {"token_ids": [1] * 384}).status_code == 200


def test_a_client_that_goes_away_ends_its_warming(server):
    gate = Gate(server.engine)
    gate.shut()

    async def go_away():
        async with server.async_client() as client:
            body = {"prompts": [{"token_ids": PROMPT}]}
            task = asyncio.create_task(client.post("/cache/warm", body=body, cast_to=object))
            await asyncio.to_thread(gate.wait_for_step)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go_away())
    wait_for(lambda: server.service.metrics.counts()["cancelled"] == 1)
    gate.open()
    server.wait_until_idle()


def test_one_that_takes_too_long_says_so(model):
    with running_server(model, request_timeout_s=0.2) as server, server.http() as http:
        gate = Gate(server.engine)
        gate.shut()
        response = warm(http, "hello")
        assert response.status_code == 504
        gate.open()


def test_the_command_warms_a_file(kvblocks, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        "the cat",
        {"messages": [{"role": "user", "content": SYSTEM}]},
        {"token_ids": [1] * 400},
        {"system": SYSTEM},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    code, output, error = kvblocks("warm", str(file))
    assert code == 2
    assert [line.split(":")[0] for line in output.splitlines()] == ["line 1", "line 3", "line 7"]
    assert "0 cached (0 from host, 0 from disk)" in output.splitlines()[0]
    assert "line 5: prompt: expected at most 384 tokens" in error
    assert "expected 4 prompts that can be cached, got 1 that can't" in error.splitlines()[-1]
    file.write_text(SYSTEM)
    code, output, error = kvblocks("warm", str(file), "--raw", "--salt", "a", "--json")
    assert (code, error) == (0, "")
    (cost,) = json.loads(output)["prompts"]
    assert (cost["line"], cost["num_cached_tokens"]) == (1, 0)


@pytest.mark.parametrize(
    ("text", "words"), [('"a"\nno json\n', "line 2: expected JSON, got an error"), ("\n \n", "at least one line")]
)
def test_a_file_that_is_none_is_told_of_before_anything_is_asked(kvblocks, server, tmp_path, text, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    code, output, error = kvblocks("warm", str(file))
    assert (code, output) == (2, "")
    assert words in error
    assert sum(server.service.metrics.counts().values()) == 0


def test_a_server_that_stops_meanwhile_is_told_of(kvblocks, server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n"b"\n')
    server.service.is_stopping = True
    code, output, error = kvblocks("warm", str(file))
    assert (code, output) == (1, "")
    assert "interrupted: 0 of 2 prompts are cached" in error
    assert "stopping" in error


# --- the end ---------------------------------------------------------------------------------------------------------


def cache_on(folder):
    return {"num_blocks": 64, "disk_cache": str(folder), "disk_cache_size": "8MiB"}


def test_what_waits_to_be_stored_is_stored_when_it_stops(model, tmp_path, slow_disk):
    slow_disk(0.05)
    with running_server(model, cache=cache_on(tmp_path / "disk"), grace_s=60) as server, server.http() as http:
        first = complete(http, PROMPT)
        server.server.handle_exit(15, None)
        wait_for(lambda: not server.service.thread.is_alive)  # what follows would end it at once
    with running_server(model, cache=cache_on(tmp_path / "disk")) as server, server.http() as http:
        again = complete(http, PROMPT)
        assert details(again)["cached_tokens_by_tier"] == {"device": 0, "disk": 288}
        assert again["choices"] == first["choices"]


def test_a_second_signal_drops_what_is_not_stored_yet(model, tmp_path, slow_disk):
    begun = slow_disk(3.0)
    with running_server(model, cache=cache_on(tmp_path / "disk"), grace_s=600) as server, server.http() as http:
        complete(http, PROMPT)
        server.server.handle_exit(15, None)
        wait_for(lambda: begun)
        server.server.handle_exit(15, None)
    assert not server.service.thread.is_alive
    assert server.engine.manager.tiers.is_busy  # some of it was never stored
    assert not server.engine.has_work
    server.engine.close(10_000.0)  # nothing the second time, or it would wait for that


@pytest.fixture
def slow_disk(monkeypatch):
    """Makes each store on the disk take so many seconds more; returns a list with an item for each that has begun."""

    def slow_down(seconds):
        store, begun = DiskPlace.store, []

        def wait(place, slots, *arguments):
            begun.append(slots)
            time.sleep(seconds)
            return store(place, slots, *arguments)

        monkeypatch.setattr(DiskPlace, "store", wait)
        return begun

    return slow_down
