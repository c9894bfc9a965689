"""`TierOptions`: a user's options for the tiers below an engine, checked before anything large is made."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvblocks.arguments import is_a
from kvblocks.engine.run.memory import read_memory
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.sealing import LEAST_SECRET_BYTES
from kvblocks.tiers.store import parse_address

DEFAULT_DISK_CACHE_SIZE = "8GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """host_cache: memory for blocks, as `Engine`'s kv_cache_memory; None: no tier.

    disk_cache: a folder for blocks, made if it doesn't exist; None: no tier. disk_cache_size: bytes that the folder may
    take in all, or a text such as "8GiB"; None: DEFAULT_DISK_CACHE_SIZE. disk_cache_secret: the key of the checksums,
    at least 16 bytes. Nobody who lacks the key can plant KV in the folder. store: the URL of a Valkey or Redis that
    servers share (`kvblocks.tiers.store.parse_address`); None: no tier. store_secret: as disk_cache_secret. Raises
    InvalidArgumentError.
    """

    host_cache: float | str | None = None
    disk_cache: str | Path | None = None
    disk_cache_size: int | str | None = None
    disk_cache_secret: bytes | None = field(default=None, repr=False)
    store: str | None = field(default=None, repr=False)  # the URL may contain a password
    store_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.host_cache is not None:
            read_memory(self.host_cache, torch.device("cpu"), "host_cache")
        self._check_store()
        if self.disk_cache is None:
            for name in ("disk_cache_size", "disk_cache_secret"):
                if getattr(self, name) is not None:
                    raise InvalidArgumentError(f"{name}: expected disk_cache, the folder, with it; got none")
            return
        if not isinstance(self.disk_cache, str | Path) or not str(self.disk_cache):
            raise InvalidArgumentError(f"disk_cache: expected a folder, got {self.disk_cache!r}")
        if is_a(self.disk_cache_size, float):
            raise InvalidArgumentError(
                f"disk_cache_size: expected bytes (an int, or a text such as '8GiB'), got {self.disk_cache_size!r}"
            )
        read_memory(self.disk_bytes, torch.device("cpu"), "disk_cache_size")
        _check_secret("disk_cache_secret", self.disk_cache_secret)

    def _check_store(self) -> None:
        if self.store is not None:
            parse_address(self.store)
        elif self.store_secret is not None:
            raise InvalidArgumentError("store_secret: expected store, its URL, with it; got none")
        _check_secret("store_secret", self.store_secret)

    @property
    def is_empty(self) -> bool:
        """Whether there are no tiers."""
        return self.host_cache is None and self.disk_cache is None and self.store is None

    @property
    def disk_bytes(self) -> int | str:
        """The size of the folder, as it was given."""
        return DEFAULT_DISK_CACHE_SIZE if self.disk_cache_size is None else self.disk_cache_size


def _check_secret(name: str, secret: bytes | None) -> None:
    if secret is not None and (not isinstance(secret, bytes) or len(secret) < LEAST_SECRET_BYTES):
        got = len(secret) if isinstance(secret, bytes) else type(secret).__name__
        raise InvalidArgumentError(f"{name}: expected at least {LEAST_SECRET_BYTES} bytes, got {got}")
