"""The records of what gets cached and removed, for `take_events`: for the device and all tiers, in one order."""

from collections.abc import Hashable, Sequence

from kvblocks.core.attached import AttachedBlocks
from kvblocks.core.block import Run
from kvblocks.core.hit import CacheHit
from kvblocks.core.hooks import EventLog
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent, EventOptions
from kvblocks.hashing.extra_keys import decode_salt_and_lora
from kvblocks.hashing.scheme import HashScheme
from kvblocks.observe.shared_hashes import SharedHashes

DEVICE = "GPU"
"""The device in events, as vLLM calls it, whatever kind of device it is."""


class Records(EventLog):
    """The log of one medium: the device's or a tier's. attached: the device's, None where there is only one group."""

    def __init__(self, options: EventOptions, attached: AttachedBlocks | None = None, medium: str = DEVICE) -> None:
        super().__init__(medium)
        self.records: list[CacheEvent] = []
        """Those since last taken. All logs of a manager share this list."""
        self.options = options
        """What is recorded."""
        self._attached = attached
        self.group = None if attached is None else attached.layout.primary
        """The primary group, whose blocks are in runs; None where there is only one group, or none has full attention.
        """
        self._has_virtual = attached is not None and self.group is None  # virtual blocks make no records

    def of_tier(self, medium: str) -> EventLog | None:
        """Return the log of a tier, which shares `records`; None if that tier's changes aren't recorded."""
        if not self.options.tiers:
            return None
        log = Records(self.options, self._attached, medium)
        log.records = self.records
        return log

    def append(self, record: CacheEvent) -> None:
        """Add a record. O(1)."""
        self.records.append(record)

    def note_stored(self, run: Run, base: int, sequence_id: Hashable = None) -> None:
        """Record that `run` has grown from `base` blocks to its present length. O(blocks added)."""
        if self._has_virtual:
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
        if not self._has_virtual:
            self.records.append(BlockRemoved(tuple(names), self.group, self.medium))

    def note_cleared(self) -> None:
        """Record that the cache was reset. The device's log does this for all media."""
        if self.medium == DEVICE:
            self.records.append(AllBlocksCleared())

    def note_hit(self, hit: CacheHit) -> None:
        """Record that a sequence was allocated with a hit, for each group, and the state it goes on from. O(blocks)."""
        sequence_id, parts = hit.sequence.sequence_id, hit.parts
        if not self._has_virtual:
            names = tuple([block.block_hash or b"" for block in hit.blocks])
            self.records.append(BlocksHit(names, self.group, self.medium, sequence_id))
        if parts is None:
            return
        layout = parts.attached.layout
        for side_group, (first, blocks) in zip(layout.side_groups, parts.tables, strict=True):
            numbers = range(first, first + len(blocks))
            names = tuple([parts.attached.name_in_chain(side_group, hit.blocks, number) for number in numbers])
            if names:
                self.records.append(BlocksHit(names, side_group.group, self.medium, sequence_id))
        if parts.checkpoint is not None:
            name = hit.blocks[-1].block_hash or b""
            self.records.append(BlocksHit((name,), layout.state, self.medium, sequence_id))

    def take(self) -> list[CacheEvent]:
        """Return the records since the last call, oldest first, and forget them."""
        taken = [*self.records]
        self.records.clear()
        return taken


class Recording:
    """The records since the last `take`, for the `take_events` of a manager or a `PrefixCache`."""

    def __init__(self, log: Records, index: PrefixIndex, hash_scheme: HashScheme) -> None:
        """Record from now on what `index`, which must be empty, caches and removes, with digests of this scheme."""
        self.log = log
        """Where records are written."""
        self._shared_hashes = None if hash_scheme.are_unique else SharedHashes()
        index.record(log, hash_scheme)

    def take(self) -> list[CacheEvent]:
        """Return the changes since the last call, oldest first, and forget them.

        O(1); or O(blocks in the events) if several prefixes may share a digest.
        """
        events = self.log.take()
        return events if self._shared_hashes is None else self._shared_hashes.told(events)


def start_recording(options: EventOptions, index: PrefixIndex, hash_scheme: HashScheme) -> Recording:
    """Record from now on what `index`, which must be empty, caches and removes."""
    return Recording(Records(options, index.attached), index, hash_scheme)
