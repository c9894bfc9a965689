"""What `kvblocks serve` is told, checked together before a model is loaded: a wrong combination says why."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvblocks.arguments import check_count, is_number
from kvblocks.engine.run.memory import read_memory
from kvblocks.engine.schedule.schedules import SCHEDULES
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The engine's part. num_blocks, kv_cache_memory: at most one of them, as `Engine` takes them.

    host_cache, disk_cache, disk_cache_size, disk_cache_secret: as `Engine` takes them.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: float | str | None = None
    prefix_caching: bool = True
    num_history_blocks: int = 10_000
    schedule: str = "fcfs"
    deterministic: bool = False
    device: str = "auto"
    attention: str = "auto"
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    host_cache: float | str | None = None
    disk_cache: str | Path | None = None
    disk_cache_size: str | None = None
    disk_cache_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("--block-size", self.block_size, 1)
        check_count("--num-history-blocks", self.num_history_blocks, 0)
        if self.num_blocks is not None:
            check_count("--num-blocks", self.num_blocks, 1)
        if self.kv_cache_memory is not None:
            read_memory(self.kv_cache_memory, torch.device("cpu"))  # whether it can be read, before a model is loaded
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected --num-blocks or --kv-cache-memory, since one decides the other, got both ({self.num_blocks}"
                f" and {self.kv_cache_memory!r})"
            )
        if self.schedule not in SCHEDULES:
            raise InvalidArgumentError(f"--schedule: expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.schedule != "fcfs" and not self.prefix_caching:
            raise InvalidArgumentError(
                f"expected --schedule fcfs with --no-prefix-caching, since the other orders go by what is cached, got"
                f" {self.schedule}"
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
        if not self.prefix_caching and (self.host_cache, self.disk_cache) != (None, None):
            got = "--disk-cache" if self.host_cache is None else "--host-cache"
            raise InvalidArgumentError(
                f"expected neither --host-cache nor --disk-cache with --no-prefix-caching, since they hold what is"
                f" cached, got {got}"
            )
        TierOptions(
            host_cache=self.host_cache,
            disk_cache=self.disk_cache,
            disk_cache_size=self.disk_cache_size,
            disk_cache_secret=self.disk_cache_secret,
        )

    @property
    def limits(self) -> StepLimits:
        """The limits of a step."""
        return StepLimits(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The server's part. port 0: any free one. max_requests: unfinished ones, running and waiting.

    allow_anyone: serve other machines though no key keeps them out.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allow_anyone: bool = False
    max_requests: int = 256
    max_body_bytes: int = 4 * 2**20
    max_connections: int = 512
    request_timeout_s: float = 600.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        check_count("--port", self.port, 0, 65535)
        check_count("--max-requests", self.max_requests, 1)
        check_count("--max-body-bytes", self.max_body_bytes, 1)
        check_count("--max-connections", self.max_connections, 1)
        for name, value in (("--request-timeout", self.request_timeout_s), ("--grace-period", self.grace_s)):
            if not is_number(value) or not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name}: expected seconds, at least 0, got {value!r}")
        if not self.request_timeout_s:
            raise InvalidArgumentError("--request-timeout: expected more than 0 seconds, got 0")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise InvalidArgumentError("--api-key: expected ASCII without spaces, not empty, got something else")
        if not is_loopback(self.host) and key is None and not self.allow_anyone:
            raise InvalidArgumentError(
                f"expected --api-key (or $KVBLOCKS_API_KEY) with --host {self.host}, since other machines can reach it,"
                " or --allow-anyone to let them all in; got neither"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost may be any."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_memory(text: str) -> float | str:
    """Return what --kv-cache-memory says as `Engine` takes it: 0.5 is a share of what is free, "2GiB" a text."""
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def read_secret(file: Path | None, value: str | None) -> bytes | None:
    """Return the secret that stands in a file, without the line's end, or else in the environment; None: in neither.

    Raises InvalidArgumentError for a file that can't be read.
    """
    if file is None:
        return value.encode("utf-8", "surrogateescape") if value else None
    try:
        return file.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise InvalidArgumentError(
            f"--disk-cache-secret-file: expected a file that can be read, got {str(file)!r}: {error.strerror}"
        ) from error
