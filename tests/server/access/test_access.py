"""Who is let in and may ask what, over HTTP: names of hosts, operators, tenants that learn nothing of each other."""

import random
import re
import signal

import httpx2
import openai
import pytest
from server.server_harness import (
    MODEL,
    Gate,
    connect,
    in_background,
    read_all,
    running_server,
    serving,
    tiny_loaded,
    wait_for,
)

from kvblocks.cli import app as cli
from kvblocks.server.access.callers import TENANT_SALTS
from kvblocks.server.access.keys_file import parse_keys

A, B, CHOOSER, ADMIN = ("sk-aaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbb", "sk-cccccccccccccccc", "sk-operator-operator")
KEYS = f"""
[[key]]
tenant = "a"
key = "{A}"
max_requests = 2
quota = 7
tier_quotas = {{ host = 9 }}

[[key]]
tenant = "b"
key = "{B}"

[[key]]
tenant = "c"
key = "{CHOOSER}"
chooses_salt = true
"""
OPERATORS_ONLY = [
    ("GET", "stats"),
    ("GET", "pins"),
    ("POST", "pins"),
    ("DELETE", "pins/pin-1"),
    ("POST", "unpin"),
    ("GET", "dot"),
    ("GET", "snapshot"),
    ("POST", "reset"),
    ("POST", "forget"),
    ("POST", "hints"),
    ("GET", ""),
    ("POST", "explain/"),
    ("POST", "nonsense"),
]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    keys = parse_keys(KEYS.encode(), "keys")
    with running_server(model, cache={"host_cache": "1MiB"}, keys=keys, admin_key=ADMIN, max_requests=4) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(server):
    """Nothing is cached, and nothing runs."""
    server.wait_until_idle()
    server.on_thread(server.engine.manager.reset_prefix_cache)


def http_of(server, key):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers)


def ask(server, key, prompt, **more):
    with http_of(server, key) as http:
        response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **more})
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def explain(server, key, **body):
    with http_of(server, key) as http:
        response = http.post("/v1/cache/explain", json=body)
    return response.json() if response.status_code == 200 else response.status_code


@pytest.fixture
def prompt(request):
    """A prompt that no other test uses, since the tests share the cache, its history and host memory."""
    return random.Random(request.node.name).choices(range(200), k=80)


# --- hosts -----------------------------------------------------------------------------------------------------------


def send(server, host, path="/v1/cache/reset"):
    body = b"{}"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with connect(server) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return read_all(connection)


def test_a_page_that_rebinds_its_name_is_refused_on_the_loopback(model):
    with running_server(model, allowed_hosts=("kv.example",)) as server:
        for path in ("/v1/cache/reset", "/v1/completions", "/v1/models", "/health", "/metrics", "/"):
            reply = send(server, "evil.example", path)
            assert reply.startswith(b"HTTP/1.1 403 ")
            assert b"host_not_allowed" in reply
        for host in ("localhost:1", "127.0.0.1", "[::1]:9", "KV.example:80"):
            assert send(server, host).startswith(b"HTTP/1.1 200 ")
        with connect(server) as connection:  # an old client, which sends no name
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, b"403"),
        ({"admin_key": ADMIN}, b"403"),  # it keeps nobody from asking for answers
        ({"allow_anyone": True}, b"403"),
        ({"api_key": "k"}, b"200"),  # which a page doesn't have
        ({"api_key": "k", "allowed_hosts": ("kv.example",)}, b"403"),
        ({"host": "0.0.0.0", "allow_anyone": True}, b"200"),
        ({"host": "0.0.0.0", "allow_anyone": True, "allowed_hosts": ("kv.example",)}, b"403"),
    ],
)
def test_when_names_are_checked(model, settings, status):
    with running_server(model, **settings) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        head = b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        with connect(server) as connection:
            connection.sendall(head)
            assert read_all(connection).startswith(b"HTTP/1.1 " + status)


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), OPERATORS_ONLY)
@pytest.mark.parametrize("key", [A, CHOOSER, "sk-nobody", None])
def test_what_is_for_operators_needs_their_key(server, prompt, method, path, key):
    ask(server, B, prompt)
    with http_of(server, key) as http:
        response = http.request(method, f"/v1/cache/{path}", json={})
    assert response.status_code == (403 if key in {A, CHOOSER} else 401)
    assert response.json()["error"]["code"] == ("not_operator" if key in {A, CHOOSER} else "invalid_api_key")
    assert ADMIN not in response.text
    assert server.engine.manager.stats.num_cached_blocks > 0


