"""Who asks: by which key, with which rights, and under which salt their prompts are cached.

Invariants. A tenant's salts begin with TENANT_SALTS and its name, and go on with a slash where it may choose them; a
name has no slash. Nobody else can name a salt that begins so, but who holds the operator's key. So no client can reach
what a tenant has cached, not even what a server with other keys left on a disk.

A key is found by comparing digests, all of them, in constant time: an answer's time says nothing about keys.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvblocks.engine.server.errors import ApiError
from kvblocks.errors import InvalidArgumentError
from kvblocks.manager import KVCacheManager

TENANT_SALTS = "kvblocks/tenant/"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. tenant: its name, None: one without. may_choose_salt: whether requests may have a cache_salt.

    max_requests: unfinished answers of its own, None: as many as the server has. is_operator: may do what is for
    operators. sees_others: is told what others have cached, where that explains a miss, and may name tenants' salts.
    """

    tenant: str | None = None
    may_choose_salt: bool = True
    max_requests: int | None = None
    is_operator: bool = False
    sees_others: bool = False

    def salt_for(self, chosen: str | None) -> str | None:
        """Return the salt of a prompt whose cache_salt is `chosen`, None: it has none. Raises ApiError."""
        if self.tenant is None:
            if chosen is not None and chosen.startswith(TENANT_SALTS) and not self.sees_others:
                raise ApiError(
                    400,
                    f"cache_salt: expected a text that doesn't begin with {TENANT_SALTS!r}, got one that does",
                    param="cache_salt",
                )
            return chosen
        if chosen is None:
            return TENANT_SALTS + self.tenant
        if not self.may_choose_salt:
            message = "cache_salt: expected none, since this key has a salt of its own, got one"
            raise ApiError(400, message, param="cache_salt")
        return f"{TENANT_SALTS}{self.tenant}/{chosen}"


ANYONE = Caller()
"""Who has no rights but to ask."""


@dataclass(frozen=True, slots=True)
class Slots:
    """So many unfinished answers of a caller."""

    caller: Caller
    number: int


@dataclass(frozen=True, slots=True)
class Tenant:
    """An entry of a file of keys. digest: of its key. max_cached_blocks, tier_blocks: quotas, of the pool and tiers."""

    caller: Caller
    digest: bytes = field(repr=False)
    max_cached_blocks: int | None = None
    tier_blocks: Mapping[str, int] = field(default_factory=dict)


class Callers:
    """All who may ask. anyone: who asks without a key, or with one that isn't known; None: nobody may."""

    def __init__(self, by_digest: Iterable[tuple[bytes, Caller]], anyone: Caller | None) -> None:
        self._by_digest = tuple(by_digest)
        self._anyone = anyone

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Return who sent these headers. Raises ApiError, 401. O(keys), the same for all of them."""
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        found = self._anyone
        for expected, caller in self._by_digest:
            if hmac.compare_digest(digest, expected) & (scheme.lower() == b"bearer"):
                found = caller
        if found is None:
            got = "another one" if len(values) == 1 else "several" if values else "none"
            message = f"expected 'Authorization: Bearer KEY' with a key of this server, got {got}"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def digest_of(key: str) -> bytes:
    """Return what keys are compared by."""
    return hashlib.sha256(key.encode("ascii")).digest()


def set_quotas(manager: KVCacheManager, tenants: Iterable[Tenant]) -> None:
    """Give tenants their quotas. Raises InvalidArgumentError for one of a tier that the manager doesn't have."""
    tiers = [tier.name for tier in manager.tiers]
    for tenant in tenants:
        salt = tenant.caller.salt_for(None)
        if tenant.max_cached_blocks is not None:
            manager.set_quota(salt, tenant.max_cached_blocks)
        for tier, max_blocks in tenant.tier_blocks.items():
            if tier not in tiers:
                raise InvalidArgumentError(
                    f"--keys: tier_quotas of {tenant.caller.tenant!r}: expected tiers that the server has"
                    f" ({', '.join(tiers) or 'none'}), got {tier}"
                )
            manager.tiers.set_quota(tier, salt, max_blocks)
