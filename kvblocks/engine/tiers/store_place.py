"""`StorePlace`: a store that servers share. It keeps no records here, since the store keeps its own."""

from collections.abc import Mapping

import numpy as np

from kvblocks.engine.tiers.block_bytes import BlockBytes, Row
from kvblocks.engine.tiers.carrier import Move
from kvblocks.tiers.disk import DiskStats
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.store import SharedStore, StoreStats
from kvblocks.tiers.store.store import Owner


class StorePlace:
    """A `SharedStore`. Loads and stores may run at the same time, each on a thread of its own.

    used_bytes: by column of a block's identity, how many of its first bytes its group uses. Only these are sent.
    """

    def __init__(
        self, block_bytes: BlockBytes, store: SharedStore, max_transfer_blocks: int, used_bytes: tuple[int, ...]
    ) -> None:
        self._block_bytes = block_bytes
        self._store = store
        self._used_bytes = used_bytes
        self._loading, self._storing = (
            None if block_bytes.is_on_host else block_bytes.new_rows(max_transfer_blocks) for _ in range(2)
        )

    def store(self, move: Move) -> bool:
        """As `Place`. Blocks that another server stored, or is storing, count as stored."""
        rows = self._rows(move.block_ids, self._storing)
        if self._storing is not None:
            self._block_bytes.read(move.block_ids, rows, move.after)
        used = [row[: self._used_bytes[one.column]].data for row, one in zip(rows, move.identities, strict=True)]
        owner = Owner(move.salt, move.max_blocks)
        return self._store.write(owner, move.identities, used, move.first, move.before)

    def load(self, move: Move) -> bool:
        """As `Place`. A block is written only with bytes that passed all checks."""
        sizes = [self._used_bytes[one.column] for one in move.identities]
        payloads = self._store.read(move.salt, move.identities, sum(sizes))
        rows = self._rows(move.block_ids, self._loading)
        for row, payload, size in zip(rows, payloads, sizes, strict=True):
            if payload is None or len(payload) != size:
                return False
            row[:size] = np.frombuffer(payload, np.uint8)
        if self._loading is not None:
            self._block_bytes.write(move.block_ids, rows, move.after)
        return True

    def _rows(self, block_ids: list[int], staging: Row | None) -> list[Row]:
        """Rows of host memory for blocks. On a CPU they are the blocks themselves."""
        return self._block_bytes.rows_of(block_ids) if staging is None else [*staging[: len(block_ids)]]

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Nothing: what the store has is asked for."""

    def settle(self) -> None:
        """Nothing is promised to be durable."""

    def erase(self, slots: list[int]) -> None:
        """Nothing: slots are this engine's, bytes are deleted by salt."""

    def close(self) -> None:
        """The store is closed by who opened it."""

    @property
    def disk_stats(self) -> DiskStats | None:
        """None."""
        return None

    @property
    def store_stats(self) -> StoreStats | None:
        """As `Place`."""
        return self._store.stats
