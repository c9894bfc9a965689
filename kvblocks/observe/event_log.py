"""The records of what gets cached and removed, for `take_events`: for the device and all tiers, in one order."""

from collections.abc import Hashable, Sequence

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.hit import CacheHit
from kvblocks.core.hooks import EventLog
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent, EventOptions
from kvblocks.hashing.extra_keys import decode_salt_and_lora

DEVICE = "GPU"
"""The device in events, as vLLM calls it, whatever kind of device it is."""


class Records(EventLog):
    """The log of one medium: the device's or a tier's.

    records: since last taken; all logs of a manager share this list. options: what is recorded. group: the primary
    group, whose blocks are in runs; None where there is only one group. is_anchored: whether anchors, which make no
    records, stand in for its blocks.
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
        """Return the log of a tier, which shares `records`; None if that tier's changes aren't recorded."""
        if not self.options.tiers:
            return None
        log = Records(self.options, self.group, is_anchored=self.is_anchored, medium=medium)
        log.records = self.records
        return log

    def append(self, record: CacheEvent) -> None:
        """Add a record. O(1)."""
        self.records.append(record)

    def note_stored(self, run: Run, base: int, sequence_id: Hashable = None) -> None:
        """Record that `run` has grown from `base` blocks to its present length. O(blocks added)."""
        if self.is_anchored:
            return
        parent, position, _, _ = run.key
        above = (run, base - 1) if base else (parent, position)
        keys, size = run.extra_keys or {}, run.epoch.block_bytes
        added = range(base, len(run.blocks))
        salt, lora = decode_salt_and_lora(run.first_keys)
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
            sequence_id=sequence_id,
        )
        self.records.append(stored)

    def note_removed(self, names: Sequence[bytes]) -> None:
        """Record that prefixes of the primary group stopped being cached, by their names."""
        if not self.is_anchored:
            self.records.append(BlockRemoved(tuple(names), self.group, self.medium))

    def note_cleared(self) -> None:
        """Record that the cache was reset. The device's log does this for all media."""
        if self.medium == DEVICE:
            self.records.append(AllBlocksCleared())

    def note_hit(self, hit: CacheHit) -> None:
        """Record that a sequence was allocated with a hit. O(its blocks)."""
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
