"""A server with a disk: what a deletion that can't be done says, and that nobody else waits for one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from server.server_harness import running_server, tiny_loaded

from kvblocks.engine.tiers.places import DiskPlace
from kvblocks.tiers.disk import DiskError

PROMPT = [(7 * index) % 250 for index in range(300)]


@pytest.fixture
def server(tiny_folder, tmp_path):
    torch.set_num_threads(1)
    cache = {"num_blocks": 24, "disk_cache": str(tmp_path / "kv"), "disk_cache_size": "64MiB"}
    with running_server(tiny_loaded(tiny_folder), cache=cache) as running:
        yield running


def complete(http, salt):
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def forget(http, salt):
    return http.post("/v1/cache/forget", json={"cache_salt": salt})


def test_nobody_waits_for_a_deletion_but_who_asked_for_it(server, monkeypatch):
    call, has_begun, may_end = DiskPlace.forget, threading.Event(), threading.Event()

    def hang(self, *given):
        has_begun.set()
        assert may_end.wait(60)
        call(self, *given)

    monkeypatch.setattr(DiskPlace, "forget", hang)
    with server.http() as http, ThreadPoolExecutor(1) as pool:
        complete(http, "ann")
        server.wait_until_idle()
        asked = pool.submit(forget, http, "ann")
        try:
            assert has_begun.wait(60)
            assert complete(http, "bob") == 0 and complete(http, "bob") == 288
            assert http.get("/health").status_code == 200 and not asked.done()
        finally:
            may_end.set()
        response = asked.result(60)
        assert response.status_code == 200 and response.json()["num_removed_entries"] > 18
        assert complete(http, "ann") == 0


def test_a_deletion_that_fails_says_what_is_left_and_what_to_do(server, monkeypatch):
    def fail(*_):
        raise DiskError("expected room for the index, got none")

    with server.http() as http:
        complete(http, "ann")
        server.wait_until_idle()
        with monkeypatch.context() as patch:
            patch.setattr(DiskPlace, "forget", fail)
            response = forget(http, "ann")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "forget_incomplete")
        assert "disk: expected room for the index, got none. Try again" in error["message"]
        assert complete(http, "ann") == 0
        assert forget(http, "ann").status_code == 200
