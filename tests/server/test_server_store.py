"""Servers that share a store: one loads what another has computed; tenants by key; what the servers report of it."""

from pathlib import Path

import pytest
import torch
from server.server_harness import running_server, tiny_loaded
from tiers.store.servers import running

from kvblocks.cli import app as cli
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.settings import CacheSettings

PROMPT = [(7 * index) % 250 for index in range(300)]
SECRET = b"sixteen bytes or more"


@pytest.fixture(scope="module")
def model(tiny_folder):
    torch.set_num_threads(1)
    return tiny_loaded(tiny_folder)


def complete(http, prompt, **options):
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **options})
    assert response.status_code == 200, response.text
    return response.json()


def loaded(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["store"]


def test_what_one_server_computed_another_loads_and_a_deletion_is_for_both(model, tmp_path, capsys):
    with running(tmp_path) as store:
        url = f"{store.url}?timeout_ms=20000&lookup_ms=20000"
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        cache = {"num_blocks": 24, "store": url, "store_secret_file": secret}
        with running_server(model, cache=cache) as one, running_server(model, cache=cache) as other:
            with one.http() as http:
                first = complete(http, PROMPT, cache_salt="ann")
                one.wait_until_idle()
            with other.http() as http:
                again = complete(http, PROMPT, cache_salt="ann")
                assert loaded(again) == 288 and again["choices"] == first["choices"]
                assert loaded(complete(http, PROMPT, cache_salt="bob")) == 0
                other.wait_until_idle()
                (tier,) = http.get("/v1/cache/stats").json()["tiers"]
                page = http.get("/metrics").text
            assert (tier["place"]["num_read_blocks"], tier["place"]["is_away"]) == (18, False)
            assert 'kvblocks_store_lookups_total{tier="store"} 2.0' in page
            assert 'kvblocks_store_away{tier="store"} 0.0' in page
            for arguments, expected in ((["stats"], "; reachable, 0 calls failed"), (["forget", "--salt", "ann"], "")):
                with pytest.raises(SystemExit):
                    cli.main(["cache", *arguments, "--url", other.url])
                assert expected in capsys.readouterr().out
        with running_server(model, cache=cache) as third, third.http() as http:
            assert loaded(complete(http, PROMPT, cache_salt="ann")) == 0
            assert loaded(complete(http, PROMPT, cache_salt="bob")) == 288


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "host"}, "store: expected a URL"),
        ({"store_secret_file": Path("secret")}, "--store-secret-file: expected --store"),
        ({"store": "valkey://host"}, "tiers: valkey: secret: expected at least 16"),
        ({"store": "valkey://host", "prefix_caching": False}, "got --store"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, said, monkeypatch):
    monkeypatch.setenv("KVBLOCKS_STORE_SECRET", "short")
    with pytest.raises(InvalidArgumentError) as error:
        CacheSettings(**options)
    assert said in str(error.value)


def test_settings_do_not_show_a_password():
    assert "hidden" not in repr(CacheSettings(store="valkey://:hidden@host"))
