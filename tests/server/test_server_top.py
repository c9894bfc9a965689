"""`kvblocks cache top`, and tenants in /metrics where the operator allows it."""

import io
import json
import re

import pytest
from rich.console import Console
from server.server_harness import MODEL, running_server, series, tiny_loaded

from kvblocks.cli import app as cli
from kvblocks.cli.shown.top import sort, tables
from kvblocks.server.access.callers import Caller, TenantKey, digest_of
from kvblocks.server.tenant_usage import tenant_of

KEYS = {name: f"sk-{name}-0123456789" for name in ("ann", "bob")}
ADMIN = "the-operators-own-key"
TENANTS = tuple(
    TenantKey(Caller(tenant=name, may_choose_salt=name == "bob"), digest_of(key), max_cached_blocks=quota)
    for (name, key), quota in zip(KEYS.items(), (40, None), strict=True)
)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


def ask(http, name, prompt, **options):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **options}
    response = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS[name]}"})
    assert response.status_code == 200, response.text


def top(*arguments):
    with pytest.raises(SystemExit) as raised:
        cli.main(["cache", "top", *arguments])
    assert not raised.value.code


def test_top_shows_tenants_and_tiers(model, capsys, monkeypatch):
    monkeypatch.setenv("KVBLOCKS_ADMIN_KEY", ADMIN)
    cache = {"num_blocks": 64, "host_cache": "4MiB"}
    with running_server(model, keys=TENANTS, admin_key=ADMIN, cache=cache) as server, server.http() as http:
        for _ in range(3):
            ask(http, "ann", [5] * 100)
        ask(http, "bob", [6] * 100)
        ask(http, "bob", [6] * 100, cache_salt="x")
        for number in range(8):
            ask(http, "bob", [(number + index * 7) % 250 for index in range(150)])
        server.wait_until_idle()
        capsys.readouterr()
        top("--json", "--once", "--url", server.url)
        values = json.loads(capsys.readouterr().out)
        ann, bob = (next(row for row in values["tenants"] if row["tenant"] == name) for name in ("ann", "bob"))
        assert (ann["num_requests"], ann["num_prompt_tokens"]) == (3, 300)
        assert 0.6 < ann["hit_share"] < 0.67
        assert sum(ann["num_cached_tokens_by_tier"].values()) == ann["num_cached_tokens"]
        assert (ann["quota_blocks"], bob["quota_blocks"]) == (40, None)
        assert bob["num_requests"] == 10
        assert bob["num_evicted_blocks"] + ann["num_evicted_blocks"] == values["device"]["num_evicted_blocks"] > 0
        assert bob["num_held_blocks"] + ann["num_held_blocks"] == values["device"]["num_entries"]
        for order, first in (("share", "ann"), ("requests", "bob")):
            top("--once", "--sort", order, "--url", server.url)
            said = capsys.readouterr().out
            assert re.search(r"ann|bob", said)[0] == first
        assert "host" in said
        with pytest.raises(SystemExit) as raised:
            cli.main(["cache", "top", "--sort", "name", "--url", server.url])
        assert raised.value.code == 2
        headers = {"authorization": f"Bearer {KEYS['bob']}"}
        assert http.get("/v1/cache/top", headers=headers).status_code == 403
        assert "tenant=" not in http.get("/metrics").text


def test_metrics_have_tenants_if_the_operator_allows_it(model):
    with running_server(model, keys=TENANTS, metrics_by_tenant=True) as server, server.http() as http:
        for _ in range(2):
            ask(http, "bob", [6] * 100)
        server.on_thread(server.service.thread.usage.read)
        found = series(server.url)
        assert found['kvblocks_tenant_requests_total{tenant="bob"}'] == 2
        assert found['kvblocks_tenant_cached_tokens_total{tenant="bob"}'] >= 80
        assert found['kvblocks_tenant_held_blocks{tenant="bob"}'] == 6
        names = {name for name in found if "tenant=" in name}
        assert {re.search(r'tenant="(.*?)"', name)[1] for name in names} == {"ann", "bob"}  # ann has a quota


def test_a_salt_tells_its_tenant_and_others_are_one():
    salts = [None, "x", "kvblocks/tenant/ann", "kvblocks/tenant/ann/x", "kvblocks/tenant"]
    assert [tenant_of(salt) for salt in salts] == ["", "", "ann", "ann", ""]


def test_names_that_clients_make_up_are_no_tenants(model):
    """Without keys everybody may name a tenant's salt, and evicted blocks are counted by tenant for ever."""
    with running_server(model, cache={"num_blocks": 32}) as server, server.http() as http:
        for number in range(20):
            body = {"model": MODEL, "prompt": [number] * 100, "max_tokens": 1}
            response = http.post("/v1/completions", json={**body, "cache_salt": f"kvblocks/tenant/{number}"})
            assert response.status_code == 200
        rows = http.get("/v1/cache/top").json()["tenants"]
        assert list(rows) == [""] and rows[""]["num_evicted_blocks"] > 0


def test_what_was_saved_a_second_is_of_the_time_between(capsys):
    row = {"num_requests": 1, "num_cached_tokens": 10, "hit_share": 0.5, "num_held_blocks": 1, "num_evicted_blocks": 0}
    row |= {"num_pinned_blocks": 0, "quota_blocks": None, "num_cached_tokens_by_tier": {"device": 10}}
    device = {"num_entries": 1, "num_blocks": 4, "num_evicted_blocks": 0, "num_pinned_blocks": 0}
    first = sort({"time": 1.0, "tenants": {"": row}, "device": device, "tiers": []}, "hit_share")
    later = sort({**first, "time": 3.0, "tenants": {"": {**row, "num_cached_tokens": 30}}}, "hit_share")
    assert list(tables(later, first).renderables[0].columns[4].cells) == ["10"]
    assert list(tables(first, None).renderables[0].columns[4].cells) == ["-"]


def test_no_number_is_cut_in_80_columns():
    row = {"num_requests": 123_456, "num_cached_tokens": 345_678_901, "hit_share": 0.987, "num_held_blocks": 12_345}
    row |= {"num_pinned_blocks": 120, "quota_blocks": 20_000, "num_evicted_blocks": 1_234_567}
    row |= {"num_cached_tokens_by_tier": {"device": 345_678_901, "host": 12}}
    device = {"num_entries": 1, "num_blocks": 4, "num_evicted_blocks": 0, "num_pinned_blocks": 0}
    values = {"time": 1.0, "tenants": {"research-and-development": row}, "device": device, "tiers": []}
    before = sort(values, "num_requests")
    later = sort(
        {**values, "time": 2.0, "tenants": {"research-and-development": {**row, "num_requests": 7}}}, "hit_share"
    )
    for now, numbers in ((before, "123456 98.7% 345678901 -"), (later, "7 98.7% 345678901 0")):
        out = io.StringIO()
        Console(file=out, width=80).print(tables(now, before if now is later else None))
        (line,) = [" ".join(line.split()) for line in out.getvalue().splitlines() if "345678901 " in line]
        assert f" {numbers} 12345 20000 1234567 120 " in line
        assert {"requests", "evicted", "pinned", "from"} <= set(out.getvalue().splitlines()[2].split())
