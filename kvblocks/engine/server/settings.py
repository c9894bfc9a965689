"""The settings of `kvblocks serve`, all checked before a model is loaded. An error says why a combination is wrong."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kvblocks.arguments import check_count, is_number
from kvblocks.engine.attention.kv_scales import NAMES as KV_CACHE_DTYPES
from kvblocks.engine.run.memory import read_memory
from kvblocks.engine.schedule.schedules import SCHEDULES
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.server.access.access_log import LOG_LEVELS
from kvblocks.engine.server.access.callers import Caller, Callers, Tenant, digest_of
from kvblocks.engine.server.access.hosts import HostCheck, is_host, is_loopback
from kvblocks.engine.server.access.keys_file import is_key
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies import NAMED


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The engine's settings. num_blocks, kv_cache_memory: at most one of them, as `Engine` takes them.

    kv_cache_dtype, eviction: names that `Engine` takes. host_cache, disk_cache, disk_cache_size, disk_cache_secret,
    store, store_secret: as `Engine` takes them.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: float | str | None = None
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    num_history_blocks: int = 10_000
    remember_next_token: bool = False
    schedule: str = "fcfs"
    eviction: str | None = None
    deterministic: bool = False
    warm_up: bool = False
    device: str = "auto"
    attention: str = "auto"
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    host_cache: float | str | None = None
    disk_cache: str | Path | None = None
    disk_cache_size: str | None = None
    disk_cache_secret: bytes | None = field(default=None, repr=False)
    store: str | None = field(default=None, repr=False)  # the URL may contain a password
    store_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("--block-size", self.block_size, 1)
        check_count("--num-history-blocks", self.num_history_blocks, 0)
        if self.num_blocks is not None:
            check_count("--num-blocks", self.num_blocks, 1)
        if self.kv_cache_memory is not None:
            read_memory(self.kv_cache_memory, torch.device("cpu"))  # raises if the text can't be parsed
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected --num-blocks or --kv-cache-memory, since one decides the other, got both ({self.num_blocks}"
                f" and {self.kv_cache_memory!r})"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidArgumentError(
                f"--kv-cache-dtype: expected one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}"
            )
        if self.schedule not in SCHEDULES:
            raise InvalidArgumentError(f"--schedule: expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.eviction is not None and self.eviction not in NAMED:
            raise InvalidArgumentError(f"--eviction: expected one of {', '.join(NAMED)}, got {self.eviction!r}")
        if self.schedule != "fcfs" and not self.prefix_caching:
            raise InvalidArgumentError(
                f"expected --schedule fcfs with --no-prefix-caching, since the other orders go by what is cached, got"
                f" {self.schedule}"
            )
        if self.remember_next_token and not self.prefix_caching:
            raise InvalidArgumentError(
                "--remember-next-token: expected prefix caching, which keeps what it needs, got --no-prefix-caching"
            )
        self._check_tiers()
        check_count("--max-num-seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError(
                f"--max-num-batched-tokens: expected at least --max-num-seqs ({self.max_num_seqs}), since every running"
                f" sequence needs room for one token in a step, got {self.max_num_batched_tokens}"
            )

    def _check_tiers(self) -> None:
        if self.disk_cache is None:
            for flag, value in (("size", self.disk_cache_size), ("secret-file", self.disk_cache_secret)):
                if value is not None:
                    raise InvalidArgumentError(
                        f"--disk-cache-{flag}: expected --disk-cache, the folder, with it; got none"
                    )
        if self.store is None and self.store_secret is not None:
            raise InvalidArgumentError("--store-secret-file: expected --store, its URL, with it; got none")
        given = {"--host-cache": self.host_cache, "--disk-cache": self.disk_cache, "--store": self.store}
        got = [flag for flag, value in given.items() if value is not None]
        if not self.prefix_caching and got:
            raise InvalidArgumentError(
                f"expected none of {', '.join(given)} with --no-prefix-caching, since they hold what is cached, got"
                f" {got[0]}"
            )
        TierOptions(
            host_cache=self.host_cache,
            disk_cache=self.disk_cache,
            disk_cache_size=self.disk_cache_size,
            disk_cache_secret=self.disk_cache_secret,
            store=self.store,
            store_secret=self.store_secret,
        )

    @property
    def limits(self) -> StepLimits:
        """The limits of a step."""
        return StepLimits(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The server's settings. port 0: any free port. max_requests: unfinished requests, running and waiting.

    model_names: the names that the model is served under; answers have the first. Empty: its folder's name.
    api_key: one key for all clients. keys: a key for each tenant, instead of api_key. admin_key: the operator's key,
    for the endpoints of the cache; without it, and without `keys`, every client is an operator. allow_anyone: serve
    other machines without a key. allowed_hosts: names that a request's Host header may have, beside those of the
    loopback. If empty, any name is allowed; but a server on the loopback without keys then allows the loopback's names
    only. log_level: the least level that is logged; "info" logs each request. record: a file that gets a line for each
    request, for `kvblocks replay`; None: no file.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    keys: tuple[Tenant, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allow_anyone: bool = False
    max_requests: int = 256
    max_body_bytes: int = 4 * 2**20
    max_connections: int = 512
    request_timeout_s: float = 600.0
    grace_s: float = 30.0
    log_level: str = "warning"
    record: Path | None = None

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise InvalidArgumentError(f"--log-level: expected one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
        check_count("--port", self.port, 0, 65535)
        check_count("--max-requests", self.max_requests, 1)
        check_count("--max-body-bytes", self.max_body_bytes, 1)
        check_count("--max-connections", self.max_connections, 1)
        for name, value in (("--request-timeout", self.request_timeout_s), ("--grace-period", self.grace_s)):
            if not is_number(value) or not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name}: expected seconds, at least 0, got {value!r}")
        if not self.request_timeout_s:
            raise InvalidArgumentError("--request-timeout: expected more than 0 seconds, got 0")
        for name in self.model_names:
            if not name or not name.isprintable():
                raise InvalidArgumentError(f"--served-model-name: expected a name, got {name!r}")
        for name in self.allowed_hosts:
            if not is_host(name):
                raise InvalidArgumentError(f"--allowed-host: expected a name or an address, without port, got {name!r}")
        self._check_keys()
        if not is_loopback(self.host) and not self.has_keys and not self.allow_anyone:
            raise InvalidArgumentError(
                f"expected --api-key (or $KVBLOCKS_API_KEY) or --keys with --host {self.host}, since other machines can"
                " reach it, or --allow-anyone to let them all in; got none of them"
            )

    def _check_keys(self) -> None:
        for flag, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key is not None and not is_key(key):
                raise InvalidArgumentError(f"{flag}: expected ASCII without spaces, not empty, got something else")
        if self.api_key is not None and self.keys:
            raise InvalidArgumentError("expected --api-key or --keys, which has one for each tenant, got both")
        if self.admin_key is None:
            return
        admin = digest_of(self.admin_key)
        others = {tenant.digest for tenant in self.keys} | {digest_of(self.api_key or "")}
        if admin in others:
            raise InvalidArgumentError("--admin-key: expected a key that no client has, got one of theirs")

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or bool(self.keys)

    @property
    def callers(self) -> Callers:
        """The callers that may send requests, with their rights."""
        has_operator = self.admin_key is not None
        everybody = Caller(is_operator=not has_operator)
        known = [(tenant.digest, tenant.caller) for tenant in self.keys]
        if self.api_key is not None:
            known.append((digest_of(self.api_key), everybody))
        if self.admin_key is not None:
            known.append((digest_of(self.admin_key), Caller(is_operator=True, sees_others=True)))
        if self.has_keys:
            return Callers(known, None)
        return Callers(known, replace(everybody, sees_others=not has_operator and is_loopback(self.host)))

    @property
    def hosts(self) -> HostCheck | None:
        """The names that a Host header may have; None: any."""
        if self.allowed_hosts or (is_loopback(self.host) and not self.has_keys):
            return HostCheck((*self.allowed_hosts, self.host))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSettings:
    """Where cache events are published. endpoint: for subscribers; None: nowhere. replay: an endpoint for replays.

    allow_remote: let other machines connect. They need no key, and events hold prompts' tokens.
    """

    endpoint: str | None = None
    replay: str | None = None
    topic: str = ""
    allow_remote: bool = False

    def __post_init__(self) -> None:
        given = {"--kv-replay": self.replay, "--kv-topic": self.topic, "--kv-allow-remote": self.allow_remote}
        for flag, value in given.items():
            if value and self.endpoint is None:
                raise InvalidArgumentError(f"{flag}: expected --kv-events, the endpoint, with it; got none")


NO_EVENTS = EventSettings()


def parse_memory(text: str) -> float | str:
    """Return --kv-cache-memory as `Engine` takes it: a share of the free memory (0.5), or a text ("2GiB")."""
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def read_secret(file: Path | None, value: str | None, flag: str) -> bytes | None:
    """Return the secret in a file, without the line's end, or else `value` as bytes; None if there is neither.

    flag: the file's, for errors. Raises InvalidArgumentError for a file that can't be read.
    """
    if file is None:
        return value.encode("utf-8", "surrogateescape") if value else None
    try:
        return file.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise InvalidArgumentError(
            f"{flag}: expected a file that can be read, got {str(file)!r}: {error.strerror}"
        ) from error


def read_key(file: Path | None, value: str | None, flag: str) -> str | None:
    """Return the key in a file, or else `value`. Raises as `read_secret` does."""
    secret = read_secret(file, value, flag)
    return None if secret is None else secret.decode("utf-8", "replace")
