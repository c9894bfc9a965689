"""Callers: their keys, their rights, and the salts that their prompts are cached under.

Invariants. A tenant's salts begin with TENANT_SALTS and its name. If it may choose salts, a slash and the chosen salt
follow; names contain no slash. Only the holder of the operator's key can name such a salt of another tenant. So no
other client can reach what a tenant has cached, not even blocks that a server with other keys left on a disk.

A key is compared with all known keys by digests, in constant time, so the time that an answer takes says nothing about
keys.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvblocks import KVCacheManager
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.errors import ApiError

TENANT_SALTS = "kvblocks/tenant/"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. tenant: the tenant's name, or None. may_choose_salt: whether requests may have a cache_salt.

    max_requests: the most unfinished answers of its own; None: the server's limit. is_operator: whether it may use the
    operators' endpoints. sees_others: whether it may name tenants' salts, and is told what others have cached if that
    explains a miss.
    """

    tenant: str | None = None
    may_choose_salt: bool = True
    max_requests: int | None = None
    is_operator: bool = False
    sees_others: bool = False

    def salt_for(self, chosen: str | None) -> str | None:
        """Return the salt, or None, of a prompt whose cache_salt is `chosen`.

        Raises ApiError if it may not choose that.
        """
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
"""A caller that may only send requests."""


@dataclass(frozen=True, slots=True)
class AnswerSlots:
    """A reservation of room for `number` unfinished answers of a caller."""

    caller: Caller
    number: int


@dataclass(frozen=True, slots=True)
class TenantKey:
    """An entry of a keys file. digest: the digest of its key.

    max_cached_blocks, tier_blocks: quotas in the pool and in tiers.
    """

    caller: Caller
    digest: bytes = field(repr=False)
    max_cached_blocks: int | None = None
    tier_blocks: Mapping[str, int] = field(default_factory=dict)


class Callers:
    """All callers. anyone: the caller of requests without a known key; None if such requests are refused."""

    def __init__(self, by_digest: Iterable[tuple[bytes, Caller]], anyone: Caller | None) -> None:
        self._by_digest = tuple(by_digest)
        self._anyone = anyone

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Return the caller that sent these headers. Raises ApiError 401. O(keys), in the same time for each key."""
        values = [value for name, value in headers if name == b"authorization"]
        if not values:  # as Anthropic's clients send it
            values = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
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
    """Return the digest that a key is compared by."""
    return hashlib.sha256(key.encode("ascii")).digest()


def set_quotas(manager: KVCacheManager, tenants: Iterable[TenantKey]) -> None:
    """Set the tenants' quotas. Raises InvalidArgumentError for a quota of a tier that the manager doesn't have."""
    tiers = [tier.name for tier in manager.tiers]
    for tenant in tenants:
        salt = tenant.caller.salt_for(None)
        if tenant.max_cached_blocks is not None:
            manager.quotas.set(salt, tenant.max_cached_blocks)
        for tier, max_blocks in tenant.tier_blocks.items():
            if tier not in tiers:
                raise InvalidArgumentError(
                    f"--keys: tier_quotas of {tenant.caller.tenant!r}: expected tiers that the server has"
                    f" ({', '.join(tiers) or 'none'}), got {tier}"
                )
            manager.tiers.set_quota(tier, salt, max_blocks)