def test_the_operator_may_ask_all(server, prompt, monkeypatch, capsys):
    ask(server, B, prompt)
    with http_of(server, ADMIN) as http:
        assert http.get("/v1/cache/stats").json()["num_entries"] > 0
        assert http.get("/v1/cache/pins").status_code == 200
        forgotten = http.post("/v1/cache/forget", json={"cache_salt": TENANT_SALTS + "b"})
        assert forgotten.json()["num_removed_entries"] > 0
    assert cached(ask(server, B, prompt)) == 0
    monkeypatch.setenv("KVBLOCKS_URL", server.url)
    monkeypatch.setenv("KVBLOCKS_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("KVBLOCKS_API_KEY", A)
    with pytest.raises(SystemExit) as raised:
        cli.main(["cache", "reset"])
    assert not raised.value.code
    assert "removed" in capsys.readouterr().out


def test_an_operators_key_alone_lets_anybody_ask_for_answers(model, prompt):
    with running_server(model, admin_key=ADMIN) as server:
        ask(server, None, prompt)
        ask(server, "none", prompt)  # as OpenAI's client has it
        for key in (None, "none"):
            with http_of(server, key) as http:
                assert http.post("/v1/cache/reset", json={}).status_code == 403
        with http_of(server, ADMIN) as http:
            assert http.post("/v1/cache/reset", json={}).status_code == 200


def test_without_an_operators_key_who_has_the_key_is_one(model, prompt):
    with running_server(model, api_key="secret-1") as server:
        ask(server, "secret-1", prompt, cache_salt="a")
        # But is not told what others have, who may be others with this key.
        (known,) = explain(server, "secret-1", token_ids=prompt)["prompts"]
        assert known["cause"] == "never cached"
        with http_of(server, "secret-1") as http:
            assert http.post("/v1/cache/reset", json={}).status_code == 200


# --- tenants ---------------------------------------------------------------------------------------------------------


def test_tenants_share_nothing(server, prompt):
    assert cached(ask(server, A, prompt)) == 0
    assert cached(ask(server, A, prompt)) >= 64
    for other in (B, CHOOSER):
        assert cached(ask(server, other, prompt)) == 0
    assert cached(ask(server, CHOOSER, prompt, cache_salt="x")) == 0
    assert cached(ask(server, CHOOSER, prompt, cache_salt="x")) >= 64
    assert cached(ask(server, CHOOSER, prompt, cache_salt="y")) == 0


def test_the_real_client_has_its_tenants_cache(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=A, max_retries=0, timeout=60) as client:
        messages = [{"role": "user", "content": "How long is the cable of the kettle? " * 3}]
        for expected in (0, 16):
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=1)
            assert (answer.usage.prompt_tokens_details.cached_tokens >= expected) is True
        assert answer.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 20, "cache_salt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "cache_salt": "x"}),
        ("/v1/cache/warm", {"prompts": [{"token_ids": [1] * 20, "cache_salt": "x"}]}),
        ("/v1/cache/warm", {"prompts": [{"token_ids": [1] * 20}], "cache_salt": "x"}),
        ("/v1/cache/explain", {"token_ids": [1] * 20, "cache_salt": "x"}),
    ],
)
def test_a_tenant_does_not_choose_its_salt(server, path, body):
    with http_of(server, A) as http:
        response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_what_a_tenant_warms_is_its_own(server, prompt):
    with http_of(server, A) as http:
        assert http.post("/v1/cache/warm", json={"prompts": [{"token_ids": prompt}]}).status_code == 200
    assert cached(ask(server, B, prompt)) == 0
    assert cached(ask(server, A, prompt)) >= 64


@pytest.mark.parametrize("salt", [TENANT_SALTS + "a", TENANT_SALTS + "c/x"])
def test_nobody_names_a_tenants_salt(model, salt):
    """A server with one key, perhaps on the disk that one with tenants used."""
    with running_server(model, api_key="secret-1") as server, http_of(server, "secret-1") as http:
        response = http.post("/v1/completions", json={"prompt": [1] * 20, "cache_salt": salt})
        assert response.status_code == 400
        assert "doesn't begin with" in response.json()["error"]["message"]


def test_a_tenant_has_slots_of_its_own_number(server):
    gate = Gate(server.engine)
    gate.shut()
    body = {"prompt": [1] * 20, "max_tokens": 2, "n": 2}
    try:
        with http_of(server, A) as http, http_of(server, B) as others:
            response = http.post("/v1/completions", json={**body, "n": 3})
            assert "at most 2 answers of this key at once, got 3" in response.json()["error"]["message"]
            threads = [in_background(lambda: http.post("/v1/completions", json=body))]
            wait_for(lambda: server.service.num_open == 2)
            response = http.post("/v1/completions", json={**body, "n": 1})
            assert response.status_code == 429
            assert "at most 2 unfinished answers of this key, got 2 and 1 more" in response.json()["error"]["message"]
            threads.append(in_background(lambda: others.post("/v1/completions", json=body)))
            wait_for(lambda: server.service.num_open == 4)
            gate.open()
            for thread in threads:
                thread.join(60)
            assert http.post("/v1/completions", json={**body, "n": 1}).status_code == 200
    finally:
        gate.open()


