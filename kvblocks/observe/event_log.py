"""The records of what gets cached and removed, for `take_events`: of the device and of all tiers, in one order."""

from collections.abc import Hashable, Sequence

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.hashing import decode_names
from kvblocks.core.hit import CacheHit
from kvblocks.core.hooks import EventLog
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent, EventOptions

DEVICE = "GPU"
"""What vLLM calls the device in its events, whatever it is."""


class Records(EventLog):
    """The log of one place: the device's or a tier's.

    records: since last taken; those of all places of a manager. options: what is recorded. group: the primary group,
    of which runs are; None where there is only one. is_anchored: its blocks have no memory, and make no records.
    """

    def __init__(
        self, options: EventOptions, group: int | None = None, *, is_anchored: bool = False, medium: str = DEVICE
    ) -> None:
        super().__init__(medium)
        self.records: list[CacheEvent] = []
        self.options = options
        self.group = group
        self.is_anchored = is_anchored

    def of_tier(self, medium: str) -> EventLog | None:
        """Return the log of a tier, whose records stand among these; None if they aren't wanted."""
        if not self.options.tiers:
            return None
        log = Records(self.options, self.group, is_anchored=self.is_anchored, medium=medium)
        log.records = self.records
        return log

    def append(self, record: CacheEvent) -> None:
        """Add a record. O(1)."""
        self.records.append(record)

    def note_stored(self, run: Run, base: int) -> None:
        """Record that `run` has grown from `base` blocks to what it has now. O(blocks added)."""
        if self.is_anchored:
            return
        parent, position, _, _ = run.key
        above = (run, base - 1) if base else (parent, position)
        keys, size = run.extra_keys or {}, run.epoch.block_bytes
        added = range(base, len(run.blocks))
        salt, lora = decode_names(run.first_keys)
        stored = BlockStored(
            block_hashes=tuple([run.digest(index) for index in added]),
            parent_block_hash=None if above[0] is None else above[0].digest(above[1]),
            tokens=bytes(run.tokens[base * size : len(run.blocks) * size]),
            block_size=size // 4,
            extra_keys=tuple([(index - base, keys[index]) for index in added if index in keys]),
            group_idx=self.group,
            block_ids=tuple([run.blocks[index].block_id for index in added]),
            salt=salt,
            lora=lora,
            kind="full_attention",
            medium=self.medium,
            sequence_id=self.storing,
        )
        self.records.append(stored)

    def note_removed(self, names: Sequence[bytes]) -> None:
        """Record that prefixes of the primary group are cached no more, by their names."""
        if not self.is_anchored:
            self.records.append(BlockRemoved(tuple(names), self.group, self.medium))

    def note_cleared(self) -> None:
        """Record that nothing is cached any more. The device says so for all places."""
        if self.medium == DEVICE:
            self.records.append(AllBlocksCleared())

    def note_hit(self, hit: CacheHit) -> None:
        """Record that a sequence begins with a hit, by group. O(its blocks)."""
        if not self.is_anchored:
            self._append_hit(hit.blocks, hit.sequence.sequence_id)

    def _append_hit(self, blocks: list[KVCacheBlock], sequence_id: Hashable) -> None:
        names = tuple([block.block_hash or b"" for block in blocks])
        self.records.append(BlocksHit(names, self.group, self.medium, sequence_id))

    def take(self) -> list[CacheEvent]:
        """Return the records since the last call, oldest first, and forget them."""
        taken = [*self.records]
        self.records.clear()
        return taken
