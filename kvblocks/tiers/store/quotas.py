"""`StoreQuotas`: what a tenant may have in the whole store, whichever server stored it.

An index in the store orders a tenant's blocks by their last use. A block enters it before it is written, and leaves it
after it was deleted. The index thus has at least what the store has, whoever is killed in between. The store's clock
says when a block was used, since servers' clocks differ. If the store evicted an index, which it may do with any key,
the index is made again from the names of the tenant's blocks. Its last entry, "", says that it is complete.
"""

from collections.abc import Sequence
from typing import Any

from kvblocks.tiers.store.address import StoreAddress
from kvblocks.tiers.store.client import Client, StoreError
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.scripts import DROP, NOTE_USES

SCAN_S = 30.0
"""How many seconds making an index again may take."""

WRITE_S = 60
"""How many seconds a block's entry, which is made before the block is written, lives longer than the block."""

_MOST_TOGETHER = 1000


class StoreQuotas:
    """The quotas of a store's tenants. client: the one for stores."""

    def __init__(self, address: StoreAddress, names: StoreNames, client: Client) -> None:
        self._address = address
        self._names = names
        self._client = client

    def note_used(self, tenant: str, digests: Sequence[bytes]) -> None:
        """Count as used those blocks of a tenant that its index has. Raises StoreError. O(digests)."""
        self._run([("EVAL", NOTE_USES, 1, self._names.index(tenant), "", "", 0, len(digests), *digests)])

    def admit(
        self, tenant: str, max_blocks: int, digests: Sequence[bytes], first: int = 0, before: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        """Enter blocks that are about to be written, and delete the least recently used ones beyond the quota.

        first: the position of the first of them in its prefix. before: the digests of the blocks before it, which count
        as used now. Returns the digests that were deleted, perhaps some of those that were given: don't write these.
        Returns None if the index disappears as often as it is made, as during a deletion: in that case, write nothing.
        Raises StoreError. O(digests); O(keys of the store) if there is no index.
        """
        index = self._names.index(tenant)
        life = "" if self._address.ttl_s is None else self._address.ttl_s + WRITE_S
        note = ("EVAL", NOTE_USES, 1, index, max_blocks, life, first, len(before), *before, *digests)
        beyond = self._run([note])
        if beyond is None:
            self._make_index(tenant, index)
            beyond = self._run([note])
        if beyond is None:
            return None
        if not isinstance(beyond, list) or len(beyond) % 2:
            raise StoreError(f"{self._address}: expected blocks beyond a quota, got a damaged answer")
        gone: list[bytes] = beyond[::2]
        if gone:
            self._unlink([self._names.block(tenant, digest) for digest in gone])
            self._run([("EVAL", DROP, 1, index, *beyond)])
        return gone

    def take_back(self, tenant: str, digests: Sequence[bytes]) -> None:
        """Take blocks that were entered, but not written, out of the index. Raises StoreError. O(digests)."""
        self._run([("ZREM", self._names.index(tenant), *digests)])

    def _unlink(self, keys: list[str]) -> None:
        try:
            self._client.run([("UNLINK", key) for key in keys], self._address.timeout_s)
        except StoreError:
            if not self._address.is_cluster:
                raise  # in a cluster, a node that is gone has lost its blocks, and mustn't hold up the others

    def _make_index(self, tenant: str, index: str) -> None:
        """Make a tenant's index from the blocks that it has. They count as used long ago."""
        keys = self._client.keys_matching(f"{tenant}:*", SCAN_S)
        digests = [digest for key in keys if (digest := self._names.digest(tenant, key)) is not None]
        for start in range(0, len(digests), _MOST_TOGETHER):
            entries = [part for digest in digests[start : start + _MOST_TOGETHER] for part in (0, digest)]
            self._run([("ZADD", index, "NX", *entries)])
        self._run([("ZADD", index, "+inf", b"")])

    def _run(self, commands: list[tuple[Any, ...]]) -> Any:
        """Return the answer to a command. Raises StoreError, also for a refusal."""
        (answer,) = self._client.run(commands, self._address.timeout_s)
        if isinstance(answer, StoreError):
            raise answer
        return answer
