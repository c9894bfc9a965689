"""The file of `--keys`: several keys, each with its tenant, in TOML.

    [[key]]
    tenant = "tern-home"
    key = "at least 16 characters"
    max_requests = 8            # the most unfinished answers; if absent, as many as the server's
    quota = 2000                # blocks that it may keep cached while others want the space
    tier_quotas = { disk = 9000 }

    [[key]]
    tenant = "lab"
    key = "another one"
    chooses_salt = true         # its requests may have a cache_salt

Errors name the file and the entry, but never show a value that could be a key.
"""

import logging
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from kvblocks.arguments import as_int
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.access.callers import Caller, TenantKey, digest_of

logger = logging.getLogger("kvblocks.server")

LEAST_KEY_CHARS = 16

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TIERS = ("host", "disk", "store")
_FIELDS = ("tenant", "key", "chooses_salt", "max_requests", "quota", "tier_quotas")


def read_keys(path: Path) -> tuple[TenantKey, ...]:
    """Return the entries of a file. Raises InvalidArgumentError. Warns if users other than its owner can read it."""
    try:
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise InvalidArgumentError(
            f"--keys: expected a file that can be read, got {str(path)!r}: {error.strerror}"
        ) from error
    if os.name == "posix" and mode & 0o077:
        logger.warning("--keys: expected a file that only its owner can read, got %s with mode %o", path, mode)
    return parse_keys(content, str(path))


def parse_keys(content: bytes, name: str) -> tuple[TenantKey, ...]:
    """Return the entries of a file's content. name: the file's name in errors. Raises InvalidArgumentError."""
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except ValueError as error:  # invalid UTF-8 as well; the error shows at most one character of the file
        where = re.search(r"at line \d+", str(error))
        raise InvalidArgumentError(f"{name}: expected TOML, got an error{f' {where[0]}' if where else ''}") from None
    entries = values.pop("key", None)
    if values or not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError(f"{name}: expected one or more tables [[key]], and nothing else, got something else")
    tenants: list[TenantKey] = []
    for number, entry in enumerate(entries, 1):
        tenant = _parse_entry(entry, f"{name}: key {number}")
        for earlier, other in enumerate(tenants, 1):
            if other.digest == tenant.digest:
                raise InvalidArgumentError(f"{name}: key {number}: expected another key than key {earlier}'s, got it")
            if other.caller.tenant == tenant.caller.tenant:
                raise InvalidArgumentError(
                    f"{name}: key {number}: expected another tenant than key {earlier}'s, got {tenant.caller.tenant!r}"
                )
        tenants.append(tenant)
    return tuple(tenants)


def _parse_entry(entry: dict[str, Any], name: str) -> TenantKey:
    if not entry.keys() <= set(_FIELDS):
        raise InvalidArgumentError(f"{name}: expected no fields but {', '.join(_FIELDS)}, got another one")
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidArgumentError(
            f"{name}: tenant: expected up to 64 letters, digits, dots, dashes and underscores, got something else"
        )
    name = f"{name} ({tenant})"
    key = entry.get("key")
    if not isinstance(key, str) or len(key) < LEAST_KEY_CHARS or not is_key(key):
        got = f"{len(key)} characters" if isinstance(key, str) else "none"
        raise InvalidArgumentError(
            f"{name}: key: expected at least {LEAST_KEY_CHARS} characters of ASCII without spaces, got {got}"
        )
    chooses = entry.get("chooses_salt", False)
    if not isinstance(chooses, bool):
        raise InvalidArgumentError(f"{name}: chooses_salt: expected true or false, got something else")
    tiers = entry.get("tier_quotas", {})
    if not isinstance(tiers, dict) or not tiers.keys() <= set(_TIERS):
        raise InvalidArgumentError(f"{name}: tier_quotas: expected a table with {', '.join(_TIERS)}, got another one")
    quota = _count(entry, "quota", 0, name)
    tier_blocks = {tier: _count(tiers, tier, 0, name) or 0 for tier in tiers}
    if chooses and (quota is not None or tier_blocks):
        raise InvalidArgumentError(
            f"{name}: expected no quota with chooses_salt, since a quota is of one salt, got both"
        )
    caller = Caller(tenant, may_choose_salt=chooses, max_requests=_count(entry, "max_requests", 1, name))
    return TenantKey(caller, digest_of(key), quota, tier_blocks)


def _count(values: dict[str, Any], field: str, low: int, name: str) -> int | None:
    """A field that is an integer of at least `low`; None if it is absent. Raises InvalidArgumentError."""
    if field not in values:
        return None
    number = as_int(values[field])
    if number is None or not low <= number < 2**63:
        raise InvalidArgumentError(f"{name}: {field}: expected an integer of at least {low}, got something else")
    return number


def is_key(text: str) -> bool:
    """Whether a header can carry this key: ASCII without spaces, not empty."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
