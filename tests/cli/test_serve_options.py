"""The options of `kvblocks serve` are the fields of its settings, and arrive there."""

from pathlib import Path

import pytest

from kvblocks import cli
from kvblocks.server import run
from kvblocks.server.access.callers import TenantKey
from kvblocks.server.flags import options_of
from kvblocks.server.settings import CacheSettings, EventSettings, ServerSettings


@pytest.fixture
def serve(monkeypatch):
    """Settings that a command line leads to."""
    monkeypatch.delenv("KVBLOCKS_STORE", raising=False)

    def read(*arguments):
        found = []
        monkeypatch.setattr(
            run, "serve", lambda load, model, cache, server, say, events: found.append((cache, server, events))
        )
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", *map(str, arguments)])
        assert end.value.code == (0 if found else 2)
        return found[0] if found else None

    return read


def test_without_options_settings_have_their_defaults(serve):
    assert serve() == (CacheSettings(), ServerSettings(), EventSettings())


def test_options_arrive(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLOCKS_STORE", "valkey://host")
    admin, secret = tmp_path / "admin", tmp_path / "secret"
    admin.write_text("operator\n")
    secret.write_bytes(b"sixteen bytes or more\n")
    cache, server, events = serve(
        *("--kv-cache-memory", "0.5", "--long-prefill-tokens", 0, "--max-partial-prefills", 5, "--deterministic"),
        *("--host-cache", "4MiB", "--disk-cache", "kv", "--disk-cache-size", "9GiB", "--store-secret-file", secret),
        *("--served-model-name", "a", "--served-model-name", "b", "--allowed-host", "c", "--request-timeout", 5),
        *("--grace-period", 7, "--admin-key-file", admin, "--kv-events", "inproc://x", "--kv-topic", "t"),
    )
    assert cache == CacheSettings(
        kv_cache_memory=0.5,
        long_prefill_token_threshold=0,
        max_num_partial_prefills=5,
        deterministic=True,
        host_cache="4MiB",
        disk_cache=Path("kv"),
        disk_cache_size="9GiB",
        store="valkey://host",
        store_secret_file=secret,
    )
    assert [(one.url, one.size, one.secret) for one in cache.tiers] == [
        ("host:4MiB", None, None),
        ("disk:kv", "9GiB", None),
        ("valkey://host", None, b"sixteen bytes or more"),
    ]
    assert (server.model_names, server.allowed_hosts, server.operator_key) == (("a", "b"), ("c",), "operator")
    assert (server.request_timeout_s, server.grace_s) == (5.0, 7.0)
    assert events == EventSettings(endpoint="inproc://x", topic="t")


def test_options_that_turn_off_and_files_of_keys(serve, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\ntenant = "ann"\nkey = "a-key-of-anns-that-is-long-enough"\n')
    keys.chmod(0o600)
    cache, server, _ = serve("--no-prefix-caching", "--no-warm-up", "--keys", keys)
    assert cache == CacheSettings(prefix_caching=False, warm_up=False)
    assert serve("--warm-up")[0] == CacheSettings(warm_up=True)
    assert [type(one) for one in server.keys] == [TenantKey]


def test_what_is_out_of_range_is_said_by_its_option(serve, capsys):
    assert serve("--port", 65536) is None
    assert "--port: expected" in capsys.readouterr().err


def test_each_option_has_one_name():
    names = [option.name for kind in (CacheSettings, ServerSettings, EventSettings) for option in options_of(kind)]
    assert len(names) == len(set(names)) > 45
