"""Where tiers' bytes are: `HostPlace`, an arena in host memory, and `DiskPlace`, a folder."""

from collections.abc import Mapping

from kvblocks.engine.tiers.block_bytes import BlockBytes, Row
from kvblocks.engine.tiers.carrier import Move
from kvblocks.tiers.disk import DiskStats, DiskStore
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.store import StoreStats


class HostPlace:
    """One piece of host memory with a row for each slot. All its pages are written to at the start."""

    def __init__(self, block_bytes: BlockBytes, num_slots: int) -> None:
        self._block_bytes = block_bytes
        self._arena = block_bytes.new_rows(num_slots)

    def store(self, move: Move) -> bool:
        """As `Place`. Never fails."""
        self._block_bytes.read(move.block_ids, [self._arena[slot] for slot in move.slots], move.after)
        return True

    def load(self, move: Move) -> bool:
        """As `Place`. Only this process has the arena, so what was stored is there."""
        self._block_bytes.write(move.block_ids, [self._arena[slot] for slot in move.slots], move.after)
        return True

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Nothing outlives the process."""

    def settle(self) -> None:
        """Nothing outlives the process."""

    def erase(self, slots: list[int]) -> None:
        """As `Place`."""
        self._arena[slots] = 0

    def close(self) -> None:
        """Does nothing: the arena is freed with this object."""

    @property
    def disk_stats(self) -> DiskStats | None:
        """None."""
        return None

    @property
    def store_stats(self) -> StoreStats | None:
        """None."""
        return None


class DiskPlace:
    """A `DiskStore`. Damaged blocks and failed writes make a transfer fail; the store counts and logs them.

    used_bytes: by column of a block's identity, how many of its first bytes its group uses. The bytes behind them may
    be left from a block of another group, perhaps of another tenant. Zeros are stored instead, so that a tenant's data
    can be deleted.
    """

    def __init__(
        self, block_bytes: BlockBytes, store: DiskStore, max_transfer_blocks: int, used_bytes: tuple[int, ...]
    ) -> None:
        self._block_bytes = block_bytes
        self._used_bytes = used_bytes
        self._store = store
        self._staging = None if block_bytes.is_on_host else block_bytes.new_rows(max_transfer_blocks)

    def store(self, move: Move) -> bool:
        """As `Place`."""
        rows = self._rows_for(move.block_ids)
        if self._staging is not None:
            self._block_bytes.read(move.block_ids, rows, move.after)
        for slot, identity, row in zip(move.slots, move.identities, rows, strict=True):
            # On a CPU this changes the block, in bytes that nobody reads.
            row[self._used_bytes[identity.column] :] = 0
            self._store.write([slot], [identity], row.data)
        return True

    def load(self, move: Move) -> bool:
        """As `Place`."""
        rows = self._rows_for(move.block_ids)
        for slot, identity, row in zip(move.slots, move.identities, rows, strict=True):
            if not self._store.read([slot], [identity], row.data):
                return False
        if self._staging is not None:
            self._block_bytes.write(move.block_ids, rows, move.after)
        return True

    def _rows_for(self, block_ids: list[int]) -> list[Row]:
        """Rows of host memory for blocks. On a CPU they are the blocks themselves."""
        return self._block_bytes.rows_of(block_ids) if self._staging is None else [*self._staging[: len(block_ids)]]

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """As `Place`."""
        self._store.remember(changes)

    def settle(self) -> None:
        """As `Place`."""
        self._store.sync()

    def erase(self, slots: list[int]) -> None:
        """As `Place`."""
        self._store.erase(slots)

    def close(self) -> None:
        """As `Place`."""
        self._store.close()

    @property
    def disk_stats(self) -> DiskStats | None:
        """As `Place`."""
        return self._store.stats

    @property
    def store_stats(self) -> StoreStats | None:
        """None."""
        return None
