"""The settings of `kvblocks serve`: a wrong combination is an error at start that says why."""

import ast
from pathlib import Path

import pytest
import torch

from kvblocks.engine.run.cache_size import DEFAULT_GPU_SHARE, DEFAULT_KV_CACHE_BYTES
from kvblocks.errors import InvalidArgumentError
from kvblocks.server import settings as settings_module
from kvblocks.server.access.hosts import is_loopback
from kvblocks.server.flags import options_of
from kvblocks.server.run import warm_up
from kvblocks.server.settings import CacheSettings, ServerSettings, parse_memory, read_secret


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 10, "kv_cache_memory": "10"}, ["--num-blocks or --kv-cache-memory", "got both"]),
        ({"prefix_caching": False, "schedule": "grouped"}, ["--schedule fcfs", "--no-prefix-caching", "grouped"]),
        ({"schedule": "random"}, ["--schedule", "longest-prefix", "'random'"]),
        ({"kv_cache_dtype": "int4"}, ["--kv-cache-dtype", "fp8_e4m3", "'int4'"]),
        ({"eviction": "nonsense"}, ["--eviction", "sessions", "'nonsense'"]),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 11}, ["--max-num-batched-tokens", "(11)", "got 10"]),
        ({"max_num_partial_prefills": 0}, ["--max-partial-prefills", "at least 1", "got 0"]),
        ({"long_prefill_token_threshold": -1}, ["--long-prefill-tokens", "at least 0", "got -1"]),
        ({"num_blocks": 0}, ["--num-blocks", "got 0"]),
        ({"block_size": 0}, ["--block-size", "got 0"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs", "got 0"]),
        ({"num_history_blocks": -1}, ["--num-history-blocks", "got -1"]),
        ({"host_cache": "lots"}, ["tiers: host", "'lots'"]),
        ({"host_cache": "1.5"}, ["tiers: host", "1.5"]),
        ({"disk_cache": ""}, ["tiers: disk", "a folder"]),
        ({"disk_cache": "d", "disk_cache_size": "lots"}, ["tiers: disk: size", "'lots'"]),
        ({"disk_cache": "d", "disk_cache_size": "0.5"}, ["tiers: disk: size", "'0.5'"]),
        ({"disk_cache_size": "1GiB"}, ["--disk-cache-size", "--disk-cache", "got none"]),
        ({"disk_cache_secret_file": Path("s")}, ["--disk-cache-secret-file", "--disk-cache", "got none"]),
        ({"disk_cache": "d", "disk_cache_secret_file": Path("s")}, ["--disk-cache-secret-file", "can be read", "'s'"]),
        ({"threads": 0}, ["--threads", "at least 1", "got 0"]),
        ({"disk_cache": "d", "prefix_caching": False}, ["--disk-cache", "--no-prefix-caching"]),
        ({"host_cache": "1GiB", "prefix_caching": False}, ["--no-prefix-caching", "got --host-cache"]),
        ({"remember_next_token": True, "prefix_caching": False}, ["--remember-next-token", "got --no-prefix-caching"]),
        ({"session_gate": True, "prefix_caching": False}, ["--session-gate", "got --no-prefix-caching"]),
    ],
)
def test_wrong_settings_of_the_cache_say_why(settings, words):
    with pytest.raises(InvalidArgumentError) as raised:
        CacheSettings(**settings)
    assert all(word in str(raised.value) for word in ["expected", *words])


def test_errors_ask_for_the_name_of_an_option():
    """So an option that gets another name has it in all errors."""
    raised = [
        node for node in ast.walk(ast.parse(Path(settings_module.__file__).read_text())) if isinstance(node, ast.Raise)
    ]
    texts = [part.value for error in raised for part in ast.walk(error) if isinstance(part, ast.Constant)]
    assert len(raised) > 10 and not [text for text in texts if "--" in str(text)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, ["--api-key", "$KVBLOCKS_API_KEY", "--allow-anyone", "other machines"]),
        ({"host": "example.org"}, ["--api-key"]),
        ({"api_key": ""}, ["--api-key", "not empty"]),
        ({"api_key": "two words"}, ["--api-key"]),
        ({"api_key": "schlüssel"}, ["--api-key"]),
        ({"port": 65536}, ["--port", "65536"]),
        ({"max_requests": 0}, ["--max-requests"]),
        ({"max_body_bytes": 0}, ["--max-body-bytes"]),
        ({"request_timeout_s": 0}, ["--request-timeout"]),
        ({"request_timeout_s": float("nan")}, ["--request-timeout"]),
        ({"allowed_origins": ("*",)}, ["--allowed-origin", "one origin", "'*'"]),
        ({"allowed_origins": ("null",)}, ["--allowed-origin", "'null'"]),
        ({"allowed_origins": ("app.example",)}, ["--allowed-origin", "https://app.example"]),
        ({"allowed_origins": ("https://app.example/",)}, ["--allowed-origin", "'https://app.example/'"]),
        ({"allowed_origins": ("https://App.example",)}, ["--allowed-origin", "lower case"]),
        ({"allowed_origins": ("https://app.example:443",)}, ["--allowed-origin", "as browsers send it"]),
        ({"allowed_origins": ("https://*.example",)}, ["--allowed-origin"]),
        ({"allowed_origins": ("https://a.example,https://b.example",)}, ["--allowed-origin", "one origin"]),
        ({"grace_s": -1}, ["--grace-period", "-1"]),
    ],
)
def test_wrong_settings_of_the_server_say_why(settings, words):
    with pytest.raises(InvalidArgumentError) as raised:
        ServerSettings(**settings)
    message = str(raised.value)
    assert all(word in message for word in ["expected", *words])
    assert "schlüssel" not in message  # a key is a secret


