"""`StoreNames`: the keys of a store. All servers with the same model, configuration and secret make the same keys.

    kvblocks:1:SPACE:TENANT:DIGEST      a block: its record, and its bytes behind it
    kvblocks:1:SPACE:TENANT:DIGEST:w    somebody is about to write it
    kvblocks:1:SPACE:TENANT:q           a tenant's blocks by the time they were stored, if it has a quota

SPACE stands for the format, the fingerprint and the secret: servers that differ in one of them share no key. TENANT
stands for the salt, so that all blocks of a tenant can be found. Keys decide nothing: a block's record says what it is.
"""

import hashlib

from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer

_PREFIX = "kvblocks:1"
_NUM_NAME_CHARS = 32


class StoreNames:
    """The names of one sealer's blocks. salt: None stands for blocks without one."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._space = f"{_PREFIX}:{self._digest(BlockIdentity(b'', b'', b''))}"

    def _digest(self, identity: BlockIdentity) -> str:
        """Return a digest that nobody can make without the secret, if there is one."""
        return hashlib.sha256(self._sealer.seal(identity, b"")).hexdigest()[:_NUM_NAME_CHARS]

    def tenant(self, salt: str | None) -> str:
        """Return what all names of a salt begin with. O(its length)."""
        keys = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        return f"{self._space}:{self._digest(BlockIdentity(b'', keys, b''))}"

    def block(self, tenant: str, digest: bytes) -> str:
        """Return the key of a block. tenant: as `tenant` returned it. O(1)."""
        return f"{tenant}:{digest.hex()}"

    def claim(self, block: str) -> str:
        """Return the key that says that somebody writes this block. O(1)."""
        return f"{block}:w"

    def index(self, tenant: str) -> str:
        """Return the key of a tenant's blocks by age. O(1)."""
        return f"{tenant}:q"

    def pattern(self, tenant: str | None) -> str:
        """Return the glob pattern of all keys of a tenant; None: of all tenants. O(1)."""
        return f"{self._space if tenant is None else tenant}:*"
