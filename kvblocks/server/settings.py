"""The settings of `kvblocks serve`, all checked before a model is loaded. An error says why a combination is wrong.

A field that is made by `flag` is an option of the command line, with this name, default, help and range. Errors get its
name from `name_of`. Heavy modules are imported only by the checks, so that `kvblocks --help` is fast.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvblocks.arguments import check_one_of, is_number
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies import NAMED
from kvblocks.server.flags import check_ranges, flag, name_of

if TYPE_CHECKING:
    import torch

    from kvblocks.engine.schedule.step import StepLimits
    from kvblocks.engine.tiers.options import TierOptions
    from kvblocks.server.access.callers import Callers, TenantKey
    from kvblocks.server.access.hosts import HostCheck

CPU_CHUNK_TOKENS = 64
"""The default for the most tokens of one prompt that a step computes on a CPU.

On a CPU a step's time is proportional to its tokens. On a GPU it hardly depends on them, and smaller chunks would only
cost time. Long prompts are computed by layers (`LongPrompts`), and running requests get a step whenever that has taken
as long as this many tokens.
"""

LOG_LEVELS = ("debug", "info", "warning", "error")

_CACHE, _TIERS, _WORK, _SERVER, _EVENTS = "KV cache", "Tiers", "Work", "Server", "Events for routers"


def parse_memory(text: str) -> float | str:
    """Return --kv-cache-memory as `Engine` takes it: a share of the free memory (0.5), or a text ("2GiB")."""
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def _read_keys(file: Path) -> "tuple[TenantKey, ...]":
    from kvblocks.server.access.keys_file import read_keys

    return read_keys(file)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The engine's settings. num_blocks, kv_cache_memory: as in `Engine`, at most one of them.

    long_prefill_token_threshold: the most tokens of one prompt in a step; 0: no such limit; None: CPU_CHUNK_TOKENS on a
    CPU, no such limit on other devices. kv_cache_dtype, eviction: as in `Engine`. host_cache, disk_cache, store:
    addresses of tiers, the first two without "host:" and "disk:" (`TierOptions`); their size and files with secrets are
    fields, too. max_num_batched_tokens, max_num_seqs, warm_up: None: it depends on the device. threads: torch's
    threads; None: torch's choice.
    """

    block_size: int = flag("Tokens in a block.", _CACHE, default=16, least=1)
    num_blocks: int | None = flag(
        "Blocks in the pool. Default: as many as fit into 512 MiB; on a GPU, into 0.85 of the free memory.",
        _CACHE,
        least=1,
    )
    kv_cache_memory: float | str | None = flag(
        "Instead of --num-blocks: 2GiB, or 0.5 for half of what is free.", _CACHE, kind=str, read=parse_memory
    )
    num_state_slots: int | None = flag(
        "The most sequences that run at once, in a model with recurrent states. Default: 64, or as many as fit.",
        _CACHE,
        least=1,
    )
    kv_cache_dtype: str = flag(
        "auto, or fp8_e4m3, which keeps K and V in 8 bits, so that more fits into the pool.", _CACHE, default="auto"
    )
    prefix_caching: bool = flag(
        "Turn prefix caching off: compute every prompt in full.",
        _CACHE,
        default=True,
        name="--no-prefix-caching",
        kind=bool,
        read=lambda off: not off,
    )
    num_history_blocks: int = flag(
        "How many evicted blocks are remembered for `kvblocks cache explain`. 0: no explanations.",
        _CACHE,
        default=10_000,
        least=0,
    )
    eviction: str | None = flag(
        f"Which cached block is evicted first: {', '.join(NAMED)}. sessions needs prompt_cache_key in requests."
        " Default: the least recently used. See docs/policies.md.",
        _CACHE,
    )
    remember_next_token: bool = flag(
        "At temperature 0, begin the answer to a repeated prompt without a forward pass.", _CACHE, default=False
    )
    host_cache: str | None = flag("CPU memory for evicted blocks: 2GiB, or 0.5 for half of what is free.", _TIERS)
    disk_cache: str | Path | None = flag("A folder that keeps blocks across restarts.", _TIERS, kind=Path)
    disk_cache_size: str | None = flag("The most that the folder may take. Default: 8GiB.", _TIERS)
    disk_cache_secret_file: Path | None = flag(
        "A file with a secret of at least 16 bytes, so that nobody else can plant blocks in the folder."
        " Or $KVBLOCKS_DISK_CACHE_SECRET.",
        _TIERS,
    )
    store: str | None = flag(
        "A Valkey or Redis through which servers share blocks: valkey://host:6379. See docs/store.md. Set a"
        " URL with a password in the environment, since `ps` shows options to other users. Needs kvblocks\\[valkey].",
        _TIERS,
        envvar="KVBLOCKS_STORE",
        is_secret=True,
    )
    store_secret_file: Path | None = flag(
        "A file with a secret of at least 16 bytes that only the servers of this store have, so that nobody else can"
        " plant blocks there. Or $KVBLOCKS_STORE_SECRET.",
        _TIERS,
    )
    max_num_batched_tokens: int | None = flag(
        "The most tokens in a step. Default: 512 on a CPU, 8192 on a GPU.", _WORK, least=1
    )
    max_num_seqs: int | None = flag("The most sequences in a step. Default: 64 on a CPU, 256 on a GPU.", _WORK, least=1)
    long_prefill_token_threshold: int | None = flag(
        "The most tokens of one prompt in a step, so that other requests don't wait long. 0: no limit. Default: 64 on"
        " a CPU, 0 on a GPU.",
        _WORK,
        name="--long-prefill-tokens",
        least=0,
    )
    max_num_partial_prefills: int = flag(
        "How many long prompts are computed at once, in turns; other long prompts wait.",
        _WORK,
        default=3,
        name="--max-partial-prefills",
        least=1,
    )
    schedule: str = flag("Which waiting request begins first: fcfs, longest-prefix or grouped.", _WORK, default="fcfs")
    session_gate: bool = flag(
        "Admit only as many sessions as fit into the pool; others wait. A request's session is its prompt_cache_key."
        " See docs/gate.md.",
        _WORK,
        default=False,
    )
    deterministic: bool = flag("Compute the same logits, cached or not, to the last bit. Slower.", _WORK, default=False)
    device: str = flag("cpu, cuda, cuda:1 or auto.", _WORK, default="auto")
    attention: str = flag("torch, triton, flash-attn, flashinfer or auto.", _WORK, default="auto")
    warm_up: bool | None = flag(
        "Compile kernels before serving, rather than during the first requests. Default: only on a GPU.",
        _WORK,
        name="--warm-up/--no-warm-up",
        kind=bool,
    )
    dtype: str | None = flag("float32, float16 or bfloat16. Default: float32 on a CPU; on a GPU, the model's.", _WORK)
    threads: int | None = flag("Torch threads. Default: torch's own choice.", _WORK, least=1)

    def __post_init__(self) -> None:
        from kvblocks.engine.attention.names import ATTENTIONS, KV_CACHE_DTYPES
        from kvblocks.engine.run.backends import Backend, choose_device
        from kvblocks.engine.run.memory import read_memory
        from kvblocks.engine.schedules import SCHEDULES

        check_ranges(self)
        name = partial(name_of, self)
        if self.kv_cache_memory is not None:
            read_memory(self.kv_cache_memory, choose_device("cpu"))  # raises if the text can't be parsed
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected {name('num_blocks')} or {name('kv_cache_memory')}, since one decides the other, got both"
                f" ({self.num_blocks} and {self.kv_cache_memory!r})"
            )
        check_one_of(name("kv_cache_dtype"), self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_one_of(name("attention"), self.attention, ATTENTIONS)
        backend = Backend(self.attention, self.deterministic, kv_cache_dtype=self.kv_cache_dtype)
        device = choose_device(self.device)
        backend.check_place(device, self.block_size)
        check_one_of(name("schedule"), self.schedule, SCHEDULES)
        if self.eviction is not None:
            check_one_of(name("eviction"), self.eviction, NAMED)
        if self.schedule != "fcfs" and not self.prefix_caching:
            raise InvalidArgumentError(
                f"expected {name('schedule')} fcfs with {name('prefix_caching')}, since the other orders go by what is"
                f" cached, got {self.schedule}"
            )
        for field, is_on in (("remember_next_token", self.remember_next_token), ("session_gate", self.session_gate)):
            if is_on and not self.prefix_caching:
                raise InvalidArgumentError(
                    f"{name(field)}: expected prefix caching with it, got {name('prefix_caching')}"
                )
        self._check_tiers()
        num_tokens, num_seqs = self._sizes_on(device)
        if num_tokens < num_seqs:
            raise InvalidArgumentError(
                f"{name('max_num_batched_tokens')}: expected at least {name('max_num_seqs')} ({num_seqs}), since every"
                f" running sequence needs room for one token in a step, got {num_tokens}"
            )

    def _check_tiers(self) -> None:
        from kvblocks.engine.tiers.registry import read_tiers
        from kvblocks.tiers.store import parse_address

        name = partial(name_of, self)
        needs = (
            ("disk_cache_size", "disk_cache", "the folder"),
            ("disk_cache_secret_file", "disk_cache", "the folder"),
            ("store_secret_file", "store", "its URL"),
        )
        for field, needed, what in needs:
            if getattr(self, field) is not None and getattr(self, needed) is None:
                raise InvalidArgumentError(f"{name(field)}: expected {name(needed)}, {what}, with it; got none")
        tiers = ("host_cache", "disk_cache", "store")
        got = [field for field in tiers if getattr(self, field) is not None]
        if not self.prefix_caching and got:
            raise InvalidArgumentError(
                f"expected none of {', '.join(map(name, tiers))} with {name('prefix_caching')}, since they hold what is"
                f" cached, got {name(got[0])}"
            )
        if self.store is not None:
            parse_address(self.store)
        read_tiers(self.tiers)

    @property
    def tiers(self) -> "tuple[TierOptions, ...]":
        """The tiers below the engine, the fastest first. Reads their secrets. Raises InvalidArgumentError."""
        from kvblocks.engine.tiers.options import TierOptions

        tiers: list[TierOptions] = []
        if self.host_cache is not None:
            tiers.append(TierOptions(f"host:{self.host_cache}"))
        if self.disk_cache is not None:
            environment = os.environ.get("KVBLOCKS_DISK_CACHE_SECRET")
            secret = read_secret(self.disk_cache_secret_file, environment, name_of(self, "disk_cache_secret_file"))
            tiers.append(TierOptions(f"disk:{self.disk_cache}", self.disk_cache_size, secret))
        if self.store is not None:
            environment = os.environ.get("KVBLOCKS_STORE_SECRET")
            secret = read_secret(self.store_secret_file, environment, name_of(self, "store_secret_file"))
            tiers.append(TierOptions(self.store, secret=secret))
        return tuple(tiers)

    def limits_on(self, device: "torch.device") -> "StepLimits":
        """The limits of a step on a device."""
        from kvblocks.engine.schedule.step import StepLimits

        most = self.long_prefill_token_threshold
        if most is None and device.type == "cpu":
            most = CPU_CHUNK_TOKENS
        return StepLimits(*self._sizes_on(device), most or None, max_num_partial_prefills=self.max_num_partial_prefills)

    def _sizes_on(self, device: "torch.device") -> tuple[int, int]:
        """The most tokens and the most sequences in a step."""
        from kvblocks.engine.schedule.step import StepLimits

        default = StepLimits.default_on(device.type)
        return self.max_num_batched_tokens or default.max_num_batched_tokens, self.max_num_seqs or default.max_num_seqs

    def warms_up_on(self, device: "torch.device") -> bool:
        """Whether kernels are compiled before serving."""
        return device.type == "cuda" if self.warm_up is None else self.warm_up


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The server's settings. port: 0 for any free port.

    max_requests: the most unfinished requests, running and waiting. model_names: the names that the model is served
    under; answers show the first one. If empty, its folder's name. api_key: one key for all clients. keys: a key for
    each tenant, instead of api_key. admin_key: the operator's key, for the endpoints of the cache; without it, and
    without `keys`, every client is an operator. allow_anyone: whether to serve other machines without a key.
    allowed_hosts: names that a request's Host header may have in addition to those of the loopback. If empty, any name
    is allowed, except that a server on the loopback without keys only allows the loopback's names. allowed_origins:
    origins of web pages that may use the server from a browser. log_level: the lowest level to log; "info" logs each
    request. tool_parser: how the model writes tool calls; None: as its template says. record: a file that gets a line
    for each request, for `kvblocks replay`; None: no file.
    """

    host: str = flag("Address to listen on.", _SERVER, default="127.0.0.1")
    port: int = flag("Port to listen on. 0: any free one.", _SERVER, default=8000, least=0, most=65535)
    model_names: tuple[str, ...] = flag(
        "The model's name in the API, instead of its folder's; may be given several times.",
        _SERVER,
        default=(),
        name="--served-model-name",
        kind=list[str],
        read=tuple,
    )
    api_key: str | None = flag(
        "The key that requests need. Better set in the environment, since `ps` shows options to other users.",
        _SERVER,
        envvar="KVBLOCKS_API_KEY",
        is_secret=True,
    )
    keys: "tuple[TenantKey, ...]" = flag(
        "Instead of --api-key: a file with a key for each tenant; see docs/server.md.",
        _SERVER,
        default=(),
        kind=Path,
        read=_read_keys,
    )
    admin_key: str | None = flag(
        "The operator's key. If given, requests about the cache need it.",
        _SERVER,
        envvar="KVBLOCKS_ADMIN_KEY",
        is_secret=True,
    )
    admin_key_file: Path | None = flag("Instead of --admin-key: a file with the key.", _SERVER)
    allowed_hosts: tuple[str, ...] = flag(
        "A host name that requests may use in addition to localhost; may be given several times.",
        _SERVER,
        default=(),
        name="--allowed-host",
        kind=list[str],
        read=tuple,
    )
    allowed_origins: tuple[str, ...] = flag(
        "An origin whose web pages may use this server from a browser (CORS), such as https://app.example; may be given"
        " several times. Default: none.",
        _SERVER,
        default=(),
        name="--allowed-origin",
        kind=list[str],
        read=tuple,
    )
    tool_parser: str | None = flag(
        "The format of the model's tool calls: hermes, llama3, mistral, mistral-args, granite, pythonic or gemma."
        " Default: the one in its chat template.",
        _SERVER,
    )
    metrics_by_tenant: bool = flag("Show tenants' names in /metrics, which needs no key.", _SERVER, default=False)
    allow_anyone: bool = flag("Serve other machines without a key.", _SERVER, default=False)
    max_requests: int = flag(
        "The most unfinished answers, running or waiting; further ones get 429.", _SERVER, default=256, least=1
    )
    max_body_bytes: int = flag("Requests with larger bodies get 413.", _SERVER, default=4 * 2**20, least=1)
    max_connections: int = flag("The most connections; further ones get 503.", _SERVER, default=512, least=1)
    request_timeout_s: float = flag(
        "The most seconds for a request, waiting included.", _SERVER, default=600.0, name="--request-timeout"
    )
    grace_s: float = flag(
        "Seconds that running requests have to finish after SIGTERM.", _SERVER, default=30.0, name="--grace-period"
    )
    log_level: str = flag("debug, info (a line for each request), warning or error.", _SERVER, default="warning")
    record: Path | None = flag(
        "Append a line for each request, without its text, to this file, for `kvblocks replay`.", _SERVER
    )

    def __post_init__(self) -> None:
        from kvblocks.server.access.hosts import is_host, is_loopback
        from kvblocks.server.access.origins import is_origin

        check_ranges(self)
        name = partial(name_of, self)
        check_one_of(name("log_level"), self.log_level, LOG_LEVELS)
        for field in ("request_timeout_s", "grace_s"):
            value = getattr(self, field)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name(field)}: expected seconds, at least 0, got {value!r}")
        if not self.request_timeout_s:
            raise InvalidArgumentError(f"{name('request_timeout_s')}: expected more than 0 seconds, got 0")
        for model_name in self.model_names:
            if not model_name or not model_name.isprintable():
                raise InvalidArgumentError(f"{name('model_names')}: expected a name, got {model_name!r}")
        for host in self.allowed_hosts:
            if not is_host(host):
                raise InvalidArgumentError(
                    f"{name('allowed_hosts')}: expected a name or an address, without port, got {host!r}"
                )
        for origin in self.allowed_origins:
            if not is_origin(origin):
                raise InvalidArgumentError(
                    f"{name('allowed_origins')}: expected one origin in lower case, as browsers send it, such as"
                    f" https://app.example or http://localhost:3000, got {origin!r}"
                )
        if self.tool_parser is not None:
            from kvblocks.server.tools.formats import FORMATS

            check_one_of(name("tool_parser"), self.tool_parser, tuple(FORMATS))
        self._check_keys()
        if not is_loopback(self.host) and not self.has_keys and not self.allow_anyone:
            raise InvalidArgumentError(
                f"expected {name('api_key')} (or $KVBLOCKS_API_KEY) or {name('keys')} with {name('host')} {self.host},"
                f" since other machines can reach it, or {name('allow_anyone')} to let them all in; got none of them"
            )

    def _check_keys(self) -> None:
        from kvblocks.server.access.callers import digest_of
        from kvblocks.server.access.keys_file import is_key

        operator_key, name = self.operator_key, partial(name_of, self)
        for field, key in (("api_key", self.api_key), ("admin_key", operator_key)):
            if key is not None and not is_key(key):
                raise InvalidArgumentError(
                    f"{name(field)}: expected ASCII without spaces, not empty, got something else"
                )
        if self.api_key is not None and self.keys:
            raise InvalidArgumentError(
                f"expected {name('api_key')} or {name('keys')}, which has one for each tenant, got both"
            )
        if operator_key is None:
            return
        admin = digest_of(operator_key)
        others = {tenant.digest for tenant in self.keys} | {digest_of(self.api_key or "")}
        if admin in others:
            raise InvalidArgumentError(f"{name('admin_key')}: expected a key that no client has, got one of theirs")

    @property
    def operator_key(self) -> str | None:
        """The operator's key; None without one. Raises InvalidArgumentError for a file that can't be read."""
        return read_key(self.admin_key_file, self.admin_key, name_of(self, "admin_key_file"))

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or bool(self.keys)

    @property
    def callers(self) -> "Callers":
        """The callers that may send requests, with their rights."""
        from kvblocks.server.access.callers import Caller, Callers, digest_of
        from kvblocks.server.access.hosts import is_loopback

        operator_key = self.operator_key
        has_operator = operator_key is not None
        everybody = Caller(is_operator=not has_operator)
        known = [(tenant.digest, tenant.caller) for tenant in self.keys]
        if self.api_key is not None:
            known.append((digest_of(self.api_key), everybody))
        if operator_key is not None:
            known.append((digest_of(operator_key), Caller(is_operator=True, sees_others=True)))
        if self.has_keys:
            return Callers(known, None)
        return Callers(known, replace(everybody, sees_others=not has_operator and is_loopback(self.host)))

    @property
    def hosts(self) -> "HostCheck | None":
        """The check of Host headers; None if any name is allowed."""
        from kvblocks.server.access.hosts import HostCheck, is_loopback

        if self.allowed_hosts or (is_loopback(self.host) and not self.has_keys):
            return HostCheck((*self.allowed_hosts, self.host))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSettings:
    """Where cache events are published. endpoint: the address for subscribers; None: nowhere. replay: one for replays.

    allow_remote: whether other machines may connect. They need no key, and events contain prompts' tokens.
    """

    endpoint: str | None = flag(
        "Where to publish events of cached blocks, in vLLM's format: tcp://127.0.0.1:5557. Needs kvblocks\\[wire].",
        _EVENTS,
        name="--kv-events",
    )
    replay: str | None = flag(
        "Where subscribers ask for batches that they missed: tcp://127.0.0.1:5558.", _EVENTS, name="--kv-replay"
    )
    topic: str = flag("The topic of each batch, such as kv@NAME@MODEL.", _EVENTS, default="", name="--kv-topic")
    allow_remote: bool = flag(
        "Let other machines subscribe. Whoever connects can read the prompts' tokens.",
        _EVENTS,
        default=False,
        name="--kv-allow-remote",
    )

    def __post_init__(self) -> None:
        for field in ("replay", "topic", "allow_remote"):
            if getattr(self, field) and self.endpoint is None:
                raise InvalidArgumentError(
                    f"{name_of(self, field)}: expected {name_of(self, 'endpoint')}, the endpoint, with it; got none"
                )


NO_EVENTS = EventSettings()


def read_secret(file: Path | None, value: str | None, flag: str) -> bytes | None:
    """Return the secret in a file, without the line's end, or else `value` as bytes; None if there is neither.

    flag: the file's option, for errors. Raises InvalidArgumentError for a file that can't be read.
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
    """Return the key in a file, or else `value`. Raises what `read_secret` does."""
    secret = read_secret(file, value, flag)
    return None if secret is None else secret.decode("utf-8", "replace")
