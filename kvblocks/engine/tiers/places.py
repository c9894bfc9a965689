"""The built-in places on one machine: `HostPlace`, an arena in host memory, and `DiskPlace`, a folder."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from kvblocks import BlockIdentity, Tier
from kvblocks.engine.run.memory import read_memory
from kvblocks.engine.tiers.block_bytes import Row
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.place import Move, Place, Site
from kvblocks.tiers.disk import DiskFullError, DiskStats, DiskStore

logger = logging.getLogger("kvblocks.engine.tiers")

CPU = torch.device("cpu")

DEFAULT_DISK_SIZE = "8GiB"

LONG_PREFIX_TOKENS = 256
"""Prefixes of at least this many tokens are stored (on a disk or in a store) at once, others on their second use."""


class HostPlace(Place):
    """An arena of host memory with one row per slot. It belongs to this process alone, so loads never fail.

    The scheme is `host`, and the address is a size: bytes, a text, or a share of the memory that the pool leaves free.
    """

    def __init__(self, tier: Tier, arena: Row) -> None:
        self.tier = tier
        self._arena = arena

    @classmethod
    def check(cls, options: TierOptions) -> None:
        """As `Place`."""
        Place.check(options)
        _read_size(options)

    @classmethod
    def open(cls, options: TierOptions, site: Site) -> "HostPlace":
        """As `Place`. All pages of the arena are written to."""
        size = _read_size(options)
        free = site.free_bytes()
        num_bytes = int(size * free) if isinstance(size, float) else read_memory(size, CPU)
        if not site.num_block_bytes <= num_bytes <= free:
            raise options.wrong(
                f"at least {site.num_block_bytes} bytes, a block, and at most {free}, which are free", num_bytes
            )
        num_slots = num_bytes // site.num_block_bytes
        return cls(Tier("host", num_slots, site.num_block_bytes), site.new_rows(num_slots))

    def store(self, move: Move) -> bool:
        """As `Place`. Never fails."""
        move.copy_to([self._arena[slot] for slot in move.slots])
        return True

    def load(self, move: Move) -> bool:
        """As `Place`."""
        move.copy_from([self._arena[slot] for slot in move.slots])
        return True


class DiskPlace(Place):
    """A folder on a disk, by `DiskStore`.

    Damaged blocks and failed writes fail the transfer, and are counted and logged. A load and a store may run at the
    same time, on separate threads.

    The scheme is `disk`, and the address is a folder. used_bytes: for each column of a block's identity, how many of
    its leading bytes its group uses. The bytes after them may be left over from a block of another group or tenant.
    Zeros are stored instead, so that a tenant's data can be deleted completely.
    """

    def __init__(self, tier: Tier, store: DiskStore, folder: str, used_bytes: tuple[int, ...]) -> None:
        self.tier = tier
        self._store = store
        self._folder = folder
        self._used_bytes = used_bytes

    @classmethod
    def check(cls, options: TierOptions) -> None:
        """As `Place`."""
        if not options.address:
            raise options.wrong("a folder after the colon", options.address)
        options.size_in_bytes(DEFAULT_DISK_SIZE)

    @classmethod
    def open(cls, options: TierOptions, site: Site) -> "DiskPlace | None":
        """As `Place`. None if the folder's volume is full. Raises DiskError for a folder that can't be used."""
        try:
            store = DiskStore(
                Path(options.address).expanduser(),
                fingerprint=site.fingerprint(),
                num_block_bytes=site.num_block_bytes,
                block_size=site.block_size,
                max_bytes=options.size_in_bytes(DEFAULT_DISK_SIZE),
                secret=options.secret,
            )
        except DiskFullError as error:
            logger.warning("disk: serving without a disk, since there is no room for it: %s", error)
            return None
        tier = Tier(
            "disk",
            store.num_slots,
            site.num_block_bytes,
            store="reused",
            min_store_tokens=LONG_PREFIX_TOKENS,
            is_persistent=True,
        )
        return cls(tier, store, options.address, site.used_bytes)

    def store(self, move: Move) -> bool:
        """As `Place`."""
        for slot, identity, row in zip(move.slots, move.identities, move.fetch(), strict=True):
            # On a CPU this changes the block, in bytes that nobody reads.
            row[self._used_bytes[identity.column] :] = 0
            self._store.write([slot], [identity], row.data)
        return True

    def load(self, move: Move) -> bool:
        """As `Place`."""
        for slot, identity, row in zip(move.slots, move.identities, move.rows(), strict=True):
            if not self._store.read([slot], [identity], row.data):
                return False
        move.deliver()
        return True

    def stats(self) -> DiskStats:
        """As `Place`."""
        return self._store.stats

    def describe(self, num_cached_blocks: int) -> str:
        """As `Place`."""
        return f"{super().describe(num_cached_blocks)}, {num_cached_blocks} of them found in {self._folder}"

    def forget(self, salt: str | None, slots: list[int], timeout_s: float) -> None:  # noqa: ARG002  # as `Place`
        """As `Place`. It goes by slots, since nothing on the disk is found by its salt."""
        self._store.erase(slots)

    def close(self) -> None:
        """As `Place`."""
        self._store.close()

    def remembered(self) -> list[tuple[int, BlockIdentity]]:
        """As `Place`. O(slots)."""
        return self._store.remembered()

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """As `Place`."""
        self._store.remember(changes)

    def note_used(self, slots: list[int]) -> None:
        """As `Place`."""
        self._store.note_used(slots)

    def settle(self) -> None:
        """As `Place`."""
        self._store.sync()


def _read_size(options: TierOptions) -> float | str:
    """What an address says: a share of the free memory (0.5), or a text ("2GiB"). Raises InvalidArgumentError."""
    text = options.address
    try:
        size: float | str = float(text) if "." in text else text
    except ValueError:
        size = text
    read_memory(size, CPU, f"tiers: {options.scheme}")
    return size
