"""`Place`: where a tier's bytes are. Host memory, a disk and a shared store are places, and so is one of your own.

A place only moves bytes: the manager decides what is stored, loaded and evicted (`kvblocks.tiers`).
`examples/own_tier.py` is a complete one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kvblocks import BlockIdentity, Plan, Tier
from kvblocks.arguments import counted
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.memory import free_memory
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.tiers.block_bytes import BlockBytes, Row, Staging, new_rows
from kvblocks.engine.tiers.fingerprint import kv_fingerprint
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.tiers.store import SharedStore


class Site:
    """The engine that a place is opened for. Its pool isn't made yet.

    num_block_bytes, block_size: the bytes and the tokens of a block. num_blocks: the blocks of the pool. used_bytes:
    for each column of blocks (`BlockIdentity`), how many of a block's leading bytes the layers of its group, or a
    state, use.
    """

    def __init__(self, model: LoadedModel, plan: Plan, backend: Backend) -> None:
        self.num_block_bytes = plan.block_bytes
        self.block_size = plan.block_size
        self.num_blocks = plan.num_blocks
        self.used_bytes = plan.used_bytes
        self._model, self._plan, self._backend = model, plan, backend
        self._is_on_host = model.device.type == "cpu"

    def free_bytes(self) -> int:
        """The host memory that the pool will leave free, in bytes. Raises InvalidArgumentError if that is unknown."""
        return free_memory(torch.device("cpu")) - (self._plan.num_bytes if self._is_on_host else 0)

    def new_rows(self, num_rows: int) -> Row:
        """Return host memory for `num_rows` blocks, with all pages touched, and pinned if a GPU uses it."""
        return new_rows(num_rows, self.num_block_bytes, is_pinned=not self._is_on_host)

    def fingerprint(self) -> bytes:
        """Return 32 bytes that identify this engine's KV. Never load KV with another fingerprint. O(bytes of weights).

        A place that outlives the process needs this (`engine.tiers.fingerprint`).
        """
        return kv_fingerprint(self._model, self._plan, self._backend)


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, as a place sees it: block_ids[i] on the device, slots[i] in the tier, and the block's identity.

    blocks: the device's side. after: see `BlockBytes`. staging: host memory for the bytes, if blocks aren't in host
    memory. salt: the blocks' salt. max_blocks: the salt's quota in the tier, or None. first: the position of the first
    block in its prefix. before: the digests of the blocks before it, if there is a quota.

    A row is a uint8 array of a block's bytes in host memory. On a CPU the rows are the blocks themselves.
    """

    slots: list[int]
    block_ids: list[int]
    identities: list[BlockIdentity]
    blocks: BlockBytes
    staging: Staging
    after: Any = None
    salt: str | None = None
    max_blocks: int | None = None
    first: int = 0
    before: Sequence[bytes] = ()

    def fetch(self) -> list[Row]:
        """For a store: return the blocks' bytes as rows, one per slot, valid until `Place.store` returns."""
        rows = self.rows()
        if not self.blocks.is_on_host:
            self.blocks.read(self.block_ids, rows, self.after)
        return rows

    def rows(self) -> list[Row]:
        """For a load: return the rows to fill, one per slot. Then call `deliver`."""
        if self.blocks.is_on_host:
            return self.blocks.rows_of(self.block_ids)
        return self.staging.rows(len(self.block_ids))

    def deliver(self) -> None:
        """For a load: copy the filled rows to the blocks."""
        if not self.blocks.is_on_host:
            self.blocks.write(self.block_ids, self.rows(), self.after)

    def copy_to(self, rows: Sequence[Row]) -> None:
        """For a store: copy the blocks directly to rows of the place's own memory."""
        self.blocks.read(self.block_ids, rows, self.after)

    def copy_from(self, rows: Sequence[Row]) -> None:
        """For a load: copy rows of the place's own memory directly to the blocks."""
        self.blocks.write(self.block_ids, rows, self.after)


class Place(ABC):
    """Where a tier's bytes are. Make a subclass, and give it a scheme with `register_place`.

    tier: the tier as the manager knows it; `open` sets it. shared: for a store that several servers share, the client
    that is asked for each prompt which blocks are there; None for all other places.

    Only the tier's carrier calls a place: `load` on one thread, and everything else on another. `stats` and `describe`
    may be called on any thread. An exception fails the transfer, and nothing else.
    """

    tier: Tier
    shared: SharedStore | None = None

    @classmethod
    def check(cls, options: TierOptions) -> None:
        """Raise InvalidArgumentError for options that can't be right. Called before a model is loaded."""
        options.expect_no_size()
        options.expect_no_secret()

    @classmethod
    @abstractmethod
    def open(cls, options: TierOptions, site: Site) -> Self | None:
        """Open the place. Return None, after logging a warning, if the engine should run without it.

        Raises InvalidArgumentError, and KVBlocksError for a place that can't be used.
        """

    @abstractmethod
    def store(self, move: Move) -> bool:
        """Copy blocks to slots. Return whether all of them are there now."""

    @abstractmethod
    def load(self, move: Move) -> bool:
        """Copy slots to blocks. Return whether all blocks now hold what they should.

        If bytes can be damaged, or written by others, compare them with the blocks' complete identities.
        """

    def stats(self) -> object | None:
        """Return the place's own counts as a dataclass of numbers, or None."""
        return None

    def describe(self, num_cached_blocks: int) -> str:
        """Return a readable line about the place. num_cached_blocks: how many blocks the manager now knows in it."""
        del num_cached_blocks
        return f"{self.tier.name} cache: {counted(self.tier.num_blocks, 'block')}"

    def forget(self, salt: str | None, slots: list[int], timeout_s: float) -> None:  # noqa: B027  # as `close`
        """Durably delete what the place has of a salt. Called only if the place outlives the process.

        slots: the slots that no lookup can find and no transfer uses. A place of this process alone overwrites them; a
        shared one deletes by salt. Takes little more than timeout_s, and may run twice for one deletion. Raises
        DiskError or StoreError, whose message says what is left and what to do; the deletion may then be requested
        again.
        """

    def close(self) -> None:  # noqa: B027  # most places have nothing to end
        """Close the place. No call follows, except perhaps a second `close`."""

    # For places whose tier is persistent.

    def remembered(self) -> Iterable[tuple[int, BlockIdentity]]:
        """What slots hold from an earlier process: pairs of slot and identity, the least recently used first."""
        return ()

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:  # noqa: B027
        """Note what slots hold from now on; None means nothing."""

    def note_used(self, slots: list[int]) -> None:  # noqa: B027
        """Note that the prefixes that end in these slots were used, in this order."""

    def settle(self) -> None:  # noqa: B027
        """Make durable what `remember` and `note_used` have noted."""