def test_quotas_are_in_force(server):
    salt = TENANT_SALTS + "a"
    quotas = server.on_thread(lambda: list(server.engine.manager.quotas))
    assert [(quota.salt, quota.max_cached_blocks) for quota in quotas] == [(salt, 7)]
    quotas = server.on_thread(lambda: server.engine.manager.tiers.quotas("host"))
    assert [(quota.salt, quota.max_cached_blocks) for quota in quotas] == [(salt, 9)]


# --- explanations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0, 32, 20], ids=["nothing", "a part", "a block that begins alike"])
@pytest.mark.parametrize("key", [A, CHOOSER])
def test_an_explanation_says_nothing_of_others(server, prompt, key, own):
    """Word for word the same, whether or not others have the prompt."""
    if own:
        ask(server, key, prompt[:own] + [250] * 20)
    before = explain(server, key, token_ids=prompt)
    ask(server, B, prompt)
    assert explain(server, B, token_ids=prompt)["prompts"][0]["cause"] == "no miss"
    assert explain(server, key, token_ids=prompt) == before
    assert before["prompts"][0]["cause"] == "never cached"
    answer = ask(server, key, prompt)
    (known,) = explain(server, key, request_id=answer["id"])["prompts"]
    assert known["cause"] == "never cached"
    assert known["text"] == before["prompts"][0]["text"]


def test_a_tenant_asks_about_its_own_requests_alone(server, prompt):
    answer = ask(server, B, prompt)
    assert explain(server, B, request_id=answer["id"])["prompts"][0]["num_prompt_tokens"] == len(prompt)
    for key in (A, CHOOSER):
        with http_of(server, key) as http:
            others = http.post("/v1/cache/explain", json={"request_id": answer["id"]})
            unknown = http.post("/v1/cache/explain", json={"request_id": "cmpl-0"})
        assert others.status_code == unknown.status_code == 404
        assert others.text.replace(answer["id"], "") == unknown.text.replace("cmpl-0", "")
    assert explain(server, ADMIN, request_id=answer["id"])["prompts"][0]["num_prompt_tokens"] == len(prompt)


def test_a_tenant_is_told_why_its_own_prompt_is_gone(server, prompt):
    ask(server, B, prompt)
    server.on_thread(server.engine.manager.reset_prefix_cache)
    (known,) = explain(server, B, token_ids=prompt)["prompts"]
    assert known["cause"] == "reset"
    assert known["text"] == "0 of 5 full blocks are cached; block 0 isn't cached: reset"


def test_the_operator_is_told_of_others(server, prompt):
    ask(server, B, prompt)
    assert explain(server, ADMIN, token_ids=prompt)["prompts"][0]["cause"] == "other keys"
    (known,) = explain(server, ADMIN, token_ids=prompt, cache_salt=TENANT_SALTS + "b")["prompts"]
    assert known["cause"] == "no miss"


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_server_with_files_of_keys(tiny_folder, tmp_path):
    keys, admin = tmp_path / "keys.toml", tmp_path / "admin"
    keys.write_text(KEYS.replace("tier_quotas = { host = 9 }\n", ""))
    keys.chmod(0o600)
    admin.write_text(f"{ADMIN}\n")
    with serving(tiny_folder, "--keys", str(keys), "--admin-key-file", str(admin)) as (process, url, lines):
        for key, status in ((A, 200), (ADMIN, 200), ("sk-dddddddddddddddd", 401)):
            response = httpx2.get(f"{url}/models", headers={"authorization": f"bearer {key}"}, trust_env=False)
            assert response.status_code == status
        for key, status in ((A, 403), (ADMIN, 200)):
            response = httpx2.get(f"{url}/cache/stats", headers={"authorization": f"Bearer {key}"}, trust_env=False)
            assert response.status_code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert len(lines) == 2
    assert not re.search("sk-", "".join(lines))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keys", "/no/such"], "--keys: expected a file that can be read"),
        (["--keys", "KEYS", "--api-key", "k"], "expected --api-key or --keys, which has one for each tenant, got both"),
        (["--keys", "KEYS", "--admin-key", A], "--admin-key: expected a key that no client has, got one of theirs"),
        (["--api-key", "k", "--admin-key", "k"], "--admin-key: expected a key that no client has"),
        (["--keys", "KEYS"], "tier_quotas of 'a': expected tiers that the server has (none), got host"),
        (["--admin-key-file", "/no/such"], "--admin-key-file: expected a file that can be read"),
        (["--admin-key", "two words"], "--admin-key: expected ASCII without spaces"),
        (["--allowed-host", "a:80"], "--allowed-host: expected a name or an address, without port, got 'a:80'"),
    ],
)
def test_what_cannot_be_served(tiny_folder, tmp_path, arguments, words, capsys):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    given = [str(keys) if argument == "KEYS" else argument for argument in arguments]
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve", "--model", str(tiny_folder), "--port", "0", "--num-blocks", "64", *given])
    message = capsys.readouterr().err.splitlines()[-1]
    assert raised.value.code == 2
    assert message.startswith("kvblocks: ")
    assert words in message
    assert "sk-" not in message
