"""`TierOptions`: a tier below an engine, as its user asks for it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kvblocks.arguments import is_a, wrong
from kvblocks.engine.run.memory import read_memory
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.store import LEAST_SECRET_BYTES


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Where a tier is, how large, and the key of its checksums. Raises InvalidArgumentError.

    url: a scheme and an address: "host:2GiB" (memory for blocks: bytes, a text, or a share of what is free, such as
    "0.5"), "disk:FOLDER" (made if it doesn't exist), "valkey://HOST:6379" (`kvblocks.tiers.store.parse_address`), or a
    scheme of your own (`register_place`). size: the most that the tier may take, as bytes or a text such as "8GiB", if
    the address doesn't say it; None: the place's default. secret: at least 16 bytes. Nobody who lacks it can plant KV.
    """

    url: str = field(repr=False)  # it may contain a password
    size: int | str | None = None
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not is_a(self.url, str) or ":" not in self.url:
            got = "another text" if is_a(self.url, str) else type(self.url).__name__
            raise InvalidArgumentError(f"tiers: expected 'SCHEME:ADDRESS', such as 'host:2GiB', got {got}")
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < LEAST_SECRET_BYTES):
            got = str(len(self.secret)) if isinstance(self.secret, bytes) else type(self.secret).__name__
            raise InvalidArgumentError(
                f"tiers: {self.scheme}: secret: expected at least {LEAST_SECRET_BYTES} bytes, got {got}"
            )

    @property
    def scheme(self) -> str:
        """The part of the URL before the first colon. O(1)."""
        return self.url.partition(":")[0]

    @property
    def address(self) -> str:
        """The part of the URL after the first colon. O(1)."""
        return self.url.partition(":")[2]

    def wrong(self, expected: str, got: Any) -> InvalidArgumentError:
        """Return the error for a wrong option of this tier. O(1)."""
        return wrong(f"tiers: {self.scheme}", expected, got)

    def size_in_bytes(self, default: str) -> int:
        """Return `size`, or else `default`, in bytes. A share isn't allowed. Raises InvalidArgumentError. O(1)."""
        if is_a(self.size, float):
            raise wrong(f"tiers: {self.scheme}: size", "bytes (an int, or a text such as '8GiB')", self.size)
        size = default if self.size is None else self.size
        return read_memory(size, torch.device("cpu"), f"tiers: {self.scheme}: size")

    def expect_no_size(self) -> None:
        """Raise InvalidArgumentError if `size` is given. O(1)."""
        if self.size is not None:
            raise self.wrong("no size", self.size)

    def expect_no_secret(self) -> None:
        """Raise InvalidArgumentError if `secret` is given. O(1)."""
        if self.secret is not None:
            raise InvalidArgumentError(f"tiers: {self.scheme}: expected no secret, got one")
