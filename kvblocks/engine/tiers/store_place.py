"""`StorePlace`: a store that servers share. No records are kept here, since the store keeps its own."""

import numpy as np

from kvblocks import Tier
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.place import Move, Place, Site
from kvblocks.engine.tiers.places import LONG_PREFIX_TOKENS
from kvblocks.tiers.store import Owner, Sealer, SharedStore, StoreStats, open_clients, parse_address

KNOWN_SHARE, LEAST_KNOWN = 4, 4096
"""How many blocks of a shared store are known at a time: KNOWN_SHARE times the pool's blocks, at least LEAST_KNOWN."""


class StorePlace(Place):
    """A `SharedStore`, such as a Valkey server. A load and a store may run at the same time, on separate threads.

    Schemes and addresses are those of `parse_address`. used_bytes: for each column of a block's identity, how many of
    its leading bytes its group uses. Only these are sent.
    """

    def __init__(self, tier: Tier, store: SharedStore, used_bytes: tuple[int, ...]) -> None:
        self.tier = tier
        self.shared: SharedStore = store
        self._used_bytes = used_bytes

    @classmethod
    def check(cls, options: TierOptions) -> None:
        """As `Place`."""
        options.expect_no_size()
        parse_address(options.url)

    @classmethod
    def open(cls, options: TierOptions, site: Site) -> "StorePlace":
        """As `Place`. It doesn't connect yet."""
        address = parse_address(options.url)
        store = SharedStore(address, Sealer(site.fingerprint(), options.secret), open_clients(address))
        tier = Tier(
            "store",
            max(LEAST_KNOWN, KNOWN_SHARE * site.num_blocks),
            site.num_block_bytes,
            store="reused",
            min_store_tokens=LONG_PREFIX_TOKENS,
            is_shared=True,
        )
        return cls(tier, store, site.used_bytes)

    def store(self, move: Move) -> bool:
        """As `Place`. Blocks that another server has stored, or is storing, count as stored."""
        rows = move.fetch()
        used = [row[: self._used_bytes[one.column]].data for row, one in zip(rows, move.identities, strict=True)]
        owner = Owner(move.salt, move.max_blocks)
        return self.shared.write(owner, move.identities, used, move.first, move.before)

    def load(self, move: Move) -> bool:
        """As `Place`. A block is written only with bytes that passed all checks."""
        sizes = [self._used_bytes[one.column] for one in move.identities]
        payloads = self.shared.read(move.salt, move.identities, sum(sizes))
        for row, payload, size in zip(move.rows(), payloads, sizes, strict=True):
            if payload is None or len(payload) != size:
                return False
            row[:size] = np.frombuffer(payload, np.uint8)
        move.deliver()
        return True

    def stats(self) -> StoreStats:
        """As `Place`."""
        return self.shared.stats

    def describe(self, num_cached_blocks: int) -> str:
        """As `Place`."""
        del num_cached_blocks
        return f"{self.tier.name}: {self.shared.address}, asked for each prompt that isn't cached here"

    def forget(self, salt: str | None, slots: list[int], timeout_s: float) -> None:  # noqa: ARG002  # as `Place`
        """As `Place`. Everything of the salt in the store is deleted, whichever server stored it."""
        self.shared.forget(salt, timeout_s)

    def close(self) -> None:
        """As `Place`."""
        self.shared.close()
