"""`StoreNames`: the keys of a store. All servers with the same model, configuration and secret make the same keys.

    kvblocks:1:SPACE:TENANT:DIGEST        a block: its record, and its bytes after it
    kvblocks:1:w:{that key}               somebody is about to write it
    kvblocks:1:SPACE:TENANT:q             a tenant's blocks by the time they were used, if it has a quota
    kvblocks:1:f:SPACE.TENANT, ...:SPACE  a tombstone: when the tenant, or everything, was last deleted

SPACE stands for the format, the fingerprint and the secret: servers that differ in one of them share no key. TENANT
stands for the salt, so that all blocks of a tenant can be found. Keys decide nothing: a block's record says what it is.
In a cluster the braces put both keys of a block on one node, since one script takes them.
"""

import hashlib

from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer

_PREFIX = "kvblocks:1"
_NUM_NAME_CHARS = 32


class StoreNames:
    """The names of one sealer's blocks. In all calls, salt None stands for blocks without one."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._space = self._digest(BlockIdentity(b"", b"", b""))

    def _digest(self, identity: BlockIdentity) -> str:
        """Return a digest that, if there is a secret, nobody can make without it."""
        return hashlib.sha256(self._sealer.seal(identity, b"")).hexdigest()[:_NUM_NAME_CHARS]

    def tenant(self, salt: str | None) -> str:
        """Return what all keys of a salt's blocks begin with. O(its length)."""
        keys = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        return f"{_PREFIX}:{self._space}:{self._digest(BlockIdentity(b'', keys, b''))}"

    def block(self, tenant: str, digest: bytes) -> str:
        """Return the key of a block. tenant: as `tenant` returned it. O(1)."""
        return f"{tenant}:{digest.hex()}"

    def digest(self, tenant: str, key: bytes) -> bytes | None:
        """Return the digest in a block's key; None for a key that is not a block of this tenant. O(1)."""
        front, _, name = key.rpartition(b":")
        if front != tenant.encode() or len(name) == 1:
            return None
        try:
            return bytes.fromhex(name.decode("ascii"))
        except ValueError:  # no StoreNames made this key
            return None

    def claim(self, block: str) -> str:
        """Return the key that says that somebody is writing this block. O(1)."""
        return f"{_PREFIX}:w:{{{block}}}"

    def index(self, tenant: str) -> str:
        """Return the key of a tenant's blocks by age. O(1)."""
        return f"{tenant}:q"

    def tombstone(self, tenant: str | None) -> str:
        """Return the key that says when a tenant was deleted; None: when everything was. O(1)."""
        return f"{_PREFIX}:f:{self._space}" + ("" if tenant is None else f".{tenant.rpartition(':')[2]}")

    def patterns(self, tenant: str | None) -> tuple[str, str]:
        """Return the glob patterns of a tenant's claims, and of its other keys except tombstones; None: of all tenants.

        To delete a tenant, delete claims first, so that no more writes come, and then what was written. O(1).
        """
        begin = f"{_PREFIX}:{self._space}:" if tenant is None else f"{tenant}:"
        return f"{_PREFIX}:w:{{{begin}*", f"{begin}*"
