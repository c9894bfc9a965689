"""SGLang's router before three servers with keys: which tenant a request belongs to, and what becomes of its salt."""

from contextlib import ExitStack

import httpx2
import pytest
from clients.clients_help import routed
from server.server_harness import MODEL, outcomes, running_server, tiny_loaded

from kvblocks.server.access.keys_file import read_keys

KEYS = {"ann": "sk-ann-0123456789abcdef", "bob": "sk-bob-0123456789abcdef"}
SYSTEM = "The kettle holds 1.2 litres. It is sold in slate, sand and sea green. " * 4
CHAT = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How much?"}]}
NUM_SERVERS = 3


@pytest.fixture
def servers(roomy_folder, tmp_path):
    """Three servers with the same file of keys, whose tenants may choose salts."""
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f'[[key]]\ntenant = "{name}"\nkey = "{key}"\nchooses_salt = true\n' for name, key in KEYS.items())
    )
    file.chmod(0o600)
    model, keys = tiny_loaded(roomy_folder, 4096), read_keys(file)
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_server(model, cache={"deterministic": True}, keys=keys))
            for _ in range(NUM_SERVERS)
        ]


def ask(http, path, tenant, salt=None, **body):
    """Ask as a tenant: the status, and how many tokens were cached."""
    body |= {"model": MODEL, "max_tokens": 2, "temperature": 0} | ({} if salt is None else {"cache_salt": salt})
    headers = {} if tenant is None else {"Authorization": f"Bearer {KEYS.get(tenant, 'sk-nobody-0123456789')}"}
    answer = http.post(path, json=body, headers=headers)
    if answer.status_code != 200:
        return answer.status_code, None
    return 200, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_behind_the_router_a_dropped_salt_joins_no_tenants(servers):
    """Each server is asked by each tenant with and without salts; what was cached is always the tenant's own."""
    with routed("round_robin", *servers) as url, httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
        found = {}
        for tenant, salt in [(tenant, salt) for salt in ("s", None, "other") for tenant in KEYS]:
            for _ in range(NUM_SERVERS):  # one after the other, so each server gets one
                status, cached = ask(http, "/v1/chat/completions", tenant, salt, **CHAT)
                assert status == 200
                found.setdefault((tenant, salt), []).append(cached)
        for tenant in KEYS:
            # No hits, though the other tenant has asked the same with the same salt.
            assert found[tenant, "s"] == [0] * NUM_SERVERS
            # The router drops the salt. So a tenant hits its own blocks even if it asks with another salt.
            assert min(*found[tenant, None], *found[tenant, "other"]) > 64
        for server in servers:
            assert outcomes(server)["finished"] == len(found)
        for tenant in (None, "nobody"):
            assert ask(http, "/v1/chat/completions", tenant, **CHAT) == (401, None)
        # Completions keep their salts, and these don't lead to another tenant's blocks either.
        for tenant, salt in [("ann", "s"), ("bob", "s"), ("ann", None)]:
            for _ in range(NUM_SERVERS):
                assert ask(http, "/v1/completions", tenant, salt, prompt=f"Once, {SYSTEM}") == (200, 0)