def test_other_machines_come_in_with_a_key_or_if_anyone_may():
    assert ServerSettings(host="0.0.0.0", api_key="key").api_key == "key"
    assert ServerSettings(host="0.0.0.0", allow_anyone=True).api_key is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(("text", "memory"), [("2GiB", "2GiB"), ("0.5", 0.5), ("1.5 GB", "1.5 GB"), ("100", "100")])
def test_memory_is_a_share_or_a_text(text, memory):
    assert parse_memory(text) == memory


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"\xff in a file \r\n")
    assert (
        read_secret(file, None, "--disk-cache-secret-file")
        == read_secret(file, "another", "--disk-cache-secret-file")
        == b"\xff in a file "
    )
    assert read_secret(None, "schlüssel", "--disk-cache-secret-file") == "schlüssel".encode()
    assert (
        read_secret(None, None, "--disk-cache-secret-file") is read_secret(None, "", "--disk-cache-secret-file") is None
    )
    file.write_bytes(b"hush\n")
    with pytest.raises(InvalidArgumentError, match="tiers: disk: secret: expected at least 16 bytes, got 4") as raised:
        CacheSettings(disk_cache="d", disk_cache_secret_file=file)
    assert "hush" not in str(raised.value)
    with pytest.raises(InvalidArgumentError, match=r"--disk-cache-secret-file: expected a file .* No such file"):
        read_secret(tmp_path / "none", None, "--disk-cache-secret-file")


@pytest.mark.parametrize("memory", ["", "M", "-5M", "5X", "0", 0.0, 1.5, "five"])
def test_what_is_no_memory_is_refused_before_a_model_is_loaded(memory):
    with pytest.raises(InvalidArgumentError, match="kv_cache_memory: expected bytes"):
        CacheSettings(kv_cache_memory=memory)


def test_a_warm_up_tells_what_took_long():
    class Warmed:
        def warm_up(self, on_step):
            on_step("prompts", 0, 1)
            return {"store_kernel": 1.26, "extend_kernel": 12.5, "stream_kernel": 0.0}

    line = warm_up(Warmed())
    assert line.startswith("warmed up in ")
    assert line.endswith(" s; seconds of compiling: extend_kernel 12.5, store_kernel 1.3, stream_kernel 0.0")


@pytest.mark.parametrize(
    ("given", "device", "most"),
    [(None, "cpu", 64), (None, "cuda", None), (0, "cpu", None), (200, "cpu", 200), (200, "cuda", 200)],
)
def test_chunks_are_small_where_a_step_takes_as_long_as_it_has_tokens(given, device, most):
    settings = CacheSettings(long_prefill_token_threshold=given, max_num_partial_prefills=2, max_num_seqs=9)
    limits = settings.limits_on(torch.device(device))
    assert (limits.max_num_chunk_tokens, limits.max_num_partial_prefills, limits.max_num_seqs) == (most, 2, 9)


@pytest.mark.parametrize(("device", "tokens", "seqs", "warms_up"), [("cpu", 512, 64, False), ("cuda", 8192, 256, True)])
def test_defaults_are_those_of_the_device_and_help_says_them(device, tokens, seqs, warms_up):
    chosen = torch.device(device)
    limits = CacheSettings().limits_on(chosen)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens, seqs)
    assert CacheSettings().warms_up_on(chosen) == warms_up
    assert CacheSettings(warm_up=not warms_up).warms_up_on(chosen) != warms_up
    given = CacheSettings(max_num_batched_tokens=100, max_num_seqs=7).limits_on(chosen)
    assert (given.max_num_batched_tokens, given.max_num_seqs) == (100, 7)
    helps = {option.field: option.flag.help for option in options_of(CacheSettings)}
    assert f"{tokens} on a {'CPU' if device == 'cpu' else 'GPU'}" in helps["max_num_batched_tokens"]
    assert f"{seqs} on a {'CPU' if device == 'cpu' else 'GPU'}" in helps["max_num_seqs"]
    assert f"{DEFAULT_KV_CACHE_BYTES >> 20} MiB; on a GPU" in helps["num_blocks"]
    assert f"{DEFAULT_GPU_SHARE} of the free memory" in helps["num_blocks"]
